"""A Python that has imported what snippets import, forked for each document: a fresh process without its five seconds of imports."""

import contextlib
import io
import json
import multiprocessing
import os
import traceback

PRELOADED = [
    "retape.torch.planning.plan_search",
    "retape.torch.ode.odeint",
    "torch.testing",
    "transformers.models.gpt2.modeling_gpt2",
]


def run_blocks(name, blocks, folder, environment):
    """Run (line, text) blocks in one namespace; what each of them printed, or an AssertionError with what was said before the end."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    answer, said = folder / "answer.json", folder / "said.txt"
    child = context.Process(target=_run, args=(name, blocks, str(folder / "work"), environment, str(answer), str(said)))
    child.start()
    child.join()
    assert child.exitcode == 0, said.read_text(encoding="utf-8")
    return json.loads(answer.read_text(encoding="utf-8"))


def _run(name, blocks, folder, environment, answer, said):
    """In the child. Line numbers are those of the document."""
    os.makedirs(folder)
    os.chdir(folder)
    os.environ.update(environment)
    target = os.open(said, os.O_WRONLY | os.O_CREAT)
    os.dup2(target, 1)
    os.dup2(target, 2)
    space, printed = {"__name__": "__main__"}, []
    try:
        for line, text in blocks:
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile("\n" * (line - 1) + text, name, "exec"), space)
            printed.append(out.getvalue())
    except BaseException:
        traceback.print_exc()
        raise
    with open(answer, "w", encoding="utf-8") as file:
        json.dump(printed, file)

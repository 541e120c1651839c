"""A Python that has imported what tests need, forked for each use: a fresh process without its seconds of imports.

`start` runs a function in such a process; `run_blocks` runs the code of a document in one. Ranks of a process group are forks of it too
(`forked.py`).
"""

import contextlib
import gc
import io
import json
import multiprocessing
import os
import traceback

PRELOADED = [
    "retape.api",
    "retape.torch.adaptive.manager",
    "retape.torch.ode.odeint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torch.testing",
    "transformers.models.gpt2.modeling_gpt2",
]


def start(function, *arguments, said):
    """Start `function` in a process of its own, with what it prints in the file `said`; return the process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    child = context.Process(target=_run, args=(function, arguments, str(said)))
    child.start()
    return child


def _run(function, arguments, said):
    target = os.open(said, os.O_WRONLY | os.O_CREAT)
    os.dup2(target, 1)
    os.dup2(target, 2)
    gc.freeze()  # each fit calls the garbage collector, which need not visit what was imported
    function(*arguments)


def run_blocks(name, blocks, folder, environment):
    """Run (line, text) blocks in one namespace; what each of them printed, or an AssertionError with what was said before the end."""
    answer, said = folder / "answer.json", folder / "said.txt"
    child = start(_run_blocks, name, blocks, str(folder / "work"), environment, str(answer), said=said)
    child.join()
    assert child.exitcode == 0, said.read_text(encoding="utf-8")
    return json.loads(answer.read_text(encoding="utf-8"))


def _run_blocks(name, blocks, folder, environment, answer):
    """In the child. Line numbers are those of the document."""
    os.makedirs(folder)
    os.chdir(folder)
    os.environ.update(environment)
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

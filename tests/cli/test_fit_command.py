"""`retape fit` from outside: what it prints, what it saves, and how it refuses."""

import os
import re
import subprocess
import sys

import pytest

from retape.cli.main import main
from retape.core.fit_record import FitRecord

SOURCE = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
    def forward(self, x):
        return x + self.down(self.up(x).tanh())

def model():
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(6)))

def loss(model, batch):
    return model(batch).square().mean()

def make():
    return model(), torch.randn(64, 16), loss

def no_loss():
    return model(), torch.randn(64, 16)

def number():
    return 3

def with_optimizer():
    made = model()
    return made, torch.randn(64, 16), loss, torch.optim.AdamW(made.parameters())

def five():
    return model(), 1, 2, 3, 4

def no_step():
    return model(), torch.randn(64, 16), 3

def no_optimizer():
    return model(), torch.randn(64, 16), loss, 3

def broken():
    raise KeyError("mine")

def broken_in_lines():
    raise ValueError("one" + chr(10) + "two")

def wrong_shape():
    return model(), torch.randn(64, 17), loss

not_a_function = 3
"""


@pytest.fixture
def place(tmp_path):
    (tmp_path / "mine.py").write_text(SOURCE, encoding="utf-8")
    return lambda name: f"{tmp_path / 'mine.py'}:{name}"


@pytest.fixture(autouse=True)
def as_it_was():
    """The user's file is put among the modules and its folder on the path, as Python does; tests take both away again."""
    before = list(sys.path)
    yield
    sys.path[:] = before
    sys.modules.pop("retape_user_file", None)


def test_it_explains_draws_and_saves(place, tmp_path, capsys):
    saved, picture = tmp_path / "fit.json", tmp_path / "frontier.svg"
    arguments = ["fit", place("make"), "--budget", "0.5", "--json", str(saved), "--plot", str(picture)]
    assert main(arguments) == 0
    printed = capsys.readouterr()
    record = FitRecord.from_json(saved.read_text(encoding="utf-8"))
    assert record.model == "Sequential"
    assert record.measured.peak_bytes <= record.budget_bytes
    assert printed.out.startswith("regions")
    assert "more time" in printed.out
    assert "seconds of a step over bytes" in printed.out
    assert "● this plan" in printed.out
    assert "promised" in printed.err
    assert picture.read_text(encoding="utf-8").startswith("<svg")


def test_the_saved_fit_goes_on_the_model_again(place, tmp_path):
    import torch

    import retape
    from retape.cli.fit import call, load_function

    saved = tmp_path / "fit.json"
    assert main(["fit", place("make"), "--budget", "0.5", "--json", str(saved)]) == 0
    model, batch, step, _ = call(load_function(place("make")), place("make"))
    fitted = retape.apply(model, saved)
    assert not fitted.record.assignment.keeps_everything
    assert retape.verify(model, batch, step=step).equal
    fitted.remove()
    assert all(type(module).__module__ != "retape" for module in model.modules())
    assert torch.is_grad_enabled()


def test_one_is_a_byte_as_in_python(place, capsys):
    said = refused(capsys, place("make"), "--budget", "1")
    assert "No plan fits in 1 B" in said
    assert "a share of the activations is a float, such as 0.5 or 1.0" in said


@pytest.mark.parametrize("text", ["1.5", "nan", "-3", "much", "0", "8 parsecs"])
def test_a_budget_that_cannot_be_meant(text, place, capsys):
    assert re.search(
        "is not a fraction|is not a number of bytes|cannot hold", refused(capsys, place("make"), f"--budget={text}")
    )


def test_an_optimizer_and_every_option(place, tmp_path, capsys):
    """With an optimizer the bytes before the step have its state."""
    plain, whole = tmp_path / "plain.json", tmp_path / "whole.json"
    assert main(["fit", place("make"), "--budget", "0.5", "--json", str(plain)]) == 0
    more = ["--options", "all", "--cache", str(tmp_path / "plans")]
    arguments = ["fit", place("with_optimizer"), "--budget", "0.5", *more, "--json", str(whole)]
    assert main(arguments) == 0
    weights = 4 * 6 * (16 * 64 + 64 + 64 * 16 + 16)
    least = [FitRecord.load(path).measured.base_bytes for path in (plain, whole)]
    assert least[1] - least[0] >= 2 * weights
    assert len(list((tmp_path / "plans").iterdir())) == 1
    with pytest.raises(SystemExit):
        main(["fit", place("make"), "--budget", "0.5", "--options", "some"])
    assert "invalid choice: 'some'" in capsys.readouterr().err


REFUSALS = {
    "make": (["--budget", "much"], r"'much' is not a number of bytes"),
    "missing": (["--budget", "0.5"], r"has no function 'missing'. Give FILE.py:FUNCTION"),
    "not_a_function": (["--budget", "0.5"], r"has no function 'not_a_function'"),
    "number": (["--budget", "0.5"], r"number\(\) returned a int. Give FILE.py:FUNCTION"),
    "five": (["--budget", "0.5"], r"five\(\) returned 5 things. Give"),
    "no_step": (["--budget", "0.5"], r"no_step\(\) returned a int as its step, which is not callable. Give"),
    "no_optimizer": (["--budget", "0.5"], r"got a int as its optimizer; give one torch.optim.Optimizer"),
    "broken_in_lines": (["--budget", "0.5"], r"failed at line \d+: ValueError: one two. Correct the file"),
    "broken": (["--budget", "0.5"], r"broken\(\) failed at line \d+: KeyError: 'mine'. Correct the file"),
    "wrong_shape": (["--budget", "0.5"], r"failed: RuntimeError: .*Check that it runs without retape"),
    "no_loss": (["--budget", "0.5"], r"not a scalar loss"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_bad_input_is_a_message_and_exit_code_2(place, capsys, name):
    arguments, message = REFUSALS[name]
    assert main(["fit", place(name), *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.search(message, printed.err, re.S), printed.err
    said = [line for line in printed.err.splitlines() if line.startswith("retape: ")]
    assert "Traceback" not in printed.err
    assert len(said) == 1


def refused(capsys, *arguments):
    assert main(["fit", *arguments]) == 2
    return capsys.readouterr().err


def test_a_place_that_is_none(capsys, tmp_path):
    assert "'mine.py' names no function" in refused(capsys, "mine.py", "--budget", "0.5")
    assert "There is no file" in refused(capsys, f"{tmp_path / 'none.py'}:make", "--budget", "0.5")
    (tmp_path / "notes.txt").write_text("x", encoding="utf-8")
    assert "is no Python file" in refused(capsys, f"{tmp_path / 'notes.txt'}:make", "--budget", "0.5")


@pytest.mark.parametrize(
    ("source", "said"), [("1 / 0", "at line 1: ZeroDivisionError"), ("x = 1\ndef make(:", "at line 2: SyntaxError")]
)
def test_a_file_that_does_not_run(capsys, tmp_path, source, said):
    (tmp_path / "bad.py").write_text(source, encoding="utf-8")
    assert said in refused(capsys, f"{tmp_path / 'bad.py'}:make", "--budget", "0.5")


def test_a_budget_below_the_floor_names_it(place, capsys):
    said = refused(capsys, place("make"), "--budget", "1KiB")
    assert "the smallest" in said


@pytest.mark.parametrize(
    ("option", "file", "message"),
    [
        ("--json", "no/fit.json", r"Cannot write the fit to .*: there is no folder .*Give another file"),
        ("--report", ".", r"Cannot write the report to .*: Is a directory. Give another file"),
        ("--plot", "frontier.gif", r"names no known picture format"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_before_anything_runs(place, capsys, tmp_path, option, file, message):
    written = tmp_path / "fit.html" if option == "--json" else tmp_path / "fit.json"
    also = ["--report" if option == "--json" else "--json", str(written)]
    # `broken` is not called: its error would be another one.
    assert re.search(message, refused(capsys, place("broken"), "--budget", "1.0", option, str(tmp_path / file), *also))
    assert not written.exists()


def test_a_fit_that_fails_leaves_the_files_as_they_were(place, capsys, tmp_path):
    saved = tmp_path / "fit.json"
    saved.write_text("before", encoding="utf-8")
    assert "the smallest" in refused(capsys, place("make"), "--budget", "1KiB", "--json", str(saved))
    assert saved.read_text(encoding="utf-8") == "before"
    assert {each.name for each in tmp_path.iterdir()} - {"__pycache__"} == {"fit.json", "mine.py"}


def test_a_report_is_written(place, tmp_path):
    from retape.report.page.html import render_report

    saved, page = tmp_path / "fit.json", tmp_path / "fit.html"
    assert main(["fit", place("make"), "--budget", "0.5", "--json", str(saved), "--report", str(page)]) == 0
    record = FitRecord.from_json(saved.read_text(encoding="utf-8"))
    assert page.read_text(encoding="utf-8") == render_report(record)


def test_from_outside_in_ascii(place):
    done = subprocess.run(
        [sys.executable, "-m", "retape.cli.main", "fit", place("make"), "--budget", "0.6"],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.isascii()
    assert "o this plan" in done.stdout

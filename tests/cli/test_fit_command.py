"""`retape fit` from outside: what it prints, what it saves, and how it refuses."""

import os
import subprocess
import sys

import pytest

from retape.cli.fit import read_budget
from retape.cli.main import main
from retape.core.errors import InvalidInput
from retape.core.fit_record import FitRecord
from retape.core.problem import Budget

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

def four():
    return model(), 1, 2, 3

def broken():
    raise KeyError("mine")

def wrong_shape():
    return model(), torch.randn(64, 17), loss

not_a_function = 3
"""


@pytest.fixture
def place(tmp_path):
    (tmp_path / "mine.py").write_text(SOURCE, encoding="utf-8")
    return lambda name: f"{tmp_path / 'mine.py'}:{name}"


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch):
    """The user's file is put among the modules and its folder on the path, as Python does; tests take both away again."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
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
    model, batch, step = call(load_function(place("make")), place("make"))
    fitted = retape.apply(model, saved)
    assert not fitted.record.assignment.keeps_everything
    assert retape.verify(model, batch, step=step).equal
    fitted.remove()
    assert all(type(module).__module__ != "retape" for module in model.modules())
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("8GiB", Budget.of("8GiB")),
        ("0.5", Budget.of(0.5)),
        ("1", Budget.of(1.0)),
        ("1.0", Budget.of(1.0)),
        ("auto", Budget.of("auto")),
        ("123456", Budget.of(123456)),
    ],
)
def test_budgets(text, budget):
    assert read_budget(text) == budget


@pytest.mark.parametrize(("text", "count"), [("2MiB", 2 << 20), ("4096", 4096)])
def test_budgets_above_weights_and_gradients(text, count):
    assert read_budget(text, activations=True) == Budget.activations(count)


@pytest.mark.parametrize("text", ["1.5", "nan", "-3", "much", "0", "8 parsecs"])
def test_a_budget_that_cannot_be_meant(text):
    with pytest.raises(InvalidInput):
        read_budget(text)


REFUSALS = {
    "make": (["--budget", "much"], r"'much' is not a number of bytes"),
    "missing": (["--budget", "0.5"], r"has no function 'missing'. Give FILE.py:FUNCTION"),
    "not_a_function": (["--budget", "0.5"], r"has no function 'not_a_function'"),
    "number": (["--budget", "0.5"], r"number\(\) returned a int. Give FILE.py:FUNCTION"),
    "four": (["--budget", "0.5"], r"four\(\) returned 4 things. Give"),
    "broken": (["--budget", "0.5"], r"broken\(\) failed at line \d+: KeyError: 'mine'. Correct the file"),
    "wrong_shape": (["--budget", "0.5"], r"failed: RuntimeError: .*Check that it runs without retape"),
    "no_loss": (["--budget", "0.5"], r"not a scalar loss"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_bad_input_is_a_message_and_exit_code_2(place, capsys, name):
    import re

    arguments, message = REFUSALS[name]
    assert main(["fit", place(name), *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.search(message, printed.err, re.S), printed.err
    assert "Traceback" not in printed.err


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


def test_a_place_that_cannot_be_written(place, capsys, tmp_path):
    said = refused(capsys, place("make"), "--budget", "1.0", "--json", str(tmp_path / "no" / "fit.json"))
    assert "Cannot write the fit to" in said
    assert "Give another file" in said


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

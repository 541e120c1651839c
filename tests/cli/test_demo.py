"""`retape demo` with a tiny model: what it compares is compared, and what it prints is what was found."""

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from retape import demo
from retape.cli.demo import as_text, output_files, track_of
from retape.cli.main import main
from retape.core.errors import InvalidInput

TINY = ["--layers", "6", "--width", "32", "--heads", "2", "--tokens", "32", "--rows", "2", "--steps", "2"]
SIZES = demo.DemoConfig(layers=6, width=32, heads=2, tokens=32, rows=2, steps=2)


@pytest.fixture(scope="module")
def shown():
    return demo.demonstrate(SIZES)


def test_every_budget_trains_as_plainly(shown):
    assert [result.name for result in shown.results] == ["100%", "50%", "25%", "floor"]
    parameters = len(list(demo.GPT(SIZES).parameters()))
    for result in shown.results:
        assert result.losses == shown.losses
        assert (result.gradients_compared, result.gradients_equal) == (2 * parameters, 2 * parameters)
        assert result.record.measured.peak_bytes <= result.record.budget_bytes
    assert shown.as_promised


def test_tighter_budgets_take_less_memory(shown):
    peaks = [result.record.measured.peak_bytes for result in shown.results]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == 4
    assert shown.results[0].record.assignment.keeps_everything
    assert not shown.results[1].record.assignment.keeps_everything


def test_the_demo_prints_a_table_and_pictures(tmp_path, capsys):
    picture, page = tmp_path / "memory.svg", tmp_path / "report.html"
    assert main(["demo", *TINY, "--svg", str(picture), "--report", str(page)]) == 0
    printed = capsys.readouterr().out
    rows = {line.split()[0]: line for line in printed.splitlines() if line}
    for name in ("100%", "50%", "25%", "floor"):
        assert "yes: " in rows[name]
        assert f"budget {name}: peak" in printed
    assert "bit for bit" in printed
    assert f"The same as a picture: {picture}" in printed
    assert picture.read_text(encoding="utf-8").count('<path class="line') == 4
    assert printed.splitlines()[-1] == f"A report of the budget of 25%, for your browser: {page}"
    assert page.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert "GPT in " in page.read_text(encoding="utf-8")


def test_what_nobody_named_goes_to_a_new_folder(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    picture, page = output_files(Namespace(svg=None, report=None))
    assert picture.parent == page.parent
    assert picture.parent.parent == tmp_path
    assert output_files(Namespace(svg="a.svg", report=None))[0] == Path("a.svg")
    assert output_files(Namespace(svg="a.svg", report="b.html")) == (Path("a.svg"), Path("b.html"))


def test_a_difference_would_be_seen(shown):
    wrong = replace(shown.results[1], gradients_equal=shown.results[1].gradients_equal - 1)
    broken = replace(shown, results=(shown.results[0], wrong))
    assert not broken.as_promised
    text = as_text(broken, [track_of(result) for result in broken.results])
    assert "NO: " in text
    assert "NOT AS PROMISED" in text
    other = replace(shown.results[1], losses=(0.0, 0.0))
    assert not replace(shown, results=(other,)).as_promised
    record = replace(shown.results[1].record, budget_bytes=1)
    assert not replace(shown, results=(replace(shown.results[1], record=record),)).as_promised


def test_a_gradient_that_differs_in_one_bit_is_counted():
    one, other = (demo.Runner(name, demo.GPT(SIZES)) for name in ("one", "other"))
    other.model.load_state_dict(one.model.state_dict())
    batch = torch.randint(demo.VOCABULARY, (2, 33))
    for runner in (one, other):
        runner.gradients(batch, seed=0)
    one.compare(other)
    assert one.equal == one.compared
    gradient = next(other.model.parameters()).grad
    gradient.view(-1)[0] = torch.nextafter(gradient.view(-1)[0], torch.tensor(1.0))
    one.compare(other)
    assert one.compared - one.equal == 1


def test_threads_are_put_back():
    before = torch.get_num_threads()
    demo.demonstrate(replace(SIZES, steps=1))
    assert torch.get_num_threads() == before


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"layers": 0}, r"layers = 0; give a whole number >= 1"),
        ({"heads": 3}, r"A width of 320 is not a multiple of 3 heads"),
    ],
)
def test_sizes_that_cannot_be_meant(field, message):
    with pytest.raises(InvalidInput, match=message):
        demo.DemoConfig(**field)

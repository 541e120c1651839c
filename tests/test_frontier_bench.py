"""The benchmark of both frontiers: every row is checked, measured and timed; failures are reported; pictures are drawn from records."""

import json
import re
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from benchmarks.frontier import __main__ as command
from benchmarks.frontier.measuring import Laboratory, Verdict, in_turns
from benchmarks.frontier.models import SIZES, TINY, make
from benchmarks.frontier.own import Wish, fitted
from benchmarks.frontier.peers import peers, wrapped
from benchmarks.frontier.picture import Family, Measured, best_of, render_beside_svg
from benchmarks.frontier.rows import Run
from benchmarks.frontier.table import table
from benchmarks.frontier.ways import Skipped, Way, plain_way

import retape
from retape.core.errors import InvalidInput

ROOT = Path(__file__).parent.parent

CPU = torch.device("cpu")
SVG = "{http://www.w3.org/2000/svg}"
RECORDS = sorted((ROOT / "benchmarks" / "results").glob("frontier_*.json"))
PICTURES = sorted((ROOT / "docs" / "pictures").glob("frontier_*.svg"))


def case_of(name):
    return make(name, CPU, 0, TINY)


def scaled(case, factor, *, same_kernels=True, name="wrong"):
    """A peer whose first block gives a little more than it should."""
    return Way(
        name=name,
        family=Family.EAGER,
        forward=plain_way(case).forward,
        on=lambda: wrapped(case.blocks[:1], lambda forward: lambda *a, **k: forward(*a, **k) * factor),
        same_kernels=same_kernels,
    )


@pytest.fixture(scope="module")
def frontier_run():
    found = Run(case_of("bert"), started=0.0, limit_seconds=float("inf"))
    found.measure_peers(compiled=False, only=["checkpoint every block", "checkpoint 1/2", "save_on_cpu"])
    found.add(scaled(found.case, 1.01))
    found.measure_own([0.0], compiled=False)
    found.take_turns(1)
    return found


@pytest.fixture(scope="module")
def results(frontier_run):
    return frontier_run.results()


@pytest.fixture(scope="module")
def picture(frontier_run, results, tmp_path_factory):
    path = tmp_path_factory.mktemp("frontier") / "record.json"
    path.write_text(json.dumps({**frontier_run.case.about, "device": "cpu", "results": results}))
    return path


def measured_rows(results):
    return {name: row for name, row in results.items() if "skipped" not in row}


def check_rows(results):
    """What every row of every record says."""
    for name, row in measured_rows(results).items():
        assert row["peak_bytes"] > row["activation_bytes"] > 0, name
        assert row["seconds"] > 0, name
        assert row["spread_seconds"] >= 0, name
        assert row["rounds"] >= 1, name
        assert row["gradients"]["tensors"] > 0, name
        assert Verdict(row["gradients"]["verdict"]) in Verdict, name
        assert Family(row["family"]) in Family, name


# --- rows ---------------------------------------------------------------------------------------------------------


def test_every_row_has_gradients_peak_and_seconds(results):
    check_rows(results)
    families = [row["family"] for row in measured_rows(results).values()]
    assert families == [Family.PLAIN.value, *[Family.EAGER.value] * 3, *[Family.RETAPE_EXACT.value] * 4]


def test_everything_but_the_wrong_peer_is_right(results):
    wrong = [
        name for name, row in measured_rows(results).items() if row["gradients"]["verdict"] == Verdict.DIFFERS.value
    ]
    assert wrong == ["wrong"]
    exact = [row["gradients"] for row in measured_rows(results).values() if row["family"] == Family.RETAPE_EXACT.value]
    assert exact
    assert all(check["verdict"] == "equal" and check["distance"] == 0.0 == check["tolerance"] for check in exact)


def test_retape_is_held_against_every_peer_inside_its_peak(results):
    rivals = [name for name, row in measured_rows(results).items() if row["family"] == Family.EAGER.value]
    assert {"checkpoint every block", "checkpoint 1/2 of the blocks"} <= set(rivals)
    for name in rivals:
        own = results[results[name]["beside"]]
        assert own["peak_bytes"] <= results[name]["peak_bytes"]
        assert own["budget_bytes"] <= results[name]["peak_bytes"]
        assert results[name]["beside_over_this"] == own["seconds"] / results[name]["seconds"]


def test_the_sweep_ends_at_the_floor(results):
    own = [row for row in measured_rows(results).values() if row["family"] == Family.RETAPE_EXACT.value]
    assert min(own, key=lambda row: row["budget_bytes"]) is results["retape.fit at its floor"]
    assert "below the floor" in results["retape.fit at 0 of plain"]["skipped"]


def test_what_is_not_there_says_why(results):
    assert results["save_on_cpu"] == {"skipped": "the model is on the host"}
    assert "no head and loss to fuse" in results["retape.fit, options=ALL"]["skipped"]


def test_the_model_is_left_as_it_was(frontier_run, results):
    for module in frontier_run.case.model.modules():
        assert "forward" not in vars(module)
        assert type(module).__module__.split(".")[0] in ("transformers", "torch")
    assert frontier_run.laboratory.check(plain_way(frontier_run.case)).verdict is Verdict.EQUAL


def test_a_peer_that_fails_has_a_row_that_says_so(frontier_run):
    broken = Way(name="broken", family=Family.EAGER, forward=lambda: torch.ones(2) @ torch.ones(3))
    assert not frontier_run.add(broken)
    assert frontier_run.results()["broken"]["skipped"].startswith("failed: RuntimeError")


def test_the_step_that_counts_is_the_second_since_a_way_was_put_on(frontier_run):
    """In training nearly every step comes later than the first."""
    seen = []

    @contextmanager
    def on():
        seen.append(0)
        yield

    def forward():
        seen[-1] += 1
        return plain_way(frontier_run.case).forward()

    in_turns(frontier_run.laboratory, [Way(name="counted", family=Family.EAGER, forward=forward, on=on)], 2)
    assert seen == [1, 2, 2], "the first round warms up"


def test_without_time_no_more_fits_are_made():
    hurried = Run(case_of("gpt2"), started=0.0, limit_seconds=0.0)
    hurried.measure_peers(compiled=False, only=["checkpoint every block"])
    hurried.measure_own([0.5], compiled=False)
    hurried.take_turns(9)
    found = hurried.results()
    assert found["retape.fit at the peak of checkpoint every block"] == {"skipped": "no time left"}
    assert found["plain"]["rounds"] == 2


def test_a_fused_loss_is_within_its_tolerance():
    case = case_of("llama")
    laboratory = Laboratory(case)
    wish = Wish(name="all", family=Family.RETAPE_ALL, activation_bytes=10**9)
    kept = laboratory.measure(fitted(case, wish, laboratory.fixed_bytes)).step.peak_bytes
    own = fitted(case, replace(wish, activation_bytes=kept * 2 // 3), laboratory.fixed_bytes)
    measured = laboratory.measure(own)
    assert measured.step.peak_bytes <= kept * 2 // 3
    assert own.about["fused_loss"] is (measured.check.verdict is Verdict.WITHIN)
    assert case.model.loss_function.__name__ == "ForCausalLMLoss"  # taken off again


def test_what_retape_refuses_is_said():
    def refuse(*args, **keywords):
        raise retape.RetapeError(f"not with compile={keywords['compile']}")

    wish = Wish(name="compiled", family=Family.RETAPE_COMPILED, activation_bytes=1)
    assert fitted(case_of("bert"), wish, 0, refuse) == Skipped(name="compiled", why="refused: not with compile=True")


def test_a_fit_that_breaks_has_a_row_that_says_so():
    def broken(*args, **keywords):
        raise ZeroDivisionError("of nothing\nand more")

    found = Run(case_of("bert"), started=0.0, limit_seconds=float("inf"), fit=broken)
    found.measure_peers(compiled=False, only=["checkpoint every block"])
    found.measure_own([0.0], compiled=False)
    found.take_turns(1)
    row = found.results()["retape.fit at the peak of checkpoint every block"]
    assert row == {"skipped": "failed: ZeroDivisionError: of nothing"}


# --- gradients ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("factor", "same_kernels", "verdict"),
    [
        (1.0, True, Verdict.EQUAL),
        (1.000001, True, Verdict.DIFFERS),
        (1.000001, False, Verdict.WITHIN),
        (1.01, False, Verdict.DIFFERS),
    ],
)
def test_how_far_off_a_peer_may_be(frontier_run, factor, same_kernels, verdict):
    way = scaled(frontier_run.case, factor, same_kernels=same_kernels)
    with way.on():
        assert frontier_run.laboratory.check(way).verdict is verdict


def test_statistics_that_are_updated_twice_are_seen():
    case = case_of("resnet")
    laboratory = Laboratory(case)
    every = next(way for way in peers(case, compiled=False) if way.name == "checkpoint every block")
    with every.on():
        check = laboratory.check(every)
    assert check.verdict is Verdict.EQUAL
    assert not check.buffers_equal  # torch.utils.checkpoint runs BatchNorm twice
    assert laboratory.check(plain_way(case)).buffers_equal


@pytest.mark.parametrize("name", SIZES)
def test_every_model_has_peers_with_its_gradients(name):
    case = case_of(name)
    laboratory = Laboratory(case)
    assert laboratory.plain_repeats
    found = list(peers(case, compiled=False))
    ways = [way for way in found if isinstance(way, Way)]
    for way in ways:
        with way.on():
            verdict = laboratory.check(way).verdict
        assert verdict is Verdict.EQUAL or (verdict is Verdict.WITHIN and not way.same_kernels), way.name
    skipped = {way.name: way.why for way in found if isinstance(way, Skipped)}
    assert skipped.get("checkpoint sqrt(n) segments") == ("the blocks are no chain" if name == "unet" else None)


def test_a_peer_that_is_not_installed_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_remat", None)
    skipped = {way.name: way.why for way in peers(case_of("bert"), compiled=False) if isinstance(way, Skipped)}
    assert skipped["torch_remat every block"].startswith(
        ("torch_remat is not installed", "torch_remat does not import")
    )
    assert skipped["compile, memory budget 0.5"] == "--no-compile"


# --- pictures -----------------------------------------------------------------------------------------------------


def test_the_picture_has_a_mark_for_every_row(results, picture):
    drawn = ElementTree.fromstring(render_beside_svg(picture))
    said = [node.findtext(f"{SVG}title") for node in drawn.iter() if node.tag in (f"{SVG}circle", f"{SVG}path")]
    marked = [text.rpartition(": ")[0] for text in said if text]
    assert sorted(marked) == sorted(measured_rows(results))
    assert len(list(drawn.iter(f"{SVG}circle"))) == len(marked) - 1  # the wrong one is a cross
    for node in drawn.iter():
        assert 0 <= float(node.get("cx", node.get("x", 0))) <= 900
    assert "prefers-color-scheme: dark" in render_beside_svg(picture)


def test_the_best_are_those_that_nobody_beats():
    def way(name, size, seconds, wrong=False):
        return Measured(name=name, family=Family.EAGER, peak_bytes=size, seconds=seconds, wrong=wrong)

    ways = [way("a", 10, 5.0), way("b", 20, 6.0), way("c", 30, 4.0), way("d", 5, 1.0, wrong=True), way("e", 30, 4.5)]
    assert [best.name for best in best_of(ways)] == ["a", "c"]


def test_a_record_without_plain_is_a_clear_error(tmp_path):
    path = tmp_path / "other.json"
    path.write_text(json.dumps({"results": {"a": {"peak_bytes": 1, "seconds": 1.0}}}))
    with pytest.raises(InvalidInput, match=r"There is no row of plain autograd in .*benchmarks\.frontier wrote"):
        render_beside_svg(path)


def test_the_command_draws_a_record(picture, tmp_path, capsys):
    out = tmp_path / "drawn.svg"
    command.main(["--plot", str(picture), "--out", str(out)])
    assert capsys.readouterr().out.strip() == str(out)
    assert out.read_text(encoding="utf-8") == render_beside_svg(picture)


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_pictures_are_what_the_code_draws(path):
    record = ROOT / "benchmarks" / "results" / f"{path.stem}.json"
    assert path.read_text(encoding="utf-8") == render_beside_svg(record)


def test_the_command_prints_a_table(picture, results, capsys):
    command.main(["--table", str(picture)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| inside the peak of | MiB | its time | retape's | record |"
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]
    assert {row[0] for row in rows} == {name for name, row in results.items() if "beside" in row}
    assert [row[2] for row in rows if row[0] == "wrong"] == [f"{results['wrong']['slowdown']:.2f}"]
    assert [float(row[1]) for row in rows] == sorted((float(row[1]) for row in rows), reverse=True)


def test_the_table_of_the_readme_is_that_of_its_record():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.findall(r"\| inside the peak of .*?(?=\n\n)", text, re.S)
    assert len(shown) <= 1
    for found in shown:
        link = re.search(r"\]\((benchmarks/results/\S+)\)", found)[1]
        assert found == table(ROOT / link, link)


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_records_have_checked_rows(path):
    data = json.loads(path.read_text(encoding="utf-8"))
    assert {"device", "versions", "command", "seed", "model", "sizes", "dtype"} <= data.keys()
    check_rows(data["results"])
    own = [row for row in measured_rows(data["results"]).values() if Family(row["family"]).is_own]
    assert own
    assert all(row["gradients"]["verdict"] != Verdict.DIFFERS.value for row in own)
    assert all(row["activation_bytes"] <= row["budget_activation_bytes"] for row in own)

"""The report: well-formed, complete by itself, true to the record, and quick for a thousand regions."""

import re
import time
from dataclasses import replace

import pytest

from retape.core.assignment import Assignment, Choice
from retape.core.errors import InvalidInput
from retape.core.problem import Chain, Stage
from retape.core.record import MemorySample, Record
from retape.core.solve import frontier, solve
from retape.report.frontier import Peer, read_peers
from retape.report.page.actions import MOST_RUNS, shown_runs
from retape.report.page.html import render_report, write_report
from retape.report.page.memory import STRIPS, most_in_columns
from retape.report.page.regions import MOST_ROWS
from retape.report.page.replay import Level, Share, Span, SpanKind, replay
from retape.report.region_rows import region_rows
from support.report_page import Page, large_fit

MIB = 1 << 20
BUDGETS = [1.0, 0.5, "floor"]


in_every_budget = pytest.mark.parametrize("record", BUDGETS, indirect=True)


@pytest.fixture(scope="module")
def thousand():
    return large_fit(1000)


@in_every_budget
def test_values_read_back_are_the_records(record):
    values = Page(render_report(record)).values
    assert {name: float(value) for name, value in values.items()} == {
        "budget-bytes": record.budget_bytes,
        "promised-peak-bytes": record.plan.promised_peak_bytes,
        "measured-peak-bytes": record.measured.peak_bytes,
        "promised-seconds": record.plan.promised_seconds,
        "measured-seconds": record.measured.seconds,
        "plain-seconds": record.plain_seconds,
        "floor-bytes": record.floor_bytes,
        "store-all-bytes": record.frontier.store_all_bytes,
        "base-bytes": record.measured.base_bytes,
    }


@in_every_budget
def test_it_needs_nothing_but_itself(record):
    text = render_report(record)
    page = Page(text)
    assert not re.search(r"(https?:)?//|url\(|@import", text)
    assert not [given for _, given in page.elements if {"src", "href", "srcset"} & given.keys()]
    assert not page.count("script")
    assert "prefers-color-scheme: dark" in text


@in_every_budget
def test_every_class_that_is_used_has_a_style(record):
    text = render_report(record)
    sheet = text[text.index("<style>") : text.index("</style>")]
    used = {name for _, given in Page(text).elements for name in (given.get("class") or "").split()}
    assert not {name for name in used if not re.search(rf"\.{name}\b", sheet)}


@in_every_budget
def test_the_table_has_the_rows_of_the_fit(record):
    rows = Page(render_report(record)).section("regions").iter("tr")
    found = [(int(row.get("data-count")), int(row.get("data-held-bytes"))) for row in rows if row.get("data-count")]
    assert found[:-1] == [(row.count, row.held_bytes) for row in region_rows(record)]
    assert found[-1] == (2, 4 * MIB)  # glue


def test_the_table_says_what_is_dropped_and_why(fit_in):
    page = Page(render_report(fit_in(fit_in(1.0).frontier.floor_bytes)))
    cells = [["".join(cell.itertext()) for cell in row.iter("td")] for row in page.section("regions").iter("tr")]
    segment = next(row for row in cells if "segment" in row)
    assert segment[7] == "dropped after blocks.0"
    assert "run again from the input of blocks.0" in segment[9]


def test_moved_bytes_have_their_column(fit_in):
    record = fit_in(fit_in(1.0).chain.fixed_bytes + 40 * MIB)
    stages = tuple(
        replace(stage, options=tuple(replace(way, moved_bytes=3 * MIB) for way in stage.options))
        for stage in record.chain.stages
    )
    moved = replace(record, chain=replace(record.chain, stages=stages))
    page = Page(render_report(moved))
    cells = [["".join(cell.itertext()) for cell in row.iter("td")] for row in page.section("regions").iter("tr")]
    select = next(row for row in cells if "select" in row)
    assert select[4:7] == ["4.00 MiB", "3.00 MiB", "3.00 MiB"]  # held, dropped, moved: 10 in all


@in_every_budget
def test_pictures_have_their_parts(record):
    page = Page(render_report(record, peers=(Peer(name="other <way>", peak_bytes=120 * MIB, seconds=0.3),)))
    assert page.count("line", **{"class": "budget"}) == 5  # in three pictures, and in two legends
    for kind in ("floor mark", "keep-all mark", "plan mark", "ring", "peer mark"):
        assert page.count("circle", **{"class": kind}) == 1 + (kind == "ring")
    assert page.count("path", **{"class": "line plain"}) == 1
    assert page.count("path", **{"class": "line measured"}) == 1
    assert page.count("rect", **{"class": "strip"}) == STRIPS
    titles = "\n".join(page.section("frontier").itertext())
    assert "other <way>: 120.00 MiB, 300 ms" in titles


@in_every_budget
def test_every_run_of_the_plan_is_drawn(record):
    page = Page(render_report(record))
    kinds = [span.kind for span in replay(record.chain, record.plan.actions()).spans]
    for kind in SpanKind:
        drawn = page.count("rect", **{"class": f"span b-{kind.name.lower()}"})
        assert drawn == kinds.count(kind)


def test_a_peak_above_the_budget_is_said(fit_in):
    record = fit_in(0.5)
    for more, verdict in ((0, "Inside the budget"), (1, "ABOVE the budget")):
        measured = replace(record.measured, peak_bytes=record.budget_bytes + more)
        page = Page(render_report(replace(record, measured=measured)))
        assert [part.text for part in page.tree.iter("span") if "verdict" in part.get("class")] == [verdict]


def test_names_are_escaped(fit_in):
    page = Page(render_report(fit_in(0.5, model='<b>&"x"')))
    assert page.tree.findtext(".//h1").startswith('<b>&"x" in ')
    assert not page.count("b")


def test_without_a_timeline_there_is_no_measured_line(fit_in):
    record = fit_in(0.5, measured=Record(peak_bytes=150 * MIB, base_bytes=100 * MIB, seconds=0.2, reserved_bytes=MIB))
    page = Page(render_report(record))
    assert not page.count("path", **{"class": "line measured"})
    assert page.values["reserved-bytes"] == str(MIB)


def test_a_step_that_takes_no_time_can_be_drawn(fit_in):
    chain = Chain(
        stages=(Stage(forward_seconds=0.0, backward_seconds=0.0, state_bytes=0, tape_bytes=MIB, name="only"),)
    )
    record = replace(
        fit_in(1.0),
        chain=chain,
        plan=solve(chain, 1.0),
        frontier=frontier(chain),
        budget_bytes=MIB,
        assignment=Assignment(choices=(Choice(name="only", slots=1),)),
        measured=Record(peak_bytes=MIB, seconds=0.0, timeline=(MemorySample(seconds=0.0, live_bytes=MIB),)),
    )
    page = Page(render_report(record))
    assert int(page.values["promised-peak-bytes"]) == MIB
    assert page.section("regions").findtext("h2") == "1 region"


# --- size ---------------------------------------------------------------------------------------------------------


def test_a_thousand_regions_stay_small_and_quick(thousand):
    begin = time.process_time()
    text = render_report(thousand)
    assert time.process_time() - begin < 3.0
    assert len(text.encode()) < 2_000_000
    page = Page(text)
    assert len(page.elements) < 3000
    assert page.count("tr") < MOST_ROWS + 4


def test_more_kinds_than_rows_are_summed():
    many = large_fit(300, kinds=300)
    rows = region_rows(many)
    assert len(rows) > MOST_ROWS
    table = Page(render_report(many)).section("regions")
    found = [(int(row.get("data-count")), int(row.get("data-held-bytes"))) for row in table.iter("tr") if row.keys()]
    assert len(found) == MOST_ROWS + 1
    assert sum(count for count, _ in found) == 300
    assert found[-1][1] == sum(row.count * row.held_bytes for row in rows[MOST_ROWS:])


def test_runs_are_joined_and_nothing_is_lost(thousand):
    spans = replay(thousand.chain, thousand.plan.actions()).spans
    runs, left_out = shown_runs(spans)
    assert len(spans) > 2000
    assert len(runs) <= MOST_RUNS
    assert left_out == 0
    for kind in SpanKind:
        stages = [abs(run.last - run.first) + 1 for run in runs if run.kind is kind]
        assert sum(stages) == sum(span.kind is kind for span in spans)
        busy = sum(run.busy_seconds for run in runs if run.kind is kind)
        assert busy == pytest.approx(sum(s.end_seconds - s.begin_seconds for s in spans if s.kind is kind))


def test_runs_are_not_joined_across_a_pause():
    spans = [
        Span(kind=SpanKind.BACKWARD, stage=stage, begin_seconds=at, end_seconds=at + 1.0)
        for stage, at in ((5, 0.0), (4, 1.5), (3, 3.0), (2, 40.0), (1, 41.0), (0, 42.0))
    ]
    runs, left_out = shown_runs(spans, most=3)
    assert [(run.first, run.last, run.busy_seconds) for run in runs] == [(5, 3, 3.0), (2, 0, 3.0)]
    assert left_out == 0


def test_what_cannot_be_joined_leaves_the_shortest_out(fit_in):
    record = fit_in(1.0)
    spans = replay(record.chain, record.plan.actions()).spans
    mixed = [spans[at] for at in (0, 2, 4, 6, 9, 11, 13, 15, 1, 3, 5)]  # no two neighbours one after the other
    runs, left_out = shown_runs(mixed, most=4)
    assert left_out == len(mixed) - 4
    assert min(run.busy_seconds for run in runs) >= sorted(s.end_seconds - s.begin_seconds for s in mixed)[-4] - 1e-12


def test_a_steep_frontier_is_drawn_by_logarithms(fit_in):
    record = fit_in(0.5)
    first, *points = record.frontier.points
    plain = record.plain_seconds
    for times, steep in ((20, False), (64, True)):
        slow = replace(first, seconds=times * plain)
        frontier = replace(record.frontier, points=(slow, *points))
        text = " ".join(Page(render_report(replace(record, frontier=frontier))).section("frontier").itertext())
        assert ("The scale of the seconds is logarithmic" in text) == steep
        assert f"{times}.00x keeping all" in text


def test_a_column_shows_its_highest_level():
    levels = [
        Level(seconds=at, parts=(size,) + (0,) * (len(Share) - 1))
        for at, size in ((0.0, 1), (0.4, 9), (0.5, 2), (1.0, 3), (3.0, 4))
    ]
    assert [level.parts[0] for level in most_in_columns(levels, 4.0, 4)] == [9, 3, 3, 4]
    assert [level.parts[0] for level in most_in_columns(levels, 4.0, 8)] == [9, 2, 3, 3, 3, 3, 4, 4]


# --- files --------------------------------------------------------------------------------------------------------


def test_a_place_that_cannot_be_written(fit_in, tmp_path):
    with pytest.raises(
        InvalidInput, match=r"Cannot write the report to '.*': No such file or directory\. Give another"
    ):
        write_report(fit_in(0.5), tmp_path / "no" / "x.html")
    with pytest.raises(InvalidInput, match="Cannot write the report"):
        write_report(fit_in(0.5), "a\0b")


def test_peers_are_read_and_others_passed_over(tmp_path):
    file = tmp_path / "peers.json"
    file.write_text('{"results": {"plain": {"peak_bytes": 5, "seconds": 2}, "note": "x", "half": {"seconds": 1}}}')
    assert read_peers(file) == (Peer(name="plain", peak_bytes=5, seconds=2.0),)


@pytest.mark.parametrize("text", ["{}", "[]", '{"results": {"plain": {"peak_bytes": -1, "seconds": 2}}}'])
def test_a_file_without_peers(tmp_path, text):
    file = tmp_path / "peers.json"
    file.write_text(text)
    with pytest.raises(
        InvalidInput, match=r"There are no peers in '.*'\. Give a JSON file whose \"results\" maps names"
    ):
        read_peers(file)
    file.write_text("{")
    with pytest.raises(InvalidInput, match=r"Cannot read the peers of '.*': Expecting"):
        read_peers(file)
    with pytest.raises(InvalidInput, match=r"Cannot read the peers of '.*': No such file"):
        read_peers(tmp_path / "none.json")


def test_a_narrow_screen_has_rows_as_lists_and_pictures_that_scroll(fit_in):
    """Each cell of the table has its head beside it, and every picture is in a frame of its own."""
    text = render_report(fit_in(0.5))
    assert "@media (max-width: 640px)" in text
    cells = re.findall(r"<td([^>]*)>", text)
    assert cells
    assert all('class="name"' in cell or "data-head=" in cell for cell in cells)
    assert text.count('<div class="scroll picture"><svg') == len(re.findall(r'<svg id="[a-z]+-picture"', text))


def test_names_on_the_page_leave_out_what_all_begin_with(fit_in):
    record = fit_in(0.5)
    choices = tuple(replace(each, name=f"base_model.model.{each.name}") for each in record.assignment.choices)
    text = render_report(replace(record, assignment=replace(record.assignment, choices=choices)))
    assert "Names are of base_model.model." in text
    assert '<td class="name">blocks.0' in text

"""A fit explained: the rows add up to the plan, and say what is held, what is run again and why."""

from dataclasses import replace

import pytest

from retape.core.machine import simulate
from retape.core.problem import OptionKind
from retape.core.record import Record
from retape.core.units import format_bytes
from retape.report.fit_text import explain, terminal_width, why
from retape.report.page.html import render_fit_html
from retape.report.region_rows import common_prefix, folded, glue_row, region_rows, shortened, stage_uses

MIB = 1 << 20
EVERY = [1.0, 0.8, 0.6, 0.5, 0.4, "floor"]


@pytest.fixture
def fit_to(fit_in):
    return lambda budget: fit_in(fit_in(1.0).frontier.floor_bytes if budget == "floor" else budget)


@pytest.mark.parametrize("budget", EVERY)
def test_rows_add_up_to_what_the_plan_promises(fit_to, budget):
    record = fit_to(budget)
    rows = region_rows(record)
    assert sum(row.count for row in rows) == 6
    more = sum(row.count * row.extra_seconds for row in rows)
    assert more == pytest.approx(record.plan.promised_seconds - record.plain_seconds, abs=1e-12)


@pytest.mark.parametrize("budget", EVERY)
def test_runs_are_those_of_the_machine(fit_to, budget):
    record = fit_to(budget)
    uses = stage_uses(record.chain, record.plan.actions())
    outcome = simulate(record.chain, record.plan.actions())
    assert sum(use.runs for use in uses) - record.chain.length == outcome.rerun_steps
    assert sum(use.held_bytes for use in uses) + record.chain.fixed_bytes <= record.plan.promised_peak_bytes


def test_a_generous_budget_says_that_nothing_is_dropped(fit_in):
    text = explain(fit_in(1.0))
    row = next(line for line in text.splitlines() if line.startswith("blocks.0-5"))
    assert "fits, so nothing is dropped" in row
    assert row.split()[1:6] == ["6", "keep", "5", "of", "5"]
    assert "1.00x keeping all" in text


def test_a_select_names_what_is_large_and_cheap(fit_in):
    record = fit_in(fit_in(1.0).chain.fixed_bytes + 40 * MIB)
    (row,) = [row for row in region_rows(record) if row.option is OptionKind.SELECT]
    assert (row.held_slots, row.slots, row.held_bytes, row.dropped_bytes) == (2, 5, 4 * MIB, 6 * MIB)
    assert (row.rerun_seconds, row.spared_seconds) == (0.002, 0.008)
    text = " ".join(explain(record, width=400).split())
    assert "dropped 6.00 MiB: large and cheap, 2 ms to run again; held the rest: small and slow, 8 ms spared" in text
    assert "there is room for it; running it again would take 10 ms" in text


def test_what_is_moved_is_said(fit_in):
    (row,) = [row for row in region_rows(fit_in(fit_in(1.0).chain.fixed_bytes + 40 * MIB)) if row.held_slots == 2]
    moved = replace(row, option=OptionKind.OFFLOAD, moved_bytes=5 * MIB)
    said = "moved 5.00 MiB to the host until backward"
    assert why(moved, everything=False) == f"{said}; dropped 1.00 MiB, 2 ms to run again"
    assert why(replace(moved, moved_bytes=6 * MIB), everything=False) == said.replace("5", "6")


def test_what_other_ranks_hold_and_weights_that_stay_gathered(fit_in):
    row = replace(
        region_rows(fit_in(0.5))[0],
        option=OptionKind.RECOMPUTE,
        start="",
        all_bytes=8 * MIB,
        held_bytes=2 * MIB,
        moved_bytes=0,
        tiles=1,
    )
    assert why(row, everything=False) == "recomputed from its input: 6.00 MiB less held"
    in_parts = replace(row, sharded_bytes=MIB)
    said = "recomputed from its input: 5.00 MiB less held; 1.00 MiB of its input are on other ranks until then"
    assert why(in_parts, everything=False) == said
    kept = "fits, so nothing is dropped; its weights stay gathered until backward"
    assert why(replace(row, keep_gathered=True), everything=True) == kept


def test_large_and_cheap_is_not_said_where_it_is_not(fit_in):
    record = fit_in(fit_in(1.0).chain.fixed_bytes + 40 * MIB)
    stages = [
        replace(stage, options=tuple(replace(way, rerun_seconds=0.010) for way in stage.options))
        for stage in record.chain.stages
    ]
    text = explain(replace(record, chain=replace(record.chain, stages=tuple(stages))), width=400)
    assert "dropped 6.00 MiB: 10 ms to run again" in text
    assert "large" not in text


def test_the_floor_drops_inputs_in_a_segment(fit_to):
    record = fit_to("floor")
    segment = next(row for row in region_rows(record) if row.start)
    assert segment.start == "blocks.0"
    text = " ".join(explain(record, width=300).split())
    assert f"blocks.0-{segment.count - 1} {segment.count} segment" in text
    assert "inputs dropped too: run again from the input of blocks.0" in text


def test_glue_is_always_held(fit_in):
    glue = glue_row(fit_in(0.5))
    assert (glue.places, glue.held_bytes) == (2, 4 * MIB)
    assert any(
        line.startswith("saved outside regions") and "always held" in line for line in explain(fit_in(0.5)).splitlines()
    )


def test_totals_say_promise_measurement_quality_and_floor(fit_in):
    record = fit_in(0.5)
    text = explain(record)
    assert "100.00 MiB: weights, gradients, optimizer, batch" in text
    assert "150.00 MiB measured" in text
    assert "200 ms measured" in text
    assert f"({record.promised_slowdown:.2f}x keeping all)" in text
    assert f"bound by {record.frontier.binding}" in text
    assert "optimal: no plan of its kind is faster" in text
    assert "took 1.5 s on cpu" in text


def test_the_floor_is_not_above_the_peak_of_a_measured_plan(fit_in):
    record = fit_in(0.5)
    raised = replace(record, frontier=replace(record.frontier, floor_bytes=10 * record.budget_bytes))
    assert record.floor_bytes == record.frontier.floor_bytes
    assert raised.floor_bytes == max(record.plan.promised_peak_bytes, record.measured.peak_bytes)
    assert f"floor     {format_bytes(raised.floor_bytes)} with these regions" in explain(raised)


def test_a_plan_that_is_not_optimal_says_how_far_it_may_be(fit_in):
    record = fit_in(0.5)
    status = type(record.plan.status)("within")
    plan = replace(record.plan, status=status, lower_bound_seconds=record.plan.promised_seconds / 1.05)
    assert "within 5 % of the fastest possible plan" in explain(replace(record, plan=plan))


def test_what_a_measured_step_took_more_is_said(fit_in):
    record = fit_in(0.5)
    chain = replace(record.chain, fixed_bytes=record.chain.fixed_bytes + 3 * MIB)
    assert "(and 3.00 MiB found by measuring)" in explain(replace(record, chain=chain))


def test_memory_over_the_step_is_a_sparkline(fit_in):
    line = next(line for line in explain(fit_in(0.5)).splitlines() if line.startswith("memory"))
    assert "▁" in line
    assert "█" in line
    without = fit_in(0.5, measured=Record(peak_bytes=150 * MIB, base_bytes=100 * MIB, seconds=0.2))
    assert "memory" not in explain(without)


@pytest.mark.parametrize("width", [80, 110, 200])
def test_it_is_plain_text_within_the_width(fit_to, width):
    text = explain(fit_to("floor"), width=width)
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= width


def test_ascii_alone(fit_to):
    text = explain(fit_to("floor"), ascii_only=True)
    assert text.isascii()
    assert "?" not in text


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["blocks.0", "blocks.1", "blocks.2", "head"], "blocks.0-2, head"),
        (["h.0.mlp", "h.1.mlp", "h.3.mlp"], "h.0-1.mlp, h.3.mlp"),
        (["a", "b"], "a, b"),
        (["cell", "cell", "cell"], "cell"),
        (["down.1", "up.2"], "down.1, up.2"),
    ],
)
def test_names_are_folded(names, text):
    assert folded(names) == text


def test_html_has_the_text_and_the_picture(fit_in):
    html = render_fit_html(fit_in(0.5))
    assert html.startswith("<pre>regions")
    assert 'src="data:image/svg+xml;base64,' in html


def renamed(record, *names):
    choices = [replace(choice, name=name) for choice, name in zip(record.assignment.choices, names, strict=True)]
    return replace(record, assignment=replace(record.assignment, choices=tuple(choices)))


def test_what_all_names_begin_with_is_said_once(fit_in):
    """The names of a model inside PEFT's wrappers, cut at the end, would all look alike."""
    record = renamed(fit_in(0.5), *(f"base_model.model.model.layers.{number}" for number in range(6)))
    text = explain(record)
    assert text.count("base_model") == 1
    assert "names     of base_model.model.model\n" in text
    assert "layers.0" in text.splitlines()[2]


@pytest.mark.parametrize(
    ("names", "prefix"),
    [
        (["a.b.layers.0", "a.b.layers.1"], "a.b."),
        (["a.b.c.down", "a.b.c.up"], "a.b.c."),
        (["a.b.c", "a.b.c.d"], "a.b."),
        (["blocks.0", "blocks.1"], ""),
        (["a.b.c.0", "head"], ""),
        (["checkpoint(A.b.c.d)", "checkpoint(A.b.c.e)"], ""),
        (["a.b.c.d"], ""),
    ],
)
def test_common_prefixes(fit_in, names, prefix):
    record = fit_in(0.5)
    choices = tuple(replace(record.assignment.choices[0], name=name) for name in names)
    assert common_prefix(replace(record, assignment=replace(record.assignment, choices=choices))) == prefix


def test_long_names_lose_their_middle_unless_they_would_look_alike():
    long, other = f"encoder.{'x' * 40}.query", f"encoder.{'x' * 40}.value"
    assert shortened([long, other, "head"], 20) == ["encode…xxxxxxx.query", "encode…xxxxxxx.value", "head"]
    ends = "x" * 20
    alike = [f"{ends}.query.{ends}", f"{ends}.value.{ends}"]
    assert shortened(alike, 20) == alike


@pytest.mark.parametrize(("columns", "width"), [("60", 100), ("120", 120), ("300", 160)])
def test_the_table_is_as_wide_as_the_terminal(fit_in, monkeypatch, columns, width):
    monkeypatch.setenv("COLUMNS", columns)
    assert terminal_width() == width
    assert max(map(len, explain(fit_in(0.5)).splitlines())) <= width

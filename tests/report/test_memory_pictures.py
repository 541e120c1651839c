"""Memory over a step drawn: sparklines, pictures in the terminal, and SVG."""

from xml.etree import ElementTree

import pytest

from retape.core.errors import InvalidInput
from retape.core.record import MemorySample, Record
from retape.report.memory import Track, draw_memory, peaks_per_interval, render_memory_svg, sparkline

SVG = "{http://www.w3.org/2000/svg}"


def record(*sizes, base=100):
    moments = tuple(MemorySample(seconds=float(at), live_bytes=size) for at, size in enumerate(sizes, 1))
    return Record(peak_bytes=max(base, *sizes), base_bytes=base, seconds=1.0, timeline=moments)


UP_AND_DOWN = record(140, 170, 120, 100)


def test_what_lives_stays_until_it_is_said_otherwise():
    late = Record(
        peak_bytes=170,
        base_bytes=100,
        seconds=1.0,
        timeline=(MemorySample(seconds=0.0, live_bytes=170), MemorySample(seconds=8.0, live_bytes=100)),
    )
    assert peaks_per_interval(late, 4, seconds=8.0) == (170, 170, 170, 170)
    assert peaks_per_interval(late, 4, seconds=16.0) == (170, 170, 170, None)


def test_a_short_peak_is_never_lost():
    sizes = [100] * 5000
    sizes[1234] = 900
    assert max(peaks_per_interval(record(*sizes), 7, seconds=5000.0)) == 900


def test_a_sparkline_goes_from_what_was_there_to_the_peak():
    assert sparkline(UP_AND_DOWN, width=8) == "▁▁▅▅███▃"
    assert sparkline(UP_AND_DOWN, width=8, ascii_only=True) == "__==###:"


def test_a_step_that_takes_nothing_is_flat():
    assert sparkline(record(100, 100), width=8) == "▁" * 8


def test_a_picture_has_one_scale_and_each_budget():
    tracks = [
        Track(name="keep", record=UP_AND_DOWN, budget_bytes=180),
        Track(name="tight", record=record(120, 110), budget_bytes=120),
    ]
    assert draw_memory(tracks, width=22, height=4).splitlines() == [
        "keep: peak 170 B of 180 B",
        "       180 B │╌╌╌╌▄▄▄╌",
        "             │    ███",
        "             │  █████",
        "       100 B │  ██████",
        "tight: peak 120 B of 120 B",
        "       180 B │",
        "             │",
        "             │",
        "       100 B │╌╌███╌╌╌",
        "              0    4 s",
    ]


def test_a_picture_in_ascii():
    assert draw_memory([Track(name="keep", record=UP_AND_DOWN, budget_bytes=180)], ascii_only=True).isascii()


def test_svg_has_a_line_a_step_and_its_budget():
    tracks = [Track(name="a & b", record=UP_AND_DOWN, budget_bytes=180), Track(name="plain", record=record(120, 110))]
    picture = ElementTree.fromstring(render_memory_svg(tracks))
    lines = [path for path in picture.iter(f"{SVG}path") if "line" in path.get("class").split()]
    assert len(lines) == 2
    budgets = [line for line in picture.iter(f"{SVG}line") if line.get("class") == "budget c0"]
    assert len(budgets) == 1
    assert picture.findtext(f"{SVG}title") == "memory over the step (dashed: the budget)"
    assert {"a & b", "plain"} <= {node.text for node in picture.iter(f"{SVG}text")}
    # The budget lies above every point of the line that stays inside it.
    heights = [float(part.split("H")[0]) for part in lines[0].get("d").split("V")[1:]]
    assert float(budgets[0].get("y1")) < min(heights)


def test_nothing_to_draw_is_a_clear_error():
    with pytest.raises(InvalidInput, match=r"There is no record to draw; give at least one"):
        draw_memory([])
    with pytest.raises(InvalidInput, match=r"record of 'x' has no timeline, .*Measure the step again"):
        Track(name="x", record=Record(peak_bytes=1, seconds=1.0))

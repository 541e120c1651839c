"""The frontier drawn: in the terminal, as SVG, and as PNG where matplotlib is."""

import sys
from xml.etree import ElementTree

import pytest

from retape.core.errors import InvalidInput
from retape.core.plan import Frontier, FrontierPoint
from retape.core.units import format_bytes
from retape.report.frontier import chosen_point, draw_frontier, render_frontier_svg, write_frontier

SVG = "{http://www.w3.org/2000/svg}"
THREE = Frontier(
    points=tuple(FrontierPoint(bytes=size, seconds=seconds) for size, seconds in ((100, 4.0), (150, 2.0), (200, 1.0))),
    floor_bytes=100,
    binding="head",
    fixed_bytes=50,
    store_all_bytes=200,
)


def test_text_is_a_staircase_with_its_marks():
    drawn = draw_frontier(THREE, chosen=FrontierPoint(bytes=150, seconds=2.0), width=32, height=4).splitlines()
    assert drawn[:6] == [
        "       4 s ┤▲────────",
        "           ┤         │",
        "           ┤         ●─────────",
        "       1 s ┤                   ■",
        "           └────────────────────",
        "            100 B          200 B",
    ]
    assert drawn[6:] == ["▲ floor 100 B, 4 s, bound by head", "■ keep all 200 B, 1 s", "● this plan 150 B, 2 s"]


def test_a_plan_below_the_first_point_is_drawn():
    """The frontier is that of before corrections: a measured plan may have a peak below its floor."""
    drawn = draw_frontier(THREE, chosen=FrontierPoint(bytes=50, seconds=5.0), width=32, height=4).splitlines()
    assert drawn[0] == "       5 s ┤●"
    assert drawn[-1] == "● this plan 50 B, 5 s"


def test_text_without_a_plan_and_in_ascii():
    drawn = draw_frontier(THREE, width=40, ascii_only=True)
    assert drawn.isascii()
    assert "this plan" not in drawn


def test_one_point_can_be_drawn():
    one = Frontier(points=THREE.points[:1], floor_bytes=100, binding="", fixed_bytes=0, store_all_bytes=100)
    assert "■ keep all 100 B, 4 s" in draw_frontier(one)
    ElementTree.fromstring(render_frontier_svg(one))


def test_no_points_is_a_clear_error():
    none = Frontier(points=(), floor_bytes=0, binding="", fixed_bytes=0, store_all_bytes=0)
    with pytest.raises(InvalidInput, match=r"has no points, so there is nothing to draw\. Fit the model again"):
        draw_frontier(none)


def test_svg_marks_floor_keep_all_plan_and_budget():
    text = render_frontier_svg(THREE, chosen=FrontierPoint(bytes=150, seconds=2.0), budget_bytes=160, title="a <model>")
    picture = ElementTree.fromstring(text)
    assert picture.findtext(f"{SVG}title") == "a <model> (floor bound by head)"
    assert len(list(picture.iter(f"{SVG}circle"))) == 3
    names = [node.text for node in picture.iter(f"{SVG}text")]
    assert {"floor 100 B, 4 s", "keep all 200 B, 1 s", "this plan 150 B, 2 s", "budget 160 B"} <= set(names)
    assert "prefers-color-scheme: dark" in text


def test_svg_stays_inside_the_picture(fit_in):
    picture = ElementTree.fromstring(render_frontier_svg(fit_in(0.5).frontier, budget_bytes=10**12))
    for node in picture.iter():
        for name, most in (("x1", 900), ("x2", 900), ("cx", 900), ("x", 900), ("y1", 480), ("y2", 480), ("y", 480)):
            assert 0 <= float(node.get(name, 0)) <= most


def test_a_fit_is_written_as_svg(fit_in, tmp_path):
    record = fit_in(0.5)
    write_frontier(record, tmp_path / "frontier.svg")
    text = (tmp_path / "frontier.svg").read_text(encoding="utf-8")
    assert f"this plan {format_bytes(chosen_point(record).bytes)}" in text
    assert f"budget {format_bytes(record.budget_bytes)}" in text


def test_a_fit_is_written_as_png(fit_in, tmp_path):
    pytest.importorskip("matplotlib")
    write_frontier(fit_in(0.5), tmp_path / "frontier.PNG")
    assert (tmp_path / "frontier.PNG").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InvalidInput, match=r"Cannot write the picture to .*Give another file"):
        write_frontier(fit_in(0.5), tmp_path / "nowhere" / "frontier.png")


def test_a_png_without_matplotlib_names_the_extra(fit_in, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InvalidInput, match=r"pip install 'retape\[plot\]', or give a file that ends in \.svg"):
        write_frontier(fit_in(0.5), tmp_path / "frontier.png")


def test_another_ending_is_a_clear_error(fit_in, tmp_path):
    with pytest.raises(InvalidInput, match=r"names no known picture format. Give a file that ends in \.svg or \.png"):
        write_frontier(fit_in(0.5), tmp_path / "frontier.pdf")


def test_an_unwritable_path_is_a_clear_error(fit_in, tmp_path):
    with pytest.raises(InvalidInput, match=r"Cannot write the picture to .*Give another file"):
        write_frontier(fit_in(0.5), tmp_path / "nowhere" / "frontier.svg")

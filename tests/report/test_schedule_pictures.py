"""Pictures of schedules: in the terminal and as SVG."""

from xml.etree import ElementTree

import pytest

from retape.core.errors import InvalidInput
from retape.core.schedules import FAMILIES, Schedule
from retape.report.schedule import draw, render_svg, write_svg

SVG = "{http://www.w3.org/2000/svg}"


def rows(schedule, **how):
    return draw(schedule, **how).split("\n\n")[0].splitlines()


def test_store_all_is_one_way_there_and_one_back():
    assert rows(Schedule(family="store-all", steps=6)) == ["▪▪▪▪▪◀", "◀◀◀◀◀·"]


def test_uniform_tapes_one_segment_at_a_time():
    drawn = rows(Schedule(family="uniform", steps=9, snapshots=3))
    assert drawn == ["●──●──▪▪◀", "│  │  ◀◀·", "│  ▪▪◀···", "│  ◀◀····", "▪▪◀······", "◀◀·······"]


def test_a_slower_tier_has_its_own_marks():
    picture = draw(Schedule(family="multistage", steps=12, ram=1, disk=1))
    assert "■" in picture.splitlines()[0]
    assert "■ state stored (disk)" in picture


def test_ascii_alone():
    picture = draw(Schedule(family="mixed", steps=9, snapshots=3), ascii_only=True)
    assert picture.isascii()


@pytest.mark.parametrize("width", [20, 33, 79])
def test_a_long_run_fits_the_width_and_says_so(width):
    picture = draw(Schedule(family="online", steps=5000, snapshots=6), width=width, rows=15)
    drawn = picture.split("\n\n")[0].splitlines()
    assert all(len(row) <= width for row in drawn[:15])
    assert drawn[15] == "… only the first 15 rows are drawn"
    assert drawn[16].startswith(f"(a column is about {5000 / width:.3g} steps")


def test_a_narrow_terminal_gets_the_least_width():
    assert max(map(len, rows(Schedule(family="revolve", steps=500, snapshots=3), width=1)[:5])) == 20


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_can_be_drawn(family):
    tiered = FAMILIES[family].tiered
    few = None if tiered else 3
    schedule = Schedule(family=family, steps=17, snapshots=few, ram=1 if tiered else None, disk=2 if tiered else None)
    assert rows(schedule)[-1].count("◀") + rows(schedule)[-1].count("·") == 17
    picture = ElementTree.fromstring(render_svg(schedule))
    kinds = [line.get("class") for line in picture.iter(f"{SVG}line")]
    assert kinds.count("backward") == kinds.count("tape") == 17 + 1  # and one in the legend


def test_svg_stands_alone_in_light_and_dark():
    text = render_svg(Schedule(family="revolve", steps=9, snapshots=3))
    assert "prefers-color-scheme: dark" in text
    assert "href" not in text
    assert "first" not in ElementTree.fromstring(text).findtext(f"{SVG}title")


def test_svg_says_when_it_stops_early():
    text = render_svg(Schedule(family="revolve", steps=900, snapshots=3), most_actions=100)
    assert ElementTree.fromstring(text).findtext(f"{SVG}title") == "revolve: 900 steps, first 100 actions"


def test_every_line_of_the_svg_is_inside_the_picture():
    picture = ElementTree.fromstring(render_svg(Schedule(family="multistage", steps=30, ram=1, disk=3)))
    for line in picture.iter(f"{SVG}line"):
        assert 0 <= float(line.get("x1")) <= float(line.get("x1")) <= 900
        assert 0 <= float(line.get("y1")) <= float(line.get("y2")) <= 600


def test_unwritable_path_is_a_clear_error(tmp_path):
    with pytest.raises(InvalidInput, match=r"Cannot write the picture to .*Give another file"):
        write_svg(Schedule(family="revolve", steps=9, snapshots=3), tmp_path)

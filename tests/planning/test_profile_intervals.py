"""From marks to figures: each interval of a step belongs to one region, and nothing is lost between them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retape.torch.measure.memory_meter import MemoryReading
from retape.torch.planning.profiles.intervals import Phase, RegionSeconds, read_bytes, read_seconds, split_engine_time


def labels(regions):
    """The marks of a step in which every region is recomputed, in order."""
    found = ["start"]
    for stage in range(regions):
        found += [(phase, stage) for phase in (Phase.FORWARD, Phase.BODY, Phase.BODY_END, Phase.FORWARD_END)]
    found.append((Phase.LOSS, -1))
    for stage in reversed(range(regions)):
        found += [(phase, stage) for phase in (Phase.BACKWARD, Phase.RERUN, Phase.RERUN_END, Phase.BACKWARD_END)]
    return [*found, "end"]


def timed(marks, steps):
    """Marks with their times; each interval is as long as the next of `steps`."""
    at, found = 0.0, []
    for label, step in zip(marks, [0.0, *steps], strict=False):
        at += step
        found.append((label, at))
    return found


def test_each_second_is_somebodys():
    seconds = read_seconds(timed(labels(1), [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]))
    # Forward: before the body and after it; then the glue up to the loss and back, and the backward around its re-run.
    assert seconds[0] == RegionSeconds(
        forward=2 + 8, body=4, glue_forward=16, glue_backward=32, rerun=128, backward=64 + 256
    )
    assert seconds[-1] == RegionSeconds(glue_forward=1, glue_backward=512)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 5), st.data())
def test_nothing_is_lost(regions, data):
    marks = labels(regions)
    steps = data.draw(st.lists(st.integers(0, 9), min_size=len(marks) - 1, max_size=len(marks) - 1))
    found = read_seconds(timed(marks, steps))
    total = sum(getattr(each, name) for each in found.values() for name in RegionSeconds.__slots__)
    assert total == sum(steps)
    assert set(found) <= set(range(-1, regions))


def test_a_rerun_inside_a_rerun_is_the_outer_ones():
    """A dropped input is made again by the region before, whose re-run is a part of this one's."""
    marks = [
        "start",
        (Phase.LOSS, -1),
        (Phase.BACKWARD, 1),
        (Phase.RERUN, 1),
        (Phase.RERUN, 0),
        (Phase.RERUN_END, 0),
        (Phase.RERUN_END, 1),
        (Phase.BACKWARD_END, 1),
        "end",
    ]
    found = read_seconds(timed(marks, [1, 2, 4, 8, 16, 32, 64, 128]))
    assert found[1].rerun == 8 + 16 + 32
    assert found[1].backward == 4 + 64
    assert 0 not in found or found[0] == RegionSeconds(glue_backward=128)


def test_a_late_end_of_an_earlier_backward_changes_nothing():
    """Hooks on inputs may fire after the next region's backward has begun."""
    marks = ["start", (Phase.LOSS, -1), (Phase.BACKWARD, 1), (Phase.BACKWARD, 0), (Phase.BACKWARD_END, 1), "end"]
    found = read_seconds(timed(marks, [1, 1, 4, 8, 16]))
    assert (found[1].backward, found[0].backward) == (4, 8 + 16)


def readings(values):
    marks = labels(2)
    return [
        MemoryReading(label=label, live_bytes=live, peak_bytes=peak)
        for label, (live, peak) in zip(marks, values, strict=True)
    ]


def test_bytes_at_and_in_the_parts():
    forward = [(0, 0), (5, 9), (5, 5), (20, 90), (15, 20), (18, 25), (18, 18), (40, 70), (30, 40), (33, 35)]
    backward = [(33, 36), (50, 80), (45, 55), (20, 60), (20, 22), (60, 95), (40, 70), (5, 50), (0, 7)]
    found = read_bytes(readings([*forward, *backward]))
    first, second = found.of(0), found.of(1)
    assert (first.start, first.end) == (5, 15)
    assert (second.start, second.end) == (18, 30)
    assert found.loss == 33
    assert found.peak == 95
    assert (first.forward_peak, second.forward_peak) == (90, 70)
    assert (first.glue_forward_peak, second.glue_forward_peak) == (25, 35)
    assert (second.backward_peak, second.rerun_peak) == (max(80, 60), 55)
    assert (first.backward_peak, first.rerun_peak) == (max(95, 50), 70)


def test_a_step_without_regions():
    found = read_bytes([MemoryReading(label=label, live_bytes=3, peak_bytes=8) for label in labels(0)])
    assert (found.loss, found.peak) == (3, 8)
    assert found.of(-1).glue_forward_peak == 8


@pytest.mark.parametrize("regions", [1, 3])
def test_peaks_of_regions_cover_the_peak_of_the_step(regions):
    marks = labels(regions)
    steps = [MemoryReading(label=label, live_bytes=i, peak_bytes=(7 * i) % 31) for i, label in enumerate(marks)]
    found = read_bytes(steps)
    parts = ("forward_peak", "rerun_peak", "backward_peak", "glue_forward_peak", "glue_backward_peak")
    assert max(getattr(each, part) for each in found.regions.values() for part in parts) == found.peak


def test_a_forward_and_a_re_run_that_were_disturbed_are_told_from_each_other():
    """Three kinds run the same in both, and the engine takes 1 in a re-run: what is beyond that is not theirs."""
    kinds = {
        "calm": RegionSeconds(forward=0.5, body=10.0, rerun=11.0, backward=20.0),
        "forward": RegionSeconds(body=30.0, rerun=11.0, backward=20.0),
        "rerun": RegionSeconds(body=10.0, rerun=40.0, backward=20.0),
        "short": RegionSeconds(body=10.0, rerun=6.0, backward=20.0),  # stops half way
        "kept": RegionSeconds(body=7.0, backward=9.0),  # never ran again
    }
    shares = {kind: 0.5 if kind == "short" else 1.0 for kind in kinds}
    found = split_engine_time(kinds, shares)
    assert found["calm"] == kinds["calm"]
    assert (found["forward"].body, found["forward"].rerun) == (10.0, 11.0)
    assert (found["rerun"].body, found["rerun"].rerun) == (10.0, 11.0)
    assert found["short"] == kinds["short"]
    assert found["kept"] == kinds["kept"]
    assert split_engine_time({"kept": kinds["kept"]}, shares) == {"kept": kinds["kept"]}

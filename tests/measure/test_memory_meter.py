"""The tracker: known allocations on the CPU, to the byte."""

import gc
import weakref
from collections import deque
from functools import partial

import pytest
import torch
from torch import nn

import retape
from retape.core.record import MemorySample
from retape.errors import InvalidInput
from retape.torch.measure.memory_meter import (
    BACKGROUND_TRACKERS,
    present_bytes,
    storage_bytes,
    thin_timeline,
    track_memory,
)
from retape.torch.measure.tuning import TUNING

CPU = torch.device("cpu")
KIB = 1024


def allocate(kib):
    return torch.empty(kib * KIB, dtype=torch.uint8)


def test_the_peak_is_that_of_the_allocations():
    def step():
        kept = allocate(100)
        allocate(300)  # gone at once
        other = allocate(50)
        del kept
        late = allocate(120)
        return other, late

    record = retape.measure(step)
    assert record.peak_bytes - record.base_bytes == 400 * KIB
    assert record.seconds > 0
    assert (record.device, record.reserved_bytes) == ("cpu", 0)


def test_marks_read_live_bytes_and_the_peak_since_the_last_mark():
    with track_memory(CPU) as tracker:
        first = allocate(10)
        tracker.mark("one")
        allocate(70)
        tracker.mark("two")
        del first
        tracker.mark("three")
    found = [(reading.label, reading.live_bytes // KIB, reading.peak_bytes // KIB) for reading in tracker.readings]
    assert found == [("start", 0, 0), ("one", 10, 10), ("two", 10, 80), ("three", 0, 10), ("end", 0, 0)]
    assert all(reading.live_bytes % KIB == 0 for reading in tracker.readings)


def test_the_timeline_has_every_moment():
    record = retape.measure(lambda: [allocate(8) for _ in range(3)] and None)
    above = [(moment.live_bytes - record.base_bytes) // KIB for moment in record.timeline]
    assert above[:3] == [8, 16, 24]
    assert above[-1] == 0
    assert max(above) * KIB == record.peak_bytes - record.base_bytes
    seconds = [moment.seconds for moment in record.timeline]
    assert seconds == sorted(seconds)


def test_a_backward_pass_is_seen():
    """The gradient of x * x * x at its highest: what is saved, and what flows back."""
    x = torch.ones(64 * KIB, requires_grad=True)
    size = x.numel() * 4

    def step():
        x.grad = None
        (x * x * x).backward(torch.ones_like(x))

    record = retape.measure(step)
    assert (record.peak_bytes - record.base_bytes) % size == 0
    assert record.peak_bytes - record.base_bytes >= 4 * size


def test_tensors_from_before_count_once():
    before = present_bytes(CPU)
    tensor = allocate(640)
    views = [tensor[:5], tensor.view(-1, 2)]
    assert present_bytes(CPU) - before == 640 * KIB
    layer = nn.Linear(100, 10, bias=False)
    layer.weight.grad = torch.zeros_like(layer.weight)
    assert present_bytes(CPU, [layer]) - before == 640 * KIB + 2 * 4000
    del tensor, views, layer
    assert present_bytes(CPU) == before


class Trainer:
    """Holds tensors in the ways in which programs do."""

    def __init__(self):
        self.queue = deque([allocate(1)])
        self.by_name = {"a": (allocate(2), [allocate(4)])}
        kept = allocate(8)
        self.hook = lambda: kept
        self.call = partial(self.hook, allocate(16))
        self.batches = (allocate(32) for _ in range(1))
        self.tagged = torch.ones(0)
        self.tagged.extra = allocate(64)


def test_tensors_in_containers_closures_and_attributes_are_found():
    before = present_bytes(CPU)
    trainer = Trainer()
    assert present_bytes(CPU, [trainer]) - before == 95 * KIB
    assert present_bytes(CPU) - before == 95 * KIB, "a local variable leads to it"
    del trainer
    assert present_bytes(CPU) == before


def test_reading_variables_keeps_none_of_them_alive():
    tensor = allocate(5)
    alive = weakref.ref(tensor)
    names = locals()
    present_bytes(CPU)
    assert "alive" in names, "what locals() returned is left alone"
    del tensor, names
    present_bytes(CPU)
    again = allocate(5)
    alive_again = weakref.ref(again)
    present_bytes(CPU)
    del again
    assert alive() is None
    assert alive_again() is None


def test_an_exception_passes_and_ends_the_tracker():
    def broken():
        allocate(5)
        raise KeyError("mine")

    for _ in range(2):
        with pytest.raises(KeyError, match="mine"):
            retape.measure(broken)
    record = retape.measure(lambda: allocate(7))
    assert record.peak_bytes - record.base_bytes == 7 * KIB


def test_one_tracker_inside_another_is_refused():
    def nested():
        retape.measure(lambda: None)

    with pytest.raises(InvalidInput, match=r"profiler is running already.*Leave it out here"):
        retape.measure(nested)
    assert retape.measure(lambda: None).peak_bytes >= 0


def test_background_trackers_end_when_another_starts():
    ended = []

    def end():
        ended.append(True)

    BACKGROUND_TRACKERS.append(end)
    try:
        retape.measure(lambda: None)
    finally:
        BACKGROUND_TRACKERS.remove(end)
    assert ended == [True]


def test_a_step_that_allocates_nothing():
    record = retape.measure(lambda: None)
    assert record.peak_bytes == record.base_bytes
    assert record.timeline == ()


def test_storages_by_device_and_once():
    tensor = torch.ones(10)
    assert storage_bytes([tensor, tensor[2:], tensor.detach()], CPU) == 40
    assert storage_bytes([torch.ones(10, device="meta")], CPU) == 0
    assert storage_bytes([torch.ones(3).to_sparse()], CPU) == 3 * 4 + 3 * 8, "values and indices"
    assert storage_bytes([], CPU) == 0


def test_a_long_timeline_keeps_its_peak():
    moments = [MemorySample(seconds=float(i), live_bytes=i % 7) for i in range(3 * TUNING.timeline_moments)]
    moments[777] = MemorySample(seconds=777.0, live_bytes=10**6)
    found = thin_timeline(moments, 5)
    assert len(found) == TUNING.timeline_moments
    assert max(moment.live_bytes for moment in found) == 10**6 + 5
    assert thin_timeline([MemorySample(seconds=0.0, live_bytes=0)], 0) == (MemorySample(seconds=0.0, live_bytes=0),)
    assert thin_timeline([], 3) == ()


@pytest.mark.parametrize("collects", [False, True])
def test_garbage_of_before_is_not_subtracted_from_a_step(collects):
    """A cycle that holds a tensor, and a step that collects it, as an automatic collection might."""

    def step():
        if collects and gc.isenabled():
            gc.collect()
        return allocate(100)

    gc.collect()
    with track_memory(CPU):  # the profiler reports a free only of what was allocated while it ran
        held = [allocate(300)]
        held.append(held)
        del held
    found = retape.measure(step)
    assert found.peak_bytes - found.base_bytes >= 100 * KIB
    assert gc.isenabled()


def test_a_result_instead_of_a_function_is_refused():
    with pytest.raises(InvalidInput, match=r"measure\(\) got a Tensor; give a function without arguments"):
        retape.measure(torch.ones(3).sum())

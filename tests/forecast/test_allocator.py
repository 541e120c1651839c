"""PyTorch's caching allocator: segments, best fit, blocks that are divided and merged, and what a run reserves."""

import pytest
import torch
from torch import nn

import retape
from retape.forecast.simulation.allocator import Allocator, Run, RunMemory, memory_of_run

MIB = 2**20


@pytest.mark.parametrize(
    ("size", "segment"), [(1, 2), (MIB, 2), (MIB + 1, 20), (9 * MIB, 20), (10 * MIB, 10), (11 * MIB, 12)]
)
def test_segments_of_the_driver(size, segment):
    allocator = Allocator()
    allocator.allocate(size)
    assert allocator.reserved_bytes == segment * MIB


def test_the_smallest_free_block_that_is_large_enough_is_taken():
    allocator = Allocator()
    large, small = allocator.allocate(64 * MIB), allocator.allocate(32 * MIB)
    allocator.free(large)
    allocator.free(small)
    assert allocator.allocate(30 * MIB) is small
    assert allocator.allocate(40 * MIB) is large
    assert allocator.reserved_bytes == 96 * MIB


def test_a_small_rest_is_not_divided_off():
    allocator = Allocator()
    block = allocator.allocate(32 * MIB)
    allocator.free(block)
    assert allocator.allocate(31 * MIB).size == 32 * MIB


def test_freed_neighbours_are_one_block_again():
    allocator = Allocator()
    whole = allocator.allocate(64 * MIB)
    allocator.free(whole)
    parts = [allocator.allocate(16 * MIB) for _ in range(4)]
    assert [part.address // MIB for part in parts] == [0, 16, 32, 48]
    for place in (0, 2, 3, 1):
        allocator.free(parts[place])
    assert allocator.allocate(64 * MIB).address == 0
    assert allocator.reserved_bytes == 64 * MIB


def test_blocks_of_two_segments_are_never_one():
    allocator = Allocator()
    blocks = [allocator.allocate(32 * MIB) for _ in range(2)]
    for block in blocks:
        allocator.free(block)
    allocator.allocate(64 * MIB)
    assert allocator.reserved_bytes == 128 * MIB


def test_states_in_the_holes_of_the_first_step_make_the_next_reserve_more():
    step = [(1, 64 * MIB), (1, 0)]
    found = memory_of_run(step, Run(kept=(), states=()))
    assert found == RunMemory(peak_bytes=64 * MIB, reserved_bytes=64 * MIB)
    found = memory_of_run(step, Run(kept=(32 * MIB,), states=(16 * MIB,)))
    assert found == RunMemory(peak_bytes=(32 + 16 + 64) * MIB, reserved_bytes=(32 + 64 + 64) * MIB)


def test_gradients_stay_until_the_next_step_or_are_reduced_at_once():
    step = [(1, 32 * MIB), (2, 32 * MIB)]
    assert memory_of_run(step, Run(kept=(), states=())).reserved_bytes == 64 * MIB
    reduced = memory_of_run(step, Run(kept=(), states=(), keeps_gradients=False, other_streams_bytes=8 * MIB))
    assert reduced == RunMemory(peak_bytes=40 * MIB, reserved_bytes=40 * MIB)


def test_a_forecast_says_what_is_reserved_where_it_knows():
    with torch.device("meta"):
        model = nn.Sequential(
            *(nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(4))
        )
        rows = torch.empty(8192, 1024)

    def forecast(**more):
        return retape.forecast(model, rows, step=lambda model, rows: model(rows).sum(), optimizer="adamw", **more)

    alone = forecast()
    assert alone.plain_reserved_bytes >= alone.plain_peak_bytes
    assert "reserved by PyTorch" in alone.explain()
    for mesh in ({"fsdp": 4}, {"tensor": 4}, {"tensor": 4, "zero": 1}):
        found = forecast(mesh=mesh)
        assert 0 < found.plain_peak_bytes <= found.plain_reserved_bytes < alone.plain_reserved_bytes
    for mesh in ({"pipeline": 4, "accumulate": 4}, {"fsdp": 4, "zero": 1}):
        found = forecast(mesh=mesh)
        assert (found.plain_peak_bytes, found.plain_reserved_bytes) == (0, 0)
    for mesh in ({"zero": 0}, {"zero": 1}, {"accumulate": 4}):
        found = forecast(mesh=mesh)
        assert found.plain_reserved_bytes == alone.plain_reserved_bytes
        assert found.plain_peak_bytes == alone.plain_peak_bytes

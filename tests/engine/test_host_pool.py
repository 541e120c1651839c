"""Host memory for moved slots: chunks that are used again, a limit that holds, and one warning where it cannot be pinned."""

import warnings

import pytest
import torch

from retape.errors import OffloadError
from retape.torch.engine.host.copy_streams import TUNING, HostPool, chunk_sizes

GRAIN, LARGEST_CHUNK = TUNING.chunk_grain_bytes, TUNING.largest_chunk_bytes


@pytest.mark.parametrize("count", [1, 4096, 4097, GRAIN, GRAIN + 1, LARGEST_CHUNK, 3 * LARGEST_CHUNK + 5 * GRAIN + 1])
def test_chunks_are_powers_of_two_that_just_hold_the_bytes(count):
    sizes = chunk_sizes(count)
    assert all(size & (size - 1) == 0 and size <= LARGEST_CHUNK for size in sizes)
    assert sum(sizes) >= count
    assert sum(sizes[:-1]) < count
    assert sum(sizes) < (count + GRAIN if count > GRAIN else max(2 * count, 4097))


def test_the_limit_holds_and_a_failed_take_gives_everything_back():
    pool = HostPool(pinned=False, limit_bytes=3 * LARGEST_CHUNK)
    taken = pool.take(2 * LARGEST_CHUNK)
    with pytest.raises(
        OffloadError, match=r"No host memory for 64.00 MiB more .* 96.00 MiB are in use of 96.00 MiB"
    ) as caught:
        pool.take(2 * LARGEST_CHUNK)
    assert caught.value.limit_bytes == 3 * LARGEST_CHUNK
    assert caught.value.wanted_bytes == 2 * LARGEST_CHUNK
    assert pool.free_bytes == LARGEST_CHUNK
    pool.give(taken)
    assert len(pool.take(3 * LARGEST_CHUNK)) == 3


def test_the_machine_has_the_last_word():
    pool = HostPool(pinned=False, limit_bytes=2**40, available=lambda: 5000)
    with pytest.raises(OffloadError, match=r"the machine has 4\.88 KiB left"):
        pool.take(6000)
    assert len(pool.take(4000)) == 1


def test_memory_that_cannot_be_pinned_is_said_once(monkeypatch):
    asked = []
    empty = torch.empty

    def refusing(*args, pin_memory=False, **keywords):
        asked.append(pin_memory)
        if pin_memory:
            raise RuntimeError("no pages to lock\nand more")
        return empty(*args, **keywords)

    monkeypatch.setattr(torch, "empty", refusing)
    pool = HostPool(pinned=True, limit_bytes=2**30)
    with pytest.warns(
        UserWarning, match=r"cannot be pinned \(no pages to lock\): moved slots go to pageable memory"
    ) as caught:
        pool.take(5000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pool.take(5000)
    assert len(caught) == 1
    assert asked == [True, False, False]

"""Slots on disk: bit for bit, little host memory, nothing left behind by errors, exits and kills."""

import errno
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial

import pytest
import torch

from engine.test_offload import EVERYTHING, Blocks, moved
from retape.errors import InvalidInput, OffloadError
from retape.torch.engine.host.spill import SpillFolder, remove_left_overs, spill_at
from support.comparing import seed
from support.hosts import host_memory


def to(folder):
    """A policy that moves everything to files in a folder."""
    return replace(EVERYTHING, disk=folder, moved_inputs=frozenset({0}))


@pytest.fixture(name="pool")
def _pool():
    with host_memory(2**24) as pool:
        yield pool
        gc.collect()
        assert pool.free_bytes == pool.allocated_bytes, "host memory was not given back"


@pytest.fixture(name="folder")
def _folder(tmp_path, pool):
    made = SpillFolder(tmp_path, 2**24, 2**20)
    yield made
    gc.collect()
    wait_for(lambda: made.used_bytes == 0)
    assert os.listdir(made.path) == ["lock"], "files were left"
    made.close()
    assert not made.path.exists()


def wait_for(done, seconds=10.0):
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        time.sleep(0.01)
    assert done()


def model_and_rows():
    seed()
    return Blocks(), torch.randn(64, 16, requires_grad=True)


def files_of(folder):
    return sorted(folder.path.glob("*.tensors"))


def test_gradients_are_the_same_and_slots_are_in_files(folder, pool):
    model, x = model_and_rows()
    loss = model(x, call=partial(moved, policy=to(folder))).square().mean()
    folder.writer.submit(lambda: None).result()
    assert len(files_of(folder)) >= 4
    assert folder.used_bytes > 0
    assert pool.free_bytes == pool.allocated_bytes, "what is written needs no host memory"
    loss.backward()
    plain = Blocks()
    plain.load_state_dict(model.state_dict())
    y = x.detach().clone().requires_grad_()
    plain(y, call=lambda layer, value: layer(value)).square().mean().backward()
    assert torch.equal(x.grad, y.grad)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))


def test_what_is_saved_in_odd_layouts_comes_back(folder):
    seed()
    x = torch.randn(8, 6, requires_grad=True)

    def odd(value):
        whole = value.t().sin()
        return (whole[1:4] * whole[2:5].cos()).sum() + whole.to(torch.complex64).conj().abs().sum()

    moved(odd, x, policy=to(folder)).backward()
    y = x.detach().clone().requires_grad_()
    odd(y).backward()
    assert torch.equal(x.grad, y.grad)


def test_a_retained_graph_is_read_again(folder):
    model, x = model_and_rows()
    loss = model(x, call=partial(moved, policy=to(folder))).square().mean()
    loss.backward(retain_graph=True)
    first = x.grad.clone()
    x.grad = None
    loss.backward()
    assert torch.equal(first, x.grad)


def test_host_memory_in_transit_is_bounded(tmp_path, pool):
    one = 64 * 32 * 4
    folder = SpillFolder(tmp_path, 2**24, staging_bytes=2 * one)
    model, x = model_and_rows()
    loss = Blocks(count=12)(x, call=partial(moved, policy=to(folder))).sum()
    assert pool.allocated_bytes <= 4 * one
    del loss, model
    gc.collect()
    wait_for(lambda: folder.used_bytes == 0)
    folder.close()


# --- errors -----------------------------------------------------------------------------------------------------------


def forward(model, x, folder):
    return model(x, call=partial(moved, policy=to(folder))).square().mean()


def test_a_budget_that_is_used_up(folder):
    model, x = model_and_rows()
    folder.limit_bytes = 50_000
    with pytest.raises(
        OffloadError, match=r"No room on disk for .* more of moved slots: .* of 48.83 KiB are used .*disk_budget"
    ) as caught:
        forward(model, x, folder)
    assert caught.value.limit_bytes == 50_000
    folder.limit_bytes = 2**24
    del caught
    gc.collect()
    forward(model, x, folder).backward()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (errno.ENOSPC, r"No space left on device\. .* are free there\. Free some, or give fit\(\) another folder"),
        (errno.EROFS, r"Read-only file system\. This process may not write there any more\. Allow it, or give"),
        (errno.EACCES, r"Permission denied\. This process may not write there any more\. Allow it, or give"),
        (errno.EIO, r"Input/output error\. Give fit\(\) another folder"),
    ],
)
def test_a_disk_that_does_not_take_a_file(folder, code, message):
    model, x = model_and_rows()

    def fail(*args, **keywords):
        raise OSError(code, os.strerror(code))

    write, folder.write = folder.write, fail
    with pytest.raises(OffloadError, match=rf"could not be written to .*: {message}") as caught:
        forward(model, x, folder).backward()
    assert "disk_budget" not in str(caught.value), "more of a disk that takes no file does not help"
    folder.writer.submit(lambda: None).result()
    folder.write = write
    del caught
    gc.collect()
    x.grad = None
    forward(model, x, folder).backward()  # the next step is not affected


def test_a_folder_that_was_moved_away_and_put_back(folder):
    model, x = model_and_rows()
    elsewhere = folder.path.with_name("elsewhere")
    folder.path.rename(elsewhere)
    with pytest.raises(
        OffloadError, match=r"No such file or directory\. .* was removed or renamed .*\. Put it back, or fit again\.$"
    ):
        forward(model, x, folder).backward()
    gc.collect()
    elsewhere.rename(folder.path)
    x.grad = None
    forward(model, x, folder).backward()


def threads():
    return [each.name for each in threading.enumerate() if each.name.startswith("retape-spill")]


def test_a_closed_folder_is_there_until_the_last_slot_is_gone_and_its_threads_end(pool, tmp_path):
    folder = SpillFolder(tmp_path, 2**24, 2**20)
    model, x = model_and_rows()
    forward(model, x, folder).backward()
    want, x.grad = x.grad, None
    loss = forward(model, x, folder)
    folder.close()
    assert folder.path.exists()
    loss.backward()
    assert torch.equal(x.grad, want)
    del loss
    gc.collect()
    wait_for(lambda: not threads())
    assert os.listdir(tmp_path) == []
    with pytest.raises(OffloadError, match=r"cannot be moved to .*: this fit was removed\. Fit the model again"):
        forward(model, x, folder)
    assert folder.used_bytes == 0
    folder.close()


@pytest.mark.parametrize(
    "damage", [lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\x55")]
)
def test_a_damaged_file_is_an_error_and_no_wrong_gradient(folder, damage):
    model, x = model_and_rows()
    loss = forward(model, x, folder)
    folder.writer.submit(lambda: None).result()
    for path in files_of(folder):
        damage(path)
    with pytest.raises(OffloadError, match=r"of moved slots cannot be read back from disk: .*\. Run the step again"):
        loss.backward()


def test_a_host_that_is_too_small_for_what_is_in_transit(tmp_path):
    folder = SpillFolder(tmp_path, 2**24, 2**20)
    model, x = model_and_rows()
    with host_memory(4096), pytest.raises(OffloadError, match=r"No host memory for .* more of moved tensors"):
        forward(model, x, folder)
    gc.collect()
    wait_for(lambda: folder.used_bytes == 0)
    folder.close()


@pytest.mark.parametrize(
    ("about", "message"),
    [
        (("missing", None), r"is not a folder"),
        ((".", 2**62 - 1), r"disk_budget is .* are free in"),
    ],
)
def test_folders_that_are_refused(about, message, tmp_path):
    place, budget = about
    with pytest.raises(InvalidInput, match=message):
        spill_at(tmp_path / place, budget, 0)
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_written_to():
    with pytest.raises(
        InvalidInput, match=r"disk='/proc' cannot be written to: .*\. Give a folder on a disk with room"
    ):
        spill_at("/proc", None, 0)


def test_the_measured_tier(tmp_path):
    folder = SpillFolder(tmp_path, 2**30, 2**20)
    tier = folder.tier()
    assert (tier.name, tier.capacity_bytes) == ("disk", 2**30)
    assert 0 < tier.write_bytes_per_second < 1e12
    assert 0 < tier.read_bytes_per_second < 1e12
    assert os.listdir(folder.path) == ["lock"]
    folder.close()


# --- the end of a process ---------------------------------------------------------------------------------------------

PROGRAM = """
import os, sys, time
from pathlib import Path
import torch
from retape.torch.engine.host.copy_streams import DONE
from retape.torch.engine.host.spill import spill_at
folder = spill_at(sys.argv[1], None, 2**20)
file = folder.reserve(8)
file.start(DONE, [torch.zeros(8, dtype=torch.uint8)], lambda: None)
file.wait()
print(folder.path, flush=True)
if sys.argv[2] == "raise":
    raise KeyError("an error of the loop")
if sys.argv[2] == "fork":
    if os.fork() == 0:
        sys.exit(0)
    os.wait()
    assert folder.path.exists()
if sys.argv[2] == "wait":
    time.sleep(60)
"""


def started(tmp_path, end):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    made = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(tmp_path), end],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
    )
    path = made.stdout.readline().decode().strip()
    assert path, "the process did not start"
    return made, path


@pytest.mark.parametrize("end", ["return", "raise", "fork"])
def test_the_folder_is_removed_when_the_process_ends(tmp_path, end):
    made, _ = started(tmp_path, end)
    assert made.wait(60) == (1 if end == "raise" else 0)
    made.stdout.close()
    assert os.listdir(tmp_path) == []


def test_what_a_killed_process_leaves_is_removed_by_the_next_one_and_that_of_a_living_one_is_not(tmp_path):
    (tmp_path / "something else").mkdir()
    living, living_path = started(tmp_path, "wait")
    killed, killed_path = started(tmp_path, "wait")
    killed.send_signal(signal.SIGKILL)
    killed.wait(60)
    assert os.path.exists(os.path.join(killed_path, "0.tensors"))
    folder = SpillFolder(tmp_path, 2**20, 2**20)
    assert not os.path.exists(killed_path)
    assert os.path.exists(living_path)
    assert remove_left_overs(tmp_path) == []
    folder.close()
    living.send_signal(signal.SIGTERM)
    living.wait(60)
    for each in (living, killed):
        each.stdout.close()
    remove_left_overs(tmp_path)
    assert os.listdir(tmp_path) == ["something else"]

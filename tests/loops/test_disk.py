"""Files of tensors: read back exactly, or lost; disk tiers that are damaged, full or read-only; nothing left behind."""

import errno
import os
import re
import shutil
import tempfile

import pytest
import torch

from retape import scan
from retape.core import Tier
from retape.errors import InvalidInput, RegionError
from retape.torch.loops.snapshots import SnapshotLost, cannot_write, read_file, write_file
from support.comparing import equal
from support.loops import loss_and_gradients, unrolled

TENSORS = {
    "float32": torch.randn(3, 4),
    "bfloat16": torch.randn(5).bfloat16(),
    "complex conjugate": torch.randn(3, dtype=torch.complex64).conj(),
    "transposed": torch.randn(3, 4).T,
    "part of a storage": torch.randn(10)[3:7],
    "scalar": torch.tensor(3),
    "empty": torch.empty(0, 3),
    "bool": torch.tensor([True, False]),
}


@pytest.fixture
def temp(tmp_path, monkeypatch):
    """A folder of the test's own for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)
def test_read_back(tensor, tmp_path):
    write_file(tmp_path / "a.tensors", {"step": 3, "text": "ü"}, [tensor, torch.ones(2)], durable=True)
    about, (first, second) = read_file(tmp_path / "a.tensors")
    assert about == {"step": 3, "text": "ü"}
    assert (first.dtype, first.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(first, tensor)
    assert torch.equal(second, torch.ones(2))
    assert os.listdir(tmp_path) == ["a.tensors"]


@pytest.mark.parametrize("place", [0, 20, 40, -1], ids=["magic", "length", "header", "data"])
def test_one_wrong_byte_is_seen(place, tmp_path):
    path = tmp_path / "a.tensors"
    write_file(path, {"step": 3}, [torch.randn(100)], durable=False)
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(SnapshotLost):
        read_file(path)


@pytest.mark.parametrize("length", [0, 10, 30, 100, -1])
def test_a_cut_off_file_is_seen(length, tmp_path):
    path = tmp_path / "a.tensors"
    write_file(path, {"step": 3}, [torch.randn(100)], durable=False)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(SnapshotLost):
        read_file(path)
    path.unlink()
    with pytest.raises(SnapshotLost, match="cannot be read"):
        read_file(path)


def test_tensors_that_no_file_holds(tmp_path):
    with pytest.raises(InvalidInput, match=r"layout torch.sparse_coo .* cannot be stored in a file"):
        write_file(tmp_path / "a", {}, [torch.eye(3).to_sparse()], durable=False)
    assert os.listdir(tmp_path) == []


def noisy_loop(steps=31):
    torch.manual_seed(0)
    weight = torch.randn(4, requires_grad=True)
    start, xs = torch.randn(4), torch.randn(steps, 4)

    def step(h, x):
        h = torch.tanh(torch.nn.functional.dropout(h * weight, 0.1) + x)
        return h, h

    return step, weight, start, xs


def test_nothing_is_left_behind(temp):
    step, _, start, xs = noisy_loop()
    h, _ = scan(step, start, xs, snapshots=5, block=1, tiers=[Tier(name="disk")])
    assert sum(len(files) for _, _, files in os.walk(temp)) == 5
    h.sum().backward()
    assert sum(len(files) for _, _, files in os.walk(temp)) == 0
    del h
    assert os.listdir(temp) == []
    scan(step, start, xs, snapshots=5, tiers=[Tier(name="disk")])  # never reversed
    assert os.listdir(temp) == []


@pytest.mark.parametrize("damage", ["cut", "flip", "remove", "swap", "all"])
def test_a_damaged_snapshot_is_computed_again(temp, damage):
    step, weight, start, xs = noisy_loop()
    plain = loss_and_gradients(lambda: unrolled(step, start, xs), [weight])
    torch.manual_seed(3)
    result = scan(step, start, xs, snapshots=5, block=1, tiers=[Tier(name="disk")])
    files = sorted(temp.glob("retape-*/*.tensors"), key=lambda path: int(path.stem))
    if damage == "all":
        for path in files:
            path.unlink()
    elif damage == "cut":
        files[2].write_bytes(files[2].read_bytes()[:-3])
    elif damage == "flip":
        files[0].write_bytes(files[0].read_bytes()[:-1] + b"\x55")
    elif damage == "remove":
        files[3].unlink()
    else:
        files[1].write_bytes(files[2].read_bytes())
    assert equal(plain[1:], loss_and_gradients(lambda: result, [weight])[1:])


def remove_folders(temp):
    for folder in temp.glob("retape-*"):
        shutil.rmtree(folder)


def test_a_disk_that_fails_in_the_forward(temp):
    step, _, start, xs = noisy_loop()

    def failing(h, x):
        if torch.equal(x, xs[-1]):
            remove_folders(temp)
        return step(h, x)

    disk = [Tier(name="disk")]
    with pytest.raises(RegionError, match=r"could not be written to .*: No such file or directory\. Give the loop"):
        scan(failing, start, xs.flip(0)[:9].flip(0).repeat(3, 1), snapshots=9, block=1, tiers=disk)
    assert os.listdir(temp) == []


def test_a_disk_that_fails_in_the_backward_pass(temp):
    step, weight, start, xs = noisy_loop()
    plain = loss_and_gradients(lambda: unrolled(step, start, xs), [weight])

    def looped():
        return scan(step, start, xs, snapshots=5, block=1, tiers=[Tier(name="disk")])

    result = looped()
    remove_folders(temp)
    with pytest.raises(RegionError, match=r"could not be written to .*: No such file or directory\. Give the loop"):
        result[0].sum().backward()
    del result
    assert os.listdir(temp) == []
    assert equal(plain, loss_and_gradients(looped, [weight]))


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOSPC, r"No space left on device\. .* are free there\. Give the loop another directory .*TMPDIR"),
        (errno.EROFS, r"Read-only file system\. Give the loop another directory"),
    ],
)
def test_errors_of_the_disk_say_what_to_do(code, words, tmp_path):
    error = cannot_write(tmp_path / "a.tensors", OSError(code, os.strerror(code)))
    assert re.search(f"could not be written to .*a.tensors: {words}", str(error))


def test_a_folder_that_cannot_be_made(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    step, _, start, xs = noisy_loop()
    with pytest.raises(RegionError, match="could not be written"):
        scan(step, start, xs, tiers=[Tier(name="disk")])

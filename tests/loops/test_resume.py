"""resume=: a run that was killed in the forward or in the backward pass goes on from its files, to the same bits."""

import functools
import os
import random
import signal
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from retape import keep, scan, while_loop
from retape.errors import InvalidInput, RegionError
from retape.torch.loops.resume import JournalFolder, decode, encode
from support.comparing import equal

STEPS = 40


def journal(folder):
    """A folder to which progress is written after every step, not every few seconds."""
    return None if folder is None else JournalFolder(folder, progress_seconds=0.0)


class Stopped(BaseException):
    """Ends a run as a kill would."""


@functools.cache
def counts():
    """Counts down where no walk goes: what differs between the killed run and the resumed one must not be a part of the run."""
    return SimpleNamespace(left=None, runs=0)


def burn():
    now = counts()
    now.runs += 1
    if now.left is not None:
        now.left -= 1
        if now.left < 0:
            raise Stopped


def run_scan(folder=None, *, fuse=None, scale=1.0, reduce=None, **options):
    """A loop with dropout, batch statistics and gradients of xs, from the same start each time; all that must be equal."""
    torch.manual_seed(0)
    counts().left, counts().runs = fuse, 0
    weight = torch.randn(5, 5, requires_grad=True)
    start, xs = torch.randn(3, 5, requires_grad=True), torch.randn(STEPS, 3, 5, requires_grad=True)
    norm = nn.BatchNorm1d(5)
    state = {"calls": 0}

    def step(carry, x):
        burn()
        h, n = carry
        state["calls"] += 1
        h = torch.tanh(nn.functional.dropout(norm(h) @ weight * scale, 0.2) + x)
        return (h, n + 1), {"h": h, "n": n}

    torch.manual_seed(7)
    options = {"snapshots": 4, "block": 1, **options}
    if reduce is not None:
        (h, n), total = scan(step, (start, 0), xs, resume=journal(folder), reduce=reduce, **options)
        ys = total["h"]
    else:
        (h, n), out = scan(step, (start, 0), xs, resume=journal(folder), **options)
        ys = out["h"]
        assert out["n"] == list(range(STEPS))
    drawn = torch.rand(2)
    grads = torch.autograd.grad(h.sum() + (ys * ys).sum(), [weight, start, xs, *norm.parameters()])
    return [*grads, drawn, ys.detach(), *norm.buffers(), torch.tensor([n, state["calls"]])]


def killed(run, folder, fuse, **options):
    with pytest.raises(Stopped):
        run(folder, fuse=fuse, **options)
    return sorted(os.listdir(folder)) if folder.exists() else []


def test_without_a_kill(tmp_path):
    assert equal(run_scan(), run_scan(tmp_path / "run"))
    assert os.listdir(tmp_path) == []


# The step that is measured counts, so the forward ends at 41; revolve then runs 94 more.
@pytest.mark.parametrize("fuse", [0, 1, 5, 25, 39, 40, 41, 44, 60, 90, 120, 130])
@pytest.mark.parametrize("block", [1, 3])
def test_kill_at_every_phase(tmp_path, fuse, block):
    plain = run_scan(block=block)
    whole = counts().runs
    if fuse >= whole:
        return
    killed(run_scan, tmp_path / "run", fuse, block=block)
    assert equal(plain, run_scan(tmp_path / "run", block=block))
    assert counts().runs <= whole + 1
    assert os.listdir(tmp_path) == []


def run_with_a_tensor_twice(folder=None, *, fuse=None):
    torch.manual_seed(0)
    counts().left = fuse
    weight, start = torch.randn(5, 5, requires_grad=True), torch.randn(4, 5, requires_grad=True)

    def step(carry, x):
        burn()
        h = torch.tanh(carry[0] @ weight + carry[1].cos() * carry[0] + x)
        return (h, h), (carry[0] * carry[1]).sum()

    (h, _), ys = scan(step, (start, start), torch.randn(STEPS, 4, 5), resume=journal(folder), snapshots=4, block=1)
    return torch.autograd.grad(h.sum() + ys.square().sum(), [weight, start])


@pytest.mark.parametrize("fuse", [5, 39, 41, 60, 90])
def test_a_tensor_that_is_twice_in_the_carry(tmp_path, fuse):
    plain = run_with_a_tensor_twice()
    killed(run_with_a_tensor_twice, tmp_path / "run", fuse)
    assert equal(plain, run_with_a_tensor_twice(tmp_path / "run"))


def test_the_work_before_the_kill_is_not_done_again(tmp_path):
    run_scan()
    whole = counts().runs
    files = killed(run_scan, tmp_path / "run", 100)
    assert [name.split("-")[0] for name in files].count("end") == 1
    run_scan(tmp_path / "run")
    assert counts().runs < whole - 55


def test_killed_again_and_again(tmp_path):
    plain = run_scan()
    for _ in range(30):
        try:
            result = run_scan(tmp_path / "run", fuse=30)
            break
        except Stopped:
            continue
    assert equal(plain, result)


def test_reduction(tmp_path):
    def add(total, new):
        return {"h": total["h"] + new["h"], "n": new["n"]}

    plain = run_scan(reduce=add)
    for fuse in (20, 80):
        killed(run_scan, tmp_path / "run", fuse, reduce=add)
        assert equal(plain, run_scan(tmp_path / "run", reduce=add))


@pytest.mark.parametrize("fuse", [30, 41, 80])
@pytest.mark.parametrize("damage", ["cut", "remove", "all"])
def test_damaged_files(tmp_path, fuse, damage):
    plain = run_scan()
    killed(run_scan, tmp_path / "run", fuse)
    files = sorted((tmp_path / "run").glob("*.tensors"))
    for path in files if damage == "all" else files[:1]:
        if damage == "remove":
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:-5])
    assert equal(plain, run_scan(tmp_path / "run"))
    assert os.listdir(tmp_path) == []


def test_a_draft_that_a_kill_left_is_no_snapshot(tmp_path):
    plain = run_scan()
    killed(run_scan, tmp_path / "run", 30)
    (tmp_path / "run" / "forward-000000000035.part").write_bytes(b"half a file")
    assert equal(plain, run_scan(tmp_path / "run"))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scale": 2.0}, "closure variable scale: 1.0 in the folder, 2.0 now"),
        ({"snapshots": 5}, "snapshots: 4 in the folder, 5 now"),
        ({"block": 2}, "block: 1 in the folder, 2 now"),
    ],
)
def test_another_run_is_refused(tmp_path, options, words):
    killed(run_scan, tmp_path / "run", 30)
    before = sorted(os.listdir(tmp_path / "run"))
    with pytest.raises(InvalidInput, match=f"holds the journal of another run: {words}"):
        run_scan(tmp_path / "run", **options)
    with pytest.raises(InvalidInput, match="holds the journal of another run"):
        scan(lambda h, x: (h * 2, None), torch.ones(2, requires_grad=True), length=9, resume=tmp_path / "run")
    assert sorted(os.listdir(tmp_path / "run")) == before


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(InvalidInput, match=r"holds 'thesis.txt' and no journal of a loop"):
        run_scan(tmp_path)
    assert os.listdir(tmp_path) == ["thesis.txt"]


def test_a_folder_that_is_there_stays(tmp_path):
    assert equal(run_scan(), run_scan(tmp_path))
    assert os.listdir(tmp_path) == []


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RegionError, match="could not be written to"):
        run_scan(tmp_path / "file" / "run")


def test_retained_graph(tmp_path):
    weight = torch.randn(3, requires_grad=True)

    def step(h, x):
        return torch.tanh(h * weight + x), None

    xs = torch.randn(20, 3)
    plain = scan(step, torch.zeros(3), xs)[0].sum()
    loss = scan(step, torch.zeros(3), xs, resume=tmp_path / "run", snapshots=3)[0].sum()
    (wanted,) = torch.autograd.grad(plain, weight)
    for retain in (True, False):
        (ours,) = torch.autograd.grad(loss, weight, retain_graph=retain)
        assert torch.equal(ours, wanted)
    assert os.listdir(tmp_path) == []


def run_while(folder=None, *, fuse=None, snapshots=4):
    torch.manual_seed(0)
    counts().left, counts().runs = fuse, 0
    weight = torch.randn(5, 5, requires_grad=True)
    start = torch.randn(3, 5, requires_grad=True)

    def step(carry):
        burn()
        h, n = carry
        return torch.tanh(nn.functional.dropout(h @ weight, 0.2)), n + 1

    torch.manual_seed(7)
    (h, n), steps = while_loop(
        lambda carry: carry[1] < 50, step, (start, 0), snapshots=snapshots, resume=journal(folder)
    )
    drawn = torch.rand(2)
    return [*torch.autograd.grad(h.sum(), [weight, start]), drawn, h.detach(), torch.tensor([n, steps])]


@pytest.mark.parametrize("fuse", [0, 3, 30, 50, 51, 60, 100, 140])
def test_while_loop(tmp_path, fuse):
    plain = run_while()
    killed(run_while, tmp_path / "run", fuse)
    assert equal(plain, run_while(tmp_path / "run"))
    assert os.listdir(tmp_path) == []


def test_what_cannot_be_written_is_refused(tmp_path):
    weight = torch.randn(3, requires_grad=True)
    carry = (torch.zeros(3), object())
    with pytest.raises(InvalidInput, match="keeps a object in its carry"):
        scan(lambda c, _: ((c[0] * weight, c[1]), None), carry, length=9, resume=tmp_path / "a", snapshots=3)
    with pytest.raises(InvalidInput, match=r"calls retape\.keep"):
        scan(lambda h, _: (h * weight * keep(2.0), None), torch.zeros(3), length=9, resume=tmp_path / "b", snapshots=3)
    own = random.Random(3)
    with pytest.raises(InvalidInput, match="draws from a Random object"):
        scan(lambda h, _: (h * weight * own.random(), None), torch.zeros(3), length=9, resume=tmp_path / "c")


def test_a_hidden_parameter_must_be_given(tmp_path):
    weight = torch.randn(3, requires_grad=True)
    hidden = types.MappingProxyType({"weight": weight})

    def step(h, _):
        return torch.tanh(h * hidden["weight"]), None

    with pytest.raises(
        RegionError, match=r"uses a parameter of shape \(3,\) that was found neither .* Give it as params="
    ):
        scan(step, torch.ones(3), length=5, resume=tmp_path / "a")
    h, _ = scan(step, torch.ones(3), length=5, resume=tmp_path / "b", params=[weight])
    h.sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize(
    "value", [None, True, 3, 2.5, float("inf"), "ü", b"\0\xff", (1, [2.0, {"a": (b"x",)}], None), {1: 2}]
)
def test_plain_values_are_read_back(value):
    assert decode(encode(value)) == value
    assert type(decode(encode(value))) is type(value)


def test_values_that_are_no_plain_ones():
    with pytest.raises(InvalidInput, match="keeps a set in its carry, its ys or its random state"):
        encode({1, 2})


KILLED = """
import os, signal, sys, torch
sys.path.insert(0, {tests!r})
from loops import test_resume
def burn():
    test_resume.counts().runs += 1
    if test_resume.counts().runs == int(os.environ["KILLED_AT"]):
        os.kill(os.getpid(), signal.SIGKILL)
test_resume.burn = burn
result = test_resume.run_scan({folder!r})
torch.save(result, {out!r})
"""


@pytest.mark.parametrize("at", [30, 75], ids=["forward", "backward"])
def test_kill_minus_nine(tmp_path, at):
    def process(at):
        code = KILLED.format(
            tests=str(Path(__file__).parent.parent), folder=str(tmp_path / "run"), out=str(tmp_path / "out.pt")
        )
        environment = {**os.environ, "KILLED_AT": str(at)}
        return subprocess.run(
            [sys.executable, "-c", code], check=False, capture_output=True, text=True, env=environment
        )

    assert process(at).returncode == -signal.SIGKILL
    assert len(os.listdir(tmp_path / "run")) > 1
    done = process(10**9)
    assert done.returncode == 0, done.stderr
    assert equal(run_scan(), torch.load(tmp_path / "out.pt"))
    assert os.listdir(tmp_path) == ["out.pt"]


def test_a_tensor_and_what_it_was_computed_from_are_an_error_though_the_step_reads_one_of_them(tmp_path):
    """A run that is resumed takes gradients at everything that the step reaches, read or not."""
    module = nn.Linear(3, 3)
    module.aux = module(torch.ones(3)).sum()
    with pytest.raises(
        RegionError,
        match=r"reads, or could \(with resume= all that it reaches counts\), a tensor .* compute it in the step",
    ):
        scan(lambda h, x: (torch.tanh(module(h)), None), torch.zeros(3), length=9, resume=tmp_path / "run")

"""`fit` with a disk for slots that the host has no memory for: which go there, what it costs, and what is refused."""

import gc
import os
import threading
import time

import pytest
import torch

import retape
from retape.core.fit_record import FitRecord
from retape.core.machine import simulate
from retape.core.problem import Tier
from retape.errors import BudgetTooSmall, InvalidInput, PlanMismatch
from retape.report.fit_text import explain
from support import models
from support.comparing import seed
from support.hosts import host_memory
from support.trials import fit_with_host, host_tier

LITTLE = 40_000  # bytes of the host: less than the inputs of all blocks
IN_TRANSIT = 2**22  # a quarter of the pool


@pytest.fixture(autouse=True)
def _host(tmp_path):
    with host_memory(2**24):
        yield
    assert nothing_left(tmp_path), "files or threads were left"


def soon(done):
    """True if something is so in a moment: files are discarded and threads end by themselves."""
    gc.collect()
    end = time.monotonic() + 10.0
    while not done() and time.monotonic() < end:
        time.sleep(0.01)
    return done()


def nothing_left(*disks):
    """True if soon no folder and no thread of a fit is left."""
    return soon(lambda: not folders(*disks) and not threads())


def folders(*disks):
    return [path for disk in disks for path in disk.rglob("retape-spill-*")]


def threads():
    return [each for each in threading.enumerate() if each.name.startswith("retape-spill")]


def small():
    seed()
    model, batch, step = models.llama()
    return model.train(), batch, step


def disk_tier(folder):
    """A disk that is fast beside ops of a millisecond, which the clock counts."""
    return Tier(name="disk", capacity_bytes=2**30, write_bytes_per_second=1e9, read_bytes_per_second=1e9)


def fitted(budget, *, disk=None, **about):
    """A fit with little host memory beside that for what is in transit."""
    model, batch, step = small()
    tier = host_tier(capacity=LITTLE + (IN_TRANSIT if disk else 0))
    given = {"budget": budget, "step": step, "disk": disk, **about}
    return model, batch, step, fit_with_host(tier, model, batch, instruments={"disk_tier": disk_tier}, **given)


def test_slots_go_to_the_disk_and_come_back_and_a_saved_plan_needs_it_too(tmp_path):
    model, batch, step, without = fitted(0.4)
    without.remove()
    model, batch, step, made = fitted(0.4, disk=tmp_path, disk_budget="2MiB")
    assert made.promised.seconds < 0.95 * without.promised.seconds
    assert made.measured.peak_bytes <= made.budget_bytes
    choices, chain = made.record.assignment.choices, made.record.chain
    assert sum(choice.on_disk for choice in choices) >= 3
    assert chain.disk == Tier(name="disk", capacity_bytes=2**21, write_bytes_per_second=1e9, read_bytes_per_second=1e9)
    for tier, on_disk in ((chain.host, False), (chain.disk, True)):
        most = [
            max((o.moved_bytes for o in stage.choices if o.on_disk is on_disk), default=0) for stage in chain.stages
        ]
        assert sum(most) <= tier.capacity_bytes
    assert simulate(chain, made.plan.actions()).seconds == pytest.approx(made.promised.seconds)
    assert FitRecord.from_json(made.record.to_json()) == made.record
    assert "to the disk until backward" in explain(made.record, width=240)
    assert retape.verify(model, batch, step=step).equal
    assert len(folders(tmp_path)) == 1
    made.save(tmp_path / "plan.json")
    made.remove()
    assert nothing_left(tmp_path)
    with pytest.raises(InvalidInput, match=r"moves slots to a disk: give apply\(\) a folder"):
        retape.apply(model, tmp_path / "plan.json")
    again = retape.apply(model, tmp_path / "plan.json", disk=tmp_path)
    assert retape.verify(model, batch, step=step).equal
    again.remove()


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({"disk_budget": "1GiB"}, r"disk_budget needs a folder"),
        ({"disk": "/does/not/exist"}, r"disk='/does/not/exist' is not a folder"),
        ({"disk": "/tmp", "disk_budget": 0.5}, r"disk_budget=0.5 is not a number of bytes"),
        ({"disk": "/tmp", "disk_budget": 2**60}, r"disk_budget is .*, and .* are free in /tmp"),
    ],
)
def test_what_is_refused(about, message):
    with pytest.raises(InvalidInput, match=message):
        fitted(0.5, **about)
    assert not threads()


def gradients(model, batch):
    model.zero_grad()
    model(**batch).loss.backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_two_fits_have_a_disk_each(tmp_path):
    """A fit with another folder and a smaller budget does not change the first, and `remove` takes away what is its own."""
    model, batch, _ = small()
    want = gradients(model, batch)
    disks = [tmp_path / "first", tmp_path / "second"]
    for disk in disks:
        disk.mkdir()
    first_model, _, _, first = fitted(0.4, disk=disks[0], disk_budget="6MiB")
    second_model, _, _, second = fitted(0.4, disk=disks[1], disk_budget="1MiB")
    for fit, model in ((first, first_model), (second, second_model)):
        assert any(choice.on_disk for choice in fit.record.assignment.choices)
        assert all(map(torch.equal, gradients(model, batch), want))
    loss = first_model(**batch).loss
    assert (len(folders(disks[0])), len(folders(disks[1]))) == (1, 1)
    (own,) = folders(disks[1])
    assert soon(lambda: os.listdir(own) == ["lock"]), "the first fit has no file on the second's disk"
    second.remove()
    assert soon(lambda: not folders(disks[1]))
    assert all(map(torch.equal, gradients(first_model, batch), want))
    first.remove()
    assert len(folders(disks[0])) == 1, "a graph of before can still run backward"
    first_model.zero_grad()
    loss.backward()
    got = [p.grad for p in first_model.parameters() if p.grad is not None]
    assert all(map(torch.equal, got, want))
    del loss
    assert nothing_left(*disks)


def test_two_fits_on_one_disk_have_a_folder_and_a_budget_each(tmp_path):
    _, _, _, first = fitted(0.4, disk=tmp_path, disk_budget="6MiB")
    model, batch, step, second = fitted(0.4, disk=tmp_path, disk_budget="1MiB")
    assert len(folders(tmp_path)) == 2
    assert [made.record.chain.disk.capacity_bytes for made in (first, second)] == [6 * 2**20, 2**20]
    first.remove()
    assert soon(lambda: len(folders(tmp_path)) == 1)
    assert retape.verify(model, batch, step=step).equal
    second.remove()


def test_a_fit_that_fails_leaves_no_folder(tmp_path):
    with pytest.raises(BudgetTooSmall):
        fitted("1KiB", disk=tmp_path)
    assert nothing_left(tmp_path)


def test_an_apply_that_fails_leaves_no_folder(tmp_path):
    _, _, _, made = fitted(0.4, disk=tmp_path, disk_budget="2MiB")
    made.remove()
    with pytest.raises(PlanMismatch):
        retape.apply(torch.nn.Linear(2, 2), made, disk=tmp_path)
    assert soon(lambda: not folders(tmp_path))


def test_a_cpu_has_no_other_host(tmp_path):
    model, batch, step = small()
    with pytest.raises(InvalidInput, match="whose memory is the host's"):
        retape.fit(model, batch, step=step, budget=0.8, disk=tmp_path, progress=False)

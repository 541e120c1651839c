"""`fit` with a disk for slots that the host has no memory for: which go there, what it costs, and what is refused."""

import gc
import os

import pytest

import retape
from retape.core.fit_record import FitRecord
from retape.core.machine import simulate
from retape.core.problem import Tier
from retape.errors import InvalidInput
from retape.report.fit_text import explain
from retape.torch.engine.host.copy_streams import STREAMS
from support import models
from support.comparing import seed
from support.hosts import host_memory, spilling_to
from support.trials import fit_with_host, host_tier

LITTLE = 40_000  # bytes of the host: less than the inputs of all blocks
IN_TRANSIT = 2**22  # a quarter of the pool


@pytest.fixture(autouse=True)
def _host():
    with host_memory(2**24), spilling_to(None):
        yield
        gc.collect()
        if STREAMS.spill is not None:
            STREAMS.spill.writer.submit(lambda: None).result()
            assert os.listdir(STREAMS.spill.path) == ["lock"], "files were left"
            STREAMS.spill.close()


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
    assert STREAMS.spill.used_bytes == 0
    made.save(tmp_path / "plan.json")
    made.remove()
    STREAMS.spill.close()
    STREAMS.spill = None
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
    assert STREAMS.spill is None


def test_a_cpu_has_no_other_host(tmp_path):
    model, batch, step = small()
    with pytest.raises(InvalidInput, match="whose memory is the host's"):
        retape.fit(model, batch, step=step, budget=0.8, disk=tmp_path, progress=False)

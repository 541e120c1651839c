"""The simulated device: bytes as autograd saves them, two clocks, values of whole numbers, kernels of a GPU."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from retape.errors import InvalidInput
from retape.forecast.known_devices import cost_model, measured_device
from retape.forecast.simulation.simulator import allocated, simulated, track_simulated
from retape.forecast.simulation.tracing import on_meta, trace_step


@pytest.fixture
def costs():
    return cost_model(measured_device())


def test_bytes_of_a_step_are_those_that_autograd_saves(costs):
    rows = torch.empty(1024, 1024, device="meta", requires_grad=True)
    with simulated(costs) as device, track_simulated(device) as tracker:
        loss = rows.sin().cos().sum()
        tracker.mark("loss")
        loss.backward()
    saved = 4 * 1024 * 1024
    assert tracker.readings[1].live_bytes == saved + 512  # the input of cos; that of sin was there before
    assert max(reading.peak_bytes for reading in tracker.readings) >= 2 * saved


def test_the_allocator_counts_blocks():
    assert allocated(1) == 512
    assert allocated(512) == 512
    assert allocated(11 * 2**20) == 12 * 2**20  # the last half of a segment is not split off
    assert allocated(11 * 2**20 - 512) == 11 * 2**20 - 512


def test_the_device_waits_for_the_host_in_small_ops(costs):
    small, large = (torch.empty(size, device="meta") for size in (8, 2**28))
    with simulated(costs) as device:
        for _ in range(100):
            small + 1
        waiting = device.now() - device.busy_seconds
        before = device.now(), device.busy_seconds
        for _ in range(100):
            large + 1
        busy = device.now() - before[0], device.busy_seconds - before[1]
    assert waiting > 0
    assert busy[0] == pytest.approx(busy[1], rel=0.1)


def test_reading_a_value_waits_for_the_device(costs):
    large = torch.empty(2**28, device="meta")
    with simulated(costs) as device:
        count = torch.arange(4, device="meta").sum()
        large + 1
        assert device.host_seconds < device.device_seconds
        count.item()
        assert device.host_seconds == device.device_seconds


def test_attention_runs_fused_and_dropout_keeps_a_mask_of_bytes(costs):
    query = torch.empty(2, 8, 1024, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    with simulated(costs) as device, track_simulated(device) as tracker:
        mixed = functional.scaled_dot_product_attention(query, query, query, is_causal=True)
        tracker.mark("attention")
        functional.dropout(mixed, 0.1)
    scores = 2 * 8 * 1024 * 1024 * 2
    assert tracker.readings[1].peak_bytes < scores / 4
    assert device.attention_seconds > 0


def test_an_op_that_copies_its_argument_first_takes_the_copy_longer(costs):
    rows = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    mask = torch.empty(4096, 1, dtype=torch.bool, device="meta")
    taken = {}
    for name, run in {
        "in place": lambda: rows.masked_fill_(mask, 0.0),
        "copy": rows.clone,
        "both": lambda: rows.masked_fill(mask, 0.0),
    }.items():
        with simulated(costs) as device:
            run()
            taken[name] = device.busy_seconds
    assert taken["both"] == pytest.approx(taken["in place"] + taken["copy"])


def test_small_whole_numbers_have_values(costs):
    with simulated(costs):
        positions = torch.arange(8, device="meta")
        assert (positions[1:] - positions[:-1] == 1).all()
        assert int(positions.sum()) == 28


def test_masks_of_numbers_have_values(costs):
    """As models make them that were given none."""
    with simulated(costs):
        mask = torch.ones(2, 8, device="meta")
        assert not (1.0 - mask[:, None]).masked_fill(mask[:, None].bool(), -1.0).gt(0).any()


def test_what_is_written_over_known_values_is_not_known(costs):
    rows = torch.empty(8, device="meta")
    for write in (
        lambda part: part.copy_(rows),
        lambda part: part.normal_(),
        lambda part: torch._foreach_add_([part], [rows]),
    ):
        with simulated(costs):
            mask = torch.zeros(2, 8, device="meta")
            other = mask.view(16)
            write(mask[0])
            for each in (mask, other):
                with pytest.raises(InvalidInput, match="reads the value of a tensor"):
                    each.sum().item()


def test_a_model_that_reads_values_is_refused(costs):
    class Decides(nn.Linear):
        def forward(self, rows):
            made = super().forward(rows)
            return made.sum() if made.sum() > 0 else -made.sum()

    with pytest.raises(InvalidInput, match="reads the value of a tensor"):
        trace_step(on_meta(Decides(4, 4)), torch.zeros(2, 4), costs)


def test_a_model_that_fails_is_one_message(costs):
    with pytest.raises(InvalidInput, match="Linear cannot run without data: "):
        trace_step(on_meta(nn.Linear(4, 4)), torch.zeros(2, 5), costs)


def test_weights_are_not_copied():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    made = on_meta(model)
    assert {tensor.device.type for tensor in (*made.parameters(), *made.buffers())} == {"meta"}
    assert model[0].weight.device.type == "cpu"
    assert on_meta(made) is made


def test_a_model_with_checkpoints_of_its_own_is_run_as_it_is(costs):
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1)) for _ in range(4))

        def forward(self, rows):
            for layer in self.layers:
                rows = checkpoint(layer, rows, use_reentrant=False) if self.recompute else layer(rows)
            return rows.sum()

    rows = torch.empty(4096, 64)
    found = {}
    for Checkpointed.recompute in (False, True):
        found[Checkpointed.recompute] = trace_step(on_meta(Checkpointed()), rows, costs, plan=False)
    assert found[True].peak_bytes < found[False].peak_bytes
    assert found[True].seconds > found[False].seconds

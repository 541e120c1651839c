"""`fit` on a model that is spread over the CPU and a GPU: each inside its own budget, gradients bit for bit."""

import pytest
import torch
from torch import nn

import retape
from retape.core.fit_record import FitRecord
from retape.core.problem import Budget, OptionKind
from support.blocks import MlpBlock, mean_square

DEVICE = torch.device("cuda", 0)
NEAR = {"cpu": 0.1, "cuda:0": 0.05}
BLOCKS, BORDER = 8, 4


class Spread(nn.Module):
    """The first blocks on the CPU, the rest on the GPU; the activations go over between them."""

    def __init__(self, width=256):
        super().__init__()
        self.blocks = nn.ModuleList(MlpBlock(width) for _ in range(BLOCKS))
        for block in self.blocks[BORDER:]:
            block.to(DEVICE)

    def forward(self, x):
        for number, block in enumerate(self.blocks):
            x = block(x.to(DEVICE) if number == BORDER else x)
        return mean_square(x)


@pytest.fixture
def spread(deterministic_module):
    torch.manual_seed(0)
    return Spread(), torch.randn(2048, 256)


def fit(model, batch, budget):
    return retape.fit(model, batch, budget=budget, progress=False)


def check_devices(model, batch, made):
    devices = made.record.devices
    assert [each.device for each in devices] == ["cpu", "cuda:0"]
    assert [each.regions for each in devices] == [tuple(range(BORDER)), tuple(range(BORDER, BLOCKS))]
    for each in devices:
        assert each.measured.peak_bytes <= each.budget_bytes
        assert each.plan.promised_peak_bytes == pytest.approx(each.measured.peak_bytes, rel=NEAR[each.device])
    assert retape.verify(model, batch).equal


def options(made, device):
    own = next(each.regions for each in made.record.devices if each.device == device)
    return {made.record.assignment.choices[number].option for number in own}


def test_all_is_kept_where_there_is_room(spread):
    model, batch = spread
    made = fit(model, batch, {"cpu": 1.0, "cuda:0": 1.0})
    assert made.record.assignment.keeps_everything
    check_devices(model, batch, made)


@pytest.mark.parametrize("tight", ["cpu", "cuda:0"])
def test_only_the_tight_device_runs_again(spread, tight):
    model, batch = spread
    roomy = "cuda:0" if tight == "cpu" else "cpu"
    made = fit(model, batch, {tight: 0.4, roomy: "4GiB"})
    assert options(made, roomy) == {OptionKind.KEEP}
    assert options(made, tight) != {OptionKind.KEEP}
    check_devices(model, batch, made)
    made.remove()


@pytest.mark.parametrize("share", [0.7, 0.4])
def test_both_are_tight(spread, share, tmp_path):
    model, batch = spread
    made = fit(model, batch, share)
    assert options(made, "cpu") != {OptionKind.KEEP} != options(made, "cuda:0")
    check_devices(model, batch, made)
    made.save(tmp_path / "plan.json")
    made.remove()
    assert FitRecord.from_json((tmp_path / "plan.json").read_text()) == made.record
    applied = retape.apply(model, tmp_path / "plan.json")
    assert retape.verify(model, batch).equal
    applied.remove()


def test_at_the_floors(spread):
    model, batch = spread
    whole = fit(model, batch, {"cpu": 1.0, "cuda:0": 1.0})
    whole.remove()
    floors = {each.device: each.frontier.floor_bytes for each in whole.record.devices}
    made = fit(model, batch, floors)
    check_devices(model, batch, made)
    made.remove()


def test_microbatches_in_flight_share_each_device(spread):
    model, batch = spread
    made = fit(model, batch, Budget.of({"cpu": 0.9, "cuda:0": 0.9}, in_flight=2))
    for each in made.record.devices:
        fixed = each.measured.base_bytes
        whole = each.frontier.store_all_bytes - each.frontier.fixed_bytes
        assert each.measured.peak_bytes - fixed <= 0.46 * whole
    check_devices(model, batch, made)
    made.remove()

"""Published activation memory reproduced: Korthikanti et al. 2022, arXiv 2205.05198, table 2 and section 4.

Bytes of one transformer layer in 16 bit with dropout and attention in steps: s*b*h*(34 + 5*a*s/h); with tensor and sequence
parallelism over t GPUs all of it is divided by t; without the attention part, which selective recomputation does not keep,
34*s*b*h/t; 2*s*b*h if everything is recomputed. Sizes of the models are those of their table 3 (heads, hidden size), at length 2048.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional

from retape.core.problem import OptionKind
from retape.forecast.known_devices import cost_model, measured_device
from retape.forecast.layout import Layout, OptimizerKind
from retape.forecast.parallel import stage_problems
from retape.forecast.tracing import trace_step

LENGTH = 2048
MODELS = {"22B": (64, 6144), "175B": (96, 12288), "530B": (128, 20480), "1T": (160, 25600)}


class Layer(nn.Module):
    """A layer of GPT-3 as Megatron computed it then: attention in steps, dropout after softmax and after both parts."""

    def __init__(self, heads, hidden):
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, rows):
        batch, length, hidden = rows.shape
        split = self.qkv(self.first(rows)).view(batch, length, self.heads, 3 * hidden // self.heads).transpose(1, 2)
        query, key, value = split.chunk(3, dim=-1)
        scores = torch.baddbmm(
            rows.new_zeros(1, 1, 1),
            query.reshape(-1, length, hidden // self.heads),
            key.reshape(-1, length, hidden // self.heads).transpose(1, 2),
            beta=0.0,
            alpha=0.1,
        )
        weights = functional.dropout(torch.softmax(scores, -1), 0.1)
        mixed = torch.bmm(weights, value.reshape(-1, length, hidden // self.heads))
        mixed = mixed.view(batch, self.heads, length, -1).transpose(1, 2).reshape(batch, length, hidden)
        rows = rows + functional.dropout(self.out(mixed), 0.1)
        return rows + functional.dropout(self.down(functional.gelu(self.up(self.second(rows)))), 0.1)


class Layers(nn.Module):
    def __init__(self, heads, hidden, count=3):
        super().__init__()
        self.layers = nn.ModuleList(Layer(heads, hidden) for _ in range(count))

    def forward(self, rows):
        for layer in self.layers:
            rows = layer(rows)
        return rows.float().mean()


@pytest.fixture(scope="module", params=MODELS)
def traced(request):
    heads, hidden = MODELS[request.param]
    with torch.device("meta"):
        model = Layers(heads, hidden).to(torch.bfloat16)
        rows = torch.empty(1, LENGTH, hidden, dtype=torch.bfloat16, requires_grad=True)
    return heads, hidden, trace_step(model, rows, cost_model(measured_device()), host=False)


def layers_of(traced, tensor=1):
    layout = Layout(gpus=tensor, tensor=tensor)
    (problem,) = stage_problems(traced, layout, measured_device(), OptimizerKind(name="none"), lambda size: 0.0)
    return problem


def middle(problem):
    return next(stage for stage in problem.chain.stages if stage.name == "layers.1")


@pytest.mark.parametrize("tensor", [1, 8])
def test_a_layer_keeps_what_the_paper_counts(traced, tensor):
    heads, hidden, step = traced
    expected = LENGTH * hidden * (34 + 5 * heads * LENGTH / hidden) / tensor
    assert middle(layers_of(step, tensor)).tape_bytes == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("tensor", [1, 8])
def test_selective_recomputation_without_the_attention_part(traced, tensor):
    """Holding 34*s*b*h/t is enough to re-run less than a quarter of the layer: the part that is quick to compute."""
    _, hidden, step = traced
    stage = middle(layers_of(step, tensor))
    limit = 34 * LENGTH * hidden / tensor
    inside = [option for option in stage.options if option.held_bytes <= 1.05 * limit]
    cheapest = min(inside, key=lambda option: option.rerun_seconds)
    assert cheapest.held_bytes >= 0.5 * limit
    assert cheapest.rerun_seconds < stage.forward_seconds / 4


@pytest.mark.parametrize("tensor", [1, 8])
def test_full_recomputation_keeps_the_input_of_each_layer(traced, tensor):
    _, hidden, step = traced
    recomputed = middle(layers_of(step, tensor)).options[-1]
    assert recomputed.kind is OptionKind.RECOMPUTE
    assert recomputed.held_bytes == 2 * LENGTH * hidden // tensor


def test_interleaving_holds_more_by_the_factor_of_the_paper():
    """Section 4.2.3: the first of p stages with m parts each holds 1 + (p - 1)/(p*m) times the activations of all layers."""
    plain = Layout(gpus=8, pipeline=8, accumulate=64)
    parts = Layout(gpus=8, pipeline=8, interleave=3, accumulate=64)
    assert plain.in_flight(0) == 8
    assert parts.in_flight(0) == pytest.approx(8 * (1 + 7 / 24), rel=0.03)
    assert plain.in_flight(7) == 1

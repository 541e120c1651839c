"""Parts of regions in tiles: which they are, that plans use them where little room is left, and what they cost in precision."""

import copy
import functools

import pytest
import torch
import transformers as hf
from torch import nn

import retape
from retape.core.actions import Backward, Forward, Load, Tape
from retape.core.assignment import Assignment, Choice, assign
from retape.core.problem import OptionKind
from retape.report.fit_text import why
from retape.report.region_rows import region_rows
from retape.torch.engine.policy import Check
from retape.torch.planning import region_variants
from retape.torch.planning.attach import is_attached, put_on, take_off
from retape.torch.planning.executor import Executor
from retape.torch.planning.region_variants import parts_of, treats_rows_independently
from retape.torch.planning.tuning import TUNING
from support import models
from support.blocks import TiledMlpBlock
from support.comparing import seed
from support.stages import region_stage
from support.trials import fit_by_ops


@functools.cache
def calls():
    """The rows of each call of an MLP, kept where nothing looks: what a module counts itself would be put back, and checked again."""
    return []


class Mlp(nn.Module):
    def __init__(self, width=16, wide=64, mixes=False, drops=0.0):
        super().__init__()
        self.up, self.down = nn.Linear(width, wide), nn.Linear(wide, width)
        self.mixes, self.drops = mixes, drops

    def forward(self, x):
        calls().append(x.shape[-2])
        hidden = nn.functional.gelu(self.up(x))
        if self.mixes:
            hidden = hidden - hidden.mean(-2, keepdim=True)
        return self.down(nn.functional.dropout(hidden, self.drops))


class Blocks(nn.Module):
    def __init__(self, count=3, **settings):
        super().__init__()
        self.layers = nn.ModuleList(TiledMlpBlock(mlp=Mlp(**settings)) for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def loss(model, batch):
    return model(batch).float().square().mean()


def in_tiles(model, tiles, **more):
    """Put a plan on the model that recomputes every block with its MLP in tiles."""
    regions = {f"layers.{i}": layer for i, layer in enumerate(model.layers)}
    about = {"option": OptionKind.TILE, "tiles": tiles, "tiled": ("mlp",), **more}
    assignment = Assignment(choices=tuple(Choice(name=name, **about) for name in regions))
    names = {id(layer): name for name, layer in regions.items()}
    put_on(model, regions, Executor(assignment, names, check=Check.METADATA))
    return regions


# --- which parts ----------------------------------------------------------------------------------------------------------


def test_the_parts_of_blocks_that_look_row_wise():
    assert list(parts_of(TiledMlpBlock(mlp=Mlp()))) == ["mlp"]
    llama, gpt2 = models.llama()[0].model.layers[0], models.gpt2()[0].transformer.h[0]
    assert "mlp" in parts_of(llama)
    assert "mlp" in parts_of(gpt2)
    experts = parts_of(models.mixtral()[0].model.layers[0])
    assert not any("mlp" in name or "moe" in name for name in experts), "what it routes is looked at elsewhere"


@pytest.mark.parametrize("spoil", ["hook", "buffer", "one linear layer"])
def test_parts_that_are_left_alone(spoil):
    block = TiledMlpBlock(mlp=Mlp())
    if spoil == "hook":
        block.mlp.up.register_forward_hook(lambda *_: None)
    elif spoil == "buffer":
        block.mlp.register_buffer("seen", torch.zeros(3))
    else:
        block.mlp.down = nn.Identity()
    assert parts_of(block) == {}


@pytest.mark.parametrize(
    ("settings", "wanted"), [({}, True), ({"mixes": True}, False), ({"drops": 0.5}, False)], ids=["mlp", "mix", "drop"]
)
def test_parts_are_asked_on_a_few_rows(settings, wanted):
    seed()
    part = Mlp(**settings)
    assert treats_rows_independently(part.forward, torch.randn(1, 8, 16)) is wanted
    assert part.up.weight.grad is None


def test_a_part_that_returns_something_else_is_left_alone():
    seed()
    part = Mlp()
    assert not treats_rows_independently(lambda x: (part(x), 1), torch.randn(1, 8, 16))
    assert not treats_rows_independently(lambda x: part(x).sum(), torch.randn(1, 8, 16))
    assert not treats_rows_independently(lambda x: part(x).detach(), torch.randn(1, 8, 16))


# --- how they run --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("inputs", [(), (0,)], ids=["input held", "input moved"])
def test_a_re_run_stops_where_the_tiles_begin(inputs):
    """Forward: each slice once. Backward: each slice once; the re-run of the block ends when the MLP's rows are there."""
    seed()
    model, x = Blocks(count=2), torch.randn(2, 12, 16)
    regions = in_tiles(model, 4, moved_inputs=inputs)
    loss(model, x).backward()  # rows are asked about on first use
    calls().clear()
    out = loss(model, x)
    assert calls() == [3] * 4 * 2
    out.backward()
    assert calls() == [3] * 8 * 2
    take_off(model, regions)
    assert not any(map(is_attached, model.modules()))


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_error_against_float64_is_no_larger_than_plain(dtype, number):
    torch.manual_seed(number)
    model = Blocks(count=2).to(dtype)
    exact = copy.deepcopy(model).double()
    x = torch.randn(1, 256, 16, dtype=dtype)

    def gradients(model, x):
        x = x.clone().requires_grad_()
        total = model(x).to(torch.float64).square().sum()
        return [gradient.double() for gradient in torch.autograd.grad(total, [x, *model.parameters()])]

    truth, others = gradients(exact, x.double()), gradients(model, x)
    regions = in_tiles(model, 8)
    ours = gradients(model, x)
    take_off(model, regions)

    def error(found):
        return float(torch.stack([(a - b).norm() / b.norm() for a, b in zip(found, truth, strict=True)]).norm())

    assert error(ours) <= 1.1 * error(others)


def test_a_part_without_a_region_around_it_runs_as_it_is():
    seed()
    model, x = Blocks(count=1), torch.randn(1, 12, 16)
    regions = in_tiles(model, 4)
    calls().clear()
    model.layers[0].mlp(x)
    assert calls() == [12]
    take_off(model, regions)


# --- plans ---------------------------------------------------------------------------------------------------------------


def wide_llama():
    seed()
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 512, "num_hidden_layers": 4}
    config = hf.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    ids = torch.randint(0, 64, (1, 256))
    return hf.LlamaForCausalLM(config).train(), {"input_ids": ids, "labels": ids}


@pytest.fixture(scope="module")
def tight(tmp_path_factory):
    """A wide MLP in a budget that one block by itself would pass."""
    model, batch = wide_llama()
    made = fit_by_ops(model, batch, budget=0.15, options=retape.ALL)
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    made.save(path)
    verified = retape.verify(model, batch)
    text = made.explain()
    made.remove()
    return model, batch, made, path, verified, text


def test_a_block_that_does_not_fit_is_run_in_tiles(tight):
    model, _, made, _, verified, text = tight
    chosen = made.record.assignment.choices
    assert all(choice.tiles > 1 and choice.tiled == ("mlp",) for choice in chosen)
    assert made.measured.peak_bytes <= made.record.budget_bytes
    assert made.measured.peak_bytes == pytest.approx(made.promised.peak_bytes, rel=0.05)
    assert verified.worst.worst < 1e-4
    assert f"in {chosen[0].tiles} tiles" in why(region_rows(made.record)[0], everything=False)
    assert "tile" in text
    assert not any(map(is_attached, model.modules()))


def test_without_tiles_the_same_budget_is_too_small(tight):
    model, batch, made, *_ = tight
    with pytest.raises(retape.errors.BudgetTooSmall) as caught:
        retape.fit(model, batch, budget=made.record.budget_bytes, progress=False)
    assert caught.value.floor_bytes > made.record.budget_bytes


def test_a_saved_plan_runs_in_the_same_tiles(tight):
    model, batch, made, path, *_ = tight
    again = retape.apply(model, path)
    assert again.record.assignment == made.record.assignment
    assert is_attached(model.model.layers[0].mlp)
    assert retape.verify(model, batch).worst.worst < 1e-4
    again.remove()
    assert not any(map(is_attached, model.modules()))


def test_more_tiles_are_lower_and_are_measured(tight):
    *_, made, _, _, _ = tight
    stage = made.record.chain.stages[2]
    tiles = [way for way in stage.options if way.kind is OptionKind.TILE]
    peaks = [way.held_bytes + way.backward_transient_bytes for way in tiles]
    assert len(tiles) >= 3
    assert peaks == sorted(peaks, reverse=True)
    whole = stage.options[-1]
    assert peaks[0] < whole.held_bytes + whole.backward_transient_bytes


def test_a_stage_that_is_in_tiles_in_a_later_pass_is_so_from_the_first():
    tiled = (OptionKind.TILE, {"tiles": 4, "tiled": ("mlp",)})
    stages = tuple(region_stage(name, OptionKind.KEEP, tiled) for name in "abc")
    first = [Forward(0, 2), Tape(2), Backward(2)]
    made = assign(stages, [*first, Load(0), Tape(0, 1), Tape(1), Backward(1), Backward(0)])
    assert [(choice.tiles, choice.tiled) for choice in made.choices] == [(4, ("mlp",)), (1, ()), (1, ())]
    assert Assignment.from_dict(made.to_dict()) == made


def test_what_mixes_rows_is_never_in_tiles():
    """Whatever the budget: the part was asked, and there is nothing to measure."""
    seed()
    model = Blocks(mixes=True)
    made = retape.fit(model, torch.randn(1, 64, 16), budget=0.5, options="all", step=loss, progress=False)
    assert all(choice.tiles == 1 for choice in made.record.assignment.choices)
    assert not any(way.kind is OptionKind.TILE for stage in made.record.chain.stages for way in stage.options)
    assert retape.verify(model, torch.randn(1, 64, 16), step=loss).equal
    made.remove()


def test_a_run_that_fails_ends_the_measurement(monkeypatch):
    seed()
    block, real = TiledMlpBlock(mlp=Mlp()), region_variants.run_region

    def failing(*args, policy, **keywords):
        if policy.tiles > 2:
            raise torch.OutOfMemoryError("no room")
        return real(*args, policy=policy, **keywords)

    monkeypatch.setattr(region_variants, "run_region", failing)
    x = torch.randn(1, 64, 16, requires_grad=True)
    device = torch.device("cpu")
    how = {"parameters": block.parameters(), "device": device, "tuning": TUNING}
    found = region_variants.measured_tiles(block.forward, (x,), {}, **how)
    assert [run.tiles for run in found] == [1, 2]
    assert x.grad is None


def test_code_that_flattens_its_rows_is_run_in_tiles():
    """GPT-2's layers flatten their input with `view`, which refuses a slice of a batch as it lies."""

    class Flattening(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

        def forward(self, rows):
            return self.down(self.up(rows.view(-1, 8)).tanh()).view(rows.shape)

    assert treats_rows_independently(Flattening(), torch.randn(2, 16, 8))


def test_code_that_does_not_take_slices_is_left_alone():
    class Stubborn(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

        def forward(self, rows):
            if rows.shape[-2] != 16:
                raise RuntimeError("sixteen rows or none")
            return self.down(self.up(rows))

    assert not treats_rows_independently(Stubborn(), torch.randn(2, 16, 8))

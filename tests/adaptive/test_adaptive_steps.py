"""From one step to the next: entered again, layers unfrozen, an optimizer's state that comes late, and what an error leaves behind."""

import gc
import logging

import pytest
import torch
from torch import nn

import retape
from retape.core.problem import Budget
from retape.errors import BudgetTooSmall, UnsupportedTransform
from retape.torch.adaptive.manager import Adaptive
from retape.torch.adaptive.needs import RegionKinds
from retape.torch.adaptive.tuning import AdaptiveInstruments, AdaptiveTuning, DeviceMemory
from retape.torch.engine.context import THREAD
from retape.torch.measure.memory_meter import present_bytes, track_memory
from retape.torch.planning.attach import is_attached
from support.clocks import FakeClock
from support.comparing import assert_equal
from support.comparing import parameter_gradients as gradients
from support.memory import CPU
from support.memory import step_peak_bytes as peak_above
from support.ops import FailingOp

WIDTH = 32


class CheapBlock(nn.Module):
    """Saves several tensors the size of its input, whichever of its weights are trained."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.second(torch.tanh(torch.sin(self.first(x))))


class Model(nn.Module):
    def __init__(self, blocks=8):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(CheapBlock() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


X = torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(1))


def loss_step(model):
    model.zero_grad(set_to_none=False)
    model(X).backward()


# --- entered again -------------------------------------------------------------------------------------------------


def test_entered_around_each_step_every_step_is_under_the_budget():
    model = Model()
    loss_step(model)
    whole, wanted = peak_above(lambda: loss_step(model)), gradients(model)
    live = retape.adaptive(model, budget=retape.Budget.activations(int(0.6 * whole)))
    for _ in range(4):
        before = live.stats()
        with live:
            assert is_attached(model.blocks[0])
            loss_step(model)
        assert not is_attached(model.blocks[0]), "outside the block the model is as it was"
        assert_equal(gradients(model), wanted)
        assert live.stats().regions == before.regions + 8
    assert live.stats().reruns > before.reruns
    assert live.stats().steps == 4
    with live:
        assert peak_above(lambda: loss_step(model)) <= 0.6 * whole


def test_what_was_learned_goes_with_it_from_one_block_to_the_next():
    model = Model()
    loss_step(model)
    live = retape.adaptive(model, budget="1GiB")
    for _ in range(5):
        with live:
            loss_step(model)
    stats = live.stats()
    assert (stats.steps, stats.weighed_steps, stats.plain_steps) == (5, 2, 3)


def test_removed_it_is_gone_until_it_is_entered_again():
    model = Model()
    live = retape.adaptive(model, budget="1GiB")
    live.remove()
    live.remove()
    loss_step(model)
    assert live.stats().regions == 0
    with live:
        with live:
            loss_step(model)
        loss_step(model)
    assert live.stats().regions == 16, "the end of an inner block is not the end"
    loss_step(model)
    assert live.stats().regions == 16


def test_entered_again_over_a_plan_that_was_fitted_meanwhile():
    model = Model()
    live = retape.adaptive(model, budget="1GiB")
    live.remove()
    fitted = retape.fit(model, (X,), budget=0.7, progress=False)
    with live:
        loss_step(model)
    assert live.stats().regions == 8
    fitted.remove()
    assert type(model.blocks[0]) is CheapBlock
    with live:
        loss_step(model)
    assert live.stats().regions == 16
    assert type(model.blocks[0]) is CheapBlock


class LimitedMemory(DeviceMemory):
    """The CPU's memory, whose allocator notes the limits that it is given."""

    enforces_limit = True
    limits: list[float]

    def total_bytes(self):
        return 1 << 40

    def set_limit_share(self, share):
        self.limits.append(share)


def test_a_step_that_goes_on_in_another_block_is_limited_again():
    model, memory = Model(), LimitedMemory(CPU)
    memory.limits = []
    managed_always = AdaptiveTuning(steps_before_unmanaged=1 << 30)
    fakes = AdaptiveInstruments(memory=lambda device: memory)
    live = Adaptive(model, Budget.of("1GiB"), tuning=managed_always, instruments=fakes)
    for _ in range(3):  # the first two are measured, and not limited
        with live:
            loss_step(model)
    with live:
        first = model(X)
    assert memory.limits[-1] == 1.0, "removed at the end of the block"
    with live:
        loss = first + model(X)
        assert memory.limits[-1] < 1.0
        loss.backward()
    assert memory.limits[-1] == 1.0


# --- other weights are trained -------------------------------------------------------------------------------------


def freeze(model, frozen):
    for block in model.blocks:
        block.requires_grad_(not frozen)


@pytest.mark.parametrize("first", [0, 4])
def test_unfrozen_layers_are_noticed(first):
    """With everything from one block on trained the step takes far more than that of the head, and must be learned anew."""
    model = Model()
    loss_step(model)
    whole, wanted = peak_above(lambda: loss_step(model)), gradients(model)
    freeze(model, True)
    head = peak_above(lambda: loss_step(model))
    budget = int(0.75 * whole) if not first else int(0.4 * whole)
    assert 1.2 * head < budget
    live = retape.adaptive(model, budget=retape.Budget.activations(budget))
    for _ in range(4):
        loss_step(model)
    assert live.stats().plain_steps > 0
    for block in model.blocks[first:]:
        block.requires_grad_(True)
    before = live.stats()
    for _ in range(3):
        loss_step(model)
    after = live.stats()
    assert (after.weighed_steps, after.plain_steps) == (before.weighed_steps + 1, before.plain_steps)
    assert peak_above(lambda: loss_step(model)) <= budget
    assert live.stats().reruns > 0
    for name, gradient in gradients(model).items():
        assert torch.equal(gradient, wanted[name]) == model.get_parameter(name).requires_grad, (
            "frozen ones are zero here"
        )
    live.remove()


def test_frozen_weights_behind_a_trained_one_are_of_another_kind():
    """Their own weights are as before, and what they save is not."""
    model, kinds = Model(), RegionKinds(AdaptiveTuning())
    freeze(model, True)
    assert kinds.train(model.parameters())
    frozen = {kinds.of(block, (X,), {}) for block in model.blocks}
    assert len(frozen) == len(kinds) == 1
    model.blocks[0].requires_grad_(True)
    assert kinds.train(model.parameters())
    assert not kinds.train(model.parameters()), "as before"
    first, *rest = [kinds.of(block, (X,), {}) for block in model.blocks]
    assert len({first, *rest, *frozen}) == len(kinds) == 3


def test_layers_that_are_trained_in_turns_are_learned_once():
    model = Model()
    live = retape.adaptive(model, budget="1GiB")
    for turn in range(12):
        freeze(model, bool(turn % 2))
        loss_step(model)
    stats = live.stats()
    assert (stats.weighed_steps, stats.plain_steps) == (2, 8)
    live.remove()


def test_regions_by_hand_are_of_another_kind_once_they_are_unfrozen():
    block = CheapBlock().requires_grad_(False)
    weight = nn.Parameter(torch.ones(WIDTH))
    live = retape.adaptive(budget="1GiB")
    for turn in range(5):
        block.requires_grad_(turn >= 3)
        for function in (block, lambda x: block(x) + 1):
            with live:
                retape.checkpoint(function, X * weight).sum().backward()
    assert len(live.governor.kinds) == 4, "two functions, frozen and not"
    assert live.stats().weighed_steps > 2


# --- the bytes between steps ---------------------------------------------------------------------------------------


def bases_around_a_late_step(model, *, set_to_none, **how):
    """The base of each of seven steps, with the optimizer's first step after the fifth of them; and the least bytes of its state."""
    optimizer = torch.optim.AdamW(model.parameters(), **how)
    live = retape.adaptive(model, budget="1GiB")
    bases = []
    for turn in range(1, 8):
        model(X).backward()
        bases.append(live.stats().base_bytes)
        if turn == 5:
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
    live.remove()
    return bases, 2 * sum(p.nbytes for p in model.parameters())


def test_an_optimizer_whose_state_comes_late_is_counted():
    bases, state = bases_around_a_late_step(Model(), set_to_none=False)
    assert bases[5] - bases[4] >= state
    assert bases[6] == bases[5]


@pytest.mark.parametrize("how", [{}, {"foreach": True}, {"fused": True}])
def test_every_optimizer_leaves_traces(how):
    bases, state = bases_around_a_late_step(Model(1), set_to_none=True, **how)
    assert bases[5] - bases[4] >= state


def test_the_state_of_unfrozen_layers_is_counted():
    model = Model()
    freeze(model, True)
    optimizer = torch.optim.AdamW(model.parameters())
    clock = FakeClock()

    def slow_count(device, own):  # it takes so long that it is done only if it must be
        clock.advance(1e9)
        return present_bytes(device, own)

    live = Adaptive(model, Budget.of("1GiB"), instruments=AdaptiveInstruments(clock=clock, present_bytes=slow_count))
    bases = []
    for turn in range(1, 9):
        model(X).backward()
        bases.append(live.stats().base_bytes)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        freeze(model, turn < 6)
    live.remove()
    assert bases[5] == bases[4], "nothing has changed"
    assert bases[7] - bases[6] >= 2 * sum(p.nbytes for p in model.blocks.parameters())


def test_what_earlier_scales_saw_is_not_seen_going_in_a_later_one():
    """A cycle of tensors that were allocated in one measurement, and that Python collects in the middle of another."""
    model, calls = Model(), []
    loss_step(model)
    wanted = peak_above(lambda: loss_step(model))
    gc.collect()
    gc.disable()
    model.blocks[0].register_forward_pre_hook(lambda *_: calls.append(gc.collect()))
    try:
        with track_memory(CPU):
            cycle = [torch.ones(16 * wanted)]
            cycle.append(cycle)
            del cycle
        live = retape.adaptive(model, budget="1GiB")
        loss_step(model)
        stats = live.stats()
    finally:
        gc.enable()
    live.remove()
    assert stats.weighed_steps == len(calls) == 1
    assert stats.peak_bytes[0] - stats.base_bytes >= 0.9 * wanted


def test_gradients_that_a_step_frees_and_makes_again_are_no_need_of_its_regions():
    """A block that begins with gradients of before, and frees them: the next ones take their place."""
    model, x, kept = Model(), X[:16], []
    model(x).backward()
    live = Adaptive(None, Budget.activations("50KiB"))
    for _ in range(4):
        with live:
            model.zero_grad()
            y = x
            for block in model.blocks:
                y = retape.checkpoint(block, y, use_reentrant=False)
            model.head(y).square().mean().backward()
        before = live.stats()
        kept += [parameter.grad for parameter in model.parameters()] if not kept else []  # the next ones are elsewhere
        model.zero_grad()
        model(x).backward()
    live.remove()
    assert before.weighed_steps == 2
    assert before.reruns
    assert before.peak_bytes[-1] - before.base_bytes <= 50 << 10
    assert before.over_budget <= 2, "only steps that are measured pass it"


# --- parts of a model that are called without it ----------------------------------------------------------------------


def blocks_step(model, rows=256):
    model.zero_grad(set_to_none=False)
    y = X[:rows]
    for block in model.blocks:
        y = block(y)
    y.square().mean().backward()


def test_a_region_that_is_called_without_the_model_begins_a_step():
    """It ends with its backward: the budget is the one that was asked for, and while everything fits nothing is dropped."""
    model, plain = Model(), Model()
    live = retape.adaptive(model, budget="64MiB")
    for _ in range(4):
        blocks_step(model)
    stats = live.stats()
    assert (stats.steps, stats.budget_bytes, stats.evictions, stats.reruns, stats.over_budget) == (4, 64 << 20, 0, 0, 0)
    blocks_step(plain)
    assert_equal(gradients(model), gradients(plain))
    live.remove()


def test_parts_of_a_model_stay_inside_the_budget():
    model, plain = Model(), Model()
    blocks_step(plain)
    whole = peak_above(lambda: blocks_step(plain))
    live = retape.adaptive(model, budget=Budget.activations(int(0.6 * whole)))
    for _ in range(3):
        blocks_step(model)
    model.zero_grad(set_to_none=False)
    live.stats()  # ends the step, whose memory tracker may still run
    assert peak_above(lambda: blocks_step(model)) <= 0.6 * whole
    assert_equal(gradients(model), gradients(plain))
    assert live.stats().reruns
    live.remove()


def test_a_part_that_is_called_in_the_step_of_the_model_belongs_to_it():
    """Between the model's forward and its backward: with regions, and in a step that runs without them."""
    model = Model()
    live = retape.adaptive(model, budget="64MiB")
    for number in range(1, 6):
        model.zero_grad(set_to_none=False)
        loss = model(X)
        (loss + model.blocks[0](X).square().mean()).backward()
        assert live.stats().steps == number
    for number in range(6, 12, 2):  # one after the other
        loss_step(model)
        blocks_step(model)
        assert live.stats().steps == number + 1
    assert live.stats().reruns == 0
    live.remove()


# --- batches of other sizes -----------------------------------------------------------------------------------------


class WideBlock(nn.Module):
    """Needs several times the bytes of its input that are never dropped: nothing of a single region's backward can be."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16 * WIDTH), nn.Linear(16 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


def rows_step(model, rows):
    model.zero_grad(set_to_none=False)
    model(X[:rows]).square().mean().backward()


def test_a_batch_larger_than_one_that_does_not_fit_is_refused_without_being_measured():
    """The first two steps are measured whatever they take; from then on the budget holds, also for sizes never seen."""
    torch.manual_seed(0)
    model, other = (nn.Sequential(*(WideBlock() for _ in range(4))) for _ in range(2))
    small = peak_above(lambda: rows_step(other, 32))
    live = retape.adaptive(model, budget=Budget.activations(int(1.2 * small)))
    for rows in (32, 128, 32):
        rows_step(model, rows)
    before = live.stats()
    for rows in (128, 129, 130, 136, 129, 128):
        with pytest.raises(BudgetTooSmall, match=r"The (forward|backward|rerun|outside) of WideBlock needs") as caught:
            rows_step(model, rows)
        assert caught.value.floor_bytes > caught.value.budget_bytes == live.stats().budget_bytes
        del caught
        gc.collect()
    assert live.stats().weighed_steps == before.weighed_steps, "a step that is refused teaches nothing"
    rows_step(model, 40)  # smaller than what is known not to fit: it is tried
    assert live.stats().weighed_steps == before.weighed_steps + 1
    rows_step(model, 32)
    assert max(list(live.stats().peak_bytes)[2:]) <= live.stats().budget_bytes
    live.remove()


def test_over_budget_counts_the_steps_whose_peak_passed_it(caplog):
    """Each once, however many of its phases did; an estimate that does not fit is none in a step that is measured and does."""
    torch.manual_seed(0)
    model, other = (nn.Sequential(*(WideBlock() for _ in range(4))) for _ in range(2))
    rows_step(other, 128)
    wide = peak_above(lambda: rows_step(other, 128))
    live = retape.adaptive(model, budget=Budget.activations(int(0.6 * wide)))
    with caplog.at_level(logging.WARNING, logger="retape"):
        for rows in (32, 48, 72, 100, 128, 100):
            rows_step(model, rows)
        assert (live.stats().over_budget, max(live.stats().peak_bytes) <= live.stats().budget_bytes) == (0, True)
        assert not caplog.records
        rows_step(model, 256)
    stats = live.stats()
    live.remove()
    assert stats.peak_bytes[-1] > stats.budget_bytes
    assert stats.over_budget == sum(peak > stats.budget_bytes for peak in stats.peak_bytes) == 1
    assert "over the budget    in one step" in str(stats)
    assert "The bytes of a batch of a new size are known only once a step with it was measured" in caplog.text
    assert "depend on the data" not in caplog.text


def test_gradients_beside_those_of_before_are_a_need():
    """Gradients of the task before that user code keeps, as for PCGrad: the next ones come on top."""
    model, x = Model(), X[:2]
    model(x).backward()
    gradient_bytes = sum(parameter.nbytes for parameter in model.parameters())
    live = Adaptive(None, Budget.activations("1MiB"))
    for _ in range(3):
        kept = [parameter.grad for parameter in model.parameters()]
        with live:
            model.zero_grad()
            y = x
            for block in model.blocks:
                y = retape.checkpoint(block, y, use_reentrant=False)
            model.head(y).square().mean().backward()
    stats = live.stats()
    live.remove()
    assert stats.weighed_steps == 2
    assert min(stats.peak_bytes) - stats.base_bytes >= gradient_bytes == sum(gradient.nbytes for gradient in kept)


# --- what is refused, and said ---------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own: its compiler uses deprecated names
def test_blocks_compiled_with_cuda_graphs_are_refused():
    model = Model(3)
    model.blocks[1].compile(mode="reduce-overhead")
    with pytest.raises(UnsupportedTransform, match=r"Region blocks.1 is compiled with CUDA graphs"):
        retape.adaptive(model, budget="1GiB")
    assert type(model) is Model
    whole = torch.compile(Model(3), mode="reduce-overhead")
    with pytest.raises(UnsupportedTransform, match="the model itself is compiled with CUDA graphs"):
        retape.adaptive(whole, budget="1GiB")


def outside():
    return not THREAD.runs


def test_out_of_memory_outside_regions_says_what_to_do():
    model = Model(3)
    live = retape.adaptive(model, budget="1GiB")
    with live, FailingOp(0, outside) as counter:
        model(X).backward()
    message = r"outside any region's forward or re-run .* call zero_grad\(\) and repeat every step .* Lower the budget"
    with pytest.raises(BudgetTooSmall, match=message), live, FailingOp(counter.count - 4, outside):
        model(X).backward()
    model.zero_grad()
    model(X).backward()
    wanted = gradients(model)
    model.zero_grad()
    with live:
        model(X).backward()
    assert all(torch.equal(parameter.grad, wanted[name]) for name, parameter in model.named_parameters())


def test_over_a_plan_the_loss_stays_whole_and_that_is_said_once(caplog):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=64, n_embd=16, n_layer=2, n_head=2, n_positions=16)
    model = transformers.GPT2LMHeadModel(config).train()
    tokens = torch.randint(0, 64, (2, 8))
    given = {"input_ids": tokens, "labels": tokens}
    fitted = retape.fit(model, given, budget=0.9, progress=False)
    with caplog.at_level(logging.WARNING, logger="retape"):
        live = retape.adaptive(model, budget="1GiB", options=retape.ALL)
        for _ in range(2):
            with live:
                assert model(**given).logits is not None
    said = [record.message for record in caplog.records if "leaves the plan as it is" in record.message]
    assert len(said) == 1
    assert "GPT2LMHeadModel is fitted with its whole logits" in said[0]
    fitted.remove()

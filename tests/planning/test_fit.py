"""`fit`: what it leaves as it was, what it refuses, and everyday training with it."""

import copy
import pickle
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import retape
from retape.core.problem import OptionKind
from retape.core.solve import held_bytes
from retape.errors import BudgetTooSmall, InvalidInput, PlanFormatError, PlanMismatch
from retape.torch.planning.instruments import FitInstruments
from support import models
from support.comparing import assert_equal, parameter_gradients
from support.fits import regions_run
from support.trials import fit_with

fit = partial(retape.fit, progress=False)


def run(model, batch, seed=1):
    """One step from a seed: loss and gradients."""
    torch.manual_seed(seed)
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), parameter_gradients(model)


@pytest.fixture
def gpt2():
    model, batch, _ = models.make("gpt2")
    return model, batch


@pytest.fixture
def fitted(gpt2):
    model, batch = gpt2
    made = fit(model, batch, budget=0.5)
    yield model, batch, made
    made.remove()


# --- what stays as it was ---------------------------------------------------------------------------------------------


def test_gradients_that_were_there_stay(gpt2):
    model, batch = gpt2
    model(**batch).loss.backward()
    before = {name: (p.grad, p.grad.clone()) for name, p in model.named_parameters()}
    fit(model, batch, budget=0.5).remove()
    for name, parameter in model.named_parameters():
        assert parameter.grad is before[name][0]
        assert torch.equal(parameter.grad, before[name][1])


def test_buffers_stay(request):
    model, batch, step = models.make("resnet")
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    fit(model, batch, budget=0.7, step=step).remove()
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


class Averaging(nn.Module):
    """Its average is another tensor after every forward, and its count a buffer only from the first one on."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.register_buffer("average", torch.zeros(16))
        self.register_buffer("count", None)

    def forward(self, x):
        self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        self.count = torch.ones(()) if self.count is None else self.count + 1
        return x + self.down(torch.tanh(self.up(x - self.average)))


def test_buffers_that_a_forward_binds_anew_stay():
    torch.manual_seed(0)
    model, batch = nn.Sequential(*(Averaging() for _ in range(4))), torch.randn(64, 16)
    before = [(block.average, block.average.clone()) for block in model]

    def untouched():
        return all(block.count is None for block in model) and all(
            block.average is tensor and torch.equal(tensor, value)
            for block, (tensor, value) in zip(model, before, strict=True)
        )

    made = fit(model, batch, budget=0.7, step=lambda model, batch: model(batch).square().mean())
    assert untouched()
    assert retape.verify(model, batch, step=lambda model, batch: model(batch).square().mean()).equal
    assert untouched()
    made.remove()


def test_a_copy_runs_its_own_weights(fitted):
    model, batch, _ = fitted
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.mul_(0.5)
    _, own = run(copied, batch)
    assert all(p.grad is None for p in model.parameters())
    plain = models.make("gpt2")[0]
    plain.load_state_dict(copied.state_dict())
    assert_equal((torch.zeros(()), own), (torch.zeros(()), run(plain, batch)[1]))


def test_a_pickle_is_of_the_original_class(fitted):
    model, batch, made = fitted
    loaded = pickle.loads(pickle.dumps(model))
    made.remove()
    assert type(loaded) is type(model)
    assert [type(m) for m in loaded.modules()] == [type(m) for m in model.modules()]
    assert_equal(run(loaded, batch), run(model, batch))


def test_inference_and_generation_are_plain(fitted):
    model, batch, made = fitted
    model.eval()
    with torch.no_grad():
        managed = model(**batch).logits
    ids = model.generate(batch["input_ids"][:, :4], max_new_tokens=4, do_sample=False, pad_token_id=0)
    runs = regions_run(made)
    made.remove()
    with torch.no_grad():
        assert torch.equal(managed, model(**batch).logits)
    assert torch.equal(
        ids, model.generate(batch["input_ids"][:, :4], max_new_tokens=4, do_sample=False, pad_token_id=0)
    )
    assert runs == made_regions_in_fitting(made)


def made_regions_in_fitting(made):
    """Regions that ran while the plan was measured: on the scale once, timed twice."""
    managed = sum(choice.option is not OptionKind.KEEP for choice in made.record.assignment.choices)
    return 3 * managed


def test_eval_with_gradients_is_right(fitted):
    model, batch, made = fitted
    model.eval()
    with pytest.warns(UserWarning, match="runs in evaluation mode"):
        managed = run(model, batch)
    made.remove()
    assert_equal(managed, run(model, batch))


def test_optimizer_is_never_stepped(gpt2):
    model, batch = gpt2
    optimizer = torch.optim.AdamW(model.parameters())
    made = fit(model, batch, budget=0.6, optimizer=optimizer)
    made.remove()
    assert not optimizer.state
    bare = fit(model, batch, budget=0.6)
    bare.remove()
    moments = 2 * sum(p.numel() * p.element_size() for p in model.parameters())
    assert made.measured.base_bytes - bare.measured.base_bytes == moments


def test_a_generous_budget_leaves_the_model_alone(gpt2):
    model, batch = gpt2
    kinds = [type(module) for module in model.modules()]
    made = fit(model, batch, budget="4GiB")
    assert [type(module) for module in model.modules()] == kinds
    assert made.record.assignment.keeps_everything
    assert made.promised.slowdown == 1.0


# --- what it refuses ---------------------------------------------------------------------------------------------------


def refused(kind, text, model, batch, **options):
    classes = [type(module) for module in model.modules()] if isinstance(model, nn.Module) else []
    with pytest.raises(kind, match=text) as caught:
        fit(model, batch, **options)
    if classes:
        assert [type(module) for module in model.modules()] == classes
        assert all(parameter.grad is None for parameter in model.parameters())
    return caught.value


def test_bad_input(gpt2):
    model, batch = gpt2
    refused(InvalidInput, "not a scalar loss", model, {"input_ids": batch["input_ids"]}, budget=0.5)
    refused(InvalidInput, "not a fraction", model, batch, budget=float("nan"))
    refused(InvalidInput, "options='some' is unknown", model, batch, budget=0.5, options="some")
    refused(InvalidInput, "check='maybe' is not known", model, batch, budget=0.5, check="maybe")
    refused(InvalidInput, "got a int as its model", 3, batch, budget=0.5)
    refused(InvalidInput, "names cuda:0 only", model, batch, budget={"cuda:0": "1GiB"})
    refused(InvalidInput, "does not contain", model, batch, budget=0.5, regions="transformer.nothing")
    refused(InvalidInput, "a container that is never called", model, batch, budget=0.5, regions="transformer.h")
    refused(
        InvalidInput,
        "Name one of the two",
        model,
        batch,
        budget=0.5,
        regions=["transformer.h.0", "transformer.h.0.mlp"],
    )
    refused(InvalidInput, "give classes, names or modules", model, batch, budget=0.5, regions=[3])


def test_a_step_or_an_optimizer_of_something_else(gpt2):
    model, batch = gpt2
    other = torch.optim.SGD(nn.Linear(2, 2).parameters())
    refused(
        InvalidInput,
        "None of the 2 parameters of the SGD belongs to the GPT2LMHeadModel",
        model,
        batch,
        budget=0.5,
        optimizer=other,
    )
    refused(InvalidInput, "got a type as its optimizer", model, batch, budget=0.5, optimizer=torch.optim.SGD)
    refused(InvalidInput, "got int 3 as its step", model, batch, budget=0.5, step=3)
    refused(InvalidInput, "got the loss CrossEntropyLoss", model, batch, budget=0.5, step=nn.CrossEntropyLoss())


def test_a_batch_that_does_not_match():
    model, batch, _ = models.make("transformer")
    text = r"does not match Translator.forward: missing a required argument.*give step="
    refused(InvalidInput, text, model, batch[0], budget=0.5)
    refused(InvalidInput, "does not match Translator.forward", model, {"sauce": batch[0]}, budget=0.5)


def test_data_parallel_over_several_devices_is_refused(gpt2):
    model, batch = gpt2
    made = fit(model, batch, budget=0.5)
    made.remove()
    wrapped = nn.DataParallel(model)  # without a GPU it has no devices, and calls the model itself
    fit(wrapped, batch, budget=0.5, step=lambda model, batch: model(**batch).loss).remove()
    wrapped.device_ids = [0, 1]
    for managed in (lambda: fit(wrapped, batch, budget=0.5), lambda: retape.apply(wrapped, made)):
        with pytest.raises(InvalidInput, match=r"GPT2LMHeadModel is copied to several GPUs.*CUDA_VISIBLE_DEVICES=0"):
            managed()


def test_nothing_to_train(gpt2):
    model, batch = gpt2
    refused(InvalidInput, "no parameter that requires gradients", model.requires_grad_(False), batch, budget=0.5)


def test_a_budget_below_the_weights(gpt2):
    model, batch = gpt2
    error = refused(BudgetTooSmall, "the smallest budget that does is", model, batch, budget=100_000)
    assert error.floor_bytes > 100_000
    assert error.binding
    assert "options=retape.ALL computes the loss in slices" in str(error)


def test_a_share_that_is_given_as_an_int(gpt2):
    model, batch = gpt2
    refused(BudgetTooSmall, "1 is a number of bytes; a share of the activations is a float", model, batch, budget=1)


def test_a_model_that_recomputes_by_itself(gpt2):
    model, batch = gpt2
    model.gradient_checkpointing_enable()
    refused(InvalidInput, "recomputes every layer by itself", model, batch, budget=0.5)


def test_a_plan_is_not_put_on_a_model_that_recomputes_by_itself(fitted):
    model, _, made = fitted
    made.remove()
    model.gradient_checkpointing_enable()
    with pytest.raises(InvalidInput, match="recomputes every layer by itself"):
        retape.apply(model, made)
    model.gradient_checkpointing_disable()
    retape.apply(model, made).remove()


def test_an_exception_of_the_step_leaves_the_model_as_it_was(gpt2):
    model, batch = gpt2

    def broken(model, batch):
        raise KeyError("mine")

    refused(KeyError, "mine", model, batch, budget=0.5, step=broken)


def test_a_second_fit_says_to_remove_the_first(fitted):
    model, batch, made = fitted
    with pytest.raises(InvalidInput, match=r"managed by a fit already, or by retape.adaptive. Call remove\(\)"):
        fit(model, batch, budget=0.4)
    made.remove()
    fit(model, batch, budget=0.6).remove()


# --- budgets -------------------------------------------------------------------------------------------------------------


def test_the_budget_in_bytes(gpt2):
    model, batch = gpt2
    made = fit(model, batch, budget="4MiB")
    assert made.budget_bytes == made.record.budget_bytes == 4 * 2**20
    made.remove()


def test_kinds_of_budget(gpt2):
    model, batch = gpt2
    half = fit(model, batch, budget=0.5)
    half.remove()
    room = half.record.budget_bytes - half.frontier.fixed_bytes
    for budget in (
        half.record.budget_bytes,
        retape.Budget.activations(room),
        {"cpu": half.record.budget_bytes},
    ):
        made = fit(model, batch, budget=budget)
        made.remove()
        assert made.record.budget_bytes == pytest.approx(half.record.budget_bytes, rel=0.02)
        assert made.measured.peak_bytes <= made.record.budget_bytes
    shared = fit(model, batch, budget=retape.Budget.activations(2 * room, in_flight=2))
    shared.remove()
    others = held_bytes(shared.record.chain, shared.plan)
    assert half.record.budget_bytes <= shared.record.budget_bytes  # the other one holds less than one that runs
    assert shared.record.budget_bytes - shared.frontier.fixed_bytes + others == pytest.approx(2 * room, rel=0.02)
    assert shared.measured.peak_bytes <= shared.record.budget_bytes


def test_what_the_first_step_leaves_behind_is_fixed(gpt2):
    """As the workspaces of a GPU's libraries: they come with the first step, and stay."""
    model, batch = gpt2
    bare = fit(model, batch, budget=1.0)
    seen = iter([100, 5100])
    made = fit_with(model, batch, budget=1.0, instruments=FitInstruments(allocated_bytes=lambda device: next(seen)))
    assert made.measured.base_bytes - bare.measured.base_bytes == 5000


def test_auto_is_what_the_machine_has(gpt2):
    model, batch = gpt2
    assert fit(model, batch, budget="auto").record.assignment.keeps_everything


def test_a_smaller_budget_never_has_a_larger_peak(gpt2):
    model, batch = gpt2
    peaks = []
    for share in (0.9, 0.7, 0.5, 0.3):
        made = fit(model, batch, budget=share)
        made.remove()
        peaks.append(made.measured.peak_bytes)
    assert peaks == sorted(peaks, reverse=True)


def test_largest_batch(fitted):
    _, _, made = fitted
    rows, fixed = made.record.rows, made.frontier.fixed_bytes
    room, least = made.record.budget_bytes - fixed, made.frontier.floor_bytes - fixed
    assert made.largest_batch() == rows * room // least > rows


# --- plans that are saved --------------------------------------------------------------------------------------------------


def test_a_saved_plan_needs_no_profile(fitted, tmp_path):
    model, batch, made = fitted
    with pytest.raises(InvalidInput, match=r"Cannot write the fit to .*No such file or directory"):
        made.save(tmp_path / "none" / "plan.json")
    made.save(tmp_path / "plan.json")
    managed = run(model, batch)
    made.remove()
    other = models.make("gpt2")[0]
    applied = retape.apply(other, tmp_path / "plan.json")
    assert applied.record == made.record
    assert_equal(run(other, batch), managed)
    assert regions_run(applied) == made_regions_in_fitting(made) // 3
    peak = retape.measure(partial(run, other, batch)).step_bytes
    assert peak <= made.record.budget_bytes
    applied.remove()


def test_a_plan_is_for_one_structure(fitted, tmp_path):
    _, _, made = fitted
    made.save(tmp_path / "plan.json")
    with pytest.raises(PlanMismatch, match="its modules, shapes, dtypes or trained parameters differ"):
        retape.apply(models.make("llama")[0], tmp_path / "plan.json")
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(PlanFormatError, match="no saved fit"):
        retape.apply(models.make("gpt2")[0], tmp_path / "plan.json")
    with pytest.raises(InvalidInput, match="Cannot read the fit of"):
        retape.apply(models.make("gpt2")[0], tmp_path / "nowhere.json")
    with pytest.raises(InvalidInput, match="apply\\(\\) got a int"):
        retape.apply(models.make("gpt2")[0], 3)


# --- everyday training -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3])
def test_smaller_batches_are_right_and_smaller(fitted, rows):
    model, batch, made = fitted
    small = {name: value[:rows] for name, value in batch.items()}
    managed = run(model, small)
    again = run(model, small)  # the second time with the recipe that was worked out for this shape
    record = retape.measure(partial(run, model, small))
    assert record.step_bytes <= made.record.budget_bytes - made.measured.base_bytes + weights(model)
    made.remove()
    plain = run(model, small)
    assert_equal(managed, plain)
    assert_equal(again, plain)


def weights(model):
    """`run` starts without gradients, which the record of a fit counts as resident."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def test_larger_batches_are_right_and_warned_of_once(fitted):
    model, batch, made = fitted
    large = {name: torch.cat([value, value]) for name, value in batch.items()}
    with pytest.warns(UserWarning, match="Call retape.fit again with the larger batch"):
        managed = run(model, large)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(model, large)
    made.remove()
    assert_equal(managed, run(model, large))


def test_other_lengths_are_right(fitted):
    model, batch, made = fitted
    short = {name: value[:, :17] for name, value in batch.items()}
    managed = run(model, short)
    made.remove()
    assert_equal(managed, run(model, short))


def test_accumulation_and_scaling(fitted):
    model, batch, made = fitted

    def two_microbatches():
        torch.manual_seed(3)
        model.zero_grad()
        for half in ({n: v[:2] for n, v in batch.items()}, {n: v[2:] for n, v in batch.items()}):
            (model(**half).loss * 128.0).backward()
        return torch.zeros(()), parameter_gradients(model)

    managed = two_microbatches()
    made.remove()
    assert_equal(managed, two_microbatches())


def test_two_forwards_before_one_backward(fitted):
    model, batch, made = fitted

    def contrastive():
        torch.manual_seed(3)
        model.zero_grad()
        first, second = model(**batch).loss, model(**{n: v.flip(0) for n, v in batch.items()}).loss
        (first * second).backward()
        return first.detach(), parameter_gradients(model)

    managed = contrastive()
    made.remove()
    assert_equal(managed, contrastive())


def test_a_step_with_two_forwards_is_planned_as_a_whole(gpt2):
    model, batch = gpt2

    def contrastive(model, batch):
        return model(**batch).loss * model(**{n: v.flip(0) for n, v in batch.items()}).loss

    made = fit(model, batch, budget=0.5, step=contrastive)
    assert len(made.record.assignment.choices) == 10
    assert {choice.root_call for choice in made.record.assignment.choices} == {0, 1}
    assert made.measured.peak_bytes <= made.record.budget_bytes
    assert retape.verify(model, batch, step=contrastive).equal
    made.remove()


def test_under_autocast(gpt2):
    model, batch = gpt2
    with torch.autocast("cpu", torch.bfloat16):
        made = fit(model, batch, budget=0.5)

    def mixed(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return model(**batch).loss

    assert not made.record.assignment.keeps_everything
    assert retape.verify(model, batch, step=mixed).equal
    made.remove()


def test_a_module_called_twice(gpt2):
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)
            )

        def forward(self, x):
            for block in (*self.blocks, *self.blocks):
                x = x + block(x)
            return x.square().mean()

    model, batch = Twice(), torch.randn(64, 16)
    made = fit(model, batch, budget=0.6)
    assert [(c.name, c.call) for c in made.record.assignment.choices] == [
        (f"blocks.{i}", call) for call in (0, 1) for i in range(3)
    ]
    assert retape.verify(model, batch).equal
    made.remove()


def test_regions_by_class_name_and_module(gpt2):
    model, batch = gpt2
    blocks = model.transformer.h
    for wanted in (type(blocks[0]), [f"transformer.h.{i}" for i in range(5)], list(blocks)):
        made = fit(model, batch, budget=0.6, regions=wanted)
        assert [choice.name for choice in made.record.assignment.choices] == [f"transformer.h.{i}" for i in range(5)]
        made.remove()


def test_half_of_the_memory_costs_a_third_of_recomputation_at_most():
    """Counted in FLOPs of what is run again; in smaller models the engine costs more than the kernels, and less is selected."""
    torch.manual_seed(0)
    sizes = {"n_layer": 6, "n_embd": 256, "n_head": 4, "n_positions": 128, "vocab_size": 256}
    model = models.hf.GPT2LMHeadModel(models.hf.GPT2Config(bos_token_id=0, eos_token_id=0, **sizes)).train()
    ids = models.tokens(vocabulary=256, length=128)
    batch = {"input_ids": ids, "labels": ids}

    def flops():
        with FlopCounterMode(display=False) as counter:
            model(**batch).loss.backward()
        return counter.get_total_flops()

    def recomputed():
        made = fit(model, batch, budget=0.5)
        some = flops() - plain
        made.remove()
        return some

    plain = flops()
    tries = [recomputed()]
    model.gradient_checkpointing_enable()
    everything = flops() - plain
    model.gradient_checkpointing_disable()
    while 3 * min(tries) > everything and len(tries) < 3:  # a plan is as good as the clock it was measured by
        tries.append(recomputed())
    assert 0 <= 3 * min(tries) <= everything

"""Blocks in tiles that hold or move what attention made: the same gradients as tiles alone, and attention runs once."""

from dataclasses import replace

import pytest
import torch

import retape
from retape.core.assignment import Assignment
from retape.core.problem import Budget
from retape.torch.engine.policy import Check
from retape.torch.planning.attach import put_on, take_off
from retape.torch.planning.chain_builder import build_chain
from retape.torch.planning.discover import find_regions
from retape.torch.planning.executor import Executor
from retape.torch.planning.instruments import Overheads
from retape.torch.planning.profiles.step_profiles import StepProfiles
from retape.torch.planning.region_options import partial_rerun, tape_storages
from retape.torch.planning.step_trials import StepTrials
from support import models
from support.comparing import parameter_gradients, seed
from support.ops import OpLog
from support.trials import host_tier, op_clock

TILES = 4


@pytest.fixture(name="profiled", scope="module")
def _profiled():
    """A model, its batch, and its chain with tiles and a host."""
    seed()
    model, _, _ = models.llama()
    ids = torch.randint(0, 128, (1, 256))
    batch = {"input_ids": ids, "labels": ids}
    with op_clock() as instruments:
        trials = StepTrials(model.train(), batch, Budget.of(0.5), instruments=instruments, slices=True)
        with trials.sandboxed():
            profiled = StepProfiles(trials).profiled(find_regions(model))
        chain = build_chain(profiled, fixed_bytes=0, overheads=Overheads(), host=host_tier())
    return model, batch, profiled, chain


def executor_of(profiled, options, **about):
    """An executor of the plan in which each region takes its option."""
    regions = find_regions(profiled[0])
    stages = [stage for stage in profiled[3].stages if stage.choice is not None]
    pairs = zip(stages, options, strict=True)
    assignment = Assignment(choices=tuple(stage.choice.taking(option) for stage, option in pairs))
    names = {id(module): name for name, module in regions.items()}
    return Executor(assignment, names, check=Check.VALUES, **about), assignment, regions


def gradients_of(profiled, options):
    """The gradients of a step in which each region takes its option, and the ops of the step."""
    model, batch, found, _ = profiled
    executor, assignment, regions = executor_of(profiled, options)
    for choice, call in zip(assignment.choices, found.profile.calls, strict=True):
        executor.learn(choice, call.inputs, found.profile.trace_of(call, choice.tiles, choice.tiled))
    put_on(model, regions, executor)
    try:
        for _ in range(2):  # the first step proves the recipes
            model.zero_grad()
            with OpLog() as log:
                model(**batch).loss.backward()
        assert not executor.rejected
        return parameter_gradients(model), log
    finally:
        take_off(model, regions)


def attention_calls(log):
    return sum("scaled_dot_product" in name and "backward" not in name for name in log.names)


def recomputed_in_tiles(profiled):
    """For each region the option to recompute it in tiles."""
    regions = [stage.options for stage in profiled[3].stages if stage.choice is not None]
    return [next(o for o in options if o.tiles == TILES and not o.held and not o.moved) for options in regions]


def with_attention(profiled, *, moved, more=0):
    """The same options, with what attention made held or moved, and so many other storages held."""
    options = recomputed_in_tiles(profiled)
    found = []
    for option, call in zip(options, profiled[2].profile.calls, strict=True):
        trace = profiled[2].profile.trace_of(call, TILES, option.tiled)
        made = next(op.makes for op in trace.ops if "scaled_dot_product" in str(op.op))
        storages = frozenset(made) & tape_storages(trace).keys()
        others = frozenset(sorted(tape_storages(trace).keys() - storages)[:more])
        rerun = partial_rerun(trace, others, storages) if moved else partial_rerun(trace, storages | others)
        found.append(replace(option, held=rerun.held, moved=rerun.moved))
    return found


@pytest.mark.parametrize("moved", [False, True], ids=["held", "moved"])
def test_what_attention_made_is_there_and_the_rest_is_recomputed_in_tiles(profiled, moved):
    layers = len(profiled[0].model.layers)
    plain, log = gradients_of(profiled, recomputed_in_tiles(profiled))
    assert attention_calls(log) == 2 * layers, "one re-run of each region, however many tiles it has"
    found, log = gradients_of(profiled, with_attention(profiled, moved=moved))
    assert attention_calls(log) == layers
    assert all(torch.equal(found[name], plain[name]) for name in plain)


def test_one_region_of_a_kind_is_traced_whichever_slots_the_others_hold(profiled):
    """For a batch of another length, whose ops the profile has not seen."""
    model, layers = profiled[0], len(profiled[0].model.layers)
    both = with_attention(profiled, moved=False), with_attention(profiled, moved=False, more=2)
    options = [pair[number % 2] for number, pair in enumerate(zip(*both, strict=True))]
    executor, _, regions = executor_of(profiled, options, trial=True)
    put_on(model, regions, executor)
    calls = []
    try:
        for _ in range(2):
            with OpLog() as log:
                model(**{name: ids[:, :96] for name, ids in profiled[1].items()}).loss.backward()
            calls.append(attention_calls(log))
    finally:
        take_off(model, regions)
    assert calls == [layers + 1, layers]


def test_few_of_the_slots_may_be_held_or_moved_for_each_number_of_tiles(profiled):
    options = profiled[3].stages[2].options
    for tiles in (2, TILES):
        there = [option for option in options if option.tiles == tiles and (option.held or option.moved)]
        assert any(option.moved_inputs for option in options if option.tiles == tiles)
        assert tiles != TILES or there


def test_a_plan_is_verified_with_tiles_and_selections(profiled):
    model, batch, *_ = profiled
    made = retape.fit(model, batch, budget=0.3, options=retape.ALL, progress=False)
    assert made.measured.peak_bytes <= made.record.budget_bytes
    difference = retape.verify(model, batch)
    assert all(each.worst < 1e-5 for each in difference.differences)
    made.remove()


def test_an_input_that_moves_with_tiles_takes_the_seconds_of_tiles(profiled):
    """The label of an option with its input moved is that of the option, and more words."""
    moved = 0
    for stage in profiled[3].chain.stages:
        by_label = {option.label: option for option in stage.choices if "tiles" in option.label}
        for label, option in by_label.items():
            plain = by_label.get(label.partition(", input of")[0])
            if plain is not None and plain is not option:
                moved += 1
                busy = [o.backward_seconds - o.backward_stall_seconds for o in (option, plain)]
                assert busy[0] == pytest.approx(busy[1])
    assert moved

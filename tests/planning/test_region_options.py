"""Every partial re-run of a block of many models: gradients bit for bit, and the bytes that were promised."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

from retape.core.solve import host_parts
from retape.torch.capture.arguments import tensors_of
from retape.torch.capture.call import capture_call
from retape.torch.engine.checkpoint import run_region
from retape.torch.engine.policy import Policy, Proof, ProofState
from retape.torch.engine.region import Region
from retape.torch.engine.select import plan_recipe
from retape.torch.engine.trace import Collective
from retape.torch.measure.memory_meter import track_memory
from retape.torch.model_libraries import LIBRARIES
from retape.torch.planning.attach import attach, detach
from retape.torch.planning.discover import find_regions
from retape.torch.planning.instruments import OpTimer
from retape.torch.planning.region_options import (
    is_steady,
    last_missing,
    partial_rerun,
    select_reruns,
    tape_storages,
)
from support import models
from support.regions import trace_region

CPU = torch.device("cpu")
MAKES = ("gpt2", "llama", "bert", "vit", "unet", "widening")
SMALL = 8192  # states of generators, and what an allocator rounds up


class Caught(BaseException):
    """Stops a model once its block has been called."""


def block_of(name):
    """The second block of a model, and the arguments that it is called with."""
    model, batch, step = models.make(name)
    if hasattr(model, "config"):
        model.config.use_cache = False  # the block before is no region here, and would fill a cache that then stays
    block = list(find_regions(model).values())[1]
    found = []

    def catch(module, plain_call, args, keywords):
        found.append((args, keywords))
        raise Caught

    attach(block, catch)
    try:
        (step or (lambda model, batch: model(**batch) if isinstance(batch, dict) else model(batch)))(model, batch)
    except Caught:
        pass
    finally:
        detach(block)
    args, keywords, _ = LIBRARIES.region_arguments(block, *found[0])
    fresh = tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in args)
    return block, fresh, keywords


@pytest.fixture(scope="module", params=MAKES)
def example(request):
    block, args, keywords = block_of(request.param)
    inputs = entering(args)
    region = Region(capture_call(block, inputs, keywords))
    torch.manual_seed(1)
    region.run(block, inputs, keywords)
    return block, args, keywords, region.trace(OpTimer(CPU))


def entering(args):
    """As from a layer before: no leaves, so that their gradients flow on."""
    return tuple(
        a.clone().requires_grad_() * 1 if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args
    )


def gradients(block, args, keywords, policy=None):
    torch.manual_seed(1)
    block.zero_grad()
    inputs = entering(args)
    for tensor in inputs:
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            tensor.retain_grad()
    out = block(*inputs, **keywords) if policy is None else run_region(block, *inputs, keywords=keywords, policy=policy)
    sum(t.square().sum() for t in tensors_of(out) if t.is_floating_point()).backward()
    found = [t.grad for t in inputs if isinstance(t, torch.Tensor)]
    return [*found, *(p.grad for p in block.parameters())]


def ways(trace):
    """Everything that may be chosen: each selection, also with ops joined, recomputing all, and holding all by number."""
    joined = select_reruns(trace, most_ops=1, groups=8)
    assert joined
    return [
        *select_reruns(trace),
        *joined,
        partial_rerun(trace, frozenset()),
        partial_rerun(trace, frozenset(tape_storages(trace))),
    ]


def same(one, other):
    return all((a is None and b is None) or torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_gradients_of_every_way(example):
    block, args, keywords, trace = example
    assert is_steady(trace)
    plain = gradients(block, args, keywords)
    for way in ways(trace):
        policy = Policy(held=way.held, proof=Proof(ProofState.TRIAL), recipe=plan_recipe(trace, way.held))
        assert same(gradients(block, args, keywords, policy), plain)


def weighed(block, args, keywords, trace, way):
    """What lives after a forward, and how high it stood, above its start."""
    policy = Policy(held=way.held, proof=Proof(ProofState.TRIAL), recipe=plan_recipe(trace, way.held))
    torch.manual_seed(1)
    inputs = entering(args)
    with track_memory(CPU) as scale:
        out = run_region(block, *inputs, keywords=keywords, policy=policy)
        scale.mark("forward")
    del out
    return next(reading for reading in scale.readings if reading.label == "forward")


def test_bytes_of_every_way(example):
    """After the forward the output lives, and exactly what the way says that it holds; workspaces of kernels are the same for all."""
    *_, trace = example
    output = sum(trace.storage_bytes[storage] for storage in trace.outputs)
    dropped = partial_rerun(trace, frozenset())
    unseen = max(0, weighed(*example, dropped).peak_bytes - dropped.forward_bytes)
    for way in ways(trace):
        reading = weighed(*example, way)
        assert reading.live_bytes == pytest.approx(output + way.held_bytes, abs=SMALL)
        assert reading.peak_bytes <= way.forward_bytes + unseen + SMALL


def test_no_way_is_worse_than_another(example):
    *_, trace = example
    found = select_reruns(trace)
    whole = sum(tape_storages(trace).values())
    for one, other in pairwise(found):
        assert one.held_bytes < other.held_bytes < whole
        assert one.share > other.share
    for way in found:
        assert way.held_bytes > 0
        assert 0 <= way.share < 1
        assert way.rerun_bytes >= way.held_bytes


def test_the_ends(example):
    *_, trace = example
    nothing, everything = partial_rerun(trace, frozenset()), partial_rerun(trace, frozenset(tape_storages(trace)))
    assert (nothing.held, nothing.held_bytes, nothing.share) == (frozenset(), 0, 1.0)
    assert everything.held_bytes == sum(tape_storages(trace).values())
    assert everything.share == 0.0
    assert last_missing(trace, everything.held) == 0
    assert nothing.forward_bytes <= everything.forward_bytes


def test_what_cannot_be_steered():
    assert select_reruns(None) == ()
    linear = nn.Linear(4, 4)
    inputs = (torch.randn(2, 4, requires_grad=True) * 1,)
    region = Region(capture_call(linear, inputs, {}))
    region.run(linear, inputs, {})
    assert select_reruns(region.trace()) == ()  # its tape is its input and its weight
    assert tape_storages(region.trace()) == {}


def test_values_that_decide_shapes_are_not_steady():
    def function(x):
        return x[x > 0].sin()

    inputs = (torch.linspace(-1, 1, 8).requires_grad_() * 1,)
    region = Region(capture_call(function, inputs, {}))
    region.run(function, inputs, {})
    trace = region.trace()
    assert not is_steady(trace)
    assert select_reruns(trace) == ()


@pytest.mark.parametrize(
    ("capacity", "inputs", "parts"),
    [
        (100, [0, 10, 10, 0], [20, 30, 30, 20]),
        (20, [0, 10, 10, 0], [0, 10, 10, 0]),
        (19, [0, 10, 10, 0], [0, 10, 0, 0]),
        (25, [0, 10, 20, 10], [0, 10, 0, 10]),
        (5, [10], [0]),
    ],
)
def test_the_host_has_room_for_all_inputs_or_for_those_of_the_first_regions(capacity, inputs, parts):
    assert host_parts(capacity, inputs) == parts
    assert sum(parts) <= capacity


def test_a_collective_whose_result_is_written_to_is_not_held():
    def block(x):
        return torch.sin(x * 2).cos()

    trace = trace_region(block, torch.ones(3, requires_grad=True))
    first, *others = trace.ops
    received = replace(first, collective=Collective(kind="all_reduce", group="0", bytes=12))
    assert is_steady(replace(trace, ops=(received, *others)))
    written = replace(others[0], writes=first.makes)
    assert not is_steady(replace(trace, ops=(received, written, *others[1:])))

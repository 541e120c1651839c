"""Regions and torch.compile: a region around a compiled function, and a compiled caller with a region inside."""

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import retape
from retape.torch.capture.call import capture_call
from retape.torch.engine import checkpoint as checkpoint_room
from retape.torch.engine.checkpoint import run_region
from retape.torch.engine.policy import HOLD, Inputs, Policy, Proof, ProofState
from retape.torch.engine.region import Region
from retape.torch.engine.select import plan_recipe
from support.comparing import assert_equal, seed

BACKENDS = ["eager", "aot_eager"]  # inductor takes 40 s here, and sees the same graphs
# torch's own: its compiler uses deprecated names, and reads .grad of every input.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class TanhBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def block_and_input():
    seed()
    return TanhBlock(), torch.randn(4, 8, requires_grad=True)


def compiled_gradients(module, x, call, passes=1):
    module.zero_grad()
    x.grad = None
    out = call(x)
    for number in range(passes):
        (out**2).sum().backward(retain_graph=number + 1 < passes)
    return [out.detach(), x.grad, *[p.grad for p in module.parameters()]]


# --- a region around a compiled function ----------------------------------------------------------------------------

POLICIES = {
    "drop": Policy(),
    "hold": HOLD,
    "some": Policy(held=frozenset({0, 2})),
    "inputs not reused": Policy(reuse_inputs=False),
}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_region_around_a_compiled_function(backend, policy):
    module, x = block_and_input()
    compiled = torch.compile(module, backend=backend, fullgraph=True)
    wanted = compiled_gradients(module, x, lambda t: compiled(t * 1))
    assert_equal(compiled_gradients(module, x, lambda t: run_region(compiled, t * 1, policy=policy)), wanted)
    assert_equal(compiled_gradients(module, x, lambda t: retape.checkpoint(compiled, t * 1, check="values")), wanted)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_the_rerun_of_a_compiled_function_compiles_nothing_anew(backend):
    from torch._dynamo.testing import CompileCounterWithBackend

    module, x = block_and_input()
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(module, backend=counter)
    for _ in range(3):
        retape.checkpoint(compiled, x * 1).sum().backward()
    assert counter.frame_count == 1


def test_a_chain_of_compiled_blocks_with_links():
    seed()
    blocks = nn.ModuleList(TanhBlock() for _ in range(4))
    x = torch.randn(4, 8, requires_grad=True)
    compiled = [torch.compile(b, backend="aot_eager") for b in blocks]

    def run(policy, value):
        for b in compiled:
            value = b(value) if policy is None else run_region(b, value, policy=policy)
        return value

    wanted = compiled_gradients(blocks, x, lambda t: run(None, t * 1))
    for inputs in Inputs:
        assert_equal(compiled_gradients(blocks, x, lambda t, i=inputs: run(Policy(inputs=i), t * 1)), wanted)


def test_a_compiled_region_is_never_put_under_a_recipe_that_makes_it_eager():
    """A dispatch mode around compiled code silently turns it eager, so a trace of it must not lead to another result."""
    module, x = block_and_input()
    compiled = torch.compile(module, backend="aot_eager")
    wanted = compiled_gradients(module, x, lambda t: compiled(t * 1))
    region = Region(capture_call(compiled, (x,), {}))
    region.run(compiled, (x,), {})
    trace = region.trace()
    assert trace.opaque
    held = frozenset({0})
    policy = Policy(held=held, proof=Proof(ProofState.TRIAL), recipe=plan_recipe(trace, held))
    assert_equal(compiled_gradients(module, x, lambda t: run_region(compiled, t * 1, policy=policy)), wanted)


def test_dropout_in_a_compiled_region():
    def function(x):
        return torch.nn.functional.dropout(x.sin(), 0.5).exp()

    compiled = torch.compile(function, backend="aot_eager")

    def run(call):
        seed(1)
        x = torch.linspace(-1, 1, 32).requires_grad_()
        out = call(x * 1)
        torch.rand(3)
        out.sum().backward()
        return x.grad, torch.get_rng_state()

    run(compiled)
    wanted = run(compiled)
    assert_equal(run(lambda t: retape.checkpoint(compiled, t)), wanted)


def test_retain_graph_around_a_function_compiled_by_dynamo_alone():
    module, x = block_and_input()
    compiled = torch.compile(module, backend="eager")
    wanted = compiled_gradients(module, x, lambda t: module(t * 1), passes=2)
    assert_equal(compiled_gradients(module, x, lambda t: retape.checkpoint(compiled, t * 1), passes=2), wanted)


# --- a compiled caller with a region inside ----------------------------------------------------------------------------


class Caller(nn.Module):
    def __init__(self, checkpoint):
        super().__init__()
        self.blocks = nn.ModuleList(TanhBlock() for _ in range(2))
        self.checkpoint = checkpoint

    def forward(self, x):
        for b in self.blocks:
            x = self.checkpoint(b, x, use_reentrant=False)
        return x.sin()


def caller(checkpoint):
    seed()
    return Caller(checkpoint), torch.randn(4, 8, requires_grad=True)


def without_region(function, *args, **options):
    return function(*args)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_caller(backend):
    module, x = caller(without_region)
    compiled = torch.compile(module, backend=backend)
    wanted = compiled_gradients(module, x, compiled)
    module, x = caller(retape.checkpoint)
    compiled = torch.compile(module, backend=backend)
    assert_equal(compiled_gradients(module, x, compiled), wanted)


def test_a_compiled_caller_delegates_to_torchs_operator():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    module, x = caller(retape.checkpoint)
    torch.compile(module, backend=backend)(x)
    targets = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    assert len(graphs) == 1
    assert sum("tag_activation_checkpoint" in target for target in targets) == 2


def test_a_compiled_caller_says_once_that_it_delegates_and_an_eager_one_does_not(caplog):
    checkpoint_room._said.cache_clear()
    module, x = caller(retape.checkpoint)
    module(x)
    assert not [record for record in caplog.records if record.name == "retape"]
    torch.compile(module, backend="eager", fullgraph=True)(x)  # no break in the graph
    torch._dynamo.reset()
    torch.compile(module, backend="eager", fullgraph=True)(x)
    [record] = [record for record in caplog.records if record.name == "retape"]
    assert record.levelname == "WARNING"
    assert "it is PyTorch's own checkpoint operator" in record.message
    assert "Call retape.checkpoint outside" in record.message


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_caller_after_the_replacement(backend, monkeypatch):
    module, x = caller(without_region)
    wanted = compiled_gradients(module, x, torch.compile(module, backend=backend))
    monkeypatch.setattr(torch.utils.checkpoint, "checkpoint", retape.checkpoint)
    module, x = caller(torch.utils.checkpoint.checkpoint)
    assert module.checkpoint is retape.checkpoint
    assert_equal(compiled_gradients(module, x, torch.compile(module, backend=backend)), wanted)


def test_retain_graph_of_a_compiled_caller():
    module, x = caller(retape.checkpoint)
    wanted = compiled_gradients(module, x, module, passes=2)
    assert_equal(compiled_gradients(module, x, torch.compile(module, backend="eager"), passes=2), wanted)


def test_check_is_for_eager_only():
    """PyTorch's operator has no check by values: the argument is accepted, and the gradients are the same."""

    def checked(function, *args, **options):
        return retape.checkpoint(function, *args, check="values", **options)

    module, x = caller(checked)
    wanted = compiled_gradients(module, x, module)
    assert_equal(compiled_gradients(module, x, torch.compile(module, backend="eager")), wanted)

"""Steps that retape runs itself, in `fit` and in `verify`, leave no trace: whatever a step changes is afterwards as before."""

import contextvars
import queue
import random
import threading
import weakref
from array import array
from collections import Counter, OrderedDict, UserDict, defaultdict, deque
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import retape
from retape.errors import InvalidInput
from support.blocks import square
from support.comparing import Notes, assign


def in_fit(model, batch, step=square, **options):
    retape.fit(model, batch, budget=0.7, step=step, progress=False, **options).remove()


def verified(model, batch, step=square):
    assert retape.verify(model, batch, step=step).plain_repeats


BOTH = pytest.mark.parametrize("run", [in_fit, verified])


class EffectBlock(nn.Module):
    """Does something on the way, which `effect` says."""

    def __init__(self, effect=None):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.effect = effect

    def forward(self, x):
        scale = 1.0 if self.effect is None else self.effect(self, x)
        return x + self.down(torch.tanh(self.up(x))) * scale


def blocks(effect=None):
    torch.manual_seed(0)
    return nn.Sequential(*(EffectBlock(effect) for _ in range(4)))


def batch_rows(*, needs_grad=False):
    return torch.randn(32, 16, generator=torch.Generator().manual_seed(1)).requires_grad_(needs_grad)


def twister(generator):
    _, words, index, *_ = generator.get_state()
    return words.tolist(), index


GENERATORS = {
    "torch": (
        lambda: torch.Generator().manual_seed(3),
        lambda g: torch.rand(16, generator=g),
        lambda g: g.get_state().tolist(),
    ),
    "random": (lambda: random.Random(3), lambda g: g.random(), lambda g: g.getstate()),
    "numpy": (lambda: np.random.default_rng(3), lambda g: float(g.random()), lambda g: str(g.bit_generator.state)),
    "numpy, legacy": (lambda: np.random.RandomState(3), lambda g: g.rand(), twister),
    "numpy, bits": (lambda: np.random.PCG64(3), lambda g: g.random_raw() / 2**64, lambda g: str(g.state)),
}
PLACES = {
    "field": lambda model, g: assign(model, generator=g),
    "list": lambda model, g: assign(model, generators=[0, {"mine": g}]),
    "hook": lambda model, g: model.register_forward_hook(lambda *_, g=g: None),
}


@BOTH
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", GENERATORS)
def test_generators(run, kind, place):
    make, draw, state = GENERATORS[kind]
    generator = make()
    model = blocks(lambda block, x: draw(generator))
    for block in model:
        PLACES[place](block, generator)
    before = state(generator)
    run(model, batch_rows())
    assert state(generator) == before


GLOBAL = torch.Generator().manual_seed(5)


@BOTH
def test_a_generator_of_the_step(run):
    own, before = torch.Generator().manual_seed(4), GLOBAL.get_state()
    state = own.get_state()

    def step(model, batch):
        def noise():
            return torch.rand(16, generator=GLOBAL) + torch.rand(16, generator=own)

        return square(model, batch + noise())

    run(blocks(), batch_rows(), step)
    assert torch.equal(own.get_state(), state)
    assert torch.equal(GLOBAL.get_state(), before)


@BOTH
@pytest.mark.parametrize("size", [10, 20_000])
def test_an_embedding_with_a_largest_norm(run, size):
    model = nn.Sequential(nn.Embedding(size, 16, max_norm=1.0), *blocks())
    weight = model[0].weight.detach().clone()
    run(model, torch.arange(10).repeat(200))
    assert torch.equal(model[0].weight, weight)


class Own(UserDict):
    pass


class CountsInSlots:
    __slots__ = ("__hidden", "calls")

    def __init__(self):
        self.calls = 0
        self.__hidden = [0]


class Plain:
    """An object that comes with the model."""

    def __init__(self):
        self.calls, self.seen = 0, {}


def count(block, x):
    """Change fields and containers of all kinds."""
    block.calls += 1
    block.last = x.detach().mean()
    block.long[300] = block.calls
    block.list.append(x.detach())
    block.dict["calls"] = block.dict.get("calls", 0) + 1
    block.nested["deep"][0].append(block.calls)
    block.set.add(block.calls)
    block.deque.appendleft(block.calls)
    block.ordered.move_to_end("a")
    block.default[block.calls].append(1)
    block.counter.update("ab")
    block.own["calls"] = block.calls
    block.bytes.append(1)
    block.array.append(2)
    block.numpy += 1
    block.slotted.calls += 1
    block.slotted._CountsInSlots__hidden.append(1)
    block.plain.calls += 1
    block.plain.seen[block.calls] = x
    block.tensor.add_(1)
    block.large.add_(1)
    block.bound.data = block.bound.data + 1
    block.statistics.mul_(2)
    block.position = block.position + 1
    block.held[0](x)
    block.up.bias.requires_grad_(True)
    if "new" not in block.dict:
        block.dict["new"] = block.new = x
    return 1.0


def counting():
    model = blocks(count)
    for block in model:
        block.calls, block.last, block.long = 0, None, list(range(400))
        block.list, block.dict, block.nested = [], {"calls": 0}, {"deep": ([1], 2)}
        block.set, block.deque, block.ordered = {0}, deque([0], maxlen=3), OrderedDict(a=1, b=2)
        block.default, block.counter, block.own = defaultdict(list), Counter("a"), Own(calls=0)
        block.bytes, block.array, block.numpy = bytearray(b"a"), array("d", [1.0]), np.zeros(3)
        block.slotted, block.plain = CountsInSlots(), Plain()
        block.tensor, block.large, block.bound = torch.zeros(3), torch.zeros(600_000), torch.zeros(3)
        block.held = [nn.BatchNorm1d(16)]
        block.register_buffer("statistics", torch.ones(3))
        block.register_buffer("position", torch.zeros(()))
        block.up.bias.requires_grad_(False)
    return model


def described(model):
    """All that the blocks have in their fields, and which objects the mutable ones are."""
    found = []
    for block in model:
        fields = {name: value for name, value in vars(block).items() if not name.startswith("_")}
        numbers = (block.large.sum(), block.statistics, block.position, dict(block.held[0].named_buffers()))
        slots = (
            block.slotted.calls,
            block.slotted._CountsInSlots__hidden,
            vars(block.plain),
            block.up.bias.requires_grad,
        )
        found.append((repr(fields), repr(numbers), repr(slots), [id(value) for value in fields.values()]))
    return found


@BOTH
def test_fields_and_containers(run):
    model = counting()
    before = described(model)
    run(model, batch_rows())
    assert described(model) == before


class Sgd:
    """Plain gradient descent by hand."""

    def __init__(self):
        self.steps = 0

    def __call__(self, parameter):
        self.steps += 1
        with torch.no_grad():
            parameter -= 0.1 * parameter.grad
        parameter.grad = None


@BOTH
def test_optimizers_in_backward_do_not_run(run):
    model, descent = blocks(), Sgd()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(descent)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    run(model, batch_rows())
    assert descent.steps == 0
    assert all(torch.equal(parameter, value) for parameter, value in zip(model.parameters(), before, strict=True))
    square(model, batch_rows()).backward()
    assert descent.steps == len(before)  # they are back


@pytest.mark.filterwarnings("ignore")
def test_pytorch_s_optimizers_in_backward_do_not_run():
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = blocks()
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    before = [parameter.detach().clone() for parameter in model.parameters()]
    in_fit(model, batch_rows())
    with pytest.raises(InvalidInput, match=r"No leaf has a gradient after the step.*no hook removes \.grad"):
        verified(model, batch_rows())
    assert all(torch.equal(parameter, value) for parameter, value in zip(model.parameters(), before, strict=True))
    square(model, batch_rows()).backward()
    assert not torch.equal(model[0].up.weight, before[0])


def by_tensor_hooks(model):
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient, parameter=parameter: descend(parameter, gradient))


def by_module_hooks(model):
    for block in model:
        block.down.register_full_backward_hook(lambda down, *_: descend(down.bias, torch.ones(16)))


@torch.no_grad()
def descend(parameter, gradient):
    parameter.data -= 0.1 * gradient
    parameter.add_(0)


@BOTH
@pytest.mark.parametrize("put", [by_tensor_hooks, by_module_hooks])
def test_hooks_that_write_to_weights(run, put):
    model = blocks()
    put(model)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    run(model, batch_rows())
    assert all(torch.equal(parameter, value) for parameter, value in zip(model.parameters(), before, strict=True))


def wide():
    """Weights of more than what is copied in any case."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 2048), nn.Tanh(), nn.Linear(2048, 16)) for _ in range(2)))


@BOTH
def test_a_step_that_trains_is_refused_by_the_name_of_the_weight(run):
    model = wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model, batch):
        optimizer.zero_grad()
        loss = square(model, batch)
        loss.backward(retain_graph=True)
        optimizer.step()
        return square(model, batch)

    with pytest.raises(InvalidInput, match=r"The step changed 0\.0\.weight and 3 more, of which no copy was kept"):
        run(model, batch_rows(), step)


def test_an_optimizer_that_was_given_is_as_before():
    model, batch = blocks(), batch_rows()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    square(model, batch).backward()
    optimizer.step()
    before = repr(optimizer.state_dict())

    def step(model, batch):
        optimizer.param_groups[0]["lr"] /= 2  # a schedule
        return square(model, batch)

    in_fit(model, batch, step, optimizer=optimizer)
    assert repr(optimizer.state_dict()) == before


OUTSIDE = nn.Parameter(torch.ones(16))


@BOTH
@pytest.mark.parametrize("found", [None, 2.0])
def test_gradients_of_leaves_that_are_no_weights(run, found):
    inside, batch, hidden = nn.Parameter(torch.ones(16)), batch_rows(needs_grad=True), {}
    hidden["leaf"] = torch.ones(16, requires_grad=True)
    leaves = [OUTSIDE, inside, batch, hidden["leaf"]]
    for leaf in leaves:
        leaf.grad = None if found is None else torch.full_like(leaf, found)
    before = [leaf.grad for leaf in leaves]

    def step(model, batch):
        def scale():
            return inside * OUTSIDE * hidden["leaf"]

        return square(model, batch * scale())

    run(blocks(), batch, step)
    for leaf, gradient in zip(leaves, before, strict=True):
        assert leaf.grad is gradient
        assert gradient is None or torch.equal(gradient, torch.full_like(leaf, found))


@BOTH
def test_a_leaf_that_only_the_graph_leads_to(run):
    table = [torch.ones(16, requires_grad=True)]
    model = blocks()
    model[0].register_forward_pre_hook(type("Hook", (), {"__call__": lambda *_: None, "__slots__": ()})())

    class Scaled(torch.autograd.Function):
        leaf = table[0]

    run(model, batch_rows(), lambda model, batch: square(model, batch * Scaled.leaf))
    assert table[0].grad is None


@BOTH
def test_a_leaf_that_the_step_makes_is_not_kept(run):
    made = Notes()

    class Own(nn.Module):
        def forward(self, x):
            leaf = x.detach().clone().requires_grad_()
            made(weakref.ref(leaf))
            return leaf

    run(nn.Sequential(Own(), *blocks()), batch_rows())
    assert made.all
    assert not any(leaf() is not None for leaf in made.all)


@BOTH
def test_a_step_that_takes_the_batch_apart(run):
    batch = {"x": batch_rows(), "scale": torch.ones(16)}

    def step(model, batch):
        batch["scale"].mul_(2)
        return square(model, batch.pop("x") * batch["scale"])

    x, scale = batch["x"], batch["scale"]
    run(blocks(), batch, step)
    assert batch == {"x": x, "scale": scale}
    assert torch.equal(scale, torch.ones(16))


@BOTH
def test_an_average_of_weights_that_a_forward_updates(run):
    """As momentum encoders have it."""

    class Averaged(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.average = blocks(), nn.Linear(16, 16).requires_grad_(False)

        def forward(self, x):
            with torch.no_grad():
                self.average.weight.mul_(0.9)
            return self.body(x) * self.average(x)

    model = Averaged()
    before = model.average.weight.clone()
    run(model, batch_rows())
    assert torch.equal(model.average.weight, before)


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
@pytest.mark.filterwarnings("ignore")
@BOTH
def test_the_state_of_a_communication_hook(run):
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = DistributedDataParallel(blocks())
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        draws = twister(state.rng)
        run(model, batch_rows())
        assert (state.iter, len(state.error_dict), len(state.q_memory_dict)) == (0, 0, 0)
        assert twister(state.rng) == draws
        square(model, batch_rows()).backward()
        assert state.iter == 1
    finally:
        dist.destroy_process_group()


# --- what is in no field of the model: globals, classes, closures, hooks -----------------------------------------------------

COUNT, LOG, TABLE, TOTAL, REBOUND = 0, [], {}, torch.zeros(3), torch.zeros(3)
VARIABLE = contextvars.ContextVar("variable", default=0)
LOCAL = threading.local()
LOCAL.count = 0


@dataclass
class StepSettings:
    temperature: float = 1.0


SETTINGS = StepSettings()


class Other:
    count = 0


class Tallied(nn.Module):
    count, log = 0, []


def remembering(log=[], *, table={}):  # noqa: B006 - a default that changes
    log.append(1)
    table["calls"] = len(log)


def counting_helper():
    counting_helper.calls += 1


counting_helper.calls = 0


def bind_globals():
    global COUNT, REBOUND
    COUNT, REBOUND = COUNT + 1, REBOUND + 1


def add_up():
    TOTAL.add_(1)


def in_threads():
    LOCAL.count += 1


def in_a_context():
    VARIABLE.set(VARIABLE.get() + 1)


def cool():
    SETTINGS.temperature *= 0.9


def count_in_classes():
    Other.count += 1
    Tallied.count += 1
    Tallied.log.append(1)


EFFECTS = {
    "globals": (bind_globals, lambda: (COUNT, REBOUND.tolist())),
    "a list": (lambda: LOG.append(1), lambda: list(LOG)),
    "a dict": (lambda: TABLE.update(calls=TABLE.get("calls", 0) + 1), lambda: dict(TABLE)),
    "a tensor": (add_up, TOTAL.tolist),
    "an object": (cool, lambda: SETTINGS.temperature),
    "classes": (count_in_classes, lambda: (Other.count, Tallied.count, list(Tallied.log))),
    "defaults": (remembering, lambda: repr((remembering.__defaults__, remembering.__kwdefaults__))),
    "a function": (counting_helper, lambda: counting_helper.calls),
    "a thread": (in_threads, lambda: LOCAL.count),
    "a context": (in_a_context, VARIABLE.get),
}


def through_a_forward(effect):
    model = blocks()
    before = model[0].forward
    model[0].forward = lambda x: (effect(), before(x))[1]
    return model


def through_a_hook(effect):
    model = blocks()
    model[1].register_forward_hook(lambda *_: effect())
    return model


def through_a_backward_hook(effect):
    model = blocks()
    model[1].register_full_backward_hook(lambda *_: effect())
    return model


def through_a_hook_of_a_weight(effect):
    model = blocks()
    model[1].up.weight.register_hook(lambda _: effect())
    return model


WAYS = {
    "forward": lambda effect: (through_a_forward(effect), square),
    "hook": lambda effect: (through_a_hook(effect), square),
    "backward hook": lambda effect: (through_a_backward_hook(effect), square),
    "hook of a weight": lambda effect: (through_a_hook_of_a_weight(effect), square),
    "step": lambda effect: (blocks(), lambda model, batch: (effect(), square(model, batch))[1]),
}


@BOTH
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", EFFECTS)
def test_state_outside_the_model(run, kind, way):
    effect, state = EFFECTS[kind]
    model, step = WAYS[way](effect)
    before = state()
    run(model, batch_rows(), step)
    assert state() == before
    step(model, batch_rows()).backward()
    assert state() != before  # as in training


class Meter:
    """An object with a hook, as calibration has it, and a trainer with a step."""

    def __init__(self):
        self.calls, self.log, self.largest, self.rows, self.table = 0, [], torch.zeros(()), torch.zeros(8, 16), {}

    def hook(self, module, given, out):
        self.note(out)

    def __call__(self, module, given, out):
        self.note(out)

    def note(self, out):
        self.calls += 1
        self.log.append(out.detach().mean().item())
        self.largest = torch.maximum(self.largest, out.detach().abs().amax())
        self.rows[self.calls % 8] = out.detach()[0]
        self.table["calls"] = self.calls

    def step(self, model, batch):
        out = model(batch)
        self.note(out)
        return out.square().mean()


def seen_by(meter):
    return repr(vars(meter))


@BOTH
@pytest.mark.parametrize("hook", [lambda meter: meter, lambda meter: meter.hook], ids=["object", "method"])
def test_objects_of_hooks(run, hook):
    model, meter = blocks(), Meter()
    model[0].register_forward_hook(hook(meter))
    before = seen_by(meter)
    run(model, batch_rows())
    assert seen_by(meter) == before


@BOTH
@pytest.mark.parametrize("step", [lambda meter: meter.step, lambda meter: lambda m, b: (meter.step(m, b), 0)[0]])
def test_the_object_of_a_step(run, step):
    meter = Meter()
    before = seen_by(meter)
    run(blocks(), batch_rows(), step(meter))
    assert seen_by(meter) == before


@BOTH
def test_variables_that_hooks_and_an_assigned_forward_bind(run):
    model, calls, total = blocks(), 0, torch.zeros(())
    before = model[0].forward

    def hook(module, given, out):
        nonlocal calls, total
        calls, total = calls + 1, total + out.detach().sum()

    def forward(x):
        nonlocal calls
        calls += 1
        return before(x)

    model[0].forward = forward
    model[1].register_forward_hook(hook)
    kept = total
    run(model, batch_rows())
    assert calls == 0
    assert total is kept


@BOTH
def test_a_tensor_with_a_history_stays_the_same_object(run):
    """As losses that are collected until the end of a step."""
    collected, model = [], blocks()
    model[0].register_forward_hook(lambda module, given, out: collected.append(out.mean()))
    collected.append(torch.ones(3, requires_grad=True) * 2)
    found = collected[0]
    run(model, batch_rows())
    assert len(collected) == 1
    assert collected[0] is found


class Samples:
    """A data set, of which a step reads one sample."""

    def __init__(self, tensors):
        self.tensors = tensors

    def first(self):
        return self.tensors[0][0]


def test_a_large_data_set_is_not_copied():
    """A write to it is an error, as to a weight that is not copied."""
    samples = Samples([torch.empty(1 << 20, 16) for _ in range(2)])  # 64 MiB each, and no memory until it is written to

    def step(model, batch):
        samples.tensors[1][0] = 0
        return square(model, batch + samples.first().mean())

    with pytest.raises(
        InvalidInput, match=r"The step changed tensor 1 in closures, globals and hooks, of shape \(1048576, 16\)"
    ):
        in_fit(blocks(), batch_rows(), step)


@BOTH
def test_what_other_threads_use_is_left_alone(run):
    waiting, model = queue.Queue(), blocks()
    model[0].register_forward_hook(lambda *_: waiting.put(1))
    run(model, batch_rows())
    assert waiting.qsize() > 0

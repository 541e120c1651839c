"""Links: a dropped input is made again by the region that made it; re-runs and freed storages are counted exactly."""

import gc
import random
import weakref

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import retape
from retape.torch.capture.call import capture_call
from retape.torch.engine.checkpoint import run_region
from retape.torch.engine.policy import DROP, HOLD, Check, Inputs, Policy
from retape.torch.engine.region import Region
from support.comparing import Notes, assert_equal, seed

RAN = Notes()  # a re-run puts back the attributes of a module, so a count among them would not grow
LINK, SEGMENT = Policy(inputs=Inputs.LINK), Policy(inputs=Inputs.SEGMENT)


class Step(nn.Module):
    """One stage of a chain: a matmul, a mask and an activation that saves its result."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        RAN(self)
        return torch.tanh(self.dropout(self.linear(x)))


class LinkedChain:
    """A chain of steps, each a region of its own, the storages of the states between them, and how often each ran again."""

    def __init__(self, policies, **options):
        seed()
        self.steps = [Step() for _ in policies]
        self.regions, self.states = [], []
        self.x = torch.randn(3, 6, requires_grad=True)
        self.policies, self.options = policies, options

    def forward(self):
        value = self.x
        for step, policy in zip(self.steps, self.policies, strict=True):
            if policy is None:
                value = step(value)
                continue
            region = Region(capture_call(step, (value,), {}), policy=policy, **self.options)
            value = region.run(step, (value,), {})
            self.regions.append(region)
            self.states.append(StorageWeakRef(value.untyped_storage()))
        return value

    def gradients(self, passes=1):
        out = self.forward()
        torch.rand(3)
        for number in range(passes):
            (out * 2).sum().backward(retain_graph=number + 1 < passes)
        return self.found()

    def found(self):
        return [self.x.grad, *[p.grad for step in self.steps for p in step.parameters()], torch.get_rng_state()]

    @property
    def reruns(self):
        return [region.reruns for region in self.regions]

    def live(self):
        """How many of the states between two steps are alive, the last not counted."""
        return sum(not state.expired() for state in self.states[:-1])


def plain(length, passes=1):
    return LinkedChain([None] * length).gradients(passes)


def expected_reruns(policies):
    """The re-runs of a chain, by a small model of it: what each region's missing tape makes run again."""
    count, filled = [0] * len(policies), [False] * len(policies)

    def make_input(index):
        inputs = policies[index].inputs
        if index and inputs is not Inputs.HOLD:
            run(index - 1, tape=inputs is Inputs.SEGMENT)

    def run(index, tape):
        make_input(index)
        count[index] += 1
        filled[index] = filled[index] or tape

    for index in reversed(range(len(policies))):
        if not filled[index]:
            run(index, tape=True)
    return count


# --- chains --------------------------------------------------------------------------------------------------------


def test_held_inputs_run_each_region_once():
    chain = LinkedChain([DROP] * 6)
    assert_equal(chain.gradients(), plain(6))
    assert chain.reruns == [1] * 6


def test_a_chain_of_links_runs_each_region_once_for_every_later_one():
    chain = LinkedChain([DROP] + [LINK] * 5)
    assert_equal(chain.gradients(), plain(6))
    assert chain.reruns == [6, 5, 4, 3, 2, 1]


def test_a_segment_runs_each_region_once():
    chain = LinkedChain([DROP] + [SEGMENT] * 5)
    assert_equal(chain.gradients(), plain(6))
    assert chain.reruns == [1] * 6


@pytest.mark.parametrize("early_stop", [True, False])
def test_two_segments_of_links(early_stop):
    chain = LinkedChain([DROP, LINK, LINK, DROP, LINK, LINK], early_stop=early_stop)
    assert_equal(chain.gradients(), plain(6))
    assert chain.reruns == [3, 2, 1, 3, 2, 1]


@pytest.mark.parametrize("case", range(40))
def test_random_chains_run_again_as_often_as_their_model_says(case):
    rng = random.Random(case)
    policies = [rng.choice((DROP, LINK, SEGMENT)) for _ in range(rng.randint(2, 9))]
    chain = LinkedChain(policies, check=rng.choice((Check.OFF, Check.METADATA, Check.VALUES)))
    assert_equal(chain.gradients(), plain(len(policies)))
    assert chain.reruns == expected_reruns(policies)


def test_recursive_halving():
    """8 regions, the inputs held at 0, and at 4, 2, 1 ... only while they are needed is the plan's part; here at 0 and 4."""
    policies = [DROP if index in (0, 4) else SEGMENT for index in range(8)]
    chain = LinkedChain(policies)
    assert_equal(chain.gradients(), plain(8))
    assert sum(chain.reruns) == 8


def test_two_backward_passes_run_everything_twice():
    chain = LinkedChain([DROP, LINK, SEGMENT, LINK])
    once = expected_reruns(chain.policies)
    assert_equal(chain.gradients(passes=2), plain(4, passes=2))
    assert chain.reruns == [2 * count for count in once]


# --- bytes -----------------------------------------------------------------------------------------------------------


def test_links_free_the_states_between():
    held, linked, segment = (
        LinkedChain([DROP] * 6),
        LinkedChain([DROP] + [LINK] * 5),
        LinkedChain([DROP] + [SEGMENT] * 5),
    )
    outs = [chain.forward() for chain in (held, linked, segment)]
    assert [chain.live() for chain in (held, linked, segment)] == [5, 0, 0]
    for out in outs:
        out.sum().backward()
    assert [chain.live() for chain in (held, linked, segment)] == [5, 0, 0], "the test still holds the regions"


@pytest.mark.parametrize("case", range(10))
def test_as_many_states_live_as_inputs_are_held(case):
    rng = random.Random(case)
    policies = [DROP, *[rng.choice((DROP, LINK, SEGMENT)) for _ in range(7)]]
    chain = LinkedChain(policies)
    out = chain.forward()
    assert chain.live() == policies[1:].count(DROP)
    out.sum().backward()


def test_nothing_is_left_without_the_garbage_collector():
    gc.collect()
    gc.disable()
    try:
        chain = LinkedChain([DROP, LINK, SEGMENT, DROP, LINK])
        chain.gradients()
        regions = [weakref.ref(region) for region in chain.regions]
        chain.regions.clear()
        assert [region() for region in regions] == [None] * 5
        assert all(state.expired() for state in chain.states)
    finally:
        gc.enable()


def test_late_eviction():
    chain = LinkedChain([HOLD] * 4)
    out = chain.forward()
    torch.rand(3)
    for region in (chain.regions[1], chain.regions[3]):
        for slot in region.live_slots():
            region.drop(slot)
    (out * 2).sum().backward()
    assert_equal(chain.found(), plain(4))
    assert chain.reruns == [0, 1, 0, 1]


# --- other shapes than a chain ---------------------------------------------------------------------------------------


def pair(x):
    return x.sin(), x.cos()


def join(a, b):
    return (a * b).exp()


def joined(policy):
    x = torch.linspace(-1, 1, 8).requires_grad_()
    if policy is None:
        join(*pair(x)).sum().backward()
        return [x.grad], None
    maker = Region(capture_call(pair, (x,), {}))
    a, b = maker.run(pair, (x,), {})
    out = run_region(join, a, b, policy=policy)
    del a, b
    out.sum().backward()
    return [x.grad], maker.reruns


def test_two_inputs_of_one_maker_run_it_once():
    wanted, _ = joined(None)
    got, reruns = joined(LINK)
    assert_equal(got, wanted)
    assert reruns == 1, "its own slots are its input, which it holds"
    got, reruns = joined(SEGMENT)
    assert_equal(got, wanted)
    assert reruns == 1


def test_a_diamond_of_links():
    def step(call):
        seed()
        x = torch.randn(5, requires_grad=True)
        top = call(lambda t: t.exp().tanh(), x * 1)
        left, right = call(lambda t: t.sin().exp(), top), call(lambda t: torch.dropout(t.cos(), 0.5, True), top)
        bottom = call(lambda a, b: (a * b).tanh(), left, right)
        torch.rand(2)
        bottom.sum().backward()
        return x.grad, torch.get_rng_state()

    wanted = step(lambda function, *values: function(*values))
    for policy in (LINK, SEGMENT):
        assert_equal(step(lambda function, *values, p=policy: run_region(function, *values, policy=p)), wanted)


def test_outputs_in_containers_are_linked_too():
    def step(call):
        x = torch.linspace(-1, 1, 8).requires_grad_()
        made = call(lambda t: {"a": t.exp(), "b": [t.sin(), None]}, x)
        out = call(lambda d: (d["a"] * d["b"][0]).tanh(), made)
        alive = StorageWeakRef(made["a"].untyped_storage())
        del made
        freed = alive.expired()
        out.sum().backward()
        return [x.grad], freed

    wanted, _ = step(lambda function, *values: function(*values))
    got, freed = step(lambda function, *values: run_region(function, *values, policy=LINK))
    assert_equal(got, wanted)
    assert freed


def test_a_state_that_was_written_to_is_held_instead():
    def step(call):
        x = torch.linspace(-1, 1, 8).requires_grad_()
        state = call(lambda t: t * 3, x)
        state.add_(1)
        call(lambda t: t.exp().sin(), state).sum().backward()
        return [x.grad]

    assert_equal(step(lambda f, *v: run_region(f, *v, policy=LINK)), step(lambda f, *v: f(*v)))


def test_a_view_or_a_copy_of_an_output_is_held():
    def step(call):
        x = torch.linspace(-1, 1, 8).requires_grad_()
        state = call(lambda t: t.exp() * 3, x)
        call(lambda t: t.exp().sin(), state[2:]).sum().backward()
        return [x.grad]

    assert_equal(step(lambda f, *v: run_region(f, *v, policy=LINK)), step(lambda f, *v: f(*v)))


def test_nested_chains_of_links():
    def inner(call, x):
        for _ in range(3):
            x = call(lambda t: torch.dropout(t.sin().exp(), 0.2, True), x)
        return x

    def step(call):
        seed()
        x = torch.randn(5, requires_grad=True)
        value = x
        for _ in range(2):
            value = call(lambda t: inner(call, t), value)
        torch.rand(2)
        value.sum().backward()
        return x.grad, torch.get_rng_state()

    wanted = step(lambda function, *values: function(*values))
    for policy in (DROP, LINK, SEGMENT):
        assert_equal(step(lambda function, *values, p=policy: run_region(function, *values, policy=p)), wanted)


@pytest.mark.parametrize("place", ["closure", "list"])
def test_a_nested_region_that_gets_one_tensor_twice(place):
    """At first the argument is the closure's tensor; in the re-run it is a twin, and the outer slots must not move."""

    def step(call):
        seed()
        x = torch.randn(5, requires_grad=True)
        a, other = x * 2, x * 3
        box = [a]

        def outer(given):
            call(lambda p, q: p.clone(), given, a if place == "closure" else box[0])
            return (other * (a if place == "closure" else box[0])).sin()

        call(outer, a).sum().backward()
        return [x.grad]

    wanted = step(lambda function, *values: function(*values))
    for policy in (DROP, HOLD, LINK):
        assert_equal(step(lambda function, *values, p=policy: run_region(function, *values, policy=p)), wanted)


# --- checkpoint_sequential ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("segments", [1, 2, 3, 7])
def test_sequential_runs_every_managed_function_twice(segments):
    seed()
    model = nn.Sequential(*[Step() for _ in range(7)])
    x = torch.randn(3, 6, requires_grad=True)
    RAN.all.clear()
    retape.checkpoint_sequential(model, segments, x).sum().backward()
    managed = 7 // segments * (segments - 1)
    assert [RAN.all.count(step) for step in model] == [2] * managed + [1] * (7 - managed)


def test_sequential_equals_plain():
    def step(segments):
        seed()
        model = nn.Sequential(*[Step() for _ in range(7)])
        x = torch.randn(3, 6, requires_grad=True)
        out = model(x) if segments is None else retape.checkpoint_sequential(model, segments, x)
        torch.rand(1)
        out.sum().backward()
        return [x.grad, *[p.grad for p in model.parameters()], torch.get_rng_state()]

    for segments in range(1, 8):
        assert_equal(step(segments), step(None))

"""Problems are validated when they are made; every refusal says what to give instead."""

import hashlib
import json
import math
from dataclasses import asdict

import pytest

from retape.core import Budget, BudgetKind, Chain, Graph, GraphTensor, Loop, Op, Option, OptionKind, Stage, Tier
from retape.core.errors import InvalidInput, RetapeError

NAN, INF = math.nan, math.inf


def stage(**changes):
    return Stage(**{"forward_seconds": 1, "backward_seconds": 2, "state_bytes": 3, "tape_bytes": 4, **changes})


def option(**changes):
    given = {"kind": OptionKind.KEEP, "held_bytes": 2, "forward_seconds": 1, "backward_seconds": 1}
    return Option(**{**given, **changes})


def graph(**changes):
    given = {
        "ops": (Op(name="mul", seconds=1, inputs=("x",), outputs=("y",)),),
        "tensors": (GraphTensor(name="x", bytes=4), GraphTensor(name="y", bytes=8)),
        "inputs": ("x",),
        "saved": ("y",),
    }
    return Graph(**{**given, **changes})


REFUSED = [
    (lambda: stage(forward_seconds=NAN), "Stage.forward_seconds = nan; give a finite number of seconds >= 0,"),
    (lambda: stage(backward_seconds=-1), "Stage.backward_seconds = -1; give a finite number of seconds >= 0,"),
    (lambda: stage(forward_seconds=INF), "Stage.forward_seconds = inf; give a finite number"),
    (lambda: stage(forward_seconds=True), "Stage.forward_seconds = True; give a finite number"),
    (lambda: stage(state_bytes=-1), "Stage.state_bytes = -1; give a whole number of bytes >= 0,"),
    (lambda: stage(tape_bytes=1.5), "Stage.tape_bytes = 1.5; give a whole number of bytes >= 0,"),
    (lambda: stage(tape_bytes=True), "Stage.tape_bytes = True; give a whole number"),
    (
        lambda: Option(kind=OptionKind.KEEP, held_bytes=-2, forward_seconds=1, backward_seconds=1),
        "Option.held_bytes = -2; give a whole number",
    ),
    (
        lambda: Option(kind=OptionKind.KEEP, held_bytes=2, forward_seconds=1, backward_seconds=NAN),
        "Option.backward_seconds = nan; give a finite number",
    ),
    (lambda: Chain(stages=()), "A chain needs at least one stage."),
    (lambda: Chain(stages=[stage()]), "; give a tuple, each item an instance of Stage."),
    (lambda: Chain(stages=("a",)), "; give a tuple, each item an instance of Stage."),
    (lambda: Chain(stages=(stage(),), fixed_bytes=-1), "Chain.fixed_bytes = -1; give a whole number"),
    (
        lambda: Loop(steps=0),
        "A loop of 0 steps cannot be scheduled; give a whole number >= 1 (at most 1,000,000,000,000), or None",
    ),
    (lambda: Loop(steps=-5), "A loop of -5 steps cannot be scheduled"),
    (lambda: Loop(steps=2.0), "A loop of 2.0 steps cannot be scheduled"),
    (lambda: Loop(steps=True), "A loop of True steps cannot be scheduled"),
    (lambda: Loop(steps=3, state_bytes=-1), "Loop.state_bytes = -1; give a whole number"),
    (lambda: Loop(steps=3, forward_seconds=NAN), "Loop.forward_seconds = nan; give a finite number"),
    (lambda: Tier(name="disk", capacity_bytes=-1), "Tier 'disk' has a capacity of -1 bytes; give a whole number >= 0"),
    (lambda: Tier(name="disk", capacity_bytes=0.5), "Tier 'disk' has a capacity of 0.5 bytes"),
    (
        lambda: Tier(name="disk", write_bytes_per_second=0),
        "Tier 'disk' has write_bytes_per_second = 0; give a positive",
    ),
    (lambda: Tier(name="disk", read_bytes_per_second=NAN), "Tier 'disk' has read_bytes_per_second = nan"),
    (lambda: Tier(name="disk", read_bytes_per_second="fast"), "Tier 'disk' has read_bytes_per_second = 'fast'"),
    (lambda: Op(name="mul", seconds=-1, inputs=(), outputs=()), "Op 'mul'.seconds = -1"),
    (lambda: GraphTensor(name="x", bytes=-1), "GraphTensor 'x'.bytes = -1; give a whole number"),
    (lambda: graph(tensors=(GraphTensor(name="x", bytes=1),) * 2), "Two tensors of the graph have the same name"),
    (lambda: graph(inputs=()), "Op 'mul' reads 'x' before anything makes it."),
    (lambda: graph(inputs=("x", "y")), "Op 'mul' makes 'y', which was made already."),
    (lambda: graph(saved=("z",)), "The graph uses tensor 'z', which is not listed or never made."),
    (lambda: Budget.of("8 bananas"), "'8 bananas' is not a number of bytes. Write one with a unit"),
    (lambda: Budget.of(0), "A budget of 0 bytes cannot hold anything; give a positive number of bytes."),
    (lambda: Budget.of("0 GiB"), "A budget of 0 bytes cannot hold anything"),
    (lambda: Budget.of(-4), "A budget of -4 bytes cannot hold anything"),
    (lambda: Budget.of(1.5), "A budget of 1.5 is not a fraction: give a number above 0 and up to 1, or bytes"),
    (lambda: Budget.of(0.0), "A budget of 0.0 is not a fraction"),
    (lambda: Budget.of(NAN), "A budget of nan is not a fraction"),
    (lambda: Budget.of(True), "True is not a budget. Give bytes ('24GiB' or an int), a fraction (0.5), 'auto'"),
    (lambda: Budget.of(None), "None is not a budget."),
    (lambda: Budget.of({}), "A budget per device needs at least one device"),
    (lambda: Budget.of({"cuda:0": "lots"}), "'lots' is not a number of bytes"),
    (lambda: Budget.activations("a bit"), "'a bit' is not a number of bytes"),
    (lambda: Budget.of("8GiB", in_flight=0), "in_flight = 0; give a whole number of microbatches >= 1."),
    (lambda: Budget.of("8GiB", in_flight=True), "in_flight = True; give a whole number of microbatches >= 1."),
    # numbers that no solver can add up
    (
        lambda: stage(tape_bytes=2**62),
        "Stage.tape_bytes = 4611686018427387904; give a whole number of bytes >= 0, below",
    ),
    (lambda: Chain(stages=(stage(tape_bytes=2**60),) * 20), "bytes, and must be below 2**62"),
    (lambda: Chain(stages=(stage(options=(option(held_bytes=2**60),)),) * 4), "Give smaller sizes, or fewer stages."),
    (lambda: stage(forward_seconds=10**400), "Stage.forward_seconds = an int of 1329 bits; give a finite number"),
    (
        lambda: stage(forward_seconds=1e308),
        "Stage.forward_seconds = 1e+308; give a finite number of seconds >= 0, at most",
    ),
    (lambda: stage(forward_seconds=10**5000), "Stage.forward_seconds = an int of 16610 bits"),
    (lambda: Loop(steps=2**63), "A loop of 9223372036854775808 steps cannot be scheduled"),
    (lambda: Loop(steps=10**400), "A loop of an int of 1329 bits steps cannot be scheduled"),
    (lambda: Tier(name="disk", read_bytes_per_second=10**400), "Tier 'disk' has read_bytes_per_second = an int of"),
    (lambda: Tier(name="disk", read_bytes_per_second=True), "Tier 'disk' has read_bytes_per_second = True"),
    (lambda: Tier(name="disk", capacity_bytes=True), "Tier 'disk' has a capacity of True bytes"),
    (lambda: Budget.of(10**400), "A budget of an int of 1329 bits bytes is 2**62 or more; give fewer."),
    (lambda: Budget.of("1e300TiB"), "'1e300TiB' is not a number of bytes."),
    (lambda: Budget.of("1e20TiB"), "is 2**62 or more; give fewer."),
    # values of another kind
    (lambda: stage(options=[option()]), "; give a tuple, each item an instance of Option."),
    (lambda: stage(options=None), "; give a tuple, each item an instance of Option."),
    (lambda: stage(name=3), "Stage.name = 3; give a text."),
    (lambda: stage(pinned=1), "Stage.pinned = 1; give True or False."),
    (
        lambda: stage(pinned=True, options=(option(),)),
        "A pinned stage has 1 options, but its tape is always kept whole; leave options out, or pinned.",
    ),
    (lambda: option(kind="keep"), "Option.kind = 'keep'; give a member of OptionKind."),
    (lambda: Op(name="mul", seconds=1, inputs="xy", outputs=("z",)), "; give a tuple, each item a text."),
    (lambda: graph(ops=None), "; give a tuple, each item an instance of Op."),
    (lambda: graph(tensors=("x",)), "; give a tuple, each item an instance of GraphTensor."),
    (lambda: graph(inputs="x"), "; give a tuple, each item a text."),
    (lambda: graph(saved=[]), "; give a tuple, each item a text."),
    (lambda: Budget(kind="total", limit_bytes=5), "Budget.kind = 'total'; make a budget with Budget.of('24GiB')."),
    (lambda: Budget(kind=BudgetKind.TOTAL, limit_bytes=NAN), "nan is not a budget."),
    (lambda: Budget(kind=BudgetKind.TOTAL), "None is not a budget."),
    (lambda: Budget(kind=BudgetKind.AUTO, limit_bytes=5), "kind 'auto' has no bytes; leave limit_bytes out."),
    (lambda: Budget(kind=BudgetKind.FRACTION, share=7.0), "A budget of 7.0 is not a fraction"),
    (lambda: Budget(kind=BudgetKind.AUTO, share=0.5), "kind 'auto' has no share; leave share out."),
    (lambda: Budget(kind=BudgetKind.AUTO, devices=(("cuda:0", Budget.of(5)),)), "A budget per device, and no other"),
    (lambda: Budget(kind=BudgetKind.PER_DEVICE, devices=(("cuda:0", 5),)), "A budget per device, and no other"),
    (lambda: Budget(kind=BudgetKind.PER_DEVICE, devices=5), "A budget per device, and no other"),
    (lambda: Budget.fraction("x"), "A budget of 'x' is not a fraction"),
]


@pytest.mark.parametrize(("make", "message"), REFUSED, ids=[message[:40] for _, message in REFUSED])
def test_bad_input_says_what_and_what_to_do(make, message):
    with pytest.raises(InvalidInput) as caught:
        make()
    assert message in str(caught.value)
    assert isinstance(caught.value, RetapeError)
    assert isinstance(caught.value, ValueError)


def test_budgets_are_read_as_people_write_them():
    assert Budget.of("24GiB") == Budget(kind=BudgetKind.TOTAL, limit_bytes=24 * 1024**3)
    assert Budget.of(1000).limit_bytes == 1000
    assert Budget.of(0.5) == Budget(kind=BudgetKind.FRACTION, share=0.5)
    assert Budget.of(" Auto ").kind is BudgetKind.AUTO
    assert Budget.activations("10GiB").kind is BudgetKind.ACTIVATIONS
    per_device = Budget.of({"cuda:0": "1GiB", "cuda:1": 0.25})
    assert [(name, budget.kind) for name, budget in per_device.devices] == [
        ("cuda:0", BudgetKind.TOTAL),
        ("cuda:1", BudgetKind.FRACTION),
    ]
    assert Budget.of(per_device) is per_device


@pytest.mark.parametrize("number", [1, 123456, 0.5, 1.0])
def test_a_number_in_a_text_means_what_it_means_in_python(number):
    assert Budget.of(str(number)) == Budget.of(number)
    assert Budget.of({"cuda:0": str(number)}) == Budget.of({"cuda:0": number})


def test_bytes_above_weights_and_gradients_as_a_text():
    assert Budget.activations("4096") == Budget.activations(4096)
    with pytest.raises(InvalidInput, match=r"counts bytes, and got 0\.5\. Give bytes such as '10GiB'"):
        Budget.activations("0.5")


def test_microbatches_in_flight_are_kept_and_can_be_set_later():
    assert Budget.of(Budget.of("8GiB"), in_flight=4) == Budget.of("8GiB", in_flight=4)
    assert Budget.of(Budget.of("8GiB", in_flight=4)).in_flight == 4
    assert Budget.of(Budget.of("8GiB", in_flight=4), in_flight=1).in_flight == 1


def test_a_stage_offers_keeping_first():
    option = Option(kind=OptionKind.RECOMPUTE, held_bytes=0, forward_seconds=1, backward_seconds=3)
    choices = stage(options=(option,)).choices
    assert [choice.kind for choice in choices] == [OptionKind.KEEP, OptionKind.RECOMPUTE]
    assert (choices[0].held_bytes, choices[0].forward_seconds, choices[0].backward_seconds) == (4, 1, 2)


def test_a_chain_names_its_stages():
    chain = Chain(stages=(stage(name="embed"), stage()))
    assert (chain.stage_name(0), chain.stage_name(1), chain.length) == ("embed", "stage 1", 2)


def test_digests_tell_problems_apart():
    assert Loop(steps=3).digest() == Loop(steps=3).digest() != Loop(steps=4).digest()
    assert Chain(stages=(stage(),)).digest() == Chain(stages=(stage(),)).digest()
    assert Chain(stages=(stage(),)).digest() != Chain(stages=(stage(tape_bytes=5),)).digest()
    assert Chain(stages=(stage(),)).digest() != Chain(stages=(stage(pinned=True),)).digest()
    assert graph().digest() != graph(name="other").digest()


CAME_LATER = (
    "input_bytes",
    "forward_stall_seconds",
    "backward_stall_seconds",
    "forward_flight_bytes",
    "backward_flight_bytes",
    "on_disk",
    "sharded_bytes",
)


def as_before_pins(problem):
    """What a digest was made of before a stage could be pinned, and before options said what they allow for copies."""
    fields = asdict(problem)
    assert fields.pop("host", None) is None
    assert not fields.pop("left_bytes", 0)
    assert fields.pop("disk", None) is None
    for one in fields.get("stages", ()):
        assert one.pop("pinned") is False
        assert one.pop("untaped_transient_bytes") == 0
        assert one.pop("gradient_bytes") == 0
        for option in one["options"]:
            assert not any(option.pop(name) for name in CAME_LATER)
    return json.dumps(fields, sort_keys=True, default=lambda enum: enum.value)


@pytest.mark.parametrize(
    "problem",
    [Chain(stages=(stage(options=(option(),), name="é"), stage(forward_seconds=1.0))), Loop(steps=None), graph()],
)
def test_a_problem_without_pinned_stages_keeps_its_digest(problem):
    assert problem.digest() == hashlib.sha256(as_before_pins(problem).encode()).hexdigest()[:16]


def test_a_loop_works_on_one_state_and_one_tape():
    assert Loop(steps=None, state_bytes=3, tape_bytes=4).working_bytes == 7


def test_copies_take_bytes_over_speed():
    tier = Tier(name="disk", write_bytes_per_second=2, read_bytes_per_second=4)
    assert (tier.write_seconds(8), tier.read_seconds(8)) == (4, 2)
    assert Tier(name="device").write_seconds(8) == 0

"""Memory that goes down, counted in units of one activation, and re-runs that are counted exactly."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import checkpoint_sequential as torch_sequential

import retape
from support.comparing import Notes, as_region, plainly
from support.ledger import Ledger

WIDTH = 1000
UNIT = WIDTH * 4


def four_ops(a):
    """Four ops; all results but the first are saved."""
    return a.sin().exp().tanh().cos()


def theirs(function, *args, **kwargs):
    return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)


def chained(call, count=8, function=four_ops):
    def run(x):
        for _ in range(count):
            x = call(function, x)
        return x

    return run


def measured(forward, **options):
    """Units that live after the forward, and at the peak of forward and backward; once to learn, once to measure."""
    for _ in range(2):
        x = torch.randn(WIDTH, requires_grad=True)
        with Ledger() as ledger:
            y = forward(x)
            held = ledger.live
            y.sum().backward(**options)
    return round(held / UNIT, 1), round(ledger.peak / UNIT, 1)


def test_the_ledger_counts_plain_autograd():
    held, peak = measured(chained(plainly))
    assert held == 24  # three results a block
    assert peak >= held


def test_eight_blocks_hold_their_inputs_alone():
    held, peak = measured(chained(as_region))
    assert held == 8  # seven inputs made inside, and the output
    assert peak <= measured(chained(theirs))[1] < measured(chained(plainly))[1]


def test_one_region_around_everything_is_no_worse_than_plain():
    whole = chained(plainly)
    held, peak = measured(lambda x: as_region(whole, x))
    assert held == 1
    assert peak <= measured(lambda x: theirs(whole, x))[1]
    assert peak <= measured(whole)[1] + 1


def four_by_four(call):
    return chained(call, 4, chained(call, 4))


def test_nested_four_by_four():
    held, peak = measured(four_by_four(as_region))
    assert held == 4
    assert peak <= measured(four_by_four(theirs))[1]
    assert peak < measured(chained(as_region, 16))[1]


@pytest.mark.parametrize("segments", [2, 4, 8])
def test_segments(segments):
    functions = [four_ops] * 16
    ours = measured(lambda x: retape.checkpoint_sequential(functions, segments, x, use_reentrant=False))
    other = measured(lambda x: torch_sequential(functions, segments, x, use_reentrant=False))
    assert ours[0] <= other[0]
    assert ours[1] <= other[1]


def boxed(call, wrap, unwrap):
    return chained(call, 8, four_ops), lambda x: _run_boxed(call, wrap, unwrap, x)


def _run_boxed(call, wrap, unwrap, x):
    box = wrap(x)
    for _ in range(8):
        box = call(lambda b: wrap(four_ops(unwrap(b))), box)
    return unwrap(box)


@pytest.mark.parametrize(
    ("wrap", "unwrap"),
    [
        (lambda t: {"h": t}, lambda b: b["h"]),
        (lambda t: [[t]], lambda b: b[0][0]),
        (lambda t: (None, {"h": (t,)}), lambda b: b[1]["h"][0]),
    ],
    ids=["dict", "list", "nested"],
)
def test_containers_are_as_frugal_as_tensors(wrap, unwrap):
    bare, inside = boxed(as_region, wrap, unwrap)
    assert measured(inside) == measured(bare)


def test_keywords_are_as_frugal_as_tensors():
    def by_keyword(x):
        for _ in range(8):
            x = as_region(lambda *, hidden: four_ops(hidden), hidden=x)
        return x

    assert measured(by_keyword) == measured(chained(as_region))


def test_a_retained_graph_drops_what_was_refilled():
    x = torch.randn(WIDTH, requires_grad=True)
    with Ledger() as ledger:
        y = chained(as_region)(x).sum()
        held = ledger.live
        y.backward(retain_graph=True)
        peak = ledger.peak
        x.grad = None
        assert ledger.live == held
        y.backward(retain_graph=True)
        x.grad = None
        assert ledger.live == held
    assert ledger.peak == peak
    assert peak < 20 * UNIT


def test_a_partial_backward_leaves_nothing_refilled():
    x = torch.randn(WIDTH, requires_grad=True)
    with Ledger() as ledger:
        y, z = as_region(lambda a: (four_ops(a), four_ops(a * 2)), x)
        held = ledger.live
        y.sum().backward(retain_graph=True)
        x.grad = None
        assert ledger.live == held
        del y, z
        assert ledger.live == 0


def test_a_saved_tensor_that_is_looked_at_is_not_kept():
    x = torch.randn(WIDTH, requires_grad=True)
    with Ledger() as ledger:
        y = as_region(four_ops, x)
        held = ledger.live
        y.grad_fn._saved_self  # noqa: B018 - reading it is the point
        assert ledger.live == held


def test_everything_is_gone_after_a_step():
    x = torch.randn(WIDTH, requires_grad=True)
    with Ledger() as ledger:
        chained(as_region)(x).sum().backward()
        x.grad = None
        assert ledger.live == 0


def counted():
    calls = Notes()

    def function(a):
        calls()
        return four_ops(a)

    return function, calls


@pytest.mark.parametrize("count", [1, 2, 8])
def test_each_block_is_run_again_exactly_once(count):
    function, calls = counted()
    chained(as_region, count, function)(torch.randn(4, requires_grad=True)).sum().backward()
    assert len(calls.all) == 2 * count


def test_nested_blocks_run_three_times_less_the_last_of_each():
    function, calls = counted()
    chained(as_region, 4, chained(as_region, 4, function))(torch.randn(4, requires_grad=True)).sum().backward()
    assert len(calls.all) == 16 + 12 + 16  # the outer re-run ends where the last inner region begins


@pytest.mark.parametrize("segments", [1, 2, 4, 8, 16])
def test_segments_run_each_managed_function_twice(segments):
    function, calls = counted()
    y = retape.checkpoint_sequential([function] * 16, segments, torch.randn(4, requires_grad=True), use_reentrant=False)
    y.sum().backward()
    assert len(calls.all) == 16 + (16 // segments) * (segments - 1)


def test_a_second_backward_runs_each_block_once_more():
    function, calls = counted()
    y = chained(as_region, 8, function)(torch.randn(4, requires_grad=True)).sum()
    y.backward(retain_graph=True)
    y.backward()
    assert len(calls.all) == 24


def test_a_forward_that_nobody_differentiates_is_run_once():
    function, calls = counted()
    chained(as_region, 8, function)(torch.randn(4, requires_grad=True))
    with torch.no_grad():
        chained(as_region, 8, function)(torch.randn(4, requires_grad=True))
    assert len(calls.all) == 16


def test_a_block_whose_gradient_is_not_asked_for_is_not_run_again():
    function, calls = counted()
    x, side = torch.randn(4, requires_grad=True), torch.randn(4, requires_grad=True)
    y, unused = as_region(function, x), as_region(function, side)
    y.sum().backward()
    assert len(calls.all) == 3
    assert unused.requires_grad

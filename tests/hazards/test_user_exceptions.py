"""`except` in user code around ops; neither the early stop nor a true error may be taken for the other."""

import contextlib

import pytest
import torch

from support.comparing import Notes, as_region, equals_plain, equals_plain_every_way, leaf, plainly


def except_exception(a):
    try:
        return a.sin().cos()
    except Exception:
        return a * 100


def bare_except(a):
    try:
        return a.sin().cos()
    except:  # noqa: E722 - the hazard itself
        return a.exp().exp()


def except_base(a):
    try:
        h = a.sin()
        h = h.cos()
    except BaseException:
        h = a.exp()
    return h.sin().cos()


def suppressed(a):
    h = a
    with contextlib.suppress(BaseException):
        h = a.sin().cos()
    return h * 2


def returning_finally(a):
    h = a
    try:
        h = a.sin().cos()
    finally:
        return h * 2  # noqa: B012 - the hazard itself


def three_tries(a):
    for _ in range(3):
        try:
            return a.sin().cos()
        except BaseException:
            continue
    return a


def cleaning_up(a):
    try:
        return a.sin().cos()
    except BaseException:
        cleaned.append(1)
        raise


cleaned = []


@pytest.mark.parametrize(
    "function",
    [except_exception, bare_except, except_base, suppressed, returning_finally, three_tries, cleaning_up],
    ids=lambda function: function.__name__,
)
@equals_plain_every_way
def test_swallowed_stops_change_no_number(call, function):
    x = leaf()
    call(lambda a: function(a.exp()).sin(), x).sum().backward()
    return x.grad


@equals_plain
def test_a_stop_wrapped_into_another_exception(call):
    def wrapped(a):
        try:
            return a.sin().cos()
        except BaseException as error:
            raise RuntimeError("layer failed") from error

    x = leaf()
    call(wrapped, x).sum().backward()
    return x.grad


class OnlyAtFirst:
    """Fails in the forward, and is caught there: the region takes the other branch in both runs."""

    def __call__(self, a):
        try:
            return torch.linalg.cholesky(-torch.eye(4) + 0 * a).sin()
        except torch.linalg.LinAlgError:
            return a.cos().sin()


@equals_plain
def test_an_exception_that_is_part_of_the_computation(call):
    x = leaf()
    call(OnlyAtFirst(), x).sum().backward()
    return x.grad


@pytest.mark.parametrize("call", [plainly, as_region])
def test_an_exception_of_the_forward_gets_out(call):
    def failing(a):
        a.sin()
        raise ValueError("in the forward")

    with pytest.raises(ValueError, match="in the forward"):
        call(failing, leaf())


def test_an_exception_of_the_rerun_gets_out_and_the_next_backward_is_right():
    run = Notes()

    def failing_once(a):
        h = a.sin()
        if run() == 2:
            raise ValueError("in the re-run")
        return h.cos()

    x = leaf()
    y = as_region(failing_once, x)
    with pytest.raises(ValueError, match="in the re-run"):
        y.sum().backward(retain_graph=True)
    y.sum().backward()
    got, x.grad = x.grad, None
    x.sin().cos().sum().backward()
    assert torch.equal(got, x.grad)


def test_a_keyboard_interrupt_of_the_rerun_gets_out():
    run = Notes()

    def interrupted(a):
        if run() == 2:
            raise KeyboardInterrupt
        return a.sin().cos()

    y = as_region(interrupted, leaf())
    with pytest.raises(KeyboardInterrupt):
        y.sum().backward()

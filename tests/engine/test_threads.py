"""Regions in several threads at once, as DataParallel and pipeline runners have them."""

import threading

import torch
from torch import nn

from support.comparing import as_region, assert_equal, nested, results


def together(jobs):
    """Run jobs in threads that start at one barrier; returns their results, or raises what one of them raised."""
    barrier, found = threading.Barrier(len(jobs)), [None] * len(jobs)

    def work(number, job):
        barrier.wait()
        try:
            found[number] = job()
        except BaseException as error:
            found[number] = error

    threads = [threading.Thread(target=work, args=(number, job)) for number, job in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for result in found:
        if isinstance(result, BaseException):
            raise result
    return found


def network(number):
    generator = torch.Generator().manual_seed(number)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def training(number, call, steps=8):
    model = network(number)
    x = torch.linspace(-1, 1, 32).reshape(8, 4).requires_grad_()

    def run():
        for _ in range(steps):
            call(model, call(model, x)).sum().backward()
        return results(model, x)

    return run


def test_models_of_their_own_in_four_threads():
    wanted = [training(number, lambda f, *a: f(*a))() for number in range(4)]
    for way in (as_region, nested):
        assert_equal(together([training(number, way) for number in range(4)]), wanted)


def test_forward_here_and_backward_in_other_threads():
    model = network(0).eval()
    inputs = [torch.full((4, 4), float(number), requires_grad=True) for number in range(4)]
    losses = [as_region(lambda a: model(a).sin(), x).sum() for x in inputs]
    together([loss.backward for loss in losses])
    got = [x.grad.clone() for x in inputs]
    for x in inputs:
        x.grad = None
        model(x).sin().sum().backward()
    assert_equal(got, [x.grad for x in inputs])


def test_one_frozen_model_shared_by_threads():
    model = network(0).eval().requires_grad_(False)

    def job(number):
        x = torch.full((4, 4), float(number), requires_grad=True)

        def run():
            for _ in range(8):
                as_region(model, x).sum().backward()
            return x.grad

        return run

    got = together([job(number) for number in range(4)])
    for number, gradient in enumerate(got):
        x = torch.full((4, 4), float(number), requires_grad=True)
        for _ in range(8):
            model(x).sum().backward()
        assert torch.equal(gradient, x.grad)


def test_a_switch_in_one_thread_does_not_reach_another():
    from retape.torch.engine.context import is_plain, plain

    with plain():
        assert is_plain()
        assert together([is_plain, is_plain]) == [False, False]

"""Threads that share a model, and re-runs that wait for other threads: right, or an error instead of a lost update or a hang."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import retape
from retape.errors import RegionError, StateChanged
from retape.torch.engine.rerun import RerunLock
from support.comparing import Notes


class Meeting(nn.Module):
    """A batch norm whose re-run lets another thread run the same module meanwhile."""

    def __init__(self, other):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.other = [other]

    def forward(self, x):
        if retape.recomputing() and threading.current_thread() is threading.main_thread():
            self.other[0]()
        return self.norm(x).tanh()


def test_a_forward_beside_a_rerun_of_the_same_module_in_another_thread_is_an_error():
    found = Notes()  # what a re-run appends to a list that it reaches is removed again

    def forward():
        try:
            retape.checkpoint(model, torch.randn(8, 4, requires_grad=True))
        except StateChanged as error:
            found(str(error))

    def elsewhere():
        thread = threading.Thread(target=forward)
        thread.start()
        thread.join()

    model = Meeting(elsewhere)
    y = retape.checkpoint(model, torch.randn(8, 4, requires_grad=True))
    y.sum().backward()
    assert len(found.all) == 1
    assert "another thread" in found.all[0]
    assert "norm.running_mean" in found.all[0]


def test_threads_with_models_of_their_own_disturb_nobody():
    def forward():
        model = nn.Sequential(nn.BatchNorm1d(4), nn.Tanh())
        for _ in range(20):
            retape.checkpoint(model, torch.randn(8, 4, requires_grad=True)).sum().backward()
        return model[0].num_batches_tracked.item()

    with ThreadPoolExecutor(3) as pool:
        assert [job.result() for job in [pool.submit(forward) for _ in range(3)]] == [20, 20, 20]


def test_a_rerun_that_waits_for_a_thread_that_waits_for_it_is_an_error():
    lock, over, found = RerunLock(check_seconds=0.01), threading.Event(), []

    def worker():
        try:
            with lock:
                found.append("entered")
        except RegionError as error:
            found.append(str(error))
        over.set()

    with lock:
        thread = threading.Thread(target=worker)
        thread.start()
        assert over.wait(20), "the worker hangs"
    thread.join()
    assert "each waits for the other" in found[0]


def test_a_lock_that_is_let_go_of_is_taken():
    lock, entered = RerunLock(check_seconds=0.01), []

    def worker():
        with lock:
            entered.append(True)

    with lock, lock:
        thread = threading.Thread(target=worker)
        thread.start()
        for _ in range(30_000):  # at work, not waiting
            torch.ones(1).add_(1)
    thread.join(20)
    assert entered == [True]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_worker_inside_a_region(depth):
    """A region whose function runs in a worker thread, which runs regions itself."""
    layer = nn.Linear(4, 4)

    def function(x):
        with ThreadPoolExecutor(1) as pool:
            inner = layer if depth == 1 else lambda a: retape.checkpoint(layer, a)
            return pool.submit(lambda: inner(x).sin()).result().exp()

    x = torch.ones(2, 4, requires_grad=True)
    retape.checkpoint(function, x).sum().backward()
    wanted = torch.ones(2, 4, requires_grad=True)
    managed, layer.weight.grad = layer.weight.grad, None
    layer(wanted).sin().exp().sum().backward()
    assert torch.equal(x.grad, wanted.grad)
    assert torch.equal(managed, layer.weight.grad)

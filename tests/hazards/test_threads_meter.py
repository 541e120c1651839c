"""Counting bytes on the CPU while other threads are inside PyTorch: neither they nor the count may come to harm."""

import subprocess
import sys
import textwrap

# A process of its own, because what goes wrong here is a segmentation fault.
PROGRAM = """
    import copy, logging, sys, threading, time
    import torch
    from torch import nn
    import retape

    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    sys.setswitchinterval(1e-5)  # what goes wrong does so between two bytecodes

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

        def forward(self, x):
            return x + self.down(torch.tanh(self.up(x)))

    def gradients(model):
        model.zero_grad()
        model(x).square().mean().backward()
        return [parameter.grad for parameter in model.parameters()]

    model, x = nn.Sequential(*(Block() for _ in range(4))), torch.ones(128, 32)
    wanted = gradients(copy.deepcopy(model))
    stop, errors = threading.Event(), []

    def other():
        own = copy.deepcopy(model)
        try:
            while not stop.is_set():
                assert all(map(torch.equal, gradients(own), wanted))
        except BaseException as error:
            errors.append(repr(error))

    def measured():
        retape.measure(lambda: None)

    def adapted():
        live = retape.adaptive(model, budget=retape.Budget.activations("4MiB"))
        for _ in range(2):
            with live:
                assert all(map(torch.equal, gradients(model), wanted))
        live.remove()

    thread = threading.Thread(target=other)
    thread.start()
    try:
        for work in (measured, adapted):
            end = time.monotonic() + 4
            while time.monotonic() < end and not errors:
                work()
    finally:
        stop.set()
        thread.join()
    print("errors:", errors)
"""


def test_other_threads_come_to_no_harm():
    """While this one measures empty steps, and then while it trains under live budgets."""
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "errors: []"), done.stderr[-2000:]

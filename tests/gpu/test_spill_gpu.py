"""Slots on disk from a GPU: the same gradients, and no file left."""

import gc
import os
from dataclasses import replace
from functools import partial

import torch

from engine.test_offload import EVERYTHING, Blocks, moved
from retape.torch.engine.host.spill import SpillFolder

DEVICE = torch.device("cuda", 0)


def test_gradients_are_the_same_and_nothing_is_left(tmp_path):
    folder = SpillFolder(tmp_path, 2**30, 2**27)
    policy = replace(EVERYTHING, disk=folder, moved_inputs=frozenset({0}))
    torch.manual_seed(0)
    model = Blocks(count=6, width=512).to(DEVICE)
    x = torch.randn(4096, 512, device=DEVICE, requires_grad=True)
    gradients = []
    for call in (lambda layer, value: layer(value), partial(moved, policy=policy), partial(moved, policy=policy)):
        model.zero_grad()
        x.grad = None
        model(x, call=call).square().mean().backward()
        gradients.append([x.grad.clone(), *(p.grad.clone() for p in model.parameters())])
    for other in gradients[1:]:
        assert all(map(torch.equal, gradients[0], other))
    gc.collect()
    folder.writer.submit(lambda: None).result()
    assert folder.used_bytes == 0
    assert os.listdir(folder.path) == ["lock"]
    folder.close()

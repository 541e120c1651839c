"""Models without repeated blocks, as cases of `floor_models`: layers in one row, functions, and `retape.checkpoint` calls.

`by_hand` is empty where no module can be wrapped: there the model itself says what is recomputed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import retape
from support.blocks import square
from support.floor_models import FloorCase


class VGG(nn.Module):
    """Convolutions with in-place ReLUs in one container, and a classifier."""

    def __init__(self, widths=(8, 16), depth=8):
        super().__init__()
        layers, before = [], 3
        for width in widths:
            for _ in range(depth):
                layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU(inplace=True)]
                before = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Linear(before, 32), nn.ReLU(True), nn.Dropout(), nn.Linear(32, 4))

    def forward(self, x):
        return self.classifier(self.features(x).mean((2, 3)))


def vgg():
    return FloorCase(model=VGG(), batch=torch.randn(4, 3, 48, 48), step=square, by_hand=())


def row_of_layers():
    layers = [layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.GELU())]
    return FloorCase(model=nn.Sequential(*layers), batch=torch.randn(256, 64), step=square, by_hand=(r"\d+",))


class Functional(nn.Module):
    """Weights without modules, and a block that is a method; `around` calls it."""

    def __init__(self, around=retape.checkpoint, width=32, depth=6):
        super().__init__()
        self.up = nn.ParameterList(torch.randn(width, 4 * width) / 8 for _ in range(depth))
        self.down = nn.ParameterList(torch.randn(4 * width, width) / 16 for _ in range(depth))
        self.around = around

    def block(self, x, up, down):
        return x + F.gelu(F.layer_norm(x, x.shape[-1:]) @ up) @ down

    def forward(self, x):
        for up, down in zip(self.up, self.down, strict=True):
            x = self.around(self.block, x, up, down)
        return x


def functional():
    return FloorCase(model=Functional(), batch=torch.randn(256, 32), step=square, by_hand=())


class GraphRounds(nn.Module):
    """Rounds of messages along the edges of a graph, each a function of two layers that is given to `retape.checkpoint`."""

    def __init__(self, width=16, rounds=4, nodes=64, edges=1024):
        super().__init__()
        self.encoder, self.readout = nn.Linear(4, width), nn.Linear(width, 1)
        self.messages = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(rounds))
        self.updates = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(rounds))
        self.register_buffer("ends", torch.randint(0, nodes, (2, edges)))

    def forward(self, x):
        x = self.encoder(x)
        for message, update in zip(self.messages, self.updates, strict=True):

            def one_round(x, message=message, update=update):
                sent = F.silu(message(torch.cat([x[self.ends[0]], x[self.ends[1]]], -1)))
                received = torch.zeros_like(x).index_add(0, self.ends[1], sent)
                return x + F.silu(update(torch.cat([x, received], -1)))

            x = retape.checkpoint(one_round, x)
        return self.readout(x)


def graph_rounds():
    return FloorCase(model=GraphRounds(), batch=torch.randn(64, 4), step=square, by_hand=())


class Layers(nn.Module):
    """Repeated blocks that the model gives to `retape.checkpoint` itself."""

    def __init__(self, width=32, depth=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(width, 2, 64, batch_first=True) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = retape.checkpoint(layer, x)
        return x


def layers():
    return FloorCase(model=Layers(), batch=torch.randn(4, 24, 32), step=square, by_hand=())


FLAT_MODELS = {maker.__name__: maker for maker in (vgg, row_of_layers, functional, graph_rounds, layers)}


def flat_case(name: str) -> FloorCase:
    """Return a case, seeded."""
    torch.manual_seed(0)
    return FLAT_MODELS[name]()

"""A module's configuration of plain objects, which is compared as a whole: any change before or in a re-run is noticed."""

import types

import pytest
import torch
from torch import nn

from support.comparing import equals_plain, leaf


class PlainConfig:
    def __init__(self):
        self.scale, self.power = 2.0, 1
        self.table = {"a": 0.5, "b": 1.0, 1: 3.0}
        self.names = ["a", "b"]
        self.inner = types.SimpleNamespace(shift=0.25)
        self.calls = []


class ConfiguredBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.config = nn.Linear(4, 4), PlainConfig()

    def forward(self, x):
        config = self.config
        y = self.linear(x).sin() * config.scale + config.inner.shift
        for key, value in config.table.items():
            y = (y * value + len(str(key))).tanh()
        for name in config.names:
            y = y.sin() * config.table.get(name, 7.0)
        config.calls.append(len(config.calls))
        return (y * (1 + len(config.calls)) * (1 if type(config.power) is int else 3)).tanh()


def another(config):
    config.scale = 3.0


def rekeyed(config):
    config.table["c"] = config.table.pop("a")


def reordered(config):
    config.table["a"] = config.table.pop("a")


def of_another_type(config):
    config.power = True


def equal_key_of_another_type(config):
    del config.table[1]
    config.table[1.0] = 3.0


def added(config):
    config.late = 1.0
    config.table["late"] = 2.0


def removed(config):
    del config.table["b"]


def in_the_list(config):
    config.names[0] = "b"


def another_list(config):
    config.names = ["b", "a"]


def inside(config):
    config.inner.shift = 0.5


def another_object(config):
    config.inner = types.SimpleNamespace(shift=0.75)


CHANGES = [
    *(another, rekeyed, reordered, of_another_type, equal_key_of_another_type, added, removed),
    *(in_the_list, another_list, inside, another_object),
]


@pytest.mark.parametrize("labels", [0, 100], ids=["short", "long"])
@pytest.mark.parametrize("when", ["before backward", "between forwards"])
@pytest.mark.parametrize("change", CHANGES)
@equals_plain
def test_a_changed_configuration(call, change, when, labels):
    block, x = ConfiguredBlock(), leaf(2, 4)
    block.config.table.update({f"label {number}": 1.0 for number in range(labels)})
    block.config.names += ["a"] * labels
    for _ in range(2):  # a walk, and from then on a comparison
        call(block, x).sum().backward()
    first = call(block, x)
    if when == "between forwards":
        change(block.config)
    second = call(block, first)
    if when == "before backward":
        change(block.config)
    second.sum().backward()
    config = block.config
    contents = vars(config), vars(config.inner), list(config.table), [type(key) for key in config.table]
    return x.grad, block.linear.weight.grad, contents


@equals_plain
def test_two_modules_that_share_a_configuration(call):
    blocks, x = [ConfiguredBlock(), ConfiguredBlock()], leaf(2, 4)
    blocks[1].config = blocks[0].config
    for _ in range(3):
        y = x
        for block in blocks:
            y = call(block, y)
            block.config.scale += 0.5
        y.sum().backward()
    return x.grad, [block.linear.weight.grad for block in blocks], vars(blocks[0].config), torch.get_rng_state()

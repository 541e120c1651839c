"""Slices of `nn.Sequential` as regions: consecutive children that run as one, such as a convolution and an in-place ReLU.

A layer that works in place overwrites the output of the one before it. As a region of its own it would need a copy of its input, so
it belongs into the region before it. A slice is named after its container, as Python writes it: "features[0:2]".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import cast

from torch import nn

_NAME = re.compile(r"(?P<container>.*)\[(?P<start>\d+):(?P<stop>\d+)\]")


class SequentialSlice(nn.Sequential):
    """Some children of a container, outside the model's tree: its mode is to be set to that of the container."""


def slice_name(container: str, start: int, stop: int) -> str:
    return f"{container}[{start}:{stop}]"


def region_named(root: nn.Module, name: str) -> nn.Module:
    """Return a module of a model, or a new module that runs a slice of a container."""
    place = _NAME.fullmatch(name)
    if place is None:
        return root.get_submodule(name)
    children = list(_container(root, place["container"]))
    return SequentialSlice(*children[int(place["start"]) : int(place["stop"])])


def _container(root: nn.Module, name: str) -> nn.Sequential:
    return cast(nn.Sequential, root.get_submodule(name))


def runs_in_order(module: nn.Module) -> bool:
    """True for a container that calls its children one after the other and does nothing else."""
    return (
        isinstance(module, nn.Sequential)
        and type(module).forward is nn.Sequential.forward
        and "forward" not in vars(module)
    )


def slices_of(sequential: nn.Sequential) -> Iterator[tuple[int, int]]:
    """Yield start and stop of each slice of several children: one child, and those after it that work in place."""
    start, children = 0, list(sequential)
    for stop in range(1, len(children) + 1):
        if stop == len(children) or not getattr(children[stop], "inplace", False):
            if stop - start > 1:
                yield start, stop
            start = stop


def pieces_of(root: nn.Module, regions: Mapping[str, nn.Module]) -> dict[nn.Module, list[nn.Module]]:
    """Return for each container with slices among the regions what it calls instead of its children, in order."""
    slices: dict[nn.Sequential, dict[int, tuple[int, nn.Module]]] = {}
    for name, module in regions.items():
        place = _NAME.fullmatch(name)
        if place is not None:
            container = _container(root, place["container"])
            slices.setdefault(container, {})[int(place["start"])] = (int(place["stop"]), module)
    return {container: list(_pieces(list(container), found)) for container, found in slices.items()}


def _pieces(children: list[nn.Module], slices: dict[int, tuple[int, nn.Module]]) -> Iterator[nn.Module]:
    number = 0
    while number < len(children):
        stop, piece = slices.get(number, (number + 1, children[number]))
        yield piece
        number = stop

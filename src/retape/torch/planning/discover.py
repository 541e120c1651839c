"""The modules that become regions: repeated blocks of a model, by structure, or those that the user names.

Where these regions do not fit a budget, others are chosen by the bytes of one forward (`measure/module_calls.py`).
A block is a module with parameters and parts of its own (or a recurrent layer). The outermost blocks are taken: of a mixture of
experts the layer is a region, not each expert. Models that cannot be managed are refused here.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn

from retape.core.errors import InvalidInput, UnsupportedTransform
from retape.torch.compat import compiler_internals, hook_internals
from retape.torch.measure.module_calls import recorded_calls, regions_by_bytes
from retape.torch.measure.sequential_slices import region_named
from retape.torch.model_libraries import LIBRARIES
from retape.torch.planning.instruments import OutOfMemory

if TYPE_CHECKING:
    from retape.torch.planning.step_trials import StepTrials

_LOG = logging.getLogger("retape")
Wanted: TypeAlias = "Iterable[type[nn.Module] | str | nn.Module] | type[nn.Module] | str | nn.Module"

_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_ONE_PIECE = (nn.RNNBase, nn.MultiheadAttention)


def find_regions(model: nn.Module, wanted: Wanted | None = None) -> dict[str, nn.Module]:
    """Return the modules to run as regions, by name, in the order of the model's tree; none is inside another."""
    if wanted is not None:
        return _named(model, wanted)
    layers = LIBRARIES.recomputable_layers(model)
    found = _outermost(layers) if layers else (list(_blocks(model)) or list(_parts(model)))
    chosen = {id(module) for module in found}
    return {name: module for name, module in model.named_modules() if id(module) in chosen and module is not model}


def find_by_bytes(steps: StepTrials, tried: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Run a forward and choose regions by what each call of a module saves in it; none if it runs out of memory.

    If those are the regions that were `tried`, which need more than they save, they are divided. All ranks take those of the first.
    """
    tree, tuning = steps.recorded_forward(recorded_calls), steps.tuning
    chosen: dict[str, nn.Module] = {}
    if not isinstance(tree, OutOfMemory):
        choose = partial(
            regions_by_bytes, steps.root, tree, region_bytes=tuning.region_bytes, tolerance=tuning.cover_tolerance
        )
        chosen = choose()
        chosen = choose(divided=set(tried)) if set(chosen) == set(tried) else chosen
    names = steps.ranks.decided_by_first(lambda: list(chosen))
    return {name: region_named(steps.root, name) for name in names}


def warn_of_wrappers(model: nn.Module) -> None:
    """Log that a plan has no choice inside PyTorch's own wrappers for activation checkpointing and offload."""
    wrappers = hook_internals.activation_wrappers(model)
    if wrappers:
        _LOG.warning(
            "retape: %d modules of %s are inside PyTorch's checkpoint_wrapper or offload_wrapper, which recompute or move everything "
            "that they save, whatever the plan. Build the model without these wrappers (activation_checkpointing of FSDP settings).",
            len(wrappers),
            type(model).__name__,
        )


def refuse_graph_replays(regions: dict[str, nn.Module]) -> None:
    """Raise UnsupportedTransform for modules compiled with CUDA graphs, whose results are written to the same memory each time."""
    for name, module in regions.items():
        if compiler_internals.replays_cuda_graphs(module):
            raise UnsupportedTransform(
                f"Region {name} is compiled with CUDA graphs, which overwrite what a region holds or runs again. "
                'Compile it without mode="reduce-overhead" (or "max-autotune"), for instance with "max-autotune-no-cudagraphs".'
            )


def _is_block(module: nn.Module) -> bool:
    if isinstance(module, _WITHOUT_FORWARD) or next(module.parameters(), None) is None:
        return False
    return isinstance(module, _ONE_PIECE) or next(module.children(), None) is not None


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost repeated blocks below a module."""
    children = list(module.children())
    blocks = [child for child in children if _is_block(child)]
    kinds = Counter(type(child) for child in blocks)
    for child in children:
        repeated = child in blocks and (
            (isinstance(module, _CONTAINERS) and len(blocks) >= 2) or kinds[type(child)] >= 2
        )
        if repeated and not (isinstance(child, nn.Sequential) and _is_row_of_blocks(child)):
            yield child
        else:
            yield from _blocks(child)


def _is_row_of_blocks(module: nn.Sequential) -> bool:
    return sum(_is_block(child) for child in module) >= 2


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the parts of the first module that has several, for models in which nothing repeats."""
    children = list(module.children())
    if len(children) == 1 and not isinstance(children[0], _ONE_PIECE):
        yield from _parts(children[0])
        return
    for child in children:
        if isinstance(child, _WITHOUT_FORWARD):
            yield from child.children()
        else:
            yield child


def _outermost(modules: list[nn.Module]) -> list[nn.Module]:
    inner = {id(part) for module in modules for part in module.modules() if part is not module}
    return [module for module in modules if id(module) not in inner]


def _named(model: nn.Module, wanted: Wanted) -> dict[str, nn.Module]:
    several = wanted if isinstance(wanted, (list, tuple, set, frozenset)) else (wanted,)
    if not several:
        raise InvalidInput(
            f"regions={wanted!r} names nothing. Give classes, names or modules of the model, or leave it out."
        )
    chosen: dict[str, nn.Module] = {}
    for one in several:
        chosen.update(_matching(model, one))
    order = {name: module for name, module in model.named_modules() if name in chosen}
    _refuse_nested(order)
    return order


def _matching(model: nn.Module, wanted: Any) -> dict[str, nn.Module]:
    """Return the modules that one entry of `regions=` names; raise InvalidInput if there are none."""
    known = dict(model.named_modules())
    if isinstance(wanted, str):
        found = {wanted: known[wanted]} if wanted and wanted in known else {}
    elif isinstance(wanted, type) and issubclass(wanted, nn.Module):
        found = {name: module for name, module in known.items() if isinstance(module, wanted) and name}
    elif isinstance(wanted, nn.Module):
        found = {name: module for name, module in known.items() if module is wanted and name}
    else:
        raise InvalidInput(f"regions= got {wanted!r}; give classes, names or modules of the model, or leave it out.")
    if not found:
        what = wanted if isinstance(wanted, str) else getattr(wanted, "__name__", type(wanted).__name__)
        raise InvalidInput(
            f"regions= names {what!r}, which {type(model).__name__} does not contain. Names are those of model.named_modules()."
        )
    useless = next((name for name, module in found.items() if isinstance(module, _WITHOUT_FORWARD)), None)
    if useless is not None:
        raise InvalidInput(f"regions= names {useless!r}, a container that is never called. Name its children instead.")
    return found


def _refuse_nested(chosen: dict[str, nn.Module]) -> None:
    names = {id(module): name for name, module in chosen.items()}
    for name, module in chosen.items():
        for part in module.modules():
            if part is not module and id(part) in names:
                raise InvalidInput(
                    f"regions= names both {name!r} and {names[id(part)]!r} inside it. Name one of the two."
                )

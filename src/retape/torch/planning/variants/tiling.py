"""Parts of a region that can be run in tiles when a plan says so: which they are, who calls them, and what it saves.

A part is a module inside a region that treats rows independently: the MLP of a block. It is found by structure (`parts_of`),
asked on a few of its own rows (`treats_rows_independently`), and called through `call_part`, which asks the region that is running how many
tiles its policy wants. What tiles save and cost is measured on one region of a kind (`measured_tiles`). How a function is run in
tiles is in `tile.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from retape.core.errors import RetapeError
from retape.torch.engine.checkpoint import run_region
from retape.torch.engine.context import current_runs, is_plain
from retape.torch.engine.policy import Policy
from retape.torch.engine.slots import tensors_of
from retape.torch.measure.memory_meter import synchronize, track_memory
from retape.torch.slicing.tile import call_in_tiles

TILES = (2, 4, 8, 16, 32)
WORTH = 0.96  # of what stands with half as many tiles: twice as many must be lower
ROWS_DIM = -2
_ROWS_ASKED = 32
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledRun:
    """One region by itself, recomputed, with its parts in tiles: how high its forward and its backward stood, and what both took."""

    tiles: int
    forward_bytes: int
    backward_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """What tiles do for a kind of region: the names of its parts, and its runs; the first has one tile."""

    parts: tuple[str, ...]
    runs: tuple[TiledRun, ...]


# --- which parts ------------------------------------------------------------------------------------------------------


def parts_of(region: nn.Module) -> dict[str, nn.Module]:
    """The outermost modules inside a region that look row-wise: two linear layers or more, and no state but vectors and matrices."""
    found: dict[str, nn.Module] = {}
    pending = list(region.named_children())
    while pending:
        name, module = pending.pop()
        if _looks_rowwise(module):
            found[name] = module
        else:
            pending += [(f"{name}.{own}", child) for own, child in module.named_children()]
    return dict(sorted(found.items()))


def _looks_rowwise(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    if any(hooks for part in module.modules() for hooks in (getattr(part, name) for name in _HOOKS)):
        return False  # somebody looks at what its modules return, and must not be shown slices of it
    if any(True for _ in module.buffers()) or any(parameter.dim() > 2 for parameter in parameters):
        return False
    leaves = [part for part in module.modules() if next(part.children(), None) is None]
    return sum(any(p.dim() == 2 for p in leaf.parameters(recurse=False)) for leaf in leaves) >= 2


def treats_rows_independently(call: Callable[..., Any], rows: Tensor) -> bool:
    """Whether a part does, asked on some of its rows; one that draws random numbers would draw others in tiles."""
    rows = rows.detach().clone().requires_grad_(rows.is_floating_point())
    before = _random_state(rows.device)
    try:
        with torch.enable_grad():
            plain = call(rows)
            if not isinstance(plain, Tensor) or plain.shape[:-1] != rows.shape[:-1] or not plain.requires_grad:
                return False
            if any(not torch.equal(a, b) for a, b in zip(before, _random_state(rows.device), strict=True)):
                return False
            run_in_tiles(call, rows, 2).sum().backward(inputs=[rows])
    except (RetapeError, RuntimeError):  # or its own code does not take slices
        return False
    return True


def _random_state(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def some_rows(rows: Tensor) -> Tensor:
    """A few of them, to be kept."""
    return rows.detach().narrow(ROWS_DIM, 0, min(_ROWS_ASKED, rows.shape[ROWS_DIM])).clone()


def is_given_rows(args: Any, keywords: Any) -> bool:
    """Whether a part is called with one tensor of rows and nothing else."""
    return len(args) == 1 and not keywords and isinstance(args[0], Tensor) and args[0].dim() >= 2


def call_part(module: nn.Module, plain_call: Callable[..., Any], args: Any, keywords: Any) -> Any:
    """A part is called: in as many tiles as the region around it wants."""
    running = current_runs()
    tiles = running[-1].region.policy.tiles if running else 1
    if tiles == 1 or is_plain() or not torch.is_grad_enabled() or not is_given_rows(args, keywords):
        return plain_call(*args, **keywords)
    return run_in_tiles(plain_call, args[0], tiles)


def run_in_tiles(call: Callable[..., Any], rows: Tensor, tiles: int) -> Tensor:
    """A part on slices of its rows; RegionError where it has changed since it was asked, and mixes rows or draws random numbers now."""
    # A slice of a batch is not in one piece, and code that flattens its input with `view` would refuse it.
    one_piece = partial(_in_one_piece, call)
    found: Tensor = call_in_tiles(one_piece, (rows,), tiles=tiles, dim=ROWS_DIM, may_draw=False)
    return found


def _in_one_piece(call: Callable[..., Any], rows: Tensor) -> Any:
    return call(rows.contiguous())


# --- what tiles are worth ---------------------------------------------------------------------------------------------


def measured_tiles(
    call: Callable[..., Any], args: Any, keywords: Any, *, parameters: Iterable[Tensor], device: torch.device
) -> tuple[TiledRun, ...]:
    """One region run by itself with 1, 2, 4 tiles and so on, as long as more of them save something; empty where it cannot be."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    found: list[TiledRun] = []
    for tiles in (1, *TILES):
        try:
            run = _measured(call, (args, keywords), trained, tiles, device)
        except (RetapeError, torch.OutOfMemoryError):
            break
        if len(found) > 1 and run.backward_bytes > WORTH * found[-1].backward_bytes:
            break
        found.append(run)
    return tuple(found) if len(found) > 1 else ()


def _measured(
    call: Callable[..., Any], given: Any, trained: list[Tensor], tiles: int, device: torch.device
) -> TiledRun:
    def run(mark: Callable[[Any], None]) -> None:
        (args, keywords), leaves = _fresh(given)
        outputs = run_region(call, *args, keywords=keywords, policy=Policy(tiles=tiles))
        mark("forward")
        made = [tensor for tensor in tensors_of(outputs) if tensor.requires_grad]
        torch.autograd.grad(made, [*leaves, *trained], [torch.ones_like(t) for t in made], allow_unused=True)

    run(lambda label: None)
    with track_memory(device) as scale:
        run(scale.mark)
    start = time.perf_counter()
    run(lambda label: None)
    synchronize(device)
    _, forward, backward = scale.readings
    return TiledRun(
        tiles=tiles,
        forward_bytes=forward.peak_bytes,
        backward_bytes=backward.peak_bytes,
        seconds=time.perf_counter() - start,
    )


def _fresh(given: Any) -> tuple[Any, list[Tensor]]:
    """The same arguments without their history, and those of them that need gradients."""
    made = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), given)
    leaves = [leaf for leaf in pytree.tree_leaves(made) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return made, leaves

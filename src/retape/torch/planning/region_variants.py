"""Variants of a region: compiled with a share of its tape saved, and with some parts run in tiles.

PyTorch's partitioner decides what a compiled function saves, by one setting (`activation_memory_budget`). Each compiled variant has
a backend of its own with that setting patched inside: the same code compiled again through one backend would silently be the first
graph. Blocks of one class with weights of the same shapes share a variant.

A part is a module inside a region that treats rows independently: the MLP of a block. It is found by structure (`parts_of`), probed
on a few of its own rows (`treats_rows_independently`), and called through `call_part`, which runs it in as many tiles as the policy
of the running region asks for. What tiles save and cost is measured on one region of a kind (`measured_tiles`). In a compiled
variant a part has, while its block runs, a class whose forward is not compiled and goes slice by slice: compiled slices would sum
the weights' gradients in 16 bit, with an error 1.5 times that of plain autograd.

Running a function in tiles is in `slicing/tile.py`; the choice of a variant in `plan_search.py`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from retape.core.errors import RetapeError, UnsupportedTransform
from retape.torch.capture.arguments import Signature, tensors_of, weights_signature
from retape.torch.capture.functions import CompiledCall
from retape.torch.compat import compiler_internals, internals, process_internals
from retape.torch.engine.checkpoint import run_region
from retape.torch.engine.context import THREAD, is_plain
from retape.torch.engine.policy import Policy
from retape.torch.engine.trace import OpStopwatch, RegionTrace
from retape.torch.measure.memory_meter import synchronize, track_memory, without_collection
from retape.torch.model_libraries import LIBRARIES
from retape.torch.slicing.tile import call_in_tiles

if TYPE_CHECKING:
    from retape.torch.planning.tuning import PlanningTuning

_LOG = logging.getLogger("retape")
_ROWS_DIM = -2
_FORWARD = "forward"  # the mark between forward and backward
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

Parts = tuple[str, ...]  # names of modules inside a block


# --- compiled ---------------------------------------------------------------------------------------------------------


class CannotCompile(UnsupportedTransform):
    """The compiler refused a variant, which runs eagerly from now on; the caller starts the call again."""


class Variant:
    """One compiled function for all blocks of one class with weights of the same shapes; some parts may run in tiles."""

    def __init__(  # noqa: PLR0917 - one user
        self,
        kind: type[nn.Module],
        share: float,
        tiles: int,
        parts: Parts,
        backend: Callable[..., Any],
        report: Callable[[type, str], None],
    ) -> None:
        self.failed = False
        self.compilations = 0
        self._tiles, self._parts = tiles, parts
        self._kind, self._report = kind, report

        def counted(*arguments: Any, **keywords: Any) -> Any:
            self.compilations += 1
            return backend(*arguments, **keywords)

        self._run = torch.compile(_function(kind, share, tiles), backend=counted)

    def __call__(self, module: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        try:
            with compiler_internals.many_compilations(), running_in_tiles(module, self._parts, self._tiles):
                return self._run(module, *arguments, **keywords)
        except compiler_internals.compiler_errors() as error:
            self._refuse(error)
            raise CannotCompile(
                f"{self._kind.__name__} did not compile in the middle of a step. Run the step again: it stays eager from now on."
            ) from error

    def _refuse(self, error: BaseException) -> None:
        """Stay eager from now on, and report it once."""
        if not self.failed:
            self.failed = True
            self._report(self._kind, compiler_internals.reason_of(error))


def _function(kind: type[nn.Module], share: float, tiles: int) -> FunctionType:
    """Return a function that calls a block as its class does, with its own code object: the compiler caches by code."""
    call = compiler_internals.call_impl

    def run(module: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        return call(module, *arguments, **keywords)

    code = run.__code__.replace(co_name=f"{kind.__name__}_saving_{share}_in_{tiles}".replace(".", "_"))
    return FunctionType(code, run.__globals__, code.co_name, run.__defaults__, run.__closure__)


class VariantCache:
    """Compiled variants by class, weights, share and tiles; `backend(share)` returns the compiler that saves this share."""

    WHOLE = 1.0  # share of the variant that recomputes only what fuses for free

    def __init__(self, backend: Callable[[float], Callable[..., Any]] = compiler_internals.inductor_saving) -> None:
        self.backend = backend
        self.variants: dict[tuple[type, Signature, float, int, Parts], Variant] = {}
        self._reported: set[type] = set()

    def variant_of(
        self, kind: type[nn.Module], module: nn.Module, share: float, tiles: int = 1, parts: Parts = ()
    ) -> Variant:
        """Return the variant of a block of class `kind` that saves this share, with these parts in tiles."""
        key = (kind, weights_signature(module), share, tiles, parts)
        found = self.variants.get(key)
        if found is None:
            found = self.variants[key] = Variant(kind, share, tiles, parts, self.backend(share), self._report)
        return found

    def _report(self, kind: type, reason: str) -> None:
        """Log why a variant does not compile: a warning for the first of its class, since the others fail alike."""
        level = logging.DEBUG if kind in self._reported else logging.WARNING
        self._reported.add(kind)
        _LOG.log(level, "retape: %s does not compile and stays eager: %s", kind.__name__, reason)

    def call_of(
        self,
        kind: type[nn.Module],
        module: nn.Module,
        plain_call: Callable[..., Any],
        share: float | None,
        *,
        tiles: int = 1,
        parts: Parts = (),
    ) -> Callable[..., Any]:
        """Return the call of a variant, or `plain_call` if `share` is None, it does not compile or the user compiled it."""
        if share is None or compiler_internals.is_compiled(module):
            return plain_call
        variant = self.variant_of(kind, module, share, tiles, parts)
        return plain_call if variant.failed else CompiledCall(module, variant)


VARIANTS = VariantCache()  # of this process, like the compiler's own cache


def refuse_kept_graph() -> None:
    """Raise UnsupportedTransform in a backward pass that keeps the graph: compiled blocks free their tapes as it runs."""
    if internals.graph_is_kept():
        raise UnsupportedTransform(
            "backward(retain_graph=True) or create_graph=True over a model fitted with compile=True: compiled blocks reuse the "
            "memory of their tapes during backward. Fit without compile=True, or run the forward again."
        )


def is_variant(call: Callable[..., Any]) -> bool:
    """True if a call runs a compiled variant, and not an eager block or one that the user compiled."""
    return type(call) is CompiledCall


# --- parts in tiles, inside a compiled variant ------------------------------------------------------------------------


class PartsInTiles(NamedTuple):
    """Number of tiles, and the parts of each region, by its name, that run in them."""

    tiles: int
    of_region: dict[str, Parts]


class _RunningParts:
    """Counts the blocks that are running around each part; a part has its sliced class as long as one is."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._runs: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()

    def enter(self, parts: list[nn.Module], tiles: int) -> None:
        with self._lock:
            for part in parts:
                if not self._runs.get(part):
                    part.__class__ = _sliced_class(type(part), tiles)  # type: ignore[arg-type]  # classes can be hashed
                self._runs[part] = self._runs.get(part, 0) + 1

    def leave(self, parts: list[nn.Module]) -> None:
        with self._lock:
            for part in parts:
                self._runs[part] -= 1
                if not self._runs[part]:
                    del self._runs[part]
                    part.__class__ = type(part).__mro__[1]


_RUNNING = _RunningParts()


@contextmanager
def running_in_tiles(block: nn.Module, parts: Parts, tiles: int) -> Iterator[None]:
    """Run the parts of a block slice by slice inside the context; other threads that run it meanwhile do so too."""
    found = [block.get_submodule(name) for name in parts]
    _RUNNING.enter(found, tiles)
    try:
        yield
    finally:
        _RUNNING.leave(found)


@cache
def _sliced_class(kind: type[nn.Module], tiles: int) -> type[nn.Module]:
    @compiler_internals.uncompiled
    def in_slices(self: nn.Module, rows: Tensor) -> Tensor:
        return run_in_tiles(partial(kind.forward, self), rows, tiles)

    def forward(self: nn.Module, *args: Any, **keywords: Any) -> Any:
        if not is_given_rows(args, keywords) or not torch.is_grad_enabled():
            return kind.forward(self, *args, **keywords)
        return in_slices(self, args[0])

    def reduced(self: nn.Module, protocol: Any) -> Any:
        return process_internals.reduced_as(kind, kind.__reduce_ex__(self, protocol))

    return type(kind.__name__, (kind,), {"forward": forward, "__reduce_ex__": reduced, "__module__": kind.__module__})


# --- parts ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledRun:
    """One region by itself, recomputed, with its parts in tiles: peaks of its forward and backward, seconds of both, and its trace.

    `forward_peaks` and `backward_peaks` have the ops of both with the peak during each, if they were asked for.
    """

    tiles: int
    forward_bytes: int
    backward_bytes: int
    seconds: float
    trace: RegionTrace | None = None
    parts: tuple[str, ...] = ()
    forward_peaks: tuple[OpPeak, ...] = ()
    backward_peaks: tuple[OpPeak, ...] = ()


class OpPeak(NamedTuple):
    """The name of an op, and the most bytes since the op before it."""

    op: str
    peak_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """Effect of tiles on a kind of region: the names of its MLPs, and its runs, of which the first has one tile.

    The last runs may have norms in tiles too: each run has the names of its own `parts`.
    """

    parts: tuple[str, ...]
    runs: tuple[TiledRun, ...]

    def trace_in(self, tiles: int, parts: tuple[str, ...]) -> RegionTrace | None:
        """Return the trace of a run with these parts in this many tiles; None if there is none."""
        return next((run.trace for run in self.runs if (run.tiles, run.parts) == (tiles, parts)), None)


def parts_of(region: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost modules of a region that look row-wise: at least two linear layers, only vectors and matrices as state."""
    found: dict[str, nn.Module] = {}
    pending = list(region.named_children())
    while pending:
        name, module = pending.pop()
        if _looks_rowwise(module):
            found[name] = module
        else:
            pending += [(f"{name}.{own}", child) for own, child in module.named_children()]
    return dict(sorted(found.items()))


def norms_of(region: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a region outside those parts that look like norms: vectors as their only state."""
    inside = {id(module) for part in parts_of(region).values() for module in part.modules()}
    return {
        name: module
        for name, module in region.named_modules()
        if id(module) not in inside and name and _looks_like_norm(module)
    }


def _looks_like_norm(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    alone = next(module.children(), None) is None and not any(True for _ in module.buffers())
    return alone and bool(parameters) and all(p.dim() == 1 for p in parameters) and not _has_hooks(module)


def _has_hooks(module: nn.Module) -> bool:
    """True if a hook on a module or inside it would see slices of results."""
    return any(hooks for part in module.modules() for hooks in (getattr(part, name) for name in _HOOKS))


def _looks_rowwise(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    if _has_hooks(module):
        return False
    if any(True for _ in module.buffers()) or any(parameter.dim() > 2 for parameter in parameters):
        return False
    leaves = [part for part in module.modules() if next(part.children(), None) is None]
    return sum(any(p.dim() == 2 for p in leaf.parameters(recurse=False)) for leaf in leaves) >= 2


def treats_rows_independently(call: Callable[..., Any], rows: Tensor) -> bool:
    """True if a part does, probed on some of its rows; one that draws random numbers would draw others in tiles."""
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


def some_rows(rows: Tensor, count: int) -> Tensor:
    """Return a copy of the first `count` rows."""
    return rows.detach().narrow(_ROWS_DIM, 0, min(count, rows.shape[_ROWS_DIM])).clone()


def is_given_rows(args: Any, keywords: Any) -> bool:
    """True if a part is called with one tensor of rows and nothing else."""
    return len(args) == 1 and not keywords and isinstance(args[0], Tensor) and args[0].dim() >= 2


def call_part(module: nn.Module, plain_call: Callable[..., Any], args: Any, keywords: Any) -> Any:
    """Call a part in as many tiles as the policy of the region around it asks for."""
    running = THREAD.runs
    tiles = running[-1].region.policy.tiles if running else 1
    if tiles == 1 or is_plain() or not torch.is_grad_enabled() or not is_given_rows(args, keywords):
        return plain_call(*args, **keywords)
    return run_in_tiles(plain_call, args[0], tiles)


def run_in_tiles(call: Callable[..., Any], rows: Tensor, tiles: int) -> Tensor:
    """Run a part on slices of its rows; raise RegionError if it mixes rows or draws random numbers, unlike when it was probed."""
    # A slice of a batch is not contiguous, and code that flattens its input with `view` would refuse it.
    contiguous = partial(_contiguous, call)
    found: Tensor = call_in_tiles(contiguous, (rows,), tiles=tiles, dim=_ROWS_DIM, may_draw=False)
    return found


def _contiguous(call: Callable[..., Any], rows: Tensor) -> Any:
    return call(rows.contiguous())


# --- measuring tiles --------------------------------------------------------------------------------------------------


def measured_tiles(
    call: Callable[..., Any],
    args: Any,
    keywords: Any,
    *,
    parameters: Iterable[Tensor],
    device: torch.device,
    tuning: PlanningTuning,
    clock: Callable[[], float] = time.perf_counter,
    op_timer: Callable[[torch.device], OpStopwatch] | None = None,
    before: tuple[TiledRun, ...] = (),
    every: bool = False,
) -> tuple[TiledRun, ...]:
    """Run one region by itself with 1, 2, 4 tiles and so on while more of them lower its peak; empty if it cannot be sliced.

    With runs `before` of fewer parts, return runs in at least as many tiles as the last of them that lower its peak. With `every`,
    the numbers of tiles for a longer batch are run: those that help it may not lower the peak of this one.
    """
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained and not _fresh((args, keywords))[1]:  # frozen, and so is all that it is given
        return ()
    found = list(before)
    numbers = tuning.tiles_for_longer if every else tuning.tiles
    least = 1 if not before else numbers[0] if every else before[-1].tiles
    for tiles in (each for each in (1, *numbers) if each >= least):
        try:
            times = tuning.traces if every else 1  # what a longer batch takes follows from them
            run = _measured(call, (args, keywords), trained, tiles, device, clock, each_op=every, times=times)
            if len(found) > 1 and not every and run.backward_bytes > tuning.tile_gain * found[-1].backward_bytes:
                break
            if op_timer is not None and tiles > 1:
                run = replace(run, trace=_traced(call, (args, keywords), tiles, op_timer(device)))
        except (RetapeError, torch.OutOfMemoryError):
            break
        found.append(run)
    found = found[len(before) :]
    return tuple(found) if len(found) > 1 or before else ()


class _EachOp(TorchDispatchMode):
    """Calls `mark` with the name of each op after it has run, in forward and backward."""

    def __init__(self, mark: Callable[[Any], None]) -> None:
        super().__init__()
        self._mark = mark

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self._mark(str(func))
        return out


def _measured(  # noqa: PLR0917 - one user
    call: Callable[..., Any],
    given: Any,
    trained: list[Tensor],
    tiles: int,
    device: torch.device,
    clock: Callable[[], float],
    *,
    each_op: bool = False,
    times: int = 1,
) -> TiledRun:
    """Return the peaks of a region's forward and backward, with `each_op` also during each op, and the shortest of some times."""

    def run(mark: Callable[[Any], None]) -> None:
        (args, keywords), leaves = _fresh(given)
        outputs = run_region(call, *args, keywords=keywords, policy=Policy(tiles=tiles))
        mark(_FORWARD)
        made = [tensor for tensor in tensors_of(outputs) if tensor.requires_grad]
        torch.autograd.grad(made, [*leaves, *trained], [torch.ones_like(t) for t in made], allow_unused=True)

    run(lambda label: None)
    marked = _EachOp if each_op else nullcontext
    with without_collection(), track_memory(device) as tracker, marked(tracker.mark):
        run(tracker.mark)
    taken = []
    for _ in range(times):
        synchronize(device)
        start = clock()
        run(lambda label: None)
        synchronize(device)
        taken.append(clock() - start)
    peaks = [OpPeak(str(reading.label), reading.peak_bytes) for reading in tracker.readings]
    end = next(number for number, each in enumerate(peaks) if each.op == _FORWARD) + 1
    forward, backward = tuple(peaks[1:end]), tuple(peaks[end:])
    return TiledRun(
        tiles=tiles,
        forward_bytes=max(each.peak_bytes for each in forward),
        backward_bytes=max(each.peak_bytes for each in backward),
        seconds=min(taken),
        forward_peaks=forward if each_op else (),
        backward_peaks=backward if each_op else (),
    )


def _traced(call: Callable[..., Any], given: Any, tiles: int, stopwatch: OpStopwatch) -> RegionTrace:
    """Return the trace of a region with its parts in tiles."""
    (args, keywords), _ = _fresh(given)
    regions: list[Any] = []  # the one that runs
    run_region(call, *args, keywords=keywords, policy=Policy(tiles=tiles), done=regions.append)
    trace: RegionTrace = regions[0].trace(stopwatch)
    return trace


def _fresh(given: Any) -> tuple[Any, list[Tensor]]:
    """Return the same arguments without their history, and those of them that need gradients."""
    made = pytree.tree_map_only(Tensor, lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad), given)
    leaves = [leaf for leaf in pytree.tree_leaves(made) if isinstance(leaf, Tensor) and leaf.requires_grad]
    return made, leaves


class TileProbe:
    """Finds, while a step is traced, the parts of regions that can run in tiles, and measures what tiles save."""

    def __init__(
        self,
        device: torch.device,
        tuning: PlanningTuning,
        clock: Callable[[], float],
        op_timer: Callable[[torch.device], OpStopwatch],
        *,
        every: bool = False,
    ) -> None:
        """With `every`, each number of tiles is measured, also those that do not lower the peak of this batch."""
        self._device, self._tuning, self._clock, self._op_timer = device, tuning, clock, op_timer
        self._every = every
        self._rows: dict[int, Tensor] = {}  # a few of the rows that each part was called with
        self._rowwise: set[int] = set()  # parts that treat them independently

    def note_rows(self, part: nn.Module, args: Any, keywords: Any) -> None:
        """Keep some of the rows that a part is first called with."""
        if id(part) not in self._rows and is_given_rows(args, keywords):
            self._rows[id(part)] = some_rows(args[0], self._tuning.probed_rows)

    def is_rowwise(self, part: nn.Module) -> bool:
        return id(part) in self._rowwise

    def tiling(self, region: nn.Module, plain_call: Callable[..., Any], args: Any, keywords: Any) -> Tiling:
        """Return what tiles save of a region that has just been called; nothing if it fills a cache, which one run more would change."""
        if any(LIBRARIES.is_filled_by_calls(type(value)) for value in (*args, *keywords.values())):
            return Tiling(parts=(), runs=())
        parts = self._independent(parts_of(region))
        self._rowwise |= set(map(id, parts.values()))
        if not parts:
            return Tiling(parts=(), runs=())
        run = partial(
            measured_tiles,
            plain_call,
            args,
            keywords,
            parameters=list(region.parameters()),
            device=self._device,
            tuning=self._tuning,
            clock=self._clock,
            op_timer=self._op_timer,
            every=self._every,
        )
        runs = tuple(replace(each, parts=tuple(parts)) for each in run())
        norms = self._independent(norms_of(region)) if runs else {}
        if norms:
            self._rowwise |= set(map(id, norms.values()))
            runs += tuple(replace(each, parts=(*parts, *norms)) for each in run(before=runs))
        return Tiling(parts=tuple(parts), runs=runs)

    def _independent(self, modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
        """Return the modules that treat their rows independently, by the rows that they were called with."""
        return {
            name: module
            for name, module in modules.items()
            if id(module) in self._rows and treats_rows_independently(module.forward, self._rows[id(module)])
        }

"""Traces of a step on a simulated device: the chain that `fit` would build, and the plain step.

The steps are those of `fit` (`planning/step_trials.py`), run on the meta device with the simulated device as clock and meter.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from retape.core.errors import InvalidInput, RetapeError
from retape.core.problem import Budget, Tier
from retape.forecast.simulation.float8 import Float8Linears, Scaling, converted
from retape.forecast.simulation.op_seconds import CostModel
from retape.forecast.simulation.simulator import META, SimulatedDevice, SimulatedOpTimer, simulated, track_simulated
from retape.torch.measure.sandbox import InitialGradients
from retape.torch.measure.step_function import default_step, scalar_loss
from retape.torch.model_libraries import LIBRARIES
from retape.torch.planning.chain_builder import RegionChain, build_chain
from retape.torch.planning.discover import find_regions
from retape.torch.planning.instruments import FitInstruments, Overheads
from retape.torch.planning.profiles.step_profiles import StepProfiles
from retape.torch.planning.step_trials import StepTrials
from retape.torch.planning.tuning import TUNING

if TYPE_CHECKING:
    from retape.forecast.simulation.allocator import Event

Step = Callable[[nn.Module, Any], Tensor]
_ENOUGH = Budget.of(1 << 61)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Bytes of a part of a model. `trained` counts elements, and has `trained_bytes`; experts are those of modules named so.

    `gathered_bytes` are what FSDP gathers of it: less than `bytes` where weights are gathered in float8.
    """

    bytes: int = 0
    trained: int = 0
    trained_bytes: int = 0
    expert_bytes: int = 0
    expert_trained: int = 0
    expert_trained_bytes: int = 0
    gathered_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedStep:
    """A step on a simulated device: its chain, and bytes and seconds of the step as the model runs it by itself.

    `chain` has no weights in its fixed bytes. `peak_bytes` are above weights, gradients included; `regions` are the weights of each
    region by name, `rest` those outside; `resident_bytes` the batch and the model's buffers, whole on every GPU. `attention_seconds` are
    those of fused attention, in forward and backward. `events` are what the step allocates and frees.
    """

    chain: RegionChain
    regions: dict[str, Weights]
    rest: Weights
    resident_bytes: int
    peak_bytes: int
    forward_peak_bytes: int
    seconds: float
    flops: int
    attention_seconds: float
    tokens: int
    events: tuple[Event, ...] = field(repr=False)


def on_meta(model: nn.Module) -> nn.Module:
    """Return a copy of a model on the meta device; its weights are not copied. A model that is there already is returned itself."""
    tensors = [*model.parameters(), *model.buffers()]
    if all(tensor.device.type == "meta" for tensor in tensors):
        return model
    memo: dict[int, Any] = {}
    for tensor in tensors:
        made = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = (
            nn.Parameter(made, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
        )
    return copy.deepcopy(model, memo)


def weights_of(module: nn.Module, seen: set[int], name: str = "", float8: frozenset[int] = frozenset()) -> Weights:
    """Return the weights of a module that were not `seen` yet; tied ones count once. `float8` are the ids of those gathered so."""
    dense, experts, gathered = _Count(), _Count(), 0
    for own, parameter in module.named_parameters():
        if id(parameter) not in seen:
            seen.add(id(parameter))
            (experts if ".experts." in f".{name}.{own}." else dense).add(parameter)
            gathered += parameter.numel() if id(parameter) in float8 else parameter.nbytes
    return Weights(
        bytes=dense.bytes + experts.bytes,
        trained=dense.trained + experts.trained,
        trained_bytes=dense.trained_bytes + experts.trained_bytes,
        expert_bytes=experts.bytes,
        expert_trained=experts.trained,
        expert_trained_bytes=experts.trained_bytes,
        gathered_bytes=gathered,
    )


class _Count:
    def __init__(self) -> None:
        self.bytes = self.trained = self.trained_bytes = 0

    def add(self, parameter: Tensor) -> None:
        self.bytes += parameter.nbytes
        if parameter.requires_grad:
            self.trained += parameter.numel()
            self.trained_bytes += parameter.nbytes


def trace_step(
    model: nn.Module,
    batch: Any,
    costs: CostModel,
    *,
    step: Step | None = None,
    host: bool = True,
    plan: bool = True,
    float8: Scaling | None = None,
) -> TracedStep:
    """Run a step of a meta model on a simulated device. Without `plan` only the plain step is run, and the chain is one stage.

    With `float8` the linear layers of the model's blocks multiply in it.
    """
    try:
        linears = None if float8 is None else Float8Linears(float8, find_regions(model).values())
        with LIBRARIES.with_every_layer(model), simulated(costs, float8=linears) as device:
            known = pytree.tree_map_only(Tensor, lambda leaf: _meta_leaf(leaf, device), batch)
            return _Tracer(model, known, device, step, host).run(plan, float8)
    except RetapeError:
        raise
    except Exception as error:
        raise InvalidInput(
            f"{type(model).__name__} cannot run without data: {type(error).__name__}: {str(error).splitlines()[0]}. "
            "A forecast runs the model on the meta device, where no values exist; check that model and batch run there."
        ) from error


def _meta_leaf(leaf: Tensor, device: SimulatedDevice) -> Tensor:
    if leaf.device.type == "meta":
        return leaf
    made = torch.empty_like(leaf, device="meta")
    device.know(made, leaf.cpu())
    return made


class _Tracer:
    def __init__(self, model: nn.Module, batch: Any, device: SimulatedDevice, step: Step | None, host: bool) -> None:
        self._model, self._batch, self._device, self._step = model, batch, device, step
        base = device.costs.base
        self._host = None
        if host and base.to_host_bytes_per_second and base.from_host_bytes_per_second:
            self._host = Tier(
                name="host",
                write_bytes_per_second=base.to_host_bytes_per_second,
                read_bytes_per_second=base.from_host_bytes_per_second,
            )

    def run(self, plan: bool, float8: Scaling | None) -> TracedStep:
        plain = self._plain_step()
        seen: set[int] = set()
        found = find_regions(self._model)
        gathered = (weight for block in found.values() for weight in converted(block) if float8 is Scaling.TENSORWISE)
        small = frozenset(map(id, gathered))
        regions = {name: weights_of(module, seen, name, small) for name, module in found.items()}
        chain = self._chain(found if plan else {})
        return TracedStep(
            chain=chain,
            regions=regions,
            rest=weights_of(self._model, seen),
            resident_bytes=_bytes([*pytree.tree_leaves(self._batch), *self._model.buffers()]),
            tokens=_tokens(self._batch),
            **plain,
        )

    def _plain_step(self) -> dict[str, Any]:
        """Run the step twice, as the model runs it by itself, and read the second."""
        device = self._device
        for _ in range(2):
            start, flops, attention = device.now(), device.flops, device.attention_seconds
            events: list[Event] = []
            device.memory.events = events
            with track_simulated(device) as tracker:
                loss = scalar_loss(self._step or default_step, self._model, self._batch)
                tracker.mark("loss")
                loss.backward()
            found = {
                "seconds": device.now() - start,
                "flops": device.flops - flops,
                "attention_seconds": device.attention_seconds - attention,
                "peak_bytes": max(reading.peak_bytes for reading in tracker.readings),
                "forward_peak_bytes": tracker.readings[1].peak_bytes,
                "events": tuple(events),
            }
            del loss
            self._model.zero_grad(set_to_none=True)
            for leaf in pytree.tree_leaves(self._batch):
                if isinstance(leaf, Tensor) and leaf.is_leaf:
                    leaf.grad = None
            device.memory.events = None
        return found

    def _chain(self, regions: dict[str, nn.Module]) -> RegionChain:
        trials = StepTrials(
            self._model,
            self._batch,
            _ENOUGH,
            step=self._step,
            instruments=self._instruments(),
            tuning=replace(TUNING, traces=1, timed_steps=1),
        )
        with trials.sandboxed():
            profiled = StepProfiles(trials).profiled(regions)
            return build_chain(profiled, fixed_bytes=0, overheads=Overheads(), host=self._host)

    def _instruments(self) -> FitInstruments:
        device = self._device
        return FitInstruments(
            clock=device.now,
            op_timer=lambda _: SimulatedOpTimer(device),  # type: ignore[arg-type,return-value]
            overheads=lambda _: Overheads(),
            host_tier=lambda _: self._host,
            track_memory=lambda _: track_simulated(device),
            tracks_freely=lambda _: True,
            fixed_bytes=lambda *_: 0,
            initial_gradients=lambda *_: InitialGradients.NONE,
            check_optimizer_step=lambda *_, **__: None,
            allocated_bytes=lambda _: 0,
            devices_of=lambda *_: (META,),
        )


def _bytes(leaves: list[Any]) -> int:
    """Return the bytes of the tensors among some values; what is there twice counts once."""
    tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, Tensor)}
    return sum(tensor.nbytes for tensor in tensors.values())


def _tokens(batch: Any) -> int:
    """Return the elements of the first whole-number tensor of a batch with two dimensions, or the rows of its first tensor."""
    leaves = [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]
    ids = [leaf for leaf in leaves if leaf.dim() == 2 and not leaf.is_floating_point()]
    return ids[0].numel() if ids else (len(leaves[0]) if leaves else 0)

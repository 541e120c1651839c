"""`forecast`: peak, seconds and the best plan of a training setup without its hardware; `search_layouts`: the best few layouts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from retape.core.errors import BudgetTooSmall, InvalidInput
from retape.core.problem import Budget, BudgetKind
from retape.core.units import format_bytes
from retape.forecast.advice import Change
from retape.forecast.device import Device
from retape.forecast.known_devices import cost_model, device_named
from retape.forecast.known_models import batch_from, model_from
from retape.forecast.layout import Layout, OptimizerKind, layout_from, optimizer_kind
from retape.forecast.parallel import StageProblem, plain_memory, stage_problems
from retape.forecast.result import Forecast
from retape.forecast.simulation.float8 import Scaling
from retape.forecast.simulation.tracing import Step, TracedStep, trace_step
from retape.forecast.stage_plan import StagePlan, plan_stage, step_seconds
from retape.torch.compat.compiler_internals import is_compiled

USABLE_SHARE = 0.94  # of a device's memory: the CUDA context, libraries and fragments take the rest


def forecast(
    model: Any,
    batch: Any,
    *,
    device: str | Path | Device = "h200",
    mesh: Layout | dict[str, int] | None = None,
    optimizer: Any = None,
    budget: Any = None,
    step: Step | None = None,
    offload: bool = False,
    float8: Any = None,
) -> Forecast:
    """Forecast a training step: peak bytes, seconds, and the fastest plan of what to keep and recompute inside the budget.

    `model` is a module (on the meta device, or one whose weights are not read), a Transformers configuration or the name of a known
    model; `batch` its (rows, length), shapes by name, or tensors: those of one micro-batch on one GPU, before context parallelism.
    The budget is bytes of each GPU; by default what the device has. A step that does not fit raises BudgetTooSmall with the floor.
    With `offload` plans may move activations to the host. With `float8` ("tensorwise" or "rowwise") the linear layers of the blocks
    multiply in it, as torchao's do.
    """
    return _Request.of(
        model,
        batch,
        device=device,
        layout=layout_from(mesh),
        optimizer=optimizer_kind(optimizer),
        budget=budget,
        step=step,
        offload=offload,
        float8=float8,
    ).forecast()


@dataclass(frozen=True)
class _Request:
    """One setup, ready to be traced."""

    model: nn.Module
    batch: Any
    device: Device
    layout: Layout
    optimizer: OptimizerKind
    budget_bytes: int
    step: Step | None
    offload: bool
    float8: Scaling | None

    @classmethod
    def of(
        cls,
        model: Any,
        batch: Any,
        *,
        device: Any,
        layout: Layout,
        optimizer: OptimizerKind,
        budget: Any,
        step: Step | None = None,
        offload: bool = False,
        float8: Any = None,
    ) -> _Request:
        where = device_named(device)
        length = _length_of(batch)
        made = model_from(model, length=length)
        _check_eager(made)
        _check_divisible(made, layout)
        limit = _budget_bytes(budget, where)
        spec = batch_from(batch, made)
        local = _local(spec, layout.context)
        return cls(made, local, where, layout, optimizer, limit, step, offload, Scaling.of(float8))

    def trace(self, batch: Any) -> TracedStep:
        costs = cost_model(self.device, parts=self.layout.tensor)
        plan = not any(getattr(module, "gradient_checkpointing", False) for module in self.model.modules())
        return trace_step(self.model, batch, costs, step=self.step, host=self.offload, plan=plan, float8=self.float8)

    def problems(self, traced: TracedStep) -> list[StageProblem]:
        seconds = optimizer_step_seconds(self.device, self.optimizer)
        return stage_problems(traced, self.layout, self.device, self.optimizer, seconds)

    def forecast(self, traced: TracedStep | None = None) -> Forecast:
        traced = self.trace(self.batch) if traced is None else traced
        return self.result(traced, self.plans(traced))

    def changed(self, traced: TracedStep, change: Change) -> Forecast:
        """Return the forecast of a changed setup; the trace serves again where the work of a GPU stays the same."""
        layout = replace(self.layout, **dict(change.layout))
        _check_divisible(self.model, layout)
        rows, length = change.rows or _rows_of(self.batch), change.length or self._length
        same = rows == _rows_of(self.batch) and length == self._length
        batch = self.batch if same else _resized(self.batch, rows, length // layout.context, _length_of(self.batch))
        request = replace(
            self,
            batch=batch,
            layout=layout,
            optimizer=change.optimizer or self.optimizer,
            budget_bytes=change.budget_bytes or self.budget_bytes,
        )
        same = same and (layout.tensor, layout.context) == (self.layout.tensor, self.layout.context)
        return request.forecast(traced if same else None)

    @property
    def _length(self) -> int:
        return _length_of(self.batch) * self.layout.context

    def plans(self, traced: TracedStep) -> list[StagePlan]:
        """Return the plan of each stage. One GPU that keeps everything has the peak and time of the step that was traced as a whole."""
        problems = self.problems(traced)
        if self.layout != Layout(zero=self.layout.zero):
            return _planned(problems, self.budget_bytes)
        kept = _kept_bytes(problems[0], traced)
        plan = plan_stage(problems[0], self.budget_bytes, kept_bytes=kept)
        return [replace(plan, peak_bytes=kept, seconds=traced.seconds) if plan.keeps_everything else plan]

    def result(self, traced: TracedStep, plans: list[StagePlan]) -> Forecast:
        layout = self.layout
        plain = plain_memory(traced, layout, self.optimizer, [*self.model.parameters()])
        return Forecast(
            model=type(self.model).__name__,
            device=self.device,
            layout=layout,
            optimizer=self.optimizer,
            budget_bytes=self.budget_bytes,
            stages=tuple(plans),
            peak_bytes=max(plan.peak_bytes for plan in plans),
            seconds=step_seconds(layout, plans),
            flops=traced.flops * layout.context,
            tokens=traced.tokens * layout.context,
            plain_peak_bytes=plain.peak_bytes if layout.gpus > 1 else _kept_bytes(plans[0].problem, traced),
            plain_reserved_bytes=plain.reserved_bytes,
            plain_seconds=traced.seconds + plans[0].problem.once_seconds,
            rows=_rows_of(self.batch),
            length=self._length,
            float8=self.float8,
            again=partial(self.changed, traced),
        )


def _kept_bytes(problem: StageProblem, traced: TracedStep) -> int:
    """Return the peak of one GPU that keeps everything."""
    fixed = problem.weight_bytes + problem.optimizer_bytes + problem.buffer_bytes + traced.resident_bytes
    return fixed + traced.peak_bytes


def optimizer_step_seconds(device: Device, optimizer: OptimizerKind) -> Callable[[int], float]:
    """Return the seconds of an optimizer step as a function of the bytes that it reads and writes."""
    costs, name = cost_model(device), "adamw fused" if optimizer.states >= 2 else "sgd"
    return lambda size: costs.optimizer_seconds(name, "bfloat16", size)


def _planned(problems: list[StageProblem], budget_bytes: int) -> list[StagePlan]:
    """Return a plan for each stage; stages that are alike are solved once."""
    plans: list[StagePlan] = []
    for problem in problems:
        known = next((plan for plan in plans if _are_alike(plan.problem, problem)), None)
        if known is None:
            plans.append(plan_stage(problem, budget_bytes))
        else:
            plans.append(replace(known, problem=problem, treatments=_renamed(known, problem)))
    return plans


def _are_alike(one: StageProblem, other: StageProblem) -> bool:
    bare = [replace(each.chain, stages=tuple(replace(s, name="") for s in each.chain.stages)) for each in (one, other)]
    return one.in_flight == other.in_flight and bare[0] == bare[1]


def _renamed(plan: StagePlan, problem: StageProblem) -> tuple[tuple[str, str], ...]:
    pairs = zip(problem.regions, plan.treatments, strict=True)
    return tuple((name, treatment) for name, (_, treatment) in pairs)


def _budget_bytes(budget: Any, device: Device) -> int:
    if budget is None:
        if not device.memory_bytes:
            raise InvalidInput(f"The memory of {device.name!r} is not known; give budget='24GiB'.")
        return int(USABLE_SHARE * device.memory_bytes)
    asked = Budget.of(budget)
    if asked.kind is not BudgetKind.TOTAL or asked.limit_bytes is None:
        raise InvalidInput(f"A forecast needs a budget that counts everything, such as '130GiB'; {budget!r} does not.")
    return asked.limit_bytes


def _check_eager(model: nn.Module) -> None:
    if any(is_compiled(module) for module in model.modules()):
        raise InvalidInput(
            "The model is compiled (torch.compile). A forecast is of eager kernels: what compiled code saves and fuses is decided by the "
            "compiler on the device. Forecast the model without torch.compile; compiled, it takes less memory and time."
        )


def _check_divisible(model: nn.Module, layout: Layout) -> None:
    """Raise InvalidInput if heads, experts or layers cannot be divided as the layout asks."""
    config = getattr(model, "config", None)
    for field, parts, what in (
        ("num_attention_heads", layout.tensor, "attention heads cannot be divided by tensor"),
        ("num_key_value_heads", layout.tensor, "key-value heads cannot be divided by tensor"),
        ("num_local_experts", layout.expert, "experts cannot be divided by expert"),
    ):
        count = getattr(config, field, None)
        if isinstance(count, int) and count % parts:
            raise InvalidInput(f"{count} {what} {parts}. Choose a factor of {count}.")
    layers = getattr(config, "num_hidden_layers", None)
    if isinstance(layers, int) and layout.pipeline * layout.interleave > layers:
        raise InvalidInput(
            f"{layers} layers cannot be divided into {layout.pipeline} pipeline stages of {layout.interleave} parts each."
        )


def _local(batch: Any, parts: int) -> Any:
    """Return one GPU's part of a batch under context parallelism: its share of each sequence."""
    length = _length_of(batch)
    if parts > 1 and (not length or length % parts):
        raise InvalidInput(f"Sequences of {length} tokens cannot be divided by context {parts}.")
    return _resized(batch, _rows_of(batch), length // parts, length) if parts > 1 else batch


def _leaves(batch: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()]


def _rows_of(batch: Any) -> int:
    return len(_leaves(batch)[0]) if _leaves(batch) else 0


def _length_of(batch: Any) -> int:
    if isinstance(batch, tuple) and len(batch) == 2 and all(isinstance(size, int) for size in batch):
        return int(batch[1])
    return next((leaf.shape[1] for leaf in _leaves(batch) if leaf.dim() == 2), 0)


def _resized(batch: Any, rows: int, length: int, before: int) -> Any:
    """Return a batch on the meta device with other rows, and another length in every second dimension that had the old one."""

    def leaf(tensor: Tensor) -> Tensor:
        shape = list(tensor.shape)
        if shape:
            shape[0] = rows
        if len(shape) > 1 and shape[1] == before:
            shape[1] = length
        return torch.empty(shape, dtype=tensor.dtype, device="meta")

    made: dict[int, Tensor] = {}
    return pytree.tree_map_only(Tensor, lambda tensor: made.setdefault(id(tensor), leaf(tensor)), batch)


# --- layouts --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutChoice:
    """A layout with its forecast, or the reason why it does not fit."""

    layout: Layout
    forecast: Forecast | None
    reason: str


def search_layouts(
    model: Any,
    batch: Any,
    *,
    gpus: int,
    device: str | Path | Device = "h200",
    optimizer: Any = None,
    budget: Any = None,
    global_rows: int | None = None,
    fixed: dict[str, int] | None = None,
    step: Step | None = None,
    float8: Any = None,
    tell: Callable[[str], None] = lambda text: None,
) -> list[LayoutChoice]:
    """Return layouts over `gpus`, the fastest first, then those that do not fit; `fixed` has the parts that are given.

    `global_rows` is the rows of a step on all GPUs; by default a pipeline has four micro-batches per stage.
    """
    where, rows = device_named(device), _rows_of(batch_from(batch, nn.Linear(1, 1, device="meta")))
    made = model_from(model, length=_length_of(batch))
    choices, traces = [], {}
    for layout in _layouts(made, where, gpus, fixed or {}, rows=rows, global_rows=global_rows):
        request = _Request.of(
            made,
            batch,
            device=where,
            layout=layout,
            optimizer=optimizer_kind(optimizer),
            budget=budget,
            step=step,
            float8=float8,
        )
        key = (layout.tensor, layout.context)
        if key not in traces:
            tell(f"tracing tensor {layout.tensor}, context {layout.context}")
            traces[key] = request.trace(request.batch)
        choices.append(_choice(request, traces[key]))
    if not choices:
        raise InvalidInput(f"No layout of {gpus} GPUs divides this model with {fixed or 'anything'} given.")
    return sorted(choices, key=lambda each: -each.forecast.tokens_per_second if each.forecast else 1.0)


def _choice(request: _Request, traced: TracedStep) -> LayoutChoice:
    try:
        plans = request.plans(traced)
    except BudgetTooSmall as error:
        return LayoutChoice(
            layout=request.layout, forecast=None, reason=f"needs at least {format_bytes(error.floor_bytes)}"
        )
    found = request.result(traced, plans)
    return LayoutChoice(layout=request.layout, forecast=found, reason=_reason(found))


def _reason(found: Forecast) -> str:
    """Return what limits a layout, in a few words."""
    exposed = max(
        (stage.problem.exposed_seconds + stage.problem.tensor_seconds) / stage.seconds for stage in found.stages
    )
    recomputed = max((stage.plan.promised_seconds or 0.0) for stage in found.stages)
    least = max(stage.frontier.points[-1].seconds for stage in found.stages)
    parts = [f"{exposed:.0%} communication" if exposed >= 0.01 else ""]
    if found.layout.bubble:
        parts.append(f"{found.layout.bubble / (1 + found.layout.bubble):.0%} pipeline bubble")
    if least and recomputed > 1.005 * least:
        parts.append(f"{recomputed / least - 1:.0%} recomputation")
    return ", ".join(part for part in parts if part) or "computation only"


def _layouts(
    model: nn.Module, device: Device, gpus: int, fixed: dict[str, int], *, rows: int, global_rows: int | None
) -> list[Layout]:
    """Return the layouts to look at: tensor parallelism inside a node, pipelines of equal stages, the rest shares weights."""
    layers = getattr(getattr(model, "config", None), "num_hidden_layers", 0)
    found = []
    for tensor in _factors(fixed.get("tensor"), (1, 2, 4, 8), device.gpus_per_node):
        for pipeline in _factors(fixed.get("pipeline"), (1, 2, 4, 8), gpus):
            context = fixed.get("context", 1)
            if gpus % (tensor * pipeline * context) or (layers and layers % pipeline):
                continue
            data = gpus // (tensor * pipeline * context)
            accumulate = fixed.get("accumulate", 4 * pipeline if pipeline > 1 else 1)
            if global_rows:
                if global_rows % (data * rows):
                    continue
                accumulate = global_rows // (data * rows)
            sizes = {**fixed, "tensor": tensor, "pipeline": pipeline, "context": context, "accumulate": accumulate}
            sizes.setdefault("fsdp", data * context)
            try:
                layout = Layout(gpus=gpus, **sizes)
                _check_divisible(model, layout)
            except InvalidInput:
                continue
            found.append(layout)
    return found


def _factors(given: int | None, all_of: tuple[int, ...], most: int) -> tuple[int, ...]:
    return (given,) if given else tuple(size for size in all_of if size <= most)

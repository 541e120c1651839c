"""The steps of all pipeline stages of a layout, from a step traced on one device.

Tensor parallelism is with sequence parallelism, so every activation is divided by it (Korthikanti et al. 2022), and its seconds come
from a trace with a cost model of as many parts. Its collectives are part of each region's seconds, because a region that is run again
communicates again, and the whole input that a region gathers is part of its transient bytes. FSDP gathers two blocks at a time and
reduces the gradients of one; communication that overlaps with computation only counts for what is longer. A pipeline stage holds the
tapes of its micro-batches in flight. Plans are solved in `stage_plan`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

from torch import Tensor

from retape.core.errors import InvalidInput
from retape.core.problem import Chain, Option, Stage
from retape.forecast.device import Device
from retape.forecast.layout import Layout, OptimizerKind
from retape.forecast.simulation.allocator import Run, RunMemory, memory_of_run
from retape.forecast.simulation.tracing import TracedStep, Weights


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelTuning:
    """Assumptions about communication, each with its reason."""

    link_share: float = 0.8  # of the published link bandwidth that collectives of large messages reach
    network_share: float = 0.8  # the same of the network
    collective_seconds: float = 2e-5  # of starting one
    gathered_blocks: int = 2  # FSDP: the block that runs, and the next one, which is prefetched
    tensor_forward: int = 4  # collectives of a block in forward: gathered before, scattered after attention and MLP
    tensor_backward: int = 2  # in backward; the others run beside the products of weight gradients (Megatron)


TUNING = ParallelTuning()


@dataclass(frozen=True, slots=True, kw_only=True)
class StageProblem:
    """One pipeline stage on one GPU: its chain, whose fixed bytes are `fixed_bytes`, and what a micro-batch adds in seconds.

    `exposed_seconds` of communication are not hidden behind computation, in each micro-batch, without the `tensor_seconds` of tensor
    parallelism, which are in the chain. `once_seconds` are the optimizer and what follows the last micro-batch. `in_flight`
    micro-batches are alive at once. `kept_gradient_bytes` stay from one micro-batch to the next and are among the fixed bytes.
    """

    chain: Chain
    regions: tuple[str, ...]
    in_flight: float
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    buffer_bytes: int
    exposed_seconds: float
    once_seconds: float
    attention_extra_seconds: float = 0.0
    tensor_seconds: float = 0.0
    kept_gradient_bytes: int = 0

    @property
    def fixed_bytes(self) -> int:
        return self.chain.fixed_bytes


def stage_problems(
    traced: TracedStep,
    layout: Layout,
    device: Device,
    optimizer: OptimizerKind,
    optimizer_seconds: Callable[[int], float],
) -> list[StageProblem]:
    """Return the problem of each pipeline stage. `optimizer_seconds(bytes)` are those of one optimizer step."""
    maker = _Maker(traced, layout, device, optimizer, optimizer_seconds)
    return [maker.stage(number) for number in range(layout.pipeline)]


class _Maker:
    def __init__(
        self,
        traced: TracedStep,
        layout: Layout,
        device: Device,
        optimizer: OptimizerKind,
        optimizer_seconds: Callable[[int], float],
    ) -> None:
        self._traced, self._layout, self._device = traced, layout, device
        self._optimizer, self._optimizer_seconds = optimizer, optimizer_seconds
        self._stages = traced.chain.chain.stages
        self._is_region = [stage.choice is not None for stage in traced.chain.stages]
        self._region_numbers = [number for number, is_region in enumerate(self._is_region) if is_region]

    # --- division ----------------------------------------------------------------------------------------------------

    def _range(self, stage: int) -> range:
        """Return the stages of the chain that a pipeline stage has; an interleaved one has as many, from several places."""
        count, parts = len(self._region_numbers), self._layout.pipeline
        if parts > 1 and count < parts * self._layout.interleave:
            raise InvalidInput(
                f"The model has {count} blocks that can be divided, fewer than {parts} pipeline stages of "
                f"{self._layout.interleave} parts. Use a shorter pipeline; switch the model's own checkpointing off."
            )
        first = self._region_numbers[stage * count // parts] if stage else 0
        last = self._region_numbers[(stage + 1) * count // parts] if stage + 1 < parts else len(self._stages)
        return range(first, last)

    def _weights(self, names: tuple[str, ...], stage: int) -> Weights:
        own = [self._traced.regions[name] for name in dict.fromkeys(names)]
        if self._layout.pipeline == 1:
            own.append(self._traced.rest)
        elif stage in (0, self._layout.pipeline - 1):  # half of the rest is the embedding, half the head
            own.append(_scaled_weights(self._traced.rest, 2))
        total = Weights(**{each.name: sum(getattr(w, each.name) for w in own) for each in fields(Weights)})
        return self._divided(total)

    def _divided(self, weights: Weights) -> Weights:
        """Return one GPU's part under tensor and expert parallelism; experts are divided by both."""
        tensor, expert = self._layout.tensor, self._layout.expert
        experts = {name: getattr(weights, name) // expert // tensor for name in _OF_EXPERTS}
        dense = {name: getattr(weights, name) - getattr(weights, f"expert_{name}") for name in _OF_ALL}
        whole = {name: size // tensor + experts[f"expert_{name}"] for name, size in dense.items()}
        gathered = weights.gathered_bytes * whole["bytes"] // max(1, weights.bytes)
        return Weights(**whole, **experts, gathered_bytes=gathered)

    def _sharded(self, total: int, experts: int, *, from_stage: int) -> int:
        """Return one GPU's shard from this ZeRO stage on; experts are shared only by the GPUs that have the same ones."""
        layout = self._layout
        if layout.zero < from_stage:
            return total
        return (total - experts) // layout.fsdp + experts // max(1, layout.fsdp // layout.expert)

    def _shard(self, bytes_of: Callable[[int, int], int], weights: Weights, *, from_stage: int) -> int:
        """Return the bytes of one GPU's shard of what trained weights, by number and bytes, need."""
        total = bytes_of(weights.trained, weights.trained_bytes)
        experts = bytes_of(weights.expert_trained, weights.expert_trained_bytes)
        return self._sharded(total, experts, from_stage=from_stage)

    def _gradient_bytes(self, weights: Weights) -> int:
        return self._optimizer.gradients_bytes(weights.trained, weights.trained_bytes)

    # --- one stage ---------------------------------------------------------------------------------------------------

    def stage(self, number: int) -> StageProblem:
        layout, optimizer = self._layout, self._optimizer
        own = self._range(number)
        names = tuple(self._stages[i].name for i in own if self._is_region[i])
        if not self._region_numbers:  # a model that was not divided into regions
            names = tuple(self._traced.regions)
        weights = self._weights(names, number)
        weight_bytes = self._sharded(weights.bytes, weights.expert_bytes, from_stage=3)
        gradient_bytes = self._shard(optimizer.gradients_bytes, weights, from_stage=2)
        optimizer_bytes = self._shard(optimizer.states_bytes, weights, from_stage=1)
        buffers = self._buffer_bytes(names)
        keeps_gradients = layout.accumulate > 1 or layout.pipeline > 1
        gradient_share = self._gradient_bytes(weights) / max(1, weights.trained_bytes)
        chain = self._chain(own, gradient_share=gradient_share, keeps_gradients=keeps_gradients)
        kept_gradients = gradient_bytes if keeps_gradients else 0
        fixed = weight_bytes + optimizer_bytes + buffers + kept_gradients
        chain = replace(chain, fixed_bytes=chain.fixed_bytes + fixed + self._traced.resident_bytes)
        return StageProblem(
            chain=chain,
            regions=names,
            in_flight=layout.in_flight(number),
            weight_bytes=weight_bytes,
            gradient_bytes=gradient_bytes,
            optimizer_bytes=optimizer_bytes,
            buffer_bytes=buffers,
            exposed_seconds=self._exposed_seconds(len(names), weights, chain),
            once_seconds=self._once_seconds(weights, optimizer_bytes),
            attention_extra_seconds=self._attention_extra(len(names)),
            tensor_seconds=sum(sum(self._tensor_seconds(i)) for i in own),
            kept_gradient_bytes=kept_gradients,
        )

    def _chain(self, own: range, *, gradient_share: float, keeps_gradients: bool) -> Chain:
        """Return the stages of one GPU: activations divided by tensor parallelism, gradients as they stay."""
        layout = self._layout
        shards = layout.fsdp if layout.zero >= 2 else 1
        made = []
        for number in own:
            stage = _divided(self._stages[number], layout.tensor)
            gradients = 0 if keeps_gradients else int(stage.gradient_bytes * gradient_share) // shards
            gathered = self._stages[number].state_bytes - stage.state_bytes  # of the whole input, while a part runs
            stage = _communicating(stage, *self._tensor_seconds(number), gathered)
            made.append(replace(stage, gradient_bytes=gradients))
        whole = self._traced.chain.chain
        return Chain(stages=tuple(made), fixed_bytes=whole.fixed_bytes // layout.tensor, host=whole.host)

    def _buffer_bytes(self, names: tuple[str, ...]) -> int:
        """Return the bytes of FSDP's gathered blocks, and of the gradients of a block that wait to be reduced."""
        layout, rest = self._layout, _scaled_weights(self._divided(self._traced.rest), 2)
        if layout.fsdp == 1:
            return 0
        blocks = [rest, *(self._divided(self._traced.regions[name]) for name in names)]
        reduced = max(map(self._gradient_bytes, blocks)) if layout.zero >= 2 else 0
        gathered = TUNING.gathered_blocks * max(block.gathered_bytes for block in blocks)
        return (gathered if layout.zero >= 3 else 0) + reduced

    # --- communication -----------------------------------------------------------------------------------------------

    def _bandwidth(self, group: int) -> float:
        """Return bytes per second of a collective of neighbouring GPUs: inside a node, or over the network."""
        device = self._device
        if group <= device.gpus_per_node or not device.network_bytes_per_second:
            return device.link_bytes_per_second * TUNING.link_share
        return device.network_bytes_per_second * TUNING.network_share

    def _collective(self, size: float, group: int, spread: int = 1) -> float:
        """Return the seconds of gathering or scattering `size` bytes over a group, whose members are `spread` GPUs apart."""
        if group == 1:
            return 0.0
        return size * (group - 1) / group / max(1.0, self._bandwidth(group * spread)) + TUNING.collective_seconds

    def _tensor_seconds(self, number: int) -> tuple[float, float]:
        """Return the seconds of tensor parallelism's collectives in forward and backward of one stage of the chain."""
        if not self._is_region[number]:
            return 0.0, 0.0
        each = self._collective(self._stages[number].state_bytes, self._layout.tensor)
        return TUNING.tensor_forward * each, TUNING.tensor_backward * each

    def _exposed_seconds(self, regions: int, weights: Weights, chain: Chain) -> float:
        """Return the seconds of communication of a micro-batch that no computation hides, without that of tensor parallelism."""
        layout = self._layout
        compute = sum(stage.forward_seconds + stage.backward_seconds for stage in chain.stages)
        hidden_state = max((stage.state_bytes for stage in self._stages), default=0)
        experts = 0.0
        if layout.expert > 1:  # tokens to their experts and back, in both passes
            experts = 4 * 2 * regions * self._collective(hidden_state / layout.tensor, layout.expert, layout.tensor)
        shards = 0.0
        if layout.fsdp > 1 and layout.zero >= 3:  # gathered in forward and backward, reduced in backward
            shards = 2 * self._collective(weights.gathered_bytes, layout.fsdp, layout.tensor)
            shards += self._collective(self._gradient_bytes(weights), layout.fsdp, layout.tensor)
        ring = 0.0
        if layout.context > 1:  # keys and values go round, behind attention
            ring = 3 * regions * self._collective(hidden_state / layout.tensor, layout.context, layout.tensor)
        sends = 0.0
        if layout.pipeline > 1:  # one in forward and one in backward, of each part
            sends = 2 * layout.interleave * self._collective(hidden_state / layout.tensor, 2, layout.tensor)
        return experts + sends + max(0.0, shards + ring - compute)

    def _once_seconds(self, weights: Weights, optimizer_bytes: int) -> float:
        """Return the seconds after the last micro-batch: gradients that are reduced once, and the optimizer."""
        layout = self._layout
        seconds, gradients = 0.0, self._gradient_bytes(weights)
        replicas = layout.sharing // layout.fsdp
        if layout.fsdp > 1 and layout.zero < 3:
            seconds += 2 * self._collective(gradients, layout.fsdp, layout.tensor)
        if replicas > 1:
            share = layout.fsdp if layout.zero >= 2 else 1
            seconds += 2 * self._collective(gradients / share, replicas, layout.tensor * layout.fsdp)
        if self._optimizer.name != "none":
            seconds += self._optimizer_seconds(self._updated_bytes(weights) + 2 * optimizer_bytes)
        return float(seconds)

    def _updated_bytes(self, weights: Weights) -> int:
        """Return the bytes of weights, read and written, and gradients of this GPU's part of the optimizer's step."""
        return self._shard(
            lambda count, size: 2 * size + self._optimizer.gradients_bytes(count, size), weights, from_stage=1
        )

    def _attention_extra(self, regions: int) -> float:
        """Return what attention takes longer than traced: under context parallelism it sees the keys of all parts."""
        share = regions / max(1, len(self._region_numbers))
        return (self._layout.context - 1) * self._traced.attention_seconds * share


def plain_memory(traced: TracedStep, layout: Layout, optimizer: OptimizerKind, weights: Sequence[Tensor]) -> RunMemory:
    """Return the memory of a run of one micro-batch that keeps everything; 0 bytes for layouts of which it is not known."""
    run = _run_of(traced, layout, optimizer, weights)
    if run is None:
        return RunMemory()
    return memory_of_run([(number, -(-size // layout.tensor)) for number, size in traced.events], run)


def _run_of(traced: TracedStep, layout: Layout, optimizer: OptimizerKind, weights: Sequence[Tensor]) -> Run | None:
    """Return what a run holds beside its steps, on one GPU, with FSDP2 and with tensor parallelism; None for other layouts.

    FSDP2 gathers blocks in a stream of its own and reduces gradients in another; the weights outside of blocks stay gathered in a step.
    """
    parts, sharded = layout.fsdp * layout.tensor, layout.fsdp > 1
    is_known = layout.pipeline * layout.expert * layout.accumulate == 1 and layout.sharing == layout.fsdp
    if layout.gpus > 1 and not (is_known and (layout.zero == 3 or not sharded)):
        return None
    sizes = [(weight.numel() // parts, weight.element_size(), weight.requires_grad) for weight in weights]
    kept = [
        traced.resident_bytes,
        *(count * (each + optimizer.master_bytes * trained) for count, each, trained in sizes),
    ]
    trained = [(count, count * each) for count, each, trained in sizes if trained]
    states = [optimizer.each_state_bytes(*each) for _ in range(optimizer.states) for each in trained]
    block = max((weights.gathered_bytes for weights in traced.regions.values()), default=0)
    gathered = (traced.rest.gathered_bytes // layout.tensor, block // layout.tensor) if sharded else ()
    reduced = sum(optimizer.gradients_bytes(*each) for each in trained)
    return Run(
        kept=(*kept, *gathered),
        states=tuple(states),
        keeps_gradients=not sharded,
        other_streams_bytes=sum(gathered) + reduced if sharded else 0,
    )


_OF_ALL = ("bytes", "trained", "trained_bytes")  # of Weights, which has each for experts, too
_OF_EXPERTS = tuple(f"expert_{name}" for name in _OF_ALL)
_SIZES = {
    kind: [each.name for each in fields(kind) if each.name.endswith("bytes") and each.name != "gradient_bytes"]
    for kind in (Stage, Option)
}


def _divided(stage: Stage, parts: int) -> Stage:
    """Return a stage with every size divided."""
    if parts == 1:
        return stage
    options = tuple(
        replace(option, **{name: getattr(option, name) // parts for name in _SIZES[Option]}) for option in stage.options
    )
    sizes = {name: getattr(stage, name) // parts for name in _SIZES[Stage]}
    return replace(stage, options=options, gradient_bytes=stage.gradient_bytes // parts, **sizes)


def _communicating(stage: Stage, forward: float, backward: float, gathered_bytes: int) -> Stage:
    """Return a stage that communicates and gathers its input while it runs; a re-run communicates by its share of the forward."""
    if not forward:
        return stage

    def option_with(option: Option) -> Option:
        share = min(1.0, option.rerun_seconds / stage.forward_seconds) if stage.forward_seconds else 0.0
        return replace(
            option,
            forward_seconds=option.forward_seconds + forward,
            backward_seconds=option.backward_seconds + backward,
            rerun_seconds=option.rerun_seconds + share * forward,
            forward_transient_bytes=option.forward_transient_bytes + gathered_bytes,
            backward_transient_bytes=option.backward_transient_bytes + gathered_bytes,
        )

    return replace(
        stage,
        forward_seconds=stage.forward_seconds + forward,
        backward_seconds=stage.backward_seconds + backward,
        forward_transient_bytes=stage.forward_transient_bytes + gathered_bytes,
        backward_transient_bytes=stage.backward_transient_bytes + gathered_bytes,
        rerun_transient_bytes=stage.rerun_transient_bytes + gathered_bytes,
        untaped_transient_bytes=stage.untaped_transient_bytes + gathered_bytes,
        options=tuple(option_with(option) for option in stage.options),
    )


def _scaled_weights(weights: Weights, parts: int) -> Weights:
    return Weights(**{each.name: getattr(weights, each.name) // parts for each in fields(Weights)})

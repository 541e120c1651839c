"""Settings of other programs that come closest to a forecast: Megatron, torchtitan, Hugging Face and DeepSpeed.

None of them has a treatment per block and slot: blocks that hold most of their tape become selective recomputation, blocks that hold
less than half of it count as fully recomputed, so that the settings do not need more memory than the plan. Flags begin with a comment
that says what the plan does. Names are those of the programs in August 2026; tests/forecast/test_export.py says where they were read.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from retape.core.errors import InvalidInput
from retape.forecast.layout import Layout
from retape.forecast.simulation.float8 import Scaling

KINDS = ("megatron", "torchtitan", "huggingface", "deepspeed")
_FLOAT8 = {  # a flag, or a comment where it is not a matter of flags
    ("megatron", Scaling.TENSORWISE): "--fp8-format hybrid --fp8-recipe tensorwise",
    (
        "torchtitan",
        Scaling.TENSORWISE,
    ): "# float8: in the model's configuration, converters=[Float8LinearConverter.Config("
    "enable_fsdp_float8_all_gather=True)]",
    ("torchtitan", Scaling.ROWWISE): "# float8: in the model's configuration, converters=[Float8LinearConverter.Config("
    'recipe_name="rowwise")]',
}
_MEGATRON_SHARDS = {2: "optim_grads", 3: "optim_grads_params"}


def check_export(kind: str) -> None:
    """Raise InvalidInput for an unknown program."""
    if kind not in KINDS:
        raise InvalidInput(f"There is no export {kind!r}. Known: {', '.join(KINDS)}.")


def export_settings(
    kind: str, layout: Layout, treatments: Mapping[str, int], *, rows: int, length: int, float8: Scaling | None = None
) -> str:
    """Return the settings of one program; raise InvalidInput for an unknown one, or one that has no such float8."""
    check_export(kind)
    if float8 is not None and (kind, float8) not in _FLOAT8:
        raise InvalidInput(
            f"The settings of {kind} have no float8 with {float8.value} scales, so they would be those of another step. Export a forecast "
            "without float8, or 'torchtitan' (both) or 'megatron' (tensorwise)."
        )
    first = "" if float8 is None else _FLOAT8[kind, float8] + "\n"
    found = {"megatron": _megatron, "torchtitan": _torchtitan, "huggingface": _huggingface, "deepspeed": _deepspeed}
    return first + found[kind](layout, _Blocks(treatments), rows, length)


class _Blocks:
    """Blocks by what is done to them."""

    def __init__(self, treatments: Mapping[str, int]) -> None:
        kinds: Counter[str] = Counter()
        for treatment, count in treatments.items():
            kinds[treatment.split(" ")[0].split(",")[0]] += count
        self.total = sum(kinds.values())
        self.kept, self.selected, self.offloaded = kinds["keep"], kinds["select"], kinds["offload"]
        self.recomputed = self.total - self.kept - self.selected - self.offloaded

    @property
    def partly(self) -> int:
        return self.selected + self.offloaded

    @property
    def every(self) -> int:
        """Every how many blocks one is treated."""
        return max(1, round(self.total / max(1, self.recomputed + self.partly)))

    def described(self) -> str:
        parts = {
            "kept": self.kept,
            "recomputed in part": self.selected,
            "offloaded": self.offloaded,
            "recomputed": self.recomputed,
        }
        return "# the plan: blocks " + ", ".join(f"{name} {count}" for name, count in parts.items() if count)


def _megatron(layout: Layout, blocks: _Blocks, rows: int, length: int) -> str:
    flags = [blocks.described(), f"--micro-batch-size {rows}"]
    flags.append(f"--global-batch-size {rows * layout.accumulate * layout.data}")
    sizes = {
        "tensor-model-parallel-size": layout.tensor,
        "pipeline-model-parallel-size": layout.pipeline,
        "context-parallel-size": layout.context,
        "expert-model-parallel-size": layout.expert,
        "num-virtual-stages-per-pipeline-rank": layout.interleave,
    }
    flags += [f"--{name} {size}" for name, size in sizes.items() if size > 1]
    if layout.tensor > 1:
        flags.append("--sequence-parallel")
    if layout.fsdp > 1 and layout.zero:
        flags.append("--use-distributed-optimizer")
    if layout.fsdp > 1 and layout.zero in _MEGATRON_SHARDS:
        flags.append(f"--use-megatron-fsdp --data-parallel-sharding-strategy {_MEGATRON_SHARDS[layout.zero]}")
    return "\n".join([*flags, *_megatron_activations(layout, blocks)])


def _megatron_activations(layout: Layout, blocks: _Blocks) -> list[str]:
    """Return the flags of recomputation and offloading: --cpu-offloading works without a pipeline and without recomputation only."""
    if blocks.recomputed:
        layers = -(-(blocks.recomputed + blocks.offloaded) // (layout.pipeline * layout.interleave))
        return [f"--recompute-granularity full --recompute-method block --recompute-num-layers {layers}"]
    if blocks.offloaded and not blocks.selected and layout.pipeline == 1:
        return [f"--cpu-offloading-num-layers {min(blocks.offloaded, blocks.total - 1)}"]
    if blocks.offloaded:
        return [
            "--fine-grained-activation-offloading --offload-modules core_attn attn_proj",
            "--recompute-granularity selective --recompute-modules layernorm",
        ]
    if blocks.selected:
        return ["--recompute-granularity selective --recompute-modules core_attn layernorm"]
    return []


def _torchtitan(layout: Layout, blocks: _Blocks, rows: int, length: int) -> str:
    sizes = {
        "training.num_tokens_per_microbatch_per_dp_rank": rows * max(1, length),
        "parallelism.data_parallel_replicate_degree": max(1, layout.sharing // layout.fsdp),
        "parallelism.data_parallel_shard_degree": max(1, layout.fsdp // layout.context),
        "parallelism.tensor_parallel_degree": layout.tensor,
        "parallelism.context_parallel_degree": layout.context,
        "parallelism.pipeline_parallel_degree": layout.pipeline,
        "parallelism.expert_parallel_degree": layout.expert,
    }
    flags = [blocks.described(), *(f"--{name} {size}" for name, size in sizes.items())]
    if layout.fsdp > 1 and layout.zero < 3:
        flags.append("--parallelism.fsdp_reshard_after_forward never")
    if layout.pipeline > 1:
        schedule = "Interleaved1F1B" if layout.interleave > 1 else "1F1B"
        flags.append(f"--parallelism.num_pp_microbatches {layout.accumulate}")
        flags.append(f"--parallelism.pipeline_parallel_schedule {schedule}")
    mode = "full" if blocks.recomputed else "selective" if blocks.partly else "none"
    return "\n".join([*flags, f"activation-checkpoint:{mode}"])


def _huggingface(layout: Layout, blocks: _Blocks, rows: int, length: int) -> str:
    treats = bool(blocks.recomputed or blocks.partly)
    settings: dict[str, Any] = {
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": layout.accumulate,
        "bf16": True,
        "gradient_checkpointing": treats and layout.fsdp == 1,
    }
    if settings["gradient_checkpointing"]:
        settings["gradient_checkpointing_kwargs"] = {"every_n_layers": blocks.every, "offload": bool(blocks.offloaded)}
    if layout.fsdp > 1:
        settings["fsdp"] = True
        settings["fsdp_config"] = {
            "version": 2,
            "reshard_after_forward": layout.zero == 3,
            "activation_checkpointing": treats,
        }
    return json.dumps(settings, indent=2)


def _deepspeed(layout: Layout, blocks: _Blocks, rows: int, length: int) -> str:
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": layout.accumulate,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": layout.zero if layout.fsdp > 1 else 0, "overlap_comm": True},
    }
    if layout.tensor > 1:
        settings["tensor_parallel"] = {"autotp_size": layout.tensor}
    if blocks.recomputed or blocks.partly:
        settings["activation_checkpointing"] = {
            "partition_activations": layout.tensor > 1,
            "number_checkpoints": blocks.recomputed + blocks.partly,
            "cpu_checkpointing": bool(blocks.offloaded),
        }
    return json.dumps(settings, indent=2)

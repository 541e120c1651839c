"""Settings of other programs that come closest to a forecast: Megatron, torchtitan, Hugging Face and DeepSpeed.

None of them has a treatment per block and slot: blocks that hold a part of their tape become selective recomputation, blocks that are
recomputed count as fully recomputed. The text says what was lost.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from retape.core.errors import InvalidInput
from retape.forecast.layout import Layout

KINDS = ("megatron", "torchtitan", "huggingface", "deepspeed")


def export_settings(kind: str, layout: Layout, treatments: Mapping[str, int], *, rows: int) -> str:
    """Return the settings of one program; raise InvalidInput for an unknown one."""
    found = {"megatron": _megatron, "torchtitan": _torchtitan, "huggingface": _huggingface, "deepspeed": _deepspeed}
    if kind not in found:
        raise InvalidInput(f"There is no export {kind!r}. Known: {', '.join(KINDS)}.")
    return found[kind](layout, _Blocks(treatments), rows)


class _Blocks:
    """Blocks by what is done to them."""

    def __init__(self, treatments: Mapping[str, int]) -> None:
        kinds: Counter[str] = Counter()
        for treatment, count in treatments.items():
            kinds[treatment.split(" ")[0].split(",")[0]] += count
        self.kept, self.selected = kinds["keep"], kinds["select"]
        self.offloaded = kinds["offload"]
        self.recomputed = sum(kinds.values()) - self.kept - self.selected - self.offloaded

    @property
    def partly(self) -> int:
        return self.selected + self.offloaded


def _megatron(layout: Layout, blocks: _Blocks, rows: int) -> str:
    flags = [f"--micro-batch-size {rows}"]
    sizes = {
        "tensor-model-parallel-size": layout.tensor,
        "pipeline-model-parallel-size": layout.pipeline,
        "context-parallel-size": layout.context,
        "expert-model-parallel-size": layout.expert,
    }
    flags += [f"--{name} {size}" for name, size in sizes.items() if size > 1]
    if layout.tensor > 1:
        flags.append("--sequence-parallel")
    if layout.interleave > 1:
        flags.append(f"--num-virtual-stages-per-pipeline-rank {layout.interleave}")
    if layout.fsdp > 1:
        flags.append("--use-distributed-optimizer")
    if blocks.recomputed:
        layers = max(1, blocks.recomputed // layout.pipeline)
        flags.append(f"--recompute-granularity full --recompute-method block --recompute-num-layers {layers}")
    elif blocks.partly:
        flags.append("--recompute-granularity selective")
    return "\n".join(flags)


def _mode(blocks: _Blocks) -> str:
    return "full" if blocks.recomputed else "selective" if blocks.partly else "none"


def _torchtitan(layout: Layout, blocks: _Blocks, rows: int) -> str:
    total = blocks.recomputed + blocks.partly + blocks.kept
    lines = ["[training]", f"local_batch_size = {rows}", "", "[parallelism]"]
    sizes = {
        "data_parallel_replicate_degree": layout.sharing // layout.fsdp // layout.context or 1,
        "data_parallel_shard_degree": layout.fsdp,
        "tensor_parallel_degree": layout.tensor,
        "context_parallel_degree": layout.context,
        "pipeline_parallel_degree": layout.pipeline,
        "expert_parallel_degree": layout.expert,
    }
    lines += [f"{name} = {size}" for name, size in sizes.items()]
    lines += ["", "[activation_checkpoint]"]
    mode = _mode(blocks)
    if mode == "full" and blocks.kept:  # torchtitan recomputes every n-th layer in this mode
        every = max(1, round(total / max(1, blocks.recomputed)))
        lines += ['mode = "selective"', f'selective_ac_option = "{every}"']
    elif mode == "selective":
        lines += ['mode = "selective"', 'selective_ac_option = "op"']
    else:
        lines.append(f'mode = "{mode}"')
    return "\n".join(lines)


def _huggingface(layout: Layout, blocks: _Blocks, rows: int) -> str:
    settings: dict[str, Any] = {
        "per_device_train_batch_size": rows,
        "gradient_accumulation_steps": layout.accumulate,
        "bf16": True,
        "gradient_checkpointing": bool(blocks.recomputed or blocks.partly),
    }
    if layout.fsdp > 1:
        settings["fsdp"] = "full_shard auto_wrap" if layout.zero == 3 else "shard_grad_op auto_wrap"
    return json.dumps(settings, indent=2)


def _deepspeed(layout: Layout, blocks: _Blocks, rows: int) -> str:
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": rows,
        "gradient_accumulation_steps": layout.accumulate,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": layout.zero if layout.fsdp > 1 else 0, "overlap_comm": True},
    }
    if blocks.recomputed or blocks.partly:
        settings["activation_checkpointing"] = {
            "partition_activations": layout.tensor > 1,
            "number_checkpoints": blocks.recomputed + blocks.partly,
            "cpu_checkpointing": bool(blocks.offloaded),
        }
    return json.dumps(settings, indent=2)

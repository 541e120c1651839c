"""`retape.forecast` beside step times and memory that others published.

    python -m benchmarks.published times [--out FILE]
    python -m benchmarks.published memory [--out FILE]

`times`: tables 4 and 5 of Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", arXiv 2205.05198:
GPT-3-like models of 22 billion to 1 trillion weights on A100s. `memory`: torchtitan's table of Llama 3.1 on H100s. Nothing here needs
a GPU. Every number that is compared has its source in `SOURCES`, which is written into the record.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from benchmarks.records import record
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

import retape
from retape.core.problem import Option, OptionKind, Stage
from retape.forecast.device import Device
from retape.forecast.forecasting import USABLE_SHARE, optimizer_step_seconds
from retape.forecast.known_devices import cost_model, device_named
from retape.forecast.known_models import batch_from, config_named, model_from
from retape.forecast.layout import Layout, OptimizerKind, optimizer_kind
from retape.forecast.parallel import StageProblem, stage_problems
from retape.forecast.simulation.float8 import Scaling
from retape.forecast.simulation.tracing import TracedStep, trace_step
from retape.forecast.stage_plan import plan_stage, step_seconds

LENGTH, VOCABULARY = 2048, 51200
SOURCES = {
    "times": """Korthikanti et al. 2022, arXiv 2205.05198, tables 3, 4 and 5, read in a transcription of the paper in a public repository:
the paper itself was not at hand. Checked against two primary sources. (1) The model FLOPs utilisation of README.md in
github.com/NVIDIA/Megatron-LM, commit 2e90a342f5: 22B 41.5 %, 175B 51.4 %, 530B 56.0 %, 1T 56.3 %. The times of 'selective' follow from it
with the paper's equation 7 and 312 TFLOP/s (seconds_from_utilisation). (2) The paper's abstract: 530B 54.2 % against 42.1 % on 2240 GPUs,
29 % faster. The times of full recomputation have no second source but their ratio to 'selective' there. Their full recomputation was
without sequence parallelism, the forecast's is with it. Two parts of the model were decided while looking at table 4, for which it was
10 % too slow before: only two of the collectives of a layer's backward are exposed, as in Megatron's code, and the A100 reaches a larger
share of its published rate than the H200, by a table of others (known_devices.py). Table 5 was compared afterwards.""",
    "memory": """benchmarks/llama3_h100_202412_torchtitan.md of github.com/pytorch/torchtitan, commit b5bcd76, measured by its authors with
torchtitan 9dec370, whose code and train_configs give what the tables do not: length 8192, selective recomputation by op, fp32 weights and
bf16 copies, as many micro-batches as pipeline stages, no resharding after forward with a pipeline. Its memory is
reserved_bytes.all.peak (torchtitan/metrics.py): what the allocator has taken from the driver, fragments included. It is compared with
the reserved bytes of a forecast, or with the allocated ones where there is a pipeline, for which reserved bytes are not forecast. Between
allocated and reserved bytes are, in table 1: logits in bf16 whose freed block no tensor of the loss fits in, fragments that the
optimizer's states leave in the holes of the first step, and what cannot be shared between streams (sharded gradients in that of FSDP2's
reductions, gathered weights in that of its gathers). Rows with torch.compile are forecast with eager kernels, which save and allocate more.
Not modelled for pipelines:
fragments, streams, buffers that stages receive in, and the outputs that the last stage keeps of every micro-batch.""",
    "llama3": """The Llama 3 Herd of Models, arXiv 2407.21783, table 4 and section 3.3.2, in a copy in a public repository. It gives
no bytes, only that 8K tokens were trained without activation checkpointing on 80 GB, with kernels and deallocation of their own; with
eager kernels a part must be recomputed. The parts per pipeline rank are not given.""",
}  # fmt: skip


class Layer(nn.Module):
    """A layer of GPT-3 as Megatron computed it then: attention in steps, dropout after softmax and after both parts."""

    def __init__(self, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = rows.shape
        split = self.qkv(self.first(rows)).view(batch, length, self.heads, 3 * hidden // self.heads).transpose(1, 2)
        query, key, value = split.chunk(3, dim=-1)
        scores = torch.baddbmm(
            rows.new_zeros(1, 1, 1),
            query.reshape(-1, length, hidden // self.heads),
            key.reshape(-1, length, hidden // self.heads).transpose(1, 2),
            beta=0.0,
            alpha=0.1,
        )
        weights = functional.dropout(torch.softmax(scores, -1), 0.1)
        mixed = torch.bmm(weights, value.reshape(-1, length, hidden // self.heads))
        mixed = mixed.view(batch, self.heads, length, -1).transpose(1, 2).reshape(batch, length, hidden)
        rows = rows + functional.dropout(self.out(mixed), 0.1)
        return rows + functional.dropout(self.down(functional.gelu(self.up(self.second(rows)))), 0.1)


class GPT(nn.Module):
    """Embedding, layers, and the loss over a vocabulary."""

    def __init__(self, heads: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, hidden), nn.Embedding(LENGTH, hidden)
        self.layers = nn.ModuleList(Layer(heads, hidden) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, VOCABULARY, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = functional.dropout(self.words(ids) + self.places.weight, 0.1)
        for layer in self.layers:
            rows = layer(rows)
        return functional.cross_entropy(self.head(self.norm(rows)).float().view(-1, VOCABULARY), ids.view(-1))


@dataclass(frozen=True, kw_only=True)
class Published:
    """One row of tables 3 and 5: sizes and layout of a model, its utilisation, and seconds of a step with both kinds of recomputation."""

    heads: int
    hidden: int
    layers: int
    pipeline: int
    interleave: int
    rows: int  # of a micro-batch
    batch: int  # rows of a step
    utilisation: float
    full_seconds: float
    selective_seconds: float

    @property
    def layout(self) -> Layout:
        return Layout(
            gpus=8 * self.pipeline,
            tensor=8,
            pipeline=self.pipeline,
            interleave=self.interleave,
            accumulate=self.batch // self.rows,
        )

    @property
    def seconds_from_utilisation(self) -> float:
        """The seconds of a step that the published utilisation means: equation 7 of the paper over 312 TFLOP/s."""
        share = 1 + LENGTH / (6 * self.hidden) + VOCABULARY / (12 * self.hidden * self.layers)
        flops = 72 * self.batch * self.layers * LENGTH * self.hidden**2 * share
        return flops / (self.utilisation * 312e12 * self.layout.gpus)


TIMES = {
    "22B": Published(
        heads=64, hidden=6144, layers=48, pipeline=1, interleave=1, rows=4, batch=4,
        utilisation=0.415, full_seconds=1.42, selective_seconds=1.10,
    ),
    "175B": Published(
        heads=96, hidden=12288, layers=96, pipeline=8, interleave=3, rows=1, batch=64,
        utilisation=0.514, full_seconds=18.13, selective_seconds=13.75,
    ),
    "530B": Published(
        heads=128, hidden=20480, layers=105, pipeline=35, interleave=3, rows=1, batch=280,
        utilisation=0.560, full_seconds=49.05, selective_seconds=37.83,
    ),
    "1T": Published(
        heads=160, hidden=25600, layers=128, pipeline=64, interleave=1, rows=1, batch=512,
        utilisation=0.563, full_seconds=94.42, selective_seconds=71.49,
    ),
}  # fmt: skip
LAYER_MS = {  # table 4: forward, backward of one layer of 22B with sequence parallelism; "full" is without it
    "keep": (7.2, 11.8),
    "selective": (7.2, 13.1),
    "full": (7.7, 19.5),
}


# --- one treatment for every block --------------------------------------------------------------------------------------


def selective(stage: Stage) -> Option:
    """Return the option that keeps all but the attention's steps: the quickest with at most half of the whole tape."""
    return min((o for o in stage.options if 2 * o.held_bytes <= stage.tape_bytes), key=lambda o: o.rerun_seconds)


def full(stage: Stage) -> Option:
    return next(option for option in stage.options if option.kind is OptionKind.RECOMPUTE)


def keep(stage: Stage) -> Option:
    return stage.choices[0]


WAYS: dict[str, Callable[[Stage], Option]] = {"keep": keep, "selective": selective, "full": full}


def treated(problem: StageProblem, way: str) -> StageProblem:
    """Return a pipeline stage in which every block has one treatment."""

    def only(stage: Stage) -> Stage:
        if not stage.options:
            return stage
        option = WAYS[way](stage)
        return replace(
            stage,
            forward_seconds=option.forward_seconds,
            backward_seconds=option.backward_seconds + option.rerun_seconds,
            tape_bytes=option.held_bytes,
            forward_transient_bytes=option.forward_transient_bytes,
            backward_transient_bytes=option.backward_transient_bytes,
            options=(),
        )

    return replace(problem, chain=replace(problem.chain, stages=tuple(only(stage) for stage in problem.chain.stages)))


def with_layers(traced: TracedStep, count: int) -> TracedStep:
    """Return the trace of a model of three equal layers as that of one with `count`."""
    chain, regions = traced.chain.chain, traced.chain.stages
    places = [n for n, region in enumerate(regions) if region.choice is not None]
    first, middle, last = (chain.stages[n].name for n in places)
    place, names = places[1], [f"{middle}, copy {n}" for n in range(count - 2)]
    copies = [replace(chain.stages[place], name=name) for name in names]
    return replace(
        traced,
        chain=replace(
            traced.chain,
            chain=replace(chain, stages=(*chain.stages[:place], *copies, *chain.stages[place + 1 :])),
            stages=(*regions[:place], *([regions[place]] * len(copies)), *regions[place + 1 :]),
        ),
        regions={
            first: traced.regions[first],
            **dict.fromkeys(names, traced.regions[middle]),
            last: traced.regions[last],
        },
    )


def traced_gpt(row: Published, device: Device) -> TracedStep:
    with torch.device("meta"):
        model = GPT(row.heads, row.hidden, 3).to(torch.bfloat16)
        ids = torch.empty(row.rows, LENGTH, dtype=torch.long)
    return trace_step(model, ids, cost_model(device, parts=8), host=False)


def layer_ms(traced: TracedStep, row: Published, device: Device, way: str) -> tuple[float, float]:
    """Return the milliseconds of forward and backward of one layer on one GPU of eight."""
    (problem,) = stage_problems(traced, Layout(gpus=8, tensor=8), device, OptimizerKind(name="none"), lambda size: 0.0)
    stage = next(s for s in treated(problem, way).chain.stages if s.name == "layers.1")
    return 1e3 * stage.forward_seconds, 1e3 * stage.backward_seconds


def gpt_seconds(traced: TracedStep, row: Published, device: Device, way: str) -> float:
    """Return the seconds of a step of the whole model, with Megatron's mixed-precision AdamW."""
    kind = optimizer_kind("adamw-fp32")
    problems = stage_problems(
        with_layers(traced, row.layers), row.layout, device, kind, optimizer_step_seconds(device, kind)
    )
    plans = [plan_stage(treated(problem, way), None) for problem in (problems[0], problems[-1])]
    return step_seconds(row.layout, plans)


def times(options: argparse.Namespace) -> None:
    """Forecast tables 4 and 5 and write both."""
    device, results = device_named("a100-80g"), {}
    for name, row in TIMES.items():
        traced = traced_gpt(row, device)
        if name == "22B":
            for way, (forward, backward) in LAYER_MS.items():
                found = layer_ms(traced, row, device, way)
                results[f"one layer of 22B, {way}"] = {
                    "published_ms": [forward, backward],
                    "forecast_ms": found,
                    "error": sum(found) / (forward + backward) - 1,
                }
        for way, seconds in (("full", row.full_seconds), ("selective", row.selective_seconds)):
            found = gpt_seconds(traced, row, device, way)
            results[f"{name}, {way}"] = {
                "layout": row.layout.described(),
                "published_seconds": seconds,
                "seconds_from_utilisation": row.seconds_from_utilisation if way == "selective" else None,
                "forecast_seconds": found,
                "error": found / seconds - 1,
            }
    for name, row in results.items():
        print(f"{name:28} {row['error']:+.1%}")
    about = {"forecast_for": device.name, "source": _line("times")}
    print(record("published", 0, results, options.out, part="times", about=about))


# --- memory -------------------------------------------------------------------------------------------------------------

TITAN_FSDP = OptimizerKind(
    name="adamw", states=2, state_bytes=4, master_bytes=2, gradient_bytes=4
)  # fp32 weights: 2 + 2
TITAN_PIPELINE = optimizer_kind("adamw-fp32")  # bf16 copies of the weights stay, with fp32 gradients: as ZeRO-1


@dataclass(frozen=True, kw_only=True)
class TitanRow:
    """One row of torchtitan's tables: model, rows and length of a micro-batch, layout, published GiB per GPU."""

    model: str
    rows: int
    length: int
    layout: dict[str, int]
    gib: float
    way: str = "full"
    kernels: str = "torch.compile and float8"

    @property
    def float8(self) -> str | None:
        return "tensorwise" if "float8" in self.kernels else None

    @property
    def optimizer(self) -> OptimizerKind:
        return TITAN_PIPELINE if "pipeline" in self.layout else TITAN_FSDP


_PIPELINED = {"gpus": 512, "fsdp": 8, "tensor": 8, "pipeline": 8, "accumulate": 8, "zero": 1}
MEMORY = {
    "table 1, FSDP": TitanRow(
        model="llama-8b", rows=2, length=8192, layout={"gpus": 8, "fsdp": 8}, gib=82.4, way="ops", kernels="eager, bf16"
    ),
    "table 1, float8": TitanRow(
        model="llama-8b", rows=2, length=8192, layout={"gpus": 8, "fsdp": 8}, gib=76.8, way="ops"
    ),
    "table 3, FSDP": TitanRow(
        model="llama-8b",
        rows=2,
        length=8192,
        layout={"gpus": 128, "fsdp": 128},
        gib=67.0,
        way="ops",
        kernels="eager, bf16",
    ),
    "table 3, float8": TitanRow(
        model="llama-8b", rows=2, length=8192, layout={"gpus": 128, "fsdp": 128}, gib=61.8, way="ops"
    ),
    **{
        f"table 2, CP {parts}": TitanRow(
            model="llama-8b", rows=1, length=32768 * parts, layout={"gpus": 8, "fsdp": 8, "context": parts}, gib=gib
        )
        for parts, gib in ((1, 83.9), (2, 84.2), (4, 84.0), (8, 84.5))
    },
    "table 4, 2D": TitanRow(
        model="llama-70b", rows=16, length=8192, layout={"gpus": 256, "fsdp": 32, "tensor": 8}, gib=71.9
    ),
    "table 5, 1F1B": TitanRow(model="llama-405b", rows=4, length=8192, layout=_PIPELINED, gib=82.5),
    "table 5, interleaved": TitanRow(
        model="llama-405b", rows=4, length=8192, layout={**_PIPELINED, "interleave": 2}, gib=72.7
    ),
    **{
        f"table 6, CP {parts}": TitanRow(
            model="llama-405b", rows=1, length=32768 * parts, layout={**_PIPELINED, "context": parts}, gib=gib
        )
        for parts, gib in ((1, 75.3), (2, 75.9), (4, 77.1), (8, 84.9))
    },
}


class DividedLoss(torch.autograd.Function):
    """Cross-entropy of logits divided over the vocabulary: the tensors of torch/distributed/tensor/parallel/loss.py."""

    @staticmethod
    def forward(ctx, logits, labels):
        shifted = logits - logits.amax(-1, keepdim=True)
        sums = torch.exp(shifted).sum(-1, keepdim=True)
        result = shifted - sums.log()
        ctx.save_for_backward(result, labels)
        return -result.gather(-1, labels.unsqueeze(-1)).mean()

    @staticmethod
    def backward(ctx, gradient):
        result, labels = ctx.saved_tensors
        made = torch.zeros_like(result).scatter_(-1, labels.unsqueeze(-1), -1.0)
        return (made + torch.exp(result)) * gradient, None


def divided_loss(model: nn.Module, batch: dict) -> torch.Tensor:
    return DividedLoss.apply(model(input_ids=batch["input_ids"]).logits.float(), batch["labels"])


def by_op() -> object:
    """Return torchtitan's selective recomputation by op: attention and every second product are kept."""
    aten, seen = torch.ops.aten, {True: 0, False: 0}
    products = {aten.mm.default, aten._scaled_mm.default}  # to the policy a float8 product is an mm of a subclass
    kept = {
        *products,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    }

    def policy(context, func, *args, **kwargs):
        if func in products:
            seen[context.is_recompute] += 1
            if seen[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if func in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def titan_bytes(row: TitanRow) -> tuple[int, int]:
    """Return the forecast peak of the fullest GPU, and what PyTorch reserves (0 with pipelines: not forecast)."""
    if "pipeline" in row.layout:
        plans = [plan_stage(treated(problem, row.way), None) for problem in llama_problems(row, row.optimizer)]
        return max(plan.peak_bytes for plan in plans), 0
    model = model_from(row.model, length=row.length)
    policy = {"context_fn": by_op} if row.way == "ops" else {}
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False, **policy})
    found = retape.forecast(
        model,
        (row.rows, row.length),
        device="h100",
        mesh=row.layout,
        optimizer=row.optimizer,
        budget="100TiB",
        float8=row.float8,
        step=divided_loss if "tensor" in row.layout else None,
    )
    return found.peak_bytes, found.plain_reserved_bytes


def llama_problems(row: TitanRow, optimizer: OptimizerKind) -> list[StageProblem]:
    """Return the pipeline stages of a Llama, traced with three layers."""
    device, layout = device_named("h100"), Layout(**row.layout)
    config = config_named(row.model, length=row.length)
    layers, config.num_hidden_layers = config.num_hidden_layers, 3
    model = model_from(config)
    batch = batch_from((row.rows, row.length // layout.context), model)
    costs, loss = cost_model(device, parts=layout.tensor), divided_loss if layout.tensor > 1 else None
    traced = trace_step(model, batch, costs, host=False, step=loss, float8=Scaling.of(row.float8))
    traced = with_layers(traced, layers)
    return stage_problems(traced, layout, device, optimizer, optimizer_step_seconds(device, optimizer))


def llama3() -> dict:
    """Return the forecast of the first row of the Llama 3 paper's table 4: what is kept, recomputed, and its time."""
    device, results = device_named("h100"), {}
    layout = {"gpus": 8192, "fsdp": 64, "tensor": 8, "pipeline": 16, "accumulate": 32, "zero": 2}
    for parts in (1, 4, 7):
        row = TitanRow(
            model="llama-405b", rows=1, length=8192, layout={**layout, "interleave": parts}, gib=0.0, kernels="bf16"
        )
        problems = llama_problems(row, optimizer_kind("adamw-fp32"))
        kept = max(plan_stage(problem, None).peak_bytes for problem in problems)
        floor = max(plan_stage(problem, None).floor_bytes for problem in problems)
        budget = int(USABLE_SHARE * device.memory_bytes)
        found = {"kept_gib": kept / 2**30, "floor_gib": floor / 2**30, "budget_gib": budget / 2**30}
        if floor <= budget:
            plans = [plan_stage(problem, budget) for problem in problems]
            seconds = step_seconds(Layout(**row.layout), plans)
            flops = (
                6 * 405.9e9 * 8192 * 32 * 64
            )  # the paper's utilisation counts 6 operations per weight and token, roughly
            found |= {
                "seconds": seconds,
                "utilisation": flops / seconds / (8192 * 989.4e12),
                "published_utilisation": 0.43,
            }
        results[f"Llama 3 405B, 8192 GPUs, {parts} parts per rank"] = found
    return results


def memory(options: argparse.Namespace) -> None:
    """Forecast torchtitan's tables and write both."""
    results = {}
    for name, row in MEMORY.items():
        peak, reserved = (size / 2**30 for size in titan_bytes(row))
        results[name] = {
            "model": row.model,
            "layout": Layout(**row.layout).described(),
            "rows": row.rows,
            "length": row.length,
            "published_kernels": row.kernels,
            "forecast_kernels": f"eager, {row.float8 or 'bf16'}",
            "published_reserved_gib": row.gib,
            "forecast_reserved_gib": reserved or None,
            "forecast_allocated_gib": peak,
            "error": (reserved or peak) / row.gib - 1,
        }
        print(f"{name:24} {row.gib:6.1f} {reserved:6.1f} {peak:6.1f} {results[name]['error']:+.1%}", flush=True)
    results |= llama3()
    about = {"source": _line("memory"), "llama3_source": _line("llama3")}
    print(record("published", 0, results, options.out, part="memory", about=about))


def _line(source: str) -> str:
    return " ".join(SOURCES[source].split())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=["times", "memory"])
    parser.add_argument("--out")
    options = parser.parse_args()
    {"times": times, "memory": memory}[options.mode](options)


if __name__ == "__main__":
    main()

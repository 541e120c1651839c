"""`retape.forecast` beside measured steps on one GPU: peak memory and step time of setups that it was not tuned on.

    python -m benchmarks.forecast calibrate [--out FILE] [--toy]
    python -m benchmarks.forecast measure [--out FILE] [--toy] [--only NAME ...] [--limit SECONDS]
    python -m benchmarks.forecast compare --measured FILE [--device FILE] [--out FILE]
    python -m benchmarks.forecast plans --measured FILE [--out FILE]
    python -m benchmarks.forecast beside [--out FILE] [--toy] [--only NAME ...] [--rounds N] [--limit SECONDS]
    python -m benchmarks.forecast large [--out FILE]

`calibrate` writes a device file, `measure` runs every setup, and `beside` fits a model and runs the plan of `fit` and that of the
forecast for the same budget in turns: these need the GPU. The others need none: `compare` forecasts the same setups, with the same version
of Transformers, whose models change from one to the next, and writes the record with the errors; `plans` does so for the plans that `fit`
chose in a record of benchmarks.fit; `large` times forecasts of 70 billion weights on 64 GPUs. Random weights, made-up tokens, bf16,
eager kernels. Peak is `torch.cuda.max_memory_allocated` from before the first forward, everything counted; seconds are the median of
whole steps. Setups with `tuned` were set aside for tuning the cost model; their errors are reported apart. `--toy` has tiny models,
to try the script on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from benchmarks.records import record


@dataclass(frozen=True)
class Setup:
    """One training step: a model, a batch, and what is done about memory."""

    name: str
    model: str
    batch: int
    length: int
    way: str = "eager"  # or "checkpoint": Hugging Face's gradient_checkpointing_enable
    optimizer: str = "none"  # or "adamw": fused
    tuned: bool = False


LLAMA = {
    "anchor": {"layers": 16, "hidden": 2048, "mlp": 5632, "heads": 16, "kv": 16, "vocabulary": 32000},
    "llama-1b": {"layers": 16, "hidden": 2048, "mlp": 8192, "heads": 32, "kv": 8, "vocabulary": 128256, "tied": True},
    "llama-3b": {"layers": 28, "hidden": 3072, "mlp": 8192, "heads": 24, "kv": 8, "vocabulary": 128256, "tied": True},
    "llama-8b": {"layers": 32, "hidden": 4096, "mlp": 14336, "heads": 32, "kv": 8, "vocabulary": 128256},
}
GPT2 = {"gpt2": (12, 768, 12), "gpt2-medium": (24, 1024, 16), "gpt2-large": (36, 1280, 20)}
VIT = {"vit-base": (12, 768, 12), "vit-large": (24, 1024, 16)}
MIXTRAL = {
    "mixtral-small": {
        "layers": 8,
        "hidden": 2048,
        "mlp": 4096,
        "heads": 16,
        "kv": 8,
        "vocabulary": 32000,
        "experts": 8,
    },
}

SETUPS = (
    Setup("llama-1b-eager-4x2048", "llama-1b", 4, 2048, tuned=True),
    Setup("gpt2-eager-8x1024-adamw", "gpt2", 8, 1024, optimizer="adamw", tuned=True),
    Setup("anchor-eager-8x4096", "anchor", 8, 4096),
    Setup("anchor-checkpoint-8x4096", "anchor", 8, 4096, "checkpoint"),
    Setup("anchor-eager-2x4096-adamw", "anchor", 2, 4096, optimizer="adamw"),
    Setup("llama-1b-checkpoint-8x2048-adamw", "llama-1b", 8, 2048, "checkpoint", "adamw"),
    Setup("llama-1b-eager-2x4096-adamw", "llama-1b", 2, 4096, optimizer="adamw"),
    Setup("llama-3b-eager-2x2048-adamw", "llama-3b", 2, 2048, optimizer="adamw"),
    Setup("llama-3b-checkpoint-4x4096", "llama-3b", 4, 4096, "checkpoint"),
    Setup("llama-8b-eager-1x2048", "llama-8b", 1, 2048),
    Setup("llama-8b-checkpoint-2x4096-adamw", "llama-8b", 2, 4096, "checkpoint", "adamw"),
    Setup("llama-8b-checkpoint-1x16384", "llama-8b", 1, 16384, "checkpoint"),
    Setup("gpt2-eager-32x512", "gpt2", 32, 512),
    Setup("gpt2-medium-eager-8x1024-adamw", "gpt2-medium", 8, 1024, optimizer="adamw"),
    Setup("gpt2-large-checkpoint-16x1024", "gpt2-large", 16, 1024, "checkpoint"),
    Setup("vit-base-eager-128", "vit-base", 128, 224),
    Setup("vit-large-eager-64-adamw", "vit-large", 64, 224, optimizer="adamw"),
    Setup("vit-large-checkpoint-128", "vit-large", 128, 224, "checkpoint"),
    Setup("mixtral-eager-4x2048", "mixtral-small", 4, 2048),
    Setup("mixtral-checkpoint-8x2048-adamw", "mixtral-small", 8, 2048, "checkpoint", "adamw"),
)


def build(setup: Setup, device: str, *, toy: bool = False):
    """Return the model in bf16 and its batch."""
    import transformers

    with torch.device(device):
        model = _model(setup, transformers, toy).to(torch.bfloat16).train()
    if setup.way == "checkpoint":
        model.gradient_checkpointing_enable()
    return model, batch_of(setup, model, device, toy=toy)


def batch_of(setup: Setup, model, device: str, *, toy: bool = False):
    rows, length = (2, 32) if toy else (setup.batch, setup.length)
    if setup.model in VIT:
        side = 32 if toy else length
        pixels = torch.randn(rows, 3, side, side, device=device, dtype=torch.bfloat16)
        return {"pixel_values": pixels, "labels": torch.randint(0, 2, (rows,), device=device)}
    ids = torch.randint(0, model.config.vocab_size, (rows, length), device=device)
    return {"input_ids": ids, "labels": ids}


def _model(setup: Setup, library, toy: bool):
    if setup.model in LLAMA:
        return library.LlamaForCausalLM(library.LlamaConfig(**_llama(LLAMA[setup.model], setup.length, toy)))
    if setup.model in MIXTRAL:
        sizes = MIXTRAL[setup.model]
        own = {"num_local_experts": sizes["experts"], "num_experts_per_tok": 2}
        return library.MixtralForCausalLM(library.MixtralConfig(**_llama(sizes, setup.length, toy), **own))
    if setup.model in GPT2:
        layers, hidden, heads = (2, 64, 4) if toy else GPT2[setup.model]
        return library.GPT2LMHeadModel(library.GPT2Config(n_layer=layers, n_embd=hidden, n_head=heads, use_cache=False))
    layers, hidden, heads = (2, 64, 4) if toy else VIT[setup.model]
    sizes = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
    }
    return library.ViTForImageClassification(library.ViTConfig(**sizes, image_size=32 if toy else 224))


def _llama(sizes: dict, length: int, toy: bool) -> dict:
    if toy:
        sizes = {**sizes, "layers": 2, "hidden": 64, "mlp": 128, "heads": 4, "kv": 2, "vocabulary": 256}
    return {
        "hidden_size": sizes["hidden"],
        "intermediate_size": sizes["mlp"],
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["kv"],
        "vocab_size": sizes["vocabulary"],
        "max_position_embeddings": max(4096, length),
        "tie_word_embeddings": sizes.get("tied", False),
        "use_cache": False,
    }


# --- measure ------------------------------------------------------------------------------------------------------------


def measured(setup: Setup, device: str, *, toy: bool, profile: bool = False) -> dict:
    """Run steps of a setup: bytes before, the peak, and the median seconds of whole steps."""
    cuda = device == "cuda"
    before = torch.cuda.memory_allocated() if cuda else 0
    torch.manual_seed(0)
    model, batch = build(setup, device, toy=toy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True) if setup.optimizer == "adamw" else None

    def step():
        loss = model(**batch).loss
        loss.backward()
        if optimizer is not None:
            optimizer.step()
        model.zero_grad(set_to_none=True)

    step()
    _wait(cuda)
    resident = torch.cuda.memory_allocated() - before if cuda else 0
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    first = _seconds(step, cuda)
    peak = torch.cuda.max_memory_allocated() - before if cuda else 0
    times = [_seconds(step, cuda) for _ in range(max(3, min(9, int(4 / max(first, 1e-3)))))]
    found = {
        "resident_bytes": resident,
        "peak_bytes": peak,
        "forward_peak_bytes": _forward_peak(model, batch, before) if cuda else 0,
        "seconds": statistics.median(times),
        "steps": [round(each, 6) for each in times],
        "parameters": sum(p.numel() for p in model.parameters()),
        "process_bytes_before": before,
    }
    if setup.tuned or profile:
        found["ops"] = _profiled(step, cuda)
    return found


def _forward_peak(model, batch, before: int) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    loss = model(**batch).loss
    peak = torch.cuda.max_memory_allocated() - before
    del loss
    return peak


def _seconds(step, cuda: bool) -> float:
    _wait(cuda)
    start = time.perf_counter()
    step()
    _wait(cuda)
    return time.perf_counter() - start


def _wait(cuda: bool) -> None:
    if cuda:
        torch.cuda.synchronize()


def _profiled(step, cuda: bool) -> list:
    """Return the ops of one step with their device seconds, by input shapes: what the cost model is tuned on."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with profile(activities=activities, record_shapes=True) as found:
        step()
        _wait(cuda)
    rows = [
        {
            "op": each.key,
            "shapes": str(each.input_shapes)[:200],
            "count": each.count,
            "device_us": each.self_device_time_total,
            "host_us": each.self_cpu_time_total,
        }
        for each in found.key_averages(group_by_input_shape=True)
    ]
    rows = [row for row in rows if row["device_us"] or (not cuda and row["host_us"])]
    return sorted(rows, key=lambda row: -row["device_us"])[:150]


def measure(options) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    start, results = time.perf_counter(), {}
    if device == "cuda":  # libraries allocate their workspaces once; they are in no setup's bytes
        warm = torch.randn(512, 512, device=device, dtype=torch.bfloat16, requires_grad=True)
        (warm @ warm).sum().backward()
        del warm
    for setup in SETUPS:
        if options.only and setup.name not in options.only:
            continue
        if time.perf_counter() - start > options.limit:
            print(f"{setup.name}: no time left", flush=True)
            continue
        try:
            results[setup.name] = measured(setup, device, toy=options.toy, profile=options.profile)
        except Exception as error:  # one setup that fails must not lose the others
            results[setup.name] = {"failed": f"{type(error).__name__}: {error}"[:500]}
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        shown = {key: value for key, value in results[setup.name].items() if key not in ("ops", "steps")}
        print(f"{time.perf_counter() - start:6.1f} s  {setup.name}: {shown}", flush=True)
        _write(results, options.out)  # what is there survives a time limit
    print(_write(results, options.out))


def _write(results: dict, out: str | None) -> Path:
    import transformers

    about = {"transformers": transformers.__version__, "setups": [vars(setup) for setup in SETUPS]}
    return record("forecast", 0, results, out, part="measured", about=about)


def calibrate(options) -> None:
    from retape.forecast.calibration.meter import TOY
    from retape.forecast.calibration.run import calibrate as run
    from retape.forecast.device import write_device

    start = time.perf_counter()
    found = run(tuning=TOY if options.toy else None, tell=lambda text: print(text, flush=True))
    path = options.out or "device.json"
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    write_device(found, path)
    print(f"{path}: {found.name}, {time.perf_counter() - start:.0f} s; attention by {found.kernels}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("mode", choices=["calibrate", "measure", "compare", "plans", "beside", "large"])
    parser.add_argument("--out")
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--profile", action="store_true", help="measure: also the device seconds of each op")
    parser.add_argument("--rounds", type=int, default=3, help="beside: turns of both plans")
    parser.add_argument("--limit", type=float, default=190.0, help="seconds after which no further setup begins")
    parser.add_argument("--measured", help="the record of `measure`")
    parser.add_argument("--device", help="the device file of `calibrate`, or the name of a device")
    options = parser.parse_args()
    modes = (calibrate, measure, compare, plans, beside, large)
    {mode.__name__: mode for mode in modes}[options.mode](options)


def compare(options) -> None:
    """Forecast every measured setup and write both, with the errors; nothing of a GPU is needed."""
    import retape

    source = json.loads(Path(options.measured).read_text())
    _check_version(source)
    rows = {}
    for setup in SETUPS:
        found = source["results"].get(setup.name)
        if found is None or "failed" in found:
            continue
        start = time.perf_counter()
        model, batch = build(setup, "meta")
        made = retape.forecast(
            model, batch, device=options.device or "h200", optimizer=setup.optimizer, budget="100TiB"
        )
        rows[setup.name] = {
            "tuned": setup.tuned,
            "measured_peak_bytes": found["peak_bytes"],
            "forecast_peak_bytes": made.plain_peak_bytes,
            "peak_error": made.plain_peak_bytes / found["peak_bytes"] - 1,
            "measured_seconds": found["seconds"],
            "forecast_seconds": made.plain_seconds,
            "seconds_error": made.plain_seconds / found["seconds"] - 1,
            "took_seconds": time.perf_counter() - start,
        }
        row = rows[setup.name]
        print(f"{setup.name:36} peak {row['peak_error']:+.2%} time {row['seconds_error']:+.1%}", flush=True)
    others = [row for row in rows.values() if not row["tuned"]]
    summary = {
        "setups": len(others),
        **{
            f"{which}_{name}": value
            for name in ("peak_error", "seconds_error")
            for which, value in (
                ("median", statistics.median(abs(row[name]) for row in others)),
                ("largest", max(abs(row[name]) for row in others)),
            )
        },
    }
    print(summary)
    about = {
        "measured_on": source["device"],
        "measured_torch": source["torch"],
        "transformers": source["transformers"],
        "summary": summary,
    }
    print(record("forecast", 0, rows, options.out, part="compared", about=about))


def _check_version(source: dict) -> None:
    import transformers

    if transformers.__version__ != source["transformers"]:
        raise SystemExit(
            f"The setups were measured with Transformers {source['transformers']}, and {transformers.__version__} is installed: its "
            "models may be others. Install that version, into a folder of its own on PYTHONPATH."
        )


def plans(options) -> None:
    """Forecast the anchor Llama at each budget at which `fit` was measured, and write both."""
    import retape

    source = json.loads(Path(options.measured).read_text())
    model, batch = build(next(setup for setup in SETUPS if setup.name == "anchor-eager-8x4096"), "meta")
    weights = sum(parameter.nbytes for parameter in model.parameters())
    rows = {}
    for name, row in source["results"].items():
        if not isinstance(row, dict) or "retape_ms" not in row:
            continue
        budget = int(2 * weights + row["torch_peak_gib"] * 2**30)  # as Budget.activations: above weights and gradients
        moves = "offload" in row.get("regions", {})
        made = retape.forecast(model, batch, device=options.device or "h200", budget=budget, offload=moves)
        rows[name] = {
            "budget_gib": row["torch_peak_gib"],
            "fit_peak_gib": row["retape_peak_gib"],
            "forecast_peak_gib": (made.peak_bytes - 2 * weights) / 2**30,
            "fit_ms": row["retape_ms"],
            "forecast_ms": 1e3 * made.seconds,
            "seconds_error": 1e3 * made.seconds / row["retape_ms"] - 1,
            "fit_regions": row.get("regions", {}),
            "forecast_regions": dict(made.stages[0].counts()),
        }
        rows[name]["peak_error"] = rows[name]["forecast_peak_gib"] / row["retape_peak_gib"] - 1
        print(f"{name:34} peak {rows[name]['peak_error']:+.2%} time {rows[name]['seconds_error']:+.1%}", flush=True)
    about = {"measured_on": source["device"], "fitted": f"{source['command']}, {source['date']}"}
    print(record("forecast", 0, rows, options.out, part="plans", about=about))


# --- the plans of fit and of a forecast ---------------------------------------------------------------------------------

BESIDE = {  # setups, and how far the budget lies between the floor and keeping everything
    "anchor-eager-8x4096, 0.5": ("anchor-eager-8x4096", 0.5),
    "anchor-eager-8x4096, 0.1": ("anchor-eager-8x4096", 0.1),
    "llama-1b-eager-4x2048, 0.3": ("llama-1b-eager-4x2048", 0.3),
    "gpt2-medium, 0.3": ("gpt2-medium-eager-8x1024-adamw", 0.3),
}


def _forecast_plan(setup: Setup, share: float, device: str, *, toy: bool):
    """Return the budget, the forecast's plan, and what it asks of each region."""
    from retape.forecast.forecasting import optimizer_step_seconds
    from retape.forecast.known_devices import cost_model, device_named
    from retape.forecast.layout import Layout, optimizer_kind
    from retape.forecast.parallel import stage_problems
    from retape.forecast.simulation.tracing import trace_step
    from retape.forecast.stage_plan import plan_stage

    model, batch = build(setup, "meta", toy=toy)
    where, none = device_named(device), optimizer_kind("none")
    traced = trace_step(model, batch, cost_model(where), host=False)
    (problem,) = stage_problems(traced, Layout(), where, none, optimizer_step_seconds(where, none))
    kept = plan_stage(problem, None)
    budget = int(kept.floor_bytes + share * (kept.peak_bytes - kept.floor_bytes))
    made = plan_stage(problem, budget)
    return budget, made, traced.chain.assignment(made.plan)


def _beside(setup: Setup, share: float, options, device: str) -> dict:
    """Fit, then run both plans in turns: peaks, and the median of whole steps."""
    from dataclasses import replace

    import retape

    cuda = device == "cuda"
    start = time.perf_counter()
    budget, made, assignment = _forecast_plan(setup, share, options.device or "h200", toy=options.toy)
    forecast_took = time.perf_counter() - start
    before = torch.cuda.memory_allocated() if cuda else 0
    model, batch = build(setup, device, toy=options.toy)
    start = time.perf_counter()
    fitted = retape.fit(model, batch, budget=budget + before if cuda else 0.6, progress=False)
    fit_took = time.perf_counter() - start
    own = fitted.record
    _check_alike(own.assignment, assignment, cuda)
    planned = replace(own, chain=made.problem.chain, plan=made.plan, assignment=assignment, accumulating=None)
    records = {"fit": own, "forecast": planned}
    fitted.remove()
    times: dict[str, list[float]] = {name: [] for name in records}
    peaks = dict.fromkeys(records, 0)
    for _ in range(options.rounds):
        for name, each in records.items():
            attached = retape.apply(model, each)
            peaks[name] = max(peaks[name], _run_steps(model, batch, times[name], cuda) - before)
            attached.remove()
    medians = {name: statistics.median(found) for name, found in times.items()}
    return {
        "budget_bytes": budget,
        "forecast_peak_bytes": made.peak_bytes,
        "forecast_seconds": made.seconds,
        "fit_regions": _counted(own.assignment),
        "forecast_regions": _counted(assignment),
        "fit_peak_bytes": peaks["fit"],
        "forecast_plan_peak_bytes": peaks["forecast"],
        "fit_seconds": medians["fit"],
        "forecast_plan_seconds": medians["forecast"],
        "fit_over_forecast_plan": medians["fit"] / medians["forecast"] - 1,
        "forecast_peak_error": made.peak_bytes / peaks["fit"] - 1 if peaks["fit"] > 0 else None,
        "forecast_seconds_error": made.seconds / medians["forecast"] - 1,
        "forecast_took_seconds": forecast_took,
        "fit_took_seconds": fit_took,
    }


def _check_alike(fitted, forecast, cuda: bool) -> None:
    """Raise if the blocks save other tensors than the forecast expects; a CPU has other kernels for attention."""
    saved = [[(choice.name, choice.slots) for choice in each.choices] for each in (fitted, forecast)]
    if cuda and saved[0] != saved[1]:
        raise RuntimeError(f"the forecast's regions are {saved[1][:2]}..., those of fit {saved[0][:2]}...")


def _run_steps(model, batch, times: list[float], cuda: bool, count: int = 3) -> int:
    """Run a step to warm up and then timed ones; return the peak of all, in allocated bytes."""

    def step():
        model(**batch).loss.backward()
        model.zero_grad(set_to_none=True)

    if cuda:
        torch.cuda.reset_peak_memory_stats()
    step()
    times += [_seconds(step, cuda) for _ in range(count)]
    return torch.cuda.max_memory_allocated() if cuda else 0


def _counted(assignment) -> dict:
    return dict(
        Counter(f"{choice.option.value}, {len(choice.held)} of {choice.slots} slots" for choice in assignment.choices)
    )


def beside(options) -> None:
    """Run the plan of `fit` and that of the forecast on the same model in turns."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    start, results = time.perf_counter(), {}
    for name, (setup_name, share) in BESIDE.items():
        if (options.only and name not in options.only) or time.perf_counter() - start > options.limit:
            continue
        setup = next(setup for setup in SETUPS if setup.name == setup_name)
        try:
            results[name] = _beside(setup, share, options, device)
        except Exception as error:  # one row that fails must not lose the others
            results[name] = {"failed": f"{type(error).__name__}: {error}"[:500]}
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()
        print(f"{time.perf_counter() - start:6.1f} s  {name}: {results[name]}", flush=True)
    print(record("forecast", 0, results, options.out, part="beside"))


def large(options) -> None:
    """Time a forecast of a Llama of 70 billion weights on 64 GPUs, and a search over its layouts, with the memory of this process."""
    import resource

    import retape
    from retape.forecast.forecasting import search_layouts

    rows = {}
    start = time.perf_counter()
    mesh = {"gpus": 64, "fsdp": 8, "tensor": 8}
    made = retape.forecast("llama-70b", (1, 8192), device="h100-80g", mesh=mesh, optimizer="adamw")
    rows["forecast"] = {
        "seconds": time.perf_counter() - start,
        "resident_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "answer": made.explain().splitlines(),
    }
    start = time.perf_counter()
    found = search_layouts("llama-70b", (1, 8192), gpus=64, device="h100-80g", optimizer="adamw-fp32")
    rows["search"] = {
        "seconds": time.perf_counter() - start,
        "resident_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "layouts": [
            [choice.layout.described(), choice.forecast and choice.forecast.tokens_per_second, choice.reason]
            for choice in found
        ],
    }
    print(record("forecast", 0, rows, options.out, part="large"))


if __name__ == "__main__":
    main()

"""Supervised fine-tuning of an 8-billion-parameter Llama through TRL's SFTTrainer: TRL's own checkpointing beside one line of retape.

    python -m benchmarks.sft [--tuned lora full] [--variants trl exact all compiled] [--budget 130GiB] [--rows 2] [--tokens 8192]
                             [--steps 4] [--rounds 2] [--tiny] [--out FILE]

bf16, random weights, random tokens, fused AdamW. Variants run one after the other, and again in each round, in one process: a
trainer's optimizer does not fit beside another's. `trl` is gradient checkpointing as TRL sets it; the others add
`FitCallback(budget)` with EXACT, with options=ALL, and with compiled blocks and options=ALL. Fits of later rounds come from a plan
cache. Steps are timed after those that fit and learn. Where trl cannot be imported, Transformers' Trainer runs with the same
settings and the record says so. `--tiny` is a small model, on a CPU too, where times say nothing.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import tempfile
import time
import traceback
import warnings

import torch
import transformers
from benchmarks.longest import EIGHT_BILLION, TINY
from benchmarks.records import record
from benchmarks.trainer_cells import tokenizer

import retape
from retape.integrations.huggingface import FitCallback

GIB = 2**30
CUDA = torch.cuda.is_available()
WARM = 3  # steps that fit, learn and compile
VARIANTS = {
    "trl": None,
    "exact": {},
    "all": {"options": retape.ALL},
    "compiled": {"options": retape.ALL, "compile": True},
}


def has_trl() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("trl", "datasets"))


class StepTimes(transformers.TrainerCallback):
    """The seconds of each optimizer step, and the peak of those after the first `WARM`."""

    def __init__(self) -> None:
        self.seconds, self.peak_bytes, self._start = [], 0, 0.0

    def on_step_begin(self, args, state, control, **kwargs) -> None:
        if CUDA:
            torch.cuda.synchronize()
            if state.global_step == WARM:
                torch.cuda.reset_peak_memory_stats()
        self._start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs) -> None:
        if CUDA:
            torch.cuda.synchronize()
            self.peak_bytes = torch.cuda.max_memory_allocated()
        self.seconds.append(time.perf_counter() - self._start)


def model_of(given, tuned: str):
    torch.manual_seed(given.seed)
    sizes = TINY if given.tiny else EIGHT_BILLION
    config = transformers.LlamaConfig(**sizes, pad_token_id=0, max_position_embeddings=max(2048, given.tokens))
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda" if CUDA else "cpu"):
        model = transformers.LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    if tuned == "full":
        return model
    import peft

    return peft.get_peft_model(
        model, peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    )


def trainer_of(given, model, callbacks, folder):
    settings = {
        "output_dir": folder,
        "max_steps": WARM + given.steps,
        "per_device_train_batch_size": given.rows,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "optim": "adamw_torch_fused",
        "gradient_checkpointing": True,  # TRL's default
        "bf16": True,
        "use_cpu": not CUDA,
        "seed": given.seed,
    }
    draw = torch.Generator().manual_seed(given.seed)
    rows = given.rows * (WARM + given.steps)
    tokens = torch.randint(3, model.config.vocab_size, (rows, given.tokens), generator=draw).tolist()
    if not has_trl():
        data = [{"input_ids": row, "labels": row} for row in tokens]
        arguments = transformers.TrainingArguments(**settings)
        return transformers.Trainer(model, arguments, train_dataset=data, callbacks=callbacks)
    import datasets
    import trl

    data = datasets.Dataset.from_dict({"input_ids": tokens, "labels": tokens})
    arguments = trl.SFTConfig(max_length=None, **settings)
    return trl.SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer(), callbacks=callbacks)


def run(given, tuned: str, variant: str, cache: str) -> dict:
    """Train a few steps; tokens per second and the peak, or the error."""
    options, times = VARIANTS[variant], StepTimes()
    callback = None if options is None else FitCallback(given.budget, progress=False, cache=cache, **options)
    try:
        with tempfile.TemporaryDirectory() as folder:
            model = model_of(given, tuned)
            trainer_of(given, model, [times, *([callback] if callback else [])], folder).train()
    except Exception as error:
        print(traceback.format_exc(), flush=True)
        return {"error": f"{type(error).__name__}: {str(error)[:400]}"}
    steps = sorted(times.seconds[WARM:])
    seconds = steps[len(steps) // 2]
    found = {
        "tokens_per_second": round(given.rows * given.tokens / seconds, 1),
        "step_seconds": [round(each, 4) for each in times.seconds],
        "peak_gib": round(times.peak_bytes / GIB, 2),
    }
    if callback is not None:
        made = callback.fitted
        found |= {
            "budget_gib": round(made.budget_bytes / GIB, 2),
            "promised_slowdown": round(made.promised.slowdown, 3),
        }
        found["fit_seconds"] = round(made.record.profile_seconds, 1)
    return found


def cleared() -> None:
    gc.collect()
    torch._dynamo.reset()
    if CUDA:
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tuned", nargs="*", default=["lora", "full"], choices=["lora", "full"])
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--budget", default="130GiB")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    which = (
        "trl.SFTTrainer"
        if has_trl()
        else "transformers.Trainer, because trl cannot be imported: whole logits in the loss"
    )
    about = {"trainer": which, "transformers": transformers.__version__, "tiny": given.tiny}
    results: dict = {tuned: {variant: [] for variant in given.variants} for tuned in given.tuned}
    with tempfile.TemporaryDirectory() as cache:
        for tuned in given.tuned:
            for number in range(given.rounds):
                for variant in given.variants:
                    cleared()
                    found = run(given, tuned, variant, cache)
                    results[tuned][variant].append(found)
                    print(tuned, variant, number, found, flush=True)
                    written = record("sft", given.seed, results, given.out, about=about)
    print(written)


if __name__ == "__main__":
    main()

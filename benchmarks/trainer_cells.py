"""One training run of each trainer at toy size, with and without retape, and everything about it that must be equal.

`run_cell` trains twice and compares; `benchmarks.trainers` runs all cells and records them, tests/integrations a sample.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback

ROWS, LENGTH, VOCABULARY = 4, 48, 64
BUDGET = 0.6  # of the activations; TRL's loss has buffers of a fixed size that do not fit then, and the floor is taken
ABOVE_FLOOR, MOST_REFUSALS = 1.03, 3
COMPILED, RAGGED, BF16, RANKS = "torch_compile", "dynamic padding", "bf16 + accumulation", "two processes"
SHARDED = "two processes, FSDP2"
LAYER = "LlamaDecoderLayer"
FSDP_CONFIG = {"version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": [LAYER]}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell of the matrix. `ranked` is true inside one of two processes."""

    trainer: str
    tuned: str
    setting: str
    steps: int = 10
    shares: tuple[tuple[str, float | None], ...] = ()  # of the parts that a run without retape compiles

    @property
    def name(self) -> str:
        return f"{self.trainer}/{self.tuned}/{self.setting}"

    @property
    def micro_steps(self) -> int:
        return 2 if self.setting == BF16 else 1

    @property
    def in_two_processes(self) -> bool:
        return self.setting in (RANKS, SHARDED)


@dataclass(kw_only=True)
class Run:
    """What one training run left: losses of every micro-step, weights, peaks, logs, and the state of trainer and model."""

    losses: list[float] = field(default_factory=list)
    weights: dict[str, bytes] = field(default_factory=dict)
    peaks: list[int] = field(default_factory=list)
    logs: list[dict[str, Any]] = field(default_factory=list)
    state: set[str] = field(default_factory=set)  # what the run has changed in trainer and model
    callback: Any = None


# --- the meter ----------------------------------------------------------------------------------------------------------------


class LiveBytes(TorchDispatchMode):
    """Live and peak bytes of the storages that ops make while it is active."""

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[StorageWeakRef, int] = {}
        self._outside: set[StorageWeakRef] = set()
        self._at_most = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._outside |= {ref for ref in _storages((args, kwargs)) if ref not in self._sizes}
        out = func(*args, **(kwargs or {}))
        for reference, size in _storages(out).items():
            if reference not in self._sizes and reference not in self._outside:
                self._sizes[reference] = size
                self._at_most += size
        if self._at_most > self.peak:  # only then a new peak is possible
            self._sizes = {ref: size for ref, size in self._sizes.items() if not ref.expired()}
            self._at_most = sum(self._sizes.values())
            self.peak = max(self.peak, self._at_most)
        return out


_WRAPPED = "_orig_mod."  # where a model is that torch.compile has wrapped


def _storages(value: Any) -> dict[StorageWeakRef, int]:
    leaves = [_local(leaf) for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
    tensors = [leaf for leaf in leaves if leaf.layout is torch.strided]
    return {StorageWeakRef(tensor.untyped_storage()): tensor.untyped_storage().nbytes() for tensor in tensors}


def _local(tensor: Tensor) -> Tensor:
    """Return the rank's shard of a sharded tensor; any other tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class StepMeter:
    """The peak of each training step in bytes, everything counted: weights, gradients, optimizer state and batch at its start."""

    def __init__(self, cell: Cell) -> None:
        self.peaks: list[int] = []
        # A dispatch mode would change compiled code, and does not see the storages that FSDP2 frees and fills again.
        self._profiled = cell.setting in (COMPILED, SHARDED)
        self._running: tuple[Any, Any, int] | None = None

    def start(self, model: nn.Module, batch: Any, optimizer: Any) -> None:
        state = [list(inner.values()) for inner in optimizer.state.values()] if optimizer is not None else []
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        held = _storages(([*model.parameters(), *model.buffers()], gradients, state, _plain(batch)))
        context = _tracked() if self._profiled else LiveBytes()
        self._running = (context, context.__enter__(), sum(held.values()))

    def stop(self) -> None:
        if self._running is None:
            return
        context, meter, base = self._running
        self._running = None
        context.__exit__(None, None, None)
        above = meter.peak if isinstance(meter, LiveBytes) else max(r.peak_bytes for r in meter.readings)
        self.peaks.append(base + above)


def _tracked() -> Any:
    from retape.torch.measure.memory_meter import track_memory

    return track_memory(torch.device("cpu"))


def _plain(batch: Any) -> Any:
    return dict(batch) if hasattr(batch, "items") else batch


# --- models and data ----------------------------------------------------------------------------------------------------------


def model_of(cell: Cell) -> nn.Module:
    """A Llama of four layers (compiled: two, which take half as long), whole or with an adapter, seeded."""
    model = _whole_or_adapted(cell)
    if cell.shares:
        compile_parts(model, dict(cell.shares))
    return model


def _whole_or_adapted(cell: Cell) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    layers = 2 if cell.setting == COMPILED else 4
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 256}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.LlamaConfig(**sizes, **heads, **special)
    if cell.trainer == "reward":
        config.num_labels = 1
        return _adapted(transformers.LlamaForSequenceClassification(config), cell, "SEQ_CLS")
    return _adapted(transformers.LlamaForCausalLM(config), cell, "CAUSAL_LM")


def compile_parts(model: nn.Module, shares: dict[str, float | None]) -> None:
    """Compile parts of a model with `torch.compile`, each by itself, and leave everything around them as it is.

    `shares` has their names, and what share of its tensors each saves (a setting of PyTorch's partitioner); None leaves one eager.
    """
    if not any(name.startswith(_WRAPPED) for name in shares):
        model.__class__ = _called_by_python(type(model), None)
    for name, share in shares.items():
        module = model.get_submodule(name.removeprefix(_WRAPPED))
        module.__class__ = _called_by_python(type(module), share)


@cache
def _called_by_python(kind: type[nn.Module], share: float | None) -> type[nn.Module]:
    """A class whose calls end a graph around them; in training they run compiled, if a share is given."""
    from retape.torch.compat.compiler_internals import inductor_saving

    def run(module: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        return kind.__call__(module, *arguments, **keywords)

    compiled = run if share is None else torch.compile(run, backend=inductor_saving(share))

    @torch.compiler.disable
    def call(self: nn.Module, *arguments: Any, **keywords: Any) -> Any:
        return (compiled if torch.is_grad_enabled() else run)(self, *arguments, **keywords)

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


def _adapted(model: nn.Module, cell: Cell, task: str) -> nn.Module:
    if cell.tuned == "full":
        return model
    import peft

    if cell.tuned == "lora":
        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", task_type=task))
    return peft.get_peft_model(model, peft.PrefixTuningConfig(num_virtual_tokens=4, task_type=task))


def lengths_of(cell: Cell, count: int) -> list[int]:
    """Lengths of rows: one for all, or drawn."""
    draw = random.Random(1)
    return [draw.randint(LENGTH // 3, LENGTH) if cell.setting == RAGGED else LENGTH for _ in range(count)]


def words(length: int, draw: random.Random) -> str:
    return " ".join(f"w{draw.randint(3, VOCABULARY - 1)}" for _ in range(length))


def token_rows(cell: Cell) -> list[dict[str, list[int]]]:
    draw = random.Random(2)
    rows = [[draw.randint(3, VOCABULARY - 1) for _ in range(length)] for length in lengths_of(cell, 80)]
    return [{"input_ids": row, "labels": row} for row in rows]


def padded(rows: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """A batch, padded to its longest row."""
    longest = max(len(row["input_ids"]) for row in rows)

    def stacked(name: str, filler: int) -> Tensor:
        return torch.tensor([row[name] + [filler] * (longest - len(row[name])) for row in rows])

    mask = torch.tensor([[1] * len(r["input_ids"]) + [0] * (longest - len(r["input_ids"])) for r in rows])
    return {"input_ids": stacked("input_ids", 0), "labels": stacked("labels", -100), "attention_mask": mask}


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<s>", "</s>", *(f"w{number}" for number in range(3, VOCABULARY))]
    made = Tokenizer(models.WordLevel({name: number for number, name in enumerate(names)}, unk_token="w3"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left"
    )


def state_of(model: nn.Module) -> set[str]:
    """Classes, fields, hooks and switches of a model's modules, which a fit must leave as they were."""
    found = set()
    for name, module in model.named_modules():
        kinds, switch = [kind.__name__ for kind in type(module).__mro__[:3]], vars(module).get("gradient_checkpointing")
        hooks = len(module._forward_hooks), len(module._forward_pre_hooks)
        found |= {f"{name}.{field}" for field in vars(module)} | {f"{name} {kinds} {hooks} {switch}"}
    return found


def weights_of(model: nn.Module) -> dict[str, bytes]:
    """The bits of the weights. Not as tensors: those of the first run would count in the budget of the second."""
    return {name: _local(parameter.detach()).numpy().tobytes() for name, parameter in model.named_parameters()}


# --- Hugging Face's Trainer and TRL's ------------------------------------------------------------------------------------------


def train_huggingface(cell: Cell, budget: float | None, folder: Path, **options: Any) -> Run:
    from retape.integrations.huggingface import FitCallback

    callback = None if budget is None else FitCallback(budget, progress=False, **options)
    trainer = _huggingface_trainer(cell, folder, [] if callback is None else [callback])
    run, meter = Run(callback=callback), StepMeter(cell)
    _meter_trainer(trainer, run, meter, callback)
    found = _StateAtBegin(cell)
    trainer.callback_handler.callbacks.insert(0, found)
    before = sorted(vars(trainer))
    trainer.train()
    run.peaks, run.weights = meter.peaks, weights_of(trainer.model)
    timed = ("runtime", "per_second", "step_time", "retape/", "total_flos")
    run.logs = [{k: v for k, v in each.items() if not any(t in k for t in timed)} for each in trainer.state.log_history]
    run.state = (state_of(trainer.model) ^ found.state) | (set(vars(trainer)) - set(before))
    return run


class _StateAtBegin(TrainerCallback):
    """The state of the model when training begins; parts compiled alone do not recompute by Transformers' switch, as under a plan.

    The compiler recomputes all of a checkpointed part, whatever share it was asked to save, and rounds other values.
    """

    def __init__(self, cell: Cell) -> None:
        self._cell = cell

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        switched = [m for m in kwargs["model"].modules() if vars(m).get("gradient_checkpointing") and self._cell.shares]
        for module in switched:
            module.gradient_checkpointing = False
        self.state = state_of(kwargs["model"])


def _meter_trainer(trainer: Any, run: Run, meter: StepMeter, callback: Any) -> None:
    compute, step = trainer.compute_loss, trainer.training_step

    def compute_loss(model: nn.Module, inputs: Any, *more: Any, **keywords: Any) -> Any:
        real = torch.is_grad_enabled() and model.training and (callback is None or callback.fitted is not None)
        if real:
            meter.start(trainer.model, inputs, trainer.optimizer)
        loss = compute(model, inputs, *more, **keywords)
        run.losses += [loss.item()] if real else []
        return loss

    def training_step(*arguments: Any, **keywords: Any) -> Any:
        try:
            return step(*arguments, **keywords)
        finally:
            meter.stop()

    trainer.compute_loss, trainer.training_step = compute_loss, training_step


def _settings(cell: Cell, folder: Path, is_plain: bool) -> dict[str, Any]:
    common = {
        "output_dir": str(folder),
        "max_steps": cell.steps,
        "per_device_train_batch_size": ROWS,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
    }
    if cell.setting == BF16:
        common |= {"bf16": True, "gradient_accumulation_steps": 2}
    if cell.setting == COMPILED:
        common |= {"torch_compile": True}
    if cell.setting == SHARDED:
        common |= {"fsdp": True, "fsdp_config": FSDP_CONFIG}
        if (
            cell.tuned == "prefix"
        ):  # TRL's bf16 with FSDP makes queries bf16, and leaves the prefix in float32: attention fails
            common |= {"bf16": False}
    if cell.tuned == "prefix" and is_plain:
        common |= {"gradient_checkpointing": False}  # Transformers' checkpointing leaves the prefix out, and fails
    return common


def _arguments(kind: Any, cell: Cell, folder: Path, callbacks: list[Any], **settings: Any) -> Any:
    made = kind(**_settings(cell, folder, not callbacks), **settings)
    if cell.setting == SHARDED:
        assert made.device.type == "cpu"  # asked for first: accelerate then sets up the processes
        _shard_on_a_cpu()
    return made


def _shard_on_a_cpu() -> None:
    """Let accelerate shard models with FSDP over processes on a CPU: it does so for kinds of GPUs alone."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def _huggingface_trainer(cell: Cell, folder: Path, callbacks: list[Any]) -> Any:
    import transformers

    if cell.trainer == "trainer":
        arguments = _arguments(transformers.TrainingArguments, cell, folder, callbacks)
        return transformers.Trainer(
            model_of(cell), arguments, train_dataset=token_rows(cell), data_collator=padded, callbacks=callbacks
        )
    return TRL[cell.trainer](cell, folder, callbacks)


def _sft(cell: Cell, folder: Path, callbacks: list[Any]) -> Any:
    import trl
    from datasets import Dataset

    draw = random.Random(2)
    rows = Dataset.from_list([{"text": words(length, draw)} for length in lengths_of(cell, 80)])
    return trl.SFTTrainer(
        model_of(cell),
        _arguments(trl.SFTConfig, cell, folder, callbacks),
        train_dataset=rows,
        processing_class=tokenizer(),
        callbacks=callbacks,
    )


def _pairs(cell: Cell) -> Any:
    from datasets import Dataset

    draw = random.Random(2)
    return Dataset.from_list(
        [
            {"prompt": words(8, draw), "chosen": " " + words(n - 8, draw), "rejected": " " + words(n - 8, draw)}
            for n in lengths_of(cell, 80)
        ]
    )


def _dpo(cell: Cell, folder: Path, callbacks: list[Any]) -> Any:
    import trl

    return trl.DPOTrainer(
        model_of(cell),
        ref_model=model_of(replace(cell, shares=())) if cell.tuned == "full" else None,
        args=_arguments(trl.DPOConfig, cell, folder, callbacks),
        train_dataset=_pairs(cell),
        processing_class=tokenizer(),
        callbacks=callbacks,
    )


def _reward(cell: Cell, folder: Path, callbacks: list[Any]) -> Any:
    import trl

    return trl.RewardTrainer(
        model_of(cell),
        args=_arguments(trl.RewardConfig, cell, folder, callbacks),
        train_dataset=_pairs(cell),
        processing_class=tokenizer(),
        callbacks=callbacks,
    )


def _grpo(cell: Cell, folder: Path, callbacks: list[Any]) -> Any:
    import trl
    from datasets import Dataset

    draw = random.Random(2)
    rows = Dataset.from_list([{"prompt": words(max(4, n // 3), draw)} for n in lengths_of(cell, 80)])

    def even_words(completions: list[str], **_: Any) -> list[float]:
        return [sum(int(word[1:]) % 2 == 0 for word in text.split() if word[0] == "w") / 8 for text in completions]

    settings = {"num_generations": 2, "max_completion_length": 16}
    return trl.GRPOTrainer(
        model_of(cell),
        even_words,
        args=_arguments(trl.GRPOConfig, cell, folder, callbacks, **settings),
        train_dataset=rows,
        processing_class=tokenizer(),
        callbacks=callbacks,
    )


TRL: dict[str, Callable[..., Any]] = {"sft": _sft, "dpo": _dpo, "grpo": _grpo, "reward": _reward}


# --- Lightning and Accelerate --------------------------------------------------------------------------------------------------


def train_lightning(cell: Cell, budget: float | None, folder: Path, **options: Any) -> Run:
    import lightning.pytorch as lightning
    from lightning.pytorch.strategies import ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    from retape.integrations.lightning import FitCallback

    callback = None if budget is None else FitCallback(budget, progress=False, **options)
    run, meter = Run(callback=callback), StepMeter(cell)
    lightning.seed_everything(3, verbose=False)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model_of(cell)

        def training_step(self, batch: Any, index: int) -> Tensor:
            real = callback is None or callback.fitted is not None
            if real:
                meter.start(self, batch, self.trainer.optimizers[0])
            loss = self.model(**batch).loss
            self.log("loss", loss)
            run.losses += [loss.item()] if real else []
            return loss

        def on_fit_start(self) -> None:
            run.state = state_of(self)

        def on_after_backward(self) -> None:
            meter.stop()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

        def configure_model(self) -> None:
            if cell.setting == SHARDED:
                for layer in [m for m in self.modules() if type(m).__name__ == LAYER]:
                    fully_shard(layer, mesh=self.device_mesh["data_parallel"])
                fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    module = Module()
    loader = torch.utils.data.DataLoader(token_rows(cell), ROWS, collate_fn=padded)
    strategies = {RANKS: "ddp", SHARDED: ModelParallelStrategy(process_group_backend="gloo")}
    trainer = lightning.Trainer(
        max_steps=cell.steps,
        accelerator="cpu",
        devices=2 if cell.in_two_processes else 1,
        strategy=strategies.get(cell.setting, "auto"),
        precision="bf16-mixed" if cell.setting == BF16 else "32-true",
        accumulate_grad_batches=cell.micro_steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[] if callback is None else [callback],
        default_root_dir=str(folder),
    )
    # With parts that are compiled alone nothing else is, as with a callback.
    trainer.fit(torch.compile(module) if cell.setting == COMPILED and not cell.shares else module, loader)
    run.peaks, run.weights = meter.peaks, weights_of(module)
    run.state ^= state_of(module)
    run.logs = [{"loss": float(trainer.callback_metrics["loss"])}]
    return run


def train_accelerate(cell: Cell, budget: float | None, folder: Path, **options: Any) -> Run:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import FullyShardedDataParallelPlugin, set_seed

    from retape.integrations.accelerate import FittedLoss

    AcceleratorState._reset_state(reset_partial_state=not cell.in_two_processes)
    sharding = None
    if cell.setting == SHARDED:
        PartialState(cpu=True)
        _shard_on_a_cpu()
        wrapped = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": [LAYER]}
        sharding = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False, **wrapped)
    set_seed(3)
    accelerator = Accelerator(
        cpu=True,
        fsdp_plugin=sharding,
        mixed_precision="bf16" if cell.setting == BF16 else "no",
        gradient_accumulation_steps=cell.micro_steps,
        dynamo_backend="inductor" if cell.setting == COMPILED else None,
    )
    plain = model_of(cell).train()
    loader = torch.utils.data.DataLoader(token_rows(cell), ROWS, collate_fn=padded)
    model, optimizer, loader = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3), loader)
    before = state_of(plain)
    run, meter = Run(), StepMeter(cell)

    def step(model: nn.Module, batch: Any) -> Tensor:
        if run.callback is None or run.callback.fitted is not None:
            meter.start(plain, batch, optimizer)
        return model(**batch).loss

    fitted = (
        None if budget is None else FittedLoss(model, optimizer, budget=budget, step=step, progress=False, **options)
    )
    run.callback = fitted
    with fitted or nullcontext():
        for number, batch in enumerate(_again(loader)):
            if number == cell.steps * cell.micro_steps:
                break
            with accelerator.accumulate(model):
                loss = step(model, batch) if fitted is None else fitted(batch)
                run.losses.append(loss.item())
                accelerator.backward(loss)
                meter.stop()
                optimizer.step()
                optimizer.zero_grad()
    run.peaks, run.weights = meter.peaks, weights_of(plain)
    run.state = state_of(plain) ^ before
    accelerator.free_memory()
    return run


def _again(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


# --- a cell ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """Outcome of a cell: "right", or what is wrong with it."""

    outcome: str
    budget_bytes: int = 0
    highest_peak_bytes: int = 0
    live_steps: int = 0
    slowdown: float = 0.0
    seconds: float = 0.0


def train(cell: Cell, budget: float | None, **options: Any) -> Run:
    """Train ten steps, inside a budget unless it is None."""
    torch._dynamo.reset()
    runs: dict[str, Callable[..., Run]] = {"lightning": train_lightning, "accelerate": train_accelerate}
    with tempfile.TemporaryDirectory() as folder:
        return runs.get(cell.trainer, train_huggingface)(cell, budget, Path(folder), **options)


def run_cell(cell: Cell) -> CellResult:
    """Train with and without retape, and compare."""
    from retape.errors import BudgetTooSmall

    is_compiled = cell.setting == COMPILED  # then the run without retape compiles the parts that the plan compiles
    plain = None if is_compiled else train(cell, None)
    budget: float = BUDGET
    if plain is not None and (cell.setting == RAGGED or cell.trainer == "grpo"):
        budget = _for_all_batches(cell, plain)
    for _ in range(MOST_REFUSALS):
        try:
            fitted = train(cell, budget)
            return compared(cell, plain or train(replace(cell, shares=_shares(fitted)), None), fitted)
        except BudgetTooSmall as error:
            budget = int(ABOVE_FLOOR * error.floor_bytes)
    return CellResult(outcome=f"no budget fits, {budget} neither")


def _for_all_batches(cell: Cell, plain: Run) -> int:
    """One budget for all batches, also where the first is small."""
    recomputes = cell.trainer in TRL and cell.tuned != "prefix"  # by TRL's default
    mostly_loss = cell.trainer in ("sft", "dpo", "grpo")
    share = 1.02 if recomputes else 0.97 if mostly_loss else 0.85
    return int(_most(max(plain.peaks)) * share)


def _most(value: int) -> int:
    """Return the largest of all processes' values: they are given one budget."""
    if not torch.distributed.is_initialized():
        return value
    shared = torch.tensor(value)
    torch.distributed.all_reduce(shared, torch.distributed.ReduceOp.MAX)
    return int(shared)


def compared(cell: Cell, plain: Run, fitted: Run) -> CellResult:
    """Compare two runs."""
    made, live = fitted.callback.fitted, fitted.callback.live
    count = cell.steps * cell.micro_steps
    wrong = [] if fitted.losses == plain.losses else [f"losses {fitted.losses} instead of {plain.losses}"]
    wrong += [] if len(fitted.losses) == count else [f"{len(fitted.losses)} losses instead of {count}"]
    names = [n for n in plain.weights if plain.weights[n] != fitted.weights[n]]
    wrong += [f"{len(names)} weights differ, first {names[0]}"] if names else []
    over = [(n, peak) for n, peak in enumerate(fitted.peaks) if peak > made.budget_bytes]
    wrong += [f"steps over the budget of {made.budget_bytes}: {over}"] if over else []
    if len(fitted.peaks) != len(fitted.losses):
        wrong.append(f"{len(fitted.peaks)} peaks")
    # TRL adds a hook in each step in which it turns its checkpointing off and on again; there is nothing to turn off here.
    wrong += [f"changed: {sorted(fitted.state - plain.state)[:3]}"] if fitted.state - plain.state else []
    wrong += [f"logs: {_differing(plain.logs, fitted.logs)}"] if plain.logs != fitted.logs else []
    return CellResult(
        outcome="; ".join(wrong) or "right",
        budget_bytes=made.budget_bytes,
        highest_peak_bytes=max(fitted.peaks, default=0),
        live_steps=0 if live is None else live.stats().steps,
        slowdown=made.promised.slowdown,
    )


def _shares(run: Run) -> tuple[tuple[str, float | None], ...]:
    return tuple((each.name, each.saved_share) for each in run.callback.fitted.record.assignment.choices)


def _differing(one: Any, other: Any) -> str:
    if isinstance(one, dict) and isinstance(other, dict):
        return "; ".join(
            f"{k}: {_differing(one.get(k), other.get(k))}" for k in {**one, **other} if one.get(k) != other.get(k)
        )[:500]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        return next(_differing(a, b) for a, b in zip(one, other, strict=True) if a != b)
    return "" if one == other else f"{other} instead of {one}"

"""The other ways to save memory, put on any model of the benchmark: PyTorch's own, and what else is installed.

Each is a `Way` that leaves the model as it was. What is not installed, or not for this device or model, is named with its reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import torch
from benchmarks.frontier.models import Case
from benchmarks.frontier.picture import Family
from benchmarks.frontier.ways import Skipped, Way, plain_way
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

BUDGETS = (1.0, 0.5, 0.2, 0.0)  # of activation_memory_budget
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def peers(case: Case, *, compiled: bool) -> Iterator[Way | Skipped]:
    """All of them, the cheap ones first."""
    yield plain_way(case)
    yield from _checkpoints(case)
    yield from _selective(case)
    yield from _remat(case)
    yield from _fused_losses(case)
    yield from _offloading(case)
    for budget in BUDGETS:
        name = f"compile, memory budget {budget:g}"
        yield compiled_blocks(case, name, budget) if compiled else Skipped(name=name, why="--no-compile")


def _imported(name: str) -> tuple[Any, str]:
    """A module, or why it is not there."""
    try:
        return import_module(name), ""
    except Exception as error:  # other libraries, at import: the remaining peers run
        package = name.partition(".")[0]
        missing = isinstance(error, ModuleNotFoundError) and error.name == package
        return None, f"{package} is not installed" if missing else f"{name} does not import: {error}"


# --- wrapping blocks ----------------------------------------------------------------------------------------------


@contextmanager
def wrapped(blocks: Sequence[nn.Module], wrap: Wrap) -> Iterator[None]:
    """Let `wrap(forward)` answer each block's forward."""
    for block in blocks:
        block.forward = wrap(block.forward)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def checkpointed(forward: Callable[..., Any], **extra: Any) -> Callable[..., Any]:
    return partial(checkpoint, forward, use_reentrant=False, **extra)


def _with_blocks(case: Case, name: str, blocks: Sequence[nn.Module], wrap: Wrap = checkpointed) -> Way:
    return Way(
        name=name,
        family=Family.EAGER,
        forward=plain_way(case).forward,
        on=lambda: wrapped(blocks, wrap),
        about={"blocks": f"{len(blocks)} of {len(case.blocks)}"},
    )


# --- torch.utils.checkpoint ---------------------------------------------------------------------------------------


def _checkpoints(case: Case) -> Iterator[Way | Skipped]:
    yield _with_blocks(case, "checkpoint every block", case.blocks)
    for share, said in ((0.5, "1/2"), (0.25, "1/4"), (0.75, "3/4")):
        yield _with_blocks(case, f"checkpoint {said} of the blocks", case.blocks[: round(share * len(case.blocks))])
    name = "checkpoint sqrt(n) segments"
    if case.row is None:
        yield Skipped(name=name, why="the blocks are no chain")
        return
    yield Way(name=name, family=Family.EAGER, forward=plain_way(case).forward, on=lambda: _segments(case), about={})


class Segment(nn.Module):
    """Several blocks behind one checkpoint."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, hidden: Tensor, *args: Any, **keywords: Any) -> Tensor:
        return checkpoint(self._run, hidden, *args, use_reentrant=False, **keywords)

    def _run(self, hidden: Tensor, *args: Any, **keywords: Any) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden, *args, **keywords)
        return hidden


@contextmanager
def _segments(case: Case) -> Iterator[None]:
    assert case.row is not None
    parent, name = case.row
    size = round(len(case.blocks) ** 0.5)
    groups = [case.blocks[start : start + size] for start in range(0, len(case.blocks), size)]
    whole = getattr(parent, name)
    setattr(parent, name, nn.ModuleList(Segment(group) for group in groups))
    try:
        yield
    finally:
        setattr(parent, name, whole)


# --- its selective mode -------------------------------------------------------------------------------------------


def _ops(*names: str) -> frozenset[Any]:
    """Those of aten's ops that this release has."""
    found = (getattr(torch.ops.aten, name, None) for name in names)
    return frozenset(op.default for op in found if op is not None)


# torchtitan's list, with what its ops are called on a CPU and where layers have a bias.
ATTENTION = _ops(
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_attention_math",
    "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_dot_product_flash_attention_for_cpu",
)
MATMULS = _ops("mm", "addmm", "linear", "_grouped_mm")
CONVOLUTIONS = _ops("convolution", "cudnn_convolution", "mkldnn_convolution")


def _policy(held: frozenset[Any], counted: frozenset[Any], every: int) -> tuple[Any, Any]:
    """torchtitan's rule: `held` are saved, and every n-th of `counted`, which begin anew in each block (0: none)."""
    counts = {False: 0, True: 0}

    def decide(context: Any, op: Any, *args: Any, **keywords: Any) -> CheckpointPolicy:
        if op in held:
            return CheckpointPolicy.MUST_SAVE
        if op in counted and every:
            counts[context.is_recompute] += 1
            if counts[context.is_recompute] % every == 0:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(decide)


def _selective(case: Case) -> Iterator[Way]:
    if any(isinstance(module, nn.Conv2d) for block in case.blocks for module in block.modules()):
        kinds = {"convolutions": (1, CONVOLUTIONS), "every 2nd convolution": (2, CONVOLUTIONS)}
    else:
        kinds = {
            "attention and every 2nd matmul": (2, MATMULS),
            "attention and every matmul": (1, MATMULS),
            "attention": (0, MATMULS),
        }
    for said, (every, counted) in kinds.items():
        context = partial(_policy, ATTENTION, counted, every)
        yield _with_blocks(case, f"selective: {said}", case.blocks, partial(checkpointed, context_fn=context))


# --- torch_remat --------------------------------------------------------------------------------------------------


def _remat(case: Case) -> Iterator[Way | Skipped]:
    name = "torch_remat every block"
    torch_remat, missing = _imported("torch_remat")
    if missing:
        yield Skipped(name=name, why=missing)
        return
    yield _with_blocks(case, name, case.blocks, torch_remat.checkpoint(region_name="block"))
    attention = [
        part for block in case.blocks for key, part in block.named_children() if "attn" in key or "attention" in key
    ]
    if not attention:
        return

    def saved(forward: Callable[..., Any]) -> Callable[..., Any]:
        inner = torch_remat.region(forward, "attention", recompute=False)

        def run(*args: Any, **keywords: Any) -> Any:
            outputs = inner(*args, **keywords)
            for output in outputs if isinstance(outputs, tuple) else (outputs,):
                if isinstance(output, Tensor):
                    torch_remat.recompute_needs_tensor(output)
            return outputs

        return run

    def on() -> AbstractContextManager[Any]:
        stack = ExitStack()
        stack.enter_context(wrapped(attention, saved))
        stack.enter_context(wrapped(case.blocks, torch_remat.checkpoint(region_name="block")))
        return stack

    yield Way(name="torch_remat, attention held", family=Family.EAGER, forward=plain_way(case).forward, on=on)


# --- the loss -----------------------------------------------------------------------------------------------------


def _fused_losses(case: Case) -> Iterator[Way | Skipped]:
    """The loss of a causal language model without whole logits, alone and with every block behind a checkpoint."""
    for name, loss, missing in (_torch_loss(), _liger_loss(case)):
        why = missing if case.causal else "the model has no head and loss of a causal language model"
        if why:
            yield Skipped(name=name, why=why)
            continue
        forward = partial(_causal_loss, case, loss)
        yield Way(name=name, family=Family.FUSED, forward=forward, same_kernels=False)
        yield Way(
            name=f"{name}, checkpoint every block",
            family=Family.FUSED,
            forward=forward,
            on=lambda: wrapped(case.blocks, checkpointed),
            same_kernels=False,
        )


def _causal_loss(case: Case, loss: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    model: Any = case.model
    labels = case.batch["labels"]
    hidden = model.base_model(input_ids=case.batch["input_ids"]).last_hidden_state[:, :-1].flatten(0, 1)
    return loss(hidden, model.get_output_embeddings().weight, labels[:, 1:].flatten())


def _torch_loss() -> tuple[str, Any, str]:
    own, options = getattr(F, "linear_cross_entropy", None), getattr(nn, "LinearCrossEntropyOptions", None)
    name = "torch's linear_cross_entropy"
    if own is None or options is None:
        return name, None, f"torch {torch.__version__} has none"
    return name, lambda hidden, weight, labels: own(hidden, weight, labels, options=options()), ""


def _liger_loss(case: Case) -> tuple[str, Any, str]:
    name = "Liger's fused loss"
    if case.device.type != "cuda":
        return name, None, "its kernels need a GPU"
    functional, missing = _imported("liger_kernel.transformers.functional")
    return name, functional and functional.liger_fused_linear_cross_entropy, missing


# --- to the host --------------------------------------------------------------------------------------------------


def _offloading(case: Case) -> Iterator[Way | Skipped]:
    step = plain_way(case).forward
    on_gpu = case.device.type == "cuda"
    if on_gpu:
        yield Way(name="save_on_cpu", family=Family.EAGER, forward=lambda: _under(_save_on_cpu(), step))
    else:
        yield Skipped(name="save_on_cpu", why="the model is on the host")
    name = "torchtune's offloading"
    torchtune, missing = _imported("torchtune.training")
    if missing or not on_gpu:
        yield Skipped(name=name, why=missing or "the model is on the host")
        return
    yield Way(
        name=name, family=Family.EAGER, forward=lambda: _under(torchtune.OffloadActivations(use_streams=True), step)
    )


def _save_on_cpu() -> AbstractContextManager[Any]:
    return torch.autograd.graph.save_on_cpu(pin_memory=True)


def _under(context: AbstractContextManager[Any], forward: Callable[[], Tensor]) -> Tensor:
    with context:
        return forward()


# --- torch.compile ------------------------------------------------------------------------------------------------


def compiled_blocks(case: Case, name: str, budget: float) -> Way:
    """Every block compiled by itself, with a budget for what its partitioner saves."""

    def backend(graph: Any, inputs: Any) -> Any:
        """One callable for each budget: code compiled twice through one backend is the first one's."""
        from torch._inductor.compile_fx import compile_fx

        with torch._functorch.config.patch(activation_memory_budget=budget):
            return compile_fx(graph, inputs)

    calls = [torch.compile(block._call_impl, backend=backend, dynamic=False) for block in case.blocks]

    @contextmanager
    def on() -> Iterator[None]:
        for block, call in zip(case.blocks, calls, strict=True):
            block._compiled_call_impl = call
        try:
            # All budgets are compiled from the same code, so that there are more graphs of it than usual.
            with torch._dynamo.config.patch(recompile_limit=64):
                yield
        finally:
            for block in case.blocks:
                block._compiled_call_impl = None

    return Way(
        name=name,
        family=Family.COMPILED,
        forward=plain_way(case).forward,
        on=on,
        same_kernels=False,
        about={"activation_memory_budget": budget},
    )

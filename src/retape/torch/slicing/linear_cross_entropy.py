"""Head and loss without whole logits: `linear_cross_entropy`.

The rows of `hidden` go through head, softmax and loss chunk by chunk. Where the loss is one number, the gradients of `hidden`
and `weight` are computed in the forward pass, while a chunk's logits are there: three matrix products, as many as plain
autograd needs. With `reduction="none"` the upstream gradient of each row must be known first, so the backward pass recomputes the
chunks. Softmax, loss and the sum of the weight's gradients are in float32 for 16-bit inputs.

On a GPU, plain cross entropy of a chunk may run as one compiled function, with two passes over the logits instead of four: a pass
costs a third of a matrix product. It is used only where the model is compiled as well (`may_compile`).

The matrix products themselves are in `linear_layers.py`; slices of any other function in `tile.py`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from retape.core.errors import InvalidInput, UnsupportedTransform
from retape.torch.compat import compiler_internals, internals
from retape.torch.slicing.linear_layers import Products, add_product, products_of, wide
from retape.torch.slicing.rowwise import TUNING

Slopes = tuple[Tensor, Tensor]  # the losses of rows, and their derivatives by the logits

_LOG = logging.getLogger("retape")


class Reduction(Enum):
    """The result: the losses of the rows, their mean or their sum."""

    NONE = "none"
    MEAN = "mean"
    SUM = "sum"

    @classmethod
    def of(cls, value: Reduction | str) -> Reduction:
        try:
            return cls(value)
        except ValueError:
            raise InvalidInput(f"reduction={value!r} is not known; give 'mean', 'sum' or 'none'.") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loss:
    """The options of the loss, and the dtype in which the head multiplies."""

    ignore_index: int
    label_smoothing: float
    z_loss: float
    soft_cap: float | None
    logit_scale: float
    reduction: Reduction
    chunk_rows: int | None
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if not 0.0 <= self.label_smoothing <= 1.0:
            raise InvalidInput(f"label_smoothing={self.label_smoothing!r}; give a number from 0.0 to 1.0.")
        if self.soft_cap is not None and not self.soft_cap > 0:
            raise InvalidInput(f"soft_cap={self.soft_cap!r}; give a number above 0, or None for no cap.")
        if self.chunk_rows is not None and (type(self.chunk_rows) is not int or self.chunk_rows < 1):
            raise InvalidInput(f"chunk_rows={self.chunk_rows!r}; give a whole number >= 1, or None to choose by bytes.")


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    logit_scale: float = 1.0,
    reduction: str | Reduction = "mean",
    shift: bool = False,
    chunk_rows: int | None = None,
) -> Tensor:
    """Return `cross_entropy(linear(hidden, weight, bias), labels)` without ever having the whole logits in memory.

    `hidden` is (..., features), `weight` (classes, features), `labels` (...). The logits are multiplied with `logit_scale`,
    then capped (`soft_cap * tanh(logits / soft_cap)`); `z_loss` times the square of their log-sum-exp is added to each row's
    loss. With `shift` position i predicts label i + 1. The loss of 16-bit inputs is float32.
    """
    options = {
        "ignore_index": ignore_index,
        "label_smoothing": label_smoothing,
        "z_loss": z_loss,
        "soft_cap": soft_cap,
        "logit_scale": logit_scale,
        "reduction": reduction,
        "chunk_rows": chunk_rows,
    }
    # A compiled caller breaks its graph here: what the compiler makes of head and loss has whole logits.
    run = torch.compiler.disable(_run) if torch.compiler.is_compiling() else _run
    return run((hidden, weight, bias, labels, class_weight), shift, options)


def _run(tensors: tuple[Any, ...], shift: bool, options: dict[str, Any]) -> Tensor:
    _refuse_transforms()
    hidden, weight, bias, labels, class_weight = tensors
    _check_shapes(hidden, weight, labels, bias, class_weight)
    options["reduction"] = Reduction.of(options["reduction"])
    loss = _Loss(**options, dtype=_dtype_of(hidden, weight, bias))
    if shift:
        labels = _shifted(labels, loss.ignore_index)
    rows, flat = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1).long()
    _check_labels(flat, loss, len(weight))
    found: Tensor
    if loss.reduction is not Reduction.NONE:
        found = _Reduced.apply(loss, torch.is_grad_enabled(), rows, weight, bias, flat, class_weight)
        return found
    found = _PerRow.apply(loss, rows, weight, bias, flat, class_weight).reshape(labels.shape)
    return found[..., :-1] if shift else found


def _shifted(labels: Tensor, ignore_index: int) -> Tensor:
    """Return labels one place earlier. The last place is ignored rather than cut off, which would copy `hidden`."""
    if labels.dim() == 0 or labels.shape[-1] < 2:
        raise InvalidInput(f"shift=True needs two labels in a row or more, and labels are {tuple(labels.shape)}.")
    return torch.nn.functional.pad(labels[..., 1:], (0, 1), value=ignore_index)


# --- one chunk ------------------------------------------------------------------------------------------------------


class _Head:
    """A head and the loss behind it, on one chunk of rows at a time."""

    def __init__(
        self, loss: _Loss, weight: Tensor, bias: Tensor | None, labels: Tensor, class_weight: Tensor | None
    ) -> None:
        self.loss = loss
        self.products: Products = products_of(weight.to(loss.dtype))
        self.wide = wide(loss.dtype)
        self._bias = None if bias is None else bias.to(loss.dtype).to(self.wide)
        self._class_weight = None if class_weight is None else class_weight.to(self.wide)
        self.valid = labels != loss.ignore_index
        self._labels = labels.where(self.valid, 0).unsqueeze(1)
        self._share = 1.0 - loss.label_smoothing  # of the labelled class
        self._rest = loss.label_smoothing / max(1, len(weight))  # of every class

    def divisor(self) -> Tensor | None:
        """Return the number that the sum of the losses is divided by."""
        if self.loss.reduction is not Reduction.MEAN:
            return None
        if self._class_weight is None:
            return self.valid.sum().to(self.wide)
        return (self._class_weight[self._labels.squeeze(1)] * self.valid).sum()

    def total(self, losses: Tensor, divisor: Tensor | None) -> Tensor:
        """Return the sum of the losses, or their mean, added up in float64: there is one number per row."""
        exact = torch.float64 if losses.device.type in ("cpu", "cuda") else self.wide
        total = losses.sum(dtype=exact)
        return (total if divisor is None else total / divisor).to(self.wide)

    def run(self, rows: Tensor, part: slice, *, slope: bool) -> tuple[Tensor, Tensor | None]:
        """Return the losses of some rows; with `slope` also their derivatives by the logits before scale and cap.

        The factor `logit_scale` is left out of the slope. Ignored rows have a loss of 0, and a slope that must be multiplied by 0.
        """
        loss, labels = self.loss, self._labels[part]
        logits = self._logits(rows)
        found = _compiled_loss(logits, labels, self.products.slope_dtype) if slope and self._is_plain else None
        if found is not None:
            return found[0].where(self.valid[part], 0.0), found[1]
        bent = None if loss.soft_cap is None else logits.div_(loss.soft_cap).tanh_()
        if bent is not None and loss.soft_cap is not None:
            logits = bent * loss.soft_cap
        at_label = logits.gather(1, labels).squeeze(1)
        chances = torch.log_softmax(logits, 1)
        del logits
        picked = chances.gather(1, labels).squeeze(1)
        weights = None if self._class_weight is None else self._class_weight[labels.squeeze(1)]
        losses = picked * -self._share if weights is None else picked * weights * -self._share
        if self._rest:
            losses -= self._rest * (chances.sum(1) if self._class_weight is None else chances @ self._class_weight)
        log_sum = at_label - picked
        if loss.z_loss:
            losses += loss.z_loss * log_sum.square()
        losses = losses.where(self.valid[part], 0.0)
        if not slope:
            return losses, None
        return losses, self._slope(chances, labels, weights, log_sum, bent)

    @property
    def _is_plain(self) -> bool:
        """True if it is plain cross entropy, and nothing else uses the slopes of a chunk before they are rounded."""
        loss = self.loss
        extras = (
            loss.label_smoothing,
            loss.z_loss,
            loss.soft_cap,
            self._class_weight is not None,
            self._bias is not None,
        )
        return not any(extras) and loss.reduction is not Reduction.NONE

    def _logits(self, rows: Tensor) -> Tensor:
        logits = self.products.logits(rows)
        if self._bias is not None:
            logits += self._bias
        if self.loss.logit_scale != 1.0:
            logits *= self.loss.logit_scale
        return logits

    def _slope(
        self, chances: Tensor, labels: Tensor, weights: Tensor | None, log_sum: Tensor, bent: Tensor | None
    ) -> Tensor:
        """Return the slope, in the memory of `chances`, which are logarithms."""
        slope, loss = chances.exp_(), self.loss
        if weights is not None or loss.z_loss:
            ones = torch.ones_like(log_sum) if weights is None else weights
            total = float(slope.shape[1]) if self._class_weight is None else self._class_weight.sum()
            factor = ones * self._share + self._rest * total + 2 * loss.z_loss * log_sum
            slope *= factor.unsqueeze(1)
        if self._rest:
            slope -= self._rest if self._class_weight is None else self._rest * self._class_weight
        target = torch.ones_like(log_sum) if weights is None else weights
        slope.scatter_add_(1, labels, target.mul(-self._share).unsqueeze(1))
        if bent is not None:
            slope *= bent.square_().neg_().add_(1.0)
        return slope


class _Gradients:
    """The sums of a head's gradients over chunks; None for those that are not needed."""

    def __init__(self, rows: Tensor, weight: Tensor, head: _Head, wanted: Sequence[bool]) -> None:
        self._head = head
        self.rows = torch.empty_like(rows, dtype=head.loss.dtype) if wanted[0] else None
        self.weight = torch.zeros_like(weight, dtype=head.wide) if wanted[1] else None
        self.bias = weight.new_zeros(len(weight), dtype=head.wide) if wanted[2] else None

    def add(self, rows: Tensor, part: slice, slope: Tensor, factor: Tensor, early: Tensor | None) -> None:
        """Add one chunk. Row i counts `factor[i]` times; `early` multiplies the gradients of rows before they are rounded."""
        products = self._head.products
        if self.bias is not None:
            self.bias += factor @ slope
        slope = slope.to(products.slope_dtype)
        if self.rows is not None:
            gradient = products.rows_gradient(slope)
            gradient *= (factor if early is None else factor * early).unsqueeze(1)
            self.rows[part] = gradient
        if self.weight is not None:
            add_product(self.weight, slope, (rows * factor.unsqueeze(1).to(rows.dtype)).to(slope.dtype))


def usual_chunk_bytes(device: torch.device, classes: int, features: int, *, weight_gradient: bool) -> int:
    """Return the default bytes of a chunk's buffers: 512 MiB on a GPU and 64 MiB elsewhere.

    Or as much as the sum of the weight's gradients, where that is more: every chunk reads and writes all of that sum, which
    must not cost more than the chunk itself.
    """
    at_least = TUNING.cuda_chunk_bytes if device.type == "cuda" else TUNING.cpu_chunk_bytes
    return max(at_least, classes * features * 4 if weight_gradient else 0)


def rows_within(chunk_bytes: int, classes: int, bytes_per_logit: int = TUNING.bytes_per_logit) -> int:
    """Return how many rows of logits have buffers of `chunk_bytes`."""
    return max(1, chunk_bytes // (bytes_per_logit * max(1, classes)))


def chunks_of(rows: Tensor, classes: int, chunk_rows: int | None, *, weight_gradient: bool) -> Iterator[slice]:
    """Return chunks of equal length whose buffers fit the chunk's bytes."""
    count, features = rows.shape
    most = chunk_rows
    if most is None:
        usual = usual_chunk_bytes(rows.device, classes, features, weight_gradient=weight_gradient)
        most = rows_within(usual, classes)
    pieces = max(1, -(-count // most))
    step = max(1, -(-count // pieces))
    for start in range(0, count, step):
        yield slice(start, min(start + step, count))


# --- the compiled loss of a chunk -----------------------------------------------------------------------------------


class LossCompiler:
    """The plain loss of a chunk, compiled when first used on one of `device_types`. After a failure it stays eager."""

    def __init__(
        self, compile: Callable[..., Callable[..., Slopes]] = torch.compile, device_types: tuple[str, ...] = ("cuda",)
    ) -> None:
        self._compile, self._compiles_on = compile, device_types
        self._compiled: Callable[..., Slopes] | None = None
        self.refused: str | None = None  # the compiler's reason; then it is not asked again

    def runs_on(self, device: torch.device) -> bool:
        return device.type in self._compiles_on and self.refused is None

    def loss(self, logits: Tensor, labels: Tensor, narrow: torch.dtype) -> Slopes | None:
        """Return `losses_and_slopes` from the compiled function; None where it does not run or does not compile."""
        if not self.runs_on(logits.device):
            return None
        if self._compiled is None:
            self._compiled = self._compile(losses_and_slopes)
        try:
            # Too many compilations are an error here: eager, it would take more memory than was planned.
            with compiler_internals.many_compilations():
                return self._compiled(logits, labels, narrow)
        except compiler_internals.compiler_errors() as error:
            self.refused = compiler_internals.reason_of(error)
            _LOG.warning("retape: the loss does not compile and stays eager: %s", self.refused)
            return None


_COMPILER = LossCompiler()
_CURRENT: ContextVar[LossCompiler | None] = ContextVar("retape_loss_compiler", default=None)


@contextmanager
def may_compile(allowed: bool, compiler: LossCompiler = _COMPILER) -> Iterator[None]:
    """Allow the plain loss of a chunk to run compiled inside, or forbid it."""
    token = _CURRENT.set(compiler if allowed else None)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def loss_is_compiled(device: torch.device) -> bool:
    """True if the plain loss of a chunk on the device runs compiled."""
    compiler = _CURRENT.get()
    return compiler is not None and compiler.runs_on(device)


def _compiled_loss(logits: Tensor, labels: Tensor, narrow: torch.dtype) -> Slopes | None:
    compiler = _CURRENT.get()
    return None if compiler is None else compiler.loss(logits, labels, narrow)


def losses_and_slopes(logits: Tensor, labels: Tensor, narrow: torch.dtype) -> Slopes:
    """Return the cross entropy of each row of logits with its label (a column), and its derivative by the logits."""
    below = logits - logits.amax(1, keepdim=True)  # subtracting the maximum first keeps the differences exact
    log_sum = below.exp().sum(1, keepdim=True).log()
    losses = (log_sum - below.gather(1, labels)).squeeze(1)
    classes = torch.arange(logits.shape[1], device=logits.device)
    return losses, ((below - log_sum).exp() - (classes == labels).to(logits.dtype)).to(narrow)


# --- autograd -------------------------------------------------------------------------------------------------------


class _Reduced(torch.autograd.Function):
    """Mean or sum: the forward pass computes the gradients, and the backward pass scales them."""

    @staticmethod
    def forward(ctx: Any, loss: _Loss, grads: bool, *tensors: Any) -> Tensor:
        rows: Tensor
        rows, weight, bias, labels, class_weight = tensors
        _, _, *wanted, _, _ = ctx.needs_input_grad if grads else (False,) * 7
        ctx.dtypes = (rows.dtype, weight.dtype, None if bias is None else bias.dtype)
        with torch.autocast(rows.device.type, enabled=False):
            head = _Head(loss, weight, bias, labels, class_weight)
            divisor = head.divisor()
            scale = _scale(divisor, head)
            # Numbers of float16 would vanish in the division, so there it waits for the upstream gradient.
            early = None if loss.dtype is torch.float16 else scale
            found = _Gradients(rows, weight, head, wanted)
            losses = rows.new_empty(len(rows), dtype=head.wide)
            valid = head.valid.to(head.wide)
            for part in chunks_of(rows, len(weight), loss.chunk_rows, weight_gradient=wanted[1]):
                chunk = rows[part].to(loss.dtype)
                losses[part], slope = head.run(chunk, part, slope=any(wanted))
                if slope is not None:
                    found.add(chunk, part, slope, valid[part], early)
                    del slope  # so that it is freed before the next chunk
        ctx.early = early is not None
        ctx.save_for_backward(found.rows, found.weight, found.bias, scale)
        return head.total(losses, divisor)

    @staticmethod
    @compiler_internals.left_alone
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_double_backward()
        rows, weight, bias, scale = ctx.saved_tensors
        late = upstream * scale
        with torch.autocast(upstream.device.type, enabled=False):
            return (
                None,
                None,
                _scaled(rows, upstream if ctx.early else late, ctx.dtypes[0]),
                _scaled(weight, late, ctx.dtypes[1]),
                _scaled(bias, late, ctx.dtypes[2]),
                None,
                None,
            )


class _PerRow(torch.autograd.Function):
    """No reduction: the backward pass recomputes every chunk, once the upstream gradient of each row is known."""

    @staticmethod
    def forward(ctx: Any, loss: _Loss, *tensors: Any) -> Tensor:
        rows: Tensor
        rows, weight, bias, labels, class_weight = tensors
        ctx.loss = loss
        ctx.save_for_backward(*tensors)
        with torch.autocast(rows.device.type, enabled=False):
            head = _Head(loss, weight, bias, labels, class_weight)
            losses = rows.new_empty(len(rows), dtype=head.wide)
            for part in chunks_of(rows, len(weight), loss.chunk_rows, weight_gradient=False):
                losses[part], _ = head.run(rows[part].to(loss.dtype), part, slope=False)
        return losses

    @staticmethod
    @compiler_internals.left_alone
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        _refuse_double_backward()
        rows, weight, bias, labels, class_weight = ctx.saved_tensors
        loss, (_, *wanted, _, _) = ctx.loss, ctx.needs_input_grad
        with torch.autocast(rows.device.type, enabled=False):
            head = _Head(loss, weight, bias, labels, class_weight)
            found = _Gradients(rows, weight, head, wanted)
            worth = upstream.to(head.wide) * loss.logit_scale * head.valid
            ones = torch.ones_like(worth)
            for part in chunks_of(rows, len(weight), loss.chunk_rows, weight_gradient=wanted[1]):
                chunk = rows[part].to(loss.dtype)
                _, slope = head.run(chunk, part, slope=True)
                assert slope is not None
                slope *= worth[part].unsqueeze(1)
                found.add(chunk, part, slope, ones[part], None)
                del slope
            pairs = ((found.rows, rows), (found.weight, weight), (found.bias, bias))
            return (None, *[None if grad is None else grad.to(of.dtype) for grad, of in pairs], None, None)


def _scale(divisor: Tensor | None, head: _Head) -> Tensor:
    """Return the factor of all gradients: 0 if no row counts, as in torch, whose loss is NaN then."""
    one = head.valid.new_full((), head.loss.logit_scale, dtype=head.wide)
    return one if divisor is None else (one / divisor).where(head.valid.any(), 0.0)


def _scaled(gradient: Tensor | None, factor: Tensor, dtype: torch.dtype | None) -> Tensor | None:
    if gradient is None:
        return None
    scaled = torch.empty_like(gradient, dtype=dtype)
    return torch.mul(gradient, factor.to(wide(gradient.dtype)), out=scaled)


# --- what is refused ------------------------------------------------------------------------------------------------


def _refuse_transforms() -> None:
    transform = internals.functorch_transform()
    if transform is None and internals.forward_mode_active():
        transform = "forward-mode differentiation"
    if transform is not None:
        raise UnsupportedTransform(
            f"linear_cross_entropy was called under {transform}, which cannot see into its chunks. Differentiate with torch.autograd, "
            "or use torch.nn.functional.linear and cross_entropy there."
        )


def _refuse_double_backward() -> None:
    if torch.is_grad_enabled():
        raise UnsupportedTransform(
            "linear_cross_entropy was asked for gradients that can be differentiated again (create_graph=True); its own are computed "
            "without a graph. Use torch.nn.functional.linear and cross_entropy for second derivatives."
        )


def _dtype_of(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> torch.dtype:
    """The dtype in which `linear` would multiply: autocast's, or that of its operands."""
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and hidden.dtype is not torch.float64:
        return torch.get_autocast_dtype(kind)
    wrong = [(n, t.dtype) for n, t in (("weight", weight), ("bias", bias)) if t is not None and t.dtype != hidden.dtype]
    if wrong:
        raise InvalidInput(
            f"hidden is {hidden.dtype} and {wrong[0][0]} is {wrong[0][1]}; give both one dtype, or call it under torch.autocast."
        )
    return hidden.dtype


def _check_shapes(
    hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, class_weight: Tensor | None
) -> None:
    if not hidden.is_floating_point() or hidden.dim() == 0:
        raise InvalidInput(
            f"hidden is {hidden.dtype} of shape {tuple(hidden.shape)}; give floating-point (..., features)."
        )
    if weight.dim() != 2 or weight.shape[1] != hidden.shape[-1] or len(weight) == 0:
        raise InvalidInput(
            f"weight has shape {tuple(weight.shape)} and hidden {tuple(hidden.shape)}; weight must be (classes, {hidden.shape[-1]})."
        )
    if labels.shape != hidden.shape[:-1]:
        raise InvalidInput(
            f"labels have shape {tuple(labels.shape)} and hidden {tuple(hidden.shape)}; give a label for each row: "
            f"{tuple(hidden.shape[:-1])}."
        )
    if labels.is_floating_point() or labels.is_complex() or labels.dtype is torch.bool:
        raise InvalidInput(
            f"labels are {labels.dtype}; give class numbers as integers (probabilities are not supported)."
        )
    for name, tensor in (("bias", bias), ("class_weight", class_weight)):
        if tensor is not None and tensor.shape != (len(weight),):
            raise InvalidInput(
                f"{name} has shape {tuple(tensor.shape)}; give one number for each of {len(weight)} classes."
            )
    if class_weight is not None and class_weight.requires_grad:
        raise InvalidInput("class_weight requires a gradient, which is not computed; give class_weight.detach().")


def _check_labels(labels: Tensor, loss: _Loss, classes: int) -> None:
    """Raise if a label is out of range; on the CPU alone, because reading labels would wait for a GPU, whose kernels check."""
    if labels.device.type != "cpu" or labels.numel() == 0:
        return
    wrong = labels[((labels < 0) | (labels >= classes)) & (labels != loss.ignore_index)]
    if wrong.numel():
        raise InvalidInput(
            f"labels hold {int(wrong[0])}, and there are {classes} classes. Give numbers from 0 to {classes - 1}, or "
            f"ignore_index={loss.ignore_index} for rows that do not count."
        )

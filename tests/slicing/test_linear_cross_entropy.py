"""Head and loss in chunks: the same loss and gradients as `cross_entropy(linear(...))`, and never a tensor of rows x classes."""

import itertools

import pytest
import torch
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import retape
from retape.errors import InvalidInput, UnsupportedTransform
from retape.torch.slicing.linear_cross_entropy import chunks_of
from retape.torch.slicing.rowwise import TUNING
from support.ledger import Ledger

ROWS, FEATURES, CLASSES = (2, 7), 5, 11


def plainly(hidden, weight, labels, *, bias=None, class_weight=None, ignore_index=-100, label_smoothing=0.0, z_loss=0.0,
            soft_cap=None, logit_scale=1.0, reduction="mean"):  # fmt: skip
    """What `linear_cross_entropy` means, with whole logits."""
    logits = F.linear(hidden, weight, bias) * logit_scale
    logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    flat, target = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    each = F.cross_entropy(flat, target, class_weight, reduction="none", **options)
    loss = each if reduction == "none" else F.cross_entropy(flat, target, class_weight, reduction=reduction, **options)
    if not z_loss:
        return loss.reshape(labels.shape) if reduction == "none" else loss
    counted = target != ignore_index
    squares = z_loss * flat.logsumexp(1).square() * counted
    if reduction == "none":
        return (loss + squares).reshape(labels.shape)
    if reduction == "sum":
        return loss + squares.sum()
    worth = counted if class_weight is None else class_weight[target.where(counted, 0)] * counted
    return loss + squares.sum() / worth.sum()


def case(dtype=torch.float64, rows=ROWS, ignored=3, number=0, bias=True):
    torch.manual_seed(number)
    hidden = torch.randn(*rows, FEATURES, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(CLASSES, FEATURES, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(0, CLASSES, rows)
    labels.view(-1)[:ignored] = -100
    return hidden, weight, labels, torch.randn(CLASSES).to(dtype).requires_grad_() if bias else None


def gradients(loss, tensors, number=1):
    """Gradients for an upstream gradient that is not 1."""
    torch.manual_seed(number)
    return torch.autograd.grad(loss, [tensor for tensor in tensors if tensor is not None], torch.rand_like(loss) + 0.5)


# --- the same numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk_rows", [1, 4, 100])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_every_option(reduction, chunk_rows):
    for smoothing, z_loss, cap, scale, bias, weighted in itertools.product(
        (0.0, 0.1), (0.0, 0.01), (None, 3.0), (1.0, 0.5), (False, True), (False, True)
    ):
        hidden, weight, labels, offsets = case(bias=bias)
        options = {
            "bias": offsets,
            "class_weight": torch.rand(CLASSES, dtype=torch.float64) if weighted else None,
            "label_smoothing": smoothing,
            "z_loss": z_loss,
            "soft_cap": cap,
            "logit_scale": scale,
            "reduction": reduction,
        }
        wanted = plainly(hidden, weight, labels, **options)
        loss = retape.linear_cross_entropy(hidden, weight, labels, **options, chunk_rows=chunk_rows)
        assert loss.shape == wanted.shape
        torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=1e-12)
        tensors = (hidden, weight, offsets)
        torch.testing.assert_close(gradients(loss, tensors), gradients(wanted, tensors), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_shift_predicts_the_next_label(reduction):
    hidden, weight, labels, _ = case(bias=False)
    wanted = plainly(hidden[..., :-1, :], weight, labels[..., 1:], reduction=reduction)
    loss = retape.linear_cross_entropy(hidden, weight, labels, shift=True, reduction=reduction, chunk_rows=3)
    assert loss.shape == wanted.shape
    torch.testing.assert_close(loss, wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients(loss, (hidden, weight)), gradients(wanted, (hidden, weight)))


@pytest.mark.parametrize("rows", [(), (1,), (6,), (2, 3, 4), (0,)])
def test_any_leading_dims(rows):
    hidden, weight, labels, bias = case(rows=rows, ignored=0)
    wanted = plainly(hidden, weight, labels, bias=bias, reduction="sum")
    loss = retape.linear_cross_entropy(hidden, weight, labels, bias=bias, reduction="sum")
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(gradients(loss, (hidden, weight, bias)), gradients(wanted, (hidden, weight, bias)))


@pytest.mark.parametrize("ignore_index", [-100, -1, 4])
def test_another_ignore_index(ignore_index):
    hidden, weight, labels, _ = case(ignored=0, bias=False)
    labels[0, :3] = ignore_index
    wanted = plainly(hidden, weight, labels, ignore_index=ignore_index)
    loss = retape.linear_cross_entropy(hidden, weight, labels, ignore_index=ignore_index)
    torch.testing.assert_close(loss, wanted)
    torch.testing.assert_close(gradients(loss, (hidden, weight)), gradients(wanted, (hidden, weight)))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_every_row_ignored(reduction, smoothing):
    hidden, weight, labels, _ = case(ignored=14, bias=False)
    options = {"reduction": reduction, "label_smoothing": smoothing}
    wanted = plainly(hidden, weight, labels, **options)
    loss = retape.linear_cross_entropy(hidden, weight, labels, **options)
    torch.testing.assert_close(loss, wanted, equal_nan=True)
    torch.testing.assert_close(gradients(loss, (hidden, weight)), gradients(wanted, (hidden, weight)))


def test_frozen_tensors_and_no_grad():
    hidden, weight, labels, _ = case(bias=False)
    wanted = plainly(hidden, weight, labels)
    alone = torch.autograd.grad(retape.linear_cross_entropy(hidden, weight.detach(), labels), hidden)
    torch.testing.assert_close(alone, torch.autograd.grad(wanted, hidden, retain_graph=True))
    alone = torch.autograd.grad(retape.linear_cross_entropy(hidden.detach(), weight, labels), weight)
    torch.testing.assert_close(alone, torch.autograd.grad(wanted, weight))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            loss = retape.linear_cross_entropy(hidden, weight, labels)
        assert not loss.requires_grad
        torch.testing.assert_close(loss, wanted.detach())


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_two_backward_passes(reduction):
    hidden, weight, labels, _ = case(bias=False)
    loss = retape.linear_cross_entropy(hidden, weight, labels, reduction=reduction).sum()
    first = torch.autograd.grad(loss, [hidden, weight], retain_graph=True)
    assert all(map(torch.equal, torch.autograd.grad(loss, [hidden, weight]), first))


def test_chunks_change_nothing_but_rounding_and_are_deterministic():
    hidden, weight, labels, _ = case(torch.float32, bias=False)
    run = lambda rows: gradients(retape.linear_cross_entropy(hidden, weight, labels, chunk_rows=rows), (hidden, weight))  # noqa: E731
    assert all(map(torch.equal, run(3), run(3)))
    torch.testing.assert_close(run(3), run(14))


# --- precision ------------------------------------------------------------------------------------------------------


def errors(function, dtype, number, reduction):
    """How far loss, gradient of hidden and gradient of weight are from float64's, for `function` and for whole logits."""
    torch.manual_seed(number)
    hidden = torch.randn(256, 48).to(dtype).requires_grad_()
    weight = (torch.randn(160, 48) / 4).to(dtype).requires_grad_()
    labels = torch.randint(0, 160, (256,))
    labels[::9] = -100
    upstream = torch.rand(256) if reduction == "none" else torch.tensor(3.0)

    def run(function, hidden, weight):
        loss = function(hidden, weight, labels, reduction=reduction)
        found = torch.autograd.grad(loss, [hidden, weight], upstream.to(loss.dtype))
        return [loss.detach(), *found]

    exact = run(plainly, hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_())
    ours, others = run(function, hidden, weight), run(plainly, hidden, weight)
    assert [tensor.dtype for tensor in ours] == [torch.float32, dtype, dtype]
    return [
        [float((found.double() - truth).norm()) for found, truth in zip(way, exact, strict=True)]
        for way in (ours, others)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_error_against_float64_is_no_larger_than_plain(dtype, reduction):
    chunked = lambda *a, **k: retape.linear_cross_entropy(*a, **k, chunk_rows=32)  # noqa: E731
    runs = [errors(chunked, dtype, number, reduction) for number in range(12)]
    for ours, others in runs:
        for mine, other in zip(ours[1:], others[1:], strict=True):
            assert mine <= 1.1 * other
    # A loss is one number, and plain's may be right by chance: over all seeds together.
    mine, other = (sum(run[way][0] ** 2 for run in runs) ** 0.5 for way in (0, 1))
    assert mine <= 1.1 * other


def test_small_gradients_of_float16_wait_for_the_loss_scale():
    torch.manual_seed(0)
    hidden = torch.randn(4096, 4).half().requires_grad_()
    weight = (torch.randn(8, 4) * 1e-3).half().requires_grad_()
    labels = torch.randint(0, 8, (4096,))
    scale = 2.0**14
    loss = retape.linear_cross_entropy(hidden, weight, labels, chunk_rows=512)
    found = torch.autograd.grad(loss * scale, hidden)[0].double()
    truth = torch.autograd.grad(plainly(hidden.double(), weight.double(), labels) * scale, hidden)[0].double()
    assert float((found - truth).norm()) <= 2e-3 * float(truth.norm())


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
def test_autocast_multiplies_as_linear_does(weight_dtype):
    hidden, weight, labels, _ = case(torch.float32, bias=False)
    weight = weight.detach().to(weight_dtype).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = retape.linear_cross_entropy(hidden, weight, labels, chunk_rows=4)
        wanted = plainly(hidden, weight, labels)
    found = torch.autograd.grad(loss, [hidden, weight])
    assert [tensor.dtype for tensor in found] == [torch.float32, weight_dtype]
    half = retape.linear_cross_entropy(hidden.bfloat16(), weight.bfloat16(), labels, chunk_rows=4)
    assert torch.equal(loss, half)
    torch.testing.assert_close(loss, wanted, rtol=1e-2, atol=1e-2)


# --- memory ---------------------------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """The most elements that any tensor has that an op returns."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.elements = max(self.elements, leaf.numel())
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_no_tensor_holds_the_logits_of_more_than_a_chunk(dtype, reduction):
    rows, features, classes, chunk = 512, 8, 400, 16
    hidden = torch.randn(rows, features, dtype=dtype, requires_grad=True)
    weight = torch.randn(classes, features, dtype=dtype, requires_grad=True)
    labels = torch.randint(0, classes, (rows,))

    def step(function, **options):
        function(hidden, weight, labels, reduction=reduction, label_smoothing=0.1, **options).sum().backward()

    with Largest() as whole:
        step(plainly)
    assert whole.elements == rows * classes
    with Largest() as largest, Ledger() as ledger:
        step(retape.linear_cross_entropy, chunk_rows=chunk, z_loss=1e-4, soft_cap=20.0)
    assert largest.elements == chunk * classes
    gradients_bytes = (rows * features + 3 * classes * features) * 4
    assert ledger.peak < 5 * chunk * classes * 4 + 2 * gradients_bytes < rows * classes * 4 / 3


def test_chunks_follow_the_bytes():
    rows = torch.empty(100_000, 8, device="meta")
    parts = list(chunks_of(rows, 32_000, None, weight_gradient=False))
    longest = max(part.stop - part.start for part in parts)
    assert longest * 32_000 * TUNING.bytes_per_logit <= TUNING.cpu_chunk_bytes
    assert [part.start for part in parts[1:]] == [part.stop for part in parts[:-1]]
    assert parts[-1].stop == 100_000
    wide = torch.empty(100_000, 4096, device="meta")  # the weight's gradient is what a chunk is measured against
    assert max(p.stop - p.start for p in chunks_of(wide, 32_000, None, weight_gradient=True)) > longest


# --- around ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_inside_a_region(reduction):
    hidden, weight, labels, _ = case(bias=False)
    run = lambda h: retape.linear_cross_entropy(h.sin(), weight, labels, reduction=reduction, chunk_rows=4).sum()  # noqa: E731
    wanted = torch.autograd.grad(run(hidden), [hidden, weight])
    found = torch.autograd.grad(retape.checkpoint(run, hidden, use_reentrant=False), [hidden, weight])
    assert all(map(torch.equal, found, wanted))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # Dynamo's own
def test_compiled_callers():
    hidden, weight, labels, _ = case(bias=False)
    compiled = torch.compile(
        lambda h: retape.linear_cross_entropy(h * 2, weight, labels, chunk_rows=4) + 1, backend="eager"
    )
    with Largest() as largest:
        loss = compiled(hidden)
    torch.testing.assert_close(loss, plainly(hidden * 2, weight, labels) + 1)
    assert largest.elements < 14 * CLASSES
    wanted = torch.autograd.grad(plainly(hidden * 2, weight, labels), hidden)[0]
    torch.testing.assert_close(torch.autograd.grad(loss, hidden)[0], wanted)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_second_derivatives_are_refused(reduction):
    hidden, weight, labels, _ = case(bias=False)
    loss = retape.linear_cross_entropy(hidden, weight, labels, reduction=reduction).sum()
    with pytest.raises(UnsupportedTransform, match="create_graph=True"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_transforms_are_refused():
    hidden, weight, labels, _ = case(bias=False)
    with pytest.raises(UnsupportedTransform, match="called under grad"):
        torch.func.grad(lambda h: retape.linear_cross_entropy(h, weight, labels))(hidden.detach())
    with torch.autograd.forward_ad.dual_level(), pytest.raises(UnsupportedTransform, match="forward-mode"):
        retape.linear_cross_entropy(hidden, weight, labels)


# --- what cannot be meant -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"reduction": "median"}, "reduction='median' is not known; give 'mean', 'sum' or 'none'"),
        ({"label_smoothing": 1.5}, r"label_smoothing=1\.5; give a number from 0\.0 to 1\.0"),
        ({"soft_cap": 0.0}, r"soft_cap=0\.0; give a number above 0"),
        ({"chunk_rows": 0}, "chunk_rows=0; give a whole number >= 1"),
        ({"hidden": torch.ones(2, 7, 5, dtype=torch.long)}, r"hidden is torch\.int64"),
        ({"weight": torch.ones(11, 4)}, r"weight has shape \(11, 4\).*must be \(classes, 5\)"),
        ({"labels": torch.ones(2, 6, dtype=torch.long)}, r"labels have shape \(2, 6\).*\(2, 7\)"),
        ({"labels": torch.ones(2, 7)}, r"labels are torch\.float32; give class numbers"),
        ({"labels": torch.full((2, 7), 11)}, "labels hold 11, and there are 11 classes"),
        ({"labels": torch.full((2, 7), -1)}, "labels hold -1, and there are 11 classes"),
        ({"bias": torch.ones(3)}, r"bias has shape \(3,\); give one number for each of 11 classes"),
        ({"class_weight": torch.ones(3)}, r"class_weight has shape \(3,\)"),
        ({"class_weight": torch.ones(11, requires_grad=True)}, "class_weight requires a gradient"),
        ({"weight": torch.ones(11, 5, dtype=torch.float64)}, r"hidden is torch\.float32 and weight is torch\.float64"),
        ({"bias": torch.ones(11, dtype=torch.float64)}, r"hidden is torch\.float32 and bias is torch\.float64"),
        ({"hidden": torch.ones(2, 1, 5), "labels": torch.ones(2, 1, dtype=torch.long), "shift": True}, "shift=True needs two labels"),
    ],
)  # fmt: skip
def test_bad_input(changes, words):
    given = {"hidden": torch.ones(2, 7, 5), "weight": torch.ones(11, 5), "labels": torch.ones(2, 7, dtype=torch.long)}
    with pytest.raises(InvalidInput, match=words):
        retape.linear_cross_entropy(**{**given, **changes})

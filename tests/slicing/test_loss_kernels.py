"""The usual loss of a chunk as one function for a compiler: the same numbers, and only where it may be."""

import logging
import weakref

import pytest
import torch
from torch.nn import functional as F

import retape
from retape.integrations.huggingface import lazy_logits
from retape.torch.compat import compiler_internals
from retape.torch.slicing.linear_cross_entropy import LossCompiler, loss_is_compiled, losses_and_slopes, may_compile

ROWS, FEATURES, CLASSES = 40, 16, 33
CUDA = torch.device("cuda", 0)


def compiled_as(function):
    """Inside, the loss of a chunk on the CPU is `function`, as if the compiler had made it."""
    return may_compile(True, LossCompiler(lambda plain: function, ("cpu",)))


@pytest.fixture
def calls():
    """As if it were compiled, with what it was called for."""
    found = []

    def counted(logits, labels, narrow):
        found.append(len(logits))
        return losses_and_slopes(logits, labels, narrow)

    with compiled_as(counted):
        yield found


def errors(logits, labels):
    """Of the losses and the slopes: how far ours, and those of plain autograd, are from float64's."""

    def plainly(values):
        values = values.detach().requires_grad_()
        losses = F.cross_entropy(values, labels.squeeze(1), reduction="none")
        return losses.detach(), torch.autograd.grad(losses.sum(), values)[0]

    exact, plain, ours = plainly(logits.double()), plainly(logits), losses_and_slopes(logits, labels, logits.dtype)
    return [
        [(one.double() - true).norm().item() for one, true in zip(found, exact, strict=True)] for found in (ours, plain)
    ]


@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_the_error_is_no_larger_than_plain(spread):
    torch.manual_seed(0)
    logits, labels = spread * torch.randn(400, CLASSES), torch.randint(0, CLASSES, (400, 1))
    for ours, plain in zip(*errors(logits, labels), strict=True):
        assert ours <= 1.1 * plain


def test_large_logits_do_not_overflow():
    logits = torch.tensor([[1e30, -1e30, 0.0], [-3e38, -3e38, -3e38]])
    losses, slopes = losses_and_slopes(logits, torch.tensor([[0], [2]]), torch.float32)
    assert losses[0] == 0
    assert slopes.isfinite().all()


def case(dtype):
    torch.manual_seed(1)
    hidden = torch.randn(ROWS, FEATURES).to(dtype).requires_grad_()
    weight = torch.randn(CLASSES, FEATURES).to(dtype).requires_grad_()
    labels = torch.randint(0, CLASSES, (ROWS,))
    labels[:3] = -100
    return hidden, weight, labels


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_usual_loss_goes_through_it(calls, dtype, reduction):
    hidden, weight, labels = case(dtype)
    loss = retape.linear_cross_entropy(hidden, weight, labels, reduction=reduction, chunk_rows=16)
    found = (loss, *torch.autograd.grad(loss, [hidden, weight]))
    assert sum(calls) == ROWS
    with may_compile(False):
        loss = retape.linear_cross_entropy(hidden, weight, labels, reduction=reduction, chunk_rows=16)
    for one, other in zip(found, (loss, *torch.autograd.grad(loss, [hidden, weight])), strict=True):
        assert one.dtype is other.dtype
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    "unusual",
    [
        {"label_smoothing": 0.1},
        {"z_loss": 0.1},
        {"soft_cap": 5.0},
        {"class_weight": torch.ones(CLASSES)},
        {"bias": torch.ones(CLASSES)},
        {"reduction": "none"},
    ],
)
def test_any_other_loss_does_not(calls, unusual):
    hidden, weight, labels = case(torch.float32)
    retape.linear_cross_entropy(hidden, weight, labels, **unusual).sum().backward()
    assert not calls


def test_it_is_compiled_on_a_gpu_where_it_may_be():
    assert not loss_is_compiled(CUDA)
    with may_compile(True):
        assert loss_is_compiled(CUDA)
        assert not loss_is_compiled(torch.device("cpu"))
        with may_compile(False):
            assert not loss_is_compiled(CUDA)
    assert not loss_is_compiled(CUDA)


@pytest.mark.parametrize("said", ["never", ""])
def test_where_it_does_not_compile_it_stays_eager_and_says_so(caplog, said):
    asked = []

    def refusing(*arguments):
        asked.append(arguments)
        raise compiler_internals.compiler_errors()[0](said)

    hidden, weight, labels = case(torch.float32)
    wanted = retape.linear_cross_entropy(hidden, weight, labels, reduction="sum", chunk_rows=10)
    with caplog.at_level(logging.WARNING, "retape"), compiled_as(refusing):
        assert torch.equal(retape.linear_cross_entropy(hidden, weight, labels, reduction="sum", chunk_rows=10), wanted)
    assert "does not compile and stays eager" in caplog.text
    assert len(asked) == 1, "it is not asked again"


def test_too_many_compilations_are_an_error_and_not_silently_eager():
    limits = []

    def compiled(*arguments):
        limits.append(torch._dynamo.config.fail_on_recompile_limit_hit)
        return losses_and_slopes(*arguments)

    with compiled_as(compiled):
        retape.linear_cross_entropy(*case(torch.float32))
    assert limits == [True]


def test_the_slopes_of_a_chunk_are_gone_before_the_next():
    alive, made = [], []

    def watched(*arguments):
        alive.append(sum(reference() is not None for reference in made))
        found = losses_and_slopes(*arguments)
        made.append(weakref.ref(found[1]))
        return found

    with compiled_as(watched):
        retape.linear_cross_entropy(*case(torch.float32), chunk_rows=10)
    assert alive == [0] * 4


def test_a_chunk_of_the_compiled_loss_holds_more_rows(monkeypatch):
    monkeypatch.setattr(lazy_logits, "usual_chunk_bytes", lambda *a, **k: 10 * CLASSES * 100)
    head = torch.nn.Linear(FEATURES, CLASSES, bias=False, dtype=torch.bfloat16)
    rows = torch.empty(1000, FEATURES, dtype=torch.bfloat16)
    standing = lazy_logits.LazyLogits(rows, head)
    standing.device = CUDA
    vars(head)[lazy_logits.CHUNK_BYTES] = 2**40
    assert standing.chunk_rows() == 200, "twice what is usual, on a GPU"
    with may_compile(True):
        assert standing.chunk_rows() == 333, "four bytes of a logit and two of its slope"
        vars(head)[lazy_logits.CHUNK_BYTES] = 6 * CLASSES * 150
        assert standing.chunk_rows() == 150
        assert (standing / 5.0).tanh().chunk_rows() < 150

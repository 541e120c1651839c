"""`fit` on models that are not written as one would like: each trains to the same bits as without it, or says why it cannot."""

import copy
import os
import random
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

import retape
from retape.torch.capture.holders.tensor_attributes import NO_HOOKS, hook_counts
from support.comparing import seed
from support.fits import tightest, trained

fit = partial(retape.fit, progress=False)
WIDTH = 16


def rows(count=8, width=WIDTH, **options):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(5), **options)


class Body(nn.Module):
    """A block with something to drop."""

    def __init__(self, width=WIDTH):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.dropout(F.gelu(self.up(x)), 0.1, self.training))


class Chain(nn.Module):
    """A few blocks one after the other, and the loss."""

    def __init__(self, block=Body, count=4):
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(count))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def assert_same(one, other):
    """Trees of tensors and plain values."""
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            assert_same(one[name], other[name])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for first, second in zip(one, other, strict=True):
            assert_same(first, second)
    else:
        assert one == other


def call(model, batch):
    return model(batch)


BUDGETS = (0.6, 0.2) if os.environ.get("RETAPE_LONG") else (0.4,)


def same_training(make, batch, step=call, budgets=BUDGETS, keeps=False, **options):
    """Train a model plainly and under several budgets; every bit of what comes of it is equal. Returns the last fit."""
    seed(1)
    plain = make().train()
    start = copy.deepcopy(plain)
    wanted = trained(plain, batch, step)
    made = None
    for budget in budgets:
        model = copy.deepcopy(start)
        before = copy.deepcopy(model.state_dict())
        made = tightest(model, batch, budget, step=step, **options)
        assert_same(dict(model.state_dict()), dict(before))
        assert made.measured.peak_bytes <= made.record.budget_bytes
        assert_same(trained(model, batch, step), wanted)
        made.remove()
        assert [type(m) for m in model.modules()] == [type(m) for m in start.modules()]
    assert made.record.assignment.keeps_everything is keeps
    return made


# --- what blocks take and return ---------------------------------------------------------------------------------------


@dataclass
class Output:
    hidden: torch.Tensor
    note: str
    extra: torch.Tensor | None = None


class ReturnsDataclass(Body):
    def forward(self, x):
        x = x.hidden if isinstance(x, Output) else x
        return Output(super().forward(x), "mine", x.detach().sum())


class ReturnsDict(Body):
    def forward(self, x):
        x = x["x"] if isinstance(x, dict) else x
        return {"x": super().forward(x), "none": None, "list": [x.sum(), 3]}


class Unpacking(Chain):
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return (x.hidden if isinstance(x, Output) else x["x"]).square().mean()


class Storing(Body):
    """Returns nothing: leaves its result in what it was given."""

    def forward(self, box):
        box["x"] = super().forward(box["x"])


class Box(Chain):
    def forward(self, x):
        box = {"x": x}
        for block in self.blocks:
            block(box)
        return box["x"].square().mean()


class KeywordOnly(Body):
    def forward(self, *, x, extras, scale=1.0):
        return super().forward(x) * scale + extras["a"] * extras["b"][0]


class Keywords(Chain):
    def forward(self, x):
        extras = {"a": x * 0.1, "b": [x.sigmoid()]}
        for block in self.blocks:
            x = block(x=x, extras=extras, scale=0.5)
        return x.square().mean()


class WritesInput(Body):
    def forward(self, x):
        x.mul_(0.5)
        return super().forward(x)


class Given(Chain):
    def forward(self, x):
        x = x * 1
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class TwoLosses(Chain):
    def forward(self, x):
        total = torch.zeros(())
        for block in self.blocks:
            x = block(x)
            total = total + x.abs().mean()
        return x.square().mean(), total


def two(model, batch):
    loss, extra = model(batch)
    return loss + 0.1 * extra


def thrice(model, batch):
    return model(batch) + model(batch.flip(0)) * model(batch * 0.5)


def after_inference(model, batch):
    with torch.no_grad():
        target = model(batch)
    model.eval()
    with torch.inference_mode():
        model(batch)
    model.train()
    return (model(batch) - target * 0.5) ** 2


def dictionary(model, batch):
    return model(batch["x"]) * batch["scale"] + len(batch["names"])


SHAPES = {
    "dataclass": (partial(Unpacking, ReturnsDataclass), call),
    "dict": (partial(Unpacking, ReturnsDict), call),
    "keyword only": (partial(Keywords, KeywordOnly), call),
    "writes its input": (partial(Given, WritesInput), call),
    "two outputs": (TwoLosses, two),
    "three calls": (Chain, thrice),
    "inference before": (Chain, after_inference),
}


@pytest.mark.parametrize("name", SHAPES)
def test_arguments_outputs_and_steps(name):
    make, step = SHAPES[name]
    same_training(make, rows(64), step)


def test_a_block_that_leaves_its_result_in_a_box():
    """A re-run would find the box changed: right, or refused before a wrong number."""
    seed(1)
    plain = Box(Storing).train()
    model = copy.deepcopy(plain)
    wanted = trained(plain, rows(64), call)
    try:
        made = tightest(model, rows(64), 0.5)
    except retape.errors.RetapeError:
        assert [type(m) for m in model.modules()] == [type(m) for m in plain.modules()]
        return
    assert_same(trained(model, rows(64), call), wanted)
    made.remove()


def test_a_batch_with_other_things_than_tensors():
    batch = {"x": rows(64), "scale": 0.5, "names": ["a", "b"], "nothing": None}
    made = same_training(Chain, batch, dictionary)
    assert made.record.rows == 64


# --- kinds of modules -----------------------------------------------------------------------------------------------------


class Frozen(Chain):
    """The first blocks are frozen, and nothing before them needs a gradient."""

    def __init__(self):
        super().__init__(count=5)
        self.blocks[:2].requires_grad_(False)


class Tied(Chain):
    def __init__(self):
        super().__init__()
        self.blocks[3].up.weight = self.blocks[0].up.weight
        self.blocks[2].down.weight = nn.Parameter(self.blocks[1].up.weight.detach().t().clone())


class Spectral(Body):
    def __init__(self):
        super().__init__()
        self.up = nn.utils.parametrizations.spectral_norm(self.up)
        self.down = nn.utils.parametrizations.weight_norm(self.down)


class OldSpectral(Body):
    def __init__(self):
        super().__init__()
        self.up = nn.utils.spectral_norm(self.up)


class Checkpointing(Body):
    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)


class AroundSome(Chain):
    """One block twice, and some blocks checkpointed by the model."""

    def __init__(self, around):
        super().__init__()
        self.around = around

    def forward(self, x):
        x = self.blocks[0](self.blocks[0](x))
        for block in self.blocks[1:3]:
            x = self.around(block, x)
        return self.blocks[3](x).square().mean()


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 64),
            nn.BatchNorm1d(64),
            nn.ReLU(inplace=True),
            nn.Dropout(0.2),
            nn.Linear(64, WIDTH),
            nn.Dropout(0.2, inplace=True),
        )

    def forward(self, x):
        return self.layers(x) + x


class NumpyNoise(Body):
    def forward(self, x):
        scale = float(np.random.rand()) + random.random()
        return super().forward(x) * scale + torch.from_numpy(np.random.randn(*x.shape)).to(x)


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.stages = nn.ModuleList(nn.ModuleList(Body() for _ in range(2)) for _ in range(3))

    def forward(self, x):
        for stage in self.stages:
            for block in stage:
                x = block(x)
        return x.square().mean()


class NoGradBlock(Chain):
    """The second block is only ever called without gradients."""

    def forward(self, x):
        x = self.blocks[0](x)
        with torch.no_grad():
            target = self.blocks[1](x)
        x = self.blocks[3](self.blocks[2](x))
        return (x - target).square().mean()


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(32, WIDTH, sparse=True)
        self.blocks = nn.ModuleList(Body() for _ in range(3))

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(ComplexBody() for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.abs().square().mean()


class ComplexBody(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, 64, dtype=torch.complex64)
        self.second = nn.Linear(64, WIDTH, dtype=torch.complex64)

    def forward(self, x):
        return x + self.second(self.first(x).exp().tanh().conj())


MODULES = {
    "frozen first blocks": (Frozen, rows(64)),
    "tied weights": (Tied, rows(64)),
    "parametrizations": (partial(Chain, Spectral), rows(64)),
    "spectral norm of old": (partial(Chain, OldSpectral), rows(64)),
    "its own checkpoints": (partial(Chain, Checkpointing), rows(64)),
    "batch norm and dropout everywhere": (partial(Chain, Normed), rows(64)),
    "noise of numpy and Python": (partial(Chain, NumpyNoise), rows(64)),
    "nested lists": (Nested, rows(64)),
    "a block without gradients": (NoGradBlock, rows(64)),
    "float64": (lambda: Chain().double(), rows(64, dtype=torch.float64)),
    "bfloat16": (lambda: Chain().bfloat16(), rows(64).bfloat16()),
    "complex": (Complex, rows(64, dtype=torch.complex64)),
    "inputs that need gradients": (Chain, rows(64).requires_grad_()),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules(name):
    make, batch = MODULES[name]
    # Blocks that recompute themselves need so little that the room of gradients to come is enough.
    same_training(make, batch, keeps=name == "its own checkpoints")


@pytest.mark.parametrize(
    "around",
    [
        partial(torch.utils.checkpoint.checkpoint, use_reentrant=False),
        partial(torch.utils.checkpoint.checkpoint, use_reentrant=True),
        partial(retape.checkpoint, use_reentrant=False),
    ],
    ids=["torch", "torch, reentrant", "retape"],
)
def test_blocks_that_the_model_checkpoints_itself(around):
    """A plan decides about those of `retape.checkpoint`, and leaves those of PyTorch's alone."""
    made = same_training(partial(AroundSome, around), rows(64))
    names = {".".join(choice.name.split(".")[:2]) for choice in made.record.assignment.choices}
    own = {"checkpoint(blocks.1)", "checkpoint(blocks.2)"} if around.func is retape.checkpoint else set()
    assert names == {"blocks.0", "blocks.3", *own}


@pytest.mark.parametrize(
    ("make", "batch"),
    [
        (lambda: Chain(count=1), rows()),
        (lambda: nn.Sequential(nn.Linear(WIDTH, 1), nn.Flatten(0)), rows(1)),
        (lambda: nn.Linear(WIDTH, 1), rows(1)),
    ],
    ids=["one block", "one layer and a view", "no part at all"],
)
def test_tiny_models(make, batch):
    seed(1)
    start = make()

    def step(model, batch):
        return model(batch).square().mean()

    wanted = trained(copy.deepcopy(start), batch, step)
    for budget in (1.0, 0.5):
        model = copy.deepcopy(start)
        made = tightest(model, batch, budget, step=step)
        assert_same(trained(model, batch, step), wanted)
        made.remove()


def test_a_sparse_gradient():
    """SGD takes what an embedding with sparse=True gives; the gradients after a fit are sparse as before it."""
    seed(1)
    model, batch = Sparse(), torch.randint(0, 32, (64,))
    plain = copy.deepcopy(model)
    made = tightest(model, batch, 0.6)
    for one in (model, plain):
        seed(2)
        one(batch).backward()
    assert model.table.weight.grad.layout is plain.table.weight.grad.layout is torch.sparse_coo
    assert torch.equal(model.table.weight.grad.to_dense(), plain.table.weight.grad.to_dense())
    assert all(
        torch.equal(a.grad, b.grad) for a, b in zip(model.blocks.parameters(), plain.blocks.parameters(), strict=True)
    )
    made.remove()


class Lazy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.LazyLinear(64), nn.GELU(), nn.LazyLinear(WIDTH))

    def forward(self, x):
        return self.layers(x)


def test_lazy_modules_are_refused_until_they_have_a_shape():
    model = Chain(Lazy, 3)
    with pytest.raises(retape.errors.InvalidInput, match="lazy modules that have no shape yet"):
        fit(model, rows(64), budget=0.5)
    seed(1)
    model(rows(64))
    same_training(lambda: model, rows(64))


def test_in_eval():
    seed(1)
    model = Chain().eval()
    plain = copy.deepcopy(model)
    made = tightest(model, rows(64), 0.5)
    assert not model.training
    assert_same(trained(model, rows(64), call), trained(plain, rows(64), call))
    made.remove()


class AsksForClasses(Chain):
    """Code that compares classes with `is`, counts in its class, and calls its base by its class."""

    class Scaled(Body):
        calls = 0

        def forward(self, x, scale=None):
            type(self).calls += 1
            return super(self.__class__, self).forward(x if scale is None else x * scale)

    def __init__(self):
        super().__init__(self.Scaled)

    def forward(self, x):
        for block in self.blocks:
            x = block(x, x.mean().tanh()) if type(block) is self.Scaled else block(x)
        return x.square().mean() + {self.Scaled: 1.0}.get(type(self.blocks[0]), 0.0)


def test_code_that_compares_classes():
    same_training(AsksForClasses, rows(64))


class ReturnsAParameter(Chain):
    """As CLIP returns its scale."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        return super().forward(x), self.scale


def test_a_returned_parameter_keeps_no_hook():
    def step(model, batch):
        loss, scale = model(batch)
        return loss * scale.exp()

    model = ReturnsAParameter()
    made = fit(model, rows(64), budget=0.6, step=step)
    for _ in range(3):
        step(model, rows(64)).backward()
    assert hook_counts([model.scale]) == [NO_HOOKS]
    made.remove()
    with retape.adaptive(model, budget="1GiB"):
        step(model, rows(64)).backward()
    assert hook_counts([model.scale]) == [NO_HOOKS]


def test_weight_norm_may_be_removed_from_a_fitted_layer():
    model = Chain()
    for block in model.blocks:
        nn.utils.parametrizations.weight_norm(block.up)
    made = fit(model, rows(64), budget=0.6)
    for block in model.blocks:
        nn.utils.parametrize.remove_parametrizations(block.up, "weight")
        nn.utils.parametrizations.spectral_norm(block.down)
    plain = copy.deepcopy(model)
    assert_same(trained(model, rows(64), call), trained(plain, rows(64), call))
    made.remove()
    fit(model, rows(64), budget=0.6).remove()

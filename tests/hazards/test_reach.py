"""What a region can reach is captured whatever its length, depth or kind of container; a tensor is known by more than its address."""

import copy
from collections import UserDict, deque

import pytest
import torch
from torch import nn

import retape
from retape.errors import StateChanged
from support.comparing import plainly


class History(nn.Module):
    """Reads and extends a container that has many items."""

    def __init__(self, make, count):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.past = make([torch.full((4,), float(i)) for i in range(count)])

    def forward(self, x):
        hidden = self.layer(x)
        items = list(self.past.values()) if isinstance(self.past, dict) else list(self.past)
        if isinstance(self.past, dict):
            self.past[len(items)] = hidden.detach().mean(0)
            items.append(self.past[len(items)])
        else:
            self.past.append(hidden.detach().mean(0))
            items.append(self.past[-1])
        return torch.tanh(hidden - torch.stack(items[-10:]).mean(0) / 100)


@pytest.mark.parametrize("make", [list, deque, lambda items: dict(enumerate(items))], ids=["list", "deque", "dict"])
@pytest.mark.parametrize("count", [0, 255, 300, 2000])
def test_a_container_of_any_length_is_put_back(make, count):
    torch.manual_seed(0)
    first = History(make, count)
    second, x = copy.deepcopy(first), torch.randn(8, 4)
    for _ in range(3):
        for model, call in ((first, plainly), (second, retape.checkpoint)):
            model.zero_grad()
            call(model, x.clone().requires_grad_()).square().sum().backward()
        assert torch.equal(first.layer.weight.grad, second.layer.weight.grad)
    assert len(first.past) == len(second.past) == count + 3


@pytest.mark.parametrize("count", [200, 300, 5000])
def test_a_write_to_one_of_many_tensors_is_an_error(count):
    tensors, x = [torch.ones(4) for _ in range(count)], torch.randn(4, requires_grad=True)
    y = retape.checkpoint(lambda a: (a * tensors[5]).sin(), x)
    tensors[5].mul_(2)
    with pytest.raises(StateChanged):
        y.sum().backward()


def test_a_write_to_a_tensor_at_any_depth_is_an_error():
    box = [torch.ones(4)]
    held = box
    for _ in range(40):
        held = [held]

    def function(a):
        inner = held
        while isinstance(inner, list):
            inner = inner[0]
        return (a * inner).sin()

    x = torch.randn(4, requires_grad=True)
    y = retape.checkpoint(function, x)
    box[0].mul_(2)
    with pytest.raises(StateChanged):
        y.sum().backward()


class Slotted:
    __slots__ = ("values",)


class WithSlotsAndDict(Slotted):
    def __init__(self, values):
        self.values, self.other = values, None


@pytest.mark.parametrize("place", ["closure", "attribute"])
@pytest.mark.parametrize(
    "box",
    [
        lambda: torch.ones(1, 4).max(dim=0),
        lambda: nn.utils.rnn.pack_padded_sequence(torch.ones(1, 4), [4], batch_first=True),
        lambda: WithSlotsAndDict(torch.ones(4)),
    ],
    ids=["torch.return_types", "PackedSequence", "slots and a dict"],
)
def test_a_write_to_a_tensor_in_an_odd_container_is_an_error(box, place):
    held = box()
    tensor = held.data if isinstance(held, nn.utils.rnn.PackedSequence) else held.values
    model = nn.Tanh()
    if place == "attribute":
        model.held = held
        model.forward = lambda a, self=model: (a * first_tensor(self.held)).sin()
    function = model if place == "attribute" else lambda a: (a * first_tensor(held)).sin()
    y = retape.checkpoint(function, torch.randn(4, requires_grad=True))
    tensor.mul_(2)
    with pytest.raises(StateChanged):
        y.sum().backward()


def first_tensor(held):
    return held[0] if isinstance(held, tuple) else held.values


class Node:
    def __init__(self, value, following=None):
        self.value, self.following = value, following


def test_a_write_at_the_end_of_a_long_chain_of_objects_is_an_error():
    last = Node(torch.ones(4))
    first = last
    for _ in range(3000):
        first = Node(None, first)

    def function(a):
        node = first
        while node.following is not None:
            node = node.following
        return (a * node.value).sin()

    x = torch.randn(4, requires_grad=True)
    y = retape.checkpoint(function, x)
    last.value.mul_(2)
    with pytest.raises(StateChanged):
        y.sum().backward()


def test_an_argument_that_holds_itself():
    x = torch.ones(3, requires_grad=True)
    box = [x * 2]
    box.append(box)
    y = retape.checkpoint(lambda items: items[0].sin() * items[1][0], box)
    y.sum().backward()
    wanted = torch.ones(3, requires_grad=True)
    twice = wanted * 2
    (twice.sin() * twice).sum().backward()
    assert torch.equal(x.grad, wanted.grad)


# --- what leaves a region other than by being returned ------------------------------------------------------------


class Sharing(nn.Module):
    """The first layers leave keys and values in a container for the later ones, as Gemma does."""

    def __init__(self, number, last, pack):
        super().__init__()
        self.number, self.last, self.pack = number, last, pack
        self.query, self.key, self.value = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x, *, shared):
        if self.number < self.last:
            shared[self.number % 2] = self.pack([self.key(x).tanh(), self.value(x).tanh()])
        key, value = shared[self.number % 2]
        return x + torch.softmax(self.query(x) @ key.T, -1) @ value


class Decoder(nn.Module):
    def __init__(self, box, pack):
        super().__init__()
        self.box = box
        self.blocks = nn.ModuleList(Sharing(number, 3, pack) for number in range(6))

    def forward(self, x):
        shared = self.box()
        for block in self.blocks:
            x = block(x, shared=shared)
        return x.square().mean()


class Box(UserDict):
    pass


@pytest.mark.parametrize("box", [dict, Box, UserDict])
@pytest.mark.parametrize("pack", [tuple, list])
@pytest.mark.parametrize("budget", [0.8, 0.6])
def test_fit_with_tensors_that_leave_regions_in_containers(box, pack, budget):
    torch.manual_seed(0)
    model, x = Decoder(box, pack), torch.randn(32, 16)
    fitted = retape.fit(model, x, budget=budget, step=lambda m, b: m(b), progress=False)
    assert retape.verify(model, x, step=lambda m, b: m(b)).equal
    fitted.remove()


# --- the same memory, another tensor ------------------------------------------------------------------------------


class Holding(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.w = w

    def forward(self, x):
        return (x @ self.w).sin() if self.w.dim() == 2 else (x * self.w).abs()


@pytest.mark.parametrize(
    ("w", "change"),
    [
        (torch.arange(16.0).view(4, 4), lambda w: w.t()),
        (torch.arange(4.0) + 1j, lambda w: w.conj()),
        (torch.arange(4.0), lambda w: w.view(torch.int32)),
        (torch.arange(4.0), torch._neg_view),
        (torch.arange(16.0).view(4, 4), lambda w: nn.Parameter(w.t())),
    ],
    ids=["transposed", "conjugated", "another dtype", "negated", "a parameter"],
)
def test_another_view_of_the_same_memory_is_not_what_was_held(w, change):
    def gradient(call):
        model = Holding(w.clone())
        x = torch.full((2, 4), 0.5, dtype=torch.complex64 if w.is_complex() else torch.float32, requires_grad=True)
        y = call(model, x)
        model.w = change(model.w) if type(change(model.w)) is torch.Tensor else model.w
        if type(change(w)) is nn.Parameter:
            del model.w
            model.w = change(w)
        y.abs().sum().backward()
        return x.grad

    assert torch.equal(gradient(plainly), gradient(retape.checkpoint))


def test_a_parameter_replaced_by_its_transpose():
    def gradient(call):
        torch.manual_seed(0)
        layer = nn.Linear(4, 4, bias=False)
        x = torch.ones(2, 4, requires_grad=True)
        y = call(nn.Sequential(layer, nn.Tanh(), layer), x)
        layer.weight = nn.Parameter(layer.weight.data.t())
        y.sum().backward()
        return x.grad

    assert torch.equal(gradient(plainly), gradient(retape.checkpoint))


# --- subclasses and sparse tensors --------------------------------------------------------------------------------


class Named(torch.Tensor):
    """A subclass without anything inside."""


@pytest.mark.parametrize("budget", ["1GiB", "40KiB"])
def test_a_plain_subclass_between_regions_under_a_live_budget(budget):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)) for _ in range(4)))
    x = torch.randn(64, 16).as_subclass(Named)
    model(x).square().mean().backward()
    wanted = [parameter.grad.clone() for parameter in model.parameters()]
    live = retape.adaptive(model, budget=retape.Budget.activations(budget))
    for _ in range(3):
        model.zero_grad()
        model(x).square().mean().backward()
        assert all(torch.equal(p.grad, w) for p, w in zip(model.parameters(), wanted, strict=True))
    live.remove()


class GraphLayer(nn.Module):
    """A layer of a graph network, whose adjacency is sparse."""

    def __init__(self, adjacency, buffer):
        super().__init__()
        self.into, self.out = nn.Linear(16, 64), nn.Linear(64, 16)
        if buffer:
            self.register_buffer("adjacency", adjacency)
        else:
            self.adjacency = adjacency

    def forward(self, x):
        return self.out(torch.relu(torch.sparse.mm(self.adjacency, self.into(x))))


@pytest.mark.parametrize("buffer", [False, True])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse")
def test_sparse_tensors_in_regions(buffer, layout):
    torch.manual_seed(0)
    adjacency = (torch.rand(64, 64) < 0.1).float().to_sparse(layout=layout)
    model, x = nn.Sequential(*(GraphLayer(adjacency, buffer) for _ in range(4))), torch.randn(64, 16)

    def step(m, b):
        return m(b).square().mean()

    step(model, x).backward()
    wanted = [parameter.grad.clone() for parameter in model.parameters()]
    fitted = retape.fit(model, x, budget=0.6, step=step, progress=False)
    assert retape.verify(model, x, step=step).equal
    fitted.remove()
    live = retape.adaptive(model, budget=retape.Budget.activations("130KiB"))
    for _ in range(5):
        model.zero_grad()
        step(model, x).backward()
        assert all(torch.equal(p.grad, w) for p, w in zip(model.parameters(), wanted, strict=True))
    live.remove()

"""Routing that would flip in the re-run, because kernels before it are nondeterministic: what the forward decided is kept by itself."""

import copy

import pytest
import torch
from torch import nn

import retape
from retape.errors import RetapeError
from support.comparing import equal, leaf, plainly, results, same_as_plain


def noise(like):
    """Differs from run to run, as sums with atomics do: enough to choose other experts in every re-run."""
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(7 if retape.recomputing() else 3))


def topk_rows(scores):
    return scores.topk(2, dim=-1).indices


def sorted_rows(scores):
    return scores.sort(dim=-1, descending=True).indices[..., :2]


def argmax_row(scores):
    return scores.argmax(-1, keepdim=True).repeat(1, 2)


def max_row(scores):
    return scores.max(-1, keepdim=True)[1].repeat(1, 2)


def compared(scores):
    return scores.gt(0).long()[..., :2]


CHOICES = [topk_rows, sorted_rows, argmax_row, max_row, compared]


class Router(nn.Module):
    """Mixes experts; which ones depends on scores with noise, how much on scores without."""

    def __init__(self, choose, width=16, experts=4):
        super().__init__()
        self.choose = [choose]
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))

    def forward(self, x):
        scores = self.gate(x)
        chosen = self.route(scores + noise(scores))
        weights = torch.softmax(scores, -1).gather(-1, chosen)
        mixed = torch.stack([expert(x).tanh() for expert in self.experts], 1)
        picked = mixed.gather(1, chosen.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
        return x + (picked * weights.unsqueeze(-1)).sum(1)

    def route(self, scores):
        if self.choose[0] is max_row:
            return scores.max(-1, keepdim=True)[1].repeat(1, 2) if scores.numel() else scores.topk(1).indices
        return self.choose[0](scores)


class Sparse(nn.Module):
    """Each expert gets the rows that chose it: how many there are depends on the scores."""

    def __init__(self, width=16, experts=4):
        super().__init__()
        self.gate = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(experts))

    def forward(self, x):
        scores = self.gate(x)
        chosen = (scores + noise(scores)).argmax(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero(as_tuple=True)[0]
            out = out.index_add(0, rows, expert(x[rows]).tanh() * scores.softmax(-1)[rows, number, None])
        return x + out


class Branching(nn.Module):
    """A branch by `.item()`."""

    def __init__(self, width=16):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        steps = int((x.detach().mean() + noise(x[0])[0]).abs().mul(1000).item()) % 5
        for _ in range(steps):
            x = self.first(x).tanh()
        return self.second(x).sin()


MODELS = {
    **{choose.__name__: (lambda choose=choose: Router(choose)) for choose in CHOICES},
    "sparse": Sparse,
    "branch": Branching,
}


def input_and_parameter_gradients(model, x, call):
    torch.manual_seed(0)
    model.zero_grad()
    inputs = x.clone().requires_grad_()
    call(model, inputs).square().sum().backward()
    return [inputs.grad, *(None if p.grad is None else p.grad.clone() for p in model.parameters())]


@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_repeats_what_its_forward_decided(name):
    torch.manual_seed(0)
    model, x = MODELS[name](), torch.randn(32, 16)
    wanted = input_and_parameter_gradients(model, x, plainly)
    assert equal(input_and_parameter_gradients(model, x, retape.checkpoint), wanted)
    inside = input_and_parameter_gradients(
        model, x, lambda m, a: retape.checkpoint(lambda b: retape.checkpoint(m, b), a)
    )
    assert equal(inside, wanted)


@pytest.mark.parametrize("name", ["topk_rows", "sparse"])
def test_a_fit_and_a_live_budget_repeat_it(name):
    torch.manual_seed(0)
    model, x = nn.Sequential(*(MODELS[name]() for _ in range(4))), torch.randn(64, 16)
    wanted = input_and_parameter_gradients(copy.deepcopy(model), x, plainly)

    def step(m, b):
        return m(b).square().sum()

    fitted = retape.fit(model, x.clone().requires_grad_(), budget=0.6, step=step, progress=False)
    for _ in range(2):
        assert equal(input_and_parameter_gradients(model, x, plainly), wanted)
    fitted.remove()
    live = retape.adaptive(model, budget=retape.Budget.activations("90KiB"))
    for _ in range(4):
        try:
            assert equal(input_and_parameter_gradients(model, x, plainly), wanted)
        except RetapeError:
            pytest.fail("the budget is wide enough")
    assert live.stats().reruns
    live.remove()


class Counted(nn.Module):
    """Has buffers whose values a region compares in its first call."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x):
        return self.norm(x).sin() * self.scale.sum()


@pytest.mark.parametrize("check", ["metadata", "values"])
def test_what_a_region_inside_compares_is_no_decision_of_the_region_around_it(check):
    def case(call):
        def outer(a):
            h = inner(a) if call is plainly else retape.checkpoint(inner, a, check=check)
            h = h * 2 if torch.equal(h, a) else h * 3
            return (h * a).tanh() if (h.mean() > 0).item() else (h * a).sin()

        inner, x = Counted(), leaf(8, 4)
        for _ in range(2):
            call(outer, x * 1).sum().backward()
        return results(inner, x)

    same_as_plain(case)


class Watching(torch.overrides.TorchFunctionMode):
    """Notes which functions are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))


def test_a_mode_of_the_user_sees_no_comparison_of_a_region():
    with Watching() as mode:
        retape.checkpoint(Counted(), leaf(8, 4)).sum().backward()
    assert not {"equal", "clone", "eq"} & set(mode.names)


def test_what_is_large_is_not_kept():
    """A mask of every number of a large tensor is not small: only `retape.keep` holds it."""
    x = torch.randn(512, 512, requires_grad=True)

    def function(a):
        order = a.sort(0).indices  # 2 MiB, twice the input
        return a.gather(0, order).sin()

    record = retape.measure(lambda: retape.checkpoint(function, x).sum())
    assert record.peak_bytes - record.base_bytes < 8 * 2**20
    y = retape.checkpoint(function, x)
    y.sum().backward()
    other = x.detach().clone().requires_grad_()
    function(other).sum().backward()
    assert torch.equal(x.grad, other.grad)


def reversed_order(x, order):
    rows = order.tolist()
    rows.reverse()
    return rows


def counted_up(x, order):
    rows = order.tolist()
    rows[0] += 1
    return rows


def popped(x, order):
    """As a dispatch to experts takes sizes."""
    sizes, found = order.tolist(), []
    while sizes:
        found.append(sizes.pop(0))
    return found


def popped_inside(x, order):
    pairs = torch.stack([order, order + 1], 1).tolist()
    return [pair.pop() % 4 for pair in pairs]


@pytest.mark.parametrize("rows", [reversed_order, counted_up, popped, popped_inside])
def test_a_list_that_the_region_changes_is_not_the_recorded_one(rows):
    def case(call):
        torch.manual_seed(0)
        weights, order, x = [torch.randn(8, 8) for _ in range(4)], torch.tensor([0, 2, 1]), leaf(4, 8)

        def region(x):
            for row in rows(x, order):
                x = torch.tanh(x @ weights[row])
            return x

        loss = call(region, x).sum()
        loss.backward(retain_graph=True)
        loss.backward()  # and so in each later re-run
        return x.grad

    same_as_plain(case)

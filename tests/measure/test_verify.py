"""`retape.verify`: proof that a managed model equals plain autograd, and an honest answer where it does not."""

import copy
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import retape
from retape.errors import InvalidInput, RetapeError
from retape.torch.engine.context import plain
from support.comparing import Notes, assert_equal, assign, results, seed, streams


class InRegion(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Tanh())

    def forward(self, a):
        return retape.checkpoint(self.body, a, use_reentrant=False).sum()


def test_a_managed_model_is_equal():
    seed()
    found = retape.verify(InRegion(), torch.randn(8, 4))
    assert found.equal
    assert found.plain_repeats
    assert found.worst is None
    assert found.compared == 1 + 4 + 3 + 3  # loss, gradients, buffers, streams
    assert str(found) == "Equal to plain autograd in all of 11 tensors and streams."


@pytest.mark.parametrize("form", ["tensor", "tuple", "dict"])
def test_forms_of_a_batch(form):
    batch = torch.randn(8, 4)
    batches = {"tensor": batch, "tuple": (batch,), "dict": {"a": batch}}
    assert retape.verify(InRegion(), batches[form]).equal


def test_a_step_of_ones_own():
    model = InRegion()
    seen = Notes()

    def step(model, batch):
        seen()
        return model(batch) * 2

    assert retape.verify(model, torch.randn(8, 4), step=step).equal
    assert len(seen.all) == 3  # plain twice, managed once


def test_everything_is_left_as_it_was():
    seed()
    model, batch = InRegion(), torch.randn(8, 4)
    model(batch).backward()
    before = copy.deepcopy(results(model)), streams()
    gradients = [parameter.grad for parameter in model.parameters()]
    retape.verify(model, batch)
    assert_equal((results(model), streams()), before)
    assert all(parameter.grad is gradient for parameter, gradient in zip(model.parameters(), gradients, strict=True))


class Wrong(nn.Module):
    """Doubles its gradient unless regions are off: what a broken region would do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, a):
        from retape.torch.engine.context import is_plain

        return self.linear(a).sum() * (1.0 if is_plain() else 1.5)


def test_a_wrong_gradient_is_named_with_its_size():
    model = Wrong()
    with torch.no_grad():
        model.linear.weight.zero_()
        model.linear.bias.zero_()
    found = retape.verify(model, torch.ones(8, 4))
    assert not found.equal
    assert found.plain_repeats
    assert [difference.what for difference in found.differences] == [
        "gradient of linear.weight",
        "gradient of linear.bias",
    ]
    assert found.worst.worst == 4.0
    assert "2 of" in str(found)
    assert "by 4" in str(found)


class Unrepeatable(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.note = Notes()

    def forward(self, a):
        return self.linear(a).sum() * self.note()


def test_plain_autograd_that_differs_from_itself_is_said():
    found = retape.verify(Unrepeatable(), torch.ones(8, 4))
    assert not found.plain_repeats
    assert not found.equal
    assert found.nondeterministic_ops == ()
    assert "Plain autograd differs from itself" in str(found)
    assert not torch.are_deterministic_algorithms_enabled()


def test_an_error_of_the_region_gets_out_and_leaves_everything_as_it_was():
    class Flipping(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, a):
            return retape.checkpoint(self.region, a, use_reentrant=False).sum()

        def region(self, a):
            return self.linear(a).sin() if not retape.recomputing() else self.linear(a) * 2

    seed()
    model = Flipping()
    before = streams()
    with pytest.raises(RetapeError):
        retape.verify(model, torch.ones(8, 4))
    assert_equal(streams(), before)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_step_without_a_scalar_is_refused():
    with pytest.raises(InvalidInput, match=r"a tensor of shape \(8, 4\), not a scalar loss"):
        retape.verify(nn.Linear(4, 4), torch.ones(8, 4))
    with pytest.raises(InvalidInput, match="does not depend on anything that requires gradients"):
        retape.verify(InRegion().requires_grad_(False), torch.ones(8, 4))


def test_what_is_no_model_and_no_step_is_refused():
    with pytest.raises(InvalidInput, match="got a function as its model"):
        retape.verify(lambda batch: batch.sum(), torch.ones(8, 4))
    with pytest.raises(InvalidInput, match=r"does not match InRegion\.forward.*a tuple or list as positional ones"):
        retape.verify(InRegion(), [torch.ones(8, 4), torch.ones(8, 4)])
    with pytest.raises(InvalidInput, match="got int 3 as its step; give a function of model and batch"):
        retape.verify(InRegion(), torch.ones(8, 4), step=3)
    with pytest.raises(InvalidInput, match=r"got the loss MSELoss as its step. A step calls the model too"):
        retape.verify(InRegion(), torch.ones(8, 4), step=nn.MSELoss())


def test_a_model_without_shapes_is_refused():
    with pytest.raises(InvalidInput, match="has lazy modules"):
        retape.verify(nn.LazyLinear(4), torch.ones(8, 4))


def odd():
    """Any hazard that no check sees: a region computes with another number when it runs again."""
    return 3.0 if retape.recomputing() else 2.0


def wrong(function, *tensors):
    return retape.checkpoint(lambda *given: (function(*given) * odd()).sin(), *tensors, use_reentrant=False)


def named(found):
    assert found.plain_repeats
    assert not found.equal
    return [difference.what for difference in found.differences]


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, a):
        return self.linear(a).sum()


@pytest.mark.parametrize("form", ["tensor", "tuple", "dict"])
def test_a_wrong_gradient_of_an_input_is_found(form):
    a = torch.randn(8, 4, requires_grad=True)
    batches = {"tensor": a, "tuple": (a,), "dict": {"a": a}}
    names = {"tensor": "batch", "tuple": "batch[0]", "dict": "batch.a"}

    class Frozen(Linear):
        def forward(self, a):
            return wrong(lambda a: a, a).sum() + self.linear(a.detach()).sum()

    found = retape.verify(Frozen(), batches[form])
    assert named(found) == [f"gradient of {names[form]}"]
    assert a.grad is None


OUTSIDE = nn.Parameter(torch.ones(4))


def test_a_wrong_gradient_of_a_parameter_outside_the_model_is_found():
    inside, objects = nn.Parameter(torch.ones(4)), [type("Holder", (), {"weight": nn.Parameter(torch.ones(4))})]

    def step(model, a):
        leaves = inside * OUTSIDE * objects[0].weight  # the last only the graph leads to
        return wrong(lambda rows, leaves: rows * leaves, model.linear(a).detach(), leaves).sum() + model(a)

    found = retape.verify(Linear(), torch.randn(8, 4), step=step)
    leaf = "leaf 0 outside the model, of shape (4,)"
    assert named(found) == [f"gradient of {name}" for name in ("step.inside", "step.OUTSIDE", leaf)]
    assert all(weight.grad is None for weight in (inside, OUTSIDE, objects[0].weight))


def test_a_wrong_gradient_of_a_leaf_that_the_step_makes_is_found():
    def step(model, a):
        twins = [a.clone().requires_grad_(), (a + 1).requires_grad_()]
        return (twins[0] * 2).sum() + wrong(torch.sin, twins[1]).sum() + model(a)

    found = retape.verify(Linear(), torch.randn(8, 4), step=step)
    (what,) = named(found)
    assert "outside the model, of shape (8, 4)" in what


def test_regions_in_other_threads_are_off_too():
    with ThreadPoolExecutor(1) as pool:

        class Threaded(Linear):
            def forward(self, a):
                return pool.submit(wrong, self.linear, a).result().sum()

        found = retape.verify(Threaded(), torch.randn(8, 4))
    assert named(found) == ["gradient of linear.weight", "gradient of linear.bias"]


def test_another_loss_is_found():
    class Shifted(Linear):
        def forward(self, a):
            from retape.torch.engine.context import is_plain

            return self.linear(a).sum() + (0.0 if is_plain() else 5.0)

    assert named(retape.verify(Shifted(), torch.randn(8, 4))) == ["loss"]


class Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a):
        return a.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


def test_a_step_after_which_no_leaf_has_a_gradient_is_refused():
    with pytest.raises(InvalidInput, match="No leaf has a gradient after the step, so there is nothing to compare"):
        retape.verify(Linear(), torch.randn(8, 4), step=lambda model, a: Nothing.apply(model(a)))


class CountingRegion(Linear):
    """Counts in a way that a re-run repeats, or does not."""

    def __init__(self, note):
        super().__init__()
        self.note, self.calls, self.log = note, 0, []

    def forward(self, a):
        return retape.checkpoint(self.region, a, use_reentrant=False).sum()

    def region(self, a):
        self.note(self)
        return self.linear(a).sin()


class OwnItems(dict):
    """A dict with a `__setitem__` of its own: what a re-run puts there stays."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)


def test_what_a_rerun_does_twice_is_found():
    model = CountingRegion(lambda model: model.log.__setitem__(len(model.log), 1.0))
    model.log = OwnItems()
    assert named(retape.verify(model, torch.randn(8, 4))) == ["field log.1"]


@pytest.mark.parametrize("note", [lambda model: None, lambda model: assign(model, calls=model.calls + 1)])
def test_what_a_rerun_does_once_is_equal(note):
    model = CountingRegion(note)
    assert retape.verify(model, torch.randn(8, 4)).equal
    assert (model.calls, model.log) == (0, [])


def test_hooks_that_a_model_registers_in_its_first_step_are_the_same_hooks():
    """Each run registers them anew, under numbers that PyTorch counts up; Transformers does so to record router logits."""

    class Recording(Linear):
        def forward(self, a):
            if not vars(self.linear)["_forward_hooks"]:
                self.linear.register_forward_hook(lambda module, given, made: made * 2, with_kwargs=False)
                self.linear.register_forward_pre_hook(lambda module, given, named: None, with_kwargs=True)
            return self.linear(a).sin().sum()

    model = Recording()
    assert retape.verify(model, torch.randn(8, 4)).equal
    assert not vars(model.linear)["_forward_hooks"]


def test_a_generator_that_a_rerun_leaves_elsewhere_is_found():
    class Drawing(Linear):
        def __init__(self):
            super().__init__()
            self.generator = torch.Generator().manual_seed(1)

        def forward(self, a):
            from retape.torch.engine.context import is_plain

            if not is_plain():
                torch.rand(3, generator=self.generator)
            return self.linear(a).sum()

    assert named(retape.verify(Drawing(), torch.randn(8, 4))) == ["generator generator"]


def test_sparse_gradients_are_compared():
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4))
    found = retape.verify(model, torch.arange(6), step=lambda model, ids: model(ids).sin().sum())
    assert found.equal
    wrong_one = retape.verify(model, torch.arange(6), step=lambda model, ids: wrong(model[1], model[0](ids)).sum())
    assert "gradient of 0.weight" in named(wrong_one)


def test_regions_are_off_under_plain():
    calls = Notes()

    def region(a):
        calls()
        return a.sin().cos()

    with plain():
        retape.checkpoint(region, torch.ones(4, requires_grad=True), use_reentrant=False).sum().backward()
    assert len(calls.all) == 1

"""One case, run plain and managed from the same state, and compared bit for bit.

A case is a function of `call`, which calls a function for it: plainly, or as a region. It returns everything that has to
be equal (gradients, buffers, states of its own generators); the global random streams are compared besides.
"""

from __future__ import annotations

import functools
import inspect
import pickle
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import retape
from retape.torch.engine.checkpoint import run_region
from retape.torch.engine.policy import HOLD, Policy

Caller = Callable[..., Any]
Case = Callable[[Caller], Any]


def plainly(function: Caller, *args: Any, **kwargs: Any) -> Any:
    """Plain autograd."""
    return function(*args, **kwargs)


def as_region(function: Caller, *args: Any, **kwargs: Any) -> Any:
    """The drop-in, as a user calls it."""
    return retape.checkpoint(function, *args, use_reentrant=False, **kwargs)


def by_values(function: Caller, *args: Any, **kwargs: Any) -> Any:
    """The drop-in, every refilled slot compared by checksum."""
    return retape.checkpoint(function, *args, use_reentrant=False, check="values", **kwargs)


def to_the_end(function: Caller, *args: Any, **kwargs: Any) -> Any:
    """The drop-in, every re-run run to its end."""
    return retape.checkpoint(function, *args, use_reentrant=False, early_stop=False, **kwargs)


def dropped(function: Caller, *args: Any, **kwargs: Any) -> Any:
    """The engine's own default: slots that are inputs are held."""
    return run_region(function, *args, keywords=kwargs)


def some_held(function: Caller, *args: Any, **kwargs: Any) -> Any:
    """Every second of the first slots held, the others refilled."""
    return run_region(function, *args, keywords=kwargs, policy=Policy(held=frozenset(range(0, 12, 2))))


def all_held(function: Caller, *args: Any, **kwargs: Any) -> Any:
    """Every slot held."""
    return run_region(function, *args, keywords=kwargs, policy=HOLD)


def some_moved(function: Caller, *args: Any, **kwargs: Any) -> Any:
    """Of every three of the first slots one held, one moved to the host, one refilled."""
    policy = Policy(held=frozenset(range(0, 30, 3)), moved=frozenset(range(1, 30, 3)))
    return run_region(function, *args, keywords=kwargs, policy=policy)


def nested(function: Caller, *args: Any, **kwargs: Any) -> Any:
    """A region inside a region."""
    return as_region(lambda *a, **k: as_region(function, *a, **k), *args, **kwargs)


class Notes:
    """Notes taken by a region's function in every run of it: a list that no walk of its closure can find and put back."""

    def __init__(self) -> None:
        self.all.clear()  # of another one that had this id

    def __call__(self, note: Any = None) -> int:
        self.all.append(note)
        return len(self.all)

    @property
    def all(self) -> list[Any]:
        return _notes_of(id(self))


@functools.cache
def _notes_of(number: int) -> list[Any]:
    return []


WAYS = (as_region, by_values, to_the_end, dropped, some_held, all_held, some_moved, nested)
every_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)


def seed(number: int = 0) -> None:
    """Seed every global random stream."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def streams() -> dict[str, Any]:
    """The states of the global random streams."""
    return {
        "torch": torch.get_rng_state(),
        "random": pickle.dumps(random.getstate()),
        "numpy": pickle.dumps(np.random.get_state()),
    }


def put_streams(state: dict[str, Any]) -> None:
    """Set the global random streams to what `streams` returned."""
    torch.set_rng_state(state["torch"])
    random.setstate(pickle.loads(state["random"]))
    np.random.set_state(pickle.loads(state["numpy"]))


def outcome(case: Case, call: Caller) -> dict[str, Any]:
    """What a case returns, and where it leaves the random streams."""
    seed()
    result = case(call)
    return {"result": _copied(result), "streams": streams()}


def same_as_plain(case: Case, way: Caller = as_region) -> Any:
    """Assert that a managed run equals a plain one in every bit; returns what the plain one returned."""
    wanted = outcome(case, plainly)
    assert_equal(outcome(case, way), wanted)
    return wanted["result"]


def equals_plain(test: Callable[..., Any]) -> Callable[..., None]:
    """Make a test of a case: `call` becomes plain autograd and a region in turn, and the results are compared bit for bit.

    Other parameters are parametrised as usual; one that is named `way` says how the region is run.
    """
    signature = inspect.signature(test)

    def run(**given: Any) -> None:
        taken = {name: value for name, value in given.items() if name in signature.parameters}
        same_as_plain(functools.partial(test, **taken), given.get("way", as_region))

    run.__name__, run.__qualname__, run.__module__ = test.__name__, test.__qualname__, test.__module__
    run.__doc__, run.__dict__ = test.__doc__, dict(test.__dict__)
    kept = [parameter for name, parameter in signature.parameters.items() if name != "call"]
    run.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return run


def equals_plain_every_way(test: Callable[..., Any]) -> Callable[..., None]:
    """Make a test of a case for each of WAYS."""
    run = equals_plain(test)
    signature = inspect.signature(run)
    way = inspect.Parameter("way", inspect.Parameter.KEYWORD_ONLY)
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), way])  # type: ignore[attr-defined]
    return every_way(run)


def refuses(case: Case, error: type[BaseException], *words: str, way: Caller = as_region) -> str:
    """Assert that a managed run raises `error` with every one of `words` in its message; returns the message."""
    seed()
    with pytest.raises(error) as caught:
        case(way)
    return _says(str(caught.value), words)


def right_or_refused(case: Case, error: type[BaseException], *words: str, way: Caller = as_region) -> None:
    """Assert that a managed run equals a plain one, or raises before a wrong number escapes."""
    wanted = outcome(case, plainly)
    try:
        got = outcome(case, way)
    except error as raised:
        _says(str(raised), words)
    else:
        assert_equal(got, wanted)


def assert_equal(got: Any, wanted: Any) -> None:
    """Two trees of tensors and other values: the same structure, types and bits."""
    have, shape = pytree.tree_flatten_with_path(got)
    want, wanted_shape = pytree.tree_flatten_with_path(wanted)
    assert shape == wanted_shape
    for (path, one), (_, other) in zip(have, want, strict=True):
        where = pytree.keystr(path)
        assert type(one) is type(other), where
        if isinstance(one, Tensor):
            assert one.dtype == other.dtype, where
            assert torch.equal(one, other), f"{where}: differs by {_distance(one, other)}"
        else:
            assert one == other, where


def equal(got: Any, wanted: Any) -> bool:
    """True if two trees of tensors and other values are the same, bit for bit."""
    try:
        assert_equal(got, wanted)
    except AssertionError:
        return False
    return True


def parameter_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """Copies of the gradients of a model's parameters, by name."""
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def loss_and_gradients(
    model: nn.Module, loss: Callable[[], Tensor], *, number: int = 1, set_to_none: bool = True
) -> dict[str, Tensor | None]:
    """Loss and parameter gradients of one step with cleared gradients, after seeding PyTorch with `number`."""
    model.zero_grad(set_to_none=set_to_none)
    torch.manual_seed(number)
    value = loss()
    value.backward()
    return {"loss": value.detach().clone(), **parameter_gradients(model)}


def step_gradients(model: nn.Module, batch: Any, step: Callable[..., Tensor] | None = None) -> list[Tensor | None]:
    """Loss and gradients, in the order of the parameters, of a step with loss `step(model, batch)`, by default the model's output."""
    found = loss_and_gradients(model, lambda: model(batch) if step is None else step(model, batch))
    return list(found.values())


def results(module: nn.Module, *inputs: Tensor) -> dict[str, Any]:
    """Gradients of parameters and inputs, and buffers."""
    return {
        "parameters": {name: parameter.grad for name, parameter in module.named_parameters()},
        "inputs": [tensor.grad for tensor in inputs],
        "buffers": dict(module.named_buffers()),
    }


def altered(make: Callable[[], tuple[Callable[..., Any], tuple[Any, ...], Callable[[], Any]]]) -> Case:
    """A case: `make()` gives a function of x, its other arguments, and a change that is made between forward and backward."""

    def case(call: Caller) -> Any:
        x = leaf()
        function, arguments, change = make()
        y = call(function, x, *arguments)
        change()
        y.sum().backward()
        return x.grad

    case.__name__ = make.__name__
    return case


def steps_of(
    make: Callable[[], nn.Module], *, steps: int = 1, forwards: int = 1, also: Callable[[Any], Any] = lambda model: None
) -> Case:
    """A case: steps of a module, each of some forwards and one backward of their sum; returns its `results` and `also(module)`."""

    def case(call: Caller) -> Any:
        model, x = make(), leaf()
        for _ in range(steps):
            torch.stack([call(model, x).sum() for _ in range(forwards)]).sum().backward()
        return results(model, x), also(model)

    return case


def assign(target: Any, **values: Any) -> None:
    """Set attributes, as a statement cannot inside a lambda."""
    for name, value in values.items():
        setattr(target, name, value)


def hook_count(holder: nn.Module | Tensor) -> int:
    """Number of forward and backward hooks on a module or tensor."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(holder, kind, None) or ()) for kind in kinds)


def leaf(*shape: int) -> Tensor:
    """A random tensor that requires a gradient."""
    return torch.randn(*(shape or (4, 4)), requires_grad=True)


def _says(message: str, words: tuple[str, ...]) -> str:
    for word in words:
        assert re.search(word, message), f"{word!r} is not in: {message}"
    return message


def _copied(tree: Any) -> Any:
    return pytree.tree_map(lambda value: value.detach().clone() if isinstance(value, Tensor) else value, tree)


def _distance(one: Tensor, other: Tensor) -> Any:
    if one.shape != other.shape:
        return f"shapes {tuple(one.shape)} and {tuple(other.shape)}"
    return float((one.to(torch.complex128) - other.to(torch.complex128)).abs().max())

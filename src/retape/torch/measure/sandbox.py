"""Steps that leave no trace: whatever runs inside, the model, the batch, gradients and random streams are afterwards as before.

Put back before each step and at the end: fields of modules and the containers in them, buffers and other tensors, generators, and
`.grad` of every leaf that a step reaches. Weights are not copied, except those that a forward or a hook may write to; a step that
changes another one is an error. Optimizers that run in backward, as post-accumulate-grad hooks, are switched off meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn

from retape.core.errors import InvalidInput
from retape.torch.capture import rng
from retape.torch.compat import hook_internals
from retape.torch.measure.put_back import MOST_BYTES, Noted, NotedSlots, NotedTensor, noted, shares_numbers
from retape.torch.measure.sandbox_reach import Reach, Reached, Role

_SMALL_PARAMETER_BYTES = 64 << 10  # a scale or a bias, which a forward may clamp


class Gradients(Enum):
    """How a step finds the gradients of the weights."""

    ZERO = auto()  # allocated, as in the middle of an accumulation: that is when a step stands highest
    NONE = auto()


class Sandbox:
    """A model whose step can be run again and again from the same start, and which is left as it was found."""

    def __init__(
        self,
        model: nn.Module,
        batch: Any = None,
        step: Callable[..., Any] | None = None,
        optimizer: Any = None,
        *,
        gradients: Gradients = Gradients.ZERO,
    ) -> None:
        self._gradients = gradients
        self._roots = (model, batch, step, optimizer)
        reach = self._reached()
        self._trained = {id(parameter) for parameter in model.parameters()}
        self._leaves: dict[int, _Leaf] = {}
        self._optimizers: list[hook_internals.HeldBack] = []
        copied = _written_parameters(reach)
        self._tensors = [_noted_tensor(each, copied) for each in reach.tensors if _can_be_noted(each)]
        self._generators = [name for name, _ in reach.generators]
        self._draws = rng.capture([_as_stream(generator) for _, generator in reach.generators])
        for name, tensor, _ in reach.tensors:
            if tensor.is_leaf and tensor.requires_grad:
                self._meet(name, tensor)

    def _reached(self) -> Reach:
        model, batch, step, optimizer = self._roots
        reach = Reach()
        reach.walk("", model)
        reach.walk("batch", batch)
        for field in ("state", "param_groups"):
            reach.walk(f"optimizer.{field}", getattr(optimizer, field, None), Role.OPTIMIZER_STATE)
        reach.walk("step", step, Role.SEEN)
        self._fields: list[Noted] = [noted(name, container) for name, container in reach.containers]
        self._fields += [NotedSlots(name, value) for name, value in reach.objects]
        return reach

    def rewind(self) -> None:
        """Put everything back to the start, with gradients of the weights zero and allocated, or None, as was asked for."""
        lost = self._put_back()
        with torch.no_grad():
            for leaf in self._leaves.values():
                leaf.reset(self._gradients)
        rng.seek(self._draws)
        _refuse_changes(lost)

    def close(self) -> list[str]:
        """Leave everything as it was found; returns the names of what was changed and cannot be put back."""
        lost = self._put_back()
        with torch.no_grad():
            for leaf in self._leaves.values():
                leaf.put_back()
        for optimizers in self._optimizers:
            optimizers.put_back()
        rng.seek(self._draws)
        return lost

    def _put_back(self) -> list[str]:
        for fields in self._fields:
            fields.put_back()
        return [each.name for each in self._tensors if not each.put_back()]

    @contextmanager
    def kept_changes(self) -> Iterator[None]:
        """Change fields of the model for good: what is done inside is not put back."""
        for fields in self._fields:
            fields.put_back()
        yield
        self._reached()

    def meet(self, loss: Tensor) -> list[Tensor]:
        """Note the leaves that a loss depends on, before its backward; returns those that no name leads to."""
        leaves = leaves_of(loss)
        for leaf in leaves:
            if id(leaf) not in self._leaves or self._leaves[id(leaf)].tensor is not leaf:
                self._meet("", leaf)
        return [leaf for leaf in leaves if not self._leaves[id(leaf)].name]

    def _meet(self, name: str, leaf: Tensor) -> None:
        self._leaves[id(leaf)] = _Leaf(name, leaf, trained=id(leaf) in self._trained)
        self._optimizers.append(hook_internals.HeldBack(leaf))

    def gradients(self) -> dict[str, Tensor]:
        """The gradients that leaves with a name have by now, copied."""
        found: dict[str, Tensor] = {}
        for number, (name, leaf) in enumerate((leaf.name, leaf.tensor) for leaf in self._leaves.values() if leaf.name):
            if leaf is not None and leaf.grad is not None:
                found[f"{name} ({number})" if name in found else name] = leaf.grad.detach().clone()
        return found

    def changes(self) -> dict[str, Any]:
        """What a step has changed in fields of modules, containers and tensors, with the values now."""
        found = {f"field {name}": value for fields in self._fields for name, value in fields.changes()}
        found |= {f"value of {each.name}": each.tensor for each in self._tensors if each.is_changed()}
        return {name: settled(value) for name, value in found.items()}

    def streams(self) -> dict[str, Any]:
        """Where every random stream stands."""
        streams, _ = self._draws
        common = len(streams) - len(self._generators)
        names = [f"random stream {i} ({type(stream).__name__})" for i, stream in enumerate(streams[:common])]
        names += [f"generator {name}" for name in self._generators]
        return dict(zip(names, rng.peek(streams), strict=True))


class _Leaf:
    """The `.grad` of a leaf as it was found. A leaf without a name may be one that a step made, and is not kept alive."""

    __slots__ = ("_copy", "_found", "_held", "_trained", "_version", "_weak", "name")

    def __init__(self, name: str, leaf: Tensor, *, trained: bool) -> None:
        self.name, self._trained = name, trained
        self._held, self._weak = (leaf if name else None), hook_internals.weak_tensor(leaf)
        self._found = found = leaf.grad
        self._version = None if found is None else found._version
        # Kept on the host, so that the device holds no more gradients than it does in training.
        self._copy = None if found is None else found.detach().to("cpu", copy=True)

    @property
    def tensor(self) -> Tensor | None:
        return self._held if self._held is not None else self._weak()

    def reset(self, gradients: Gradients) -> None:
        leaf = self.tensor
        if leaf is None:
            return
        if gradients is Gradients.ZERO and ((self._trained and leaf.requires_grad) or self._found is not None):
            _zero(leaf)
        else:
            leaf.grad = None

    def put_back(self) -> None:
        leaf, found = self.tensor, self._found
        if leaf is None:
            return
        if found is not None and found._version != self._version and not shares_numbers(found):
            found.copy_(self._copy)  # type: ignore[arg-type]  # there is a copy of what was found
        leaf.grad = found


def _zero(leaf: Tensor) -> None:
    """Zero its gradient where it is (it may be a view of a buffer); one that cannot be written to gets another in its place."""
    gradient = leaf.grad
    if gradient is None or shares_numbers(gradient):
        leaf.grad = torch.zeros_like(leaf)
        return
    if gradient.requires_grad:  # made with create_graph
        leaf.grad = gradient = gradient.detach()
    gradient.zero_()


def leaves_of(loss: Tensor) -> list[Tensor]:
    """The leaves that get a gradient when a loss is differentiated, in the order of its graph."""
    if loss.grad_fn is None:
        return [loss] if loss.requires_grad else []
    leaves: list[Tensor] = []
    known, waiting = {loss.grad_fn}, [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        leaf = getattr(node, "variable", None)  # what an AccumulateGrad accumulates into
        if isinstance(leaf, Tensor):
            leaves.append(leaf)
        for following, _ in reversed(node.next_functions):
            if following is not None and following not in known:
                known.add(following)
                waiting.append(following)
    return leaves


def _can_be_noted(reached: Reached) -> bool:
    """Whether a tensor belongs to the model; what was made in inference mode has no version, and no step can write to it."""
    return not reached.value.is_inference() and (reached.role is not Role.SEEN or reached.value.requires_grad)


def _noted_tensor(reached: Reached, written: set[int]) -> NotedTensor:
    name, tensor, role = reached
    size = tensor.nbytes if tensor.layout is torch.strided else MOST_BYTES + 1
    most = MOST_BYTES if role is Role.FIELD else _SMALL_PARAMETER_BYTES
    if isinstance(tensor, nn.Parameter):
        most = _SMALL_PARAMETER_BYTES if type(tensor) is nn.Parameter else 0
    copied = role is Role.BUFFER or id(tensor) in written or size <= most
    return NotedTensor(name, tensor, copied=copied)


def _written_parameters(reach: Reach) -> set[int]:
    """Parameters that a forward or a backward may write to: embeddings with a `max_norm`, and those with hooks of their own."""
    found = {id(each.value) for each in reach.tensors if hook_internals.has_hooks(each.value)}
    for _, module in reach.modules:
        if vars(module).get("max_norm") is not None or hook_internals.has_backward_hooks(module):
            found |= {id(parameter) for parameter in module.parameters(recurse=False)}
    return found


def _as_stream(generator: Any) -> Any:
    """What `rng.capture` takes: one of numpy's bit generators by a generator that draws from it."""
    if isinstance(getattr(generator, "state", None), dict) and not hasattr(generator, "bit_generator"):
        import numpy

        return numpy.random.Generator(generator)
    return generator


def settled(value: Any) -> Any:
    """A value that does not change any more and can be compared: tensors copied, and of other objects the class."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return value
    if isinstance(value, dict):
        return {str(key): settled(part) for key, part in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(repr(settled(part)) for part in value)
    if isinstance(value, (list, tuple)):
        return [settled(part) for part in value]
    return type(value).__name__


def _refuse_changes(names: list[str]) -> None:
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise InvalidInput(
            f"The step changed {names[0]}{more}, of which no copy was kept, so it cannot be run again from the same start. Take what "
            "writes to it (an optimizer's step, an update of averages, a hook) out of the step."
        )


@contextmanager
def sandboxed(
    model: nn.Module,
    batch: Any = None,
    step: Callable[..., Any] | None = None,
    optimizer: Any = None,
    *,
    gradients: Gradients = Gradients.ZERO,
) -> Iterator[Sandbox]:
    """Run steps of a model and leave no trace of them."""
    sandbox = Sandbox(model, batch, step, optimizer, gradients=gradients)
    try:
        sandbox.rewind()
        yield sandbox
    except BaseException:
        sandbox.close()
        raise
    _refuse_changes(sandbox.close())

"""Steps that leave no trace: afterwards the model, the batch, gradients and random streams are as before.

Restored before each step and at the end: fields of modules and the containers in them, buffers and other tensors, generators,
`.grad` of every leaf that a step reaches, and what hooks, functions and classes hold (`captured`).
Weights are not copied, except those that a forward or a hook may write to; a step that
changes another one is an error. Optimizers that run in backward, as post-accumulate-grad hooks, are off meanwhile.

Fields are found by a walk of its own (`reachable`), which names them, and follows also large arrays and states of optimizers.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from enum import Enum, auto
from operator import is_
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from retape.core.errors import InvalidInput
from retape.torch.capture import rng
from retape.torch.compat import compiler_internals, fsdp_internals, hook_internals, internals
from retape.torch.measure.captured import CapturedState
from retape.torch.measure.reachable import NamedValue, Reachable, Role, is_array, keyed, slots_of
from retape.torch.measure.tuning import TUNING

_PLAIN = (Tensor, nn.Parameter)
_ABSENT = object()
_Result = TypeVar("_Result")
_HOOKS = frozenset(name for name in vars(nn.Module()) if "hooks" in name)


class InitialGradients(Enum):
    """State of the weights' gradients at the start of a step."""

    ZERO = auto()  # allocated, as during accumulation: that is when a step's peak is highest
    NONE = auto()  # as after `zero_grad()`: each appears in the backward of its module
    UNSHARDED = auto()  # those of FSDP2's gathered weights, as after a micro-step without gradient synchronisation


class Sandbox:
    """A model whose step can be run repeatedly from the same start, and which is left as it was found."""

    def __init__(
        self,
        model: nn.Module,
        batch: Any = None,
        step: Callable[..., Any] | None = None,
        optimizer: Any = None,
        *,
        gradients: InitialGradients = InitialGradients.ZERO,
    ) -> None:
        self._gradients = gradients
        self._roots = (model, batch, step, optimizer)
        reach = self._save_fields()
        self._trained = {id(parameter) for parameter in model.parameters()}
        self._leaves: dict[int, _Leaf] = {}
        self._optimizers: list[hook_internals.HeldBack] = []
        copied = _written_parameters(reach)
        saved = [each for each in reach.tensors if _is_saved(each)]
        self._tensors = [_save_tensor(each, copied) for each in saved]
        known = {id(each.value) for each in saved}
        self._tensors += _save_captured([each for each in self._captured.tensors if id(each) not in known])
        generators = reach.generators + self._captured_generators(reach)
        self._generators = [name for name, _ in generators]
        self._draws = rng.capture([generator for _, generator in generators])
        for name, tensor, _ in reach.tensors:
            if tensor.is_leaf and tensor.requires_grad:
                self._add_leaf(name, tensor)

    def _save_fields(self) -> Reachable:
        model, batch, step, optimizer = self._roots
        reach = Reachable()
        reach.walk("", model)
        reach.walk("batch", batch)
        for field in ("state", "param_groups"):
            reach.walk(f"optimizer.{field}", getattr(optimizer, field, None), Role.OPTIMIZER_STATE)
        reach.walk("step", step, Role.SEARCHED)
        self._fields: list[SavedContainer] = [save_container(name, container) for name, container in reach.containers]
        self._fields += [_SavedSlots(name, value) for name, value in reach.objects]
        modules, tensors = [module for _, module in reach.modules], [each.value for each in reach.tensors]
        self._captured = CapturedState(modules, tensors, step)
        return reach

    def _captured_generators(self, reach: Reachable) -> list[tuple[str, Any]]:
        known = {id(generator) for _, generator in reach.generators}
        found = [each for each in self._captured.generators if id(each) not in known]
        return [(f"{number} behind functions", each) for number, each in enumerate(found)]

    def rewind(self, gradients: InitialGradients | None = None) -> None:
        """Restore everything to the start, with gradients of the weights zero or None, by default as the sandbox was made with."""
        lost, gradients = self._restore(), gradients or self._gradients
        self._captured.enter()
        with torch.no_grad():
            for leaf in self._leaves.values():
                leaf.reset(gradients)
            fsdp_internals.set_unsharded_gradients(self._roots[0], zero=gradients is InitialGradients.UNSHARDED)
        rng.seek(self._draws)
        _refuse_changes(lost)

    def close(self) -> list[str]:
        """Leave everything as it was found; return the names of changed tensors that have no copy."""
        lost = self._restore()
        with torch.no_grad():
            for leaf in self._leaves.values():
                leaf.restore()
            fsdp_internals.set_unsharded_gradients(self._roots[0], zero=False)
        for optimizers in self._optimizers:
            optimizers.put_back()
        rng.seek(self._draws)
        return lost

    def _restore(self) -> list[str]:
        self._restore_fields()
        return [each.name for each in self._tensors if not each.restore()]

    def _restore_fields(self) -> None:
        self._captured.leave()
        for fields in self._fields:
            fields.restore()

    @contextmanager
    def kept_changes(self) -> Iterator[None]:
        """Change fields of the model for good: changes made inside are not undone."""
        self._restore_fields()
        yield
        self._save_fields()

    def add_leaves(self, loss: Tensor) -> list[Tensor]:
        """Add the leaves that a loss depends on, before its backward; return those without a name."""
        leaves = leaves_of(loss)
        for leaf in leaves:
            if id(leaf) not in self._leaves or self._leaves[id(leaf)].tensor is not leaf:
                self._add_leaf("", leaf)
        return [leaf for leaf in leaves if not self._leaves[id(leaf)].name]

    def _add_leaf(self, name: str, leaf: Tensor) -> None:
        self._leaves[id(leaf)] = _Leaf(name, leaf, trained=id(leaf) in self._trained)
        self._optimizers.append(hook_internals.HeldBack(leaf))

    def gradients(self) -> dict[str, Tensor]:
        """Copies of the gradients of leaves that have a name."""
        found: dict[str, Tensor] = {}
        for number, (name, leaf) in enumerate((leaf.name, leaf.tensor) for leaf in self._leaves.values() if leaf.name):
            if leaf is not None and leaf.grad is not None:
                found[f"{name} ({number})" if name in found else name] = leaf.grad.detach().clone()
        return found

    def changes(self) -> dict[str, Any]:
        """Present values of the fields, containers and tensors that a step has changed."""
        found = {f"field {name}": value for fields in self._fields for name, value in fields.changes()}
        found |= {f"value of {each.name}": each.tensor for each in self._tensors if each.is_changed()}
        return {name: frozen_copy(value) for name, value in found.items()}

    def streams(self) -> dict[str, Any]:
        """The state of every random stream."""
        streams, _ = self._draws
        common = len(streams) - len(self._generators)
        names = [f"random stream {i} ({type(stream).__name__})" for i, stream in enumerate(streams[:common])]
        names += [f"generator {name}" for name in self._generators]
        return dict(zip(names, rng.peek(streams), strict=True))


class _Leaf:
    """The original `.grad` of a leaf. A leaf without a name may be one that a step made, and is not kept alive."""

    __slots__ = ("_copy", "_found", "_held", "_saved_version", "_trained", "_weak", "name")

    def __init__(self, name: str, leaf: Tensor, *, trained: bool) -> None:
        self.name, self._trained = name, trained
        self._held, self._weak = (leaf if name else None), hook_internals.weak_tensor(leaf)
        self._found = found = leaf.grad
        self._saved_version = None if found is None else found._version
        # On the host, so that the device holds no more gradients than in training.
        self._copy = None if found is None else found.detach().to("cpu", copy=True)

    @property
    def tensor(self) -> Tensor | None:
        return self._held if self._held is not None else self._weak()

    def reset(self, gradients: InitialGradients) -> None:
        leaf = self.tensor
        if leaf is None:
            return
        if gradients is InitialGradients.ZERO and ((self._trained and leaf.requires_grad) or self._found is not None):
            _zero(leaf)
        else:
            leaf.grad = None

    def restore(self) -> None:
        leaf, found = self.tensor, self._found
        if leaf is None:
            return
        if found is not None and found._version != self._saved_version and not has_shared_elements(found):
            found.copy_(self._copy)  # type: ignore[arg-type]  # there is a copy of what was found
        leaf.grad = found


def _zero(leaf: Tensor) -> None:
    """Zero a gradient in place (it may be a view of a buffer); replace one that cannot be written to."""
    gradient = leaf.grad
    if gradient is None or has_shared_elements(gradient):
        leaf.grad = torch.zeros_like(leaf)
        return
    if gradient.requires_grad:  # made with create_graph
        leaf.grad = gradient = gradient.detach()
    gradient.zero_()


def leaves_of(loss: Tensor) -> list[Tensor]:
    """Leaves that get a gradient in the backward of a loss, in the order of its graph."""
    if loss.grad_fn is None:
        return [loss] if loss.requires_grad else []
    leaves: list[Tensor] = []
    known, waiting = {loss.grad_fn}, [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        leaf = getattr(node, "variable", None)  # of an AccumulateGrad node
        if isinstance(leaf, Tensor):
            leaves.append(leaf)
        for following, _ in reversed(node.next_functions):
            if following is not None and following not in known:
                known.add(following)
                waiting.append(following)
    return leaves


def in_own_context(run: Callable[[], _Result]) -> _Result:
    """Run a step, or a part of one, such that context variables that it sets are as before when it has returned."""
    return copy_context().run(run)


def _is_saved(found: NamedValue) -> bool:
    """True if a tensor belongs to the model and can change; inference tensors have no version, and steps cannot write to them."""
    return not found.value.is_inference() and (found.role is not Role.SEARCHED or found.value.requires_grad)


def _save_tensor(found: NamedValue, written: set[int]) -> _SavedTensor:
    name, tensor, role = found
    size = tensor.nbytes if tensor.layout is torch.strided else TUNING.largest_copy_bytes + 1
    most = TUNING.largest_copy_bytes if role is Role.FIELD else TUNING.small_parameter_bytes
    if isinstance(tensor, nn.Parameter):
        most = TUNING.small_parameter_bytes if type(tensor) is nn.Parameter else 0
    copied = role is Role.BUFFER or id(tensor) in written or size <= most
    return _SavedTensor(name, tensor, copied=copied)


def _save_captured(tensors: list[Tensor]) -> list[_SavedTensor]:
    """Save tensors behind functions: copies of the smallest, so that a data set among them is not copied."""
    saved, total_bytes = [], 0
    found = {id(tensor): tensor for tensor in tensors if not tensor.is_inference()}
    for number, tensor in enumerate(sorted(found.values(), key=_bytes_of)):
        total_bytes += _bytes_of(tensor)
        copied = total_bytes <= TUNING.captured_bytes and number < TUNING.captured_tensors
        name = f"tensor {number} in closures, globals and hooks, of shape {tuple(tensor.shape)}"
        saved.append(_SavedTensor(name, tensor, copied=copied))
    return saved


def _bytes_of(tensor: Tensor) -> int:
    return tensor.nbytes if tensor.layout is torch.strided else TUNING.captured_bytes + 1


def _written_parameters(reach: Reachable) -> set[int]:
    """Ids of parameters that a step may write to: of embeddings with a `max_norm`, and those with hooks."""
    found = {id(each.value) for each in reach.tensors if hook_internals.has_hooks(each.value)}
    for _, module in reach.modules:
        if vars(module).get("max_norm") is not None or hook_internals.has_backward_hooks(module):
            found |= {id(parameter) for parameter in module.parameters(recurse=False)}
    return found


def frozen_copy(value: Any) -> Any:
    """A copy that can be compared later: tensors cloned, other objects by the name of their class."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return value
    if isinstance(value, dict):
        return {str(key): frozen_copy(part) for key, part in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(repr(frozen_copy(part)) for part in value)
    if isinstance(value, (list, tuple)):
        return [frozen_copy(part) for part in value]
    return type(value).__name__


def _refuse_changes(names: list[str]) -> None:
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise InvalidInput(
            f"The step changed {names[0]}{more}, of which no copy was kept, so it cannot be run again from the same start. Move "
            "the code that writes to it (an optimizer's step, an update of averages, a hook) out of the step."
        )


@contextmanager
def sandboxed(
    model: nn.Module,
    batch: Any = None,
    step: Callable[..., Any] | None = None,
    optimizer: Any = None,
    *,
    gradients: InitialGradients = InitialGradients.ZERO,
) -> Iterator[Sandbox]:
    """Yield a Sandbox at its start; leave the model, the batch and every stream as they were. FSDP2 reduces gradients meanwhile."""
    _refuse_unreduced(model)
    fsdp_internals.initialise(model)
    sandbox = Sandbox(model, batch, step, optimizer, gradients=gradients)
    with fsdp_internals.synchronised(model):
        try:
            sandbox.rewind()
            yield sandbox
        except BaseException:
            sandbox.close()
            raise
        lost = sandbox.close()
    _refuse_changes(lost)


def _refuse_unreduced(model: nn.Module) -> None:
    if fsdp_internals.has_unsharded_gradients(model):
        raise InvalidInput(
            f"{type(model).__name__} has gradients that FSDP2 has not reduced yet (set_requires_gradient_sync(False)), and steps that are "
            "only measured would reduce them. Measure or fit before the first micro-step, or after the one that reduces."
        )


class SavedContainer(Protocol):
    """The contents of a container at one time, which `restore` puts back."""

    name: str

    def changes(self) -> Iterator[tuple[str, Any]]:
        """Yield name and present value of everything that differs."""

    def restore(self) -> None: ...


def save_container(name: str, container: Any) -> SavedContainer:
    """Save the contents of a dict, set, list, deque or array."""
    if isinstance(container, dict):
        return _SavedDict(name, container)
    if isinstance(container, set):
        return _SavedSet(name, container)
    if isinstance(container, (list, deque)):
        return _SavedList(name, container)
    return _SavedArray(name, container)


class _SavedDict:
    __slots__ = ("_keys", "_live", "_saved_values", "name")

    def __init__(self, name: str, live: dict[Any, Any]) -> None:
        self.name, self._live = name, live
        with compiler_internals.unanswered(live):
            self._keys, self._saved_values = tuple(live), tuple(live.values())

    def _is_same(self) -> bool:
        live = self._live
        return (
            len(live) == len(self._keys)
            and all(map(is_, live, self._keys))
            and all(map(is_, live.values(), self._saved_values))
        )

    def changes(self) -> Iterator[tuple[str, Any]]:
        with compiler_internals.unanswered(self._live):
            yield from self._changes()

    def _changes(self) -> Iterator[tuple[str, Any]]:
        if self._is_same():
            return
        before = dict(zip(self._keys, self._saved_values, strict=True))
        numbered = self.name.rpartition(".")[2] in _HOOKS  # a hook has another number each time it is registered
        for position, key in enumerate(dict.fromkeys((*before, *self._live))):
            now = dict.get(self._live, key, _ABSENT)
            if now is not before.get(key, _ABSENT):
                yield keyed(self.name, None if numbered else key, position), (None if now is _ABSENT else now)

    def restore(self) -> None:
        with compiler_internals.unanswered(self._live):
            self._restore()

    def _restore(self) -> None:
        if self._is_same():
            return
        # Methods of a subclass may do more than set a key.
        kind: Any = OrderedDict if isinstance(self._live, OrderedDict) else dict
        if list(map(id, self._live)) != list(map(id, self._keys)):
            kind.clear(self._live)
        for key, value in zip(self._keys, self._saved_values, strict=True):
            if dict.get(self._live, key, _ABSENT) is not value:
                kind.__setitem__(self._live, key, value)


class _SavedList:
    __slots__ = ("_live", "_parts", "name")

    def __init__(self, name: str, live: Any) -> None:
        self.name, self._live, self._parts = name, live, list(live)

    def _is_same(self) -> bool:
        return len(self._live) == len(self._parts) and all(map(is_, self._live, self._parts))

    def changes(self) -> Iterator[tuple[str, Any]]:
        if not self._is_same():
            yield self.name, list(self._live)

    def restore(self) -> None:
        if self._is_same():
            return
        kind: Any = deque if isinstance(self._live, deque) else list
        kind.clear(self._live)
        kind.extend(self._live, self._parts)


class _SavedSet:
    __slots__ = ("_live", "_parts", "name")

    def __init__(self, name: str, live: set[Any]) -> None:
        self.name, self._live, self._parts = name, live, frozenset(live)

    def changes(self) -> Iterator[tuple[str, Any]]:
        if self._live != self._parts:
            yield self.name, frozenset(self._live)

    def restore(self) -> None:
        if self._live != self._parts:
            set.clear(self._live)
            set.update(self._live, self._parts)


class _SavedArray:
    """A numpy array, an array of Python's `array` module, or a bytearray."""

    __slots__ = ("_copy", "_live", "name")

    def __init__(self, name: str, live: Any) -> None:
        self.name, self._live = name, live
        too_large = getattr(live, "nbytes", 0) > TUNING.largest_copy_bytes
        self._copy = None if too_large or not _is_writable(live) else live[...].copy() if is_array(live) else live[:]

    def _is_same(self) -> bool:
        if self._copy is None:
            return True
        if is_array(self._live):
            return bool(self._live.shape == self._copy.shape and self._live.tobytes() == self._copy.tobytes())
        return bool(self._live == self._copy)

    def changes(self) -> Iterator[tuple[str, Any]]:
        if not self._is_same():
            yield self.name, self._live.tobytes() if is_array(self._live) else bytes(self._live)

    def restore(self) -> None:
        if not self._is_same():
            self._live[... if is_array(self._live) else slice(None)] = self._copy


def _is_writable(value: Any) -> bool:
    return not is_array(value) or (bool(value.flags.writeable) and not value.dtype.hasobject)


class _SavedSlots:
    """The fields of an object that are in slots."""

    __slots__ = ("_object", "_saved_values", "name")

    def __init__(self, name: str, value: Any) -> None:
        self.name, self._object, self._saved_values = name, value, slots_of(value)

    def changes(self) -> Iterator[tuple[str, Any]]:
        now = slots_of(self._object)
        for field in dict.fromkeys((*self._saved_values, *now)):
            if now.get(field, _ABSENT) is not self._saved_values.get(field, _ABSENT):
                yield f"{self.name}.{field}", now.get(field)

    def restore(self) -> None:
        now = slots_of(self._object)
        for field in now.keys() - self._saved_values.keys():
            object.__delattr__(self._object, field)
        for field, value in self._saved_values.items():
            if now.get(field, _ABSENT) is not value:
                object.__setattr__(self._object, field, value)


class _SavedTensor:
    """Version and requires_grad of a tensor and, if `copied`, its values on the host.

    A tensor that is not copied is only watched: that it was written to is known, its former values are not.
    """

    __slots__ = ("_alias", "_copy", "_needs_grad", "_saved_version", "name", "tensor")

    def __init__(self, name: str, tensor: Tensor, *, copied: bool) -> None:
        self.name, self.tensor = name, tensor
        self._needs_grad = tensor.requires_grad
        self._saved_version = tensor._version
        self._alias = tensor.detach() if _is_plain(tensor) else None  # shares its memory
        self._copy = _copied(tensor) if copied else None

    def is_changed(self) -> bool:
        """True if it was written to or its `.data` was replaced since."""
        if self._is_rebound() or self.tensor._version != self._saved_version:
            return True
        copy = self._copy
        if copy is None or copy.layout is not torch.strided:  # sparse: only the version tells
            return False
        return copy.nbytes <= TUNING.compared_bytes and not _is_equal(self.tensor, copy)

    def _is_rebound(self) -> bool:
        alias = self._alias
        return alias is not None and (self.tensor.data_ptr() != alias.data_ptr() or self.tensor.shape != alias.shape)

    def restore(self) -> bool:
        """Restore it; return False if it was written to and there is no copy."""
        if self.tensor.is_leaf and self.tensor.requires_grad != self._needs_grad:
            self.tensor.requires_grad_(self._needs_grad)
        if not self.is_changed():
            return True
        known = self._copy is not None or internals.is_fake(self.tensor)  # that has no values
        with torch.no_grad():
            if self._is_rebound() and self._alias is not None:
                known |= self.tensor._version == self._saved_version
                self.tensor.data = self._alias
            if self._copy is not None and not _is_equal(self.tensor, self._copy):
                self.tensor.detach().copy_(self._copy)
        self._saved_version = self.tensor._version
        return known


def _is_plain(tensor: Tensor) -> bool:
    return type(tensor) in _PLAIN and tensor.layout is torch.strided and not internals.is_fake(tensor)


def _copied(tensor: Tensor) -> Tensor | None:
    if internals.is_fake(tensor) or has_shared_elements(tensor):
        return None
    # A tensor subclass may not move between devices as a plain tensor does.
    return tensor.detach().to("cpu", copy=True) if _is_plain(tensor) else tensor.detach().clone()


def _is_equal(tensor: Tensor, copy: Tensor) -> bool:
    """Compare on the host, so that nothing is allocated on a device."""
    if tensor.layout is not torch.strided:
        return False
    return torch.equal(tensor.detach().cpu() if _is_plain(tensor) else tensor.detach(), copy)


def has_shared_elements(tensor: Tensor) -> bool:
    """True if several elements share one address, as in an expanded tensor; it cannot be written to in place."""
    if tensor.layout is not torch.strided:
        return False
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))

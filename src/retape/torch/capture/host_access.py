"""Calls that give Python access to a tensor's memory or values, which no op shows: `.numpy()`, `.tolist()`, `.data_ptr()`, `.data`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from retape.torch.compat import internals

_EXPOSING = frozenset(
    {
        "tolist",
        "numpy",
        "__array__",
        "data_ptr",
        "const_data_ptr",
        "mutable_data_ptr",
        "__dlpack__",
        "untyped_storage",
        "storage",
        "apply_",
    }
)
_DATA = (Tensor.data.__get__, Tensor.data.__set__)  # type: ignore[attr-defined]
_GRADIENT = Tensor.grad.__get__  # type: ignore[union-attr]
_GETTER = type(_DATA[0])  # of a method of a C type that is bound, as those of all attributes of tensors are
_CUDA_ARRAY = Tensor.__cuda_array_interface__.__get__


class TransparentMode(TorchFunctionMode):
    """A torch-function mode of retape itself, which is not captured as a part of what surrounds a call."""


class Exposure(TransparentMode):
    """A mode that reports every tensor on which such a call is made."""

    def __init__(self, tell: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._tell = tell

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (getattr(func, "__name__", "") in _EXPOSING or func is _CUDA_ARRAY) and args and isinstance(args[0], Tensor):
            self._tell(args[0])
        return func(*args, **(kwargs or {}))


class FieldAccess(TransparentMode):
    """A mode that reports every tensor whose `.data` is read or set, or whose `.grad` is read, before that happens."""

    def __init__(self, on_data: Callable[[Tensor], None], on_gradient: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._on_data, self._on_gradient = on_data, on_gradient

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if type(func) is _GETTER and isinstance(args[0], Tensor):
            if func in _DATA:
                self._on_data(args[0])
            elif func == _GRADIENT:
                self._on_gradient(args[0])
        return func(*args, **kwargs) if kwargs else func(*args)


class Observer(TorchDispatchMode):
    """A dispatch mode whose `exposed` is called with the tensor of each such call."""

    def __init__(self) -> None:
        super().__init__()
        self._exposure: Exposure | None = None

    def exposed(self, tensor: Tensor) -> None:
        raise NotImplementedError

    def __enter__(self) -> Any:
        self._exposure = Exposure(self.exposed)
        self._exposure.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        exposure, self._exposure = self._exposure, None  # it refers to this object, so keeping it would be a cycle
        if exposure is not None:
            exposure.__exit__(*error)


class ReadGuard(Observer):
    """A mode that raises `error_of` a tensor, among some that were changed since the forward, where a re-run reads it."""

    def __init__(self, suspects: list[Tensor], error_of: Callable[[Tensor], Exception]) -> None:
        super().__init__()
        self._error_of = error_of
        self._suspects = {tensor.untyped_storage()._cdata: tensor for tensor in suspects}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self.saw_slot(leaf)
        return func(*args, **(kwargs or {}))

    def exposed(self, tensor: Tensor) -> None:
        self.saw_slot(tensor)

    def saw_slot(self, tensor: Tensor) -> None:
        suspect = self._suspects.get(internals.untyped_storage(tensor)._cdata)
        if suspect is not None:
            raise self._error_of(suspect)

"""Private interfaces of PyTorch's compiler, each behind one small function; the others are in `internals.py`."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import MethodType
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch._compile import _disable_dynamo
from torch.utils._python_dispatch import TorchDispatchMode

_Function = TypeVar("_Function", bound=Callable[..., Any])


# --- the call of a module ---------------------------------------------------------------------------------------------
#
# `nn.Module.__call__` first asks a field of the module, in which `Module.compile` puts what it compiled. Copies and pickles leave it out.

CALL_FIELD = "_compiled_call_impl"
call_impl = nn.Module._call_impl  # the forward and the hooks of a module, whatever is in that field
_CALL_CODE = nn.Module._wrapped_call_impl.__code__  # which asks that field, and has the module in its variable `self`
_Answer = Callable[[nn.Module, Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class AnsweredCall:
    """In a module's field: `answer(module, plain_call, arguments, keywords)` is asked when it is called. `compiled` was there before.

    `module` is the one that is called: another one may have taken over the fields of the one that this was made for.
    """

    __slots__ = ("_answer", "_module", "compiled")

    def __init__(self, module: nn.Module, answer: _Answer) -> None:
        self._module, self._answer = weakref.ref(module), answer
        before = vars(module).get(CALL_FIELD)
        self.compiled: Callable[..., Any] | None = None if type(before) is AnsweredCall else before

    def __call__(self, /, *arguments: Any, **keywords: Any) -> Any:
        own, frame = self._module(), sys._getframe(1)
        module: Any = frame.f_locals["self"] if frame.f_code is _CALL_CODE else own
        plain = module._call_impl if self.compiled is None or module is not own else MethodType(plain_call, module)
        return self._answer(module, plain, arguments, keywords)

    def __reduce__(self) -> Any:
        """Copies and pickles of a module that do not leave the field out, as those of torch.compile's wrapper, have None there."""
        return type(None), ()


def answer_calls(module: nn.Module, answer: _Answer) -> None:
    """Let `answer` be asked when a module is called, outside the module's hooks."""
    vars(module)[CALL_FIELD] = AnsweredCall(module, answer)


def leave_calls(module: nn.Module) -> None:
    """Undo `answer_calls`."""
    fields = vars(module)
    if is_answered(module):
        _put_call(fields, fields[CALL_FIELD].compiled)


def is_answered(module: nn.Module) -> bool:
    """True if `answer_calls` holds for a module; `Module.compile` ends it."""
    return type(vars(module).get(CALL_FIELD)) is AnsweredCall


@contextmanager
def unanswered(fields: dict[Any, Any]) -> Iterator[None]:
    """Show the fields of a module, or another dict, as they are without `answer_calls`, which holds again afterwards."""
    answered = dict.get(fields, CALL_FIELD)
    if type(answered) is not AnsweredCall:
        yield
        return
    _put_call(fields, answered.compiled)
    try:
        yield
    finally:
        _put_call(fields, answered)


def _put_call(fields: dict[Any, Any], value: Any) -> None:
    if value is None:
        fields.pop(CALL_FIELD, None)
    else:
        fields[CALL_FIELD] = value


def plain_call(module: nn.Module, /, *arguments: Any, **keywords: Any) -> Any:
    """Call a module as without `answer_calls`."""
    compiled = _compiled_call(module)
    if compiled is None:
        return call_impl(module, *arguments, **keywords)
    return compiled(*arguments, **keywords)


def _compiled_call(value: Any) -> Callable[..., Any] | None:
    """Return what `Module.compile` made of the call of a module."""
    found = getattr(value, CALL_FIELD, None)
    return found.compiled if type(found) is AnsweredCall else found


# --- compiled code ----------------------------------------------------------------------------------------------------


def is_compiled(value: Any) -> bool:
    """True if a module or function is the result of torch.compile."""
    return (
        type(value).__name__ == "OptimizedModule"
        or _compiled_call(value) is not None
        or hasattr(value, "_torchdynamo_orig_callable")
    )


def uncompiled_function(function: Any) -> Any:
    """Return the function from which torch.compile made another; a function that it did not make is returned as it is."""
    found = getattr(function, "_torchdynamo_orig_callable", function)
    # Around a function of PyTorch's own, the compiler puts one that it can trace.
    is_around = getattr(found, "__globals__", {}).get("__name__") == "torch._dynamo.external_utils"
    return found.__wrapped__ if is_around else found


def compiler_is_on() -> bool:
    """True if frames entered now would be compiled: a compiled caller has broken its graph to call this."""
    return _compiler_callback() is not None


_eval_frame = torch._C._dynamo.eval_frame
_compiler_callback = _eval_frame.get_eval_frame_callback
_CAN_MARK = hasattr(_eval_frame, "set_code_exec_strategy")


def left_alone(function: _Function) -> _Function:
    """Mark a function so that the compiler does not compile it or what it calls; return it.

    Unlike `uncompiled` it costs nothing, and does not show in the graph of a caller that is being compiled.
    """
    if _CAN_MARK:
        skip = _eval_frame._FrameAction.SKIP
        _eval_frame.set_code_exec_strategy(function.__code__, _eval_frame._FrameExecStrategy(skip, skip))
    return function


class LightMode(TorchDispatchMode):
    """A dispatch mode whose method is called without the compiler's wrapper, which takes as long as a small op."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        if _CAN_MARK:
            left_alone(cls.__torch_dispatch__)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return not _CAN_MARK


def uncompiled(function: _Function) -> _Function:
    """Return a function that compiled callers call uncompiled; the compiler is not imported for it."""
    return cast(_Function, _disable_dynamo(function))


_ATTENTIONS = (  # fused kernels that the partitioner of some releases takes for cheap, and always recomputes
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
)
# Compiled code is cached by its share: this makes it differ from the same share with cheap attention.
_SHARE_OFFSET = 1e-6


def inductor_saving(share: float) -> Callable[..., Any]:
    """Return a torch.compile backend whose functions save this share of the tensors that they would save by default."""
    budget = share - _SHARE_OFFSET if 0 < share < 1 else share

    def backend(graph: Any, inputs: Any, **keywords: Any) -> Any:
        from torch._functorch import config
        from torch._inductor.compile_fx import compile_fx

        with config.patch(activation_memory_budget=budget), costly_attention():
            return compile_fx(graph, inputs, **keywords)

    return backend


@contextmanager
def costly_attention() -> Iterator[None]:
    """Make the compiler's partitioner treat fused attention as compute-intensive, like a matrix product."""
    from torch._functorch import partitioners
    from torch.utils.flop_counter import flop_registry

    plain = partitioners.get_default_op_list
    attentions = [getattr(torch.ops.aten, name) for name in _ATTENTIONS if hasattr(torch.ops.aten, name)]
    uncounted = [attention for attention in attentions if attention not in flop_registry]

    def with_attention() -> Any:
        known = plain()
        known.compute_intensive_ops.update(attentions)
        return known

    partitioners.get_default_op_list = with_attention
    flop_registry.update(dict.fromkeys(uncounted, flop_registry[torch.ops.aten._scaled_dot_product_flash_attention]))
    try:
        yield
    finally:
        partitioners.get_default_op_list = plain
        for attention in uncounted:
            flop_registry.pop(attention, None)


_CONFIG_MODULES = ("torch._inductor.config", "torch._functorch.config", "torch._dynamo.config")


def is_compiler_setting(name: str) -> bool:
    """True for the name of a context variable of the compiler: it has one for each of its settings that was ever changed."""
    loaded = [sys.modules.get(module) for module in _CONFIG_MODULES]
    return name.startswith("torch._") or any(name in getattr(module, "_config", ()) for module in loaded)


def many_compilations() -> AbstractContextManager[Any]:
    """Allow 64 compilations of a function; one more raises an error instead of running eagerly."""
    from torch._dynamo import config

    return config.patch(recompile_limit=64, fail_on_recompile_limit_hit=True)  # type: ignore[no-any-return]


def compiler_errors() -> tuple[type[BaseException], ...]:
    """Return the exceptions that the compiler raises when it cannot compile something."""
    from torch._dynamo import exc

    return (exc.TorchDynamoException, exc.FailOnRecompileLimitHit)


def reason_of(error: BaseException) -> str:
    """Return why the compiler failed, in one line: class and last line of the exception that it wraps, without its advice."""
    while isinstance(inner := getattr(error, "inner_exception", None) or error.__cause__, BaseException):
        error = inner
    text = str(error).split(_USER_CODE)[0]
    lines = [line for line in map(str.strip, text.splitlines()) if line and not line.startswith(_ADVICE)]
    explained = [line for line in lines if line.startswith(_EXPLANATION)]
    last = (explained or lines or [""])[-1].removeprefix(_EXPLANATION).strip()
    name = type(error).__name__
    reason = last if last.startswith(name) else f"{name}: {last}" if last else name
    return reason if len(reason) <= _LONGEST_REASON else f"{reason[:_LONGEST_REASON]}..."


_USER_CODE = "from user code:"  # then come frames of the user's code
_EXPLANATION = "Explanation:"
_ADVICE = ("Set TORCHDYNAMO_VERBOSE", "Hint:", "Developer debug context:", "For more details about this graph break")
_LONGEST_REASON = 300  # characters: a failed build names its whole command


def replays_cuda_graphs(module: Any) -> bool:
    """True if a module was compiled by its user in a mode that records CUDA graphs."""
    compiled = _compiled_call(module) or module
    read = getattr(compiled, "get_compiler_config", None)
    config = read() if callable(read) else None
    return bool(config and config.get("triton.cudagraphs"))

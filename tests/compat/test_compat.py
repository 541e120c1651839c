"""A canary for each private interface in `_compat`: when a release moves one, the test that fails has its name."""

import ast
import contextvars
import copy
import inspect
import os
import pickle
import random
import struct
import subprocess
import sys
import threading
import time
import warnings
import weakref
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.utils.flop_counter
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import parametrize
from torch.utils import checkpoint as torchs
from torch.utils._python_dispatch import TorchDispatchMode

from retape.torch.capture.holders.tensor_attributes import NO_HOOKS, hook_counts
from retape.torch.capture.mutation import version_of
from retape.torch.compat import compiler_internals, device_allocator, hook_internals, internals, process_internals
from support.forked import run_script


def identity(value):
    return value


def names_of(module):
    """The public names that a module defines at its top, as opposed to what it imports."""
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.FunctionDef):
            yield node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def test_every_name_has_a_canary():
    names = {
        name
        for module in (internals, compiler_internals, process_internals, hook_internals, device_allocator)
        for name in names_of(module)
        if not name.startswith("_")
    }
    names -= {"PolicyFunction", "log"}
    missing = sorted(name for name in names if f"test_{name.lower()}" not in globals())
    assert not missing, f"no canary for {missing}"


def test_is_compiler_setting():
    """A setting that was changed is in a context variable of its name, and a patch leaves one with a name of PyTorch's.

    Settings of PyTorch 2.11 are in no context variable.
    """
    from torch._dynamo import config

    before = set(contextvars.copy_context())
    with config.patch(verbose=True):
        bound = contextvars.copy_context()
    assert "verbose" in {variable.name for variable in bound} or torch.__version__ < "2.12"
    assert all(compiler_internals.is_compiler_setting(variable.name) for variable in bound if variable not in before)
    assert not compiler_internals.is_compiler_setting("COLLECTOR")


def test_torch_checkpoint():
    x = torch.randn(3, requires_grad=True)
    internals.TORCH_CHECKPOINT(torch.sin, x, use_reentrant=False).sum().backward()
    assert torch.equal(x.grad, x.detach().cos())
    assert internals.TORCH_CHECKPOINT.__module__ == "torch.utils.checkpoint"


def test_addresses():
    items = (object(), "text", None, 2.5)
    found = process_internals.addresses(items)
    assert found == struct.pack("4P", *map(id, items))
    assert found == process_internals.addresses((*items,))
    assert found != process_internals.addresses((*items[:3], float("2.5")))
    assert process_internals.addresses(()) == b""


def test_leaf_node():
    leaf = torch.zeros(2, requires_grad=True)
    (node, _), *_ = (2 * leaf).grad_fn.next_functions
    assert type(node) is internals.LEAF_NODE
    assert node.variable is leaf


def test_computed_from_another():
    leaf = torch.zeros(2, requires_grad=True)
    made = leaf.exp()
    later = made.sin().cos()
    assert internals.computed_from_another([later]) is None
    assert internals.computed_from_another([leaf.sin(), leaf.cos()]) is None
    assert internals.computed_from_another([made, later]) == "a result of ExpBackward0"
    assert internals.computed_from_another([leaf, later]) == "a parameter of shape (2,)"


def test_top_hooks():
    assert internals.top_hooks(True) is None
    with saved_tensors_hooks(identity, identity):
        assert internals.top_hooks(True) is not None
    assert internals.top_hooks(True) is None


def test_push_hooks():
    seen, x = [], torch.randn(3, requires_grad=True)
    internals.push_hooks(lambda t: seen.append(t.shape) or t, identity)
    try:
        y = x.sin()
    finally:
        internals.pop_hooks()
    x.sin()
    y.sum().backward()
    assert seen == [(3,)]


def test_pop_hooks():
    internals.push_hooks(identity, identity)
    internals.pop_hooks()
    assert internals.top_hooks(True) is None


def in_backward(action):
    """Run something inside a backward pass; returns what it returned."""
    found = []
    x = torch.randn(3, requires_grad=True)
    x.register_hook(lambda g: found.append(action()))
    x.sum().backward()
    return found[0]


def test_graph_task():
    assert internals.graph_task() == -1
    first, second = in_backward(internals.graph_task), in_backward(internals.graph_task)
    assert 0 <= first < second


@pytest.mark.parametrize("kept", [True, False])
def test_graph_is_kept(kept):
    x, seen = torch.ones(2, requires_grad=True), []
    out = (x * 2).sum()
    out.grad_fn.register_prehook(lambda gradients: seen.append(internals.graph_is_kept()))
    out.backward(retain_graph=kept)
    assert seen == [kept]


def test_sequence_number():
    x = torch.ones(2, requires_grad=True)
    first, second = x * 1, x * 2
    assert internals.sequence_number(first.grad_fn) < internals.sequence_number(second.grad_fn)
    leaf = second.grad_fn.next_functions[0][0]
    assert leaf.variable is x
    assert internals.sequence_number(leaf) > internals.sequence_number(second.grad_fn)


@pytest.mark.parametrize("shape", [(4, 3), (2, 4, 3)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_places(shape, bias):
    layer = torch.nn.Linear(3, 2, bias=bias)
    node = layer(torch.randn(shape)).grad_fn
    node = node if internals.linear_places(node) else node.next_functions[0][0]
    at_weight, at_bias = internals.linear_places(node)
    assert at_weight[0].name() == "TBackward0"
    assert at_weight[0].next_functions[0][0].variable is layer.weight
    assert (at_bias[0].variable is layer.bias) if bias else (at_bias is None)
    assert internals.linear_places(torch.addmm(layer.weight, layer.weight, torch.ones(3, 3), alpha=2).grad_fn) is None
    assert internals.linear_places(layer.weight.sin().grad_fn) is None


@pytest.mark.parametrize("bias", [True, False])
def test_linear_rows(bias):
    x = torch.randn(4, 3)
    assert torch.equal(internals.linear_rows(torch.nn.Linear(3, 2, bias=bias)(x).grad_fn), x)


def test_next_sequence_number():
    before = internals.next_sequence_number()
    node = (torch.ones(1, requires_grad=True) * 2).grad_fn
    assert internals.sequence_number(node) == before < internals.next_sequence_number()


def test_run_backward():
    x = torch.randn(3, requires_grad=True)
    loss = x.sin().sum()
    internals.run_backward(loss, torch.ones_like(loss), keep_graph=True)
    assert torch.equal(x.grad, x.detach().cos())
    internals.run_backward(loss, torch.ones_like(loss), inputs=x)
    assert torch.equal(x.grad, 2 * x.detach().cos())


def test_at_end_of_backward():
    order = []
    in_backward(lambda: (internals.at_end_of_backward(lambda: order.append("end")), order.append("hook")))
    assert order == ["hook", "end"]


class RefusingFunctions(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        raise AssertionError("a mode noticed")


def test_untyped_storage():
    tensor = torch.randn(3)
    with RefusingFunctions():
        storage = internals.untyped_storage(tensor)
    assert storage.data_ptr() == tensor.data_ptr()


def test_untyped_storages():
    tensors = [torch.randn(3), torch.randn(2)]
    with RefusingFunctions():
        storages = internals.untyped_storages(tensors)
    assert [storage.data_ptr() for storage in storages] == [tensor.data_ptr() for tensor in tensors]


def test_unobserved():
    class Refusing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise AssertionError("a mode noticed")

    with Refusing():
        with internals.unobserved():
            torch.ones(3).sin()
        with pytest.raises(AssertionError, match="noticed"):
            torch.ones(3)
        with RefusingFunctions(), internals.unobserved():
            torch.ones(3).sin()
    with RefusingFunctions() as mode:
        with internals.unobserved():
            torch.ones(3)
        assert internals.function_modes() == (mode,)
    with internals.unobserved():
        torch.ones(3)


def test_write_unseen():
    tensor = torch.zeros(3)
    version = version_of(tensor)
    internals.write_unseen(tensor, torch.ones(3))
    assert tensor.tolist() == [1, 1, 1]
    assert version_of(tensor) == version


def test_versions_kept():
    tensors = [torch.zeros(3), torch.zeros(2)]
    versions = [version_of(tensor) for tensor in tensors]
    with internals.versions_kept(tensors):
        for tensor in tensors:
            tensor.add_(1)
            assert version_of(tensor) not in versions
    assert [version_of(tensor) for tensor in tensors] == versions


def test_detach_unseen():
    seen = []

    class Watcher(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.randn(3, requires_grad=True).sin()
    with Watcher():
        alias = internals.detach_unseen(x)
    assert not seen
    assert not alias.requires_grad
    assert alias.data_ptr() == x.data_ptr()


def test_is_fake():
    assert internals.is_fake(torch.empty(2, device="meta"))
    assert not internals.is_fake(torch.empty(2))


def test_neg_view():
    x = torch.ones(3)
    assert internals.neg_view(x).is_neg()
    assert internals.neg_view(x).tolist() == [-1, -1, -1]


def test_norms():
    assert issubclass(torch.nn.BatchNorm1d, internals.NORMS)
    assert issubclass(torch.nn.InstanceNorm1d, internals.NORMS)
    assert not issubclass(torch.nn.LayerNorm, internals.NORMS)


def test_call_field():
    """`Module.compile` puts what it compiled there; a call asks it first, and copies leave it out."""
    module = torch.nn.Linear(2, 2)
    assert getattr(module, compiler_internals.CALL_FIELD) is None
    module.compile(backend="eager")
    assert vars(module)[compiler_internals.CALL_FIELD] is not None
    vars(module)[compiler_internals.CALL_FIELD] = lambda x: "answered"
    assert module(None) == "answered"
    assert compiler_internals.CALL_FIELD not in vars(copy.deepcopy(module))
    assert compiler_internals.CALL_FIELD not in vars(pickle.loads(pickle.dumps(module)))


def test_call_impl():
    """It runs the hooks of a module, and does not ask the field."""
    module, seen = torch.nn.Identity(), []
    module.register_forward_hook(lambda *given: seen.append(given))
    vars(module)[compiler_internals.CALL_FIELD] = None.__ne__
    assert compiler_internals.call_impl(module, 3) == 3
    assert len(seen) == 1


def asked(module, plain_call, arguments, keywords):
    return plain_call(*arguments, **keywords) + 1


def test_answer_calls():
    module = torch.nn.Identity()
    compiler_internals.answer_calls(module, asked)
    assert module(3) == 4


def test_copies_of_the_wrapper_of_a_compiled_module_are_plain():
    module = torch.compile(torch.nn.Identity(), backend="eager")
    compiler_internals.answer_calls(module, asked)
    assert module(3) == 4
    for made in (copy.deepcopy(module), copy.copy(module)):
        assert made(3) == 3
    assert pickle.loads(pickle.dumps(vars(module)[compiler_internals.CALL_FIELD])) is None
    torch.compiler.reset()  # a frame without tensors is remembered as one to skip


def test_leave_calls():
    module = torch.nn.Identity()
    compiler_internals.leave_calls(module)
    compiler_internals.answer_calls(module, asked)
    compiler_internals.leave_calls(module)
    assert module(3) == 3
    assert vars(module).keys() == vars(torch.nn.Identity()).keys()


def test_is_answered():
    module = torch.nn.Identity()
    assert not compiler_internals.is_answered(module)
    compiler_internals.answer_calls(module, asked)
    assert compiler_internals.is_answered(module)
    module.compile(backend="eager")
    assert not compiler_internals.is_answered(module)


def test_plain_call():
    module = torch.nn.Identity()
    module.compile(backend="eager")
    compiler_internals.answer_calls(module, asked)
    assert compiler_internals.plain_call(module, 3) == 3


def test_unanswered():
    module = torch.nn.Identity()
    compiler_internals.answer_calls(module, asked)
    with compiler_internals.unanswered(vars(module)):
        assert module(3) == 3
    assert module(3) == 4
    with compiler_internals.unanswered({"other": 1}):
        pass


def test_is_compiled():
    assert not compiler_internals.is_compiled(torch.sin)
    assert not compiler_internals.is_compiled(torch.nn.Linear(2, 2))
    assert compiler_internals.is_compiled(torch.compile(torch.nn.Linear(2, 2), backend="eager"))
    assert compiler_internals.is_compiled(torch.compile(lambda a: a, backend="eager"))


def compiler_error(call, **how):
    with pytest.raises(compiler_internals.compiler_errors()) as caught:
        torch.compile(call, **how)(torch.ones(2))
    return caught.value


def test_reason_of():
    def backend(graph, inputs, **keywords):
        raise FileNotFoundError("Failed to build:\n  cc -o x\n\nno C compiler found")

    found = compiler_error(torch.sin, backend=backend)
    assert compiler_internals.reason_of(found) == "FileNotFoundError: no C compiler found"


def test_the_reason_of_code_that_cannot_be_traced():
    """PyTorch after 2.13 says it in other words."""
    found = compiler_internals.reason_of(compiler_error(lambda a: str(a.sum().item()), backend="eager", fullgraph=True))
    message = "Unsupported: Dynamo does not know how to trace builtin operator `str`"
    assert found.startswith(message if torch.__version__ < "2.14" else "Unsupported: ")
    assert "\n" not in found


def test_the_reason_of_an_error_without_a_message():
    class Silent(Exception):
        pass

    assert compiler_internals.reason_of(Silent()) == "Silent"
    assert compiler_internals.reason_of(Silent("x" * 1000)).endswith("xxx...")


def test_compiler_is_on():
    seen = []

    def note():
        seen.append(compiler_internals.compiler_is_on())

    alone, with_all_it_calls = torch.compiler.disable(note, recursive=False), compiler_internals.uncompiled(note)

    def caller(a):
        alone()
        with_all_it_calls()
        return a

    torch.compile(caller, backend="eager")(torch.ones(1))
    assert not compiler_internals.compiler_is_on()
    assert seen == [True, False]


def test_uncompiled_function():
    module = torch.nn.Linear(2, 2)
    compiled = torch.compile(module.forward, backend="eager")
    assert compiler_internals.uncompiled_function(compiled) in (torch.nn.Linear.forward, module.forward)
    assert compiler_internals.uncompiled_function(module.forward) == module.forward


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_left_alone():
    """A backward pass that a compiled function starts runs hooks as they are, with all they call."""
    seen, graphs = [], []

    def looked_at():
        seen.append(compiler_internals.compiler_is_on())

    def note(gradient):
        looked_at()
        return gradient * 2

    def backward(loss):
        loss.backward()

    x = torch.ones(3, requires_grad=True)
    for hook in (note, compiler_internals.left_alone(note)):
        y = x.sin()
        y.register_hook(hook)
        torch.compile(backward, backend=lambda graph, inputs: graphs.append(graph) or graph)(y.sum())
    assert seen[-1] is False


def test_lightmode():
    """Not wrapped, and not compiled either, though the compiler is on for what is called inside."""

    def looked_at(func):
        seen.append((str(func), compiler_internals.compiler_is_on()))

    class Mode(compiler_internals.LightMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            looked_at(func)
            return func(*args, **(kwargs or {}))

    def function(a):
        a = a.sin()
        torch._dynamo.graph_break()
        return a.cos()

    seen, graphs = [], []
    assert Mode.__torch_dispatch__.__code__.co_name == "__torch_dispatch__", "nothing is wrapped around it"
    compiled = torch.compile(function, backend=lambda graph, inputs: graphs.append(graph.code) or graph)
    with Mode():
        compiled(torch.ones(1))
    assert ("aten.sin.default", False) in seen
    assert ("aten.cos.default", False) in seen
    assert not any(on for _, on in seen)
    assert not graphs, "nothing of the mode, nor of what it calls"


def test_uncompiled():
    """Neither the function nor what it calls is traced, and what is around it is."""
    seen = []

    def noted():
        seen.append(torch.compiler.is_compiling())

    @compiler_internals.uncompiled
    def function(a):
        noted()
        return a + 1

    def caller(a):
        return function(a * 2) if torch.compiler.is_compiling() else a

    a = torch.ones(2)
    assert torch.equal(function(a), a + 1)
    assert torch.equal(torch.compile(caller, backend="eager")(a), 2 * a + 1)
    assert seen == [False, False]


def test_functorch_transform():
    seen = []
    assert internals.functorch_transform() is None
    torch.func.grad(lambda a: seen.append(internals.functorch_transform()) or a.sum())(torch.randn(3))
    torch.func.vmap(lambda a: seen.append(internals.functorch_transform()) or a)(torch.randn(3))
    assert seen == ["grad", "vmap"]
    assert internals.functorch_transform() is None


def test_forward_mode_active():
    assert not internals.forward_mode_active()
    with forward_ad.dual_level():
        assert internals.forward_mode_active()


def test_cuda_devices_in_use():
    if not torch.cuda.is_initialized():
        assert internals.cuda_devices_in_use() == ()
    else:
        assert torch.cuda.current_device() in internals.cuda_devices_in_use()


def saving(ctx, func, *args, **kwargs):
    return (
        torchs.CheckpointPolicy.MUST_SAVE
        if func is torch.ops.aten.sin.default
        else torchs.CheckpointPolicy.PREFER_RECOMPUTE
    )


def test_selective_policy():
    first, again = torchs.create_selective_checkpoint_contexts(saving)
    policy = internals.selective_policy(first)
    assert callable(policy)
    assert internals.selective_policy(again) is None


def test_is_selective_replay():
    first, again = torchs.create_selective_checkpoint_contexts(saving)
    assert internals.is_selective_replay(again)
    assert not internals.is_selective_replay(first)


def test_policy_saves():
    x = torch.randn(3)
    assert internals.policy_saves(saving, torch.ops.aten.sin.default, (x,), {}, x.sin())
    assert not internals.policy_saves(saving, torch.ops.aten.cos.default, (x,), {}, x.cos())
    assert internals.policy_saves(lambda *a, **k: True, torch.ops.aten.cos.default, (x,), {}, x)


def test_selective_key():
    op = torch.ops.aten.sin.default
    assert internals.selective_key(op, (torch.randn(3),)) is op


def test_selective_mutation_allowed():
    for allowed in (True, False):
        _, again = torchs.create_selective_checkpoint_contexts(saving, allow_cache_entry_mutation=allowed)
        assert internals.selective_mutation_allowed(again) is allowed


def test_checkpoint_settings():
    assert internals.checkpoint_settings() == (None, None)
    with torchs.set_checkpoint_early_stop(False):
        assert internals.checkpoint_settings() == (None, False)
    with torchs.set_checkpoint_debug_enabled(True):
        assert internals.checkpoint_settings() == (True, None)


@internals.at_trace_time
def noted():
    NOTES.append(torch.compiler.is_compiling())
    return True


NOTES = []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_at_trace_time():
    compiled = torch.compile(lambda a: a + 1 if noted() else a, backend="eager", fullgraph=True)
    for _ in range(2):
        assert compiled(torch.ones(1)).item() == 2
    assert len(NOTES) == 1  # called while tracing, and not by what was compiled


def test_in_odd_surroundings():
    assert not internals.in_odd_surroundings()
    assert torch.func.vmap(lambda a: a * internals.in_odd_surroundings())(torch.ones(2)).all()
    with forward_ad.dual_level():
        assert internals.in_odd_surroundings()
    assert not internals.in_odd_surroundings()


def test_count_dispatch_modes():
    assert internals.count_dispatch_modes() == 0
    with TorchDispatchMode():
        assert internals.count_dispatch_modes() == 1


def test_dispatch_modes():
    """Outermost first; PyTorch's own, such as the counter of FLOPs, are left out."""

    class Mine(TorchDispatchMode):
        pass

    assert internals.dispatch_modes() == ()
    with Mine() as first, torch.utils.flop_counter.FlopCounterMode(display=False), Mine() as second:
        assert internals.dispatch_modes() == (first, second)


def test_cuda_built():
    assert hasattr(torch._C, "_cuda_getDeviceCount") == internals.CUDA_BUILT


def test_cuda_initialized():
    assert internals.cuda_initialized() == torch.cuda.is_initialized()


DRAWS = {
    "nothing": lambda g: None,
    "uniform": lambda g: torch.rand(3, generator=g),
    "a twister's length": lambda g: torch.rand(624, generator=g),
    "one normal number": lambda g: torch.randn(1, generator=g),
    "doubles": lambda g: torch.randn(3, generator=g, dtype=torch.float64),
    "many": lambda g: torch.randn(100, generator=g),
    "log normal": lambda g: torch.empty(1).log_normal_(generator=g),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("seed", [0, 7, 2**63 - 1])
def test_generator_words(draw, seed):
    generator = torch.Generator().manual_seed(seed)
    words = internals.generator_words(generator)
    for _ in range(3):
        before, state = [each.raw for each in words], generator.get_state()
        draw(generator)
        has_moved = not torch.equal(state, generator.get_state())
        assert has_moved == (before != [each.raw for each in words])


def test_generator_position():
    assert internals.generator_position(torch.Generator()) is None
    assert hasattr(torch.Generator, "initial_seed")
    assert hasattr(torch.Generator, "get_offset")
    if not torch.cuda.is_available():
        return
    generator = torch.Generator("cuda").manual_seed(3)
    position = internals.generator_position(generator)
    for draw in (lambda: torch.rand(5, device="cuda", generator=generator), lambda: generator.manual_seed(4)):
        before, state = position(), generator.get_state()
        assert position() == before
        draw()
        assert position() != before
        generator.set_state(state)
        assert position() == before


def test_python_random_words():
    words = internals.python_random_words()
    if words is None:
        pytest.skip("not CPython's layout: the public state is used instead")
    before = words.raw
    random.random()
    assert words.raw != before
    index, *state = struct.unpack("=625I", words.raw)
    assert (*state, index) == random.getstate()[1]


def test_numpy_generator():
    assert internals.numpy_generator() is np.random.get_bit_generator()


def test_numpy_random_words():
    words = internals.numpy_random_words(internals.numpy_generator())
    before = words.raw
    np.random.rand()
    assert words.raw != before
    numbers = np.frombuffer(words.raw, dtype=np.uint32)
    assert (numbers[:624] == np.random.get_state()[1]).all()
    assert numbers[624] == np.random.get_state()[2]
    assert internals.numpy_random_words(np.random.PCG64()) is None


def test_numpy_spare_words():
    np.random.seed(0)
    np.random.randn()
    words = internals.numpy_spare_words()
    flag, spare = struct.unpack("=ixxxxd", words.raw)
    assert (flag, spare) == np.random.get_state()[3:]
    np.random.randn()
    assert struct.unpack("=ixxxxd", words.raw)[0] == 0


def test_function_modes():
    assert internals.function_modes() == ()
    with torch.device("cpu") as device:
        assert len(internals.function_modes()) == 1
        assert internals.function_modes()[0].device == device


def test_parametrizations_cached():
    assert not internals.parametrizations_cached()
    with parametrize.cached():
        assert internals.parametrizations_cached()
        assert internals.in_odd_surroundings()


def test_count_function_modes():
    assert internals.count_function_modes() == 0
    with torch.device("cpu"):
        assert internals.count_function_modes() == 1


def test_set_grad_enabled():
    try:
        internals.set_grad_enabled(False)
        assert not torch.is_grad_enabled()
    finally:
        internals.set_grad_enabled(True)
    assert torch.is_grad_enabled()


def test_ignored_ops():
    assert torch.ops.aten.detach.default in internals.IGNORED_OPS
    assert torch.ops.aten.sin.default not in internals.IGNORED_OPS


def test_detach_below_autograd():
    x = torch.randn(3, requires_grad=True).sin()
    alias = internals.detach_below_autograd(x)
    assert alias.data_ptr() == x.data_ptr()
    assert not alias.requires_grad


@pytest.mark.parametrize("setting", internals.SETTINGS, ids=lambda setting: setting[0])
def test_settings(setting):
    _, get, put = setting
    before = get()
    other = {bool: lambda v: not v, tuple: lambda v: (not v[0], v[1]), str: lambda v: "medium", int: lambda v: v + 1}
    changed = other.get(type(before), lambda v: torch.float64)(before)
    try:
        put(changed)
        assert get() == changed
    finally:
        put(before)
    assert get() == before


def test_read_settings():
    assert internals.read_settings() == [get() for _, get, _ in internals.SETTINGS]


def test_compiled_code():
    assert callable(internals.COMPILED_CODE) or internals.COMPILED_CODE is None


def test_memory_events_count_frees_in_other_threads():
    """As those of gloo, which hold the last reference to what they have sent."""
    with internals.memory_events() as events:
        box = [torch.UntypedStorage(1 << 20)]
        other = threading.Thread(target=box.clear)
        other.start()
        other.join()
        internals.mark_memory()
    assert sum(size for _, size in events if size) == 0
    assert [size for _, size in events] == [1 << 20, -(1 << 20), None]


def test_memory_events():
    with internals.memory_events() as events:
        kept = torch.empty(1000, dtype=torch.uint8)
        internals.mark_memory()
        del kept
    sizes = [what for _, what in events]
    place = sizes.index(None)
    assert sum(sizes[:place]) == 1000
    assert sum(sizes[place + 1 :]) == -1000
    assert [at for at, _ in events] == sorted(at for at, _ in events)


def test_memory_events_leave_out_frees_of_what_was_there_before():
    """PyTorch knows the address from the earlier profile, and the bytes that were there then."""
    with internals.memory_events():
        kept = torch.UntypedStorage(1 << 20)
    with internals.memory_events() as events:
        del kept
        held = torch.UntypedStorage(1 << 10)
    assert [size for _, size in events] == [held.nbytes()]


def test_mark_memory():
    with internals.memory_events() as events:
        for _ in range(100):
            internals.mark_memory()
    assert [what for _, what in events] == [None] * 100


def test_a_scale_that_ends_inside_a_function_leaves_it_no_pointer(monkeypatch):
    """What it recorded would be written to when the function ends under the next scale: freed memory, and somebody else's numbers."""
    names, disable = set(), torch._C._autograd._disable_profiler

    def noted():
        results = disable()
        names.update(event.name() for event in results.events())
        return results

    monkeypatch.setattr(torch._C._autograd, "_disable_profiler", noted)
    x = torch.ones(100, requires_grad=True)
    with ExitStack() as first:
        first.enter_context(internals.memory_events())
        with (
            torch.autograd.profiler.record_function("a user's"),
            torch._C._profiler._RecordFunctionFast("a compiler's"),
        ):
            x.sin().sum().backward()
            first.close()
            with internals.memory_events():
                x.cos().sum().backward()
    assert names == {"[memory]"}


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")  # a profiler of PyTorch 2.11 says so
def test_profiler_running():
    assert not internals.profiler_running()
    with internals.memory_events():
        assert internals.profiler_running()
    assert not internals.profiler_running()
    with torch.profiler.profile():
        assert internals.profiler_running()


def test_memory_fraction(monkeypatch):
    monkeypatch.setattr(torch.cuda.memory, "get_per_process_memory_fraction", lambda device: 0.25, raising=False)
    assert internals.memory_fraction(torch.device("cuda", 0)) == 0.25
    monkeypatch.delattr(torch.cuda.memory, "get_per_process_memory_fraction")
    assert internals.memory_fraction(torch.device("cuda", 0)) == 1.0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_inductor_saving(monkeypatch):
    from torch._functorch import config
    from torch._inductor import compile_fx

    seen = []
    monkeypatch.setattr(compile_fx, "compile_fx", lambda graph, inputs: seen.append(config.activation_memory_budget))
    for share in (0.25, 1.0, 0.0):
        compiler_internals.inductor_saving(share)(None, [])
    assert seen == [pytest.approx(0.25, rel=1e-4), 1.0, 0.0]
    assert seen[0] != 0.25  # what is cached of a compiler that takes attention for cheap is not ours
    assert config.activation_memory_budget == 1.0


def run_again(share):
    """How many attentions and how many matrix products of a block its backward runs again, if it may keep so much of what it needs."""
    from functorch.compile import aot_function, make_boxed_func, min_cut_rematerialization_partition
    from torch._functorch import config
    from torch.nn import functional as F

    again = []

    def forward(graph, inputs):
        return make_boxed_func(graph)

    def backward(graph, inputs):
        again.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph)

    def block(x, *weights):
        heads = [part.view(1, 256, 4, 16).transpose(1, 2) for part in (F.rms_norm(x, (64,)) @ weights[0]).chunk(3, -1)]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(256, 64)
        x = x + mixed @ weights[1]
        rows = F.rms_norm(x, (64,))
        return x + (F.silu(rows @ weights[2]) * (rows @ weights[3])) @ weights[4]

    shapes = [(256, 64), (64, 192), (64, 64), (64, 256), (64, 256), (256, 64)]
    tensors = [torch.randn(shape, requires_grad=True) for shape in shapes]
    with config.patch(activation_memory_budget=share):
        aot_function(block, forward, backward, partition_fn=min_cut_rematerialization_partition)(
            *tensors
        ).sum().backward()
    attentions = sum("scaled_dot_product" in name and "backward" not in name for name in again)
    return attentions, sum(name.startswith("aten.mm") for name in again) - 2 * (len(tensors) - 1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_costly_attention():
    from torch._functorch import partitioners
    from torch.utils.flop_counter import flop_registry

    plain, counted = partitioners.get_default_op_list, set(flop_registry)
    for share in (0.5, 0.3, 0.15):
        assert run_again(share)[0] == 1, "without, it is run again whatever there is room for"
        with compiler_internals.costly_attention():
            attentions, products = run_again(share)
        assert not attentions
        assert products
    assert partitioners.get_default_op_list is plain
    assert set(flop_registry) == counted


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiler_errors():
    def refusing(graph, inputs):
        raise NotImplementedError("never")

    with pytest.raises(compiler_internals.compiler_errors()):
        torch.compile(torch.sin, backend=refusing)(torch.randn(2))
    torch._dynamo.reset()


def test_compiler_errors_have_the_limit_of_compilations():
    def function(a, number):
        return a + number

    compiled = torch.compile(function, backend="eager", dynamic=False)
    with (
        torch._dynamo.config.patch(recompile_limit=2, fail_on_recompile_limit_hit=True),
        pytest.raises(compiler_internals.compiler_errors()),
    ):
        [compiled(torch.ones(1), float(number)) for number in range(4)]
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_replays_cuda_graphs():
    module = torch.nn.Linear(2, 2)
    assert not compiler_internals.replays_cuda_graphs(module)
    module.compile()
    assert not compiler_internals.replays_cuda_graphs(module)
    module.compile(mode="reduce-overhead")
    assert compiler_internals.replays_cuda_graphs(module)
    assert compiler_internals.replays_cuda_graphs(torch.compile(torch.nn.Linear(2, 2), mode="max-autotune"))


def test_local_values():
    """The frame of a function keeps nothing of what was looked at; a module's variables are left where they are."""

    def function():
        tensor = torch.ones(3)
        found = process_internals.local_values(inspect.currentframe())
        assert any(value is tensor for value in found)
        alive = weakref.ref(tensor)
        del tensor, found
        return alive()

    assert function() is None
    names = {"inspect": inspect, "look": process_internals.local_values, "value": 3}
    exec("found = look(inspect.currentframe())", names)
    assert 3 in names["found"]
    assert names["value"] == 3


@pytest.mark.parametrize("refer", [weakref.ref, weakref.proxy])
def test_referent(refer):
    """Both kinds of proxies: of objects that can be called, and of others; a class may define `__reduce_ex__` itself."""

    class Reduced:
        def __reduce_ex__(self, protocol):
            return (Reduced, ())

    for thing in (torch.nn.Linear(2, 2), Reduced(), torch.ones(2), test_is_only_thread):
        assert process_internals.referent(refer(thing)) is thing
    gone = refer(Reduced())
    assert process_internals.referent(gone) is None


def test_is_only_thread():
    others = len(sys._current_frames()) - 1  # a test before may have left one
    assert process_internals.is_only_thread() == (others == 0)
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    thread.start()
    try:
        assert not process_internals.is_only_thread()
    finally:
        stop.set()
        thread.join()


def test_without_tensors():
    begun, stop = threading.Event(), threading.Event()
    before = process_internals.is_only_thread()

    def wait():
        with process_internals.without_tensors():
            begun.set()
            stop.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    begun.wait()
    try:
        assert process_internals.is_only_thread() == before
    finally:
        stop.set()
        thread.join()


def test_own_process():
    machine, number, start = process_internals.own_process()
    assert machine
    assert number == os.getpid()
    assert int(start) > 0


def test_has_ended():
    own = process_internals.own_process()
    assert process_internals.has_ended(own) is False
    child = subprocess.Popen(["sleep", "60"])
    started = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]
    other = (own[0], child.pid, started)
    assert not process_internals.has_ended(other)
    assert process_internals.has_ended((own[0], child.pid, "1")), "another process has its number now"
    child.kill()
    time.sleep(0.2)
    assert process_internals.has_ended(other), "nobody has asked how it ended"
    child.wait()
    assert process_internals.has_ended(other)
    assert process_internals.has_ended(("another machine", child.pid, started)) is None


def test_on_backward_end():
    seen, run_backward = [], torch.autograd._engine_run_backward

    def called(error):
        seen.append(type(error))
        return None if error is None else ValueError("instead")

    def fail(gradient):
        raise KeyError("first")

    end = hook_internals.on_backward_end(called)
    x = torch.ones(2, requires_grad=True)
    x.sum().backward()
    torch.autograd.grad(x.sum(), x)
    y = x * 2
    y.register_hook(fail)
    with pytest.raises(ValueError, match="instead") as raised:
        y.sum().backward()
    assert isinstance(raised.value.__cause__, KeyError)
    assert seen == [type(None), type(None), KeyError]
    end()
    assert torch.autograd._engine_run_backward is run_backward
    x.sum().backward()
    assert len(seen) == 3


def test_heap_bytes():
    before = process_internals.heap_bytes()
    assert before is not None
    tensor = torch.ones(1 << 20)
    # Within a tenth: other objects of the process may be freed or allocated in between.
    assert 0.9 * tensor.nbytes < process_internals.heap_bytes() - before < 1.1 * tensor.nbytes
    del tensor
    assert process_internals.heap_bytes() - before < 1 << 18


def test_collectives_started(tmp_path):
    assert process_internals.collectives_started() == ()
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        before = process_internals.collectives_started()
        assert before == process_internals.collectives_started()
        dist.all_reduce(torch.ones(1))
        assert process_internals.collectives_started() != before
        before = process_internals.collectives_started()
        group = dist.new_group([0])
        assert process_internals.collectives_started() != before, "another group"
        before = process_internals.collectives_started()
        dist.broadcast(torch.ones(1), 0, group=group, async_op=True).wait()
        assert process_internals.collectives_started() != before
    finally:
        dist.destroy_process_group()
    assert process_internals.collectives_started() == ()


def test_ranks_that_communicated(tmp_path):
    dist, started = torch.distributed, process_internals.collectives_started
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        before = started()
        assert process_internals.ranks_that_communicated(before, started()) == frozenset()
        group = dist.new_group([0])
        assert process_internals.ranks_that_communicated(before, started()) is None, "a group more"
        before = started()
        dist.all_reduce(torch.ones(1), group=group)
        assert process_internals.ranks_that_communicated(before, started()) == {0}
    finally:
        dist.destroy_process_group()


def test_default_store(tmp_path):
    dist = torch.distributed
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        process_internals.default_store().set("key", "value")
        assert process_internals.default_store().clone().get("key") == b"value"
    finally:
        dist.destroy_process_group()


def test_is_wrapper(tmp_path):
    dist, layer = torch.distributed, torch.nn.Linear(1, 1)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        wrapped = torch.nn.parallel.DistributedDataParallel(layer)
        assert process_internals.is_wrapper(wrapped)
        assert isinstance(wrapped.process_group, dist.ProcessGroup)
        assert not process_internals.is_wrapper(layer)
    finally:
        dist.destroy_process_group()


def test_interrupt():
    """A rank that waits in a collective is pulled out of it, and what it raises is known as an error of a collective."""
    outcome = run_script(Path(__file__).with_name("interrupted.py"), ["waits"])["waits"]
    assert [end.value for end in outcome] == [[True, False], [True, False]]


def test_is_of_collective():
    assert not process_internals.is_of_collective(RuntimeError("another"))
    assert process_internals.is_of_collective(torch.distributed.DistBackendError("NCCL error"))


def test_collectives_started_where_a_backend_keeps_no_count():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        assert process_internals.collectives_started() != process_internals.collectives_started()
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_many_compilations():
    from torch._dynamo import config

    before = config.recompile_limit
    with compiler_internals.many_compilations():
        assert config.recompile_limit > before
        assert config.fail_on_recompile_limit_hit
    assert config.recompile_limit == before


def test_global_forward_hooks():
    before = torch.nn.modules.module.register_module_forward_pre_hook(identity)
    after = torch.nn.modules.module.register_module_forward_hook(identity)
    try:
        assert hook_internals.global_forward_hooks() == [identity, identity]
    finally:
        before.remove()
        after.remove()
    assert hook_internals.global_forward_hooks() == []


def test_keeps_its_own_books():
    class Wrapper(torch.nn.DataParallel):
        pass

    assert hook_internals.keeps_its_own_books(Wrapper(torch.nn.Linear(2, 2)))
    assert hook_internals.keeps_its_own_books(torch.compile(torch.nn.Linear(2, 2), backend="eager"))
    assert not hook_internals.keeps_its_own_books(torch.nn.Linear(2, 2))
    assert torch.nn.parallel.DistributedDataParallel.__name__ in hook_internals._WRAPPERS


def test_activation_wrappers():
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapping

    plain, first, second = (torch.nn.Linear(2, 2) for _ in range(3))
    wrapped = [wrapping.checkpoint_wrapper(first), wrapping.offload_wrapper(second)]
    assert hook_internals.activation_wrappers(torch.nn.Sequential(plain, *wrapped)) == wrapped


@pytest.mark.parametrize("kind", ["checkpoint_wrapper", "offload_wrapper"])
def test_call_wrapped(kind):
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapping

    inner, calls = torch.nn.Linear(2, 2), []
    inner.register_forward_pre_hook(lambda *_: calls.append(1))
    model = torch.nn.Sequential(getattr(wrapping, kind)(inner), torch.nn.ReLU())
    assert hook_internals.activation_wrappers(model) == [model[0]]
    fields = dict(vars(model[0]))
    undo = hook_internals.call_wrapped(model[0])
    assert hook_internals.activation_wrappers(model) == []
    output = model(torch.ones(1, 2))
    assert type(output.grad_fn.next_functions[0][0]).__name__ == "AddmmBackward0"
    output.sum().backward()
    assert len(calls) == 1
    undo()
    assert vars(model[0]) == fields
    assert hook_internals.activation_wrappers(model) == [model[0]]
    model(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert len(calls) == (3 if kind == "checkpoint_wrapper" else 2)


def test_communication_states():
    source = inspect.getsource(torch.nn.parallel.DistributedDataParallel.register_comm_hook)
    assert "self._comm_hooks.append((hook, state))" in source
    assert hook_internals.communication_states(torch.nn.Linear(2, 2)) == []


def test_has_hooks():
    tensor = torch.zeros(2, requires_grad=True)
    assert not hook_internals.has_hooks(tensor)
    tensor.register_hook(identity)
    assert hook_internals.has_hooks(tensor)


def test_on_gradient():
    seen, base = [], torch.zeros(4, requires_grad=True) * 1
    view = base[:2]
    base.mul_(2)  # register_hook() on `view` is a segmentation fault now, until something reads its grad_fn
    hook_internals.on_gradient(view, seen.append)
    view.sum().backward()
    assert torch.equal(seen[0], torch.ones(2))
    leaf = torch.zeros(4, requires_grad=True)
    hook_internals.on_gradient(leaf, seen.append)
    assert hook_counts([leaf]) == [NO_HOOKS]


def test_has_backward_hooks():
    for register in ("register_full_backward_hook", "register_full_backward_pre_hook"):
        module = torch.nn.Linear(2, 2)
        assert not hook_internals.has_backward_hooks(module)
        getattr(module, register)(lambda *_: None)
        assert hook_internals.has_backward_hooks(module)


@pytest.mark.parametrize(
    "register",
    [
        "register_forward_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
        "register_backward_hook",
    ],
)
def test_hooks_beside_forward(register):
    module = torch.nn.Linear(2, 2)
    module.register_forward_pre_hook(identity)
    getattr(module, register)(hook := lambda *_: None)
    assert hook_internals.hooks_beside_forward(module) == [hook]
    assert hook_internals.hooks_beside_forward(module, after=identity) == [hook]
    module.register_forward_pre_hook(later := lambda *_: None)
    assert hook_internals.hooks_beside_forward(module, after=identity) == [later, hook]


def test_remove_forward_hooks():
    calls = []
    module, mine, other = torch.nn.Linear(2, 2), lambda *_: calls.append("mine"), lambda *_: calls.append("other")
    module.register_forward_pre_hook(mine, with_kwargs=True)
    module.register_forward_hook(mine, with_kwargs=True, always_call=True)
    module.register_forward_hook(other)
    hook_internals.remove_forward_hooks(module, (mine,))
    module(torch.ones(2))
    with pytest.raises(RuntimeError, match="shapes"):
        module(torch.ones(3))
    assert calls == ["other"]


@pytest.mark.filterwarnings("ignore")
def test_heldback():
    from torch.distributed.optim import _apply_optimizer_in_backward

    seen, leaf = [], torch.nn.Parameter(torch.ones(2))
    leaf.register_post_accumulate_grad_hook(lambda leaf: seen.append("hook"))
    _apply_optimizer_in_backward(torch.optim.SGD, [leaf], {"lr": 1.0})
    held = hook_internals.HeldBack(leaf)
    leaf.sum().backward()
    assert not seen
    assert torch.equal(leaf, torch.ones(2))
    held.put_back()
    leaf.sum().backward()
    assert seen == ["hook"]
    assert torch.equal(leaf, torch.zeros(2))


def test_weak_tensor():
    tensor = torch.zeros(2)
    reference = hook_internals.weak_tensor(tensor)
    assert reference() is tensor
    del tensor
    assert reference() is None


def hooked(register):
    """A linear layer with a hook, and the hook."""
    module, hook = torch.nn.Linear(2, 2), lambda *_: None
    for name in register:
        getattr(module, name)(hook)
    return module, hook


def test_forward_hooks():
    module, hook = hooked(["register_forward_pre_hook", "register_forward_hook"])
    assert hook_internals.forward_hooks(module) == [hook, hook]


def test_backward_hooks():
    module, hook = hooked(["register_full_backward_pre_hook", "register_full_backward_hook"])
    assert hook_internals.backward_hooks(module) == [hook, hook]


def test_hooks_of_tensor():
    module, hook = hooked([])
    assert hook_internals.hooks_of_tensor(module.weight) == []
    module.weight.register_hook(hook)
    assert hook_internals.hooks_of_tensor(module.weight) == [hook]


def test_sparse_parts():
    dense = torch.eye(3)
    for layout, count in ((torch.sparse_coo, 2), (torch.sparse_csr, 3), (torch.sparse_csc, 3)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert len(internals.sparse_parts(dense.to_sparse(layout=layout))) == count
    assert internals.sparse_parts(dense) == []
    jagged = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged)
    assert [part.tolist() for part in internals.sparse_parts(jagged)] == [[0, 2, 5], [[1.0] * 4] * 5]


def test_memory_of():
    octets = torch.arange(4, dtype=torch.uint8)
    assert bytes(internals.memory_of(octets)) == b"\x00\x01\x02\x03"


def test_waiting_frame():
    started, over = threading.Event(), threading.Event()

    def wait():
        started.set()
        over.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    started.wait()
    try:
        for _ in range(1000):
            if internals.waiting_frame(thread.ident) is not None:
                break
            time.sleep(0.01)
        assert internals.waiting_frame(thread.ident) is not None
        assert internals.waiting_frame(threading.get_ident()) is None
    finally:
        over.set()
        thread.join()


def test_reduced_as():
    class Plain:
        pass

    class Derived(Plain):
        pass

    reduced = Derived().__reduce_ex__(2)
    assert process_internals.reduced_as(Plain, reduced)[:2] == (object.__new__, (Plain,))
    assert process_internals.reduced_as(Plain, "name") == "name"


def test_use_expandable_segments():
    for before, after in (
        ("", "expandable_segments:True"),
        ("max_split_size_mb:64", "max_split_size_mb:64,expandable_segments:True"),
    ):
        written = []
        assert device_allocator.use_expandable_segments(lambda before=before: before, written.append)
        assert written == [after]
    written = []
    assert device_allocator.use_expandable_segments(lambda: "expandable_segments:False", written.append)
    assert not written, "the user's own choice stays"


def test_allocator_settings():
    assert isinstance(device_allocator.allocator_settings(), str)


def test_set_allocator_settings():
    assert device_allocator.set_allocator_settings(device_allocator.allocator_settings()) is None


def test_own_step():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    hooks = []
    optimizer.register_step_pre_hook(lambda *_: hooks.append(1))
    parameter.grad = torch.ones(2)
    hook_internals.own_step(optimizer)(optimizer)
    assert not hooks
    assert parameter.tolist() == [0.0, 0.0]
    optimizer.step()
    assert hooks == [1]


def test_note_step(recwarn):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    hook_internals.note_step(optimizer)
    schedule.step()
    assert not recwarn.list


def test_step_pre_hooks():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=1.0)
    hooks = [lambda *_: None, lambda *_: None]
    for hook in hooks:
        optimizer.register_step_pre_hook(hook)
    assert hook_internals.step_pre_hooks(optimizer) == hooks


class NoMemory(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise KeyError(str(func))


def test_tensor_without_memory():
    parameter = torch.nn.Parameter(torch.ones(3, 2).t())
    parameter.grad = made = hook_internals.tensor_without_memory(NoMemory, parameter)
    assert (made.shape, made.stride(), made.dtype) == (parameter.shape, parameter.stride(), parameter.dtype)
    with pytest.raises(RuntimeError, match="invalid python storage"):
        made.untyped_storage().data_ptr()
    with pytest.raises(KeyError, match="add"):
        (parameter * 2).sum().backward()


def test_factor_places():
    weight, rows = torch.ones(3, requires_grad=True), torch.ones(2, 3, requires_grad=True)
    first, second = internals.factor_places((weight * rows).grad_fn)
    assert first[0].variable is weight
    assert second[0].variable is rows
    assert internals.factor_places((2 * rows).grad_fn)[1] is None
    assert internals.factor_places(rows.exp().grad_fn) is None


@pytest.mark.parametrize("index", [0, 1])
def test_other_factor(index):
    factors = [torch.ones(3, requires_grad=True), torch.full((2, 3), 2.0, requires_grad=True)]
    node = (factors[0] * factors[1]).grad_fn
    assert torch.equal(internals.other_factor(node, index), factors[1 - index])


def test_in_input_pass():
    from torch.distributed.pipelining._backward import stage_backward_input

    weight, x = torch.nn.Parameter(torch.ones(2, 3)), torch.ones(4, 3, requires_grad=True)
    found = []
    hidden = torch.nn.functional.linear(x, weight)
    hidden.register_hook(lambda _: found.append(process_internals.in_input_pass()))
    torch.autograd.grad(hidden.sum(), [x], retain_graph=True)
    stage_backward_input([hidden], [torch.ones_like(hidden)], [x], iter([weight]))
    assert found == [False, True]

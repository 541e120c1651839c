"""Tiles that would mix rows: whatever a function depends on may change after its rows were checked, and is checked again then."""

import argparse
import copy
import dataclasses
import enum
import functools
import gc
import logging
import types
import weakref
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
import torch
from torch import nn

import retape
from retape.core.assignment import Assignment, Choice
from retape.core.problem import OptionKind
from retape.errors import RegionError
from retape.torch.engine.policy import Check
from retape.torch.planning.attach import put_on, take_off
from retape.torch.planning.executor import Executor
from support.blocks import TiledMlpBlock
from support.comparing import Notes, assign

ROWS = 16
DIM = -1
TABLE = {"inner": [{"dim": -1}]}
MIXES = "does not treat rows independently"


class Settings:
    dim = -1

    @classmethod
    def softmax(cls, x):
        return x.softmax(cls.dim)


def helper(x):
    return deeper(x)


def deeper(x):
    return x.softmax(DIM)


def from_table(x):
    return x.softmax(TABLE["inner"][0]["dim"])


class Soft(nn.Module):
    dim_of_class = -1

    def __init__(self, dim=-1):
        super().__init__()
        self.linear, self.dim, self.mode = nn.Linear(4, 4), dim, "columns"
        self.nested = {"a": [(1, {"dim": dim})]}
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        x = self.linear(x).softmax(self.dim).softmax(self.nested["a"][0][1]["dim"]).softmax(self.dim_of_class)
        return x - x.mean(0) if self.mode == "rows" else x


class InEval(nn.Module):
    """Mixes rows in evaluation alone."""

    def forward(self, x):
        return x.sin() if self.training else x.softmax(0)


class Side(enum.Enum):
    ROW = 0
    COLUMN = 1


@dataclasses.dataclass
class Config:
    dim: int = -1


class DimInSlots:
    __slots__ = ("dim",)

    def __init__(self):
        self.dim = -1


class Solver:
    def __init__(self):
        self.config = Config()

    def __call__(self, x):
        return x.softmax(self.config.dim)

    def run(self, x):
        return x.softmax(self.config.dim)


def setting(make, name, value, of=lambda held: held):
    """A case: what `make` returns is tiled, and an attribute of a part of it is set afterwards."""

    def case():
        held = make()
        return held, lambda: assign(of(held), **{name: value})

    return case


def by_config(config, read, change):
    """A case: a softmax along the dimension that `read` finds in a configuration, which is changed afterwards."""

    def case():
        held = config()
        return (lambda x: x.softmax(int(read(held)))), lambda: change(held)

    return case


def by_share(state, read, change):
    """A case: the mean over the rows is subtracted in a share that `read` finds, which is changed from 0 to 1 afterwards."""

    def case():
        held = state()
        return (lambda x: x - read(held) * x.mean(0)), lambda: change(held)

    return case


def class_attribute():
    class Own(Soft):
        dim_of_class = -1

    return Own(), lambda: assign(Own, dim_of_class=0)


def method_bound_anew():
    class Own(Soft):
        def forward(self, x):
            return x.sin()

    return Own(), lambda: assign(Own, forward=lambda self, x: x.softmax(0))


def forward_hook():
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    return module, lambda: module[1].register_forward_hook(lambda m, i, out: out - out.mean(0))


def forward_pre_hook():
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    return module, lambda: module[0].register_forward_pre_hook(lambda m, i: (i[0] - i[0].mean(0),))


def setting_of_a_hook():
    module, state = nn.Linear(4, 4), {"mix": 0.0}
    module.register_forward_hook(lambda m, i, out: out - state["mix"] * out.mean(0))
    return module, lambda: state.update(mix=1.0)


def training_flag():
    module = InEval()
    return module, module.eval


def module_container():
    module = Soft()
    return module, lambda: module.nested["a"][0][1].update(dim=0)


def closure_number():
    dim = -1

    def change():
        nonlocal dim
        dim = 0

    return (lambda x: x.softmax(dim)), change


def closure_float():
    share = 0.0

    def change():
        nonlocal share
        share = 1.0

    return (lambda x: x - share * x.mean(0)), change


def deep_list():
    inner = [0.0]
    deep = inner
    for _ in range(3000):
        deep = [deep]

    def fn(x):
        at = deep
        while isinstance(at, list):
            at = at[0]
        return x - at * x.mean(0)

    return fn, lambda: inner.__setitem__(0, 1.0)


def default():
    def fn(x, dim=-1):
        return x.softmax(dim)

    return fn, lambda: assign(fn, __defaults__=(0,))


def keyword_default():
    def fn(x, *, dim=-1):
        return x.softmax(dim)

    return fn, lambda: fn.__kwdefaults__.update(dim=0)


def global_number():
    return (lambda x: x.softmax(DIM)), lambda: globals().update(DIM=0)


def global_of_a_helper():
    return (lambda x: helper(x) + 1), lambda: globals().update(DIM=0)


def global_dict():
    return (lambda x: from_table(x) + 0), lambda: TABLE["inner"][0].update(dim=0)


def attribute_of_a_global_class():
    return (lambda x: Settings.softmax(x) + 0), lambda: assign(Settings, dim=0)


def helper_bound_anew():
    space = types.SimpleNamespace(f=torch.sin)
    return (lambda x: space.f(x) + 0), lambda: assign(space, f=functools.partial(torch.softmax, dim=0))


def bound_method():
    solver = Solver()
    return solver.run, lambda: assign(solver.config, dim=0)


def set_of_names():
    active = {"sin"}

    def fn(x):
        return x - x.mean(0) if "mean" in active else x.sin()

    return fn, lambda: active.add("mean")


def cached_helper():
    config = {"dim": -1}

    @functools.cache
    def scaled(number):
        return number

    return (lambda x: x.softmax(config["dim"]) * scaled(2)), lambda: config.update(dim=0)


def partial_argument():
    fn = functools.partial(torch.softmax, dim=-1)
    return fn, lambda: fn.keywords.update(dim=0)


def user_module():
    settings = types.ModuleType("settings_of_a_user")
    settings.dim = -1
    return settings


def dim_of(config):
    return config.dim


def dim_to_0(config):
    config.dim = 0


NAMED = (class_attribute, method_bound_anew, forward_hook, forward_pre_hook, setting_of_a_hook, training_flag, module_container,
         closure_number, closure_float, deep_list, default, keyword_default, global_number, global_of_a_helper, global_dict,
         attribute_of_a_global_class, helper_bound_anew, bound_method, set_of_names, cached_helper, partial_argument)  # fmt: skip
CASES = {case.__name__: case for case in NAMED} | {
    "module_setting": setting(Soft, "dim", 0),
    "module_text": setting(Soft, "mode", "rows"),
    "setting_of_a_child": setting(
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Softmax(-1)), "dim", 0, lambda held: held[1]
    ),
    "forward_on_the_instance": setting(lambda: nn.Linear(4, 4), "forward", lambda x: x.softmax(0)),
    "module_exchanged": setting(lambda: nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()), "1", nn.Softmax(0)),
    "callable_object": setting(Solver, "dim", 0, lambda held: held.config),
    "closure_dict": by_share(
        lambda: {"a": {"b": [0.0]}}, lambda s: s["a"]["b"][0], lambda s: s["a"]["b"].append(s["a"]["b"].pop() + 1)
    ),
    "long_list": by_share(lambda: [0.0] * 1000, lambda share: share[-1], lambda share: share.__setitem__(-1, 1.0)),
    "attribute_of_a_python_module": by_config(user_module, dim_of, dim_to_0),
    "dataclass_field": by_config(Config, dim_of, dim_to_0),
    "slot": by_config(DimInSlots, dim_of, dim_to_0),
    "namespace": by_config(lambda: argparse.Namespace(dim=-1), dim_of, dim_to_0),
    "enum_member": by_config(
        lambda: types.SimpleNamespace(side=Side.COLUMN),
        lambda held: held.side.value,
        lambda held: assign(held, side=Side.ROW),
    ),
    "array_written_to": by_config(
        lambda: np.array([-1, -1]), lambda dims: dims[1], lambda dims: dims.__setitem__(1, 0)
    ),
    "numpy_number": by_config(
        lambda: {"dim": np.int64(-1)}, lambda held: held["dim"], lambda held: held.update(dim=np.int64(0))
    ),
    "tensor_exchanged": by_config(
        lambda: {"dim": torch.tensor(-1)}, lambda held: held["dim"], lambda held: held.update(dim=torch.tensor(0))
    ),
}


@pytest.fixture(autouse=True)
def put_back():
    """Globals that cases change."""
    before = DIM, Settings.dim, copy.deepcopy(TABLE)
    yield
    globals().update(DIM=before[0])
    Settings.dim = before[1]
    TABLE.update(before[2])


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_what_changes_after_the_first_use_is_noticed(case):
    fn, change = case()
    x = torch.randn(ROWS, 4)
    for _ in range(2):
        torch.testing.assert_close(retape.tile(fn, x, tiles=4), fn(x))
    change()
    for _ in range(2):  # and not only once
        with pytest.raises(RegionError, match=MIXES):
            retape.tile(fn, x, tiles=4)


def test_a_global_hook_is_noticed():
    module, x = nn.Linear(4, 4), torch.randn(ROWS, 4)
    retape.tile(module, x, tiles=4)
    handle = nn.modules.module.register_module_forward_hook(lambda m, i, out: out - out.mean(0))
    try:
        with pytest.raises(RegionError, match=MIXES):
            retape.tile(module, x, tiles=4)
    finally:
        handle.remove()
    retape.tile(module, x, tiles=4)


def mixed_if(condition):
    return lambda x, *more: x - x.mean(0) if condition(x, *more) else x


@pytest.mark.parametrize(
    ("condition", "first", "later", "around"),
    [
        (lambda x, mode: mode > 5, (1,), (100,), nullcontext),
        (lambda x: len(x) > 8, (), (), nullcontext),
        (lambda x: x.dtype == torch.float64, (), (), nullcontext),
        (lambda x: torch.is_autocast_enabled("cpu"), (), (), lambda: torch.autocast("cpu")),
        (lambda x: torch.get_default_dtype() == torch.float64, (), (), lambda: default_dtype(torch.float64)),
    ],
    ids=["argument", "length", "dtype", "autocast", "default dtype"],
)
def test_arguments_sizes_and_precision_are_noticed(condition, first, later, around, request):
    x, fn = torch.randn(ROWS, 4), mixed_if(condition)
    changed = {"length": torch.randn(ROWS * 4, 4), "dtype": x.double()}.get(request.node.callspec.id, x)
    retape.tile(fn, x, *first, tiles=4)
    with around(), pytest.raises(RegionError, match=MIXES):
        retape.tile(fn, changed, *later, tiles=4)


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


_RUNS = Notes()


def counted(function, *rows):
    """How often a tiled function runs in one call."""
    before = len(_RUNS.all)
    retape.tile(function, *rows, tiles=4)
    return len(_RUNS.all) - before


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.scale, self.calls = nn.Linear(4, 4), 2.0, 0

    def forward(self, x):
        _RUNS()
        return self.linear(x) * self.scale


class SelfCounting(Counted):
    def forward(self, x):
        self.calls += 1
        return super().forward(x)


def test_weights_that_train_need_no_other_check():
    module, x = Counted(), torch.randn(ROWS, 4)
    assert counted(module, x) > 4
    assert counted(module, x) == 4
    with torch.no_grad():
        module.linear.weight.mul_(2)
    assert counted(module, x) == 4
    module.scale = 3.0
    assert counted(module, x) > 4
    module.scale = float("2.0")  # equal, and another object
    assert counted(module, x) == 4

    def wrapped(module):
        return lambda r: module(r) + 0

    assert counted(wrapped(module), x) > 4
    assert counted(wrapped(module), x) == 4  # a new function of the same code over the same module


def test_a_counter_is_checked_in_every_call_and_named_once(caplog):
    module, x = SelfCounting(), torch.randn(ROWS, 4)
    with caplog.at_level(logging.WARNING, "retape"):
        for _ in range(6):
            assert counted(module, x) > 4
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert "is checked for independent rows in every call" in lines[0]
    assert "calls differs from call to call" in lines[0]


def test_a_batch_of_another_length_is_checked_without_a_warning(caplog):
    module = Counted()
    with caplog.at_level(logging.WARNING, "retape"):
        for rows in (ROWS, 2 * ROWS, 3 * ROWS, 4 * ROWS, 5 * ROWS):
            assert counted(module, torch.randn(rows, 4)) > 4
    assert not caplog.records


def test_what_was_read_keeps_nothing_alive():
    module = Soft()
    module.back = [module]
    module.register_forward_hook(lambda m, i, out, of=module: out + 0 * of.dim)
    retape.tile(module, torch.randn(ROWS, 4), tiles=4)
    gone = weakref.ref(module)
    del module
    gc.collect()
    assert gone() is None


# --- in a plan ----------------------------------------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.share, self.drop = 0.0, 0.0

    def forward(self, x):
        hidden = self.up(x).relu()
        return nn.functional.dropout(self.down(hidden - self.share * hidden.mean(-2, keepdim=True)), self.drop)


@pytest.mark.parametrize(("name", "words"), [("share", MIXES), ("drop", "draws random numbers, and did not when")])
def test_a_part_that_changes_after_the_plan_was_made(name, words):
    model = nn.Sequential(TiledMlpBlock(4, mlp=Mlp()))
    choice = Choice(name="0", option=OptionKind.TILE, tiles=4, tiled=("mlp",))
    regions = {"0": model[0]}
    put_on(model, regions, Executor(Assignment(choices=(choice,)), {id(model[0]): "0"}, check=Check.METADATA))
    x = torch.randn(1, ROWS, 4)
    try:
        for _ in range(2):
            model(x).sum().backward()
        assign(model[0].mlp, **{name: 0.5})
        with pytest.raises(RegionError, match=words):
            model(x)
    finally:
        take_off(model, regions)

"""Half of one run and half of another: a folder is refused where any plain value that the step can reach is another one."""

import argparse
import contextvars
import dataclasses
import enum
import functools
import json
import os
import subprocess
import sys
import threading
import types
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from retape import scan, while_loop
from retape.errors import InvalidInput

STEPS = 12
DT = 0.5
_STOP = contextvars.ContextVar("stop", default=False)  # nothing enters it: it is not a part of the run


class Stopped(BaseException):
    """Ends a run as a kill would."""


class Constants:
    dt = 0.5

    @classmethod
    def scaled(cls, h):
        return h * cls.dt


class Method(enum.Enum):
    EULER = 1
    HEUN = 2


@dataclasses.dataclass
class Config:
    dt: float = 0.5
    inner: dict = dataclasses.field(default_factory=dict)


class Slotted:
    __slots__ = ("dt",)

    def __init__(self, dt):
        self.dt = dt


class Solver:
    def __init__(self, dt):
        self.settings = {"steps": [{"dt": dt}]}

    def advance(self, h):
        return h * self.settings["steps"][0]["dt"]


class TimestepCell(nn.Module):
    def __init__(self, dt, mode="tanh"):
        super().__init__()
        self.scale = nn.Linear(3, 3)
        with torch.no_grad():
            self.scale.weight.fill_(0.3)
            self.scale.bias.fill_(0.1)
        self.dt, self.mode = dt, mode

    def forward(self, h):
        return self.scale(h) * self.dt


def uses_global(h):
    return h * DT


def weight():
    return torch.full((3,), 0.7, requires_grad=True)


def run(advance, folder=None, *, stop=False, count=STEPS // 2):
    """A scan over `advance`, which is killed after some steps if asked to."""
    w = weight()

    def step(carry, x):
        h, k = carry
        if _STOP.get() and k == count:
            raise Stopped
        return (torch.tanh(advance(h) * w + x), k + 1), h.mean()

    _STOP.set(stop)
    xs = torch.linspace(-1, 1, STEPS * 3).reshape(STEPS, 3)
    (h, _), ys = scan(step, (torch.ones(3), 0), xs, snapshots=3, resume=folder)
    return [ys.detach(), *torch.autograd.grad(h.sum() + ys.sum(), [w])]


def closure(value):
    return lambda h: h * value


def nested(value):
    state = {"a": [0, (1, {"dt": value})]}
    return lambda h: h * state["a"][1][1]["dt"]


def long_list(value):
    table = [0.0] * 5000 + [value]
    return lambda h: h * table[-1]


def deep_list(value):
    for _ in range(3000):
        value = [value]

    def advance(h):
        at = value
        while isinstance(at, list):
            at = at[0]
        return h * at

    return advance


def default(value):
    def advance(h, dt=value):
        return h * dt

    return advance


def keyword_default(value):
    def advance(h, *, dt=value):
        return h * dt

    return advance


def global_of_a_helper(value):
    globals()["DT"] = value
    return lambda h: uses_global(h) + 0


def class_attribute(value):
    Constants.dt = value
    return lambda h: Constants.scaled(h) + 0


def function_in_a_closure(value):
    def inner(h):
        return h * value

    return lambda h: inner(h) + 0


def constant_of_a_helper(value):
    space = {}
    exec(f"def advance(h):\n    return h * {value!r}", space)
    return lambda h: space["advance"](h) + 0


def partial(value):
    return functools.partial(torch.mul, other=value)


def bound_method(value):
    return Solver(value).advance


def module_setting(value):
    return TimestepCell(value)


def module_text(value):
    cell = TimestepCell(0.5, mode=str(value))
    return lambda h: cell(h) * float(cell.mode)


def hook(value):
    cell = TimestepCell(0.5)
    cell.register_forward_hook(lambda m, i, out: out * value)
    return cell


def dataclass_field(value):
    config = Config(inner={"dt": value})
    return lambda h: h * config.inner["dt"]


def slot(value):
    config = Slotted(value)
    return lambda h: h * config.dt


def namespace(value):
    args = argparse.Namespace(dt=value)
    return lambda h: h * args.dt


def enum_member(value):
    method = Method.EULER if value == 0.5 else Method.HEUN
    return lambda h: h * method.value


def numpy_scalar(value):
    dt = np.float32(value)
    return lambda h: h * float(dt)


def numpy_array(value):
    dt = np.array([1.0, value])
    return lambda h: h * float(dt[1])


def tensor_out_of_sight(value):
    tensors = [torch.tensor(1.0)] * 300 + [torch.tensor(value)]
    return lambda h: h * tensors[-1]


def decimal(value):
    dt = Decimal(str(value))
    return lambda h: h * float(dt)


CASES = {
    closure: "closure variable advance: closure variable value: 0.5 in the folder, 0.9 now",
    nested: r"closure variable state\['a'\]\[1\]\[1\]\['dt'\]: 0.5 in the folder, 0.9 now",
    long_list: "closure variable table: list 5001",
    deep_list: "0.5 in the folder, 0.9 now",
    default: "default dt: 0.5 in the folder, 0.9 now",
    keyword_default: "default dt: 0.5 in the folder, 0.9 now",
    global_of_a_helper: "global uses_global: global DT: 0.5 in the folder, 0.9 now",
    class_attribute: r"global Constants.*\.dt: 0.5 in the folder, 0.9 now",
    function_in_a_closure: "closure variable inner: closure variable value: 0.5 in the folder, 0.9 now",
    constant_of_a_helper: "advance, code .* in the folder, .* now",
    partial: "argument other: 0.5 in the folder, 0.9 now",
    bound_method: r"__self__.settings\['steps'\]\[0\]\['dt'\]: 0.5 in the folder, 0.9 now",
    module_setting: "closure variable advance.dt: 0.5 in the folder, 0.9 now",
    module_text: "closure variable cell.mode: '0.5' in the folder, '0.9' now",
    hook: "closure variable value: 0.5 in the folder, 0.9 now",
    dataclass_field: r"config.inner\['dt'\]: 0.5 in the folder, 0.9 now",
    slot: "config.dt: 0.5 in the folder, 0.9 now",
    namespace: "args.dt: 0.5 in the folder, 0.9 now",
    enum_member: "Method EULER in the folder, .*Method HEUN now",
    numpy_scalar: "dt: float32 .*0.5.* in the folder",
    numpy_array: "closure variable dt: array float64",
    tensor_out_of_sight: r"tensors\[300\]: tensor of torch.float32 \(\), values",
    decimal: "dt: Decimal",
}


@pytest.fixture(autouse=True)
def put_back():
    yield
    globals()["DT"] = Constants.dt = 0.5


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_another_value_is_refused_and_named(case, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(Stopped):
        run(case(0.5), folder, stop=True)
    assert len(os.listdir(folder)) > 1
    with pytest.raises(InvalidInput, match=f"holds the journal of another run: .*{CASES[case]}"):
        run(case(0.9), folder)
    found, wanted = run(case(0.5), folder), run(case(0.5))
    assert all(map(torch.equal, found, wanted))
    assert not folder.exists()


def test_what_a_loop_depends_on_beside_its_step(tmp_path):
    def loop(limit, folder, *, stop=False):
        _STOP.set(stop)
        w = weight()

        def step(carry):
            h, k = carry
            if _STOP.get() and k == 5:
                raise Stopped
            return torch.sin(h * w), k + 1

        (h, _), _ = while_loop(lambda c: c[1] < limit, step, (torch.ones(3), 0), snapshots=3, resume=folder)
        return h.detach()

    with pytest.raises(Stopped):
        loop(9, tmp_path / "while", stop=True)
    with pytest.raises(InvalidInput, match="cond: closure variable limit: 9 in the folder, 8 now"):
        loop(8, tmp_path / "while")
    with torch.autocast("cpu"), pytest.raises(InvalidInput, match="autocast on cpu and cuda"):
        loop(9, tmp_path / "while")
    assert torch.equal(loop(9, tmp_path / "while"), loop(9, None))


def test_state_of_the_step_itself_goes_on_from_the_folder(tmp_path):
    def stateful(folder, *, stop=False):
        state, last = {"calls": 0}, 0.5

        def advance(h):
            nonlocal last
            state["calls"] += 1
            last = last / 2 + state["calls"]
            return h * (1 + last / 50)

        return run(advance, folder, stop=stop), state["calls"], last

    with pytest.raises(Stopped):
        stateful(tmp_path / "run", stop=True)
    found, *state = stateful(tmp_path / "run")
    wanted, *whole = stateful(None)
    assert all(map(torch.equal, found, wanted))
    assert state == whole


def test_objects_that_cannot_be_entered_go_by_their_type(tmp_path):
    def with_(held, folder, *, stop=False):
        return run(lambda h: h * (0.5 if held else 1.0), folder, stop=stop)

    with pytest.raises(Stopped):
        with_(threading.Lock(), tmp_path / "run", stop=True)
    with pytest.raises(InvalidInput, match=r"variable held: _thread.* in the folder, types\.SimpleNamespace now"):
        with_(types.SimpleNamespace(), tmp_path / "run")
    assert with_(threading.Lock(), tmp_path / "run")


def test_a_folder_of_an_earlier_format_is_refused(tmp_path):
    with pytest.raises(Stopped):
        run(closure(0.5), tmp_path / "run", stop=True)
    path = tmp_path / "run" / "run.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": "retape loop 1"}))
    with pytest.raises(InvalidInput, match="of another run: it was written by another version of retape"):
        run(closure(0.5), tmp_path / "run")


PROGRAM = """
import sys
sys.path.insert(0, {tests!r})
from hazards import test_resume_guard as guard
names = {{"euler", "heun", "midpoint", "rk4"}}
config = guard.Config(inner={{"names": names, "table": {{n: len(n) for n in sorted(names)}}, "path": guard.Path("a/b")}})
cell = guard.TimestepCell(0.5)
cell.register_forward_hook(lambda m, i, out: out * (len(config.inner["names"]) / 4 if "rk4" in {{"rk4", "heun"}} else 0.0))
solver = guard.Solver(0.5)
lock, pattern = guard.threading.Lock(), guard.types.SimpleNamespace(of=object())
def advance(h):
    with lock:
        return cell(h) + solver.advance(h) + (pattern.of is None)
try:
    found = guard.run(advance, sys.argv[1], stop=sys.argv[2] == "stop")
    print("done", float(found[0].sum()))
except guard.Stopped:
    print("stopped")
"""


def test_another_process_comes_to_the_same_texts(tmp_path):
    """Sets are ordered otherwise, objects lie elsewhere."""
    code = PROGRAM.format(tests=str(Path(__file__).parent.parent))

    def process(seed, word):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", code, str(tmp_path / "run"), word]
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert process("1", "stop") == "stopped\n"
    assert process("2", "go").startswith("done")

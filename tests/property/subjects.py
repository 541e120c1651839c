"""One block of random ops with its inputs, in one setting; a step of it, plainly or as a region, and everything that step leaves behind.

A setting is what may differ between blocks of one class: the batch, how inputs and weights lie in memory, which parameters are
frozen, training or evaluation, a hook. Nothing here compares whole cases; that is in `selections.py` and `models.py`.
"""

from __future__ import annotations

import random
import warnings
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from retape.torch.capture.call import capture_call
from retape.torch.compat import internals
from retape.torch.engine.checkpoint import run_region
from retape.torch.engine.context import THREAD, plain
from retape.torch.engine.policy import Check, Policy
from retape.torch.engine.region import Region

from . import ways
from .function_ops import LYING
from .ops import ROWS, WIDTH
from .regions import Spec, SpecBlock, call_of, tensors_in
from .ways import Mode

LAYOUTS = ("plain", "plain", "plain", "turned", "sliced", "offset")


@dataclass(frozen=True)
class Setting:
    """What may differ between two blocks of one class, beside the numbers of their ops."""

    batch: int = 2
    layout: str = "plain"
    training: bool = True
    frozen: int = 0  # every so-many-th parameter
    channels_last: bool = False
    hooked: bool = False


def draw_setting(rng: random.Random) -> Setting:
    return Setting(
        batch=rng.choice((2, 2, 3, 4)),
        layout=rng.choice(LAYOUTS),
        training=rng.random() < 0.85,
        frozen=rng.choice((0, 0, 0, 2, 3)),
        channels_last=rng.random() < 0.25,
        hooked=rng.random() < 0.1,
    )


class LeftBehind(Exception):
    """Something of the engine's is still there after a step: a mode, a hook, a run, a manager."""


class Refused(Exception):
    """Plain autograd itself refuses the case, so there is nothing to compare."""


# Plain PyTorch's own refusals of a random program.
PLAIN_ERRORS = (RuntimeError, ValueError, IndexError, NotImplementedError, TypeError)


class Subject:
    """A block in a setting, with inputs; `rewind` puts all of it back to the start."""

    def __init__(self, seed: int, spec: Spec, setting: Setting) -> None:
        torch.manual_seed(seed)
        self.seed, self.spec, self.setting = seed, spec, setting
        self.block = SpecBlock(spec, random.Random(seed), nn.Linear(WIDTH, WIDTH))
        for number, parameter in enumerate(self.block.parameters()):
            if setting.frozen and number % setting.frozen == 0:
                parameter.requires_grad_(False)
        if setting.channels_last:
            self.block.to(memory_format=torch.channels_last)
        if setting.hooked:
            self.block.linear.register_forward_hook(lambda module, args, out: out * 1.5)
        self.inputs = [leaf(setting) for _ in range(spec.inputs)]
        tensors = [*self.block.parameters(), *self.block.buffers()]
        self._start = [(tensor, tensor.detach().clone()) for tensor in tensors]
        self._named = dict(named_buffers(self.block))

    def rewind(self, salt: int = 0) -> None:
        """Put weights, buffers, attributes and streams back; another `salt` is another batch and other random numbers."""
        with torch.no_grad():
            for tensor, value in self._start:
                tensor.copy_(value)
        put_buffers_back(self.block, self._named)
        self.block.train(self.setting.training)
        self.block.zero_grad(set_to_none=True)
        rewind_attributes(self.block, self.seed + salt)
        seed_streams(self.seed + salt)
        with torch.no_grad():
            for value in self.inputs:
                value.grad = None
                value.copy_(torch.randn(value.shape))

    def call(self) -> tuple:
        """The function to run as a region, with its arguments and keywords."""
        return call_of(self.block, [laid_out(value, self.setting.layout) for value in self.inputs])

    def traced(self):
        """The trace of a step on another batch, as a fit has it."""
        self.rewind(salt=1)
        function, arguments, keywords = self.call()
        with ways.session(Mode.MANAGED):
            region = Region(capture_call(function, arguments, keywords))
            region.run(function, arguments, keywords)
            return region.trace(_Stopwatch(self.seed))

    def step(self, policy: Policy | None = None, check: Check = Check.METADATA) -> dict:
        """One step, plainly or as a region under a policy; returns everything that it leaves behind."""
        self.rewind()
        with running(Mode.PLAIN if policy is None else Mode.MANAGED):
            function, arguments, keywords = self.call()
            if policy is None:
                packed = function(*arguments, **keywords)
            else:
                packed = run_region(function, *arguments, keywords=keywords, policy=policy, check=check)
            outputs = tensors_in(self.spec.gives, packed)
            found = {f"output {i}": out.detach().clone() for i, out in enumerate(outputs)}
            torch.rand(3), random.random(), np.random.rand()
            total = sum((out * out.detach().cos()).sum() for out in (*outputs, *sides(self.block)))
            if total.requires_grad:
                total.backward()
        refuse_leftovers()
        return found | left_by(self.block, self.inputs)

    @property
    def lies(self) -> bool:
        """True if an op of it writes to what it does not say."""
        return bool(self.spec.names() & LYING)


class _Stopwatch:
    """Seconds drawn from a seed, so that the planner compares the costs of ops, the same each time."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._taken: list[float] = []

    def time(self, func, args, kwargs):
        self._taken.append(self._rng.uniform(0.1, 2.0))
        return func(*args, **kwargs)

    def seconds(self) -> list[float]:
        return self._taken


@contextmanager
def running(mode: Mode):
    """A session in which, if it is PLAIN, no call of retape's is a region, `retape.checkpoint` inside a block included."""
    with ways.session(mode), plain() if mode is Mode.PLAIN else nullcontext():
        yield


def leaf(setting: Setting) -> Tensor:
    return torch.randn(setting.batch, ROWS, WIDTH, requires_grad=True)


def laid_out(value: Tensor, layout: str) -> Tensor:
    """The same values with other strides or another offset."""
    if layout == "turned":
        return value.mT.contiguous().mT
    if layout == "sliced":
        return torch.cat([value, value], -1)[..., :WIDTH]
    if layout == "offset":
        return torch.cat([value[:1], value])[1:]
    return value * 1


def blocks_of(module: nn.Module) -> list[SpecBlock]:
    return [part for part in module.modules() if isinstance(part, SpecBlock)]


def sides(module: nn.Module) -> list[Tensor]:
    """What blocks have put on themselves with a history: outputs through a module's attribute."""
    return [block.side for block in blocks_of(module) if block.side is not None]


def named_buffers(module: nn.Module):
    for name, part in module.named_modules():
        for key, buffer in part._buffers.items():
            yield (name, key), (part, buffer)


def put_buffers_back(module: nn.Module, named: dict) -> None:
    """A forward may have bound a buffer anew."""
    for (_, key), (part, buffer) in named.items():
        part._buffers[key] = buffer


def rewind_attributes(module: nn.Module, seed: int) -> None:
    for number, block in enumerate(blocks_of(module)):
        block.generator.manual_seed(seed + number)
        block.last, block.side = torch.zeros(()), None
        block.past, block.notes, block.calls = [torch.ones(())], {}, 0


def seed_streams(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def left_by(module: nn.Module, inputs: list[Tensor]) -> dict:
    """Gradients, buffers, attributes and random streams after a step."""
    found = {f"gradient of input {i}": value.grad for i, value in enumerate(inputs)}
    found |= {f"gradient of {name}": copied(value.grad) for name, value in module.named_parameters()}
    found |= {f"weight {name}": value.detach().clone() for name, value in module.named_parameters()}
    return found | state_of(module)


def state_of(module: nn.Module) -> dict:
    """Buffers, attributes of blocks and random streams."""
    found = {f"buffer {name}": value.clone() for name, value in module.named_buffers()}
    for number, block in enumerate(blocks_of(module)):
        found[f"generator {number}"] = block.generator.get_state()
        found[f"last {number}"] = block.last
        found[f"side {number}"] = copied(block.side)
        found[f"calls {number}"] = block.calls
        found[f"training {number}"] = block.training
        found |= {f"past {number}.{i}": value for i, value in enumerate(block.past)}
        found |= {f"note {number}.{name}": value for name, value in block.notes.items()}
    if torch.get_default_device().type == "cuda":
        found["device stream"] = torch.cuda.get_rng_state()
    return found | {
        "torch stream": torch.get_rng_state(),
        "python stream": random.getstate(),
        "numpy stream": [part.tobytes() if isinstance(part, np.ndarray) else part for part in np.random.get_state()],
    }


def copied(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().clone()


def refuse_leftovers() -> None:
    """Nothing of the engine may be in force after a step."""
    left = []
    left += ["runs"] if THREAD.runs else []
    left += ["a manager"] if THREAD.runner is not None else []
    left += ["plain"] if THREAD.plain else []
    left += ["a dispatch mode"] if internals.count_dispatch_modes() else []
    left += ["a function mode"] if internals.count_function_modes() > _function_modes_of_torch() else []
    left += ["saved-tensor hooks"] if internals.top_hooks(True) is not None else []
    left += ["autocast"] if torch.is_autocast_enabled("cpu") else []
    left += [] if torch.is_grad_enabled() else ["no_grad"]
    left += ["another dtype"] if torch.get_default_dtype() is not torch.float32 else []
    if left:
        raise LeftBehind(", ".join(left))


def _function_modes_of_torch() -> int:
    """A default device other than the CPU is itself a function mode."""
    return int(torch.get_default_device().type != "cpu")


def equal_or_nan(one: object, other: object) -> bool:
    """Bit for bit, except that NaN equals NaN."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.dtype != other.dtype or one.shape != other.shape or one.layout != other.layout:
            return False
        one, other = (one.to_dense(), other.to_dense()) if one.layout is not torch.strided else (one, other)
        return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())
    return type(one) is type(other) and one == other


def differences(wanted: dict, got: dict) -> list[str]:
    return [name for name in dict.fromkeys([*wanted, *got]) if not equal_or_nan(wanted.get(name), got.get(name))]


@contextmanager
def strict():
    """Uninitialised memory is NaN, so that reading it shows; torch's warnings are the same in every run."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])

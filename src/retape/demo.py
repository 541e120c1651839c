"""The demonstration: a small GPT is trained plainly and inside several budgets, and the runs are compared.

All copies use the same batches and random numbers, one step of each in turn, so that times can be compared and
every gradient of every step is compared with plain autograd. The output is in `cli/demo.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import mean, median

import torch
from torch import Tensor, nn
from torch.nn import functional

from retape.api import Fit, fit
from retape.core.errors import BudgetTooSmall, InvalidInput
from retape.core.fit_record import FitRecord
from retape.core.units import format_bytes, is_whole, shown

VOCABULARY = 256
BUDGETS = (1.0, 0.5, 0.25)  # fractions of the activations
SEED = 0
LEARNING_RATE = 0.5
FLOOR_TRIES = 4  # each fit measures its own floor, which may be higher
TIMED_STEPS = 4
LEAST_ROWS, MOST_ROWS = 2, 8  # of the batch
# Fitting and comparing take about 110 plain steps; the batch is as large as 70 seconds allow.
PLAIN_STEPS = 110
TOTAL_SECONDS = 70.0

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """Sizes of the model and its training. `rows` of None is as many as this machine processes in the time."""

    layers: int = 8
    width: int = 320
    heads: int = 5
    tokens: int = 128
    rows: int | None = None
    steps: int = 6

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "tokens", "rows", "steps"):
            count = getattr(self, name)
            if not (name == "rows" and count is None) and (not is_whole(count) or count < 1):
                raise InvalidInput(f"{name} = {shown(count)}; give a whole number >= 1.")
        if self.width % self.heads:
            raise InvalidInput(f"A width of {self.width} is not a multiple of {self.heads} heads; give one that is.")


class Block(nn.Module):
    """A standard block of a GPT."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        width, self.heads = config.width, config.heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        split = self.queries_keys_values(self.before_attention(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = split.transpose(1, 3).unbind(2)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """A GPT that returns the loss of predicting each next token."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, config.width)
        self.places = nn.Parameter(torch.zeros(config.tokens, config.width))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm, self.head = nn.LayerNorm(config.width), nn.Linear(config.width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens[:, :-1]) + self.places
        for block in self.blocks:
            x = block(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())


@dataclass(slots=True)
class Runner:
    """One copy of the model in training: its losses, its seconds, and the comparison of its gradients."""

    name: str
    model: GPT
    fitted: Fit | None = None
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    compared: int = 0
    equal: int = 0

    def gradients(self, batch: Tensor, seed: int) -> None:
        """Run one timed forward and backward from a seed."""
        self.model.zero_grad(set_to_none=True)
        torch.manual_seed(seed)
        start = time.perf_counter()
        loss = self.model(batch)
        loss.backward()
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(loss.item())

    def compare(self, plain: Runner) -> None:
        """Compare every gradient with plain autograd, bit for bit."""
        for own, other in zip(self.model.parameters(), plain.model.parameters(), strict=True):
            self.compared += 1
            if own.grad is not None and other.grad is not None and torch.equal(own.grad, other.grad):
                self.equal += 1

    def descend(self) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=LEARNING_RATE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of one budget. `time_ratio` is the median over the steps of its seconds divided by plain's."""

    name: str
    record: FitRecord
    time_ratio: float
    losses: tuple[float, ...]
    gradients_compared: int
    gradients_equal: int

    @property
    def all_equal(self) -> bool:
        return self.gradients_equal == self.gradients_compared > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """The plain run and one result per budget."""

    parameters: int
    rows: int
    tokens: int
    losses: tuple[float, ...]
    results: tuple[Result, ...]

    @property
    def as_promised(self) -> bool:
        """True if every gradient and loss equals that of plain autograd and every measured peak is inside its budget."""
        return all(
            result.all_equal
            and result.losses == self.losses
            and result.record.measured.peak_bytes <= result.record.budget_bytes
            for result in self.results
        )


def demonstrate(config: DemoConfig, tell: Tell = lambda what: None) -> Demonstration:
    """Fit a copy of the model into each budget, train all of them together, and compare."""
    threads = torch.get_num_threads()
    try:
        tell("a few plain steps")
        row_seconds = _quickest_row(config, threads)
        rows = config.rows or max(LEAST_ROWS, min(MOST_ROWS, int(TOTAL_SECONDS / PLAIN_STEPS / row_seconds)))
        return _demonstrate(config, _batches(config, rows), tell)
    finally:
        torch.set_num_threads(threads)


def _demonstrate(config: DemoConfig, batches: list[Tensor], tell: Tell) -> Demonstration:
    plain = Runner("plain", _new_model(config))
    runners = list(_fitted(config, batches[0], tell))
    for number, batch in enumerate(batches):
        tell(f"training step {number + 1} of {config.steps}, in turn")
        plain.gradients(batch, seed=number)
        for runner in runners:
            runner.gradients(batch, seed=number)
            runner.compare(plain)
        for runner in (plain, *runners):
            runner.descend()
    return Demonstration(
        parameters=sum(parameter.numel() for parameter in plain.model.parameters()),
        rows=len(batches[0]),
        tokens=config.tokens,
        losses=tuple(plain.losses),
        results=tuple(_result(runner, plain) for runner in runners),
    )


def _fitted(config: DemoConfig, batch: Tensor, tell: Tell) -> Iterator[Runner]:
    floor_bytes = 0
    for share in BUDGETS:
        tell(f"fitting into {share:.0%} of the activations")
        runner = Runner(f"{share:.0%}", _new_model(config))
        runner.fitted = fit(runner.model, batch, budget=share, progress=False)
        floor_bytes = runner.fitted.frontier.floor_bytes
        yield runner
    tell(f"fitting into the floor, {format_bytes(floor_bytes)}")
    runner = Runner("floor", _new_model(config))
    runner.fitted = _fit_floor(runner.model, batch, floor_bytes)
    yield runner


def _fit_floor(model: GPT, batch: Tensor, floor_bytes: int) -> Fit:
    """Fit into the floor. Each fit measures its own floor; if that is higher, try again with the one in the error."""
    for _ in range(FLOOR_TRIES - 1):
        try:
            return fit(model, batch, budget=floor_bytes, progress=False)
        except BudgetTooSmall as error:
            floor_bytes = max(floor_bytes + 1, error.floor_bytes)
    return fit(model, batch, budget=floor_bytes, progress=False)


def _result(runner: Runner, plain: Runner) -> Result:
    assert runner.fitted is not None
    ratios = [own / other for own, other in zip(runner.seconds, plain.seconds, strict=True)]
    return Result(
        name=runner.name,
        record=runner.fitted.record,
        time_ratio=median(ratios),
        losses=tuple(runner.losses),
        gradients_compared=runner.compared,
        gradients_equal=runner.equal,
    )


def _new_model(config: DemoConfig) -> GPT:
    torch.manual_seed(SEED)
    return GPT(config)


def _batches(config: DemoConfig, rows: int) -> list[Tensor]:
    """Return sequences that count with a fixed stride each, so that there is something to learn."""
    torch.manual_seed(SEED)
    starts, strides = torch.randint(VOCABULARY, (config.steps, rows, 1)), torch.randint(1, 8, (config.steps, rows, 1))
    tokens = (starts + strides * torch.arange(config.tokens + 1)) % VOCABULARY
    return list(tokens)


def _quickest_row(config: DemoConfig, threads: int) -> float:
    """Return the seconds of a plain step of one row with the faster of all threads or one, and leave that number set."""
    model, batch = _new_model(config), _batches(config, 1)[0]
    _timed(model, batch)  # the first step also initialises PyTorch
    seconds: dict[int, float] = {}
    for count in dict.fromkeys((threads, 1)):
        torch.set_num_threads(count)
        # The mean, not the least: a busy machine stays busy.
        seconds[count] = mean(_timed(model, batch) for _ in range(TIMED_STEPS))
    best = min(seconds, key=lambda count: seconds[count])
    torch.set_num_threads(best)
    return seconds[best]


def _timed(model: GPT, batch: Tensor) -> float:
    start = time.perf_counter()
    model(batch).backward()
    return time.perf_counter() - start

"""The fuzzer over two ranks: random blocks with collectives inside, under `checkpoint` and `fit`, beside plain autograd on the same rank.

`python tests/property/rank_programs.py RANK FILE FIRST COUNT [adaptive]` is what each rank runs; it prints one JSON line. Both ranks draw
the same programs from a seed, on other numbers.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

import retape
from retape.core.errors import BudgetTooSmall, RetapeError
from retape.torch.engine.context import plain

WIDTH, RANKS, LIMIT_S = 8, 2, 60


def _summed_in_place(block, x):
    total = x.detach().clone()
    dist.all_reduce(total)
    return x * total.sin()


def _summed_buffer(block, x):
    with torch.no_grad():
        block.total.mul_(0.5).add_(x.detach().mean(0))
        dist.all_reduce(block.total)
    return x + block.total


def _gathered_list(block, x):
    parts = [torch.empty_like(x) for _ in range(RANKS)]
    dist.all_gather(parts, x.detach().contiguous())
    return x * torch.stack(parts).mean(0)


def _gathered_tensor(block, x):
    out = torch.empty(RANKS * x.shape[0], x.shape[1])
    dist.all_gather_into_tensor(out, x.detach().contiguous())
    return x * out[: x.shape[0]].tanh()


def _scattered(block, x):
    out = torch.empty(x.shape[0] // RANKS, x.shape[1])
    dist.reduce_scatter_tensor(out, x.detach().contiguous())
    return x * out.repeat(RANKS, 1).sigmoid()


def _broadcast(block, x):
    scale = torch.rand(x.shape[1])
    dist.broadcast(scale, 0)
    return x * scale


def _functional_sum(block, x):
    return functional.all_reduce(x.sin().contiguous(), "sum", dist.group.WORLD) * x


def _functional_gather(block, x):
    return functional.all_gather_tensor(x.detach().contiguous(), 0, dist.group.WORLD)[: x.shape[0]] * x.exp()


def _functional_scatter(block, x):
    out = functional.reduce_scatter_tensor(x.detach().contiguous(), "sum", 0, dist.group.WORLD)
    return x * out.repeat(RANKS, 1)


def _gathered_with_gradient(block, x):
    return functional.all_gather_tensor_autograd(x.tanh().contiguous(), 0, dist.group.WORLD)[: x.shape[0]] * x


def _distributed_tensor(block, x):
    from torch.distributed.tensor import DTensor, Replicate, Shard

    t = DTensor.from_local(x, mesh(), [Shard(0)])
    return (t.sin() * 2).redistribute(mesh(), [Replicate()]).to_local()[: x.shape[0]] * x


def _partial_tensor(block, x):
    from torch.distributed.tensor import DTensor, Partial, Replicate

    t = DTensor.from_local(x, mesh(), [Partial()])
    return t.redistribute(mesh(), [Replicate()]).to_local().tanh() * x


def _split_tensor(block, x):
    from torch.distributed.tensor import DTensor, Replicate, Shard

    t = DTensor.from_local(x, mesh(), [Replicate()], run_check=False).redistribute(mesh(), [Shard(1)])
    return (t * t).redistribute(mesh(), [Replicate()]).to_local()


def _local(block, x):
    return nn.functional.dropout(block.second(block.first(x).tanh()), 0.2, block.training) + x


def _norm(block, x):
    return block.norm(x)


COLLECTIVES = (
    _summed_in_place,
    _summed_buffer,
    _gathered_list,
    _gathered_tensor,
    _scattered,
    _broadcast,
    _functional_sum,
    _functional_gather,
    _functional_scatter,
    _gathered_with_gradient,
    _distributed_tensor,
    _partial_tensor,
    _split_tensor,
)
_MESHES = []


def mesh():
    from torch.distributed.device_mesh import init_device_mesh

    if not _MESHES:
        _MESHES.append(init_device_mesh("cpu", (RANKS,)))
    return _MESHES[0]


class RankBlock(nn.Module):
    def __init__(self, program):
        super().__init__()
        self.program = program
        self.first, self.second, self.norm = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("total", torch.zeros(WIDTH))

    def forward(self, x):
        for op in self.program:
            x = op(self, x)
        return x.tanh()


class RankModel(nn.Module):
    def __init__(self, programs):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(RankBlock(program) for program in programs)
        self.managed = False

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = retape.checkpoint(block, x) if self.managed else block(x)
        return x.square().mean()


def build_ranks(seed: int) -> tuple[RankModel, str, float]:
    rng = random.Random(seed)
    kinds = [[rng.choice((*COLLECTIVES, _local, _local, _norm)) for _ in range(rng.randint(1, 3))] for _ in range(2)]
    programs = [rng.choice(kinds) for _ in range(rng.randint(2, 4))]
    torch.manual_seed(seed)
    text = "; ".join(" ".join(op.__name__ for op in program) for program in programs)
    return RankModel(programs), text, rng.choice((0.3, 0.5, 0.7, 0.9))


def rank_steps(model: RankModel, seed: int, count: int = 3) -> list[dict]:
    found = []
    torch.manual_seed(seed + 100 * dist.get_rank())
    for _ in range(count):
        model.zero_grad()
        loss = model(torch.randn(64, WIDTH))
        loss.backward()
        left = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        left |= {f"buffer {name}": value.clone() for name, value in model.named_buffers()}
        found.append(left | {"loss": loss.detach(), "stream": torch.get_rng_state()})
    return found


def differing(wanted: list[dict], got: list[dict]) -> list[str]:
    def same(one, other):
        return one is other if one is None or other is None else torch.equal(one, other)

    return [name for one, other in zip(wanted, got, strict=True) for name in one if not same(one[name], other[name])]


def _by_checkpoint(seed: int) -> list[dict]:
    model, _, _ = build_ranks(seed)
    model.managed = True
    return rank_steps(model, seed)


def _by_fit(seed: int) -> list[dict]:
    model, _, share = build_ranks(seed)
    torch.manual_seed(seed)
    batch, options = torch.randn(64, WIDTH), {"step": lambda m, b: m(b), "progress": False}
    try:
        made = retape.fit(model, batch, budget=share, **options)
    except BudgetTooSmall as error:
        made = retape.fit(model, batch, budget=int(error.floor_bytes * 1.05), **options)
    found = rank_steps(model, seed)
    made.remove()
    return found


def _by_adaptive(seed: int) -> list[dict]:
    model, _, _ = build_ranks(seed)
    live = retape.adaptive(model, budget=retape.Budget.activations("40KiB"))
    try:
        return rank_steps(model, seed)
    finally:
        live.remove()


WAYS = {"checkpoint": _by_checkpoint, "fit": _by_fit, "adaptive": _by_adaptive}


@contextmanager
def limited(seconds: int):
    """Raise in a case that takes too long, such as ranks that wait for each other."""

    def ring(number, frame):
        raise TimeoutError(f"no end after {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _plainly(seed: int) -> list[dict] | None:
    try:
        with plain():
            return rank_steps(build_ranks(seed)[0], seed)
    except RuntimeError:
        return None


def case_outcome(way: str, seed: int) -> str:
    """Run one case in one way: "equal", "refused: ..." or what is wrong. Ranks meet before and after."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.barrier()
        try:
            with limited(LIMIT_S):
                wanted = _plainly(seed)
                if wanted is None:
                    return "skipped: plain PyTorch refuses it"
                wrong = differing(wanted, WAYS[way](seed))
        except RetapeError as error:
            return f"refused: {type(error).__name__}"
        except Exception as error:
            return f"raw {type(error).__name__}: {str(error)[:200]}"
        finally:
            dist.barrier()
    return f"{len(wrong)} differ: {', '.join(wrong[:4])}" if wrong else "equal"


def rank_main(rank: int, meeting: str, first: int, count: int, ways: tuple[str, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=rank, world_size=RANKS, timeout=timedelta(seconds=LIMIT_S)
    )
    found = {f"{way} {seed}": case_outcome(way, seed) for seed in range(first, first + count) for way in ways}
    print(json.dumps(found), flush=True)
    dist.destroy_process_group()


def run_ranks(first: int, count: int, *, adaptive: bool = False, timeout_s: int = 600) -> tuple[Counter, list[str]]:
    """Start both ranks; returns the outcomes counted, and what is wrong with how to run it again."""
    with tempfile.TemporaryDirectory() as folder:
        extra = ["adaptive"] if adaptive else []
        command = [sys.executable, __file__]
        processes = [
            subprocess.Popen(
                [*command, str(rank), f"{folder}/meeting", str(first), str(count), *extra],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(RANKS)
        ]
        try:
            said = [process.communicate(timeout=timeout_s) for process in processes]
        except subprocess.TimeoutExpired:
            return Counter(), [f"ranks {first} to {first + count}: no end after {timeout_s} s"]
        finally:
            for process in processes:
                process.kill()
    return _counted(said)


def _counted(said: list[tuple[str, str]]) -> tuple[Counter, list[str]]:
    if any(not out for out, _ in said):
        return Counter(), [err[-2000:] for _, err in said]
    per_rank = [json.loads(out.splitlines()[-1]) for out, _ in said]
    counts, wrong = Counter(), []
    for name, *_ in zip(*per_rank, strict=True):
        outcomes = [found[name] for found in per_rank]
        way, seed = name.split()
        bad = [what for what in outcomes if not what.startswith(("equal", "refused", "skipped"))]
        if bad:
            text = build_ranks(int(seed))[1]
            wrong.append(f"--- FAILED {name}: {bad[0]}\n{text}\npython -m benchmarks.fuzz ranks --case {seed}")
        else:
            counts[f"{way}: {max(outcomes)}"] += 1
    return counts, wrong


if __name__ == "__main__":
    chosen = ("checkpoint", "fit", *(["adaptive"] if "adaptive" in sys.argv[5:] else []))
    rank_main(int(sys.argv[1]), str(Path(sys.argv[2])), int(sys.argv[3]), int(sys.argv[4]), chosen)

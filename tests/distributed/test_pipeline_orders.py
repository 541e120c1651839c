"""Microbatches in flight by `Budget.schedule`, beside the order in which torch.distributed.pipelining runs each of its schedules."""

from types import SimpleNamespace

import pytest
from torch import nn

from retape.core.pipelines import SCHEDULES, microbatches_in_flight

pipelining = pytest.importorskip("torch.distributed.pipelining.schedules")
KINDS = {
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "looped_bfs": pipelining.ScheduleLoopedBFS,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
    "zbv": pipelining.ScheduleZBVZeroBubble,
    "dualpipe_v": pipelining.ScheduleDualPipeV,
}
V_SHAPED = ("zbv", "dualpipe_v")
SINGLE = ("gpipe", "1f1b")


def chunks_of(name, rank, ranks, chunks):
    return [rank, 2 * ranks - 1 - rank] if name in V_SHAPED else [rank + ranks * i for i in range(chunks)]


def order_of(name, rank, ranks, chunks, microbatches):
    """The actions of a rank; None if this schedule does not take so few, or so odd, microbatches."""
    stages = [
        SimpleNamespace(
            group_size=ranks,
            group_rank=rank,
            group=None,
            num_stages=ranks * chunks,
            stage_index=index,
            is_first=index == 0,
            is_last=index == ranks * chunks - 1,
            submod=nn.Identity(),
        )
        for index in chunks_of(name, rank, ranks, chunks)
    ]
    try:
        made = KINDS[name](stages[0] if name in SINGLE else stages, microbatches, loss_fn=lambda made, wanted: made)
    except ValueError:
        return None
    return [
        part for action in made.pipeline_order[rank] if action is not None for part in action.sub_actions or [action]
    ]


def most_alive(order, chunks):
    """The most microbatches between their forward and the end of their backward: of all chunks together, and of each."""
    now, most, together = dict.fromkeys(chunks, 0), dict.fromkeys(chunks, 0), 0
    for action in order:
        kind = action.computation_type.value
        now[action.stage_index] += 1 if kind == "F" else -1 if kind in ("B", "W") else 0
        most[action.stage_index] = max(most[action.stage_index], now[action.stage_index])
        together = max(together, sum(now.values()))
    assert not any(now.values())
    return together, list(most.values())


def test_every_schedule_of_pytorch_is_known():
    assert set(KINDS) == set(SCHEDULES)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_counts_are_those_of_the_order(name, ranks):
    compared = 0
    for chunks in (2,) if name in V_SHAPED else (1,) if name in SINGLE else (1, 2, 3):
        for microbatches in (1, 2, 3, 4, 6, 8, 12, 16, 24):
            for rank in range(ranks):
                order = order_of(name, rank, ranks, chunks, microbatches)
                if order is None:
                    continue
                alive, of_chunks = most_alive(order, chunks_of(name, rank, ranks, chunks))
                about = (name, rank, ranks, microbatches, chunks)
                assert microbatches_in_flight(*about) == -(-alive // chunks), about
                assert [microbatches_in_flight(*about, chunk=chunk) for chunk in range(chunks)] == of_chunks, about
                compared += 1
    assert compared >= ranks

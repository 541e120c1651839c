"""Microbatches in flight on a rank of a pipeline (forward done, backward not complete), and the buffers of its schedule.

1F1B: Narayanan et al., 2019; interleaved: Narayanan et al., 2021; breadth-first: Lamy-Poirier, 2022; zero bubble, where gradients of
weights come later, and its V schedule: Qi et al., 2023 and 2024; DualPipe in V form: DeepSeek-AI, 2024. The numbers are those of the
schedules of `torch.distributed.pipelining`, with which a test compares them.
"""

from __future__ import annotations

from dataclasses import dataclass

from retape.core.errors import InvalidInput
from retape.core.units import is_whole, shown

_ONE_CHUNK = ("gpipe", "1f1b")
_IN_ROUNDS = ("interleaved", "zero_bubble")
_V_SHAPED = ("zbv", "dualpipe_v")  # the second chunk of the first rank is the last of the model
SCHEDULES = (*_ONE_CHUNK, "looped_bfs", *_IN_ROUNDS, *_V_SHAPED)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleBuffers:
    """Tensors that a schedule has throughout, beside what microbatches in flight hold: like the batch, and like the outputs of a stage."""

    batches: int = 0
    outputs: int = 0


NO_BUFFERS = ScheduleBuffers()


def buffers_of(
    name: str, stage: int, stages: int, microbatches: int, chunks: int, *, in_flight: int, chunk: int | None
) -> ScheduleBuffers:
    """Return the buffers of a stage under `torch.distributed.pipelining`.

    It receives each microbatch's input, and the gradient of its output, into a tensor of its own. What it sends, outputs and gradients of
    inputs, lives until the step ends, but for "1f1b", which waits each time. Its loop keeps the output of the microbatch before.
    """
    chunks = _chunks_of(name, chunks)
    own = 0 if chunks == 1 else chunk
    is_first = (stage, own) == (0, 0)
    is_last = (stage, own) == ((0, 1) if name in _V_SHAPED else (stages - 1, chunks - 1))
    gradients_sent = 0 if is_first or name == "1f1b" else microbatches
    outputs_sent = 0 if is_last or name in _ONE_CHUNK else microbatches - in_flight
    return ScheduleBuffers(
        batches=microbatches - in_flight + gradients_sent,
        outputs=1 + outputs_sent + (0 if is_last else microbatches),
    )


def _chunks_of(name: str, chunks: int) -> int:
    return 1 if name in _ONE_CHUNK else 2 if name in _V_SHAPED else chunks


def microbatches_in_flight(
    name: str, stage: int, stages: int, microbatches: int, chunks: int = 2, *, chunk: int | None = None
) -> int:
    """Return how many microbatches are alive at once, at most, of all chunks of layers of a rank together, or of one of them.

    `stage` is the rank among `stages` ranks. A rank has `chunks` chunks in "looped_bfs", "interleaved" and "zero_bubble", 2 in "zbv" and
    "dualpipe_v", else 1.
    """
    for what, value in (("stages", stages), ("microbatches", microbatches), ("chunks", chunks)):
        if not is_whole(value) or value < 1:
            raise InvalidInput(f"{what} = {shown(value)}; give a whole number >= 1.")
    if not is_whole(stage) or not 0 <= stage < stages:
        raise InvalidInput(f"stage = {shown(stage)}; give a number from 0 to {stages - 1}.")
    if name not in SCHEDULES:
        raise InvalidInput(f"{shown(name)} is not a known schedule; give one of {', '.join(map(repr, SCHEDULES))}.")
    chunks = _chunks_of(name, chunks)
    if chunk is not None and not (is_whole(chunk) and 0 <= chunk < chunks):
        raise InvalidInput(
            f"chunk = {shown(chunk)}; give a number from 0 to {chunks - 1}, or None for all chunks together."
        )
    if chunk is None:
        alive = _alive_chunks(name, stage, stages, microbatches, chunks)
        return min(-(-alive // chunks), microbatches)
    return min(_alive_of_chunk(name, stage, stages, microbatches, chunks, chunk=chunk), microbatches)


def _per_round(stages: int, microbatches: int) -> int:
    """Return how many microbatches in a row run through one chunk before the next chunk of the rank has its turn."""
    return -(-microbatches // max(1, microbatches // stages))


def _alive_chunks(name: str, stage: int, stages: int, microbatches: int, chunks: int) -> int:
    """Return how many microbatches are alive, counted for each chunk of the rank."""
    ahead = stages - stage - 1
    first_rounds = (chunks - 1) * _per_round(stages, microbatches)
    alive = {
        "1f1b": ahead + 1,
        "interleaved": first_rounds + 2 * ahead + 1,
        "zero_bubble": first_rounds + stages,
        "zbv": min(2 * stages, microbatches + stage + 1),
        "dualpipe_v": 2 * stages + 1,
    }.get(name, chunks * microbatches)
    return min(alive, chunks * microbatches)


def _alive_of_chunk(name: str, stage: int, stages: int, microbatches: int, chunks: int, *, chunk: int) -> int:
    if name in _V_SHAPED:
        return 2 * stages - stage if chunk == 0 else stage + 1
    alive = _alive_chunks(name, stage, stages, microbatches, chunks)
    if name not in _IN_ROUNDS:
        return alive // chunks
    # Forwards and backwards go round the chunks in opposite directions; a forward follows each backward once `alive` have run.
    size = _per_round(stages, microbatches)
    now = most = 0
    for number in range(chunks * microbatches):
        if number >= alive:
            now -= chunks - 1 - (number - alive) // size % chunks == chunk
        now += number // size % chunks == chunk
        most = max(most, now)
    return most

"""Together: several processes that decide alike, go on together, or fail together with the same error.

Each `agreed` is one turn: every rank puts a report into the store, the first rank answers all of them. A rank that fails posts why, once
for all ranks; the others find that while they wait for an answer, or are pulled out of a collective by their watcher.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from retape.core.errors import InvalidInput, RankFailed, RetapeError
from retape.torch.compat import process_internals
from retape.torch.distributed.channel import Channel, StoreLost
from retape.torch.distributed.ranks import OTHER_MODELS, Ranks, Result, Value
from retape.torch.distributed.tuning import TUNING, DistributedTuning
from retape.torch.distributed.watcher import FAILURE, Failure, Watcher, failure_of, store_lost


class OthersFailed(BaseException):
    """Another rank has posted why all of them end; no `except Exception` on the way may stop this."""


class AttemptEnded(BaseException):
    """The attempt of another rank has ended early, while this one was asking a question inside its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Report:
    phase: str
    question: str
    value: Any
    outcome: _Outcome | None = None  # of an attempt that has ended


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """End of an attempt on one rank: the name of an exception's type and its text, both empty if it went well."""

    kind: str = ""
    text: str = ""
    ran_out: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    value: Any = None
    refusal: RetapeError | None = None
    interrupted: bool = False  # some ranks were still inside the attempt that others have ended


_WENT_WELL = _Outcome()
# What a step may end with that a fit goes on after, if it does on every rank: less memory, a loss that cannot be fused.
_ANSWERS = (torch.OutOfMemoryError, RetapeError, AttributeError, TypeError)


class Together(Ranks):
    """Several processes, of which this is one. `look` is called while it waits, and raises if another one has failed.

    `at_work` is the number of fits in this process that are under way.
    """

    at_work = 0

    def __init__(
        self,
        channel: Channel,
        members: tuple[int, ...],
        number: int,
        tuning: DistributedTuning,
        *,
        look: Callable[[], None] | None = None,
    ) -> None:
        self.members, self.number = members, number
        self._channel, self._tuning = channel, tuning
        self._look = look or self._look_for_failure
        self._turn, self._longest_seconds = 0, 0.0

    # --- agreeing -----------------------------------------------------------------------------------------------------

    def agreed(self, value: Value, decide: Callable[[list[Value]], Result]) -> Result:
        question = getattr(decide, "__qualname__", type(decide).__qualname__)
        answer = self._answered(_Report(phase=self.phase, question=question, value=value), decide)
        if answer.interrupted:
            raise AttemptEnded
        if answer.refusal is not None:
            raise answer.refusal
        return answer.value  # type: ignore[no-any-return]  # pickled by the first rank

    def _answered(
        self, report: _Report, decide: Callable[[list[Any]], Any], *, seconds: float | None = None
    ) -> _Answer:
        """Put a report and return the answer of this turn; raise TimeoutError if a rank does not come within `seconds`."""
        turn, self._turn = self._turn, self._turn + 1
        self._channel.put(f"report/{turn}/{self.number}", report)
        if self.number:
            self._wait([f"answer/{turn}"], seconds)
            return self._channel.peek(f"answer/{turn}")  # type: ignore[no-any-return]
        keys = [f"report/{turn}/{place}" for place in range(len(self.members))]
        self._wait(keys, seconds)
        answer = self._decided([self._channel.peek(key) for key in keys], decide)
        self._channel.put(f"answer/{turn}", answer)
        self._channel.drop(*keys, *([f"answer/{turn - 1}"] if turn else []))  # every rank has read the last answer
        return answer

    def _wait(self, keys: list[str], seconds: float | None) -> None:
        if not self._channel.wait(keys, seconds=seconds, look=self._look):
            raise TimeoutError

    def _look_for_failure(self) -> None:
        if self._channel.peek(FAILURE) is not None:
            raise OthersFailed

    def _decided(self, reports: list[_Report], decide: Callable[[list[Any]], Any]) -> _Answer:
        ended = [report.outcome for report in reports if report.outcome is not None]
        if ended and len(ended) < len(reports) and any(outcome != _WENT_WELL for outcome in ended):
            return _Answer(interrupted=True)
        asked = [each.question if ended else (each.phase, each.question) for each in reports]
        other = next((place for place, each in enumerate(asked) if each != asked[0]), None)
        if other is not None:
            return _Answer(refusal=self._apart(other, reports))
        try:
            return _Answer(value=decide([report.outcome or report.value for report in reports]))
        except RetapeError as error:
            return _Answer(refusal=error)

    def _apart(self, other: int, reports: list[_Report]) -> RankFailed:
        rank = self.members[other]
        return RankFailed(
            f"The ranks do different work: rank {self.members[0]} asks {reports[0].question!r} in the phase {reports[0].phase!r}, rank "
            f"{rank} {reports[other].question!r} in the phase {reports[other].phase!r}. Their models, steps or machines differ. "
            f"{OTHER_MODELS}",
            rank=rank,
            phase=reports[other].phase,
        )

    # --- attempts -----------------------------------------------------------------------------------------------------

    def attempt(self, run: Callable[[], Result]) -> Result:
        start, failure, found = time.monotonic(), None, None
        try:
            found = run()
        except AttemptEnded:
            pass
        except Exception as error:
            if not isinstance(error, _ANSWERS):
                raise  # a failure; or of a collective, because another rank has ended: that one says why
            failure = error
        outcomes = self._outcomes(failure)
        self._longest_seconds = max(self._longest_seconds, time.monotonic() - start)
        out = next((place for place, each in enumerate(outcomes) if each.ran_out), None)
        if out is not None and all(each.ran_out or each == _WENT_WELL for each in outcomes):
            raise torch.OutOfMemoryError(f"On rank {self.members[out]}: {outcomes[out].text}") from None
        if failure is not None:
            raise failure if len({each.kind for each in outcomes}) == 1 else _OwnFailure(failure)
        if any(each != _WENT_WELL for each in outcomes):
            self._wait([FAILURE], None)  # of the rank that failed alone
            raise OthersFailed
        return found  # type: ignore[return-value]  # of a run that went well

    def _outcomes(self, failure: Exception | None) -> list[_Outcome]:
        """Return how the attempt ended on every rank. A rank that failed does not wait long: others may wait for it in a collective."""
        mine = _WENT_WELL
        if failure is not None:
            text = (str(failure).splitlines() or [""])[0]
            ran_out = isinstance(failure, torch.OutOfMemoryError)
            mine = _Outcome(kind=type(failure).__name__, text=text, ran_out=ran_out)
        patience = self._tuning.patience_seconds + self._longest_seconds
        while True:
            try:
                report = _Report(phase=self.phase, question="how it ended", value=None, outcome=mine)
                answer = self._answered(report, list, seconds=None if failure is None else patience)
            except TimeoutError:
                assert failure is not None
                raise _OwnFailure(failure) from None
            if answer.refusal is not None:
                raise answer.refusal
            if not answer.interrupted:
                return answer.value  # type: ignore[no-any-return]

    # --- failing ------------------------------------------------------------------------------------------------------

    def failure_for(self, error: BaseException) -> BaseException:
        """Post why this rank ends, unless another was first, and return what all of them raise."""
        try:
            return self._failure_for(error)
        except StoreLost:
            return store_lost(self.phase)

    def _failure_for(self, error: BaseException) -> BaseException:
        if isinstance(error, StoreLost):
            raise error
        if process_internals.is_of_collective(error):  # an effect: give the cause time to be noticed
            self._channel.wait([FAILURE], seconds=self._tuning.hurried_silence_seconds + 2 * self._tuning.beat_seconds)
        mine = failure_of(error, self.members[self.number], self.phase)
        first: Failure = (
            self._channel.peek(FAILURE) if isinstance(error, OthersFailed) else self._channel.put_first(FAILURE, mine)
        )
        ended = f"{type(error).__name__}: {error}"
        self._channel.put(f"ended/{self.number}", ended)
        if not isinstance(error, Exception) and not isinstance(error, OthersFailed):
            return error  # such as KeyboardInterrupt
        others = [place for place, rank in enumerate(self.members) if rank != first.silent_rank]
        came = self._channel.wait([f"ended/{place}" for place in others], seconds=self._tuning.closing_seconds)
        is_whole = came and len(others) == len(self.members)
        is_same = is_whole and all(self._channel.peek(f"ended/{place}") == ended for place in others)
        return error if is_same else first.error


class _OwnFailure(BaseException):
    """An exception that only this rank, or not every rank, has raised in an attempt."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


# --- beginning and ending -----------------------------------------------------------------------------------------------


@contextmanager
def working_together(
    store: Any, members: tuple[int, ...], rank: int, *, what: str = "fit()", tuning: DistributedTuning = TUNING
) -> Iterator[Ranks]:
    """Yield the ranks once all of them are here; an exception of one ends the work of all, with the same error."""
    number = members.index(rank)
    named = hashlib.sha256(repr(members).encode()).hexdigest()[:16]
    channel = meet(Channel(store, named, tuning), members, number, what, tuning)
    ranks = Together(channel, members, number, tuning)
    watcher = Watcher(
        channel.clone(),
        members,
        number,
        phase=lambda: ranks.phase,
        interrupt=lambda failure: process_internals.interrupt(members),
        tuning=tuning,
    )
    watcher.start()
    Together.at_work += 1
    try:
        yield ranks
        ranks.of_all(None)  # a rank that fails at the very end fails on all of them
    except BaseException as error:
        own = error.error if isinstance(error, _OwnFailure) else error
        if process_internals.is_of_collective(own):
            watcher.hurry()
        raised = ranks.failure_for(own)
        if raised is error:
            raise
        raise raised from (own if own is not raised and isinstance(own, Exception) else None)
    finally:
        Together.at_work -= 1
        watcher.end()


def meet(
    channel: Channel,
    members: tuple[int, ...],
    number: int,
    what: str,
    tuning: DistributedTuning = TUNING,
    *,
    look: Callable[[], None] = lambda: None,
) -> Channel:
    """Wait until every member has called `what`; return the channel of this meeting. `look` runs while it waits, and may raise.

    The first rank collects a name of each, which is new each time, so that nothing of an earlier meeting counts.
    """
    own = uuid.uuid4().hex
    here = [f"here/{place}" for place in range(len(members))]
    channel.put(here[number], own)
    end = time.monotonic() + tuning.meeting_seconds
    if number == 0 and channel.wait(here, seconds=tuning.meeting_seconds, look=look):
        names = [channel.peek(key) for key in here]
        channel.drop(*here)
        for name in names:
            channel.put(f"session/{name}", own)
    if not channel.wait([f"session/{own}"], seconds=end - time.monotonic(), look=look):
        missing = [rank for rank, key in zip(members, here, strict=True) if channel.peek(key) is None]
        time.sleep(2 * tuning.beat_seconds)  # others that have waited as long do not miss this one
        channel.drop(here[number])
        named = ", ".join(map(str, missing or members[:1]))
        raise InvalidInput(
            f"Rank {members[number]} called {what}, which is for {len(members)} ranks together, and waited "
            f"{tuning.meeting_seconds:g} s for rank {named}. Call it on all of these ranks at the same time (after "
            "dist.barrier() if one is slower), or with group=False for this process alone."
        )
    return channel.within(str(channel.peek(f"session/{own}")))

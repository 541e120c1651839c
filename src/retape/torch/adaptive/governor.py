"""Makes room for each phase of a step under a live budget: compares what it is going to need with what is left, and evicts.

What regions hold, what phases need and what goes first is known to others (`accounting.py`, `eviction.py`); here it comes together.
"""

from __future__ import annotations

import logging

import torch

from retape.core.problem import Budget
from retape.torch.adaptive.accounting import CLOSE, Account, Kind, Need, Needs, Phase
from retape.torch.adaptive.adaptive_region import ManagedRegion
from retape.torch.adaptive.host import HostTier
from retape.torch.adaptive.limit import Limit
from retape.torch.adaptive.live_regions import LiveRegions
from retape.torch.adaptive.out_of_memory import after_collective, nothing_left, took_more
from retape.torch.adaptive.stats import Counts
from retape.torch.adaptive.step_scale import StepScale

_LOG = logging.getLogger("retape")
WITH_A_LIMIT = frozenset({"cuda"})  # devices whose allocator can be held to one


class Room:
    """The bytes of one device, and where a step is: at the region numbered `position`, in the backward of the one with serial `turn`, which
    the backward pass numbered `task` has come to.
    """

    def __init__(self, budget: Budget, device: torch.device, counts: Counts, *, host: bool | None) -> None:
        self.account, self.limit, self.counts = Account(device), Limit(budget, device), counts
        self.host = HostTier(device, on=host)
        self.live, self.needs = LiveRegions(self.account, self.host), Needs()
        self.scale: StepScale | None = None
        self.pinned: set[int] = set()
        self.position, self.turn, self.task, self.peak = 0, -1, -1, 0
        self.phase: tuple[Phase, Kind, int, int] | None = None  # the one that was entered last
        self.met_unknown = self._said = self._said_more = False

    def begin_step(self) -> None:
        self.account.begin_step()
        self.live.clear()
        self.host.begin_step()
        self.pinned.clear()
        self.position, self.turn, self.task, self.peak = 0, -1, -1, 0
        self.phase = None

    @property
    def left_bytes(self) -> int:
        """What a step has above what is there between steps."""
        return self.limit.bytes - self.limit.base_bytes

    def now(self) -> int:
        """Everything on the device, as far as it is counted."""
        return self.limit.live_bytes(self.account)

    def enter(self, phase: Phase, kind: Kind, number: int, saved_bytes: int = 0) -> None:
        """A phase of a region that saved so much begins: make room for it, and mark it where the step is weighed.

        Before its first run nobody knows what a region saves: it is taken for the largest of its kind.
        """
        self.phase = (phase, kind, number, saved_bytes)
        first = phase is Phase.FORWARD
        need = self.needs.of(phase, kind, number, kind.saved_bytes if first else saved_bytes)
        if self.scale is None and not self.needs.is_covered(kind, saved_bytes, within=CLOSE):
            self.met_unknown = True
        now = self.now()
        self.limit.enforce(undoable=phase in (Phase.FORWARD, Phase.RERUN))
        over = now + need.bytes - self.limit.aim_bytes
        if over > 0:
            self.evict(over)
            now = self.now()
            if now + need.bytes > self.limit.bytes:
                self._cannot_fit(phase, kind, need, now)
        self.peak = max(self.peak, now + need.bytes)
        self.mark(phase, kind, number)

    def mark(self, phase: Phase, kind: Kind, number: int) -> None:
        """Where the step is weighed: what is counted now is no part of what the phase needs."""
        if self.scale is not None:
            self.scale.mark(phase, kind, number, self.now())

    def settled(self, region: ManagedRegion) -> None:
        """The first run of a region is over, and it can be evicted: what it saved may be more than any of its kind did before."""
        self.live.settled(region)
        kind, saved, now = region.kind, region.saved_bytes, self.now()
        if self.scale is not None:
            self.scale.saw(kind, saved)
        more = saved > kind.saved_bytes
        kind.saved_bytes = max(saved, kind.saved_bytes)
        if more and self.scale is None and self.limit.device.type not in WITH_A_LIMIT:
            need = self.needs.of(Phase.FORWARD, kind, region.number, saved)
            self.has_reached(f"The forward of {kind.name}", max(now, now - saved + need.bytes))

    def has_reached(self, what: str, peak_bytes: int) -> None:
        """Something took more than was known before it began; where it passed the budget, that is counted and said once."""
        self.peak = max(self.peak, peak_bytes)
        if peak_bytes <= self.limit.bytes:
            return
        self.counts.over += 1
        if not self._said_more:
            self._said_more = True
            _LOG.warning("retape: %s", took_more(what, peak_bytes=peak_bytes, limit_bytes=self.limit.bytes))

    def evict(self, wanted_bytes: int) -> int:
        """Drop what is cheapest to miss; returns the bytes that went."""
        return self.live.evict(wanted_bytes, self.position, self.pinned | {self.turn}, backward=self.turn >= 0)

    def _cannot_fit(self, phase: Phase, kind: Kind, need: Need, now: int) -> None:
        self.counts.over += 1
        # The scale is the judge: an estimate, or a step that is being weighed, may turn out to fit.
        if not need.measured or self.scale is not None:
            return
        found = nothing_left(
            f"The {phase.value} of {kind.name}",
            limit_bytes=self.limit.bytes,
            now_bytes=now,
            need_bytes=need.bytes,
            base_bytes=self.limit.base_bytes,
            collective_bytes=self.live.collective_bytes(),
        )
        if self.limit.device.type not in WITH_A_LIMIT:
            raise found
        if not self._said:  # the allocator, which is held to a limit, has the last word
            _LOG.warning("retape: %s", found)
            self._said = True

    def out_of_memory(self, kind: Kind, failure: BaseException, tried: bool, *, collective: bool) -> bool:
        """The allocator gave up in a region: drop at least as much as the region needs.

        With nothing to drop, blocks that the cache gives back may do, once; returns whether that was it. A region that had started a
        collective cannot be run again.
        """
        self.counts.out_of_memory += 1
        if collective:
            limit, now = self.limit.bytes, self.now()
            raise after_collective(kind.name, limit_bytes=limit, now_bytes=now, error=failure) from failure
        need = max(1, self.needs.of(Phase.FORWARD, kind, 0).bytes) + self.limit.ran_out()
        freed = self.evict(need)
        if self.limit.device.type == "cuda":
            torch.cuda.empty_cache()
        if not freed and tried:
            raise nothing_left(
                f"The forward of {kind.name}",
                limit_bytes=self.limit.bytes,
                now_bytes=self.now(),
                need_bytes=need,
                base_bytes=self.limit.base_bytes,
                collective_bytes=self.live.collective_bytes(),
                error=failure,
            ) from failure
        return not freed

"""Makes room for each phase of a step under a live budget: compares what it is going to need with what is left, and evicts.

What regions hold, what phases need and what goes first is known to others (`pressure.py`, `eviction.py`); here it comes together.
"""

from __future__ import annotations

import logging

import torch

from retape.core.problem import Budget
from retape.torch.adaptive_gradients import GradientsBefore
from retape.torch.adaptive_host import HostTier
from retape.torch.adaptive_limit import Limit
from retape.torch.adaptive_oom import nothing_left
from retape.torch.adaptive_stats import Counts
from retape.torch.live_regions import LiveRegions
from retape.torch.pressure import Account, Kind, Need, Needs, Phase
from retape.torch.step_scale import StepScale

_LOG = logging.getLogger("retape")
WITH_A_LIMIT = frozenset({"cuda"})  # devices whose allocator can be held to one
CLOSE = 1.3  # two sizes on the scale are enough for those between them, if one is at most so many times the other


class Room:
    """The bytes of one device, and where a step is: at the region numbered `position`, in the backward of the one with serial `turn`, which
    the backward pass numbered `task` has come to.
    """

    def __init__(
        self, budget: Budget, device: torch.device, counts: Counts, *, host: bool | None, restore: bool
    ) -> None:
        self.account, self.limit, self.counts = Account(device), Limit(budget, device), counts
        self.host = HostTier(device, on=host)
        self.live, self.needs = LiveRegions(self.account, self.host), Needs()
        self.before = GradientsBefore(on=restore)
        self.scale: StepScale | None = None
        self.pinned: set[int] = set()
        self.position, self.turn, self.task, self.peak = 0, -1, -1, 0
        self.phase: tuple[Phase, Kind, int] | None = None  # the one that was entered last
        self.met_unknown = self._said = False

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

    def enter(self, phase: Phase, kind: Kind, number: int) -> None:
        """A phase begins: make room for it, and mark it where the step is weighed."""
        self.phase = (phase, kind, number)
        need = self.needs.of(phase, kind, number)
        if self.scale is None and not self.needs.is_covered(kind, within=CLOSE):
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

    def evict(self, wanted_bytes: int) -> int:
        """Drop what is cheapest to miss; returns the bytes that went."""
        copies = self.before.drop()  # of gradients, on the CPU: what is only there for an error goes before all else
        self.limit.base_bytes -= copies
        if copies >= wanted_bytes:
            return copies
        pinned = self.pinned | {self.turn}
        return copies + self.live.evict(wanted_bytes - copies, self.position, pinned, backward=self.turn >= 0)

    def keep_gradients(self) -> None:
        """A step begins that may end in an error: copy the gradients that stand, as far as there is room.

        On the scale, which does not see memory going that was there before it.
        """
        copied = self.before.copied_bytes
        self.before.begin(self.left_bytes)
        self.limit.base_bytes += self.before.bytes
        self.host.occupy(self.before.copied_bytes - copied)

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
        )
        if self.limit.device.type not in WITH_A_LIMIT:
            raise found
        if not self._said:  # the allocator, which is held to a limit, has the last word
            _LOG.warning("retape: %s", found)
            self._said = True

    def out_of_memory(self, kind: Kind, failure: BaseException, tried: bool) -> bool:
        """The allocator gave up in a region: drop at least as much as the region needs.

        With nothing to drop, blocks that the cache gives back may do, once; returns whether that was it.
        """
        self.counts.out_of_memory += 1
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
                error=failure,
            ) from failure
        return not freed

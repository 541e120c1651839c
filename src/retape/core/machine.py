"""The abstract machine: the one definition of a legal schedule, of its peak and of its time. Every schedule and plan is replayed by it.

The problem is a Chain (unequal stages; every byte on the device counts; a tape contains its stage's input and output) or a
Loop (equal steps; a tier counts what is stored there). A pinned stage of a chain runs once and is taped in that run.
The machine reads a stream: memory use does not grow with the number of actions, unless a timeline is requested.

Time: computation is sequential. `Save` and `Load` of a slower tier block until their copy is done; `Offload` and `Prefetch` run
on two copy streams, one per direction, beside the computation. Offloaded bytes leave the device at the first action that starts
after their copy is done; the machine never waits for that. Prefetched bytes are waited for by the first action that needs them.

Host copies of a chain's options (`Option.moved_bytes`): for a chain with a `host`, `simulate(chain, actions)` plays them on the copy
streams of the host (`OptionCopies`) and returns the resulting peak and seconds. Without one, the options' own estimates are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields

from retape.core.actions import Action, Backward, Forward, Free, Item, Load, Offload, Prefetch, Save, Tape
from retape.core.errors import IllegalAction, InvalidInput
from retape.core.ledger import ChainLedger, LoopLedger
from retape.core.problem import Chain, Loop, Option, Tier
from retape.core.units import is_whole, shown

DEVICE = Tier(name="device")
_Key = tuple[Item, int]
_Copying = Save | Load | Free | Offload | Prefetch


@dataclass(frozen=True, slots=True, kw_only=True)
class TierUse:
    """The use of one tier: copies in and out, the peak, and the items left at the end."""

    name: str
    writes: int
    reads: int
    peak_bytes: int
    peak_items: int
    left_items: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The cost of a schedule. The device's peak is at step `peak_step`, during action number `peak_position`."""

    actions: int
    forward_steps: int
    rerun_steps: int
    backward_steps: int
    seconds: float
    stall_seconds: float
    tiers: tuple[TierUse, ...]
    peak_step: int
    peak_position: int
    timeline: tuple[tuple[float, int], ...] = ()

    @property
    def peak_bytes(self) -> int:
        """The peak of the device."""
        return self.tiers[0].peak_bytes

    @property
    def writes(self) -> int:
        return sum(tier.writes for tier in self.tiers)

    @property
    def reads(self) -> int:
        return sum(tier.reads for tier in self.tiers)

    @property
    def peak_items(self) -> int:
        """The sum of the tiers' peaks of stored snapshots and tapes, which need not be simultaneous."""
        return sum(tier.peak_items for tier in self.tiers)


def simulate(
    problem: Chain | Loop, actions: Iterable[Action], *, tiers: tuple[Tier, ...] = (DEVICE,), timeline: bool = False
) -> Outcome:
    """Run `actions` on the abstract machine; raise IllegalAction at the first illegal one."""
    machine = Machine(problem, tiers=tiers, timeline=timeline)
    if not isinstance(actions, Iterable):
        raise InvalidInput(f"{shown(actions)} are no actions; give an iterable of the actions of retape.core.")
    for action in actions:
        machine.run(action)
    return machine.finish()


class Machine:
    """Runs one action at a time; `finish` returns the outcome."""

    def __init__(self, problem: Chain | Loop, *, tiers: tuple[Tier, ...] = (DEVICE,), timeline: bool = False) -> None:
        if not isinstance(tiers, tuple) or not tiers or not all(isinstance(tier, Tier) for tier in tiers):
            raise InvalidInput(f"tiers = {shown(tiers)}; give a tuple of Tier values, the device first.")
        self._ledger = _ledger_of(problem)
        self._copies: OptionCopies | None = None
        if isinstance(problem, Chain) and problem.host is not None:
            self._copies = OptionCopies(problem.host, problem.disk)
        self._tiers = tiers
        self._stored: list[dict[_Key, float]] = [{} for _ in tiers]  # key -> seconds at which the copy is done
        self._stored_bytes = [0] * len(tiers)
        self._leaving: dict[_Key, float] = {}
        self._stream_free = {Offload: 0.0, Prefetch: 0.0}
        self.working: int | None = 0
        self.working_tape: int | None = None
        self.remaining = self._ledger.length
        self._reached = 0
        self.seconds = 0.0
        self._stall = 0.0
        self._position = 0
        self._forward_steps = self._rerun_steps = 0
        self._writes, self._reads = [0] * len(tiers), [0] * len(tiers)
        self._peak_bytes, self._peak_items = [0] * len(tiers), [0] * len(tiers)
        self._peak_step = self._peak_position = 0
        self._timeline: list[tuple[float, int]] | None = [] if timeline else None
        self._action: Action | None = None
        self._handlers: dict[type, Callable[..., None]] = {
            Forward: self._forward,
            Tape: self._tape,
            Save: self._save,
            Load: self._load,
            Free: self._free,
            Offload: self._offload,
            Prefetch: self._prefetch,
            Backward: self._backward,
        }
        self._ledger.hold_state(0)

    def run(self, action: Action) -> None:
        """Run one action; raise IllegalAction if it is not legal."""
        self._action = action
        if self._leaving:
            self._release()
        handler = self._handlers.get(type(action))
        if handler is None:
            raise self._illegal("this is not an action")
        try:
            handler(action)
        except (AttributeError, KeyError, TypeError) as error:
            if _well_formed(action):
                raise
            # Checked only after a failure: schedules have millions of actions.
            raise self._illegal("its steps, tiers and options must be whole numbers, and its item an Item") from error
        self._position += 1

    def finish(self) -> Outcome:
        """Return the outcome; raise IllegalAction if a step has not been reversed."""
        self._action = None
        if self.remaining:
            raise self._illegal(f"the schedule ends with {self.remaining} steps not reversed")
        uses = tuple(self._use(index) for index in range(len(self._tiers)))
        return Outcome(
            actions=self._position,
            forward_steps=self._forward_steps,
            rerun_steps=self._rerun_steps,
            backward_steps=self._ledger.length,
            seconds=self.seconds,
            stall_seconds=self._stall,
            tiers=uses,
            peak_step=self._peak_step,
            peak_position=self._peak_position,
            timeline=tuple(self._timeline or ()),
        )

    def _use(self, index: int) -> TierUse:
        return TierUse(
            name=self._tiers[index].name,
            writes=self._writes[index],
            reads=self._reads[index],
            peak_bytes=self._peak_bytes[index],
            peak_items=self._peak_items[index],
            left_items=len(self._stored[index]),
        )

    # --- computation -------------------------------------------------------------------------------------------

    def _forward(self, action: Forward) -> None:
        if not action.start < action.stop <= self.remaining:
            raise self._illegal(f"it must advance, and at most to {self.remaining}, the steps that are not reversed")
        self._need_state(action.start)
        pinned = self._ledger.pinned_within(action.start, action.stop)
        if pinned is not None:
            raise self._illegal(f"stage {pinned} is pinned: it runs once, and that run must tape it")
        for start, stop in self._ledger.advances(action.start, action.stop):
            self._ledger.hold_state(stop)
            self._mark(start, self._ledger.forward_transient(start, start < self._reached))
            self._ledger.drop_state(start)
            self._ran(start, stop)
            self.seconds += self._ledger.forward_seconds(start, stop)
        self.working = action.stop
        self._record()

    def _tape(self, action: Tape) -> None:
        step = action.step
        if step >= self.remaining:
            raise self._illegal(f"step {step} has been reversed already, or is past the end")
        if not 0 <= action.option < self._ledger.option_count(step):
            raise self._illegal(f"step {step} has {self._ledger.option_count(step)} options")
        self._need_state(step)
        rerun = step < self._reached
        if rerun and self._ledger.pinned_within(step, step + 1) is not None:
            raise self._illegal(f"stage {step} is pinned: its forward has run, and is never run again")
        self._forget_working_tape()
        self._ledger.hold_tape(step, action.option, rerun=rerun)
        flight, stall = self._begin_copies(step)
        self._mark(step, self._ledger.tape_transient(step, action.option, rerun) - flight)
        self._ledger.hold_state(step + 1)
        self._ledger.drop_state(step)
        self._ran(step, step + 1)
        begin = self.seconds
        self.seconds += self._ledger.tape_seconds(step, action.option) - stall
        self._end_copies(step, begin, rerun)
        self.working, self.working_tape = step + 1, step
        self._record()

    def _backward(self, action: Backward) -> None:
        step = action.step
        if step != self.remaining - 1:
            raise self._illegal(f"{self.remaining} steps are left: only step {self.remaining - 1} can be reversed")
        stored = self._stored[0].pop((Item.TAPE, step), None)
        if stored is None and self.working_tape != step:
            raise self._illegal(f"there is no tape of step {step} on the device")
        if stored is not None:
            self._wait(stored)
            self._stored_bytes[0] -= self._ledger.bytes_of(Item.TAPE, step)
        flight, stall = self._fetch_copies(step)
        self._mark(step, self._ledger.backward_transient(step) - flight)
        self.seconds += self._ledger.backward_seconds(step) - stall
        self._ledger.keep_gradients(step)
        if stored is not None:
            self._ledger.drop_tape(step)
        if self.working_tape == step:
            self._forget_working_tape()
        if self.working is not None:
            self._ledger.drop_state(self.working)
            self.working = None
        self.remaining = step
        self._record()

    # --- host copies of options, if the chain has a host: else the options' estimates include them ----------------

    def _begin_copies(self, step: int) -> tuple[int, float]:
        """Begin the forward of a stage; return the estimated bytes and seconds of its option that the copies replace."""
        option = self._ledger.option_of(step)
        if self._copies is None or option is None:
            return 0, 0.0
        self._copies.begin_forward(self.seconds)
        return option.forward_flight_bytes, option.forward_stall_seconds

    def _end_copies(self, step: int, begin: float, rerun: bool) -> None:
        option = self._ledger.option_of(step)
        if self._copies is None or option is None or self._ledger.is_pinned(step):
            return
        if rerun:
            self._copies.keep(step, option, self.seconds)
        else:
            self._wait(self._copies.end_forward(step, option, begin, self.seconds))

    def _fetch_copies(self, step: int) -> tuple[int, float]:
        """Begin the backward of a stage; return the estimated bytes and seconds of its option that the copies replace."""
        option = self._ledger.option_of(step)
        if self._copies is None or option is None or self._ledger.is_pinned(step):
            return 0, 0.0
        self._wait(self._copies.begin_backward(step, self.seconds))
        return option.backward_flight_bytes, option.backward_stall_seconds

    def _ran(self, start: int, stop: int) -> None:
        self._forward_steps += stop - start
        self._rerun_steps += max(0, min(stop, self._reached) - start)
        self._reached = max(self._reached, stop)

    def _need_state(self, step: int) -> None:
        if self.working != step:
            raise self._illegal(f"it starts from state {step}, but the working state is {self.working}")

    def _forget_working_tape(self) -> None:
        if self.working_tape is not None:
            self._ledger.drop_tape(self.working_tape)
            self.working_tape = None

    # --- copies between tiers ------------------------------------------------------------------------------------

    def _save(self, action: Save) -> None:
        key = self._key(action)
        at_hand = self.working if action.item is Item.STATE else self.working_tape
        if at_hand != action.step:
            raise self._illegal(f"the working {action.item.value} is {at_hand}")
        self._wait(self._stream_free[Offload] if action.tier else 0.0)
        self.seconds += self._tiers[action.tier].write_seconds(self._ledger.bytes_of(*key))
        self._put(action.tier, key, self.seconds)
        self._writes[action.tier] += 1
        self._mark(action.step, 0)
        self._record()

    def _load(self, action: Load) -> None:
        key = self._key(action)
        if not (action.tier == 0 and self._ledger.within_tape(key)):
            self._wait(self._find(action.tier, key))
            if action.tier:
                self._wait(self._stream_free[Prefetch])
            self.seconds += self._tiers[action.tier].read_seconds(self._ledger.bytes_of(*key))
            self._reads[action.tier] += 1
        if action.item is Item.STATE:
            self._ledger.hold_state(action.step)
            if self.working is not None:
                self._ledger.drop_state(self.working)
            self.working = action.step
        else:
            self._ledger.hold_tape(action.step, None)
            self._forget_working_tape()
            self.working_tape = action.step
        self._mark(action.step, 0)
        self._record()

    def _free(self, action: Free) -> None:
        key = self._key(action)
        self._find(action.tier, key)
        del self._stored[action.tier][key]
        self._stored_bytes[action.tier] -= self._ledger.bytes_of(*key)
        if action.tier == 0:
            self._ledger.drop(key)
        self._record()

    def _offload(self, action: Offload) -> None:
        key = self._key(action, to_tier=True)
        ready = self._find(0, key)
        tier = self._tiers[action.tier]
        size = self._ledger.bytes_of(*key)
        done = max(self.seconds, ready, self._stream_free[Offload]) + tier.write_seconds(size)
        self._stream_free[Offload] = done
        self._put(action.tier, key, done)
        self._writes[action.tier] += 1
        del self._stored[0][key]
        self._stored_bytes[0] -= size
        self._leaving[key] = done
        self._record()

    def _prefetch(self, action: Prefetch) -> None:
        key = self._key(action, to_tier=True)
        ready = self._find(action.tier, key)
        if key in self._leaving:
            raise self._illegal(f"{_name(key)} has not left the device yet")
        size = self._ledger.bytes_of(*key)
        start = max(self.seconds, ready, self._stream_free[Prefetch])
        done = start + self._tiers[action.tier].read_seconds(size)
        self._stream_free[Prefetch] = done
        self._reads[action.tier] += 1
        self._put(0, key, done)
        self._mark(action.step, 0)
        self._record()

    def _key(self, action: _Copying, *, to_tier: bool = False) -> _Key:
        if not (1 if to_tier else 0) <= action.tier < len(self._tiers):
            raise self._illegal(f"there is no such tier among {[tier.name for tier in self._tiers]}")
        return action.item, action.step

    def _find(self, tier: int, key: _Key) -> float:
        ready = self._stored[tier].get(key)
        if ready is None:
            raise self._illegal(f"{self._tiers[tier].name} does not store {_name(key)}")
        return ready

    def _put(self, tier: int, key: _Key, ready: float) -> None:
        if key in self._stored[tier]:
            raise self._illegal(f"{self._tiers[tier].name} stores {_name(key)} already")
        self._stored[tier][key] = ready
        self._stored_bytes[tier] += self._ledger.bytes_of(*key)
        if tier == 0:
            self._ledger.hold(key)
        else:
            self._mark_tier(tier, self._stored_bytes[tier])
        self._peak_items[tier] = max(self._peak_items[tier], len(self._stored[tier]))

    def _release(self) -> None:
        for key in [key for key, done in self._leaving.items() if done <= self.seconds]:
            del self._leaving[key]
            self._ledger.drop(key)

    def _wait(self, until: float) -> None:
        if until > self.seconds:
            self._stall += until - self.seconds
            self.seconds = until

    # --- accounting --------------------------------------------------------------------------------------------

    def _mark(self, step: int, transient: int) -> None:
        """Record the device's bytes now, with the transient bytes of the running action."""
        count = self.device_bytes + transient
        if count > self._peak_bytes[0]:
            self._peak_step, self._peak_position = step, self._position
        self._mark_tier(0, count)
        if self._timeline is not None:
            self._timeline.append((self.seconds, count))

    def _mark_tier(self, index: int, count: int) -> None:
        self._peak_bytes[index] = max(self._peak_bytes[index], count)
        capacity = self._tiers[index].capacity_bytes
        if capacity is not None and count > capacity:
            raise self._illegal(f"{self._tiers[index].name} would hold {count} bytes, and its capacity is {capacity}")

    def _record(self) -> None:
        if self._timeline is not None:
            self._timeline.append((self.seconds, self.device_bytes))

    @property
    def device_bytes(self) -> int:
        """The bytes on the device now."""
        copies = self._copies.device_bytes if self._copies is not None else 0
        return self._ledger.device_bytes(self._stored_bytes[0]) + copies

    def _illegal(self, reason: str) -> IllegalAction:
        held = "; ".join(
            f"{tier.name}: {_names(stored)}" for tier, stored in zip(self._tiers, self._stored, strict=True)
        )
        what = self._action if self._action is not None else "the end"
        return IllegalAction(
            f"Action {self._position}, {what}: {reason}. The tiers held: {held}.",
            position=self._position,
            action=self._action,
            reason=reason,
            held=held,
        )


@dataclass(slots=True)
class _CopyOut:
    """Bytes of a stage that are being copied to the host."""

    step: int
    bytes: int
    done_seconds: float


class _Lane:
    """The two copy streams of a tier, and the seconds at which each is free."""

    def __init__(self, tier: Tier) -> None:
        self._tier, self._out_free, self._back_free = tier, 0.0, 0.0

    def out(self, count: int, start: float) -> float:
        """Return when a copy to the tier is done that can start then."""
        self._out_free = max(start, self._out_free) + self._tier.write_seconds(count)
        return self._out_free

    def back(self, count: int, start: float) -> float:
        """Return when a copy from the tier is done that can start then."""
        self._back_free = max(start, self._back_free) + self._tier.read_seconds(count)
        return self._back_free


class OptionCopies:
    """The copies of options that move bytes to the host, on one stream per direction, by the rules of the engine.

    Those to a disk have streams of their own.

    Out: the copy of an input starts with its stage's forward, that of slots at its end. Copied bytes leave the device when the next
    stage begins after the copy is done; the end of a stage waits for the copies of the stages before it. Back: when backward reaches
    a stage that moved bytes, its copy starts and is waited for, and that of the nearest moved stage before it starts too. The
    first stage after a moved one that moves nothing itself starts the copy of that one.
    `device_bytes` are the bytes of other stages' copies; those of the running stage are in its option's transient bytes.
    """

    def __init__(self, host: Tier, disk: Tier | None = None) -> None:
        self._lanes = (_Lane(host), _Lane(host if disk is None else disk))
        self._lane_of: dict[int, _Lane] = {}  # of moved stages
        self._leaving: list[_CopyOut] = []
        self._moved: dict[int, int] = {}  # bytes of stages that are not yet reversed, in their order
        self._arrival: dict[int, float] = {}  # copies back that have started: when each is done
        self._prefetch_at: dict[int, int] = {}  # stage that moves nothing -> moved stage whose copy it starts

    @property
    def device_bytes(self) -> int:
        return sum(copy.bytes for copy in self._leaving) + sum(self._moved[step] for step in self._arrival)

    def begin_forward(self, now: float) -> None:
        """Release the bytes whose copies are done."""
        self._leaving = [copy for copy in self._leaving if copy.done_seconds > now]

    def end_forward(self, step: int, option: Option, begin: float, now: float) -> float:
        """Start the copies of a stage whose forward began at `begin`; return when the next stage may begin."""
        ready = max([now, *(copy.done_seconds for copy in self._leaving)])
        self._leaving.clear()
        slots, lane = option.moved_bytes - option.input_bytes, self._lanes[option.on_disk]
        self._lane_of[step] = lane
        for size, start in ((option.input_bytes, begin), (slots, now)):
            if size:
                self._leaving.append(_CopyOut(step, size, lane.out(size, start)))
        if option.moved_bytes:
            self._moved[step] = option.moved_bytes
        elif self._moved and max(self._moved) not in self._prefetch_at.values():
            self._prefetch_at[step] = max(self._moved)
        return ready

    def keep(self, step: int, option: Option, now: float) -> None:
        """Keep the bytes of a stage that a re-run has taped: its backward follows soon, so nothing is copied."""
        if option.moved_bytes:
            self._moved[step] = option.moved_bytes
            self._arrival[step] = now

    def begin_backward(self, step: int, now: float) -> float:
        """Start the copies back for a stage's backward; return when its own bytes are on the device."""
        if step in self._moved:
            self._fetch(step, now)
            nearest = max((other for other in self._moved if other < step), default=None)
        else:
            nearest = self._prefetch_at.get(step)
        if nearest in self._moved:
            self._fetch(nearest, now)
        ready = max(now, self._arrival.pop(step, now))
        self._moved.pop(step, None)
        return ready

    def _fetch(self, step: int, now: float) -> None:
        if step in self._arrival:
            return
        never_left = sum(copy.bytes for copy in self._leaving if copy.step == step)
        self._leaving = [copy for copy in self._leaving if copy.step != step]
        missing = self._moved[step] - never_left
        self._arrival[step] = now
        if missing:
            self._arrival[step] = self._lane_of[step].back(missing, now)


def _well_formed(action: Action) -> bool:
    values = [getattr(action, field.name) for field in fields(action)]
    return all(is_whole(value) or isinstance(value, Item) for value in values)


def _ledger_of(problem: Chain | Loop) -> LoopLedger:
    if isinstance(problem, Chain):
        return ChainLedger(problem)
    if isinstance(problem, Loop) and problem.steps is not None:
        return LoopLedger(problem)
    raise InvalidInput("Only a Chain, or a Loop with a known number of steps, can be simulated.")


def _name(key: _Key) -> str:
    return f"{key[0].value} {key[1]}"


def _names(stored: dict[_Key, float], most: int = 12) -> str:
    names = [_name(key) for key in list(stored)[:most]]
    more = f", and {len(stored) - most} more" if len(stored) > most else ""
    return (", ".join(names) or "nothing") + more

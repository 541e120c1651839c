"""Random small chains, and an exhaustive search over their schedules that knows nothing of intervals: what the solvers must meet."""

import heapq
import random
from collections.abc import Collection
from dataclasses import replace

from retape.core import Chain, Option, OptionKind, Stage

INF = float("inf")


def random_chain(seed: int, length: int, most: int = 6, transients: bool = True, pinned: Collection[int] = ()) -> Chain:
    """Whole numbers, a tape at least as large as the output it contains, taping no faster than running."""
    rng = random.Random(seed)
    states = [rng.randint(1, most) for _ in range(length)] + [0]

    def transient() -> int:
        return rng.randint(0, most) if transients else 0

    def stage(i: int) -> Stage:
        forward, backward = rng.randint(1, 5), rng.randint(0, 5)
        tape = states[i + 1] + rng.randint(0, 2 * most)
        options = tuple(
            Option(
                kind=OptionKind.SELECT,
                held_bytes=rng.randint(states[i + 1], tape),
                forward_seconds=forward + rng.randint(0, 1),
                backward_seconds=backward,
                rerun_seconds=rng.randint(0, forward),
                forward_transient_bytes=transient(),
                backward_transient_bytes=transient(),
            )
            for _ in range(0 if i in pinned else rng.randint(0, 2))
        )
        return Stage(
            forward_seconds=forward,
            backward_seconds=backward,
            state_bytes=states[i],
            tape_bytes=tape,
            forward_transient_bytes=transient(),
            backward_transient_bytes=transient(),
            rerun_transient_bytes=transient(),
            options=options,
            pinned=i in pinned,
        )

    return Chain(stages=tuple(stage(i) for i in range(length)), fixed_bytes=rng.randint(0, 3))


def untaped(chain: Chain, seed: int, most: int = 12) -> Chain:
    """The same chain, where a run that makes no tape has a transient of its own."""
    rng = random.Random(seed)
    stages = (replace(stage, untaped_transient_bytes=rng.randint(0, most)) for stage in chain.stages)
    return replace(chain, stages=tuple(stages))


def with_gradients(chain: Chain, seed: int, most: int = 8) -> Chain:
    """The same chain, where each backward leaves gradients."""
    rng = random.Random(seed)
    stages = (replace(stage, gradient_bytes=rng.randint(0, most)) for stage in chain.stages)
    return replace(chain, stages=tuple(stages))


class Search:
    """A* over everything that the device can hold, by the rules of the machine written anew.

    Persistent: what is stored stays until its stage is reversed. Otherwise anything may be forgotten at any time.
    """

    def __init__(self, chain: Chain, budget: int, persistent: bool) -> None:
        self.chain, self.room, self.persistent = chain, budget - chain.fixed_bytes, persistent
        self.n = chain.length
        self.size = [s.state_bytes for s in chain.stages] + [0]
        self.choices = [s.choices for s in chain.stages]  # made anew, and checked, whenever a stage is asked
        self.back = [[o.backward_seconds + o.rerun_seconds for o in choices] for choices in self.choices]
        self.least = [
            min(o.forward_seconds + o.backward_seconds + o.rerun_seconds for o in choices) for choices in self.choices
        ]
        left = [stage.gradient_bytes for stage in chain.stages]
        self.gradients = [sum(left[remaining:]) for remaining in range(self.n + 1)]

    def weight(self, working, states, tapes) -> int:
        taped = {i for i, _ in tapes}
        held = set(states) | taped | ({working} if working is not None else set())
        return sum(self.size[i] for i in held if i - 1 not in taped) + sum(
            self.choices[i][o].held_bytes for i, o in tapes
        )

    def ahead(self, tapes, remaining) -> float:
        """Seconds that are left whatever is done: every stage is reversed, and taped first if it is not."""
        taped = dict(tapes)
        return sum(self.back[i][taped[i]] if i in taped else self.least[i] for i in range(remaining))

    def least_seconds(self) -> float:
        start = (0, frozenset(), frozenset(), self.n, 0)
        best, queue, tick = {start: 0.0}, [(0.0, 0, start)], 0
        done = set()
        while queue:
            _, _, here = heapq.heappop(queue)
            if here in done:
                continue
            done.add(here)
            if here[3] == 0:
                return best[here]
            for cost, there in self.steps(*here):
                seconds = best[here] + cost
                if seconds < best.get(there, INF):
                    best[there] = seconds
                    tick += 1
                    heapq.heappush(queue, (seconds + self.ahead(there[2], there[3]), -tick, there))
        return INF

    def steps(self, working, states, tapes, remaining, reached):
        taped = {i for i, _ in tapes}
        at_hand = states | taped | {i + 1 for i in taped}
        for source in at_hand | ({working} if working is not None else set()):
            if source + 1 == working and source + 1 not in at_hand:
                continue  # what it would make is there already, unstored
            yield from self.run(source, states, tapes, remaining, reached, taped)
            if source not in at_hand:  # a working state may be stored before it is left
                yield from self.run(source, states | {source}, tapes, remaining, reached, taped)
        yield from self.backward(working, states, tapes, remaining, reached)
        if not self.persistent:
            for i in states:
                yield 0.0, (working, states - {i}, tapes, remaining, reached)
            for tape in tapes:
                yield 0.0, (working, states, tapes - {tape}, remaining, reached)

    def run(self, w, states, tapes, remaining, reached, taped):
        if w >= remaining or (self.chain.stages[w].pinned and w < reached):
            return
        stage, rerun, after = self.chain.stages[w], w < reached, max(reached, w + 1)
        transient = max(
            stage.rerun_transient_bytes if rerun else stage.forward_transient_bytes, stage.untaped_transient_bytes
        )
        there = w + 1 in states or w + 1 in taped or w in taped
        bare = w + 1 < remaining and not there and not stage.pinned
        room = self.room - self.gradients[remaining]
        if bare and self.weight(w, states | {w + 1}, tapes) + transient <= room:
            yield stage.forward_seconds, (w + 1, states, tapes, remaining, after)
        for o, option in enumerate(self.choices[w]) if w not in taped else ():
            more = tapes | {(w, o)}
            transient = max(option.forward_transient_bytes, stage.rerun_transient_bytes if rerun else 0)
            if self.weight(w, states, more) + transient <= room:
                yield option.forward_seconds, (w + 1, states, more, remaining, after)

    def backward(self, working, states, tapes, remaining, reached):
        last = remaining - 1
        for tape in tapes:
            if tape[0] != last:
                continue
            stage = self.chain.stages[last]
            option = self.choices[last][tape[1]]
            transient = max(option.backward_transient_bytes, stage.gradient_bytes)
            if self.weight(working, states, tapes) + transient <= self.room - self.gradients[remaining]:
                left = frozenset(i for i in states if i < last)
                yield option.backward_seconds + option.rerun_seconds, (None, left, tapes - {tape}, last, reached)

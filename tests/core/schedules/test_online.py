"""The online schedule: how near to the offline optimum, how few stores, and that it never looks ahead."""

from itertools import islice, pairwise, takewhile

import pytest

from retape.core.actions import Forward, Free, Save
from retape.core.machine import Machine, simulate
from retape.core.schedules import Schedule, count
from retape.core.schedules.online import forward_phase, online, reverse_phase
from retape.core.schedules.revolve import binomial, extra_steps, repetitions


def forward_trace(snapshots, longest):
    """(length, stored states) just before each length is reached, and the number of stores, by running the forward phase."""
    stored, stores, spans = [], 0, []
    for action in forward_phase(snapshots):
        if isinstance(action, Save):
            stored, stores = [*stored, action.step], stores + 1
        elif isinstance(action, Free):
            stored = [state for state in stored if state != action.step]
        else:
            spans.append((action, stored))
            if action.stop >= longest:
                return spans, stores
    raise AssertionError("the forward phase has no end")


def closed_cost(stored, snapshots):
    lengths = [stop - start for start, stop in pairwise(stored)]
    return sum(length + extra_steps(length, snapshots - index) for index, length in enumerate(lengths))


def worst_ratio(snapshots, shortest, longest):
    worst = 0.0
    for span, stored in forward_trace(snapshots, longest)[0]:
        closed, slots = closed_cost(stored, snapshots), snapshots - len(stored) + 1
        for length in range(max(span.start + 1, shortest), min(span.stop, longest) + 1):
            last = length - 1 - stored[-1]
            total = length + closed + last + extra_steps(last, slots)
            worst = max(worst, total / (length + extra_steps(length, snapshots)))
    return worst


@pytest.mark.parametrize("snapshots", [*range(3, 21), 25, 32, 50, 64, 100, 300])
def test_within_ten_percent_of_the_optimum(snapshots):
    assert worst_ratio(snapshots, 20, 2000) <= 1.10


@pytest.mark.parametrize("snapshots", [3, 4, 5, 8, 16, 32])
def test_within_ten_percent_up_to_ten_thousand_steps(snapshots):
    assert worst_ratio(snapshots, 20, 10_000) <= 1.09


def test_two_snapshots_come_near_to_what_any_rule_can_do():
    # `best_with_two` is a bound for every rule: with 2 snapshots, 1.10 from 20 steps on cannot be had.
    assert 1.139 < best_with_two(20, 400) <= worst_ratio(2, 20, 2000) < 1.1535
    assert worst_ratio(2, 200, 10_000) <= 1.10


def best_with_two(shortest, longest):
    """The least worst ratio of any rule with two snapshots: minimax over when the second one is replaced."""
    worst = {0: 0.0}
    for length in range(1, longest + 1):
        if length > 1:
            worst[length - 1] = min(worst.values())
        optimum = length + extra_steps(length, 2)
        if length >= shortest:
            worst = {second: max(bad, two_cost(second, length) / optimum) for second, bad in worst.items()}
    return min(worst.values())


def two_cost(second, length):
    if second == 0:
        return length + extra_steps(length, 1)
    last = length - 1 - second
    return length + second + extra_steps(second, 2) + last + extra_steps(last, 1)


def test_the_model_of_the_ratio_is_what_the_simulator_counts():
    for snapshots in (2, 3, 5):
        for steps in range(1, 80):
            _, stored = next(pair for pair in forward_trace(snapshots, steps)[0] if pair[0].stop >= steps)
            last = steps - 1 - stored[-1]
            model = steps + closed_cost(stored, snapshots) + last + extra_steps(last, snapshots - len(stored) + 1)
            assert count(Schedule(family="online", steps=steps, snapshots=snapshots)).forward_steps == model


@pytest.mark.parametrize("snapshots", [2, 3, 5, 10, 20, 50])
def test_few_stores(snapshots):
    assert forward_trace(snapshots, 2000)[1] <= 2000 * 0.35
    assert forward_trace(snapshots, 10_000)[1] <= 10_000 * 0.2


def test_optimal_at_every_binomial_length():
    for snapshots, steps in [(2, 15), (3, 35), (4, 126), (5, 252), (6, 462), (10, 1001)]:
        counts = count(Schedule(family="online", steps=steps, snapshots=snapshots))
        assert counts.extra_forward_steps == extra_steps(steps, snapshots)


def test_decisions_do_not_depend_on_the_length():
    short, long = list(online(300, 5)), online(301, 5)
    forward = list(takewhile(lambda action: isinstance(action, (Forward, Save, Free)), short))[:-1]
    assert list(islice(long, len(forward))) == forward


@pytest.mark.parametrize("snapshots", [1, 2, 7])
def test_a_runtime_can_stop_anywhere_and_reverse(snapshots):
    for steps in (1, 2, 3, 20, 41):
        machine = Machine(Schedule(family="online", steps=steps, snapshots=snapshots).loop())
        stored = drive(machine, steps, snapshots)
        for action in reverse_phase(stored, steps, snapshots):
            machine.run(action)
        assert machine.finish().tiers[0].left_items == 0


def drive(machine, steps, snapshots):
    """Run the forward phase as a loop would that finds out at `steps` that it has ended; nothing is taped on the way."""
    stored = []
    for action in forward_phase(snapshots):
        if isinstance(action, Forward) and action.stop >= steps:
            machine.run(Forward(action.start, steps))
            return stored
        machine.run(action)
        if isinstance(action, Save):
            stored.append(action.step)
        elif isinstance(action, Free):
            stored.remove(action.step)
    raise AssertionError("the forward phase has no end")


def test_one_snapshot_is_recompute_all():
    schedule = Schedule(family="online", steps=12, snapshots=1)
    assert simulate(schedule.loop(), schedule.actions(), tiers=schedule.tiers()).rerun_steps == 66


class EveryStep:
    """The same rule, asked at every step and summed from scratch each time: no search, no running sums."""

    def __init__(self, snapshots):
        self.snapshots, self.stored = snapshots, [0]

    def visit(self, here):
        anchors, must = self.anchors(here), here in self.anchors(here)
        if len(self.stored) < self.snapshots:
            self.stored += [here] if must else []
            return
        spare = [index for index in range(1, self.snapshots) if self.stored[index] not in anchors]
        if not spare:
            return
        options = {index: [*self.stored[:index], *self.stored[index + 1 :], here] for index in spare}
        best = min(spare, key=lambda index: (closed_cost(options[index], self.snapshots), -index))
        gap = here - self.stored[-1]
        staying = closed_cost(self.stored, self.snapshots) + gap + extra_steps(gap, 1)
        if must or closed_cost(options[best], self.snapshots) < staying:
            self.stored = options[best]

    def anchors(self, here):
        repeats = repetitions(here + 1, self.snapshots)
        segments = [binomial(self.snapshots - index, repeats - 1) for index in range(self.snapshots - 1)]
        return {sum(segments[:index]) for index in range(self.snapshots)}


@pytest.mark.parametrize("snapshots", [2, 3, 5, 8, 13])
def test_skipping_to_the_next_store_misses_none(snapshots):
    slow = EveryStep(snapshots)
    for span, stored in forward_trace(snapshots, 400)[0]:
        assert slow.stored == stored
        for here in range(span.start + 1, span.stop + 1):
            assert slow.stored == stored
            slow.visit(here)

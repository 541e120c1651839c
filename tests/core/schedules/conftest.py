"""An exhaustive search over machine states, written apart from every schedule: the oracle for small cases."""

import heapq

import pytest


def least_seconds(steps, slots, *, forward=1.0, backward=1.0, write=None, read=None, tapes=False):
    """Dijkstra over (adjoint, working state, working tape, states and tapes of each tier): the least time of any schedule.

    Sets of steps are bit masks. `tapes` lets the slots of tier 0 hold tapes, too. Only moves that cannot help are left out:
    freeing before a slot is needed, keeping what is past the adjoint, recording a tape that will be overwritten.
    """
    write, read = write or (0.0,) * len(slots), read or (0.0,) * len(slots)
    costs = (forward, backward, write, read)
    start = (steps, 0, -1, (0,) * len(slots), 0)
    best = {start: 0.0}
    queue = [(0.0, start)]
    while queue:
        seconds, state = heapq.heappop(queue)
        if state[0] == 0:
            return seconds
        if seconds > best[state]:
            continue
        for cost, after in moves(state, slots, costs, tapes):
            if seconds + cost < best.get(after, float("inf")):
                best[after] = seconds + cost
                heapq.heappush(queue, (seconds + cost, after))
    return float("inf")


def moves(state, slots, costs, tapes):
    forward, backward, write, read = costs
    remaining, working, tape, states, stored_tapes = state
    if 0 <= working < remaining - 1:
        yield forward, (remaining, working + 1, tape, states, stored_tapes)
    if 0 <= working < remaining and (tapes or working == remaining - 1):
        yield forward, (remaining, working + 1, working, states, stored_tapes)
    last = remaining - 1
    if tape == last or stored_tapes >> last & 1:
        below = (1 << last) - 1
        yield backward, (last, -1, -1, tuple(held & below for held in states), stored_tapes & below)
    for tier in range(len(slots)):
        if 0 <= working < remaining and not states[tier] >> working & 1:
            for kept, kept_tapes in rooms(states[tier], stored_tapes if tier == 0 else 0, slots[tier]):
                after = put(states, tier, kept | 1 << working)
                yield write[tier], (remaining, working, tape, after, kept_tapes if tier == 0 else stored_tapes)
        for step in bits(states[tier]):
            yield read[tier], (remaining, step, tape, states, stored_tapes)
    if tapes and tape >= 0 and not stored_tapes >> tape & 1:
        for kept, kept_tapes in rooms(states[0], stored_tapes, slots[0]):
            yield write[0], (remaining, working, tape, put(states, 0, kept), kept_tapes | 1 << tape)


def rooms(states, tapes, slots):
    """What a tier can keep so that one more fits."""
    if states.bit_count() + tapes.bit_count() < slots:
        yield states, tapes
    elif slots:
        yield from ((states & ~(1 << step), tapes) for step in bits(states))
        yield from ((states, tapes & ~(1 << step)) for step in bits(tapes))


def bits(mask):
    return [step for step in range(mask.bit_length()) if mask >> step & 1]


def put(states, tier, held):
    return (*states[:tier], held, *states[tier + 1 :])


@pytest.fixture(scope="session")
def search():
    return least_seconds

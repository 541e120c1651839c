"""What ranks agree on and how they fail together, with threads for processes and a store in memory; processes are in test_together.py."""

import threading
import time
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import retape
from retape.core.errors import BudgetTooSmall, InvalidInput, RankFailed
from retape.core.problem import Budget
from retape.torch.distributed.limits import RankLimit, RankLimits
from retape.torch.distributed.members import members_of
from retape.torch.distributed.ranks import ALONE
from retape.torch.distributed.together import working_together
from retape.torch.distributed.tuning import DistributedTuning

QUICK = DistributedTuning(
    meeting_seconds=1.0,
    beat_seconds=0.1,
    patience_seconds=0.2,
    closing_seconds=0.5,
    grace_seconds=0.1,
)


def together(*runs, members=None, tunings=None):
    """Run each function with the ranks, in a thread of its own; return what each returned or raised."""
    store, found = dist.HashStore(), [None] * len(runs)
    members = members or tuple(range(len(runs)))

    def work(place, run):
        try:
            with working_together(
                store, members, members[place], tuning=(tunings or [QUICK] * len(runs))[place]
            ) as ranks:
                found[place] = run(ranks)
        except BaseException as error:
            found[place] = error

    threads = [threading.Thread(target=work, args=each) for each in enumerate(runs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
        assert not thread.is_alive(), "hangs"
    return found


def same_error(found, kind):
    assert [type(each) for each in found] == [kind] * len(found), found
    assert len(set(map(str, found))) == 1, found
    return found[0]


def raising(error):
    def run(*_):
        raise error

    return run


def test_answers_are_the_same_on_every_rank():
    def run(ranks):
        return ranks.of_all(ranks.number), ranks.largest(3 - ranks.number), ranks.any(ranks.number == 1)

    assert together(run, run, run) == [([0, 1, 2], 3, True)] * 3


def test_the_first_rank_decides():
    assert together(*[lambda ranks: ranks.decided_by_first(lambda: f"by {ranks.number}")] * 2) == ["by 0", "by 0"]


def test_a_refusal_of_the_first_rank_is_raised_by_all():
    refuse = raising(BudgetTooSmall("too small", floor_bytes=7))
    error = same_error(together(*[lambda ranks: ranks.decided_by_first(refuse)] * 2), BudgetTooSmall)
    assert (str(error), error.floor_bytes) == ("too small", 7)


def test_different_values_are_refused():
    found = together(*[lambda ranks: ranks.require_equal("have other names", ("a", str(ranks.number)), "Rename.")] * 2)
    assert "they have other names: rank 0 2 (a, 0), rank 1 2 (a, 1). Rename." in str(same_error(found, InvalidInput))


def test_an_exception_on_one_rank():
    def asks(ranks):
        ranks.phase = "asking"
        return ranks.of_all(1)

    def fails(ranks):
        ranks.phase = "failing"
        raise ValueError("wrong")

    error = same_error(together(asks, fails, asks, members=(2, 5, 7)), RankFailed)
    assert "Rank 5 failed in the phase 'failing': ValueError: wrong" in str(error)
    assert (error.rank, error.phase) == (5, "failing")


def test_an_error_of_retape_on_one_rank_keeps_its_class_and_numbers():
    fails = raising(BudgetTooSmall("too small", budget_bytes=3))
    error = same_error(together(lambda ranks: ranks.of_all(1), fails), BudgetTooSmall)
    assert str(error) == "On rank 1, in the phase 'starting': too small"
    assert error.budget_bytes == 3


def test_an_error_of_retape_that_a_pipeline_has_wrapped_keeps_its_class():
    def fails(ranks):
        try:
            raise BudgetTooSmall("too small", budget_bytes=3)
        except BudgetTooSmall as error:
            raise RuntimeError("[Stage 1] failed to run forward") from error

    error = same_error(together(lambda ranks: ranks.of_all(1), fails), BudgetTooSmall)
    assert str(error) == "On rank 1, in the phase 'starting': too small"


def test_the_same_exception_on_every_rank_is_raised_as_it_is():
    assert str(same_error(together(*[raising(ValueError("wrong"))] * 2), ValueError)) == "wrong"


def test_a_failure_at_the_very_end():
    def late(ranks):
        ranks.of_all(1)
        raise KeyError("late")

    same_error(together(lambda ranks: ranks.of_all(1), late), RankFailed)


def test_ranks_that_ask_different_questions():
    error = same_error(together(lambda ranks: ranks.of_all(1), lambda ranks: ranks.any(True)), RankFailed)
    assert "asks 'list' in the phase 'starting', rank 1 'any'" in str(error)


def test_a_rank_that_ends_its_attempt_while_another_asks():
    def asks(ranks):
        return ranks.attempt(lambda: ranks.any(True))

    error = same_error(together(asks, lambda ranks: ranks.attempt(lambda: 1)), RankFailed)
    assert "The ranks do different work" in str(error)


def test_running_out_of_memory_on_one_rank_is_an_answer_for_all():
    def run(ranks):
        try:
            return ranks.attempt(raising(torch.OutOfMemoryError("full")) if ranks.number else lambda: 1)
        except torch.OutOfMemoryError as error:
            return str(error), ranks.attempt(lambda: 2)

    assert together(run, run, run)[0] == ("On rank 1: full", 2)


def test_running_out_of_memory_while_another_rank_asks():
    """The one that asks is inside the same attempt, and leaves it."""

    def run(ranks):
        try:
            return ranks.attempt(raising(torch.OutOfMemoryError("full")) if ranks.number else lambda: ranks.any(True))
        except torch.OutOfMemoryError as error:
            return str(error)

    assert together(run, run) == ["On rank 1: full"] * 2


def test_running_out_of_memory_while_another_rank_waits_for_it():
    left = threading.Event()

    def run(ranks):
        return ranks.attempt(raising(torch.OutOfMemoryError("full")) if ranks.number else lambda: left.wait(1.0))

    error = same_error(together(run, run), RankFailed)
    assert "Rank 1 failed" in str(error)
    assert "OutOfMemoryError: full" in str(error)


def test_an_error_of_one_attempt():
    def run(ranks):
        return ranks.attempt(raising(TypeError("logits")) if ranks.number else lambda: 1)

    assert "Rank 1 failed in the phase 'starting': TypeError: logits" in str(same_error(together(run, run), RankFailed))


def test_the_same_error_of_every_attempt_is_raised_as_it_is():
    def run(ranks):
        try:
            return ranks.attempt(raising(TypeError(str(ranks.number))))
        except TypeError as error:
            return str(error)

    assert together(run, run) == ["0", "1"]


def test_a_rank_that_does_not_come():
    """Two ranks of three are here; each names the one that is missing."""
    missing = "waited 1 s for rank 2. Call it on all of these ranks"
    found = together(lambda ranks: 0, lambda ranks: 1, members=(0, 1, 2))
    assert [type(each) for each in found] == [InvalidInput] * 2
    assert all(f"Rank {rank} called fit(), which is for 3 ranks" in str(each) for rank, each in enumerate(found))
    assert all(missing in str(each) for each in found)


def test_a_rank_that_is_silent():
    """As one that was killed: it met the others, and gives no sign of life."""

    def sleeps(ranks):
        time.sleep(1.5)
        return ranks.of_all(1)

    silent = replace(QUICK, beat_seconds=1000.0)
    listening = replace(QUICK, silence_seconds=0.5)
    error = same_error(together(lambda ranks: ranks.of_all(1), sleeps, tunings=[listening, silent]), RankFailed)
    assert str(error).startswith("Rank 1 has not answered for 0.5 s, in the phase 'starting': its process was killed")


def test_a_rank_that_is_silent_after_a_collective_has_failed():
    """As one that was killed on another machine: it is not waited for as long as one that may be computing."""

    def sleeps(ranks):
        time.sleep(1.5)
        return ranks.of_all(1)

    tunings = [replace(QUICK, hurried_silence_seconds=0.3, beat_seconds=beat) for beat in (0.1, 1000.0)]
    failed = raising(RuntimeError("[Rank 0] Connection closed by peer"))
    error = same_error(together(failed, sleeps, tunings=tunings), RankFailed)
    assert str(error).startswith("Rank 1 has not answered for 0.3 s")


def test_one_process():
    assert ALONE.of_all(3) == [3]
    assert ALONE.attempt(lambda: 4) == 4
    assert members_of(torch.nn.Linear(1, 1)) == (0,)
    assert members_of(torch.nn.Linear(1, 1), False) == (0,)


def limits(*ranks, place=0):
    made = tuple(RankLimit(budget=Budget.of(limit), limit_bytes=limit, start_bytes=start) for limit, start in ranks)
    return RankLimits(ranks=made, place=place, members=tuple(range(len(made))))


def test_the_rank_with_the_least_room_decides():
    first, second = (limits((100, 20), (90, 5), place=place) for place in (0, 1))
    assert (first.limit_bytes, first.margin_bytes, first.tightest_rank) == (100, 0, 0)
    assert (second.limit_bytes, second.margin_bytes) == (100, -10)
    # 80 bytes of activations: both are exactly at their limits, and both count as 100.
    assert (20 + 80 - first.margin_bytes, 5 + 80 - second.margin_bytes) == (100, 95)


def test_equal_limits_name_no_rank():
    assert limits((100, 20), (100, 30)).tightest_rank is None


def test_everything_is_asked_for_only_if_every_rank_does():
    whole, some = Budget.of(1.0), Budget.of(0.5)
    made = [RankLimit(budget=each, limit_bytes=100, start_bytes=0) for each in (whole, some)]
    assert RankLimits(ranks=(made[0], made[0])).budget.share == 1.0
    assert RankLimits(ranks=(made[0], made[1])).budget.limit_bytes == 100


@pytest.mark.parametrize("fake", ["model", "batch"])
def test_fake_tensors_are_refused(fake):
    from torch._subclasses.fake_tensor import FakeTensorMode

    model, batch = torch.nn.Linear(2, 1), torch.randn(4, 2)
    with FakeTensorMode(allow_non_fake_inputs=True):
        if fake == "model":
            model = torch.nn.Linear(2, 1)
        else:
            batch = torch.randn(4, 2)
    with pytest.raises(InvalidInput, match="which has no values"):
        retape.fit(model, batch, step=lambda m, b: m(b).sum(), budget=0.5, progress=False)

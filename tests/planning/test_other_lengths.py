"""A plan for a long batch from profiles of two shorter ones: bytes that hold, one long step, and clear refusals."""

import pytest
import torch

import retape
from retape.errors import InvalidInput
from retape.torch.planning.profiles.other_lengths import ProfiledLengths, lengths_of
from retape.torch.planning.region_variants import OpPeak
from support.models import make, token_batch
from support.trials import WarmTrials, chain_of, fit_by_ops, fit_with_host, host_tier

LENGTHS = (64, 128, 512)


def counting_by_length(trials):
    """Trials that count the steps of each length, and the counts."""
    counts = {}

    class Counted(trials):
        def run_step(self, *rest):
            length = self._batch["input_ids"].shape[1]
            counts[length] = counts.get(length, 0) + 1
            return super().run_step(*rest)

    return Counted, counts


@pytest.mark.parametrize(
    ("figures", "expected"),
    [((100, 200), 800), ((150, 250), 850), ((100, 100), 100), ((100, 400), 6400), ((110, 420), 6480), ((3, 2), 3)],
    ids=["in proportion", "with a constant", "constant", "square", "both", "less"],
)
def test_a_figure_at_another_length(figures, expected):
    assert ProfiledLengths(shorter=64, longer=128, wanted=512).at(*figures) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("figures", "expected"),
    [((100, 200), 800), ((1000, 2008), 8032), ((100, 400), 6400), ((150, 250), 850)],
    ids=["in proportion", "rounded by an allocator", "square", "with a constant"],
)
def test_bytes_at_another_length(figures, expected):
    assert ProfiledLengths(shorter=64, longer=128, wanted=512).bytes_at(*figures) == expected


def test_another_op_may_peak_at_another_length():
    lengths = ProfiledLengths(shorter=64, longer=128, wanted=512)
    short, longer = [OpPeak("mm", 1000), OpPeak("add", 300)], [OpPeak("mm", 1100), OpPeak("add", 600)]
    assert lengths.peak_at(short, longer) == 2400
    assert lengths.peak_at(short, [OpPeak("mm", 1100), OpPeak("mul", 600)]) is None
    assert lengths.peak_at([], []) is None


def test_peaks_of_tiles_are_those_of_the_whole_length():
    model = make("llama")[0]
    # The CPU's attention kernel has the same block size, and so the same buffers, at lengths from 192 to 767.
    short, longer, whole = (token_batch(length, rows=2) for length in (192, 320, 704))
    own = chain_of(model, whole, slices=True)
    made = chain_of(model, whole, slices=True, profile_batches=(short, longer))
    compared = 0
    for mine, its in zip(made.stages, own.stages, strict=True):
        known = {option.label: option for option in its.choices if option.label.startswith("recompute, ")}
        for option in mine.choices:
            if option.label in known:
                compared += 1
                other = known[option.label]
                for field in ("forward_transient_bytes", "backward_transient_bytes"):
                    assert 0.99 * getattr(other, field) <= getattr(option, field) <= 1.06 * getattr(other, field)
        tiles = {option.label for option in mine.choices if option.label.startswith("recompute, ")}
        assert known.keys() <= tiles, "every number of tiles that helps the long batch is known"
    assert compared


def test_the_chain_of_a_long_step_is_that_of_its_own_profile():
    model = make("llama")[0]
    short, longer, whole = (token_batch(length, rows=2) for length in LENGTHS)
    own = chain_of(model, whole, host=host_tier())
    made = chain_of(model, whole, host=host_tier(), profile_batches=(short, longer))
    assert len(made.stages) == len(own.stages)
    for mine, its in zip(made.stages, own.stages, strict=True):
        for field in ("state_bytes", "tape_bytes", "forward_transient_bytes", "backward_transient_bytes"):
            assert getattr(mine, field) == pytest.approx(getattr(its, field), rel=0.03, abs=20_000), (mine.name, field)
        moved = [max(option.moved_bytes for option in stage.choices) for stage in (mine, its)]
        assert moved[0] == pytest.approx(moved[1], rel=0.03)


@pytest.mark.parametrize("share", [0.7, 0.35])
def test_a_fit_runs_one_long_step_and_its_budget_holds(share):
    model = make("llama")[0]
    short, longer, whole = (token_batch(length, rows=2) for length in LENGTHS)
    trials, counts = counting_by_length(WarmTrials)
    made = fit_by_ops(model, whole, budget=share, trials=trials, profile_batches=(short, longer))
    assert counts[512] == 2, "one, which these trials run twice: the first takes host memory"
    assert counts[64] <= 6
    assert made.measured.peak_bytes <= made.record.budget_bytes
    assert made.measured.peak_bytes == pytest.approx(made.promised.peak_bytes, rel=0.05)
    assert retape.verify(model, whole).equal
    made.remove()


def test_slots_and_inputs_may_be_moved_too():
    model = make("llama")[0]
    short, longer, whole = (token_batch(length, rows=2) for length in LENGTHS)
    made = fit_with_host(host_tier(), model, whole, budget=0.35, profile_batches=(short, longer))
    assert any(choice.moves for choice in made.record.assignment.choices)
    assert made.measured.peak_bytes <= made.record.budget_bytes
    assert retape.verify(model, whole).equal
    made.remove()


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (([8], [16], [4]), "lengths 8 and 16, and the batch 4"),
        (([16], [8], [32]), "lengths 16 and 8"),
        (([8], [32]), "has 1 batches; give two"),
        (([8, 2], [16, 2], [32, 4]), "differ from the batch in 2 lengths"),
        (([8], [8], [8]), "differ from the batch in 0 lengths"),
        (([8], [16, 2], [32]), "other tensors than the batch"),
    ],
)
def test_batches_that_are_refused(batches, message):
    *short, whole = (torch.zeros(shape) for shape in batches)
    with pytest.raises(InvalidInput, match=message):
        lengths_of(short, whole)


def test_compiled_blocks_are_refused():
    with pytest.raises(InvalidInput, match="profile_batches are not for compiled blocks"):
        retape.fit(
            make("llama")[0],
            token_batch(64, rows=2),
            budget=0.5,
            compile=True,
            profile_batches=(token_batch(16, rows=2), token_batch(32, rows=2)),
            progress=False,
        )

"""Decisions that would differ when the region runs again."""

import pytest
import torch
from torch import nn

import retape
from retape.errors import RecomputeMismatch
from support.comparing import (
    Notes,
    as_region,
    by_values,
    equals_plain,
    leaf,
    refuses,
    results,
    same_as_plain,
)


class Flipping:
    """Another answer every time it is asked, as a routing has that hangs on an unstable sum."""

    def __init__(self, *answers):
        self.answers, self.asked = answers, Notes()

    def __call__(self):
        return self.answers[self.asked() - 1]


def swapped_experts(keep):
    """Two experts of the same shape, whose choice flips in the re-run: nothing but values can tell."""

    def case(call):
        experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        flip, x = Flipping(0, 1, 0), leaf()

        def region(a):
            chosen = keep(flip())
            return experts[chosen](a.sin()).sin()

        call(region, x).sum().backward()
        return results(experts, x)

    return case


def test_a_flipped_expert_is_found_by_values():
    refuses(
        swapped_experts(lambda v: v), RecomputeMismatch, "Region", "tensor", "another checksum", "keep", way=by_values
    )


def test_keep_records_which_expert():
    same_as_plain(swapped_experts(retape.keep))
    same_as_plain(swapped_experts(retape.keep), by_values)


def branch(shape):
    def case(call):
        flip, x = Flipping(True, False, True), leaf()
        call(lambda a: (a.sin().exp() if flip() else shape(a)).cos(), x).sum().backward()
        return x.grad

    return case


def test_a_branch_that_saves_other_shapes_is_found_at_once():
    refuses(
        branch(lambda a: a[:2].sin().exp()),
        RecomputeMismatch,
        "Region branch",
        "position 0",
        r"saved metadata: .*\(?\[?4, 4",
        r"recomputed metadata: .*2, 4",
        "keep",
    )


def test_a_branch_that_saves_less_is_found():
    refuses(branch(lambda a: a * 2), RecomputeMismatch, "Region branch", "different number of tensors", "keep")


def test_a_branch_that_saves_more_is_found():
    def run_on(function, *args):
        return retape.checkpoint(function, *args, use_reentrant=False, early_stop=False)

    refuses(branch(lambda a: a.sin().exp().sin().cos()), RecomputeMismatch, "Region branch", "more tensors", way=run_on)


def test_an_error_of_the_rerun_is_also_what_torch_raises():
    from torch.utils.checkpoint import CheckpointError

    refuses(branch(lambda a: a * 2), CheckpointError, "torch.utils.checkpoint")


class Router(nn.Module):
    """Top-k routing of tokens to experts, every decision kept."""

    def __init__(self, noise):
        super().__init__()
        self.gate = nn.Linear(4, 3)
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.noise = noise

    def forward(self, tokens):
        scores = self.gate(tokens)
        chosen = retape.keep((scores.detach() + self.noise() * torch.randn(3)).topk(2, dim=1).indices)
        weights = scores.gather(1, chosen).softmax(1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, place = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, rows, expert(tokens[rows]).sin() * weights[rows, place, None])
        return out


@pytest.mark.parametrize("way", [as_region, by_values])
@equals_plain
def test_kept_routing_survives_other_scores_in_the_rerun(call, way):
    flip = Flipping(1.0, 50.0, 100.0)
    model, x = Router(flip), leaf(16, 4)
    call(model, x).sum().backward()
    return results(model, x)


@equals_plain
def test_item_and_bool_that_repeat_are_right(call):
    x = leaf()

    def region(a):
        scale = a.abs().max().item()
        return (a / scale).sin() if a.sum() > 0 else (a * scale).cos()

    call(region, x).sum().backward()
    return x.grad


@pytest.mark.parametrize("check", ["off", "metadata", "values"])
def test_every_check_is_right_where_nothing_flips(check):
    def case(call):
        model, x = Router(lambda: 0.0), leaf(16, 4)
        call(model, x).sum().backward()
        return results(model, x)

    same_as_plain(case, lambda f, *a: retape.checkpoint(f, *a, use_reentrant=False, check=check))


def test_debug_shows_where_the_runs_part():
    def debugged(function, *args):
        return retape.checkpoint(function, *args, use_reentrant=False, debug=True)

    message = refuses(branch(lambda a: a[:2].sin().exp()), RecomputeMismatch, way=debugged)
    assert "The runs part at op" in message
    assert "aten.slice" in message

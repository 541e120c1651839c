"""PyTorch's profiler beside a live budget that weighs its first steps with it: neither spoils what the other shows."""

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import retape
from retape.errors import InvalidInput
from retape.torch.adaptive.tuning import AdaptiveTuning
from retape.torch.compat import internals
from support.comparing import assert_equal
from support.comparing import parameter_gradients as gradients

FIRST_MEASURED = AdaptiveTuning().first_measured_steps
X = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def second_profiler():
    """Some releases of PyTorch refuse a profiler while another one runs; there is nothing to take over then."""
    try:
        with pytest.raises(InvalidInput), internals.memory_events(), profile(activities=[ProfilerActivity.CPU]):
            pass
    except RuntimeError as error:
        pytest.skip(str(error).splitlines()[0])


def profiled_model():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)])


def profiled_step(model):
    model.zero_grad()
    model(X).square().mean().backward()


def products(seen):
    return sum(event.count for event in seen.key_averages() if event.key == "aten::addmm")


def test_a_profiler_that_is_started_while_a_step_is_weighed_sees_everything():
    model = profiled_model()
    profiled_step(model)
    wanted = gradients(model)
    live = retape.adaptive(model, budget="1GiB")
    profiled_step(model)
    assert live.governor.is_measuring, "it stays up until the next step"
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for _ in range(3):
            profiled_step(model)
            assert not live.governor.is_measuring
    assert products(seen) == 3 * 8
    assert_equal(gradients(model), wanted)
    assert live.stats().weighed_steps == 0, "what was counted is lost"
    for _ in range(4):
        profiled_step(model)
    after = live.stats()
    assert after.weighed_steps == FIRST_MEASURED
    assert after.plain_steps > 0
    assert not internals.profiler_running()
    live.remove()


def test_a_profiler_inside_a_weighed_step_sees_that_part_and_nothing_is_learned_from_the_step():
    model = profiled_model()
    live = retape.adaptive(model, budget="1GiB")
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        pass
    loss = model(X).square().mean()
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        loss.backward()
    assert any(event.key == "aten::mm" for event in seen.key_averages())
    assert live.stats().weighed_steps == 0
    governor = live.governor
    assert not governor.needs.is_covered(governor.kinds.of(model, (X,), {}))
    for _ in range(FIRST_MEASURED):
        profiled_step(model)
    assert live.stats().weighed_steps == FIRST_MEASURED
    live.remove()


def test_measure_says_that_a_profiler_took_its_place():
    model = profiled_model()

    def profiled():
        with profile(activities=[ProfilerActivity.CPU]):
            profiled_step(model)

    with pytest.raises(InvalidInput, match="was started while retape counted bytes on the CPU, and took its place"):
        retape.measure(profiled)
    assert not internals.profiler_running()
    assert retape.measure(lambda: profiled_step(model)).peak_bytes > 0


def test_an_error_of_the_step_is_not_hidden_by_that():
    def fails():
        with profile(activities=[ProfilerActivity.CPU]):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        retape.measure(fails)

"""Where a step takes long, `fit` runs few of them."""

import pytest
import torch
from torch import nn

import retape
from retape.torch.planning import ab_timing as turns
from retape.torch.planning import fitting
from support.comparing import seed


def steps_of_a_fit(monkeypatch):
    seed()
    model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4)])
    calls = []
    run_step = fitting.Fitter.run_step

    def counted(fitter, *rest):
        calls.append(None)
        return run_step(fitter, *rest)

    monkeypatch.setattr(fitting.Fitter, "run_step", counted)
    made = retape.fit(model, torch.randn(1024, 16), budget=0.6, step=lambda m, b: m(b).square().mean(), progress=False)
    assert made.measured.peak_bytes <= made.record.budget_bytes
    made.remove()
    return len(calls)


@pytest.mark.parametrize(("long", "least"), [(0.0, 5), (1e9, 7)])
def test_a_long_step_is_timed_once(monkeypatch, long, least):
    """Trace, weigh and time; weigh the plan and time it. Short ones are timed twice, and a promise that was off is made again."""
    monkeypatch.setattr(turns, "LONG_STEP_SECONDS", long)
    found = steps_of_a_fit(monkeypatch)
    assert found == least if long == 0.0 else found >= least

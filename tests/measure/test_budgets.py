"""Every form of a budget, as bytes on a device."""

import math
from types import SimpleNamespace

import pytest
import torch

from retape.core.problem import Budget, BudgetKind
from retape.errors import InvalidInput
from retape.torch.measure import budgets
from retape.torch.measure.budgets import LEAST_MARGIN_BYTES, MARGIN_SHARE, available_bytes, resolved

CPU, CUDA0, CUDA1 = torch.device("cpu"), torch.device("cuda:0"), torch.device("cuda:1")
GIB = 1 << 30


@pytest.mark.parametrize(
    ("given", "bytes_"), [("24GiB", 24 * GIB), ("1.5 GiB", 3 * GIB // 2), ("10MB", 10**7), (123, 123)]
)
def test_bytes_stay_what_they_are(given, bytes_):
    found = resolved(Budget.of(given), CPU)
    assert (found.kind, found.limit_bytes) == (BudgetKind.TOTAL, bytes_)


def test_fractions_and_activations_stay_what_they_are():
    for budget in (Budget.of(0.4), Budget.of(1.0), Budget.activations("2GiB"), Budget.activations(5, in_flight=3)):
        assert resolved(budget, CPU) is budget


@pytest.mark.parametrize(
    "bad",
    [
        math.nan,
        -0.5,
        1.5,
        0.0,
        math.inf,
        0,
        -3,
        True,
        "",
        "lots",
        "-1GiB",
        "nan",
        "77",
        "24 GiBi",
        None,
        [],
        {},
        {"cpu": 0},
        b"1GiB",
        1 + 1j,
    ],
    ids=repr,
)
def test_what_cannot_be_meant(bad):
    with pytest.raises(InvalidInput):
        Budget.of(bad)


def test_auto_is_what_there_is_less_a_margin(monkeypatch):
    monkeypatch.setattr(budgets, "_host_bytes", lambda: 100 * GIB)
    found = resolved(Budget.of(" Auto ", in_flight=2), CPU)
    assert found == Budget.of(100 * GIB - int(MARGIN_SHARE * 100 * GIB), in_flight=2)
    monkeypatch.setattr(budgets, "_host_bytes", lambda: 4 * GIB)
    assert available_bytes(CPU) == 4 * GIB - LEAST_MARGIN_BYTES
    monkeypatch.setattr(budgets, "_host_bytes", lambda: 1 << 20)  # little is left: the margin is a quarter of it
    assert available_bytes(CPU) == 3 << 18
    monkeypatch.setattr(budgets, "_host_bytes", lambda: 0)
    assert available_bytes(CPU) == 1


def test_auto_on_a_gpu_counts_what_the_process_has(monkeypatch):
    cuda = SimpleNamespace(mem_get_info=lambda device: (10 * GIB, 80 * GIB), memory_reserved=lambda device: 30 * GIB)
    monkeypatch.setattr(budgets.torch, "cuda", cuda)
    assert available_bytes(CUDA0) == 40 * GIB - int(MARGIN_SHARE * 80 * GIB)


def test_auto_on_this_machine():
    found = resolved(Budget.of("auto"), CPU).limit_bytes
    assert 1 << 20 < found < 1 << 50


def test_a_machine_that_does_not_say(monkeypatch, tmp_path):
    (tmp_path / "meminfo").write_text("MemTotal: 5 kB\n")
    real = open
    monkeypatch.setattr("builtins.open", lambda name, **how: real(tmp_path / "meminfo", **how))
    with pytest.raises(InvalidInput, match="does not say how much memory it has free"):
        available_bytes(CPU)


def test_one_per_device():
    asked = Budget.of({"cpu": 0.5, "cuda": "2GiB", "cuda:1": Budget.activations("1GiB", in_flight=9)}, in_flight=4)
    assert resolved(asked, CPU) == Budget.of(0.5, in_flight=4)
    assert resolved(asked, CUDA0) == Budget.of("2GiB", in_flight=4)
    assert resolved(asked, CUDA1) == Budget.activations("1GiB", in_flight=4)


def test_auto_for_one_device_of_several(monkeypatch):
    monkeypatch.setattr(budgets, "available_bytes", lambda device: 5)
    assert resolved(Budget.of({"cpu": "auto"}, in_flight=2), CPU) == Budget.of(5, in_flight=2)


def test_a_device_that_is_not_named():
    with pytest.raises(InvalidInput, match=r"trains on cuda:1, and the budget speaks of cpu, cuda:0 only.*'cuda:1'"):
        resolved(Budget.of({"cpu": 0.5, "cuda:0": 0.5}), CUDA1)


def test_a_device_that_there_is_not():
    with pytest.raises(InvalidInput, match="speaks of 'gpu', which is not a device"):
        resolved(Budget.of({"gpu": 0.5}), CPU)

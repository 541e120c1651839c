"""Every form of a budget, in bytes of one device."""

import math
from types import SimpleNamespace

import pytest
import torch

from retape.core.problem import Budget, BudgetKind
from retape.errors import InvalidInput
from retape.torch.measure.budgets import available_bytes, resolved
from retape.torch.measure.tuning import TUNING
from support.hosts import made_file, made_host

CPU, CUDA0, CUDA1 = torch.device("cpu"), torch.device("cuda:0"), torch.device("cuda:1")
GIB = 1 << 30


@pytest.mark.parametrize(
    ("given", "bytes_"), [("24GiB", 24 * GIB), ("1.5 GiB", 3 * GIB // 2), ("10MB", 10**7), (123, 123)]
)
def test_bytes_are_unchanged(given, bytes_):
    found = resolved(Budget.of(given), CPU)
    assert (found.kind, found.limit_bytes) == (BudgetKind.TOTAL, bytes_)


def test_fractions_and_activations_are_unchanged():
    for budget in (Budget.of(0.4), Budget.of(1.0), Budget.activations("2GiB"), Budget.activations(5, in_flight=3)):
        assert resolved(budget, CPU) is budget


@pytest.mark.parametrize(
    "bad",
    [math.nan, -0.5, 1.5, 0.0, math.inf, 0, -3, True, "", "lots", "-1GiB", "nan", "1.5", "24 GiBi", None, [], {}, {"cpu": 0}, b"1GiB",
     1 + 1j],
    ids=repr,
)  # fmt: skip
def test_an_invalid_budget_is_refused(bad):
    with pytest.raises(InvalidInput):
        Budget.of(bad)


@pytest.mark.parametrize(
    ("free", "available"),
    [
        (100 * GIB, 100 * GIB - int(TUNING.margin_share * 100 * GIB)),
        (4 * GIB, 4 * GIB - TUNING.least_margin_bytes),
        (1 << 20, 3 << 18),  # of so little the margin is a quarter
        (0, 1),
    ],
)
def test_available_memory_of_the_host_leaves_a_margin(tmp_path, free, available):
    made_host(tmp_path, free)
    assert available_bytes(CPU, root=tmp_path) == available


def test_available_memory_of_the_host_stays_within_its_cgroup(tmp_path):
    made_host(tmp_path, 100 * GIB)
    made_file(tmp_path, "proc/self/cgroup", "0::/job\n")
    made_file(tmp_path, "sys/fs/cgroup/job/memory.max", str(20 * GIB))
    made_file(tmp_path, "sys/fs/cgroup/job/memory.current", str(4 * GIB))
    assert available_bytes(CPU, root=tmp_path) == 16 * GIB - int(TUNING.margin_share * 16 * GIB)


def test_available_memory_of_a_gpu_includes_what_the_process_has_reserved():
    cuda = SimpleNamespace(mem_get_info=lambda device: (10 * GIB, 80 * GIB), memory_reserved=lambda device: 30 * GIB)
    assert available_bytes(CUDA0, cuda=cuda) == 40 * GIB - int(TUNING.margin_share * 80 * GIB)


def test_auto_on_this_machine():
    found = resolved(Budget.of("auto"), CPU).limit_bytes
    assert 1 << 20 < found < 1 << 50


def test_a_machine_that_does_not_report_its_memory(tmp_path):
    made_file(tmp_path, "proc/meminfo", "MemTotal: 5 kB\n")
    with pytest.raises(InvalidInput, match="does not report how much memory is free"):
        available_bytes(CPU, root=tmp_path)


def test_one_per_device():
    asked = Budget.of({"cpu": 0.5, "cuda": "2GiB", "cuda:1": Budget.activations("1GiB", in_flight=9)}, in_flight=4)
    assert resolved(asked, CPU) == Budget.of(0.5, in_flight=4)
    assert resolved(asked, CUDA0) == Budget.of("2GiB", in_flight=4)
    assert resolved(asked, CUDA1) == Budget.activations("1GiB", in_flight=4)


@pytest.mark.parametrize("given", [" Auto ", {"cpu": "auto"}], ids=str)
def test_auto_is_what_is_available(given):
    found = resolved(Budget.of(given, in_flight=2), CPU, available=lambda device: 5)
    assert found == Budget.of(5, in_flight=2)


def test_a_device_that_is_not_named():
    with pytest.raises(InvalidInput, match=r"trains on cuda:1, and the budget names cpu, cuda:0 only.*'cuda:1'"):
        resolved(Budget.of({"cpu": 0.5, "cuda:0": 0.5}), CUDA1)


def test_a_name_that_is_not_a_device():
    with pytest.raises(InvalidInput, match="names 'gpu', which is not a device"):
        resolved(Budget.of({"gpu": 0.5}), CPU)

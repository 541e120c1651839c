"""Host memory that a process may take: the machine's, and the limits of cgroups of both versions at every level."""

import pytest

from retape.torch.compat.host_memory import available_host_bytes
from support.hosts import made_file, made_host

MACHINE = 64 << 20
UNLIMITED_1 = 9223372036854771712  # what version 1 writes where there is no limit


def cgroup_1(root, path, limit, used, cache=0):
    folder = f"sys/fs/cgroup/memory{path}"
    made_file(root, f"{folder}/memory.limit_in_bytes", f"{limit}\n")
    made_file(root, f"{folder}/memory.usage_in_bytes", f"{used}\n")
    made_file(root, f"{folder}/memory.stat", f"inactive_file 1\ntotal_inactive_file {cache}\n")


def cgroup_2(root, path, limit, used, cache=0):
    folder = f"sys/fs/cgroup{path}"
    made_file(root, f"{folder}/memory.max", f"{limit}\n")
    made_file(root, f"{folder}/memory.current", f"{used}\n")
    made_file(root, f"{folder}/memory.stat", f"anon 7\ninactive_file {cache}\n")


@pytest.fixture
def host(tmp_path):
    made_host(tmp_path, MACHINE)
    return tmp_path


VERSIONS = pytest.mark.parametrize(
    ("line", "made", "unlimited"),
    [("4:memory:", cgroup_1, UNLIMITED_1), ("3:cpu,memory:", cgroup_1, UNLIMITED_1), ("0::", cgroup_2, "max")],
    ids=["version 1", "version 1 beside another controller", "version 2"],
)


def test_without_cgroups_it_is_the_machine(host):
    assert available_host_bytes(host) == MACHINE


@VERSIONS
def test_the_limit_of_the_own_cgroup_holds_and_its_page_cache_is_free(host, line, made, unlimited):
    made_file(host, "proc/self/cgroup", f"2:devices:/x\n{line}/job/task\n")
    made(host, "/job/task", 5000, 3000, cache=500)
    made(host, "/job", unlimited, 9000)
    assert available_host_bytes(host) == 2500


@VERSIONS
def test_the_limit_of_a_cgroup_above_holds(host, line, made, unlimited):
    made_file(host, "proc/self/cgroup", f"{line}/job/task\n")
    made(host, "/job/task", unlimited, 3000)
    made(host, "/job", 10_000, 9000)
    assert available_host_bytes(host) == 1000


@VERSIONS
def test_a_container_that_sees_its_cgroup_as_the_mounted_one(host, line, made, unlimited):
    made_file(host, "proc/self/cgroup", f"{line}/docker/5f3a\n")
    made(host, "", 5000, 6000)
    assert available_host_bytes(host) == 0


@VERSIONS
def test_without_a_limit_it_is_the_machine(host, line, made, unlimited):
    made_file(host, "proc/self/cgroup", f"{line}/job\n")
    made(host, "/job", unlimited, 3000)
    assert available_host_bytes(host) == MACHINE


def test_the_bytes_above_which_a_cgroup_is_slowed_down_count_too(host):
    made_file(host, "proc/self/cgroup", "0::/job\n")
    cgroup_2(host, "/job", "max", 3000)
    made_file(host, "sys/fs/cgroup/job/memory.high", "4000\n")
    assert available_host_bytes(host) == 1000


def test_a_system_that_reports_nothing(tmp_path):
    assert available_host_bytes(tmp_path) is None

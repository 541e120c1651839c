"""`retape schedule` from outside: what it prints, what it writes, and how it refuses."""

import json
import os
import subprocess
import sys

import pytest

from retape.cli.main import main
from retape.core.schedules import FAMILIES

KEYS = {
    "family",
    "steps",
    "snapshots",
    "forward_steps",
    "extra_forward_steps",
    "writes",
    "reads",
    "peak_snapshots",
    "cost",
}


def answer(capsys, *arguments):
    assert main(["schedule", *arguments, "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    return json.loads(printed.out)


def slots(family):
    if FAMILIES[family].tiered:
        return ["--ram", "1", "--disk", "2"]
    return ["--snapshots", "3"]


@pytest.mark.parametrize("family", FAMILIES)
def test_json_is_one_object_with_the_counts(capsys, family):
    record = answer(capsys, family, "--steps", "10", *slots(family))
    assert record.keys() >= KEYS
    assert (record["family"], record["steps"]) == (family, 10)
    assert record["forward_steps"] == 10 + record["extra_forward_steps"]
    assert record["peak_snapshots"] <= record["snapshots"] == {"store-all": 0, "recompute-all": 1}.get(family, 3)
    assert all(tier["left"] == 0 for tier in record["tiers"])


def test_json_has_the_figures_of_the_literature(capsys):
    record = answer(capsys, "revolve", "--steps", "100", "--snapshots", "10")
    assert (record["forward_steps"], record["writes"], record["peak_snapshots"]) == (322, 55, 10)
    costs = ["--write-cost", "2", "--read-cost", "2", "--forward-cost", "1", "--backward-cost", "1"]
    assert answer(capsys, "multistage", "--steps", "50", "--ram", "2", "--disk", "3", *costs)["cost"] == 206


def test_json_says_the_snapshots_that_the_family_takes(capsys):
    families = {"store-all": 0, "recompute-all": 1, "recursive": 3}
    for family, snapshots in families.items():
        record = answer(capsys, family, "--steps", "10", "--snapshots", "99")
        assert record["snapshots"] == snapshots >= record["peak_snapshots"]


def test_more_snapshots_than_steps_cost_nothing(capsys):
    record = answer(capsys, "online", "--steps", "100", "--snapshots", "99999999999999999999")
    assert (record["forward_steps"], record["peak_snapshots"]) == (199, 100)


def test_the_largest_costs_are_still_json(capsys):
    record = answer(capsys, "recompute-all", "--steps", "100", "--forward-cost", "1e15", "--backward-cost", "1e15")
    assert record["cost"] == 5050e15


def test_picture_of_revolve(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["schedule", "revolve", "--steps", "5", "--snapshots", "2"]) == 0
    printed = capsys.readouterr().out
    rows = printed.splitlines()
    assert rows[:5] == ["●─●─◀", "│ ○◀·", "│ ◀··", "○◀···", "◀····"]
    assert "forward steps 11 (6 extra)   cost 11" in rows
    assert "writes 2   reads 4   peak 2 snapshots" in rows


def test_picture_counts_tiers_apart(capsys):
    assert main(["schedule", "multistage", "--steps", "10", "--ram", "1", "--disk", "2"]) == 0
    printed = capsys.readouterr().out
    assert "  disk: writes 2   reads 2   peak 2" in printed.splitlines()


def test_list_names_every_family(capsys):
    assert main(["schedule", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(FAMILIES)


def test_svg_is_written(capsys, tmp_path):
    target = tmp_path / "picture.svg"
    assert main(["schedule", "revolve", "--steps", "5", "--snapshots", "2", "--svg", str(target), "--json"]) == 0
    json.loads(capsys.readouterr().out)
    assert target.read_text(encoding="utf-8").startswith("<svg ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["revolve", "--steps", "0", "--snapshots", "3"], "steps = 0; give a whole number of steps >= 1"),
        (["revolve", "--steps", "-1", "--snapshots", "3"], "steps = -1"),
        (["revolve", "--steps", "9"], "revolve needs a number of snapshots"),
        (["revolve", "--steps", "9", "--snapshots", "0"], "snapshots = 0"),
        (["revolve", "--snapshots", "3"], "No number of steps given. Give --steps N"),
        (["--steps", "9"], "No family given. Give one of: store-all"),
        (["spiral", "--steps", "9"], "There is no schedule family 'spiral'"),
        (["multistage", "--steps", "9"], "multistage has no slot for the initial state"),
        (["multistage", "--steps", "9", "--ram", "1", "--write-cost", "nan"], "write_cost = nan"),
        (["multistage", "--steps", "9", "--ram", "1", "--read-cost", "-2"], "read_cost = -2.0"),
        (["multistage", "--steps", "9", "--ram", "0", "--disk", "0"], "1 or more in all"),
        (["revolve", "--steps", "9", "--snapshots", "2", "--rows", "0"], "--rows 0 leaves no room"),
        (
            ["revolve", "--steps", str(10**13), "--snapshots", "2"],
            "steps = 10000000000000; give a whole number of steps",
        ),
        (["mixed", "--steps", "100000000000", "--snapshots", "3"], "Use revolve, which needs no table"),
        (["multistage", "--steps", "100000000000", "--ram", "3"], "Use revolve, which needs no table"),
        (["hierarchical", "--steps", "500", "--ram", "400", "--host", "400", "--disk", "400"], "fewer steps or slots"),
        (
            ["revolve", "--steps", "9", "--snapshots", "2", "--forward-cost", "1e308"],
            "forward_cost = 1e+308; give a finite",
        ),
        (
            ["revolve", "--steps", "9", "--snapshots", "2", "--svg", ""],
            "Cannot write the picture to '': Is a directory",
        ),
        (["revolve", "--steps", "9", "--snapshots", "2", "--svg", "a\0b"], "embedded null byte. Give another file"),
    ],
)
def test_bad_input_is_a_message_and_exit_code_two(capsys, arguments, message):
    assert main(["schedule", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("retape: ")
    assert message in printed.err


def test_unwritable_svg_is_a_message_and_exit_code_two(capsys, tmp_path):
    target = tmp_path / "missing" / "picture.svg"
    assert main(["schedule", "revolve", "--steps", "5", "--snapshots", "2", "--svg", str(target)]) == 2
    printed = capsys.readouterr()
    assert "Cannot write the picture to" in printed.err
    assert "No such file or directory. Give another file." in printed.err


@pytest.mark.parametrize("arguments", [["schedule", "revolve", "--steps", "2.5"], [], ["dance"]])
def test_what_argparse_refuses_has_exit_code_two(capsys, arguments):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: retape" in capsys.readouterr().err


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("retape ")


def run_python(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


def test_the_command_never_imports_torch():
    done = run_python(
        "import sys; from retape.cli.main import main; "
        "main(['schedule', 'revolve', '--steps', '9', '--snapshots', '2', '--json']); "
        "sys.exit('torch' in sys.modules)"
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_terminal_without_unicode_gets_ascii():
    done = run_python(
        "from retape.cli.main import main; main(['schedule', 'revolve', '--steps', '4', '--snapshots', '2'])",
        PYTHONIOENCODING="ascii",
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.isascii()
    assert done.stdout.startswith("@")


def test_a_reader_that_leaves_is_no_error():
    command = [sys.executable, "-m", "retape.cli.main", "schedule", "revolve", "--steps", "3000", "--snapshots", "4"]
    writer = subprocess.Popen([*command, "--rows", "3000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    writer.stdout.close()
    errors = writer.stderr.read()
    writer.stderr.close()
    assert (writer.wait(), errors) == (0, b"")


@pytest.mark.parametrize("arguments", ["schedule revolve --steps 9 --snapshots 2", "schedule --list"])
@pytest.mark.parametrize(
    ("target", "reason"), [(">&-", "standard output is closed"), ("> /dev/full", "No space left on device")]
)
def test_an_answer_that_cannot_be_written_is_a_message(arguments, target, reason):
    command = f"{sys.executable} -m retape.cli.main {arguments} {target}"
    done = subprocess.run(["/bin/sh", "-c", command], stderr=subprocess.PIPE, text=True, check=False)
    expected = f"retape: Cannot write to standard output: {reason}. Redirect it to another file.\n"
    assert (done.returncode, done.stderr) == (1, expected)

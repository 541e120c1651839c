"""The documents are true: snippets and commands run and print what is shown, links resolve, figures name their record.

A ```python or ```sh block runs unless the line above it is `<!-- not run: REASON -->`. The Python blocks of one document run
in one process, in order, as a reader would type them. A ```text block right after one shows what it prints. Under a line
`<!-- figures differ -->` such a block is what one machine printed: what each of its lines begins with is compared, and no figure.
"""

import ast
import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from retape.core.schedules import Schedule, count
from support.warm_python import run_blocks

ROOT = Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
RESULTS = "benchmarks/results/"
NOT_RUN = re.compile(r"<!-- not run: (\S.*) -->")
FIGURES_DIFFER = "<!-- figures differ -->"
FENCE = re.compile(r"^```(\w*)\s*$")
INLINE_CODE = re.compile(r"`[^`]*`")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
# Measured, not counted: seconds, bytes, rates, and how much faster or smaller.
NUMBER = r"\d[\d,.]*\s?"
FIGURE = re.compile(
    rf"{NUMBER}(ms|us|µs|s|seconds?|minutes?|hours?|[KMGT]i?B)\b|{NUMBER}\S* ?(/|per )\s?s(econd)?\b"
    rf"|{NUMBER}(x|\u00d7|%|times)? ?(faster|slower|smaller|quicker)",
    re.I,
)


@dataclass(frozen=True)
class Block:
    """One fenced block: its language, the number of its first line, its text, and what is shown to come out of it."""

    language: str
    line: int
    text: str
    shown: str | None = None
    runs: bool = True
    exact: bool = True


@cache
def parts(path):
    """The fenced blocks of a document, and its other lines with their numbers."""
    blocks, prose, language, inside = [], [], None, []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        fence = FENCE.match(line)
        if language is None and fence:
            language, inside = fence[1], []
        elif language is not None and line.rstrip() == "```":
            blocks.append((language, number - len(inside), inside, prose[-1] if prose else (0, "")))
            language = None
        elif language is not None:
            inside.append(line)
        elif line.strip():
            prose.append((number, line))
    assert language is None, f"{path.name} ends inside a block"
    return tuple(_joined(blocks)), tuple(prose)


def _joined(blocks):
    for index, (language, line, inside, (above, before)) in enumerate(blocks):
        after = blocks[index + 1] if index + 1 < len(blocks) else None
        exact = after is None or after[3] != (after[1] - 2, FIGURES_DIFFER)
        shows = after is not None and after[0] == "text" and after[1] == line + len(inside) + (3 if exact else 4)
        skipped = NOT_RUN.search(before) if above >= line - 3 else None
        yield Block(language, line, "\n".join(inside), "\n".join(after[2]) if shows else None, skipped is None, exact)


def blocks_of(path, language):
    return [block for block in parts(path)[0] if block.language == language and block.runs]


def by_name(path):
    return str(path.relative_to(ROOT))


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80", "PYTHONIOENCODING": "utf-8", "HF_HUB_OFFLINE": "1"}


# --- what runs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [path for path in DOCUMENTS if blocks_of(path, "python")], ids=by_name)
def test_python_snippets_run(path, tmp_path):
    blocks = blocks_of(path, "python")
    outputs = run_blocks(by_name(path), [(block.line, block.text) for block in blocks], tmp_path, environment())
    for block, printed in zip(blocks, outputs, strict=True):
        if block.shown is not None:
            seen = (lambda text: text) if block.exact else beginnings
            assert seen(printed.rstrip()) == seen(block.shown), f"{by_name(path)}:{block.line}"


def beginnings(text):
    """What the lines of a text begin with, in order, without figures; lines that go on from the one above are left out."""
    names = [re.match(r"[^\W\d_]+", line) for line in text.splitlines()]
    found = [name[0] for name in names if name]
    return [name for before, name in pairwise(["", *found]) if name != before]


def shell_lines():
    for path in DOCUMENTS:
        for block in blocks_of(path, "sh"):
            for line in block.text.splitlines():
                yield path, block, line.strip()


COMMANDS = [
    pytest.param(line, block.shown, id=f"{by_name(path)}:{line}")
    for path, block, line in shell_lines()
    if line.startswith(("retape ", ".venv/bin/retape "))
]


@pytest.mark.parametrize(("line", "shown"), COMMANDS)
def test_commands_work(line, shown, tmp_path):
    command = Path(sys.executable).with_name("retape")
    (tmp_path / "docs" / "pictures").mkdir(parents=True)
    done = subprocess.run(
        [str(command), *shlex.split(line, comments=True)[1:]],
        check=False,
        capture_output=True,
        text=True,
        encoding="utf-8",
        cwd=tmp_path,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    if shown is not None:
        assert done.stdout.rstrip() == shown


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    named = {line.split()[1] for _, _, line in shell_lines() if line.startswith("make ")}
    for path in DOCUMENTS:
        named |= {word for _, line in parts(path)[1] for word in re.findall(r"`make ([a-z]+)`", line)}
    assert {"demo", "test"} <= named <= targets


# --- what is said -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", DOCUMENTS, ids=by_name)
def test_relative_links_resolve(path):
    broken = []
    for number, line in parts(path)[1]:
        for target in LINK.findall(INLINE_CODE.sub("", line)):
            file, _, anchor = target.partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            place = (path.parent / file).resolve() if file else path
            if not place.exists() or (anchor and anchor not in anchors(place)):
                broken.append(f"{by_name(path)}:{number}: {target}")
    assert not broken


@cache
def anchors(path):
    """The anchors that headings of a document get, as renderers make them."""
    if path.suffix != ".md":
        return frozenset()
    headings = [line.lstrip("# ").strip() for _, line in parts(path)[1] if line.startswith("#")]
    return frozenset(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings)


@pytest.mark.parametrize("path", DOCUMENTS, ids=by_name)
def test_performance_figures_name_their_record(path):
    for number, line in parts(path)[1]:
        if FIGURE.search(INLINE_CODE.sub("", LINK.sub("", line))):
            assert RESULTS in line, f"{by_name(path)}:{number} quotes a figure and links no record: {line.strip()}"
        for target in LINK.findall(line):
            if RESULTS in target:
                record = json.loads((path.parent / target).read_text(encoding="utf-8"))
                assert {"device", "versions", "command", "seed"} <= record.keys()


@pytest.mark.parametrize(
    "text", ["it took 3.2 s", "1,300,000 actions/s", "2.5 GiB less", "1.4x faster", "40 % smaller"]
)
def test_what_a_figure_is(text):
    assert FIGURE.search(text)


@pytest.mark.parametrize(
    "text", ["24 steps", "at most 1.10 of the optimum", "20 stages", "PyTorch 2.13.0", "3 snapshots"]
)
def test_what_a_figure_is_not(text):
    assert not FIGURE.search(text)


# Words that a reader in a hurry stumbles over: metaphors, and words that have a plain one in this field.
UNCLEAR = re.compile(
    r"\b(nobody|somebody|whoever|weigh(s|ed|ing)?|stands?|stood|lies|mend(s|ed)?|comes to|cannot be meant|taught|told apart"
    r"|speaks of|otherwise|(on|by) the scale|stopwatch|dear(er)?|a little|hardly|a hair|so (many|much)|rungs?|lanes?"
    r"|forg[eo]ts?|forgotten|frugal(est)?|ma[kd]es? again|put back|at hand|of (now|then)|hand(s|ed) (on|over)|in turns|live budget)\b",
    re.I,
)


@pytest.mark.parametrize("path", [*DOCUMENTS, *sorted(ROOT.glob("examples/*.py"))], ids=by_name)
def test_plain_words(path):
    lines = parts(path)[1] if path.suffix == ".md" else enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
    found = [(number, UNCLEAR.search(INLINE_CODE.sub("", LINK.sub("", line)))) for number, line in lines]
    assert [f"{by_name(path)}:{number}: {word[0]}" for number, word in found if word] == []


# --- docs/architecture.md -----------------------------------------------------------------------------------------

ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def defined_in(path):
    """The names that a module defines: functions, classes, their methods, and values."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
            yield from (f"{node.name}.{part.name}" for part in ast.walk(node) if isinstance(part, ast.FunctionDef))
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def test_the_architecture_names_what_exists():
    """A link to a module says a name that the module defines, or the package that it is the front door of."""
    links = re.findall(r"\[`([\w.]+)`\]\(\.\./(src/[\w/]+\.py)\)", ARCHITECTURE)
    stale = []
    for name, file in links:
        dotted = file.removeprefix("src/retape/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        if name != dotted and name not in defined_in(ROOT / file):
            stale.append(f"{name} in {file}")
    assert len(links) > 50
    assert not stale


def test_the_architecture_has_every_package_four_journeys_and_ten_changes():
    shown = set(re.findall(r"\[`([\w.]+)`\]\(\.\./src", ARCHITECTURE))
    packages = [path.parent for path in ROOT.glob("src/retape/*/__init__.py")] + [
        path.parent for path in ROOT.glob("src/retape/torch/*/__init__.py")
    ]
    named = {".".join(path.relative_to(ROOT / "src" / "retape").parts) for path in packages} - {"torch"}
    assert named <= shown
    journeys = re.findall(r"^### .+?(?=^##)", ARCHITECTURE, re.M | re.S)
    assert [len(re.findall(r"^\d+\. ", journey, re.M)) <= 10 for journey in journeys] == [True] * 4
    changes = ARCHITECTURE.partition("## Where do I change")[2]
    assert len(re.findall(r"^\| (?!change|---)", changes, re.M)) >= 10


# --- the README ---------------------------------------------------------------------------------------------------


def test_the_readme_has_a_snippet_by_line_30_and_one_picture():
    readme = ROOT / "README.md"
    assert blocks_of(readme, "python")[0].line <= 30
    assert len(re.findall(r"!\[", readme.read_text(encoding="utf-8"))) == 1


def test_beginnings_leave_figures_out():
    assert beginnings("blocks.0-1  2 MiB\n   more\nblocks.2\n───\npeak  3.4 MiB") == ["blocks", "peak"]


@cache
def drawn():
    """What docs/pictures/draw.py draws, by name."""
    spec = importlib.util.spec_from_file_location("draw", ROOT / "docs" / "pictures" / "draw.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.pictures()


PICTURES = sorted(path.stem for path in (ROOT / "docs" / "pictures").glob("*.svg"))
BY_AN_EXAMPLE = {"wave_inversion"}  # drawn by an example, from what it found
BY_RECORDS = {name for name in PICTURES if name.startswith("frontier_")}  # tests/test_frontier_bench.py compares them


@pytest.mark.parametrize("name", [name for name in PICTURES if name not in BY_AN_EXAMPLE | BY_RECORDS])
def test_pictures_are_what_the_code_draws(name):
    assert (ROOT / "docs" / "pictures" / f"{name}.svg").read_text(encoding="utf-8") == drawn()[name]


def test_every_picture_is_there_and_shown():
    assert drawn().keys() | BY_AN_EXAMPLE | BY_RECORDS == set(PICTURES)
    texts = "".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)
    assert [name for name in PICTURES if f"pictures/{name}.svg)" not in texts] == []


def test_the_demo_says_what_the_schedule_costs():
    counts = count(Schedule(family="revolve", steps=24, snapshots=4))
    assert (counts.extra_forward_steps, counts.peak_snapshots) == (51, 4)
    assert "at most 4 states are stored, for 51 more" in (ROOT / "Makefile").read_text()


def test_every_document_is_reached_from_the_index():
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    targets = {str((ROOT / "docs" / target.partition("#")[0]).resolve()) for target in LINK.findall(index)}
    missing = [by_name(path) for path in ROOT.glob("docs/**/*.md") if str(path) not in targets]
    assert missing == ["docs/index.md"]

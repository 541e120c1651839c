"""The architecture: layers, front doors, exports, sizes, no cycles, private PyTorch names in one place, nothing of one machine."""

import ast
import importlib
import re
import subprocess
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

import retape

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src"
MOST_LINES_OF_A_FUNCTION = 60
MOST_LINES_OF_A_FILE = 650  # a file is one idea, usually 150 to 600 lines
MOST_LINES_OF_AN_INTEGRATION = 250
MOST_PUBLIC_NAMES = 21

# Packages that each layer must not import.
FORBIDDEN = {
    "retape.core": (
        "torch",
        "transformers",
        "rich",
        "retape.torch",
        "retape.report",
        "retape.integrations",
        "retape.cli",
    ),
    "retape.report": (
        "torch",
        "transformers",
        "retape.torch",
        "retape.api",
        "retape.forecast",
        "retape.integrations",
        "retape.cli",
    ),
    "retape.torch": ("retape.report", "retape.api", "retape.forecast", "retape.integrations", "retape.cli"),
    "retape.api": ("retape.forecast", "retape.integrations", "retape.cli"),
    "retape.forecast": ("retape.api", "retape.integrations", "retape.cli"),
    "retape.integrations": ("retape.cli",),
}

# Private names of PyTorch outside `compat`, each with the reason.
PRIVATE_ALLOWED = {
    # Named with an underscore but documented, and stable since 2.0.
    "torch.utils._python_dispatch",
    "torch.utils._pytree",
    # The public context manager costs more than the rest of a small re-run's entry and exit.
    "torch._C._set_grad_enabled",
}


@cache
def modules():
    """Every module of the package by its dotted name: its path and its syntax tree."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = (path, ast.parse(path.read_text(encoding="utf-8")))
    return found


def each_module(within=""):
    return pytest.mark.parametrize("name", [name for name in modules() if name.startswith(within)])


def imports(tree, *, for_types=False):
    """The modules that a tree imports at any depth; `from a import b` gives `a.b`, which may be a name inside `a`."""
    for node in statements(tree, for_types):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the layer"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def statements(node, for_types):
    for child in ast.iter_child_nodes(node):
        if not for_types and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from statements(child, for_types)


def belongs(imported, to):
    return imported == to or imported.startswith(to + ".")


# --- layers -------------------------------------------------------------------------------------------------------


@each_module("retape.")
def test_layers(name):
    for layer, forbidden in FORBIDDEN.items():
        if belongs(name, layer):
            wrong = [found for found in imports(modules()[name][1]) if any(belongs(found, to) for to in forbidden)]
            assert not wrong, f"{name} must not import {wrong}"


def test_the_planner_and_its_command_start_without_torch():
    code = (
        "import sys, retape, retape.core, retape.errors, retape.cli.main;"
        "found = [name for name in ('torch', 'transformers') if name in sys.modules];"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_import_cycle():
    graph = {name: _edges(name) for name in modules()}
    state = defaultdict(int)  # 1 while it is on the way, 2 when it is done

    def visit(name, way):
        assert state[name] != 1, " -> ".join([*way[way.index(name) :], name])
        if not state[name]:
            state[name] = 1
            for target in sorted(graph[name]):
                visit(target, [*way, name])
            state[name] = 2

    for name in graph:
        visit(name, [])


@cache
def _edges(name):
    """What a module needs to have been imported; a name inside a module counts as that module."""
    found = set()
    for imported in imports(modules()[name][1]):
        target = imported if imported in modules() else imported.rpartition(".")[0]
        if target in modules() and target != name:
            found.add(target)
    return found


# --- packages: the modules that others may import -----------------------------------------------------------------


# The longest chain of imports inside each package (decision 0014).
LEVELS = {
    "retape.torch.compat": 1,
    "retape.torch.slicing": 2,
    "retape.torch.ode": 2,
    "retape.torch.measure": 3,
    "retape.torch.capture": 4,
    "retape.torch.planning": 3,
    "retape.torch.adaptive": 3,
    "retape.torch.engine": 4,
    "retape.torch.loops": 4,
    "retape.torch": 14,
}


@cache
def depth(name, within):
    """The length of the longest chain of imports that begins at a module and stays in a package."""
    return 1 + max((depth(target, within) for target in _edges(name) if target.startswith(within + ".")), default=0)


@pytest.mark.parametrize("package", LEVELS)
def test_import_levels(package):
    levels = {name: depth(name, package) for name in modules() if name.startswith(package + ".")}
    assert max(levels.values()) <= LEVELS[package], max(levels, key=levels.get)


def test_adaptive_builds_on_the_lowest_modules_of_planning():
    planning = "retape.torch.planning"
    used = {target for name in modules() if belongs(name, "retape.torch.adaptive") for target in _edges(name)}
    high = {name: depth(name, planning) for name in used if belongs(name, planning) and depth(name, planning) > 2}
    assert not high


def packages():
    """The packages under retape.torch, with the list of their public modules."""
    for name, (path, tree) in modules().items():
        if path.name == "__init__.py" and name.count(".") == 2 and name.startswith("retape.torch."):
            listed = [node for node in tree.body if isinstance(node, ast.Assign) and node.targets[0].id == "__all__"]
            assert listed, f"{name} does not list its public modules in __all__"
            yield name, ast.literal_eval(listed[0].value)


@pytest.mark.parametrize(
    ("package", "listed"), [*packages()], ids=lambda value: value if isinstance(value, str) else ""
)
def test_modules_that_are_not_listed_are_imported_only_inside_their_package(package, listed):
    own = {name for name in modules() if name.rpartition(".")[0] == package}
    assert {f"{package}.{name}" for name in listed} <= own, "__all__ names a module that does not exist"
    hidden = own - {f"{package}.{name}" for name in listed}
    wrong = [
        f"{name} imports {target}"
        for name in modules()
        if not belongs(name, package)
        for target in sorted(_edges(name))
        if any(belongs(target, module) for module in hidden)
    ]
    assert not wrong


@pytest.mark.parametrize("name", [name for name, _ in packages()])
def test_a_front_door_has_words_only(name):
    assert not list(imports(modules()[name][1])), "import names from the module that defines them"


# --- exports ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["retape", "retape.core", "retape.errors", "retape.core.schedules"])
def test_exports_equal_all(name):
    module, tree = importlib.import_module(name), modules()[name][1]
    exported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and belongs(node.module, "retape")
        for alias in node.names
        if not (alias.asname or alias.name).startswith("_")
    }
    assert sorted(exported) == sorted(module.__all__)
    assert len(set(module.__all__)) == len(module.__all__)
    for public in module.__all__:
        assert getattr(module, public) is not None
        assert public in dir(module)


def test_few_public_names():
    assert len(retape.__all__) <= MOST_PUBLIC_NAMES


def test_every_error_has_its_public_name():
    errors = importlib.import_module("retape.errors")
    defined = {node.name for node in ast.walk(modules()["retape.core.errors"][1]) if isinstance(node, ast.ClassDef)}
    assert defined == set(errors.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'forget'"):
        retape.forget  # noqa: B018


def test_one_version():
    assert re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)[1] == retape.__version__


# --- sizes and names ----------------------------------------------------------------------------------------------


@each_module()
def test_sizes(name):
    path, tree = modules()[name]
    most = MOST_LINES_OF_AN_INTEGRATION if belongs(name, "retape.integrations") else MOST_LINES_OF_A_FILE
    assert len(path.read_text(encoding="utf-8").splitlines()) <= most
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno - node.lineno < MOST_LINES_OF_A_FUNCTION, f"{name}.{node.name} is too long"


@each_module()
def test_a_docstring_says_what_the_module_is_for(name):
    assert ast.get_docstring(modules()[name][1])


@each_module()
def test_no_modules_for_leftovers(name):
    assert name.rpartition(".")[2] not in {"utils", "helpers", "misc", "common"}


# --- private PyTorch ----------------------------------------------------------------------------------------------


@each_module("retape.")
def test_private_torch_only_in_compat(name):
    if name.startswith("retape.torch.compat."):
        return
    tree = modules()[name][1]
    used = {found for found in (*_torch_attributes(tree), *imports(tree, for_types=True)) if _is_private(found)}
    wrong = [found for found in used if not any(belongs(found, allowed) for allowed in PRIVATE_ALLOWED)]
    assert not wrong, f"{name} uses {wrong}; put it into torch/compat, with a canary test"


def _torch_attributes(tree):
    """Dotted names that begin with `torch.`, each at its full length."""
    texts = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    dotted = {text for text in texts if re.fullmatch(r"torch(\.\w+)+", text)}
    return [name for name in dotted if not any(other != name and belongs(other, name) for other in dotted)]


def _is_private(dotted):
    # Names of operators are public even where they begin with an underscore.
    return re.match(r"torch\.(?!ops\.)(.*\.)?_(?!_)", dotted) is not None


# --- nothing of one machine ---------------------------------------------------------------------------------------

# Alternatives in brackets, so that this file does not find itself.
MACHINE = re.compile(r"(?<![\w.])/(work|root|home|opt|mnt|tmp|Users)/\w|file:/[/]/\w")
HOSTS = re.compile(r"(pypi|pythonhosted|anaconda|conda-forge|download\.pytorch)\.(org|com|io)", re.I)


@cache
def tracked():
    listed = subprocess.run(["git", "ls-files", "-z"], check=False, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.mark.parametrize("pattern", [MACHINE, HOSTS], ids=["machine paths", "package hosts"])
def test_tracked_files_name_no_machine(pattern):
    found = []
    for path in tracked():
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if pattern.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:120]}")
    assert not found, "\n".join(found)

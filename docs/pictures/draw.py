"""Draw the pictures that follow from the code: schedules, a model of equal blocks on the abstract machine, and the packages.

    python docs/pictures/draw.py

A test compares the files with the output of this script. `wave_inversion.svg` is drawn by its example.
"""

import ast
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from retape.core import (
    Action,
    Backward,
    Chain,
    Frontier,
    Item,
    Offload,
    Option,
    OptionKind,
    Prefetch,
    Save,
    Stage,
    Tape,
    Tier,
    frontier,
    simulate,
    solve,
)
from retape.core.record import MemorySample, Record
from retape.core.schedules import Schedule
from retape.core.units import format_bytes, format_seconds
from retape.report.memory import Track, render_memory_svg
from retape.report.schedule import render_svg
from retape.report.svg import Axis, Plane, document, legend

MIB = 1 << 20
BLOCKS, INPUT_BYTES, TAPE_BYTES, FIXED_BYTES = 12, 4 * MIB, 40 * MIB, 64 * MIB
# A block whose wide, cheap tensors are dropped and whose matrix products are held.
SELECTION = Option(
    kind=OptionKind.SELECT,
    held_bytes=16 * MIB,
    forward_seconds=1.0,
    backward_seconds=2.0,
    rerun_seconds=0.25,
    backward_transient_bytes=24 * MIB,
)
SCHEDULES = {
    "revolve": Schedule(family="revolve", steps=24, snapshots=4),
    "multistage": Schedule(family="multistage", steps=24, ram=1, disk=3),
    "uniform": Schedule(family="uniform", steps=25, snapshots=5),
    "mixed": Schedule(family="mixed", steps=24, snapshots=4),
    "online": Schedule(family="online", steps=24, snapshots=4),
}


def pictures() -> dict[str, str]:
    """Return the text of each picture by its name."""
    drawn = {name: render_svg(schedule) for name, schedule in SCHEDULES.items()}
    models = {"tape": tape_picture(), "selective": selective_picture(), "tiers": tiers_picture()}
    return {**drawn, **models, "architecture": architecture_picture(), "training_loop": training_loop_picture()}


def model(*options: Option) -> Chain:
    """Equal blocks, each one second forward and two back."""
    block = Stage(
        forward_seconds=1.0, backward_seconds=2.0, state_bytes=INPUT_BYTES, tape_bytes=TAPE_BYTES, options=options
    )
    return Chain(stages=(block,) * BLOCKS, fixed_bytes=FIXED_BYTES)


def tape_picture() -> str:
    """Memory over one step: everything kept, and two budgets below that."""
    chain = model()
    most = frontier(chain).store_all_bytes
    tracks = [track("everything kept", chain, solve(chain, most).actions())]
    for share in (0.5, 0.25):
        plan = solve(chain, share)
        tracks.append(track(f"{share:g} of the activations", chain, plan.actions(), budget_bytes=plan.budget_bytes))
    return render_memory_svg(tracks, title="one step of twelve blocks: live bytes")


def selective_picture() -> str:
    """Two frontiers of one model: blocks kept or recomputed whole, and with a selection between."""
    whole, selective = frontier(model()), frontier(model(SELECTION))
    points = [point for found in (whole, selective) for point in found.points]
    plane = Plane(
        across=Axis(low=0.0, high=1.05 * max(point.bytes for point in points), write=format_bytes, binary=True),
        up=Axis(low=30.0, high=60.0, write=format_seconds),
    )
    names = {"c2": "blocks kept or recomputed whole", "c0": "with a selection"}
    curves = [curve(plane, found, kind) for found, kind in zip((whole, selective), names, strict=True)]
    return document("the best seconds at every number of bytes", plane.frame(), *curves, legend(names.items()))


def curve(plane: Plane, found: Frontier, kind: str) -> str:
    """A frontier within the plane."""
    shown = [(float(point.bytes), point.seconds) for point in found.points if point.seconds <= plane.up.high]
    return plane.path([*shown, (plane.across.high, shown[-1][1])], kind)


def tiers_picture() -> str:
    """Memory over one step: every tape kept on the device, and every tape moved to the host beside the computation."""
    chain = model()
    host = Tier(name="host", write_bytes_per_second=48 * MIB, read_bytes_per_second=48 * MIB)
    kept = track("every tape kept", chain, solve(chain, frontier(chain).store_all_bytes).actions())
    moved = track("tapes moved to the host and back", chain, there_and_back(), tiers=(Tier(name="device"), host))
    return render_memory_svg([kept, moved], title="one step of twelve blocks: live bytes on the device")


def there_and_back() -> Iterator[Action]:
    """Each tape leaves when the next one is made, and starts back one block ahead of its backward; the last one stays."""
    last = BLOCKS - 1
    for step in range(BLOCKS):
        yield Tape(step=step)
        yield Save(step=step, item=Item.TAPE)
        if step < last:
            yield Offload(step=step, tier=1, item=Item.TAPE)
    for step in reversed(range(BLOCKS)):
        if step:
            yield Prefetch(step=step - 1, tier=1, item=Item.TAPE)
        yield Backward(step=step)


def track(
    name: str,
    chain: Chain,
    actions: Iterable[Action],
    *,
    budget_bytes: int | None = None,
    tiers: tuple[Tier, ...] = (Tier(name="device"),),
) -> Track:
    """The bytes that the abstract machine holds while it runs these actions."""
    outcome = simulate(chain, actions, tiers=tiers, timeline=True)
    moments = tuple(MemorySample(seconds=at, live_bytes=held) for at, held in outcome.timeline)
    record = Record(
        peak_bytes=outcome.peak_bytes, seconds=outcome.seconds, timeline=moments, base_bytes=FIXED_BYTES, device="plan"
    )
    return Track(name=name, record=record, budget_bytes=budget_bytes)


# --- the training loop, from its records --------------------------------------------------------------------------

RESULTS = Path(__file__).parent.parent.parent / "benchmarks" / "results"
LOOP_RECORDS = (  # record, row, name of the row
    ("training_loop_small_large_h200_2026-11-18", "small", "2 x 8,192 tokens, AdamW, 130 GiB"),
    ("training_loop_compiled_h200_2026-11-18", "compiled", "the same, compiled blocks"),
    ("training_loop_large_exact_h200_2026-11-18", "large", "6 x 8,192 tokens, AdamW, 130 GiB"),
    ("training_loop_large_h200_2026-11-18", "large", "6 x 8,192 tokens, AdamW, 130 GiB, another run"),
    ("training_loop_large_long_h200_2026-11-18", "long", "1 x 98,304 tokens, no optimizer, 60 GiB"),
)
BAR_LEFT, BAR_WIDTH, BAR_HEIGHT = 300.0, 380.0, 22.0


def training_loop_picture() -> str:
    """Draw tokens per second of each way to train, by row of the records."""
    parts, y = [], 56.0
    for file, row_name, title in LOOP_RECORDS:
        rows = json.loads((RESULTS / f"{file}.json").read_text(encoding="utf-8"))["results"][row_name]
        known = {name: row for name, row in rows.items() if "tokens_per_second" in row}
        most = max(row["tokens_per_second"] for row in known.values())
        parts.append(f'<text x="20" y="{y:.1f}" font-weight="bold">{title}</text>')
        y += 12
        for name, row in known.items():
            parts.append(bar(y, name, row["tokens_per_second"], most, row["peak_gib"]))
            y += BAR_HEIGHT + 8
        y += 26
    text = document("an 8-billion-parameter Llama on one H200: tokens per second, and the peak", *parts)
    return text.replace('viewBox="0 0 900 480"', f'viewBox="0 0 900 {y:.0f}"')


def bar(y: float, name: str, speed: float, most: float, peak: float) -> str:
    """Draw one way to train: its name, a bar, tokens per second and the peak."""
    colour = "#2563eb" if name.startswith("retape") else "#9aa7b1"
    wide = BAR_WIDTH * speed / most
    middle = y + BAR_HEIGHT - 6
    return (
        f'<text x="{BAR_LEFT - 10}" y="{middle:.1f}" text-anchor="end">{name}</text>'
        f'<rect x="{BAR_LEFT}" y="{y:.1f}" width="{wide:.1f}" height="{BAR_HEIGHT}" rx="3" fill="{colour}"/>'
        f'<text x="{BAR_LEFT + wide + 8:.1f}" y="{middle:.1f}">{speed:,.0f} tokens/s, {peak:.1f} GiB</text>'
    )


# --- the packages, and which imports which ------------------------------------------------------------------------

SOURCE = Path(__file__).parent.parent.parent / "src"
PURPOSES = {
    "retape.cli": "commands",
    "retape.demo": "the demo",
    "retape.integrations": "Hugging Face",
    "retape.api": "fit, apply, Fit",
    "retape.forecast": "peak and time, forecast",
    "retape.report": "text, SVG, HTML",
    "retape.core": "problems, solvers, machine",
    "retape.torch.adaptive": "budget at run time",
    "retape.torch.planning": "profile, search, attach",
    "retape.torch.ode": "odeint",
    "retape.torch.measure": "memory, time, verify",
    "retape.torch.slicing": "tile, fused loss",
    "retape.torch.loops": "scan, while_loop",
    "retape.torch.engine": "regions, slots, offload",
    "retape.torch.capture": "state of a re-run",
    "retape.torch.model_libraries": "registry of libraries",
    "retape.torch.compat": "private PyTorch names",
}
BOX_WIDTH, BOX_HEIGHT, ROW_HEIGHT, COLUMN_WIDTH = 176.0, 38.0, 62.0, 190.0


def package_of(module: str) -> str | None:
    """Return the box that a module belongs to; None for `retape` itself and its list of errors."""
    return next((name for name in PURPOSES if module == name or module.startswith(name + ".")), None)


@cache
def package_imports() -> dict[str, frozenset[str]]:
    """Return the packages that each package imports, at any depth of its code."""
    found: dict[str, set[str]] = {name: set() for name in PURPOSES}
    for path in SOURCE.rglob("*.py"):
        own = package_of(".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if own else ():
            if isinstance(node, ast.ImportFrom):
                found[own] |= {package_of(f"{node.module}.{alias.name}") for alias in node.names} - {None, own}
            elif isinstance(node, ast.Import):
                found[own] |= {package_of(alias.name) for alias in node.names} - {None, own}
    return {name: frozenset(imported) for name, imported in found.items()}


@cache
def level(name: str) -> int:
    """Return the length of the longest chain of imports below a package."""
    return max((1 + level(imported) for imported in package_imports()[name]), default=0)


def direct_imports(name: str) -> list[str]:
    """Return the imports of a package that no other of its imports implies."""
    imports = package_imports()[name]
    return sorted(one for one in imports if not any(one in reached(other) for other in imports if other != one))


@cache
def reached(name: str) -> frozenset[str]:
    """Return every package that a package imports, directly or not."""
    imports = package_imports()[name]
    return imports.union(*(reached(imported) for imported in imports))


def row(name: str) -> int:
    """Return the row of a package, counted from below: its level; `report`, which imports only `core`, is below its user."""
    return level("retape.api") - 1 if name == "retape.report" else level(name)


def architecture_picture() -> str:
    """Draw the packages by level, the highest on top, with the imports that no other import implies."""
    rows: dict[int, list[str]] = defaultdict(list)
    for name in PURPOSES:
        if name != "retape.report":
            rows[row(name)].append(name)
    top, places = max(rows), {"retape.report": (110.0, 60 + ROW_HEIGHT * (max(rows) - row("retape.report")))}
    for number, names in rows.items():
        for place, name in enumerate(names):
            places[name] = (490 + COLUMN_WIDTH * (place - (len(names) - 1) / 2), 60 + ROW_HEIGHT * (top - number))
    lines = [line(places[name], places[other]) for name in PURPOSES for other in direct_imports(name)]
    boxes = [box(*places[name], name.removeprefix("retape."), PURPOSES[name]) for name in PURPOSES]
    text = document("packages: a line goes down from a package to what it imports", *lines, *boxes)
    return text.replace('viewBox="0 0 900 480"', f'viewBox="0 0 900 {80 + ROW_HEIGHT * top + BOX_HEIGHT:.0f}"')


def box(x: float, y: float, name: str, purpose: str) -> str:
    """Draw a package with its name and purpose; `x` is the middle, `y` the top."""
    rectangle = f'<rect class="axis" fill="none" x="{x - BOX_WIDTH / 2:.1f}" y="{y:.1f}" rx="5"'
    texts = f'<text x="{x:.1f}" y="{y + 16:.1f}" text-anchor="middle" font-weight="bold">{name}</text>'
    more = f'<text x="{x:.1f}" y="{y + 31:.1f}" text-anchor="middle" font-size="11">{purpose}</text>'
    return f'{rectangle} width="{BOX_WIDTH}" height="{BOX_HEIGHT}"/>{texts}{more}'


def line(start: tuple[float, float], end: tuple[float, float]) -> str:
    """Draw a line from the bottom of a box to the top of one in the next row, or to the side of one further down."""
    (x1, y1), (x2, y2) = (start[0], start[1] + BOX_HEIGHT), end
    far = y2 - start[1] > ROW_HEIGHT
    way = f"V{y2 + BOX_HEIGHT / 2:.1f}H{x2 - BOX_WIDTH / 2:.1f}" if far else f"L{x2:.1f} {y2:.1f}"
    return f'<path class="axis" fill="none" d="M{x1:.1f} {y1:.1f}{way}"/>'


def main() -> None:
    for name, text in pictures().items():
        Path(__file__).with_name(f"{name}.svg").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

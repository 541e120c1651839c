"""Draw every picture of the documents that follows from the code alone: schedules, and a model of equal blocks on the abstract machine.

    python docs/pictures/draw.py

A test holds the files against what this draws. `wave_inversion.svg` is not here: its example draws it.
"""

from collections.abc import Iterable, Iterator
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
    """The text of each picture by its name."""
    drawn = {name: render_svg(schedule) for name, schedule in SCHEDULES.items()}
    return {**drawn, "tape": tape_picture(), "selective": selective_picture(), "tiers": tiers_picture()}


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


def main() -> None:
    for name, text in pictures().items():
        Path(__file__).with_name(f"{name}.svg").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

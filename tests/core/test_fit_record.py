"""FitRecord: what is saved is read back exactly, and nothing that cannot be meant is read."""

import json
from dataclasses import replace

import pytest

from retape.core import Chain, Option, OptionKind, Stage, frontier, solve
from retape.core.assignment import Assignment, Choice, Passing
from retape.core.fit_record import DeviceRecord, FitRecord
from retape.core.record import MemorySample, Record
from retape.errors import InvalidInput, PlanFormatError


def stage(name, **changes):
    recompute = Option(
        kind=OptionKind.RECOMPUTE, held_bytes=10, forward_seconds=0.1, backward_seconds=0.3, rerun_seconds=0.1
    )
    sizes = {"forward_seconds": 0.1, "backward_seconds": 0.3, "state_bytes": 10, "tape_bytes": 50}
    return Stage(**{"name": name, **sizes, "options": (recompute,), **changes})


def glue():
    return stage("head", options=(), pinned=True)


def measured(device="cpu", peak=170):
    moments = (MemorySample(seconds=0.0, live_bytes=100), MemorySample(seconds=1 / 3, live_bytes=peak))
    return Record(peak_bytes=peak, base_bytes=100, seconds=1.25, timeline=moments, device=device)


def record():
    """Two regions and glue; one of them is recomputed."""
    chain = Chain(stages=(stage("a"), stage("b"), glue()), fixed_bytes=100)
    plan = solve(chain, 230)
    choices = (
        Choice(name="a", option=OptionKind.RECOMPUTE, slots=3, elements=7),
        Choice(name="b", call=1, option=OptionKind.SELECT, held=(0, 2), slots=3, moved=(1,), drop_input=True,
               passing=(Passing(region=0, fill=(1,), hold_input=True), Passing(region=1, fill_all=True))),
    )  # fmt: skip
    return FitRecord(
        model="Net",
        fingerprint="abc",
        budget_bytes=230,
        chain=chain,
        plan=plan,
        frontier=frontier(chain),
        assignment=Assignment(choices=choices),
        measured=measured(),
        profile_seconds=2.5,
        rows=4,
        versions=(("retape", "1"), ("torch", "2")),
    )


def spread():
    """The same on two devices: the first region on one, the second on the other."""
    one = record()
    parts = []
    for number, name in enumerate(("cpu", "cuda:0")):
        stages = tuple(
            replace(s, options=(), pinned=True) if i == 1 - number else s for i, s in enumerate(one.chain.stages)
        )
        chain = Chain(stages=stages, fixed_bytes=100 + number)
        parts.append(
            DeviceRecord(
                device=name,
                budget_bytes=220 + number,
                chain=chain,
                plan=solve(chain, 220 + number),
                frontier=frontier(chain),
                measured=measured(name, 180 + number),
                regions=(number,),
            )
        )
    first = parts[0]
    own = {name: getattr(first, name) for name in ("budget_bytes", "chain", "plan", "frontier", "measured")}
    return replace(one, **own, devices=tuple(parts))


@pytest.mark.parametrize("made", [record(), spread()], ids=["one device", "two devices"])
def test_round_trip(made):
    again = FitRecord.from_json(made.to_json())
    assert again == made
    assert again.to_json() == made.to_json()


def test_a_record_from_before_there_were_devices():
    data = json.loads(record().to_json())
    del data["devices"]
    assert FitRecord.from_json(json.dumps(data)) == record()


def test_times():
    made = record()
    assert made.plain_seconds == pytest.approx(1.2)
    assert made.promised_seconds == made.plan.promised_seconds > made.plain_seconds
    assert made.promised_slowdown == made.plan.promised_seconds / made.plain_seconds


def test_devices_have_views():
    made = spread()
    extra = [device.extra_seconds for device in made.devices]
    assert all(seconds > 0 for seconds in extra)
    assert made.promised_seconds == pytest.approx(made.plain_seconds + sum(extra))
    assert [view.measured.device for view in made.views] == ["cpu", "cuda:0"]
    assert [[choice.name for choice in view.assignment.choices] for view in made.views] == [["a"], ["b"]]
    assert made.view("cuda:0") == made.views[1]
    assert made.view() == made.views[0]
    with pytest.raises(InvalidInput, match="has no device 'cuda:1'; it is for cpu, cuda:0"):
        made.view("cuda:1")
    alone = record()
    assert alone.views == (alone,)
    assert alone.view("cpu") is alone


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": "other"}', "3"])
def test_what_is_no_saved_fit(text):
    with pytest.raises(PlanFormatError, match="no saved fit"):
        FitRecord.from_json(text)


@pytest.mark.parametrize("version", [0, 2, "1", None, True])
def test_another_version(version):
    data = json.loads(record().to_json()) | {"version": version}
    if version is True:  # equal to 1 in Python, and not a number in JSON
        data["version"] = "true"
    with pytest.raises(
        PlanFormatError, match=r"This saved fit has version .*; this retape reads version 1. .* fit again"
    ):
        FitRecord.from_json(json.dumps(data))


def forged(path, value):
    """The text of a record with one thing in it changed, or taken out."""
    data = json.loads(spread().to_json())
    *way, last = path
    place = data
    for step in way:
        place = place[step]
    if value is KeyError:
        del place[last]
    else:
        place[last] = value
    return json.dumps(data)


FORGERIES = [
    (("chain",), KeyError),
    (("chain", "stages"), []),
    (("chain", "stages", 0, "tape_bytes"), -1),
    (("chain", "stages", 0, "tape_bytes"), 1.5),
    (("chain", "stages", 0, "forward_seconds"), "fast"),
    (("chain", "stages", 0, "colour"), "red"),
    (("chain", "stages", 0, "options", 0, "kind"), "guess"),
    (("chain", "stages", 2, "pinned"), "yes"),
    (("plan", "status"), "perfect"),
    (("plan", "promised_peak_bytes"), 10**9),
    (("plan", "promised_seconds"), 0.0),
    (("plan", "version"), 7),
    (("frontier",), None),
    (("frontier", "points", 0, "colour"), 1),
    (("regions",), 5),
    (("regions", 0, "option"), "guess"),
    (("regions", 0, "colour"), "red"),
    (("regions", 1, "passing"), 3),
    (("regions", 1, "passing", 0, "fill"), KeyError),
    (("measured", "peak_bytes"), -3),
    (("measured", "timeline"), 3),
    (("devices",), 3),
    (("devices", 1, "chain", "stages", 0, "tape_bytes"), -1),
    (("devices", 1, "plan"), {}),
    (("devices", 1, "device"), KeyError),
    (("versions",), None),
]


@pytest.mark.parametrize(("path", "value"), FORGERIES, ids=[".".join(map(str, path)) for path, _ in FORGERIES])
def test_forged_fields_are_told(path, value):
    with pytest.raises(PlanFormatError):
        FitRecord.from_json(forged(path, value))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("budget_bytes",), "24GiB"),
        (("budget_bytes",), -1),
        (("model",), 3),
        (("fingerprint",), None),
        (("rows",), "many"),
        (("profile_seconds",), "long"),
        (("fused_loss",), "yes"),
        (("regions", 0, "slots"), "three"),
        (("regions", 0, "held"), ["a"]),
        (("regions", 0, "name"), 5),
        (("devices", 1, "regions"), [9]),
        (("devices", 1, "budget_bytes"), None),
        (("frontier", "points", 0, "seconds"), "none"),
        (("frontier", "floor_bytes"), "none"),
        (("regions", 1, "passing", 0, "region"), -1),
        (("regions", 1, "passing", 0, "fill_all"), 1),
    ],
    ids=str,
)
def test_fields_of_the_wrong_kind_are_told(path, value):
    with pytest.raises(PlanFormatError, match=r"is invalid: .*(; give |; count )"):
        FitRecord.from_json(forged(path, value))

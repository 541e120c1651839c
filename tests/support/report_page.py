"""Reading a report as a program would, and fits that are large, for the tests of the page."""

from dataclasses import dataclass, field
from html.parser import HTMLParser
from xml.etree import ElementTree

from retape.core.assignment import assign
from retape.core.fit_record import FitRecord
from retape.core.problem import Chain, Option, OptionKind, Stage
from retape.core.record import MemorySample, Record
from retape.core.solve import frontier, solve
from support.stages import region_stage

MIB = 1 << 20
KINDS = (OptionKind.KEEP, OptionKind.RECOMPUTE)


@dataclass
class Page(HTMLParser):
    """The elements of a page, as a browser's parser sees them: each a tag with its attributes."""

    text: str
    xml: bool = True
    elements: list = field(default_factory=list)
    values: dict = field(default_factory=dict)

    def __post_init__(self):
        super().__init__()
        self.feed(self.text)
        self.tree = ElementTree.fromstring(self.text) if self.xml else None

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.elements.append((tag, given))
        if tag == "data":
            assert given["id"] not in self.values, "an id is on a page once"
            self.values[given["id"]] = given["value"]

    handle_startendtag = handle_starttag

    def count(self, tag, **wanted):
        return sum(name == tag and wanted.items() <= given.items() for name, given in self.elements)

    def section(self, name):
        return next(part for part in self.tree.iter("section") if part.get("id") == name)


def large_fit(count, share=0.5, kinds=1):
    """A fit of `count` regions of so many kinds."""
    stages = tuple(
        Stage(
            name=f"model.layers.{number}",
            forward_seconds=0.010,
            backward_seconds=0.020,
            state_bytes=MIB,
            tape_bytes=(10 + number % kinds) * MIB,
            options=(
                Option(
                    kind=OptionKind.RECOMPUTE,
                    held_bytes=MIB,
                    forward_seconds=0.010,
                    backward_seconds=0.020,
                    rerun_seconds=0.010,
                    backward_transient_bytes=9 * MIB,
                ),
            ),
        )
        for number in range(count)
    )
    chain = Chain(stages=stages, fixed_bytes=100 * MIB)
    plan = solve(chain, share)
    meanings = tuple(
        region_stage(stage.name, *KINDS, slots=5, kind=number % kinds) for number, stage in enumerate(stages)
    )
    moments = tuple(MemorySample(seconds=0.001 * at, live_bytes=(100 + at % 70) * MIB) for at in range(20_000))
    return FitRecord(
        model="Long",
        fingerprint="0" * 16,
        budget_bytes=plan.budget_bytes,
        chain=chain,
        plan=plan,
        frontier=frontier(chain),
        assignment=assign(meanings, plan.actions()),
        measured=Record(peak_bytes=169 * MIB, base_bytes=100 * MIB, seconds=0.2, timeline=moments),
    )

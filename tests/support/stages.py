"""Stages of a chain that stand for regions, for tests of assignments."""

from retape.core.assignment import Choice, RegionOption, RegionStage
from retape.core.problem import Option, OptionKind


def region_stage(name, *options, **about):
    """A region with these options: each a kind, or a kind and what it asks of the region."""
    made = []
    for option in options:
        kind, asks = (option, {}) if isinstance(option, OptionKind) else option
        cost = Option(kind=kind, held_bytes=0, forward_seconds=0.0, backward_seconds=0.0)
        made.append(RegionOption(cost=cost, **asks))
    return RegionStage(choice=Choice(name=name, **about), options=tuple(made))

"""The points that every picture of a frontier names. Draws nothing."""

from __future__ import annotations

from retape.core.errors import InvalidInput
from retape.core.plan import Frontier, FrontierPoint


def marked_points(frontier: Frontier, chosen: FrontierPoint | None) -> tuple[tuple[str, FrontierPoint], ...]:
    """The points that a picture of a frontier names: the floor, keeping everything, and the plan that was taken."""
    if not frontier.points:
        raise InvalidInput("This frontier has no points, so there is nothing to draw. Fit the model again.")
    last = frontier.points[-1]
    keep_all = FrontierPoint(bytes=max(frontier.store_all_bytes, last.bytes), seconds=last.seconds)
    named = (("floor", frontier.points[0]), ("keep all", keep_all))
    return named if chosen is None else (*named, ("this plan", chosen))

"""A fit as text for a terminal."""

from __future__ import annotations

from retape.core.fit_record import FitRecord


def explain(record: FitRecord) -> str:
    """What is held and what is recomputed, per kind of region."""
    return record.model

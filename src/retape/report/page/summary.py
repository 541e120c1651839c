"""The head of the report (promise and measurement) and its last section (conditions of the measurement)."""

from __future__ import annotations

from collections import Counter
from html import escape

from retape.core.fit_record import FitRecord
from retape.core.plan import bound_by
from retape.core.units import format_bytes, format_seconds
from retape.report.fit_text import fixed_parts, quality, rank_peaks
from retape.report.page.elements import bytes_value, counted, seconds_value, section
from retape.report.region_rows import floor_binding


def head(record: FitRecord) -> str:
    """Return the title, the verdict and four cards."""
    inside = record.measured.peak_bytes <= record.budget_bytes
    verdict = "Inside the budget" if inside else "ABOVE the budget"
    share = record.measured.peak_bytes / record.budget_bytes if record.budget_bytes else 0.0
    return (
        f"<header>\n<h1>{escape(record.model)} in {format_bytes(record.budget_bytes)}</h1>\n"
        f'<p><span class="verdict {"good" if inside else "bad"}">{verdict}</span>: the measured peak is {share:.1%} of it. '
        f'<span class="soft">{escape(quality(record))}.</span></p>\n</header>\n'
        f'<div class="cards">\n{_peak(record, share)}\n{_step(record)}\n{_activations(record)}\n{_plan(record)}\n</div>'
    )


def _card(title: str, big: str, *lines: str, bar: float | None = None) -> str:
    drawn = ""
    if bar is not None:
        over = ' class="over"' if bar > 1 else ""
        drawn = f'<div class="bar"><i{over} style="width: {min(1.0, max(0.0, bar)):.1%}"></i></div>'
    below = "".join(f'<p class="soft">{line}</p>' for line in lines)
    return f'<div class="card"><h2>{title}</h2><div class="big">{big}</div>{drawn}{below}</div>'


def _peak(record: FitRecord, share: float) -> str:
    return _card(
        "Peak, measured",
        bytes_value("measured-peak-bytes", record.measured.peak_bytes),
        f"promised {bytes_value('promised-peak-bytes', record.plan.promised_peak_bytes)}",
        f"budget {bytes_value('budget-bytes', record.budget_bytes)}",
        *(f"rank {text}" for text in rank_peaks(record)),
        bar=share,
    )


def _step(record: FitRecord) -> str:
    plain, measured = record.plain_seconds, record.measured.seconds
    ratio = measured / plain if plain else 1.0
    return _card(
        "Step, measured",
        seconds_value("measured-seconds", measured),
        f"{ratio:.2f}x keeping everything, {seconds_value('plain-seconds', plain)}",
        f"promised {seconds_value('promised-seconds', record.plan.promised_seconds or 0.0)}: {record.promised_slowdown:.2f}x",
    )


def _activations(record: FitRecord) -> str:
    fixed = record.frontier.fixed_bytes
    every = max(1, record.frontier.store_all_bytes - fixed)
    own = max(0, record.plan.promised_peak_bytes - fixed)
    return _card(
        "Activations, by the plan",
        f"{own / every:.0%}",
        f"{format_bytes(own)} of {format_bytes(every)} at the peak",
        f"keeping all: a peak of {bytes_value('store-all-bytes', record.frontier.store_all_bytes)}",
        bar=own / every,
    )


def _plan(record: FitRecord) -> str:
    ways = Counter(choice.option.value for choice in record.assignment.choices)
    dropped = sum(choice.drop_input for choice in record.assignment.choices)
    lines = [", ".join(f"{count} {way}" for way, count in ways.most_common())]
    lines += [f"{dropped} without their inputs"] if dropped else []
    lines += ["the loss is fused"] if record.fused_loss else []
    return _card("Plan", counted(sum(ways.values()), "region"), *map(escape, lines), escape(record.plan.quality))


def facts(record: FitRecord) -> str:
    """Return a list of the other facts."""
    more = record.chain.fixed_bytes - record.measured.base_bytes
    found = f" (and {format_bytes(more)} found by measuring)" if more > 0 else ""
    binding = escape(bound_by(floor_binding(record)))
    entries = [
        (
            "before the step",
            f"{bytes_value('base-bytes', record.measured.base_bytes)}: {fixed_parts(record)}{found}",
        ),
        ("floor", f"{bytes_value('floor-bytes', record.floor_bytes)}{binding}"),
        ("measured on", escape(record.measured.device)),
        ("fitting", f"took {format_seconds(record.profile_seconds)}"),
        ("versions", escape(", ".join(f"{name} {version}" for name, version in record.versions))),
        ("structure", escape(record.fingerprint)),
    ]
    if record.rows:
        entries.insert(2, ("batch", counted(record.rows, "row")))
    if record.measured.reserved_bytes:
        entries.insert(
            1, ("reserved", f"{bytes_value('reserved-bytes', record.measured.reserved_bytes)} by the allocator")
        )
    rows = "".join(f"<dt>{name}</dt><dd>{text}</dd>" for name, text in entries if text)
    return section(
        "facts", "What it was measured on", "One real step, with the plan attached to the model.", f"<dl>{rows}</dl>"
    )

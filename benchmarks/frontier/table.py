"""A record as the table that a document shows: what each peer takes, and what retape takes inside the same bytes."""

from __future__ import annotations

import json
from pathlib import Path

GIB, MIB = 2**30, 2**20
HEAD = ("| inside the peak of | {unit} | its time | retape's | record |", "| --- | --- | --- | --- | --- |")


def table(path: str | Path, link: str) -> str:
    """Peers by falling peak; times are over a step that keeps everything. `link` is how the document reaches the record."""
    results = json.loads(Path(path).read_text(encoding="utf-8"))["results"]
    peers = [(name, row) for name, row in results.items() if "beside" in row]
    large = max(row["activation_bytes"] for _, row in peers) >= GIB
    lines = [HEAD[0].format(unit="GiB" if large else "MiB"), HEAD[1]]
    for name, row in sorted(peers, key=lambda found: -found[1]["activation_bytes"]):
        own = results[row["beside"]]
        size = row["activation_bytes"] / (GIB if large else MIB)
        times = f"{row['slowdown']:.2f} | {own['slowdown']:.2f}"
        lines.append(f"| {name} | {size:.1f} | {times} | [{Path(path).stem}]({link}) |")
    return "\n".join(lines)

"""The header of every record in benchmarks/results/: device, versions, command, seed, date."""

from __future__ import annotations

import json
import os
import platform
import sys
from datetime import date
from pathlib import Path

import torch


def record(
    theme: str,
    seed: int,
    results: dict,
    out: str | None,
    *,
    part: str | None = None,
    device: torch.device | None = None,
    about: dict | None = None,
) -> Path:
    """Write results with what they were measured on; returns the file.

    `part` is of a theme with several records, `device` where it is not the GPU of the machine, `about` what else there is to say.
    """
    cuda = torch.cuda.is_available() if device is None else device.type == "cuda"
    name = torch.cuda.get_device_name(0) if cuda else "cpu"
    hardware = name.replace("NVIDIA ", "").replace(" ", "-").lower()
    words = [theme, *([part] if part else []), hardware, date.today().isoformat()]
    path = Path(out) if out else Path(__file__).parent / "results" / f"{'_'.join(words)}.json"
    text = {
        "theme": theme,
        "device": name,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "command": " ".join(["python -m", f"benchmarks.{theme}", *_arguments()]),
        "seed": seed,
        "date": date.today().isoformat(),
        **(about or {}),
        "results": results,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(text, indent=1) + "\n")
    return path


def _arguments() -> list[str]:
    """The command's arguments, without where its record went."""
    given = sys.argv[1:]
    return [word for word, before in zip(given, ["", *given], strict=False) if "--out" not in (word, before)]

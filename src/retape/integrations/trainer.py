"""The Trainer callback under its first import path; it is defined in `retape.integrations.huggingface.trainer`."""

from __future__ import annotations

from retape.integrations.huggingface.trainer import FitCallback

__all__ = ["FitCallback"]

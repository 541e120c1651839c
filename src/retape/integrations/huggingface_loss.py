"""The fused loss under its first import path; it is defined in `retape.integrations.huggingface.fused_loss`."""

from __future__ import annotations

from retape.integrations.huggingface.fused_loss import fuse_loss, unfuse_loss

__all__ = ["fuse_loss", "unfuse_loss"]

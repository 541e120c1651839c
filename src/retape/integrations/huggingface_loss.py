"""Hugging Face causal language models: the loss without whole logits, switched by hand; `fit(options=ALL)` does so itself."""

from __future__ import annotations

from retape.torch.planning.variants.fused_loss import fuse_loss, unfuse_loss

__all__ = ["fuse_loss", "unfuse_loss"]

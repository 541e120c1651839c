"""Adapters to other libraries: `huggingface`, `lightning`, `accelerate`; `first_step` has what the trainers among them share.

Importing this package registers them and imports none: each is loaded once the user has imported its library
(`retape.torch.model_libraries`). Not here: anything that works without another library.
"""

from __future__ import annotations

from retape.torch.model_libraries import LIBRARIES

__all__ = [
    "accelerate",
    "batch_size",
    "first_step",
    "huggingface",
    "huggingface_loss",
    "lightning",
    "trainer",
    "trainer_state",
]

LIBRARIES.register("transformers", "retape.integrations.huggingface.library")

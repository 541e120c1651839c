"""Adapters to other libraries, one package each: `huggingface`.

Importing this package registers them and imports none: each is loaded once the user has imported its library
(`retape.torch.model_libraries`). Not here: anything that works without another library.
"""

from __future__ import annotations

from retape.torch.model_libraries import LIBRARIES

__all__ = ["huggingface", "huggingface_loss", "trainer"]

LIBRARIES.register("transformers", "retape.integrations.huggingface.library")

"""A plugin for axolotl that keeps training inside a budget, which is a field of the configuration.

axolotl's trainers are built on Transformers' Trainer, so the plugin only adds its callback (`retape.integrations.huggingface`).
"""

from __future__ import annotations

from typing import Any, Literal

from retape.core.errors import InvalidInput
from retape.core.problem import OptionSet

__all__ = ["RetapeArgs", "RetapePlugin"]

try:
    from axolotl.integrations.base import BasePlugin
    from pydantic import BaseModel
except ImportError as error:
    raise InvalidInput(f"The plugin is for axolotl, which is not installed: pip install axolotl ({error}).") from error


class RetapeArgs(BaseModel):
    """Fields of axolotl's configuration: the budget, and the arguments `lengths` and `options` of `FitCallback`."""

    retape_budget: str | float | int | None = None
    retape_lengths: Literal["adaptive", "longest"] = "adaptive"
    retape_options: Literal["exact", "all"] = "exact"


class RetapePlugin(BasePlugin):  # type: ignore[misc]  # of a package without types
    """Adds the callback to axolotl's trainer: `plugins: [retape.integrations.axolotl.RetapePlugin]` and `retape_budget: 70GiB`."""

    def get_input_args(self) -> str:
        """Return where axolotl finds the fields of the configuration."""
        return f"{__name__}.{RetapeArgs.__name__}"

    def add_callbacks_post_trainer(self, cfg: Any, trainer: Any) -> list[Any]:
        """Return the callback that holds the trainer inside `retape_budget`."""
        from retape.integrations.huggingface.trainer import FitCallback

        if cfg.retape_budget is None:
            raise InvalidInput("The plugin of retape needs a budget: add `retape_budget: 70GiB` to the configuration.")
        return [FitCallback(cfg.retape_budget, lengths=cfg.retape_lengths, options=OptionSet.of(cfg.retape_options))]

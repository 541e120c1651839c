"""A model's own switch for gradient checkpointing, as Transformers and Diffusers have it: off during a fit, put back after."""

from __future__ import annotations

from torch import nn

_SWITCH = "gradient_checkpointing"  # a field of the modules that recompute


class OwnCheckpointing:
    """The switches of a model that were on; they are off until `put_back`."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [module for module in model.modules() if vars(module).get(_SWITCH)]
        for module in self._modules:
            setattr(module, _SWITCH, False)

    @property
    def was_on(self) -> bool:
        return bool(self._modules)

    def put_back(self) -> None:
        """Switch on again what was on."""
        for module in self._modules:
            setattr(module, _SWITCH, True)
        self._modules = []

"""Peak memory, step time and the best plan of a training setup, without its hardware.

`forecast` runs the step of a model on a simulated device (`simulation`, with the rates of `device` and `known_devices`), divides it over
GPUs (`layout`, `parallel`) and solves it as `fit` does (`stage_plan`).
`calibration` measures a device. This module can be called: `retape.forecast(model, batch, ...)` is `forecasting.forecast`.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from retape.forecast.result import Forecast


class _CallableModule(ModuleType):
    """A package that is also the function of the same name."""

    def __call__(
        self,
        model: Any,
        batch: Any,
        *,
        device: Any = "h200",
        mesh: Any = None,
        optimizer: Any = None,
        budget: Any = None,
        step: Any = None,
        offload: bool = False,
        float8: Any = None,
    ) -> Forecast:
        """Forecast a training step; see `retape.forecast.forecasting.forecast`."""
        from retape.forecast.forecasting import forecast

        settings = {"device": device, "mesh": mesh, "optimizer": optimizer, "budget": budget}
        return forecast(model, batch, step=step, offload=offload, float8=float8, **settings)


forecast = sys.modules[__name__]
forecast.__class__ = _CallableModule

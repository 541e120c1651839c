"""A function run as a region by hand, for tests of what a region notes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from retape.torch.capture.call import capture_call
from retape.torch.engine.region import Region


def trace_region(function: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
    """Run `function` as a region and return its trace; `options` are those of Region."""
    region = Region(capture_call(function, inputs, {}), **options)
    region.run(function, inputs, {})
    return region.trace()

"""Whether a module does something else in training than in evaluation; a plan is for the mode in which it was profiled.

Known are PyTorch's own modules, and code that reads `self.training`; what a function outside the module reads is not seen.
"""

from __future__ import annotations

import inspect
import logging

from torch import nn

_LOG = logging.getLogger("retape")
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_DROPPING = (nn.MultiheadAttention, nn.RNNBase)  # by a function, with a share of their own
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)


def mode_name(training: bool) -> str:
    return "training" if training else "evaluation"


def depends_on_mode(module: nn.Module) -> bool:
    """Whether some part of a module drops, counts or chooses by `training`."""
    return any(map(_part_depends, module.modules()))


def _part_depends(part: nn.Module) -> bool:
    if isinstance(part, _DROPOUTS):
        return part.p > 0
    if isinstance(part, _DROPPING):
        return float(part.dropout) > 0
    if isinstance(part, (*_BATCH_NORMS, *_INSTANCE_NORMS)):
        return part.track_running_stats
    if isinstance(part, nn.RReLU):
        return True
    return _reads_training(type(part))


def _reads_training(kind: type[nn.Module]) -> bool:
    """Whether the forward of a class that is not PyTorch's own speaks of `training`; wrappers around either are looked through."""
    owner = next(base for base in kind.__mro__ if "forward" in vars(base))
    code = getattr(inspect.unwrap(vars(owner)["forward"]), "__code__", None)
    return code is not None and "training" in code.co_names and not owner.__module__.startswith("torch.")


def say_evaluation(model: nn.Module) -> None:
    """Tell the logger where a model is about to be planned for in evaluation mode, and that makes a difference."""
    if model.training or not (_is_pretrained(model) or depends_on_mode(model)):
        return
    _LOG.warning(
        "retape: %s is in evaluation mode (from_pretrained returns it so), and the plan is for that: in training, dropout saves more. "
        "Call model.train() before retape.fit.",
        type(model).__name__,
    )


def _is_pretrained(model: nn.Module) -> bool:
    """Hugging Face's models choose by `training` in functions that are looked up by name."""
    return any(base.__name__ == "PreTrainedModel" for base in type(model).__mro__)

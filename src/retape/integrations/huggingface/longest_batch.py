"""The longest batch that a Trainer's data can give, for plans that hold for every batch."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any

from torch import Tensor
from transformers import Trainer

from retape.core.errors import InvalidInput
from retape.integrations.batch_size import masks_nothing
from retape.torch.capture import rng


def longest_batch(trainer: Trainer) -> Any:
    """Collate the longest rows of the training data into one batch, prepared as the Trainer prepares its inputs.

    Every row is read once. Rows are as long as their longest part, then as the sum of their parts.
    """
    data = trainer.train_dataset
    if not (isinstance(data, Sized) and hasattr(data, "__getitem__")):
        raise InvalidInput(
            "lengths='longest' reads every row, and the training data has no length. Use lengths='adaptive'."
        )
    if type(trainer)._prepare_inputs is not Trainer._prepare_inputs:
        raise InvalidInput(
            f"lengths='longest' reads the training data, and {type(trainer).__name__} makes its batches from something else (it has "
            "its own _prepare_inputs). Use lengths='adaptive'."
        )
    draws = rng.capture(())
    rows = trainer._train_batch_size
    by_size = sorted(range(len(data)), key=lambda number: _size_of(data[number]))

    def collated(numbers: list[int]) -> Any:
        return trainer._prepare_inputs(_collator(trainer)([data[number] for number in numbers]))

    batch = collated(by_size[-rows:])
    if masks_nothing(batch):  # with a short row among them nothing gets shorter, and the model makes a mask
        batch = collated([by_size[0], *by_size[-rows:][1:]])
    rng.seek(draws)  # of a collator that masks at random
    return batch


def _collator(trainer: Trainer) -> Any:
    """Return the collator of the training batches, which may remove columns that the model does not take."""
    loader = trainer.callback_handler.train_dataloader
    return getattr(loader, "collate_fn", None) or trainer.data_collator


def _size_of(row: Any) -> tuple[int, int]:
    parts = row.values() if isinstance(row, Mapping) else row
    sizes = [part.numel() if isinstance(part, Tensor) else len(part) for part in parts if _has_size(part)]
    return max(sizes, default=0), sum(sizes)


def _has_size(part: Any) -> bool:
    return isinstance(part, Tensor) or (isinstance(part, Sized) and not isinstance(part, (str, bytes)))

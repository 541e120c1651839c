"""Which modules become regions: by structure, by name, by class."""

import pytest
import torch
from torch import nn

from retape.errors import InvalidInput
from retape.torch.planning.discover import find_regions
from support import models


def block(width=4):
    return nn.Sequential(nn.Linear(width, width), nn.ReLU())


class Loop(nn.Module):
    """Blocks in a list between an embedding and a head."""

    def __init__(self, blocks):
        super().__init__()
        self.embed, self.blocks, self.head = nn.Linear(2, 4), nn.ModuleList(blocks), nn.Linear(4, 2)


def names(model, wanted=None):
    return list(find_regions(model, wanted))


def test_a_list_of_blocks():
    assert names(Loop([block() for _ in range(3)])) == ["blocks.0", "blocks.1", "blocks.2"]


def test_a_sequential_of_blocks():
    assert names(nn.Sequential(*(block() for _ in range(3)))) == ["0", "1", "2"]


def test_a_row_of_blocks_is_entered():
    """A stage of a ResNet is no block: its blocks are."""
    model = nn.Sequential(nn.Sequential(block(), block()), nn.Sequential(block(), block(), block()))
    assert names(model) == ["0.0", "0.1", "1.0", "1.1", "1.2"]


def test_the_outermost_blocks_win():
    """Of a mixture of experts the layer is a region, not each expert."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.experts = nn.Linear(4, 2), nn.ModuleList(block() for _ in range(2))

    assert names(Loop([Experts(), Experts()])) == ["blocks.0", "blocks.1"]


def test_blocks_of_different_classes_in_one_list():
    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

    assert names(Loop([block(), Other(), block()])) == ["blocks.0", "blocks.1", "blocks.2"]


def test_children_without_parts_are_no_blocks():
    """Activations and single layers between the blocks stay outside."""
    model = nn.Sequential(nn.Linear(2, 4), block(), nn.ReLU(), block(), nn.Linear(4, 2))
    assert names(model) == ["1", "3"]


def test_alike_children_without_a_list():
    class Twins(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right, self.head = Loop([]), Loop([]), nn.Linear(2, 2)

    assert names(Twins()) == ["left", "right"]


def test_where_nothing_repeats_the_parts_are_taken():
    class Wrapper(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.rest, self.last = nn.Linear(2, 2), nn.ModuleList([nn.Linear(2, 2)]), nn.ReLU()

    assert names(Net()) == ["first", "rest.0", "last"]
    assert names(Wrapper(Wrapper(Net()))) == ["inner.inner.first", "inner.inner.rest.0", "inner.inner.last"]


def test_a_model_of_one_piece_has_no_regions():
    assert names(nn.Linear(2, 2)) == []


def test_recurrent_layers_are_blocks():
    assert names(models.make("lstm")[0]) == [f"layers.{i}" for i in range(4)]


def test_layers_of_hugging_face():
    assert names(models.make("llama")[0]) == [f"model.layers.{i}" for i in range(5)]
    assert names(models.make("t5")[0]) == [
        *(f"encoder.block.{i}" for i in range(3)),
        *(f"decoder.block.{i}" for i in range(3)),
    ]


def test_tied_blocks_are_one_region():
    """One module in several places is attached once, and its calls are counted."""
    shared = block()
    found = find_regions(Loop([shared, block(), shared]))
    assert list(found) == ["blocks.0", "blocks.1"]
    assert found["blocks.0"] is shared


def test_the_model_itself_is_never_a_region():
    model = Loop([block(), block()])
    assert all(module is not model for module in find_regions(model).values())


def test_by_name_class_and_module():
    model = Loop([block() for _ in range(3)])
    assert names(model, "blocks.1") == ["blocks.1"]
    assert names(model, nn.Sequential) == ["blocks.0", "blocks.1", "blocks.2"]
    assert names(model, model.blocks[2]) == ["blocks.2"]
    assert names(model, (model.head, "blocks.0", nn.Sequential)) == ["blocks.0", "blocks.1", "blocks.2", "head"]
    assert names(model, {"head", "embed"}) == ["embed", "head"]


@pytest.mark.parametrize(
    ("wanted", "text"),
    [
        ("nothing", "names 'nothing', which Loop does not contain"),
        ("", "names '', which Loop does not contain"),
        (nn.Conv2d, "names 'Conv2d', which Loop does not contain"),
        (nn.Linear(1, 1), "names 'Linear', which Loop does not contain"),
        ("blocks", "'blocks', a container that is never called. Name its children instead"),
        (["blocks.0", "blocks.0.1"], "both 'blocks.0' and 'blocks.0.1' inside it"),
        (3, "regions= got 3; give classes, names or modules"),
        ([], r"regions=\[\] names nothing"),
        (torch.Tensor, "give classes, names or modules"),
    ],
    ids=str,
)
def test_what_cannot_be_a_region(wanted, text):
    with pytest.raises(InvalidInput, match=text):
        find_regions(Loop([block(), block()]), wanted)

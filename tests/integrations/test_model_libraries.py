"""The registry of model libraries: an integration is imported once its library is, and all libraries are asked as one."""

import importlib
import subprocess
import sys
import types

import pytest
import torch

from retape.errors import InvalidInput
from retape.torch.model_libraries import ModelLibraries, ModelLibrary


class Fake(ModelLibrary):
    """A library that has one kind of layer, and fuses the loss of one kind of model."""

    def __init__(self):
        self.fused = []

    def recomputable_layers(self, model):
        return [module for module in model.modules() if isinstance(module, torch.nn.Linear)]

    def region_arguments(self, module, arguments, keywords):
        return super().region_arguments(module, arguments[:1], keywords)._replace(note="one argument")

    def can_fuse_loss(self, model):
        return isinstance(model, torch.nn.Linear)

    def fuse_loss(self, model, *, room_bytes, compiled):
        self.fused.append((room_bytes, compiled))


@pytest.fixture
def registry(monkeypatch):
    """A registry with a library that is not imported yet; `imported()` imports it."""
    adapter = types.ModuleType("fake_adapter")
    adapter.LIBRARY = Fake()
    monkeypatch.setitem(sys.modules, "fake_adapter", adapter)
    registry = ModelLibraries()
    registry.register("fake_library", "fake_adapter")
    registry.imported = lambda: monkeypatch.setitem(sys.modules, "fake_library", types.ModuleType("fake_library"))
    return registry


def test_a_library_that_is_not_imported_is_not_asked(registry):
    layer = torch.nn.Linear(1, 1)
    assert registry.recomputable_layers(layer) == []
    assert registry.region_arguments(layer, (1, 2), {"a": 3}) == ((1, 2), {"a": 3}, None)
    assert not registry.can_fuse_loss(layer)
    with pytest.raises(InvalidInput, match="loss of Linear cannot be computed in slices"):
        registry.fuse_loss(layer, room_bytes=1, compiled=False)


def test_a_library_that_is_imported_later_answers(registry):
    layer = torch.nn.Linear(1, 1)
    registry.imported()
    assert registry.recomputable_layers(layer) == [layer]
    assert registry.region_arguments(layer, (1, 2), {"a": 3}) == ((1,), {"a": 3}, "one argument")
    registry.fuse_loss(layer, room_bytes=8, compiled=True)
    assert sys.modules["fake_adapter"].LIBRARY.fused == [(8, True)]
    assert not registry.is_loss_fused(layer)
    with pytest.raises(InvalidInput, match="loss of ReLU cannot be computed in slices"):
        registry.fuse_loss(torch.nn.ReLU(), room_bytes=None, compiled=False)


def test_a_model_that_recomputes_its_layers_itself_is_refused_whatever_is_imported(registry):
    model = torch.nn.Linear(1, 1)
    model.is_gradient_checkpointing = True  # as models of Diffusers have it
    with pytest.raises(InvalidInput, match="recomputes every layer by itself"):
        registry.check_model(model)
    model.is_gradient_checkpointing = False
    registry.check_model(model)


def test_regions_of_other_models_import_nothing_of_hugging_face():
    code = (
        "import sys, torch, retape;"
        "layer = torch.nn.Linear(2, 2);"
        "retape.checkpoint(layer, torch.ones(1, 2), use_reentrant=False).sum().backward();"
        "found = [name for name in sys.modules if 'transformers' in name or 'huggingface' in name];"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("path", "defined_in"),
    [
        ("huggingface.enable", "switch"),
        ("huggingface.disable", "switch"),
        ("huggingface.checkpointable_layers", "switch"),
        ("huggingface.FitCallback", "trainer"),
        ("trainer.FitCallback", "trainer"),
        ("huggingface.fuse_loss", "fused_loss"),
        ("huggingface_loss.fuse_loss", "fused_loss"),
        ("huggingface_loss.unfuse_loss", "fused_loss"),
    ],
)
def test_import_paths_that_users_know(path, defined_in):
    pytest.importorskip("transformers")
    module, _, name = path.partition(".")
    found = getattr(importlib.import_module(f"retape.integrations.{module}"), name)
    assert found.__module__ == f"retape.integrations.huggingface.{defined_in}"


def test_an_unknown_name_of_the_integration_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'enabled'"):
        importlib.import_module("retape.integrations.huggingface").enabled  # noqa: B018

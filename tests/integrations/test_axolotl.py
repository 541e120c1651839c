"""The plugin for axolotl, with a fake of axolotl: its base class of plugins, and what its trainer builder calls."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from retape.errors import InvalidInput
from support.models import small_llama

transformers = pytest.importorskip("transformers")
pydantic = pytest.importorskip("pydantic")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")

NAME = "retape.integrations.axolotl"


class BasePlugin:
    """The part of axolotl's class that the plugin takes part in; the other methods do nothing there."""

    def get_input_args(self):
        return None

    def add_callbacks_post_trainer(self, cfg, trainer):
        return []


@pytest.fixture
def axolotl(monkeypatch):
    """Axolotl as far as plugins import it, and retape's module made anew."""
    for name in ("axolotl", "axolotl.integrations", "axolotl.integrations.base"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["axolotl.integrations.base"].BasePlugin = BasePlugin
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    return importlib.import_module(NAME)


def configured(plugin, **given):
    """What axolotl makes of a configuration: the classes of all plugins' fields are merged, and the result is dumped."""
    module, name = plugin.get_input_args().rsplit(".", 1)
    fields = getattr(importlib.import_module(module), name)
    merged = pydantic.create_model("AxolotlInputConfig", __base__=fields, learning_rate=(float, 1e-3))
    return SimpleNamespace(**merged(**given).model_dump())


def train_as_axolotl(plugin, cfg, folder):
    """Train as axolotl does: the trainer is made, and gets the callbacks of the plugins after that."""
    quiet = {"report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "logging_steps": 1}
    arguments = transformers.TrainingArguments(str(folder), max_steps=3, per_device_train_batch_size=4, **quiet)
    tokens = torch.randint(0, 64, (16, 24), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = transformers.Trainer(small_llama(), arguments, train_dataset=rows)
    callbacks = plugin.add_callbacks_post_trainer(cfg, trainer) if plugin else []
    for callback in callbacks:
        trainer.add_callback(callback)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, [p.detach().clone() for p in trainer.model.parameters()], callbacks


def test_the_trainer_stays_inside_the_budget_with_the_same_weights(axolotl, tmp_path):
    plugin = axolotl.RetapePlugin()
    assert isinstance(plugin, BasePlugin)
    losses, weights, (callback,) = train_as_axolotl(plugin, configured(plugin, retape_budget=0.7), tmp_path)
    assert callback.fitted.measured.peak_bytes <= callback.fitted.budget_bytes
    wanted_losses, wanted, _ = train_as_axolotl(None, None, tmp_path)
    assert losses == wanted_losses
    assert all(map(torch.equal, weights, wanted))


def test_a_configuration_without_a_budget_is_refused(axolotl):
    plugin = axolotl.RetapePlugin()
    with pytest.raises(InvalidInput, match="retape_budget: 70GiB"):
        plugin.add_callbacks_post_trainer(configured(plugin), None)
    with pytest.raises(pydantic.ValidationError, match="retape_lengths"):
        configured(plugin, retape_budget="1GiB", retape_lengths="shortest")


def test_without_axolotl_its_name_is_in_the_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "axolotl", None)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    with pytest.raises(InvalidInput, match="pip install axolotl"):
        importlib.import_module(NAME)

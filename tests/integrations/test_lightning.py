"""Lightning's Trainer with `FitCallback`: a sample of the matrix, what is logged, errors, and refusals."""

import pytest
import torch

pytest.importorskip("lightning.pytorch")
pytest.importorskip("transformers")

import lightning.pytorch as lightning
from benchmarks.trainer_cells import BF16, Cell, run_cell, state_of
from lightning.pytorch.loggers.logger import Logger
from torch import nn

from retape.errors import BudgetTooSmall, InvalidInput
from retape.integrations.lightning import FitCallback
from support.models import small_gpt2

# Warnings of Lightning, PEFT and Transformers about their own settings.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize(("tuned", "setting"), [("full", BF16)])
def test_losses_weights_peaks_and_state(tuned, setting):
    assert run_cell(Cell(trainer="lightning", tuned=tuned, setting=setting, steps=4)).outcome == "right"


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = small_gpt2(n_layer=4)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.logged = 0
        self.fails = False

    def training_step(self, batch, index):
        self.seen += 1
        loss = self.model(**batch).loss
        self.log("loss", loss)
        self.logger.log_metrics({"own": 1.0}, step=self.logged)
        self.logged += 1
        if self.fails and index == 1:
            raise RuntimeError("in the second step")
        return {"loss": loss}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Rows(Logger):
    """Keeps what is logged."""

    name, version = "rows", 0

    def __init__(self):
        super().__init__()
        self.rows = []

    def log_metrics(self, metrics, step=None):
        self.rows.append(metrics)

    def log_hyperparams(self, *arguments, **keywords):
        pass


def fit(module, folder, callback, steps=3):
    logger = Rows()
    rows = [{"input_ids": torch.arange(24) % 64, "labels": torch.arange(24) % 64} for _ in range(32)]
    trainer = lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        default_root_dir=str(folder),
        logger=logger,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
    )
    trainer.fit(module, torch.utils.data.DataLoader(rows, 8))
    return logger


def test_measured_steps_are_not_logged_and_leave_no_trace(tmp_path):
    module, callback = Module(), FitCallback(0.6, progress=False)
    logger = fit(module, tmp_path, callback)
    assert module.seen == module.logged == 3
    own = [row for row in logger.rows if "own" in row]
    assert len(own) == 3
    ours = [row for row in logger.rows if "retape/budget_bytes" in row]
    assert len(ours) == 3
    assert all(row["retape/peak_bytes"] <= row["retape/budget_bytes"] for row in ours)
    assert ours[-1]["retape/reruns"] > 0
    assert "training_step" not in vars(module)
    assert "log" not in vars(module)


def test_an_error_leaves_the_module_as_it_was(tmp_path):
    module, callback = Module(), FitCallback(0.6, progress=False)
    before, module.fails = state_of(module.model), True
    with pytest.raises(RuntimeError, match="in the second step"):
        fit(module, tmp_path, callback)
    assert state_of(module.model) == before
    assert "training_step" not in vars(module)


def test_a_budget_that_is_too_small(tmp_path):
    module = Module()
    before = state_of(module.model)
    with pytest.raises(BudgetTooSmall, match="No plan fits"):
        fit(module, tmp_path, FitCallback("300KiB", progress=False))
    assert state_of(module.model) == before


def test_manual_optimization_is_refused(tmp_path):
    module = Module()
    module.automatic_optimization = False
    with pytest.raises(InvalidInput, match=r"Module calls backward itself \(automatic_optimization = False\)"):
        fit(module, tmp_path, FitCallback(0.6, progress=False))


def test_the_longest_batch_is_not_known():
    with pytest.raises(InvalidInput, match="lengths='longest' needs the Hugging Face Trainer's data"):
        FitCallback(0.6, lengths="longest")


class Own(lightning.LightningModule):
    """Its layers are its own children."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4))
        self.head = nn.Linear(32, 4)
        self.skips = False

    def training_step(self, batch, index):
        if self.skips:
            return None
        x = batch[0]
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def own_trainer(callback):
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return lightning.Trainer(max_steps=3, accelerator="cpu", callbacks=[callback], **quiet)


LOADER = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(64, 32)), 16)


def test_a_module_whose_layers_are_its_own():
    callback, module = FitCallback(0.7, progress=False), Own()
    own_trainer(callback).fit(module, LOADER)
    assert callback.fitted.record.model == "Own"
    assert callback.fitted.measured.peak_bytes <= callback.fitted.budget_bytes


def test_a_first_step_without_a_loss_is_refused():
    module = Own()
    module.skips = True
    with pytest.raises(InvalidInput, match=r"returned NoneType, not a loss tensor, for the first batch"):
        own_trainer(FitCallback(0.7, progress=False)).fit(module, LOADER)

"""Hugging Face's Trainer with `FitCallback`: the run of a plain Trainer, bit for bit, inside a budget."""

import pytest
import torch

from retape.errors import InvalidInput
from retape.integrations.huggingface import FitCallback

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")


class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self.ids = torch.randint(0, 64, (24, 24), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, index):
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


class Losses(transformers.TrainerCallback):
    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen += [logs["loss"]] if "loss" in logs else []


def train(folder, *callbacks, **more):
    """Five steps with dropout; losses, and the weights at the end."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=4, n_head=2, bos_token_id=0, eos_token_id=0)
    model, losses = transformers.GPT2LMHeadModel(config), Losses()
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=5,
        per_device_train_batch_size=8,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        seed=3,
        **more,
    )
    transformers.Trainer(model, arguments, train_dataset=Rows(), callbacks=[losses, *callbacks]).train()
    return losses.seen, {name: value.clone() for name, value in model.state_dict().items()}, model


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_run_equals_a_plain_one(tmp_path):
    losses, weights, plain = train(tmp_path)
    callback = FitCallback(budget=0.5, progress=False)
    own_losses, own_weights, model = train(tmp_path, callback)
    assert len(losses) == 5
    assert own_losses == losses
    assert all(torch.equal(own_weights[name], weights[name]) for name in weights)
    made = callback.fitted
    assert not made.record.assignment.keeps_everything
    assert made.measured.peak_bytes <= made.record.budget_bytes
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
def test_a_model_that_recomputes_by_itself_is_refused(tmp_path):
    callback = FitCallback(budget=0.5, progress=False)
    with pytest.raises(
        InvalidInput, match=r"GPT2LMHeadModel recomputes every layer by itself .* take gradient_checkpoint"
    ):
        train(tmp_path, callback, gradient_checkpointing=True)
    assert callback.fitted is None

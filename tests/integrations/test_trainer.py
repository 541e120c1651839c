"""Hugging Face's Trainer with `FitCallback`: the run of a plain Trainer, bit for bit, inside a budget."""

import gc

import pytest
import torch
from torch import nn

import retape
from retape.errors import InvalidInput
from retape.integrations.huggingface import FitCallback
from support.fits import regions_run
from support.models import small_gpt2

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


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


def trained_gpt2():
    return small_gpt2(n_embd=32, n_layer=4)


def trainer_of(folder, *callbacks, model=None, steps=5, optimizers=(None, None), compute_loss_func=None, **more):
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=8,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        seed=3,
        **more,
    )
    return transformers.Trainer(
        trained_gpt2() if model is None else model,
        arguments,
        train_dataset=Rows(),
        callbacks=list(callbacks),
        optimizers=optimizers,
        compute_loss_func=compute_loss_func,
    )


def train(folder, *callbacks, **more):
    """Five steps with dropout; losses, and the weights at the end."""
    losses = Losses()
    trainer = trainer_of(folder, losses, *callbacks, **more)
    trainer.train()
    return losses.seen, weights_of(trainer.model), trainer.model


def weights_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def classes_of(model):
    return [type(module) for module in model.modules()]


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
    assert classes_of(model) == classes_of(plain)


def test_a_model_that_recomputes_by_itself_is_refused(tmp_path):
    callback = FitCallback(budget=0.5, progress=False)
    with pytest.raises(
        InvalidInput, match=r"GPT2LMHeadModel recomputes every layer by itself .* take gradient_checkpoint"
    ):
        train(tmp_path, callback, gradient_checkpointing=True)
    assert callback.fitted is None


class Fails(transformers.TrainerCallback):
    """Raises once, at the end of a step."""

    def __init__(self, at):
        self.at = at

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.at:
            self.at = -1
            raise RuntimeError("CUDA out of memory.")  # as accelerate knows it


def test_training_begins_again_after_an_exception(tmp_path):
    """The Trainer calls on_train_begin again, and has never called on_train_end."""
    callback = FitCallback(budget=0.5, progress=False)
    trainer = trainer_of(tmp_path, callback, Fails(1), steps=2)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train()
    first = callback.fitted
    assert type(trainer.model) is not transformers.GPT2LMHeadModel
    trainer.train()
    assert callback.fitted is not first
    assert classes_of(trainer.model) == classes_of(trained_gpt2())


@pytest.mark.parametrize("at", [1, 0])
@pytest.mark.parametrize("gone", [False, True])
@pytest.mark.parametrize("options", [retape.EXACT, retape.ALL])
def test_another_callback_takes_off_what_an_interrupted_run_has_left(tmp_path, at, gone, options):
    """A notebook's cell that was stopped and is run again: a new Trainer and a new callback, on the same model."""
    model = trained_gpt2()
    first = FitCallback(budget=0.5, progress=False, options=options)
    with pytest.raises(RuntimeError):
        train(tmp_path, first, Fails(1) if at else FailsAtOnce(), model=model, steps=2)
    assert type(model) is not transformers.GPT2LMHeadModel
    old = first.fitted
    if gone:
        del first, old
        gc.collect()
    second = FitCallback(budget=0.6, progress=False)
    trainer = trainer_of(tmp_path, second, Fails(1), model=model, steps=2)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train()
    assert regions_run(second.fitted) > 0
    if not gone and old is not None:
        old.remove()
        assert type(model) is not transformers.GPT2LMHeadModel, "the new one is not taken off with the old one"
    second.fitted.remove()
    assert classes_of(model) == classes_of(trained_gpt2())
    assert model.loss_function is trained_gpt2().loss_function


def assert_a_fit_of_ones_own_stays(folder, model):
    """A callback finds it, says what to do, and leaves it."""
    ids = Rows().ids[:8]
    fitted = retape.fit(model, {"input_ids": ids, "labels": ids}, budget=0.6, progress=False)
    with pytest.raises(InvalidInput, match=r"managed by a fit already. Call its remove\(\) first"):
        train(folder, FitCallback(budget=0.5, progress=False), model=model, steps=1)
    assert type(model) is not transformers.GPT2LMHeadModel
    fitted.remove()


def test_a_run_that_ended_is_nobodys(tmp_path):
    """A fit of the user's own is not taken for what a callback has left."""
    model = trained_gpt2()
    train(tmp_path, FitCallback(budget=0.5, progress=False), model=model, steps=1)
    gc.collect()
    assert_a_fit_of_ones_own_stays(tmp_path, model)


def test_an_interrupted_run_that_left_nothing_is_nobodys(tmp_path):
    """All of the activations fitted, so that nothing was put on the model: a fit that came later is the user's own."""
    model = trained_gpt2()
    with pytest.raises(RuntimeError, match="out of memory"):
        train(tmp_path, FitCallback(budget=1.0, progress=False), Fails(1), model=model, steps=2)
    gc.collect()
    assert classes_of(model) == classes_of(trained_gpt2())
    assert_a_fit_of_ones_own_stays(tmp_path, model)


def test_a_model_that_was_fitted_before_training_says_so(tmp_path):
    assert_a_fit_of_ones_own_stays(tmp_path, trained_gpt2())


class FailsAtOnce(transformers.TrainerCallback):
    def on_epoch_begin(self, args, state, control, **kwargs):
        raise RuntimeError("before the first batch")


def test_training_begins_again_where_there_was_no_first_batch(tmp_path):
    callback, fails = FitCallback(budget=0.5, progress=False), FailsAtOnce()
    trainer = trainer_of(tmp_path, callback, fails, steps=1)
    with pytest.raises(RuntimeError, match="before the first batch"):
        trainer.train()
    trainer.remove_callback(fails)
    trainer.train()
    assert callback.fitted is not None
    assert classes_of(trainer.model) == classes_of(trained_gpt2())


def test_a_batch_size_that_is_found_by_trying(tmp_path):
    callback = FitCallback(budget=0.5, progress=False)
    trainer = trainer_of(tmp_path, callback, Fails(1), steps=2, auto_find_batch_size=True)
    trainer.train()
    assert callback.fitted.record.rows < 8
    assert classes_of(trainer.model) == classes_of(trained_gpt2())


def cross_entropy(outputs, labels, num_items_in_batch=None):
    return nn.functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("more", [{"label_smoothing_factor": 0.1}, {"compute_loss_func": cross_entropy}])
def test_a_loss_that_the_trainer_computes_is_fitted_before_training(tmp_path, more):
    callback = FitCallback(budget=0.5, progress=False)
    trainer = trainer_of(tmp_path, callback, **more)
    with pytest.raises(InvalidInput, match=r"called GPT2LMHeadModel with input_ids.*returned no loss.*Call retape.fit"):
        trainer.train()
    assert callback.fitted is None
    assert classes_of(trainer.model) == classes_of(trained_gpt2())

    _, weights, _ = train(tmp_path, **more)
    trainer = trainer_of(tmp_path, **more)  # as the message says
    batch = {name: torch.stack([Rows()[row][name] for row in range(8)]) for name in ("input_ids", "labels")}
    fitted = retape.fit(
        trainer.model,
        batch,
        budget=0.5,
        step=lambda model, batch: trainer.compute_loss(model, dict(batch)),
        progress=False,
    )
    assert not fitted.record.assignment.keeps_everything
    before = regions_run(fitted)
    trainer.train()
    assert regions_run(fitted) > before
    fitted.remove()
    own = weights_of(trainer.model)
    assert all(torch.equal(own[name], weights[name]) for name in weights)


class Strange(torch.optim.SGD):
    """Its state cannot be told from shapes, as that of 8-bit optimizers."""

    def step(self, closure=None):
        if any(p.is_meta for group in self.param_groups for p in group["params"]):
            raise NotImplementedError("no such kernel on meta")
        return super().step(closure)


def test_an_optimizer_whose_state_has_no_known_size(tmp_path):
    def training(**options):
        model, callback = trained_gpt2(), FitCallback(budget=0.5, progress=False, **options)
        optimizer = Strange(model.parameters(), lr=0.1)
        train(tmp_path, callback, model=model, optimizers=(optimizer, None), steps=1)
        return callback.fitted

    with pytest.raises(
        InvalidInput, match=r"Strange's state is not known before its first step.*optimizer=None \(fit or FitCallback\)"
    ):
        training()
    assert not training(optimizer=None).record.assignment.keeps_everything


def test_data_parallel_is_refused(tmp_path):
    callback = FitCallback(budget=0.5, progress=False)
    trainer = trainer_of(tmp_path, callback)
    trainer.args._n_gpu = 2
    with pytest.raises(InvalidInput, match=r"GPT2LMHeadModel is copied to several GPUs by nn.DataParallel"):
        callback.on_train_begin(trainer.args, trainer.state, trainer.control, model=trainer.model)
    assert classes_of(trainer.model) == classes_of(trained_gpt2())

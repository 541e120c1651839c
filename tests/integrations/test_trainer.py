"""Hugging Face's Trainer with `FitCallback`: the run of a plain Trainer, bit for bit, inside a budget."""

import gc
import os

import pytest
import torch
from torch import nn

import retape
from retape.errors import BatchTooLarge, InvalidInput
from retape.integrations.huggingface import FitCallback
from retape.integrations.trainer_state import TUNING
from support.comparing import assert_equal
from support.models import small_gpt2

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
LONG = pytest.mark.skipif(not os.environ.get("RETAPE_LONG"), reason="takes seconds; RETAPE_LONG=1 runs it")
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
        use_cpu=True,
        disable_tqdm=True,
        seed=3,
        **{"save_strategy": "no", **more},
    )
    return transformers.Trainer(
        trained_gpt2() if model is None else model,
        arguments,
        train_dataset=Rows(),
        eval_dataset=Rows(),
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


@pytest.mark.parametrize("use_cache", [True, False])
def test_the_trainers_own_checkpointing_is_taken_over_and_put_back(tmp_path, use_cache):
    def run(*callbacks):
        model = small_gpt2(n_embd=32, n_layer=4, use_cache=use_cache)
        return train(tmp_path, *callbacks, model=model, gradient_checkpointing=True)

    losses, weights, plain = run()
    callback = FitCallback(0.6, progress=False)
    own_losses, own_weights, model = run(callback)
    assert own_losses == losses
    assert_equal(own_weights, weights)
    assert regions_run_in(callback) > 0
    assert model.is_gradient_checkpointing
    assert classes_of(model) == classes_of(plain)


def regions_run_in(callback):
    return callback.metrics()["retape/reruns"]


class Fails(transformers.TrainerCallback):
    """Raises once, at the end of a step."""

    def __init__(self, at):
        self.at = at

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.at:
            self.at = -1
            raise RuntimeError("CUDA out of memory.")  # as accelerate knows it


OVERLAID = {"compute_loss", "training_step", "_run_epoch", "log"}


def test_training_begins_again_after_an_exception(tmp_path):
    """The Trainer calls on_train_begin again, and has never called on_train_end."""
    callback = FitCallback(budget=0.5, progress=False)
    trainer = trainer_of(tmp_path, callback, Fails(1), steps=2)
    with pytest.raises(RuntimeError, match="out of memory"):
        trainer.train()
    first = callback.fitted
    assert classes_of(trainer.model) == classes_of(trained_gpt2())
    assert not OVERLAID & vars(trainer).keys()
    trainer.train()
    assert callback.fitted is not first
    assert classes_of(trainer.model) == classes_of(trained_gpt2())


@pytest.mark.parametrize("gone", [False, True])
@pytest.mark.parametrize("options", [retape.EXACT, retape.ALL])
def test_another_callback_takes_over_from_an_interrupted_run(tmp_path, gone, options):
    """A notebook's cell that was stopped and is run again: a new Trainer and a new callback, on the same model."""
    model = trained_gpt2()
    first = FitCallback(budget=0.5, progress=False, options=options)
    with pytest.raises(RuntimeError):
        train(tmp_path, first, FailsAtOnce(), model=model, steps=2, gradient_checkpointing=True)
    if gone:
        del first
        gc.collect()
    second = FitCallback(budget=0.6, progress=False)
    train(tmp_path, second, model=model, steps=2)
    assert regions_run_in(second) > 0
    assert classes_of(model) == classes_of(trained_gpt2())
    assert model.loss_function is trained_gpt2().loss_function


def assert_a_fit_of_ones_own_stays(folder, model):
    """A callback finds it, says what to do, and leaves it."""
    ids = Rows().ids[:8]
    fitted = retape.fit(model, {"input_ids": ids, "labels": ids}, budget=0.6, progress=False)
    with pytest.raises(InvalidInput, match=r"managed by a fit already, or by retape.adaptive. Call remove\(\)"):
        train(folder, FitCallback(budget=0.5, progress=False), model=model, steps=1)
    assert type(model) is not transformers.GPT2LMHeadModel
    fitted.remove()


def test_a_run_that_ended_is_nobodys(tmp_path):
    """A fit of the user's own is not taken for what a callback has left."""
    model = trained_gpt2()
    train(tmp_path, FitCallback(budget=0.5, progress=False), model=model, steps=1)
    gc.collect()
    assert_a_fit_of_ones_own_stays(tmp_path, model)


def test_an_interrupted_run_is_nobodys(tmp_path):
    """Nothing is left on the model: a fit that came later is the user's own."""
    model = trained_gpt2()
    with pytest.raises(RuntimeError, match="out of memory"):
        train(tmp_path, FitCallback(budget=0.6, progress=False), Fails(1), model=model, steps=2)
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
def test_a_loss_that_the_trainer_computes_is_the_fitted_one(tmp_path, more):
    losses, weights, _ = train(tmp_path, **more)
    callback = FitCallback(0.6, progress=False)
    own_losses, own_weights, model = train(tmp_path, callback, **more)
    assert own_losses == losses
    assert_equal(own_weights, weights)
    assert not callback.fitted.record.assignment.keeps_everything
    assert classes_of(model) == classes_of(trained_gpt2())


def test_the_log_has_budget_peak_slowdown_and_reruns(tmp_path):
    callback = FitCallback(0.6, progress=False)
    trainer = trainer_of(tmp_path, callback, steps=3)
    trainer.train()
    logged = [each for each in trainer.state.log_history if "loss" in each]
    assert len(logged) == 3
    for each in logged:
        assert each["retape/peak_bytes"] <= each["retape/budget_bytes"] == callback.fitted.budget_bytes
        assert each["retape/slowdown"] >= 1 or each["retape/reruns"] == 0
    assert logged[-1]["retape/reruns"] > logged[0]["retape/reruns"] > 0
    assert not any("retape/budget_bytes" in each for each in trainer.state.log_history if "loss" not in each)


@LONG
def test_a_budget_that_is_too_small_lets_the_trainer_find_a_smaller_batch(tmp_path):
    plain = FitCallback(0.99, progress=False)
    train(tmp_path, plain, steps=1)
    too_small = int(0.75 * plain.fitted.record.frontier.floor_bytes)
    with pytest.raises(BatchTooLarge, match=r"The budget is out of memory\. No plan fits"):
        train(tmp_path, FitCallback(too_small, progress=False), steps=1)
    callback = FitCallback(too_small, progress=False)
    trainer = trainer_of(tmp_path, callback, steps=2, auto_find_batch_size=True)
    trainer.train()
    assert callback.fitted.record.rows < 8
    assert classes_of(trainer.model) == classes_of(trained_gpt2())


def test_evaluation_saving_and_resuming(tmp_path):
    def run(folder, *callbacks, resume=None, steps=4):
        settings = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
        trainer = trainer_of(folder, *callbacks, steps=steps, eval_on_start=True, **settings)
        trainer.train(resume_from_checkpoint=resume)
        found = [each["eval_loss"] for each in trainer.state.log_history if "eval_loss" in each]
        return found, weights_of(trainer.model)

    wanted, weights = run(tmp_path / "plain")
    callback = FitCallback(0.6, progress=False)
    found, own = run(tmp_path / "fitted", callback)
    assert found == wanted
    assert_equal(own, weights)
    resumed = run(tmp_path / "fitted", FitCallback(0.6, progress=False), resume=str(tmp_path / "fitted/checkpoint-2"))[
        1
    ]
    assert_equal(resumed, weights)


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


def test_a_switch_that_is_turned_on_after_a_fit_is_logged(tmp_path, caplog):
    """A trainer with gradient_checkpointing=True turns it on when training begins, and the plan has no effect."""
    model, ids = trained_gpt2(), Rows().ids[:8]
    fitted = retape.fit(model, {"input_ids": ids, "labels": ids}, budget=0.6, progress=False)
    train(tmp_path, model=model, steps=1, gradient_checkpointing=True)
    assert (
        "GPT2Block recomputes everything by itself: gradient_checkpointing was turned on after the fit" in caplog.text
    )
    fitted.remove()


def test_large_containers_of_a_trainer_are_left_alone(tmp_path):
    """Rows in a list are data: the fit neither copies nor restores them."""
    ids = Rows().ids
    rows = [{"input_ids": ids[0], "labels": ids[0]}] * (TUNING.most_parts + 1)
    callback = FitCallback(0.6, progress=False)
    trainer = trainer_of(tmp_path, callback, steps=1)
    trainer.train_dataset = rows
    trainer.train()
    assert trainer.train_dataset is rows
    assert callback.fitted is not None

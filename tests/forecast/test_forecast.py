"""`retape.forecast`: one GPU, layouts, budgets, exports, pages, and bad input."""

import json
import subprocess
import sys
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import retape
from retape.cli.main import main
from retape.errors import BudgetTooSmall, InvalidInput, PlanFormatError
from retape.forecast.calibration.meter import TOY
from retape.forecast.calibration.run import calibrate
from retape.forecast.device import read_device, write_device
from retape.forecast.forecasting import search_layouts
from retape.forecast.known_devices import device_named, device_names, measured_device
from retape.forecast.layout import optimizer_kind
from support.blocks import MlpBlock

GIB = 2**30


class MlpModel(nn.Module):
    def __init__(self, width=1024, blocks=8):
        super().__init__()
        self.blocks = nn.ModuleList(MlpBlock(width) for _ in range(blocks))
        self.head = nn.Linear(width, 128)

    def forward(self, rows):
        for block in self.blocks:
            rows = block(rows)
        return self.head(rows).float().logsumexp(-1).mean()


@pytest.fixture(scope="module")
def model():
    with torch.device("meta"):
        return MlpModel().to(torch.bfloat16)


@pytest.fixture(scope="module")
def rows():
    return torch.empty(16384, 1024, dtype=torch.bfloat16, device="meta")


@pytest.fixture(scope="module")
def plain(model, rows):
    return retape.forecast(model, rows, device="h200", optimizer="adamw")


def test_everything_is_kept_where_it_fits(plain):
    assert plain.fits
    assert {treatment for _, treatment in plain.treatments} == {"keep"}
    assert plain.peak_bytes == plain.plain_peak_bytes
    assert plain.seconds == pytest.approx(plain.plain_seconds)
    assert 0 < plain.mfu < 1
    assert plain.floor_bytes < plain.peak_bytes


@pytest.mark.parametrize(("width", "blocks", "rows"), [(8, 2, 4), (64, 1, 8), (256, 3, 64)])
def test_the_floor_of_a_tiny_model_is_not_above_its_peak(width, blocks, rows):
    with torch.device("meta"):
        model, batch = nn.Sequential(*(nn.Linear(width, width) for _ in range(blocks))), torch.empty(rows, width)
    found = retape.forecast(model, batch, step=lambda model, batch: model(batch).sum())
    assert found.floor_bytes <= found.peak_bytes == found.plain_peak_bytes
    again = retape.forecast(model, batch, step=lambda model, batch: model(batch).sum(), budget=found.peak_bytes)
    assert again.fits
    assert again.peak_bytes == found.peak_bytes


def test_bytes_by_class(plain, model):
    weights = sum(parameter.nbytes for parameter in model.parameters())
    problem = plain.stages[0].problem
    assert problem.weight_bytes == pytest.approx(weights, rel=1e-6)
    assert problem.optimizer_bytes == pytest.approx(2 * weights, rel=1e-6)


def test_a_smaller_budget_recomputes_and_is_slower(model, rows, plain):
    budget = (plain.floor_bytes + plain.peak_bytes) // 2
    tight = retape.forecast(model, rows, device="h200", optimizer="adamw", budget=budget)
    assert tight.peak_bytes <= budget
    assert tight.seconds > plain.seconds
    assert {treatment.split()[0] for _, treatment in tight.treatments} & {"select", "recompute"}


def test_a_budget_below_the_floor_is_refused_with_the_floor(model, rows, plain):
    with pytest.raises(BudgetTooSmall, match="the smallest budget that does is") as caught:
        retape.forecast(model, rows, device="h200", optimizer="adamw", budget=plain.floor_bytes // 2)
    assert caught.value.floor_bytes == pytest.approx(plain.floor_bytes, rel=0.01)


def test_a_hugging_face_model_with_checkpointing_on_is_run_as_it_is():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=512, use_cache=False)).to(torch.bfloat16).train()
    plain = retape.forecast(model, (4, 1024))
    model.gradient_checkpointing_enable()
    found = retape.forecast(model, (4, 1024))
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert found.stages[0].problem.weight_bytes == weights == plain.stages[0].problem.weight_bytes
    assert found.peak_bytes == found.plain_peak_bytes < plain.peak_bytes
    assert found.seconds > plain.seconds


def test_the_largest_batch_fits_and_a_larger_one_does_not(model, rows, plain):
    largest = plain.largest_batch()
    assert largest > len(rows)
    again = retape.forecast(model, torch.empty(largest, 1024, dtype=torch.bfloat16, device="meta"), optimizer="adamw")
    assert again.floor_bytes == pytest.approx(plain.budget_bytes, rel=0.03)


# --- layouts ------------------------------------------------------------------------------------------------------------


def test_shards_divide_what_zero_says(model, rows):
    problems = {
        zero: retape.forecast(model, rows, mesh={"gpus": 8, "fsdp": 8, "zero": zero}, optimizer="adamw")
        .stages[0]
        .problem
        for zero in (0, 1, 2, 3)
    }
    whole = problems[0]
    assert problems[1].optimizer_bytes == whole.optimizer_bytes // 8
    assert problems[1].weight_bytes == problems[2].weight_bytes == whole.weight_bytes
    assert problems[2].gradient_bytes == whole.gradient_bytes // 8
    assert problems[3].weight_bytes == pytest.approx(whole.weight_bytes / 8, rel=0.01)


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.Linear(1024, 8 * 1024, bias=False)
        self.down = nn.Linear(8 * 1024, 1024, bias=False)

    def forward(self, rows):
        return self.down(self.experts(rows).relu())


def test_experts_are_divided_once(rows):
    with torch.device("meta"):
        model = nn.Sequential(*(Experts() for _ in range(2))).to(torch.bfloat16)
    mesh = {"gpus": 8, "fsdp": 8, "expert": 8}
    problem = retape.forecast(model, rows, mesh=mesh, step=lambda model, rows: model(rows).sum()).stages[0].problem
    each = 2 * 1024 * 8 * 1024
    assert problem.weight_bytes == 2 * (each // 8 + each // 8)
    assert problem.gradient_bytes == problem.weight_bytes


def test_tensor_parallelism_divides_activations(model, rows):
    alone = retape.forecast(model, rows).stages[0].problem.chain.stages[1]
    divided = retape.forecast(model, rows, mesh={"gpus": 8, "tensor": 8}).stages[0].problem.chain.stages[1]
    assert divided.tape_bytes == alone.tape_bytes // 8
    assert divided.forward_seconds < alone.forward_seconds


def test_pipeline_stages_hold_micro_batches_in_flight(model, rows):
    found = retape.forecast(model, rows, mesh={"gpus": 4, "pipeline": 4, "accumulate": 8})
    assert [stage.problem.in_flight for stage in found.stages] == [4, 3, 2, 1]
    assert found.stages[0].peak_bytes > found.stages[2].peak_bytes
    assert len(found.treatments) == 8
    once = max(stage.seconds for stage in found.stages)
    assert found.seconds == pytest.approx(once * (8 + 3), rel=1e-6)


def test_search_returns_the_fastest_first(model, rows):
    found = search_layouts(model, rows, gpus=4, device="h100", optimizer="adamw", global_rows=16 * len(rows))
    rates = [choice.forecast.tokens_per_second for choice in found if choice.forecast]
    assert len(rates) >= 3
    assert rates == sorted(rates, reverse=True)
    assert all(choice.reason for choice in found)


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ({"gpus": 6, "tensor": 4}, "6 GPUs cannot be divided by tensor 4"),
        ({"gpus": 8, "fsdp": 3}, "cannot be divided into groups of fsdp 3"),
        ({"gpus": 8, "zero": 4}, "ZeRO has the stages"),
        ({"gpu": 8}, "unknown keys"),
        ({"gpus": 0}, "gpus = 0"),
        ([8], "give a dict"),
        ({"gpus": 16, "pipeline": 16, "accumulate": 16}, "has 8 blocks that can be divided, fewer than 16"),
    ],
)
def test_a_mesh_that_cannot_be(model, rows, mesh, message):
    with pytest.raises(InvalidInput, match=message):
        retape.forecast(model, rows, mesh=mesh)


# --- devices ------------------------------------------------------------------------------------------------------------


def test_known_devices_say_whether_they_were_measured(model, rows):
    assert {"h100-80g", "a100-40g", "l40s", "rtx-4090", "b200", "h200", "cpu"} <= set(device_names())
    assert "never measured" in retape.forecast(model, rows, device="b200").accuracy
    assert "never measured" not in retape.forecast(model, rows, device="h200").accuracy
    several = retape.forecast(model, rows, device="h200", mesh={"gpus": 2, "fsdp": 2})
    assert several.accuracy.startswith("never measured on several GPUs")
    with pytest.raises(InvalidInput, match=r"There is no device 'h300'. Known: .*h200"):
        device_named("h300")


def test_a_device_file_is_read_back(tmp_path, model, rows):
    path = tmp_path / "own.json"
    write_device(measured_device(), path)
    assert read_device(path) == measured_device()
    assert retape.forecast(model, rows, device=path).peak_bytes == retape.forecast(model, rows).peak_bytes
    path.write_text(json.dumps({"format": "other"}))
    with pytest.raises(PlanFormatError, match="no device file"):
        read_device(path)
    with pytest.raises(InvalidInput, match="Cannot read the device file"):
        device_named(tmp_path / "missing.json")


def test_faster_devices_are_faster(model, rows):
    seconds = {name: retape.forecast(model, rows, device=name).seconds for name in ("a100-80g", "h100", "h200", "b200")}
    assert seconds["a100-80g"] > seconds["h100"] > seconds["h200"] > seconds["b200"]


# --- output -------------------------------------------------------------------------------------------------------------


def test_the_page_has_memory_by_class_and_what_to_change(model, rows, tmp_path):
    mesh = {"gpus": 8, "fsdp": 2, "pipeline": 4, "accumulate": 8}
    found = retape.forecast(model, rows, mesh=mesh, optimizer="adamw")
    found.report(tmp_path / "page.html")
    page = ElementTree.fromstring((tmp_path / "page.html").read_text().partition("\n")[2])
    titles = [head.text for head in page.iter("h2")]
    assert titles[:3] == ["Forecast", "What to change", "Peak by class"]
    assert titles[3:] == [f"Memory over a micro-batch: stage {number}" for number in range(4)]
    (changes, stages) = list(page.iter("table"))[:2]
    assert len(list(changes.iter("tr"))) == 1 + len(found.what_to_change())
    assert len(list(stages.iter("tr"))) == 1 + 4
    drawn = {path.get("class") for section in page.iter("section") for path in section.iter("path")}
    assert {"a-fixed", "a-glue", "a-gradients", "a-slots", "a-working", "g5"} <= drawn
    assert "max-width: 640px" in next(page.iter("style")).text


def test_what_to_change_forecasts_each_change(model, rows, plain):
    tight = retape.forecast(model, rows, optimizer="adamw", budget=(plain.floor_bytes + plain.peak_bytes) // 2)
    advised = {advice.what: advice for advice in tight.what_to_change()}
    kept = advised["more memory: enough to keep everything"].forecast
    assert kept.peak_bytes == plain.peak_bytes
    assert kept.seconds < tight.seconds
    assert advised["2 GPUs that share weights (FSDP)"].forecast.layout.gpus == 2
    rates = [advice.tokens_per_gpu for advice in tight.what_to_change()]
    assert rates == sorted(rates, reverse=True)
    refused = [advice.reason for advice in advised.values() if advice.forecast is None]
    assert all(reason.startswith("No plan fits in") for reason in refused)


def test_the_module_is_the_function_whatever_was_imported_first():
    code = "import retape.forecast.device, retape; assert callable(retape.forecast); assert retape.forecast.device"
    subprocess.run([sys.executable, "-c", code], check=True)


# --- the command --------------------------------------------------------------------------------------------------------

USER_FILE = """
import torch
from torch import nn

def tiny():
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)))
        return model, torch.empty(256, 64), lambda model, rows: model(rows).sum()
"""


def test_the_command_forecasts_a_users_file(tmp_path, capsys):
    (tmp_path / "own.py").write_text(USER_FILE)
    arguments = [
        f"{tmp_path}/own.py:tiny",
        "--gpu",
        "h200",
        "--report",
        f"{tmp_path}/page.html",
        "--export",
        "megatron",
    ]
    assert main(["forecast", *arguments]) == 0
    printed = capsys.readouterr().out
    assert "peak" in printed
    assert "4 x keep" in printed
    assert "--micro-batch-size 256" in printed
    assert (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpt5"], "There is no model 'gpt5'"),
        (["gpt2", "--gpu", "h300"], "There is no device 'h300'"),
        (["gpt2", "--gpus", "6", "--tp", "4"], "6 GPUs cannot be divided"),
        (["gpt2", "--gpus", "5", "--tp", "5"], "12 attention heads cannot be divided by tensor 5"),
        (["gpt2", "--optimizer", "adagrad"], "There is no optimizer 'adagrad'"),
        (["gpt2", "--seq", "0"], "whole numbers >= 1"),
        (["gpt2", "--budget", "0.5"], "needs a budget that counts everything"),
        (["gpt2", "--report", "x.pdf"], "ends in .html"),
        (["llama-405b", "--report", "/not/there/x.html"], "there is no folder '/not/there'"),
        (["llama-405b", "--export", "nemo"], "There is no export 'nemo'"),
        (["missing.py:f"], "There is no file"),
    ],
)
def test_the_command_refuses_with_one_message(arguments, message, capsys):
    assert main(["forecast", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_calibrated_device_can_be_forecast_for(tmp_path, model, rows):
    made = calibrate("cpu", name="mine", tuning=TOY)
    write_device(made, tmp_path / "mine.json")
    found = retape.forecast(model, rows, device=tmp_path / "mine.json", budget="100GiB")
    assert found.device.name == "mine"
    assert found.seconds > 0
    assert "were not compared" in found.accuracy
    with pytest.raises(InvalidInput, match="The memory of 'mine' is not known"):
        retape.forecast(model, rows, device=made)


def test_calibrate_refuses_a_device_that_is_not_there(tmp_path, capsys):
    assert main(["calibrate", str(tmp_path / "x.json"), "--device", "tpu"]) == 2
    assert "tpu" in capsys.readouterr().err
    assert main(["calibrate", str(tmp_path / "none" / "x.json")]) == 2  # before anything is measured
    assert "Cannot write the device to" in capsys.readouterr().err


@pytest.mark.parametrize("sizes", [(-1, 8), (0, 8), (8, 0)])
def test_rows_and_length_are_at_least_one(sizes):
    with pytest.raises(retape.errors.InvalidInput, match="rows and length are whole numbers >= 1"):
        retape.forecast("gpt2", sizes)


def test_a_model_with_statistics_has_a_plan():
    layers = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(6)]
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers).to("meta")
    batch = torch.empty(4, 3, 64, 64, device="meta")

    def step(model, batch):
        return model(batch).square().mean()

    whole = retape.forecast(model, batch, device="h200", step=step)
    less = retape.forecast(model, batch, device="h200", step=step, budget=(whole.floor_bytes + whole.peak_bytes) // 2)
    assert less.peak_bytes <= (whole.floor_bytes + whole.peak_bytes) // 2


def test_compiled_models_are_refused(model, rows):
    with pytest.raises(InvalidInput, match="without torch"):
        retape.forecast(torch.compile(model, backend="eager"), rows)
    with torch.device("meta"):
        blocks = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    blocks[1].compile(backend="eager")
    with pytest.raises(InvalidInput, match="without torch"):
        retape.forecast(blocks, torch.empty(4, 8, device="meta"), step=lambda model, rows: model(rows).mean())


def test_buffers_of_the_model_count(model, rows):
    class Masked(MlpModel):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.zeros(4096, 4096))

    with torch.device("meta"):
        masked = Masked().to(torch.bfloat16)
    mesh = {"gpus": 4, "fsdp": 4}
    for layout in (None, mesh):
        whole, without = (retape.forecast(each, rows, mesh=layout) for each in (masked, model))
        assert whole.peak_bytes - without.peak_bytes == masked.mask.nbytes


def test_only_trained_weights_have_states_and_gradients(rows):
    with torch.device("meta"):
        model = MlpModel().to(torch.bfloat16)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    trained = [block.up.weight.requires_grad_(True) for block in model.blocks]
    count = sum(weight.numel() for weight in trained)
    alone = retape.forecast(model, rows, optimizer="adamw").stages[0].problem
    assert (alone.optimizer_bytes, alone.gradient_bytes) == (2 * 2 * count, 2 * count)
    sharded = retape.forecast(model, rows, optimizer="adamw", mesh={"gpus": 4, "fsdp": 4}).stages[0].problem
    block = sum(parameter.nbytes for parameter in model.blocks[0].parameters())
    assert sharded.buffer_bytes == 2 * block + trained[0].nbytes


@pytest.mark.parametrize("mesh", [None, {"fsdp": 4}, {"accumulate": 4}])
def test_weights_of_two_dtypes_count_in_their_own(rows, mesh):
    with torch.device("meta"):
        model = MlpModel().to(torch.bfloat16)
    model.head.float()

    def step(model, rows):
        for block in model.blocks:
            rows = block(rows)
        return model.head(rows.float()).mean()

    parts = 4 if mesh == {"fsdp": 4} else 1
    weights = sum(parameter.nbytes for parameter in model.parameters()) // parts
    problem = retape.forecast(model, rows, step=step, mesh=mesh, optimizer="adamw").stages[0].problem
    assert problem.weight_bytes == problem.gradient_bytes == weights
    assert problem.optimizer_bytes == 2 * weights
    elements = sum(parameter.numel() for parameter in model.parameters()) // parts
    problem = retape.forecast(model, rows, step=step, mesh=mesh, optimizer="adamw-fp32").stages[0].problem
    assert (problem.gradient_bytes, problem.optimizer_bytes) == (4 * elements, 12 * elements)


def test_optimizers_of_torch_are_known():
    weights = [nn.Parameter(torch.zeros(1))]
    assert optimizer_kind(torch.optim.Adam) == optimizer_kind("adam") == optimizer_kind("adamw")
    assert optimizer_kind(torch.optim.AdamW(weights, amsgrad=True)) == optimizer_kind("adamw-amsgrad")
    assert optimizer_kind(torch.optim.Adam(weights, amsgrad=True)).states == 3
    assert optimizer_kind(torch.optim.AdamW) == optimizer_kind(torch.optim.AdamW(weights)) == optimizer_kind("adamw")
    assert optimizer_kind(torch.optim.SGD(weights, momentum=0.9)) == optimizer_kind("sgd-momentum")
    assert optimizer_kind(torch.optim.SGD(weights)) == optimizer_kind("sgd")
    with pytest.raises(InvalidInput, match="There is no optimizer 'Adagrad'"):
        optimizer_kind(torch.optim.Adagrad(weights))


def test_models_that_take_no_tokens_say_what_to_give():
    from transformers import ViTConfig, ViTForImageClassification

    vit = ViTConfig(num_hidden_layers=2, hidden_size=64, intermediate_size=64, num_attention_heads=4)
    with pytest.raises(InvalidInput, match="no language model of a ViTConfig"):
        retape.forecast(vit, {"pixel_values": (2, 3, 224, 224)})
    with torch.device("meta"):
        model = ViTForImageClassification(vit)
    with pytest.raises(InvalidInput, match="ViTForImageClassification takes pixel_values"):
        retape.forecast(model, (2, 224))
    assert retape.forecast(model, {"pixel_values": (2, 3, 224, 224), "labels": (2,)}).rows == 2


def test_configurations_of_encoder_decoder_models():
    from transformers import BartConfig, T5Config

    sizes = {"num_layers": 2, "d_model": 64, "d_ff": 64, "num_heads": 4, "d_kv": 16, "vocab_size": 128}
    t5 = T5Config(**sizes)  # which says nothing of the token that a decoder starts with
    sizes = {"d_model": 64, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 128, "encoder_layerdrop": 0.9}
    bart = BartConfig(**sizes, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4)
    for config in (t5, bart):
        found = retape.forecast(config, {"input_ids": (2, 64), "labels": (2, 32)})
        assert len(found.treatments) == 4
        assert retape.forecast(config, (2, 64)).peak_bytes > found.peak_bytes
    assert getattr(t5, "decoder_start_token_id", None) is None


@pytest.mark.parametrize("batch", [((32, 64), (32, 64)), (2, 256, 3), (2, 256.0), None, "2x256", []])
def test_a_batch_without_tensors_is_refused(model, batch):
    with pytest.raises(InvalidInput, match="as its batch; give"):
        retape.forecast(model, batch)


def test_key_value_heads_are_divided_too():
    from transformers import LlamaConfig

    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8}
    with pytest.raises(InvalidInput, match="2 key-value heads cannot be divided by tensor 4"):
        retape.forecast(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=64), (2, 64), mesh={"tensor": 4})

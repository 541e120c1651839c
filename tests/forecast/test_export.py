"""Settings for other programs: every name is one that the program reads today.

Read on 2026-11-18 in
- github.com/NVIDIA/Megatron-LM d98e8a6: megatron/training/arguments.py, and the classes whose fields become its flags:
  megatron/core/transformer/transformer_config.py (recompute_*, offload_modules, and the checks of their combinations in
  __post_init__), megatron/core/model_parallel_config.py, megatron/training/config/{training_config,common_config}.py;
- github.com/pytorch/torchtitan b5bcd76: torchtitan/config/configs.py, torchtitan/distributed/activation_checkpoint.py (the subcommands of
  ActivationCheckpointingConfig; there is no TOML any more, and no recomputation of every n-th layer);
- github.com/deepspeedai/DeepSpeed edaa722: deepspeed/runtime/activation_checkpointing/config.py, runtime/zero/config.py,
  runtime/tensor_parallel/config.py, runtime/constants.py;
- Transformers as installed: TrainingArguments is made from the settings.
"""

import json

import pytest
import torch
from torch import nn

import retape
from retape.errors import InvalidInput
from retape.forecast.export import export_settings
from retape.forecast.layout import Layout
from retape.forecast.simulation.float8 import Scaling

MEGATRON = {
    "--micro-batch-size",
    "--global-batch-size",
    "--tensor-model-parallel-size",
    "--pipeline-model-parallel-size",
    "--context-parallel-size",
    "--expert-model-parallel-size",
    "--num-virtual-stages-per-pipeline-rank",
    "--sequence-parallel",
    "--use-distributed-optimizer",
    "--use-megatron-fsdp",
    "--data-parallel-sharding-strategy",
    "--recompute-granularity",
    "--recompute-method",
    "--recompute-num-layers",
    "--recompute-modules",
    "--cpu-offloading-num-layers",
    "--fine-grained-activation-offloading",
    "--offload-modules",
    "--fp8-format",
    "--fp8-recipe",
}
TORCHTITAN = {
    "--training.num_tokens_per_microbatch_per_dp_rank",
    "--parallelism.data_parallel_replicate_degree",
    "--parallelism.data_parallel_shard_degree",
    "--parallelism.fsdp_reshard_after_forward",
    "--parallelism.tensor_parallel_degree",
    "--parallelism.context_parallel_degree",
    "--parallelism.pipeline_parallel_degree",
    "--parallelism.expert_parallel_degree",
    "--parallelism.num_pp_microbatches",
    "--parallelism.pipeline_parallel_schedule",
    "activation-checkpoint:none",
    "activation-checkpoint:selective",
    "activation-checkpoint:full",
}
DEEPSPEED = {
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "bf16",
    "zero_optimization",
    "tensor_parallel",
    "activation_checkpointing",
}
LAYOUTS = {
    "one": Layout(),
    "shards": Layout(gpus=8, fsdp=8),
    "states": Layout(gpus=8, fsdp=8, zero=1),
    "all": Layout(gpus=512, fsdp=8, tensor=8, pipeline=4, context=2, interleave=2, accumulate=8, zero=2),
}
PLANS = {
    "keep": {"keep": 16},
    "select": {"keep": 4, "select 1.3 GiB": 12},
    "offload": {"offload 514.00 MiB, hold 128.25 MiB": 15, "keep": 1},
    "offload and select": {"offload 514.00 MiB, hold 128.25 MiB": 8, "select 1.3 GiB": 8},
    "recompute": {"recompute": 8, "recompute, input dropped": 3, "select 256 KiB": 5},
}


def exported(kind, layout, plan, float8=None):
    return export_settings(kind, LAYOUTS[layout], PLANS[plan], rows=2, length=4096, float8=float8)


def flags_of(text):
    """Return the values of each flag; a comment is none."""
    words = [word for line in text.splitlines() if not line.startswith("#") for word in line.split()]
    found, name = {}, ""
    for word in words:
        if word.startswith("--") or ":" in word:
            name = word
            found[name] = []
        else:
            found[name].append(word)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("plan", PLANS)
def test_names_are_those_of_the_programs(layout, plan):
    assert set(flags_of(exported("megatron", layout, plan))) <= MEGATRON
    assert set(flags_of(exported("torchtitan", layout, plan))) <= TORCHTITAN
    assert set(json.loads(exported("deepspeed", layout, plan))) <= DEEPSPEED


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("plan", PLANS)
def test_megatron_accepts_the_combination(layout, plan):
    """The checks of TransformerConfig.__post_init__."""
    flags = flags_of(exported("megatron", layout, plan))
    granularity = flags.get("--recompute-granularity", [None])[0]
    if granularity == "full":
        assert flags["--recompute-method"] == ["block"]
        per_part = 16 // (LAYOUTS[layout].pipeline * LAYOUTS[layout].interleave)
        assert 1 <= int(flags["--recompute-num-layers"][0]) <= per_part
    if granularity == "selective":
        assert set(flags["--recompute-modules"]) <= {"core_attn", "layernorm", "mlp", "moe", "moe_act"}
        assert not {"--recompute-method", "--recompute-num-layers"} & set(flags)
    if "--cpu-offloading-num-layers" in flags:
        assert granularity is None
        assert LAYOUTS[layout].pipeline == 1
        assert int(flags["--cpu-offloading-num-layers"][0]) < 16
        assert "--fine-grained-activation-offloading" not in flags


def test_what_a_plan_becomes():
    assert "recompute" not in " ".join(flags_of(exported("megatron", "one", "keep")))
    assert flags_of(exported("megatron", "one", "offload"))["--cpu-offloading-num-layers"] == ["15"]
    assert flags_of(exported("megatron", "one", "recompute"))["--recompute-num-layers"] == ["11"]
    assert flags_of(exported("megatron", "shards", "keep"))["--data-parallel-sharding-strategy"] == [
        "optim_grads_params"
    ]
    assert "--use-megatron-fsdp" not in flags_of(exported("megatron", "states", "keep"))
    assert exported("megatron", "one", "select").startswith("# the plan: blocks kept 4, recomputed in part 12\n")
    assert exported("torchtitan", "one", "keep").endswith("activation-checkpoint:none")
    assert exported("torchtitan", "all", "select").endswith("activation-checkpoint:selective")
    assert exported("torchtitan", "all", "recompute").endswith("activation-checkpoint:full")
    assert flags_of(exported("torchtitan", "all", "keep"))["--parallelism.data_parallel_shard_degree"] == ["4"]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("layout", ["one", "shards"])
def test_hugging_face_reads_the_settings(plan, layout, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    settings = json.loads(exported("huggingface", layout, plan))
    settings["bf16"] = False  # there is no GPU here
    made = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **settings)
    treats = plan != "keep"
    if layout == "shards":
        assert made.fsdp_config["activation_checkpointing"] is treats
    else:
        assert made.gradient_checkpointing is treats


def test_blocks_that_hold_little_are_recomputed():
    """A plan near the floor must not become a selective recomputation, which would hold more."""
    with torch.device("meta"):
        layers = [
            nn.Sequential(nn.LayerNorm(256), nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(4)
        ]
        model, rows = nn.Sequential(*layers), torch.empty(8192, 256)
    whole = retape.forecast(model, rows, step=lambda model, rows: model(rows).mean())
    tight = retape.forecast(
        model, rows, step=lambda model, rows: model(rows).mean(), budget=int(1.01 * whole.floor_bytes)
    )
    assert tight.export("torchtitan").endswith("activation-checkpoint:full")
    assert whole.export("torchtitan").endswith("activation-checkpoint:none")


def test_float8_is_said_or_refused():
    flags = flags_of(exported("megatron", "one", "keep", Scaling.TENSORWISE))
    assert flags["--fp8-recipe"] == ["tensorwise"]
    assert set(flags) <= MEGATRON
    for scaling in Scaling:
        text = exported("torchtitan", "one", "keep", scaling)
        assert text.startswith("# float8: in the model's configuration, converters=[Float8LinearConverter.Config(")
        assert set(flags_of(text)) <= TORCHTITAN
    for kind, scaling in (("megatron", Scaling.ROWWISE), *(("huggingface", each) for each in Scaling)):
        with pytest.raises(InvalidInput, match=f"The settings of {kind} have no float8 with {scaling.value} scales"):
            exported(kind, "one", "keep", scaling)


def test_an_unknown_program_is_refused():
    with pytest.raises(InvalidInput, match="There is no export 'jax'"):
        exported("jax", "one", "keep")

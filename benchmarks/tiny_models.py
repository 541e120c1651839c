"""Tiny models of Transformers, built from their configs: every field that sets a size is made small by its name.

A config is made with small values of its own fields, so that what it derives from them (the kinds of its layers, the heads of a state
space) is derived again. `OVERRIDES` has what the names do not tell. Not here: fitting them (`zoo.py`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

ROWS, TOKENS, VOCABULARY, IMAGE = 2, 32, 128, 32
LAYERS, WIDTH, HEADS, INNER = 4, 64, 4, 96
MOST_PARAMETERS = 20_000_000

TASKS = {
    "causal": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "masked": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "seq2seq": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "image": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
}

# The first pattern that matches the whole name of a field sets it, unless it is smaller already.
SIZES = tuple(
    (re.compile(pattern), value)
    for pattern, value in (
        (r"(true_)?vocab_size(_per_layer_input)?|audio_vocab_size|codebook_size|.*_vocab_size", VOCABULARY),
        (r"(num_|n_)?(nextn|mtp).*layers?", 0),
        (r"first_k_dense_replace|num_dense_layers|moe_layer_start_index", 1),
        (r"num_kv_shared_layers", 2),
        (r"(num_|n_)?(hidden_|encoder_|decoder_|self_attn_|self_attends_|block_)*(layers?|blocks)(_per_block)?", LAYERS),
        (r"(text_encoder|text_decoder|speech_encoder|t2u_encoder|t2u_decoder)_layers", LAYERS),
        (r"max_position_embeddings|n_positions|max_seq(uence)?_len(gth)?|n_ctx|max_target_positions|max_source_positions", 256),
        (r"(num_|n_)?(key_value_heads|head_kv|kv_heads)|multi_query_group_num|num_key_value_groups", 2),
        (r"mamba_(n_|num_)heads", 8),
        (r"(mamba_)?d_head|mamba_headdim|mamba_head_dim", 16),
        (r"(linear_)?num_(key|value)_heads|linear_(attn_)?num_.*heads", 4),
        (r".*(num_|n_)?(attention_)?heads?(_q)?|n_head|encoder_attention_heads|decoder_attention_heads", HEADS),
        (r"(q|kv)_lora_rank|index_head_dim|o_lora_rank", 16),
        (r"qk_rope_head_dim|rotary_dim", 8),
        (r".*head_dim|d_kv|kv_channels|head_size|.*_head_dim", 16),
        (r"(num_|n_)(local_|routed_|moe_)?experts|moe_num_experts|num_zero_experts|zero_expert_num", 4),
        (r"(num_)?(experts_per_to(k|ken)|moe_topk|moe_top_k|top_k)|num_selected_experts|moe_k|router_top_k", 2),
        (r"n_group|num_expert_groups?|topk_group|n_shared_experts|num_shared_experts", 1),
        (r"(.*_)?(intermediate|ffn|ffn_hidden|ffn_inter|inner|mlp)_(size|dim|hidden_size)|d_ff|n_inner|d_inner|dim_feedforward", INNER),
        (r"encoder_ffn_dim|decoder_ffn_dim|dim_ff|feed_forward_size|intermediate_dim|moe_intermediate_size", INNER),
        (r"embedding_size|.*(hidden|embed|model)_(size|dim)|d_model|n_embd|(emb|embed)_dim|dim|d_latents|projection_dim", WIDTH),
        (r"lru_width|attention_hidden_size|hidden_channels|output_hidden_size|embedding_dim|decoder_hidden_size", WIDTH),
        (r"mamba_d_state|state_size|ssm_state_size|(mamba_)?chunk_size|mamba_chunk_size", 8),
        (r"sliding_window|attention_window|local_attention|window_size|attention_chunk_size|index_topk", 16),
        (r"image_size|img_size|input_size", IMAGE),
        (r"patch_size", 8),
        (r"num_latents|num_queries", 16),
    )
)  # fmt: skip
IDENTIFIER = re.compile(r".*_(token_)?(id|index)|.*_token_ids?")

SWIN = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 2}
STAGES = {"hidden_sizes": [16, 24, 32, 48], "depths": [2, 2, 2, 2]}
HYBRID = ["linear_attention", "linear_attention", "hybrid", "linear_attention", "linear_attention", "hybrid"]
REFORMER = {
    "axial_pos_embds": False,
    "attn_layers": ["local", "lsh", "local", "lsh"],
    "local_attn_chunk_length": 16,
    "lsh_attn_chunk_length": 16,
    "num_buckets": 2,
}

LEVIT = {"image_size": 64, "patch_size": 16, "hidden_sizes": [64, 64, 64], "num_attention_heads": [4, 4, 4]}
SPARSE = {"block_size": 4, "num_random_blocks": 1}  # so few that the attention is sparse at this length

# By class: fields that are not sizes, or sizes that must agree with others.
OVERRIDES: dict[str, dict[str, Any]] = {
    "BigBirdForCausalLM": {**SPARSE, "is_decoder": True},
    "BigBirdForMaskedLM": SPARSE,
    "BigBirdPegasusForConditionalGeneration": SPARSE,
    "BitForImageClassification": {**STAGES, "embedding_size": 16, "hidden_sizes": [32, 32, 64, 64], "num_groups": 4},
    "CTRLLMHeadModel": {"dff": INNER},
    "ConvNextForImageClassification": STAGES,
    "ConvNextV2ForImageClassification": STAGES,
    "CvtForImageClassification": {"embed_dim": [16, 24, 48], "depth": [1, 2, 3], "num_heads": [1, 3, 6]},
    "DonutSwinForImageClassification": SWIN,
    "Dots1ForCausalLM": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "EfficientNetForImageClassification": {"width_coefficient": 0.25, "depth_coefficient": 0.5, "hidden_dim": 320},
    "EsmForMaskedLM": {"vocab_size": VOCABULARY, "mask_token_id": 2, "pad_token_id": 1},
    "EsmcForMaskedLM": {"num_key_value_heads": HEADS},
    "FalconH1ForCausalLM": {"mamba_d_ssm": 128},
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 2, "n_routed_experts": 4, "topk_group": 1, "n_group": 1},
    "FocalNetForImageClassification": {"embed_dim": 16, "depths": [2, 2], "focal_levels": [2, 2], "focal_windows": [3, 3]},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 2]]},
    "Gemma3nForCausalLM": {
        "num_hidden_layers": 6,
        "intermediate_size": INNER,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "activation_sparsity_pattern": [0.0] * 6,
        "num_kv_shared_layers": 2,
        "laurel_rank": 8,
        "hidden_size_per_layer_input": 16,
    },
    "Gemma4ForCausalLM": {
        "num_hidden_layers": 6,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 16,
    },
    "GraniteMoeHybridForCausalLM": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "HieraForImageClassification": {"embed_dim": 16, "depths": [2, 2, 2, 2]},
    "HunYuanDenseV1ForCausalLM": {"head_dim": 16},
    "HunYuanMoEV1ForCausalLM": {"head_dim": 16},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"] * 2},
    "LevitForImageClassification": LEVIT,
    "LevitForImageClassificationWithTeacher": LEVIT,
    "LongcatFlashForCausalLM": {"qk_head_dim": 24},
    "Mamba2ForCausalLM": {"num_heads": 8, "n_groups": 2},
    "MinistralForCausalLM": {"head_dim": 16},
    "MobileBertForMaskedLM": {"true_hidden_size": WIDTH, "intra_bottleneck_size": WIDTH},
    "MobileViTV2ForImageClassification": {"image_size": 2 * IMAGE},
    "NemotronForCausalLM": {"num_key_value_heads": 2},
    "PerceiverForMaskedLM": {"max_position_embeddings": TOKENS},
    "PoolFormerForImageClassification": STAGES,
    "PvtForImageClassification": STAGES,
    "RegNetForImageClassification": {**STAGES, "groups_width": 8},
    "ReformerForMaskedLM": REFORMER,
    "ReformerModelWithLMHead": {**REFORMER, "is_decoder": True},
    "ResNetForImageClassification": {**STAGES, "embedding_size": 16},
    "SwinForImageClassification": SWIN,
    "Swinv2ForImageClassification": SWIN,
    "XmodForCausalLM": {"languages": ["en_XX"], "default_language": "en_XX"},
    "XmodForMaskedLM": {"languages": ["en_XX"], "default_language": "en_XX"},
    "ZambaForCausalLM": {
        "num_hidden_layers": 6,
        "layers_block_type": HYBRID,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "n_mamba_heads": 2,
        "mamba_dt_rank": 8,
        "use_mamba_kernels": False,
    },
    "Zamba2ForCausalLM": {
        "num_hidden_layers": 6,
        "layers_block_type": HYBRID,
        "n_mamba_heads": 8,
        "mamba_headdim": 16,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "hybrid_layer_ids": [2, 5],
    },
}  # fmt: skip
START_TOKENS = {"decoder_start_token_id": 0, "pad_token_id": 0}


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModel:
    """A model class of Transformers and the task that it is built for."""

    task: str
    kind: str

    @property
    def name(self) -> str:
        return f"{self.task}/{self.kind}"

    def build(self) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
        """Return the model in training mode and a batch for it, both from the current seed."""
        kind = getattr(transformers, self.kind)
        config = small_config(kind.config_class, OVERRIDES.get(self.kind, {}))
        model = kind(config).train()
        count = sum(parameter.numel() for parameter in model.parameters())
        if count > MOST_PARAMETERS:
            raise ValueError(f"{count:,} parameters are left in the small {self.kind}")
        return model, batch_for(self.task, config)


def tiny_models(tasks=tuple(TASKS)) -> list[TinyModel]:
    """Return every model class of the tasks, once for each task."""
    found = {}
    for task in tasks:
        for kinds in getattr(modeling_auto, TASKS[task]).values():
            for kind in (kinds,) if isinstance(kinds, str) else kinds:
                found.setdefault((task, kind), TinyModel(task=task, kind=kind))
    return list(found.values())


def small_config(kind: type, overrides: dict[str, Any]) -> Any:
    """Return a config of this class with small sizes."""
    fields = small_fields(kind())
    fields.update(overrides)
    config = kind(**fields)
    if config.is_encoder_decoder:
        for field, value in START_TOKENS.items():
            if getattr(config, field, None) is None:
                setattr(config, field, value)
    return config


def small_fields(config: Any) -> dict[str, Any]:
    """Return the fields of a config that differ when it is small; configs inside it as dicts."""
    found: dict[str, Any] = {}
    mapped = {name: getattr(config, name, None) for name in set(config.attribute_map) - set(vars(config))}
    own = {**vars(config), **mapped}
    for name, value in own.items():
        if isinstance(value, transformers.PretrainedConfig):
            found[name] = {**small_fields(value), "model_type": value.model_type}
        elif not name.startswith("_"):
            small = small_value(name, value)
            if small is not None and small != value:
                found[config.attribute_map.get(name, name)] = small
    heads, shared = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    if heads is not None and heads == shared:  # as many of both, as latent attention needs
        found["num_key_value_heads"] = found.get("num_attention_heads", heads)
    if "qk_rope_head_dim" in found and hasattr(config, "head_dim"):
        found["head_dim"] = found["qk_rope_head_dim"]
    found["use_cache"] = False
    return found


def small_value(name: str, value: Any) -> Any:
    """Return the small value of a field, or None where it stays."""
    if isinstance(value, bool) or value is None:
        return None
    if isinstance(value, int) and IDENTIFIER.fullmatch(name):
        return value if value < VOCABULARY else abs(hash_of(name)) % (VOCABULARY // 2) + VOCABULARY // 2
    size = next((size for pattern, size in SIZES if pattern.fullmatch(name)), None)
    if size is None:
        return None
    if isinstance(value, int):
        return min(size, value)
    if isinstance(value, (list, tuple)) and value and all(isinstance(each, int) for each in value):
        return type(value)(min(size, each) for each in value)
    return None


def hash_of(name: str) -> int:
    """Return a number that is the same in every process."""
    return sum(ord(letter) * (place + 1) for place, letter in enumerate(name))


def batch_for(task: str, config: Any) -> dict[str, torch.Tensor]:
    """Return a batch of random tokens or images with labels."""
    if task == "image":
        inner = getattr(config, "vision_config", config)
        size = getattr(inner, "image_size", IMAGE)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        pixels = torch.randn(ROWS, getattr(inner, "num_channels", 3), max(height, IMAGE), max(width, IMAGE))
        return {"pixel_values": pixels, "labels": torch.zeros(ROWS, dtype=torch.long)}
    tokens = torch.randint(3, VOCABULARY // 2, (ROWS, TOKENS))
    return {"input_ids": tokens, "labels": tokens.clone()}

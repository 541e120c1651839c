"""Models by name, and batches from shapes. Configurations are those that the models' authors published; Transformers builds them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from retape.core.errors import InvalidInput

_LLAMA: dict[str, tuple[int, int, int, int, int, bool]] = {  # layers, hidden, MLP, heads, key heads, tied
    "llama-1b": (16, 2048, 8192, 32, 8, True),
    "llama-3b": (28, 3072, 8192, 24, 8, True),
    "llama-8b": (32, 4096, 14336, 32, 8, False),
    "llama-70b": (80, 8192, 28672, 64, 8, False),
    "llama-405b": (126, 16384, 53248, 128, 8, False),
}
_GPT2 = {"gpt2": (12, 768, 12), "gpt2-medium": (24, 1024, 16), "gpt2-large": (36, 1280, 20), "gpt2-xl": (48, 1600, 25)}
_MIXTRAL = {"mixtral-8x7b": (32, 4096, 14336, 32, 8, 8)}
_WHOLE_NUMBERS = frozenset({"input_ids", "labels", "attention_mask", "position_ids", "token_type_ids"})


def model_names() -> list[str]:
    return [*_LLAMA, *_GPT2, *_MIXTRAL]


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise InvalidInput(
            "Models by name are built with Transformers: pip install 'retape[huggingface]'. Or give an nn.Module on the meta device."
        ) from error
    return transformers


def config_named(name: str, *, length: int = 4096) -> Any:
    """Return the Transformers configuration of a known model."""
    library = _transformers()
    if name in _LLAMA or name in _MIXTRAL:
        layers, hidden, mlp, heads, keys = (_LLAMA.get(name) or _MIXTRAL[name])[:5]
        sizes = {
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "intermediate_size": mlp,
            "num_attention_heads": heads,
            "num_key_value_heads": keys,
            "max_position_embeddings": max(8192, length),
            "use_cache": False,
        }
        if name in _MIXTRAL:
            return library.MixtralConfig(**sizes, vocab_size=32000, num_local_experts=_MIXTRAL[name][5])
        return library.LlamaConfig(**sizes, vocab_size=128256, tie_word_embeddings=_LLAMA[name][5])
    if name in _GPT2:
        layers, hidden, heads = _GPT2[name]
        positions = max(1024, length)
        return library.GPT2Config(n_layer=layers, n_embd=hidden, n_head=heads, n_positions=positions, use_cache=False)
    raise InvalidInput(
        f"There is no model {name!r}. Known: {', '.join(model_names())}; or give FILE.py:FUNCTION, which returns (model, batch)."
    )


def model_from(given: Any, *, length: int = 4096, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Return a model on the meta device, from a module, a Transformers configuration, or the name of a known model."""
    from retape.forecast.simulation.tracing import on_meta

    if isinstance(given, nn.Module):
        return on_meta(given)
    config = config_named(given, length=length) if isinstance(given, str) else given
    if not hasattr(config, "model_type"):
        raise InvalidInput(
            f"forecast() got a {type(given).__name__} as its model; give an nn.Module, a Transformers configuration or a name."
        )
    config = _trainable(config)
    kind = "AutoModelForSeq2SeqLM" if _encodes(config) else "AutoModelForCausalLM"
    try:
        with torch.device("meta"):
            model: nn.Module = getattr(_transformers(), kind).from_config(config)
    except ValueError as error:
        raise InvalidInput(
            f"Transformers has no language model of a {type(config).__name__}. Build the model that you train on the meta device, and give "
            "that: with torch.device('meta'): model = ..."
        ) from error
    return model.to(dtype).train()


def _encodes(config: Any) -> bool:
    return bool(getattr(config, "is_encoder_decoder", False))


def _trainable(config: Any) -> Any:
    """Return a copy of a configuration for a training step: without a cache, and with the tokens that an encoder-decoder model fills in."""
    made = copy.deepcopy(config)
    made.use_cache = False
    for name in ("pad_token_id", "decoder_start_token_id") if _encodes(made) else ():
        if getattr(made, name, None) is None:
            setattr(made, name, 0)
    return made


def batch_from(spec: Any, model: nn.Module) -> Any:
    """Return a batch on the meta device: tensors as they are, shapes as tensors.

    A pair of whole numbers is the rows and the length of a language model's batch.
    """
    if isinstance(spec, tuple) and len(spec) == 2 and all(isinstance(size, int) for size in spec):
        if min(spec) < 1:
            raise InvalidInput(f"forecast() got {spec} as its batch; rows and length are whole numbers >= 1.")
        wanted = getattr(model, "main_input_name", "input_ids")
        if wanted != "input_ids":
            raise InvalidInput(
                f"(rows, length) is a batch of tokens, and {type(model).__name__} takes {wanted}. Give shapes by name, such as "
                f"{{{wanted!r}: (8, ...)}}."
            )
        ids = torch.empty(spec, dtype=torch.long, device="meta")
        return {"input_ids": ids, "labels": ids}
    if isinstance(spec, Mapping):
        return {name: _leaf(name, value, model) for name, value in spec.items()}
    if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(spec)):
        return spec
    raise InvalidInput(
        f"forecast() got {spec!r:.60} as its batch; give (rows, length), a dict of shapes or tensors, or tensors."
    )


def _leaf(name: str, value: Any, model: nn.Module) -> Any:
    if not isinstance(value, (tuple, list, torch.Size)) or not all(isinstance(size, int) for size in value):
        return value
    first = next(iter(model.parameters()), None)
    dtype = torch.long if name in _WHOLE_NUMBERS or first is None else first.dtype
    return torch.empty(tuple(value), dtype=dtype, device="meta")

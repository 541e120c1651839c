"""The models of the benchmark: seven makes, each with sizes for a CPU and for one GPU. Random weights, made-up data, no dropout.

The methods are in `peers.py` and `own.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from retape.torch.planning.discover import find_regions

TINY = "tiny"  # sizes that only a test takes


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model with its batch; `blocks` is what peers wrap, `row` the list of them where they are called one after the other."""

    name: str
    sizes: dict[str, int]
    seed: int
    device: torch.device
    model: nn.Module
    batch: Any
    step: Callable[[nn.Module, Any], Tensor]
    blocks: tuple[nn.Module, ...]
    row: tuple[nn.Module, str] | None
    causal: bool = False

    @property
    def about(self) -> dict[str, Any]:
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        dtype = str(next(self.model.parameters()).dtype).removeprefix("torch.")
        return {"model": self.name, "sizes": self.sizes, "parameters": parameters, "dtype": dtype, "dropout": 0.0}


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


# --- transformers -------------------------------------------------------------------------------------------------

SIZES: dict[str, dict[str, dict[str, int]]] = {
    "llama": {
        "cpu": {"layers": 8, "hidden": 256, "mlp": 704, "vocabulary": 4096, "rows": 2, "tokens": 256},
        "cuda": {"layers": 16, "hidden": 2048, "mlp": 5632, "vocabulary": 32000, "rows": 8, "tokens": 4096},
        TINY: {"layers": 4, "hidden": 32, "mlp": 64, "vocabulary": 64, "rows": 2, "tokens": 16},
    },
    "gpt2": {
        "cpu": {"layers": 8, "hidden": 256, "mlp": 1024, "vocabulary": 4096, "rows": 2, "tokens": 256},
        "cuda": {"layers": 24, "hidden": 1024, "mlp": 4096, "vocabulary": 50257, "rows": 16, "tokens": 1024},
        TINY: {"layers": 4, "hidden": 32, "mlp": 64, "vocabulary": 64, "rows": 2, "tokens": 16},
    },
    "bert": {
        "cpu": {"layers": 8, "hidden": 256, "mlp": 1024, "vocabulary": 4096, "rows": 4, "tokens": 128},
        "cuda": {"layers": 24, "hidden": 1024, "mlp": 4096, "vocabulary": 30522, "rows": 32, "tokens": 512},
        TINY: {"layers": 4, "hidden": 32, "mlp": 64, "vocabulary": 64, "rows": 2, "tokens": 16},
    },
    "vit": {
        "cpu": {"layers": 8, "hidden": 192, "mlp": 768, "classes": 100, "rows": 6, "image": 160, "patch": 16},
        "cuda": {"layers": 24, "hidden": 1024, "mlp": 4096, "classes": 1000, "rows": 128, "image": 224, "patch": 16},
        TINY: {"layers": 4, "hidden": 32, "mlp": 64, "classes": 4, "rows": 2, "image": 16, "patch": 4},
    },
    "mixtral": {
        "cpu": {"layers": 6, "hidden": 192, "mlp": 512, "experts": 4, "vocabulary": 4096, "rows": 2, "tokens": 256},
        "cuda": {
            "layers": 12,
            "hidden": 1024,
            "mlp": 3584,
            "experts": 8,
            "vocabulary": 32000,
            "rows": 8,
            "tokens": 2048,
        },
        TINY: {"layers": 3, "hidden": 32, "mlp": 64, "experts": 4, "vocabulary": 64, "rows": 2, "tokens": 16},
    },
    "resnet": {
        "cpu": {"width": 32, "depth": 3, "classes": 100, "rows": 4, "image": 96},
        "cuda": {"width": 64, "depth": 4, "classes": 1000, "rows": 128, "image": 224},
        TINY: {"width": 8, "depth": 2, "classes": 4, "rows": 2, "image": 16},
    },
    "unet": {
        "cpu": {"width": 16, "levels": 3, "rows": 2, "image": 160},
        "cuda": {"width": 64, "levels": 4, "rows": 16, "image": 256},
        TINY: {"width": 4, "levels": 2, "rows": 2, "image": 16},
    },
}
ALIASES = {"llama-1b": "llama"}  # the GPU's Llama by the name that it is known by


def _tokens(sizes: dict[str, int]) -> Tensor:
    return torch.randint(0, sizes["vocabulary"], (sizes["rows"], sizes["tokens"]))


def _decoder(sizes: dict[str, int]) -> dict[str, Any]:
    heads = max(1, sizes["hidden"] // (128 if sizes["hidden"] >= 1024 else 32))
    return {
        "hidden_size": sizes["hidden"],
        "intermediate_size": sizes["mlp"],
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": sizes["vocabulary"],
        "max_position_embeddings": sizes["tokens"],
        "use_cache": False,
    }


def _llama(sizes: dict[str, int]) -> tuple[nn.Module, Any]:
    ids = _tokens(sizes)
    return hf.LlamaForCausalLM(hf.LlamaConfig(**_decoder(sizes))), {"input_ids": ids, "labels": ids}


def _mixtral(sizes: dict[str, int]) -> tuple[nn.Module, Any]:
    ids = _tokens(sizes)
    config = hf.MixtralConfig(**_decoder(sizes), num_local_experts=sizes["experts"], num_experts_per_tok=2)
    return hf.MixtralForCausalLM(config), {"input_ids": ids, "labels": ids}


def _gpt2(sizes: dict[str, int]) -> tuple[nn.Module, Any]:
    config = hf.GPT2Config(
        n_layer=sizes["layers"],
        n_embd=sizes["hidden"],
        n_inner=sizes["mlp"],
        n_head=max(1, sizes["hidden"] // (64 if sizes["hidden"] >= 1024 else 32)),
        n_positions=sizes["tokens"],
        vocab_size=sizes["vocabulary"],
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    ids = _tokens(sizes)
    return hf.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


def _encoder(sizes: dict[str, int]) -> dict[str, Any]:
    return {
        "hidden_size": sizes["hidden"],
        "intermediate_size": sizes["mlp"],
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": max(1, sizes["hidden"] // (64 if sizes["hidden"] >= 1024 else 32)),
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }


def _bert(sizes: dict[str, int]) -> tuple[nn.Module, Any]:
    ids = _tokens(sizes)
    mask = torch.ones_like(ids)
    mask[:, -sizes["tokens"] // 8 :] = 0  # padding
    config = hf.BertConfig(
        **_encoder(sizes), vocab_size=sizes["vocabulary"], max_position_embeddings=sizes["tokens"], use_cache=False
    )
    return hf.BertForMaskedLM(config), {"input_ids": ids, "attention_mask": mask, "labels": ids}


def _vit(sizes: dict[str, int]) -> tuple[nn.Module, Any]:
    config = hf.ViTConfig(
        **_encoder(sizes), image_size=sizes["image"], patch_size=sizes["patch"], num_labels=sizes["classes"]
    )
    images = torch.randn(sizes["rows"], 3, sizes["image"], sizes["image"])
    labels = torch.randint(0, sizes["classes"], (sizes["rows"],))
    return hf.ViTForImageClassification(config), {"pixel_values": images, "labels": labels}


# --- convolutions -------------------------------------------------------------------------------------------------


class Bottleneck(nn.Module):
    """ResNet's: narrow, convolve, widen, with BatchNorm and a shortcut."""

    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(inside, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, 4 * width, 1, bias=False),
            nn.BatchNorm2d(4 * width),
        )
        same = inside == 4 * width and stride == 1
        self.shortcut = (
            None
            if same
            else nn.Sequential(nn.Conv2d(inside, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.layers(x) + (x if self.shortcut is None else self.shortcut(x)), inplace=True)


class ResNet(nn.Module):
    """Four widths of `depth` bottlenecks each."""

    def __init__(self, width: int, depth: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)
        )
        self.blocks, inside = nn.ModuleList(), width
        for level in range(4):
            for number in range(depth):
                outside = width << level
                self.blocks.append(Bottleneck(inside, outside, 2 if number == 0 and level else 1))
                inside = 4 * outside
        self.head = nn.Linear(inside, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(self.stem(images), 3, 2, 1)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class DoubleConvolution(nn.Module):
    """Two convolutions with norms, as at every level of a U-Net."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(inside, outside, 3, padding=1),
            nn.GroupNorm(4, outside),
            nn.SiLU(),
            nn.Conv2d(outside, outside, 3, padding=1),
            nn.GroupNorm(4, outside),
            nn.SiLU(),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class UNet(nn.Module):
    """Down and up again, with a skip at every level: blocks that are no chain."""

    def __init__(self, width: int, levels: int) -> None:
        super().__init__()
        widths = [width << level for level in range(levels + 1)]
        self.down = nn.ModuleList(DoubleConvolution(a, b) for a, b in zip([3, *widths[:-1]], widths, strict=True))
        self.up = nn.ModuleList(
            DoubleConvolution(widths[level + 1] + widths[level], widths[level]) for level in reversed(range(levels))
        )
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = [self.down[0](x)]
        for block in self.down[1:]:
            skips.append(block(F.max_pool2d(skips[-1], 2)))
        x = skips.pop()
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2), skips.pop()], 1))
        return self.out(x)


def _resnet(sizes: dict[str, int]) -> tuple[nn.Module, Any]:
    images = torch.randn(sizes["rows"], 3, sizes["image"], sizes["image"])
    labels = torch.randint(0, sizes["classes"], (sizes["rows"],))
    return ResNet(sizes["width"], sizes["depth"], sizes["classes"]), (images, labels)


def _unet(sizes: dict[str, int]) -> tuple[nn.Module, Any]:
    return UNet(sizes["width"], sizes["levels"]), torch.randn(sizes["rows"], 3, sizes["image"], sizes["image"])


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images).float(), labels)


def square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).float().square().mean()


# --- making them --------------------------------------------------------------------------------------------------

_MAKERS: dict[str, tuple[Callable[[dict[str, int]], tuple[nn.Module, Any]], Callable[[nn.Module, Any], Tensor]]] = {
    "llama": (_llama, own_loss),
    "gpt2": (_gpt2, own_loss),
    "bert": (_bert, own_loss),
    "vit": (_vit, own_loss),
    "mixtral": (_mixtral, own_loss),
    "resnet": (_resnet, classify),
    "unet": (_unet, square),
}
_CAUSAL = ("llama", "gpt2", "mixtral")


def make(name: str, device: torch.device, seed: int = 0, scale: str | None = None) -> Case:
    """A model and its batch on a device: bf16 on a GPU, float32 on a CPU. Gradients are resident from here on."""
    kind = ALIASES.get(name, name)
    sizes = SIZES[kind][scale or device.type]
    maker, step = _MAKERS[kind]
    torch.manual_seed(seed)
    with device:  # a billion random numbers take a while on a host
        model, batch = maker(sizes)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = model.to(device=device, dtype=dtype).train()
    blocks = tuple(find_regions(model).values())
    case = Case(
        name=name,
        sizes=sizes,
        seed=seed,
        device=device,
        model=model,
        batch=_moved(batch, device, dtype),
        step=step,
        blocks=blocks,
        row=_row_of(model, blocks),
        causal=kind in _CAUSAL,
    )
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return case


def _moved(batch: Any, device: torch.device, dtype: torch.dtype) -> Any:
    if isinstance(batch, dict):
        return {name: _moved(value, device, dtype) for name, value in batch.items()}
    if isinstance(batch, tuple):
        return tuple(_moved(value, device, dtype) for value in batch)
    return batch.to(device=device, dtype=dtype if batch.is_floating_point() else batch.dtype)


def _row_of(model: nn.Module, blocks: tuple[nn.Module, ...]) -> tuple[nn.Module, str] | None:
    """The list that holds all blocks in the order of their calls, by who owns it."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.ModuleList) and tuple(child) == blocks:
                return parent, name
    return None

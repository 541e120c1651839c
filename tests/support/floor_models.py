"""Twelve models whose memory is not only in repeated blocks, each with the modules that a person would wrap by hand.

A case is a model, a batch, a step and `by_hand`: ways to wrap it, each a regular expression for the names of the modules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn
from torch.utils.checkpoint import checkpoint

from support.blocks import square
from support.models import UNet, tokens


@dataclass(frozen=True, kw_only=True)
class FloorCase:
    """A model with a batch, its step, and the ways to wrap its modules by hand."""

    model: nn.Module
    batch: Any
    by_hand: tuple[str, ...]
    step: Any = None


@contextmanager
def wrapped_by_hand(model: nn.Module, names: str) -> Iterator[None]:
    """Run every module whose whole name matches under `torch.utils.checkpoint`."""
    wrapped = {module for name, module in model.named_modules() if re.fullmatch(names, name)}
    assert wrapped, names
    for module in wrapped:
        module.forward = partial(checkpoint, module.forward, use_reentrant=False)
    try:
        yield
    finally:
        for module in wrapped:
            del module.forward


# --- plain modules ------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Attention of queries to a context, with a residual and a feed-forward part."""

    def __init__(self, width, inside, heads=2):
        super().__init__()
        self.norm, self.context_norm = nn.LayerNorm(width), nn.LayerNorm(inside)
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(inside, 2 * width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.heads = heads

    def _split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x, context):
        keys, values = self.key_value(self.context_norm(context)).chunk(2, -1)
        queries = self.query(self.norm(x))
        found = F.scaled_dot_product_attention(*map(self._split, (queries, keys, values)))
        x = x + found.transpose(1, 2).flatten(-2)
        return x + self.feed_forward(x)


class Perceiver(nn.Module):
    """One cross-attention to a long input that is called in each of ten rounds, with two self-attentions between."""

    def __init__(self, width=32, inside=16, rounds=10):
        super().__init__()
        self.latents = nn.Parameter(torch.randn(16, width))
        self.cross = Attention(width, inside)
        self.blocks = nn.ModuleList(Attention(width, width) for _ in range(2))
        self.head = nn.Linear(width, 4)
        self.rounds = rounds

    def forward(self, x):
        latents = self.latents.expand(len(x), -1, -1)
        for _ in range(self.rounds):
            latents = self.cross(latents, x)
            for block in self.blocks:
                latents = block(latents, latents)
        return self.head(latents.mean(1))


def perceiver():
    model, batch = Perceiver(), torch.randn(4, 512, 16)
    return FloorCase(model=model, batch=batch, step=square, by_hand=(r"cross|blocks\.\d+",))


class ConvNeXtBlock(nn.Module):
    """A ConvNeXt block that is skipped for some rows of the batch (stochastic depth)."""

    def __init__(self, width, drop):
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = drop

    def forward(self, x):
        inner = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        inner = self.narrow(F.gelu(self.wide(inner))).permute(0, 3, 1, 2)
        if self.training and self.drop:
            inner = inner * torch.bernoulli(torch.full((len(x), 1, 1, 1), 1 - self.drop)) / (1 - self.drop)
        return x + inner


class ConvNeXt(nn.Module):
    """Stages of ConvNeXt blocks, with a stem and downsampling layers between them."""

    def __init__(self, widths=(12, 24, 48), depth=2):
        super().__init__()
        self.stem = nn.Conv2d(3, widths[0], 2, 2)
        stages = []
        for number, width in enumerate(widths):
            below = widths[max(0, number - 1)]
            down = (
                nn.Identity() if number == 0 else nn.Sequential(nn.GroupNorm(1, below), nn.Conv2d(below, width, 2, 2))
            )
            stages.append(nn.Sequential(down, *(ConvNeXtBlock(width, 0.2) for _ in range(depth))))
        self.stages = nn.ModuleList(stages)
        self.head = nn.Linear(widths[-1], 4)

    def forward(self, x):
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return self.head(x.mean((2, 3)))


def convnext():
    return FloorCase(
        model=ConvNeXt(),
        batch=torch.randn(4, 3, 32, 32),
        step=square,
        by_hand=(r"stages\.\d+\.\d+", r"stages\.\d+", r"stages\.\d+\.0|stages\.\d+\.\d+\..*"),
    )


def unet():
    return FloorCase(
        model=UNet(),
        batch=torch.randn(2, 3, 48, 48),
        step=square,
        by_hand=(r"(down|up)\d|middle", r".*\.layers\.\d+"),
    )


class RecurrentTransformer(nn.Module):
    """A recurrent encoder before attention layers, and a recurrent layer with a wide head after them."""

    def __init__(self, width=32, vocabulary=64):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.encoder = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 64, dropout=0.1, batch_first=True) for _ in range(3)
        )
        self.decoder = nn.GRU(width, width, batch_first=True)
        self.head = nn.Sequential(nn.Linear(width, 4 * width), nn.Tanh(), nn.Linear(4 * width, vocabulary))

    def forward(self, ids):
        x, _ = self.encoder(self.embed(ids))
        for layer in self.layers:
            x = layer(x)
        x, _ = self.decoder(x)
        return self.head(x)


def next_token(model, ids):
    return F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def recurrent_transformer():
    return FloorCase(
        model=RecurrentTransformer(),
        batch=tokens(64, 8, 24),
        step=next_token,
        by_hand=(r"encoder|decoder|head|layers\.\d+",),
    )


class Messages(nn.Module):
    """One round of messages along the edges of a graph; the edges have features of their own."""

    def __init__(self, width):
        super().__init__()
        self.edge = nn.Sequential(nn.Linear(3 * width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
        self.node = nn.Sequential(nn.Linear(2 * width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))

    def forward(self, nodes, edges, ends):
        edges = edges + self.edge(torch.cat([nodes[ends[0]], nodes[ends[1]], edges], -1))
        summed = torch.zeros_like(nodes).index_add(0, ends[1], edges)
        return nodes + self.node(torch.cat([nodes, summed], -1)), edges


class GraphNet(nn.Module):
    """An irregular model: encoders of nodes and edges, one tied and two different rounds of messages, and a pairwise readout."""

    def __init__(self, width=16):
        super().__init__()
        self.node_encoder = nn.Sequential(nn.Linear(4, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))
        self.edge_encoder = nn.Sequential(nn.Linear(2, 4 * width), nn.SiLU(), nn.Linear(4 * width, width))
        self.tied = Messages(width)
        self.first, self.last = Messages(width), Messages(width)
        self.mixer = nn.Bilinear(width, width, width)
        self.readout = nn.Sequential(nn.Linear(2 * width, 4 * width), nn.SiLU(), nn.Linear(4 * width, 1))

    def forward(self, graph):
        nodes, edges = self.node_encoder(graph["nodes"]), self.edge_encoder(graph["edges"])
        ends = graph["ends"]
        nodes, edges = self.first(nodes, edges, ends)
        for _ in range(4):
            nodes, edges = self.tied(nodes, edges, ends)
        nodes = nodes + self.mixer(nodes, nodes)
        nodes, edges = self.last(nodes, edges, ends)
        return self.readout(torch.cat([nodes[ends[0]], nodes[ends[1]]], -1))


def whole_graph(model, graph):
    return model(graph).square().mean()


def graph_network():
    graph = {"nodes": torch.randn(64, 4), "edges": torch.randn(1024, 2), "ends": torch.randint(0, 64, (2, 1024))}
    return FloorCase(
        model=GraphNet(),
        batch=graph,
        step=whole_graph,
        by_hand=(
            r"node_encoder|edge_encoder|tied|first|last|mixer|readout",
            r"node_encoder|edge_encoder|(tied|first|last)\.(node|edge)|mixer|readout",
        ),
    )


# --- models of Transformers ---------------------------------------------------------------------------------------------


def albert():
    config = hf.AlbertConfig(
        vocab_size=64,
        embedding_size=16,
        hidden_size=32,
        num_hidden_layers=6,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    ids = tokens(64, 8, 48)
    return FloorCase(
        model=hf.AlbertForMaskedLM(config),
        batch={"input_ids": ids, "labels": ids},
        by_hand=(r"albert\.embeddings|.*\.albert_layers\.\d+|predictions",),
    )


def t5():
    config = hf.T5Config(
        vocab_size=64, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, decoder_start_token_id=0, pad_token_id=0
    )
    return FloorCase(
        model=hf.T5ForConditionalGeneration(config),
        batch={"input_ids": tokens(64, 8, 48), "labels": tokens(64, 8, 32)},
        by_hand=(r".*\.block\.\d+", r".*\.block\.\d+\.layer\.\d+"),
    )


def bart():
    config = hf.BartConfig(
        vocab_size=64,
        d_model=32,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        max_position_embeddings=64,
    )
    return FloorCase(
        model=hf.BartForConditionalGeneration(config),
        batch={"input_ids": tokens(64, 8, 48), "labels": tokens(64, 8, 32)},
        by_hand=(r".*\.layers\.\d+",),
    )


def whisper():
    config = hf.WhisperConfig(
        vocab_size=64,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=64,
        decoder_ffn_dim=64,
        num_mel_bins=16,
        max_source_positions=64,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )
    return FloorCase(
        model=hf.WhisperForConditionalGeneration(config),
        batch={"input_features": torch.randn(4, 16, 128), "labels": tokens(64, 4, 24)},
        by_hand=(r".*\.layers\.\d+", r".*\.layers\.\d+|.*\.conv\d"),
    )


def swin():
    config = hf.SwinConfig(
        image_size=64, patch_size=4, embed_dim=16, depths=[2, 2], num_heads=[2, 2], window_size=4, num_labels=4
    )
    return FloorCase(
        model=hf.SwinForImageClassification(config),
        batch={"pixel_values": torch.randn(2, 3, 64, 64), "labels": torch.randint(0, 4, (2,))},
        by_hand=(r".*\.blocks\.\d+|.*\.downsample|swin\.embeddings", r"swin\.embeddings|.*\.encoder\.layers\.\d+"),
    )


def mamba():
    config = hf.MambaConfig(
        vocab_size=64, hidden_size=16, state_size=4, num_hidden_layers=3, expand=2, conv_kernel=3, time_step_rank=2
    )
    ids = tokens(64, 4, 24)
    return FloorCase(
        model=hf.MambaForCausalLM(config),
        batch={"input_ids": ids, "labels": ids},
        by_hand=(r".*\.layers\.\d+",),
    )


def mixtral():
    config = hf.MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    ids = tokens(64, 8, 48)
    return FloorCase(
        model=hf.MixtralForCausalLM(config),
        batch={"input_ids": ids, "labels": ids},
        by_hand=(r".*\.layers\.\d+", r".*\.layers\.\d+\.(self_attn|mlp)"),
    )


FLOOR_MODELS = {
    maker.__name__: maker
    for maker in (
        perceiver,
        albert,
        t5,
        bart,
        whisper,
        swin,
        convnext,
        unet,
        recurrent_transformer,
        mamba,
        mixtral,
        graph_network,
    )
}


def make(name: str) -> FloorCase:
    """Return a case, seeded, in training mode and without key-value caches, which `torch.utils.checkpoint` does not support."""
    torch.manual_seed(0)
    case = FLOOR_MODELS[name]()
    case.model.train()
    for module in case.model.modules():
        if isinstance(module, hf.PreTrainedModel):
            module.config.use_cache = False
    return case

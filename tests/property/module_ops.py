"""Ops that stock modules do, and ops on what a block holds: buffers, counters, containers, tied and parametrized weights."""

# ruff: noqa: PLW0108 - a lambda puts off the ops before the last one, too

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import retape

from .layout_ops import pick
from .ops import ROWS, WIDTH, wide


@wide(
    rnn=lambda: nn.RNN(WIDTH, WIDTH, batch_first=True),
    rnn_time=lambda: nn.RNN(WIDTH, WIDTH, 2, dropout=0.2, nonlinearity="relu"),
    gru=lambda: nn.GRU(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True),
    lstm=lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True),
    cell=lambda: nn.GRUCell(WIDTH, WIDTH),
)
def recurrent(block, number, a):
    def cells():
        h = a[:, 0]
        rows = []
        for row in a.unbind(1):
            h = block.cell(row, h)
            rows.append(h)
        return torch.stack(rows, 1)

    return pick(
        number,
        lambda: block.rnn(a)[0] * a,
        lambda: block.rnn_time(a)[0],
        lambda: block.gru(a)[0].exp(),
        lambda: block.lstm(a)[0] * block.lstm(a)[1][0].sum(0).unsqueeze(1),
        cells,
        lambda: block.rnn(a.transpose(0, 1).contiguous().transpose(0, 1))[0],
    )


@wide(
    mha=lambda: nn.MultiheadAttention(WIDTH, 2, batch_first=True),
    mha_drop=lambda: nn.MultiheadAttention(WIDTH, 2, dropout=0.2),
    layer=lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.1, batch_first=True),
)
def attending(block, number, a, b):
    drop = 0.2 if block.training else 0.0

    def heads(t):
        return t.view(*t.shape[:2], 2, -1).transpose(1, 2)

    return pick(
        number,
        lambda: block.mha(a, b, b, need_weights=False)[0],
        lambda: block.mha(a, b, a)[0] * block.mha(a, a, a)[1].mean(-1, keepdim=True),
        lambda: block.mha_drop(a, a, b, need_weights=True)[0],
        lambda: block.layer(a),
        lambda: (
            F.scaled_dot_product_attention(*map(heads, map(torch.Tensor.contiguous, (a, b, a))))
            .transpose(1, 2)
            .reshape(a.shape)
        ),
        lambda: F.scaled_dot_product_attention(a, b, b, dropout_p=drop),
        lambda: F.scaled_dot_product_attention(a, b, b, attn_mask=(a @ b.mT).detach() > 0, is_causal=False).nan_to_num(
            0.0
        ),
    )


@wide(
    instance=lambda: nn.InstanceNorm1d(ROWS, affine=True, track_running_stats=True),
    batch=lambda: nn.BatchNorm1d(ROWS, momentum=None),
    batch2=lambda: nn.BatchNorm2d(2),
    batch_plain=lambda: nn.BatchNorm1d(ROWS, track_running_stats=False),
    group=lambda: nn.GroupNorm(2, ROWS),
    rms=lambda: nn.RMSNorm(WIDTH),
)
def norms(block, number, a):
    return pick(
        number,
        lambda: block.instance(a),
        lambda: block.batch(a) * a,
        lambda: block.batch2(a.reshape(-1, 2, 4, 4)).reshape(a.shape),
        lambda: block.batch_plain(a).sin(),
        lambda: block.group(a.mT.contiguous().mT),
        lambda: block.rms(a).tanh(),
        lambda: F.instance_norm(a) + F.local_response_norm(a, 2),
        lambda: block.batch(block.batch(a)),
        lambda: F.layer_norm(a, a.shape[1:]) * a,
    )


@wide(
    table=lambda: nn.Embedding(10, WIDTH, max_norm=1.0),
    plain_table=lambda: nn.Embedding(10, WIDTH, padding_idx=2, scale_grad_by_freq=True),
    bag=lambda: nn.EmbeddingBag(10, WIDTH, mode="mean"),
)
def embeddings(block, number, a):
    index = (a.detach().abs() * 3).long().remainder(10)[..., 0]
    return pick(
        number,
        lambda: block.table(index) * a,
        lambda: block.plain_table(index).sin() + a,
        lambda: block.bag(index).unsqueeze(1) * a,
        lambda: F.embedding(index, block.plain_table.weight.tanh()) * a,
        lambda: F.linear(block.plain_table(index), block.plain_table.weight).softmax(-1)[..., :WIDTH] * a,
    )


def spectral(width=WIDTH):
    return parametrizations.spectral_norm(nn.Linear(width, width))


def weight_normed():
    return parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))


class _Symmetric(nn.Module):
    def forward(self, x):
        return x.triu() + x.triu(1).mT


def symmetric():
    made = nn.Linear(WIDTH, WIDTH)
    parametrize.register_parametrization(made, "weight", _Symmetric())
    return made


@wide(weighted=weight_normed, spectral=spectral, symmetric=symmetric)
def parametrized(block, number, a):
    return pick(
        number,
        lambda: block.weighted(a).tanh(),
        lambda: block.spectral(a),
        lambda: block.symmetric(a) * a,
        lambda: block.symmetric(block.weighted(a)),
    )


@wide()
def tied(block, number, a):
    w = block.linear.weight
    return pick(
        number,
        lambda: F.linear(block.linear(a).tanh(), w.t()),
        lambda: F.linear(F.linear(a, w), w).sigmoid(),
        lambda: block.linear(block.linear(a)),
        lambda: F.linear(a, w.detach() + w.mean()),
    )


@wide(
    total=lambda: torch.zeros(()),
    seen=lambda: torch.zeros(WIDTH),
    steps=lambda: torch.zeros((), dtype=torch.int64),
)
def counters(block, number, a):
    """Buffers that the forward reads and writes, in place, bound anew, or by a scatter."""
    with torch.no_grad():
        pick(
            number,
            lambda: block.total.add_(a.detach().mean()),
            lambda: block.seen.copy_(a.detach().mean((0, 1))),
            lambda: block.steps.add_(1),
            lambda: setattr(block, "total", block.total * 0.5 + a.detach().abs().mean()),
            lambda: block.seen.lerp_(a.detach().amax((0, 1)), 0.25),
            lambda: block.seen[1:3].fill_(float(block.steps)),
        )
    return a * (1 + block.total.tanh()) + block.seen.sin() * block.steps


@wide()
def containers(block, number, a):
    """Lists, dicts and attributes of the block that the forward reads and appends to."""

    def appended():
        block.past.append(a.detach().mean(0))
        return a * torch.stack(block.past[-3:]).mean(0)

    def filled():
        block.notes[f"step {len(block.notes)}"] = a.detach().amax()
        return a * sum(block.notes.values())

    def counted():
        block.calls += 1
        return a * (1 + block.calls % 4)

    def replaced():
        previous, block.last = block.last, a.detach().mean()
        return a.sin() + previous

    def through_attribute():
        block.side = a.sin()
        return a * block.side

    def popped():
        block.past.append(a.detach().sum())
        return a * block.past.pop().tanh()

    return pick(number, appended, filled, counted, replaced, through_attribute, popped)


@wide()
def inner_checkpoint(block, number, a):
    def body(x):
        return block.linear(F.dropout(x.exp(), 0.2, block.training)).tanh()

    inner = torch.utils.checkpoint.checkpoint
    return pick(
        number,
        lambda: inner(body, a, use_reentrant=False),
        lambda: retape.checkpoint(body, a),
        lambda: inner(body, inner(body, a, use_reentrant=False), use_reentrant=False),
        lambda: retape.checkpoint(lambda x: retape.checkpoint(body, x) * x, a),
        lambda: retape.checkpoint(body, a, check="values"),
        lambda: retape.checkpoint_sequential([body, body, partial(torch.mul, a)], 2, a),
    )


@wide()
def flags(block, number, a):
    """Parts of a forward under other modes and flags."""

    def without_gradient():
        with torch.no_grad():
            t = block.linear(a).tanh()
        return a * t

    def with_gradient_inside():
        with torch.no_grad():
            t = a.exp()
            with torch.enable_grad():
                u = a.sin()
        return u * t

    def in_double():
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            t = torch.ones(WIDTH) * 0.5
        finally:
            torch.set_default_dtype(before)
        return (a * t).float()

    def in_inference():
        with torch.inference_mode():
            t = a.exp()
        return a * float(t.mean())

    def in_evaluation():
        was = block.training
        block.eval()
        out = block.dropout(block.batch_norm(a))
        block.train(was)
        return out * a

    return pick(number, without_gradient, with_gradient_inside, in_double, in_inference, in_evaluation)

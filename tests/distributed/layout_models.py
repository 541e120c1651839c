"""Models of the layouts in layouts.py: a small transformer, one whose attention is a ring over the ranks, one with experts on each rank."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import _functional_collectives as collectives

WIDTH, HEADS, WORDS = 16, 4, 32


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x):
        batch, length, _ = x.shape
        heads = (each(x).view(batch, length, -1, WIDTH // HEADS).transpose(1, 2) for each in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.o(mixed.transpose(1, 2).reshape(batch, length, -1))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class TransformerBlock(nn.Module):
    """Runs its body as `call` says: plainly, or as a region."""

    def __init__(self, attention=Attention, mlp=Mlp):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn, self.mlp = attention(), mlp()
        self.call = None

    def forward(self, x):
        return self.body(x) if self.call is None else self.call(self.body, x, use_reentrant=False)

    def body(self, x):
        x = x + self.attn(self.n1(x))
        return x + self.mlp(self.n2(x))


class Transformer(nn.Module):
    def __init__(self, blocks=3, **parts):
        super().__init__()
        self.emb = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(TransformerBlock(**parts) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids):
        x = self.emb(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss(model, ids):
    return F.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())


# --- context parallelism: each rank has a part of the sequence --------------------------------------------------------


class _Shift(torch.autograd.Function):
    """Sends a tensor to the next rank of the ring; backward sends its gradient the other way."""

    @staticmethod
    def forward(ctx, tensor):
        return _exchanged(tensor, 1)

    @staticmethod
    def backward(ctx, gradient):
        return _exchanged(gradient, -1)


def _exchanged(tensor, step):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    tensor = tensor.contiguous()
    got = torch.empty_like(tensor)
    sent = dist.isend(tensor, (rank + step) % ranks)
    dist.irecv(got, (rank - step) % ranks).wait()
    sent.wait()
    return got


class RingAttention(Attention):
    """Attends to the keys of every rank, which go round in a ring; the softmax is put together from the parts."""

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        scores, values = [], []
        for turn in range(dist.get_world_size()):
            if turn:
                k, v = _Shift.apply(k), _Shift.apply(v)
            scores.append(q @ k.transpose(1, 2))
            values.append(v)
        return self.o(torch.cat(scores, -1).softmax(-1) @ torch.cat(values, 1))


# --- expert parallelism: one expert on each rank ------------------------------------------------------------------------


class ExpertParallelMlp(nn.Module):
    """Sends each row to the rank of its expert and back, with as many rows for each; routing is a decision."""

    def __init__(self):
        super().__init__()
        self.router, self.expert = nn.Linear(WIDTH, dist.get_world_size()), Mlp()

    def forward(self, x):
        rows = x.flatten(0, 1)
        weights = self.router(rows).softmax(-1)
        chosen = weights.argmax(-1).argsort(stable=True)  # the same number of rows to each rank
        sent = collectives.all_to_all_single_autograd(rows[chosen], None, None, dist.group.WORLD)
        back = collectives.all_to_all_single_autograd(self.expert(sent), None, None, dist.group.WORLD)
        out = torch.zeros_like(rows).index_copy(0, chosen, back)
        return (out * weights.max(-1, keepdim=True).values).view_as(x)

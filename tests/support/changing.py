"""Models whose steps change: lengths, trees, experts, depth; each with a few batches that differ, and a step."""

import torch
import torch.nn.functional as F
from torch import nn

from support.comparing import parameter_gradients


class Layer(nn.Module):
    """Attention and an MLP with dropout."""

    def __init__(self, width):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm, self.mlp = nn.LayerNorm(width), nn.Sequential(nn.Linear(width, 2 * width), nn.GELU())
        self.down, self.drop = nn.Linear(2 * width, width), nn.Dropout(0.2)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v))
        return x + self.drop(self.down(self.mlp(x)))


class Language(nn.Module):
    """A language model; its batches are of different length."""

    def __init__(self, layers=6, width=32):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, width), nn.Linear(width, 50)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())

    @staticmethod
    def batches():
        return [torch.randint(0, 50, (2, length)) for length in (24, 96, 48)]


class TreeCell(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mix, self.out = nn.Linear(2 * width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, left, right):
        return torch.tanh(self.out(torch.relu(self.mix(torch.cat([left, right], -1))))) + 0.5 * (left + right)


class Tree(nn.Module):
    """A binary tree over leaves: each level has cells of its own, and a cell takes two outputs of others."""

    def __init__(self, width=16):
        super().__init__()
        self.leaf = nn.Linear(8, width)
        self.cells = nn.ModuleList(TreeCell(width) for _ in range(4))

    def forward(self, leaves, shape):
        return self.walk([self.leaf(leaf) for leaf in leaves], shape, 0).square().mean()

    def walk(self, leaves, shape, level):
        if isinstance(shape, int):
            return leaves[shape]
        left, right = (self.walk(leaves, part, level + 1) for part in shape)
        return self.cells[level](left, right)

    @staticmethod
    def batches():
        shapes = [((0, 1), (2, 3)), ((((0, 1), 2), 3), ((4, 5), (6, 7))), (0, (1, (2, 3)))]
        return [(torch.randn(8, 160, 8), shape) for shape in shapes]


class Experts(nn.Module):
    """Tokens go where a router sends them: each expert sees another number every time."""

    def __init__(self, width, count=3):
        super().__init__()
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, width)) for _ in range(count)
        )

    def forward(self, x):
        weights = self.router(x).softmax(-1)
        chosen = weights.argmax(-1)
        out = x
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(-1)
            out = out.index_add(0, rows, expert(x[rows]) * weights[rows, number : number + 1])
        return out


class Mixture(nn.Module):
    def __init__(self, layers=5, width=32):
        super().__init__()
        self.layers = nn.ModuleList(Experts(width) for _ in range(layers))
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()

    @staticmethod
    def batches():
        return [torch.randn(rows, 32) for rows in (60, 160, 100)]


class Depth(nn.Module):
    """Runs its two cells as often as the data say."""

    def __init__(self, width=24):
        super().__init__()
        self.cells = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width)) for _ in range(2)
        )

    def forward(self, x, most):
        steps = 0
        while steps < most and (steps < 2 or float(x.detach().abs().mean()) < 2.0):
            x = x + self.cells[steps % 2](x)
            steps += 1
        return x.square().mean()

    @staticmethod
    def batches():
        return [(torch.randn(160, 24) * 0.1, most) for most in (4, 20, 12)]


MODELS = (Language, Tree, Mixture, Depth)


def call_on(model, batch):
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def step(model, batch, seed=0):
    """One step from the same random state; gradients start from zero, and stay where they are."""
    model.zero_grad(set_to_none=False)
    torch.manual_seed(seed)
    loss = call_on(model, batch)
    loss.backward()
    return loss.detach()


gradients = parameter_gradients

"""Train a small transformer with every block in a region, and check that only its memory changes.

    python examples/checkpoint_a_transformer.py

Each block is called through `retape.checkpoint`: the tensors that autograd saves in it are discarded and recomputed in the
backward pass. `retape.verify` compares every gradient, buffer and random stream with plain autograd, bit for bit.
The bytes are those of a step above weights and gradients, measured by `retape.measure`.
"""

import torch
from torch import nn
from torch.nn import functional as F

import retape

VOCABULARY, WIDTH, HEADS, BLOCKS, BATCH, TOKENS = 256, 96, 4, 8, 4, 128


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.queries_keys_values, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x):
        split = self.queries_keys_values(self.before_attention(x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = split.transpose(1, 3).unbind(2)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x))


class Model(nn.Module):
    def __init__(self, *, managed):
        super().__init__()
        self.managed = managed
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = retape.checkpoint(block, x) if self.managed else block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def losses_and_peak(*, managed, steps=3):
    torch.manual_seed(0)
    model = Model(managed=managed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.randint(VOCABULARY, (BATCH, TOKENS + 1))
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    found = retape.measure(lambda: model(tokens).backward())
    return losses, found.peak_bytes - found.base_bytes


def main():
    torch.set_num_threads(1)  # the tensors are too small for several threads
    torch.manual_seed(0)
    found = retape.verify(Model(managed=True), torch.randint(VOCABULARY, (BATCH, TOKENS + 1)))
    print(found)
    assert found.equal

    plain, plain_peak = losses_and_peak(managed=False)
    managed, managed_peak = losses_and_peak(managed=True)
    print(f"losses, plain    {plain}   peak {plain_peak / 2**20:6.1f} MiB")
    print(f"losses, managed  {managed}   peak {managed_peak / 2**20:6.1f} MiB")
    assert managed == plain
    assert managed_peak < 0.5 * plain_peak
    print(f"The same three losses to the last bit, in {managed_peak / plain_peak:.0%} of the bytes.")


if __name__ == "__main__":
    main()

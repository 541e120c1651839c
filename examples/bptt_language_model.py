"""Train a character model by backpropagation through 600 steps, with the memory of about 30 steps.

    python examples/bptt_language_model.py

The text is a stream of digits, in lines of seven in rising order. `retape.scan` runs a GRU over the whole stream and
sums the loss, so that neither the states nor the outputs of all steps are held. The gradients are those of the
plain loop, bit for bit; the bytes are measured by `retape.measure`.
"""

import operator
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F

import retape

STEPS, BATCH, WIDTH, SYMBOLS, EPOCHS = 600, 8, 32, 11, 3
SEPARATOR = 10


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, WIDTH)
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, SYMBOLS)

    def step(self, state, symbols):
        """Return the next state, and the loss of predicting the next character."""
        here, following = symbols
        state = self.cell(self.embed(here), state)
        return state, F.cross_entropy(self.head(state), following)

    def loss_by_scan(self, text):
        _, loss = retape.scan(
            self.step, torch.zeros(BATCH, WIDTH), (text[:-1], text[1:]), snapshots=10, reduce=operator.add
        )
        return loss / STEPS

    def loss_plainly(self, text):
        state, total = torch.zeros(BATCH, WIDTH), None
        for symbols in pairwise(text):
            state, loss = self.step(state, symbols)
            total = loss if total is None else total + loss
        return total / STEPS


def stream(generator):
    """Return lines of seven digits in ascending order, so that characters can be predicted."""
    lines = torch.randint(0, 10, (STEPS // 8 + 2, BATCH, 7), generator=generator).sort(dim=-1).values
    ends = torch.full((len(lines), BATCH, 1), SEPARATOR)
    return torch.cat([lines, ends], dim=-1).transpose(0, 1).reshape(BATCH, -1)[:, : STEPS + 1].T.contiguous()


def gradients_and_peak(model, loss):
    """Return the gradients of a step, and its peak bytes above those before it."""

    def step():
        model.zero_grad(set_to_none=False)
        loss().backward()

    found = retape.measure(step)
    return [parameter.grad.clone() for parameter in model.parameters()], found.peak_bytes - found.base_bytes


def main():
    torch.set_num_threads(1)  # the tensors are too small for several threads
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    model = Model()
    text = stream(generator)

    plain, plain_peak = gradients_and_peak(model, lambda: model.loss_plainly(text))
    ours, our_peak = gradients_and_peak(model, lambda: model.loss_by_scan(text))
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
    print(f"peak, plain  {plain_peak / 2**20:6.2f} MiB")
    print(f"peak, scan   {our_peak / 2**20:6.2f} MiB")
    assert our_peak < 0.1 * plain_peak

    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for epoch in range(EPOCHS):
        optimizer.zero_grad()
        loss = model.loss_by_scan(stream(generator))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        print(f"epoch {epoch}: loss {losses[-1]:.4f}")
    assert losses[-1] < losses[0]
    print(f"The same gradients to the last bit through {STEPS} steps, in less than a tenth of the bytes.")


if __name__ == "__main__":
    main()

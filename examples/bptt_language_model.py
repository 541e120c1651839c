"""Train a character model by backpropagation through 600 steps, in the memory of a few dozen.

    python examples/bptt_language_model.py

The text is a stream of digits, in lines of seven in rising order. `retape.scan` carries the state of a GRU over the whole stream and
adds up the loss on the way, so that neither the states nor the outputs of all steps are ever held. The gradients are those of the
plain loop, bit for bit; the bytes are counted at every op.
"""

import operator
import weakref
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

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
        """One character: the next state, and the loss of guessing the character that follows."""
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
    """Lines of seven digits in rising order, so that every character says something of the next."""
    lines = torch.randint(0, 10, (STEPS // 8 + 2, BATCH, 7), generator=generator).sort(dim=-1).values
    ends = torch.full((len(lines), BATCH, 1), SEPARATOR)
    return torch.cat([lines, ends], dim=-1).transpose(0, 1).reshape(BATCH, -1)[:, : STEPS + 1].T.contiguous()


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made inside it took at once."""

    def __init__(self):
        super().__init__()
        self._known, self._live, self.peak = set(), 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self._enter(tensor.untyped_storage())
        return out

    def _enter(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self._live += size
            self.peak = max(self.peak, self._live)
            weakref.finalize(storage, self._leave, key, size)

    def _leave(self, key, size):
        self._known.discard(key)
        self._live -= size


def gradients_and_peak(model, loss):
    model.zero_grad()
    with LiveBytes() as bytes_now:
        loss().backward()
    return [parameter.grad.clone() for parameter in model.parameters()], bytes_now.peak


def main():
    torch.set_num_threads(1)  # the tensors are too small to share out
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

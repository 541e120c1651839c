"""One step that is only measured: it runs, and everything is put back as if it had not."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
from torch import Tensor

from retape.torch.capture import ambient, rng
from retape.torch.loops.body import Body
from retape.torch.loops.plan import Sizes
from retape.torch.loops.side_state import Hidden
from retape.torch.loops.state import Spec, State, storage_bytes
from retape.torch.loops.tape import Tape


class Probe(NamedTuple):
    """What a step takes and what it gives."""

    sizes: Sizes
    tape: Tape
    after: State
    y_spec: Spec | None


def probe(body: Body, hidden: Hidden, initial: State, generators: list[Any]) -> Probe:
    """Run the first step once. `body` is one of its own: nothing is recorded in that of the loop."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with ambient.RestoredAmbient(ambient.capture(), rng.capture(generators)):
        start = time.perf_counter()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            tape, after = body.tape(initial, 0, 1)
        seconds = time.perf_counter() - start
    elsewhere = [value for _, value in hidden.unchanged()]
    elsewhere += [leaf for leaf in (*initial.leaves, *body.xs.leaves) if isinstance(leaf, Tensor)]
    known = {tensor.untyped_storage()._cdata for tensor in elsewhere if tensor.layout is torch.strided}
    outputs = [leaf for leaf in (*tape.carry_out, *tape.steps[0].ys) if isinstance(leaf, Tensor)]
    own = [t for t in (*saved, *outputs) if t.layout is not torch.strided or t.untyped_storage()._cdata not in known]
    hidden.after_step()
    hidden.rewind()
    return Probe(Sizes(max(initial.nbytes, after.nbytes), storage_bytes(own), seconds), tape, after, body.y_spec)

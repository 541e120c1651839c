"""Positions of random streams: reading one is not seen as access to a tensor's memory."""

import torch

from retape.torch.capture.host_access import Exposure
from retape.torch.capture.rng import GeneratorStream


class DeviceGenerator:
    """A generator whose state is known only through `get_state`, as that of a GPU is."""

    device = torch.device("cuda", 0)

    def __init__(self):
        self.state = torch.arange(16, dtype=torch.uint8)

    def get_state(self):
        return self.state.clone()

    def set_state(self, state):
        self.state = state.clone()


def test_the_state_of_a_device_generator_is_read_unseen():
    stream, seen = GeneratorStream(DeviceGenerator()), []
    with Exposure(seen.append):
        before = stream.peek()
        stream.generator.state += 1
        moved = stream.peek()
        stream.seek(before)
    assert not seen
    assert before != moved
    assert stream.peek() == before == bytes(range(16))

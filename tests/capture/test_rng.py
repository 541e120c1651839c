"""Positions of random streams: reading one is not seen as access to a tensor's memory."""

import torch

from retape.torch.capture.host_access import Exposure
from retape.torch.capture.rng import GeneratorStream, SharedPositions


class DeviceGenerator:
    """A generator whose state is known only through `get_state`, as that of a GPU is."""

    device = torch.device("cuda", 0)

    def __init__(self):
        self.state = torch.arange(16, dtype=torch.uint8)
        self.reads = 0

    def get_state(self):
        self.reads += 1
        return self.state.clone()

    def position(self):
        """The first byte, as a GPU's generator has its offset."""
        return int(self.state[0])

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


def test_the_state_of_a_device_generator_is_read_once_until_it_moves():
    generator = DeviceGenerator()
    stream = GeneratorStream(generator, generator.position)
    before = stream.peek()
    assert stream.peek() is before
    assert stream.is_at(before)
    assert generator.reads == 1
    generator.state += 1
    assert not stream.is_at(before)
    stream.seek(before)
    assert stream.peek() == before
    assert stream.is_at(before)


def test_streams_of_devices_share_one_record_until_one_moves():
    generator, shared = DeviceGenerator(), SharedPositions()
    stream = GeneratorStream(generator, generator.position)
    shared.use((0,), [stream])
    first = shared.record()
    assert first[0][-1] is stream
    assert first[1][-1] == bytes(range(16))
    assert shared.last[:2] == (shared.look(), first)
    kept, tokens = shared.last[2]
    assert kept == shared.of_torch == (first[0][0], stream)
    assert tokens == [first[1][0], first[1][-1]]
    generator.state += 1
    assert shared.last[0] != shared.look()
    torch.rand(1)
    second = shared.record()
    assert [one == other for one, other in zip(first[1], second[1], strict=True)] == [False, True, True, False]

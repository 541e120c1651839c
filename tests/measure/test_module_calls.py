"""Regions that are chosen by the bytes that each call of a module saves in one forward."""

import torch
from torch import nn

import retape
from retape.torch.measure.module_calls import recorded_calls, regions_by_bytes
from retape.torch.measure.sequential_slices import region_named
from support.comparing import hook_count


def mlp(width=32):
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def chosen(model, batch, *, region_bytes=0):
    tree = recorded_calls(model, batch, lambda: model(batch).square().mean())
    return list(regions_by_bytes(model, tree, region_bytes=region_bytes, tolerance=0.005))


class Rounds(nn.Module):
    """One block, called in each of several rounds, between an encoder and a head."""

    def __init__(self):
        super().__init__()
        self.encoder, self.block, self.head = mlp(), mlp(), mlp()

    def forward(self, x):
        x = self.encoder(x)
        for _ in range(6):
            x = x + self.block(x).sigmoid()
        return self.head(x)


class Shared(nn.Module):
    """A part that is called inside a block, and by itself."""

    def __init__(self):
        super().__init__()
        self.block = mlp()
        self.part = self.block[0]

    def forward(self, x):
        return self.block(x).sum() + self.part(x).tanh()


class TakesGradients(nn.Module):
    def __init__(self):
        super().__init__()
        self.energy = mlp()

    def forward(self, x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]


def test_a_module_that_is_called_repeatedly_with_what_is_around_it():
    names = chosen(Rounds(), torch.randn(64, 32))
    assert {name.partition(".")[0] for name in names} == {"encoder", "block", "head"}


def test_no_region_is_called_inside_another():
    names = chosen(Shared(), torch.randn(64, 32))
    assert "block" not in names or "block.0" not in names


def test_a_forward_that_takes_gradients_is_recorded_too():
    tree = recorded_calls(model := TakesGradients(), batch := torch.randn(64, 32), lambda: model(batch).sum())
    assert {call.name for call in tree.root.calls()} == {"energy", "energy.0", "energy.1", "energy.2"}


def test_nothing_is_inside_a_compiled_module():
    model = nn.Sequential(mlp(), mlp())
    model[0].compile(backend="eager")
    tree = recorded_calls(model, batch := torch.randn(64, 32), lambda: model(batch).sum())
    assert {call.name for call in tree.root.calls()} == {"0", "1", "1.0", "1.1", "1.2"}


def test_modules_that_save_next_to_nothing_are_no_regions():
    assert chosen(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), torch.randn(1, 2), region_bytes=8192) == []
    assert chosen(nn.Linear(2, 2), torch.randn(1, 2)) == []


def test_the_model_keeps_no_hooks():
    model = Rounds()
    chosen(model, torch.randn(8, 32))
    assert not any(map(hook_count, model.modules()))


class Checkpointed(nn.Module):
    """A function that is given to `retape.checkpoint` by the model, and by one of its blocks."""

    def __init__(self):
        super().__init__()
        self.block, self.last = CheckpointingBlock(), mlp()

    def forward(self, x):
        return self.last(retape.checkpoint(torch.sin, self.block(x).exp()))


class CheckpointingBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = mlp()

    def forward(self, x):
        return retape.checkpoint(lambda x: self.mlp(x).tanh(), x)


def test_checkpoint_calls_are_recorded_with_what_they_save_and_not_chosen_by_name():
    model, batch = Checkpointed(), torch.randn(64, 32)
    tree = recorded_calls(model, batch, lambda: model(batch).sum())
    calls = [call for call in tree.root.calls() if call.is_checkpoint]
    assert [sum(1 for _ in call.saved()) > 0 for call in calls] == [True, True]
    assert not any(call.is_divisible for call in calls)
    assert set(chosen(model, batch)) <= dict(model.named_modules()).keys()
    assert not any("mlp" in name for name in chosen(model, batch))


def test_layers_that_work_in_place_are_in_a_slice_with_the_one_before():
    layers = [nn.Linear(32, 32), nn.ReLU(inplace=True), nn.Dropout(0.1, inplace=True), nn.Linear(32, 32), nn.GELU()]
    tree = recorded_calls(model := nn.Sequential(*layers), batch := torch.randn(64, 32), lambda: model(batch).sum())
    names = [event.name for event in tree.root.events if not isinstance(event, int)]
    assert names == ["[0:3]", "3", "4"]
    assert [type(part) for part in region_named(model, "[0:3]")] == [nn.Linear, nn.ReLU, nn.Dropout]


def test_a_container_with_a_forward_of_its_own_has_no_slices():
    class Twice(nn.Sequential):
        def forward(self, x):
            return super().forward(super().forward(x))

    model, batch = Twice(nn.Linear(32, 32), nn.ReLU(inplace=True)), torch.randn(64, 32)
    tree = recorded_calls(model, batch, lambda: model(batch).sum())
    assert not any(call.is_slice for call in tree.root.calls())

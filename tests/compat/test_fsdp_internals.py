"""Canaries for the private names of FSDP2, in one process with a group of its own."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import retape
from retape.torch.compat import fsdp_internals, internals
from retape.torch.measure.sandbox import sandboxed


@pytest.fixture
def sharded(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0])
    yield fully_shard(model)
    dist.destroy_process_group()


def test_state_module():
    import torch.distributed._composable_state as composable

    assert composable.__name__ == fsdp_internals.STATE_MODULE
    assert hasattr(composable, "_module_state_mapping")


def test_what_is_sharded(sharded):
    assert fsdp_internals.in_use()
    assert [fsdp_internals.is_sharded(module) for module in (sharded, *sharded)] == [True, True, False]
    assert len(list(fsdp_internals.parameters())) >= 4
    assert not fsdp_internals.is_sharded(nn.Linear(2, 2))
    assert not fsdp_internals.wraps_first_version(sharded)


def test_gradients_that_are_not_reduced(sharded):
    rows = torch.randn(2, 4)
    sharded.set_requires_gradient_sync(False)
    assert fsdp_internals.keeps_unsharded_gradients(sharded)
    assert not fsdp_internals.has_unsharded_gradients(sharded)
    sharded(rows).sum().backward()
    assert fsdp_internals.has_unsharded_gradients(sharded)
    sharded.set_requires_gradient_sync(True)
    assert fsdp_internals.keeps_unsharded_gradients(sharded)
    fsdp_internals.set_unsharded_gradients(sharded, zero=False)
    assert not fsdp_internals.keeps_unsharded_gradients(sharded)
    fsdp_internals.set_unsharded_gradients(sharded, zero=True)
    assert fsdp_internals.has_unsharded_gradients(sharded)
    sharded(rows).sum().backward()  # reduces them
    assert not fsdp_internals.has_unsharded_gradients(sharded)
    assert (
        fsdp_internals.unsharded_gradient_bytes(sharded, torch.device("cpu")) == 0
    )  # a shard is the whole on one rank


def test_synchronised(sharded):
    sharded.set_requires_gradient_sync(False)
    with fsdp_internals.synchronised(sharded):
        assert not fsdp_internals.keeps_unsharded_gradients(sharded)
    assert fsdp_internals.keeps_unsharded_gradients(sharded)


def test_reading_memory_leaves_a_storage_resizable():
    octets = torch.arange(8, dtype=torch.uint8)
    assert bytes(internals.memory_of(octets)) == bytes(range(8))
    octets.untyped_storage().resize_(0)


def test_weights_that_are_freed_after_a_forward(sharded):
    assert fsdp_internals.freed_after_forward(sharded[1]) is None
    assert fsdp_internals.freed_after_forward(sharded[0]) is True
    fsdp_internals.free_after_forward(sharded[0], False)
    assert fsdp_internals.freed_after_forward(sharded[0]) is False
    sharded(torch.randn(2, 4))
    assert all(weight.untyped_storage().nbytes() for weight in fsdp_internals.gathered_weights(sharded[0]))
    fsdp_internals.free_gathered(sharded)
    assert not any(weight.untyped_storage().nbytes() for weight in fsdp_internals.gathered_weights(sharded[0]))
    fsdp_internals.free_after_forward(sharded[0], True)
    assert fsdp_internals.freed_after_forward(sharded[0]) is True


def test_weights_that_a_forward_has_left_are_freed_outside_of_forward_and_backward(sharded):
    def are_there():
        return all(weight.untyped_storage().nbytes() for weight in fsdp_internals.gathered_weights(sharded[0]))

    def free_inside(*unused):
        fsdp_internals.free_left(sharded[0])
        assert are_there()

    fsdp_internals.free_after_forward(sharded[0], False)
    sharded[0].register_forward_pre_hook(free_inside)
    sharded(torch.randn(2, 4))
    assert are_there()
    fsdp_internals.free_left(sharded[0])
    assert not are_there()


def test_groups_of_data_parallelism(sharded):
    assert fsdp_internals.data_groups(sharded) == {dist.group.WORLD.group_name}


def hooks_of_state_dict(model):
    return sum(len(module._state_dict_pre_hooks) for module in model.modules())  # PyTorch's own name


def test_hooks_of_the_first_forward_stay_when_its_step_is_undone(sharded):
    rows = torch.randn(2, 4)
    with sandboxed(sharded, rows):
        sharded(rows).sum().backward()
        registered = hooks_of_state_dict(sharded)
    assert registered > 0
    assert hooks_of_state_dict(sharded) == registered
    sharded(rows)
    assert all(isinstance(each, DTensor) for each in sharded.state_dict().values()), "shards, after a forward alone"


def test_an_inner_module_does_not_become_the_root(sharded):
    rows = torch.randn(2, 4)
    with sandboxed(sharded[0], rows):
        sharded(rows).sum().backward()
    sharded(rows).sum().backward()
    assert all(isinstance(parameter.grad, DTensor) for parameter in sharded.parameters())


def test_a_fit_of_an_inner_module_with_a_step_of_the_root(sharded):
    fitted = retape.fit(
        sharded[0], torch.randn(2, 4), budget="1MiB", step=lambda inner, rows: sharded(rows).sum(), group=False
    )
    fitted.remove()

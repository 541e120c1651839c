"""Autocast around the forward and not around backward, and its cache of weights that two regions share."""

import pytest
import torch
from torch import nn

import retape
from support.comparing import equals_plain, equals_plain_every_way, leaf, results, same_as_plain


def network():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def autocast(**options):
    return torch.autocast("cpu", dtype=torch.bfloat16, **options)


@equals_plain_every_way
def test_backward_outside_autocast(call):
    model, x = network(), leaf()
    with autocast():
        y = call(model, x)
    y.float().sum().backward()
    return results(model, x), y


@equals_plain_every_way
def test_weights_shared_by_two_regions_through_the_cache(call):
    model, x = network(), leaf()
    with autocast():
        y = call(model, call(model, x)) + call(lambda a: model[0](a).sin(), x)
    y.float().sum().backward()
    return results(model, x), y


@equals_plain
def test_weights_shared_with_code_outside_regions(call):
    model, x = network(), leaf()
    with autocast():
        y = model(call(model, model(x)))
    y.float().sum().backward()
    return results(model, x)


@equals_plain
def test_without_the_cache(call):
    model, x = network(), leaf()
    with autocast(cache_enabled=False):
        y = call(model, call(model, x))
    y.float().sum().backward()
    return results(model, x)


@equals_plain
def test_backward_inside_autocast(call):
    model, x = network(), leaf()
    with autocast():
        y = call(model, call(model, x))
        y.float().sum().backward()
        z = model(x)
    z.float().sum().backward()
    return results(model, x), torch.is_autocast_enabled("cpu")


@equals_plain
def test_backward_under_autocast_of_a_forward_without(call):
    model, x = network(), leaf()
    y = call(model, x)
    with autocast():
        y.sum().backward()
        after = model(x)
    after.float().sum().backward()
    return results(model, x), torch.get_autocast_dtype("cpu")


@equals_plain
def test_autocast_inside_a_region(call):
    model, x = network(), leaf()

    def region(a):
        with autocast():
            h = model(a)
        with autocast(enabled=False):
            return model(h.float()).sin()

    call(region, x).sum().backward()
    return results(model, x)


@equals_plain
def test_nested_regions_under_autocast(call):
    model, x = network(), leaf()
    with autocast():
        y = call(lambda a: call(model, a.sin()).exp() + call(model, a), x)
    y.float().sum().backward()
    return results(model, x)


@pytest.mark.parametrize("segments", [2, 3])
def test_segments_under_autocast(segments):
    def case(call):
        model, x = nn.Sequential(*[network() for _ in range(6)]), leaf()
        with autocast():
            y = call(model, segments, x)
        y.float().sum().backward()
        return results(model, x)

    def segmented(model, count, x):
        return retape.checkpoint_sequential(model, count, x, use_reentrant=False)

    same_as_plain(lambda call: case(call if call is segmented else lambda model, _, x: model(x)), segmented)


@equals_plain
def test_scaled_losses_with_accumulation(call):
    model, x = network(), leaf()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for number in range(4):
        with autocast():
            loss = call(model, x * number).float().square().mean()
        scaler.scale(loss).backward()
        if number % 2:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()], x.grad, scaler.get_scale()


@equals_plain
def test_two_steps_see_the_weights_of_their_own(call):
    model, x = network(), leaf()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        with autocast():
            loss = call(model, call(model, x)).float().sum()
        loss.backward()
        optimizer.step()
    return results(model, x), [parameter.detach() for parameter in model.parameters()]

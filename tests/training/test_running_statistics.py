"""Local training of networks with BatchNorm: against a plain loop of torch, and what is adopted by whom."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pflsec.core.items import Items, prefixed, select, without_prefix
from pflsec.core.local import half_squared_distance
from pflsec.models.network import Network
from pflsec.training.local import LocalWork, Training, Unrolled
from tests import toys

pytestmark = pytest.mark.usefixtures("doubles")
both_drivers = pytest.mark.parametrize("driver", [Training, Unrolled])


def work(driver: type = Training, rows: int = 10, **changes: Any) -> LocalWork:
    """Return two epochs of batches of 4 on a network with BatchNorm."""
    settled: dict[str, Any] = {"epochs": 2, "batch_size": 4, "driver": driver(), "net": toys.normed()}
    return replace(toys.work(*toys.batch(rows)), **(settled | changes))


def trained(items: Items, driver: type = Training, **changes: Any) -> Items:
    """Return the items after a fit on the cross entropy."""
    ctx = work(driver, **changes)
    return ctx.fit(items, on=ctx.ce)


def plain(items: Items, batches: Any, lr: float = 0.1) -> Items:
    """Return the items after torch's own loop: the module in training mode, cross entropy, SGD."""
    module = toys.normed_module()
    names = {k.removeprefix("body.") if k.startswith("body.") else k.replace("head.", "fc."): k for k in items}
    module.load_state_dict({n: items[k] for n, k in names.items()}, strict=False)
    sgd = torch.optim.SGD(module.parameters(), lr)
    for x, y in batches:
        sgd.zero_grad()
        F.cross_entropy(module(x), y).backward()
        sgd.step()
    after = module.state_dict()
    return {k: after[n] for n, k in names.items()}


@both_drivers
def test_training_is_torchs_own_loop(driver: type):
    """Weights and running statistics over six steps, the last batch of each epoch a short one."""
    ctx = work(driver)
    items = ctx.net.fresh(0)
    assert toys.distance(ctx.fit(items, on=ctx.ce), plain(items, work().batches())) < 1e-12


@both_drivers
def test_single_steps_adopt_as_a_fit_does(driver: type):
    ctx = work(driver)
    items = found = ctx.net.fresh(0)
    for x, y in ctx.batches():
        found = ctx.step(found, ctx.ce, x, y)
    assert toys.distance(found, plain(items, work().batches())) < 1e-12


@both_drivers
def test_inputs_are_left_alone(driver: type):
    ctx = work(driver)
    items = ctx.net.fresh(0)
    before = toys.snapshot(items)
    ctx.fit(items, on=ctx.ce)
    ctx.gradient(items, ctx.ce, torch.arange(4))
    assert toys.same(items, before)
    assert not any(v.requires_grad for v in items.values())


@both_drivers
def test_gradients_are_zero_in_buffers_and_adopt_nothing(driver: type):
    ctx = work(driver)
    items = ctx.net.fresh(0)
    for found in (ctx.gradient(items, ctx.ce, torch.arange(4)), ctx.full_gradient(items, ctx.ce)):
        assert found.keys() == items.keys()
        assert all(bool(v.any()) != (k in ctx.net.buffers) for k, v in found.items())
    step = ctx.gradient(items, ctx.ce, torch.arange(10))
    once = trained(items, batch_size=10, epochs=1)
    assert all(torch.allclose(once[k], items[k] - 0.1 * step[k], atol=1e-14) for k in items.keys() - ctx.net.buffers)


@both_drivers
@pytest.mark.parametrize("weight", [0.0, 3.0])
def test_a_penalty_does_not_pull_statistics(driver: type, weight: float):
    """Weights move by it; the statistics of one step are those of the batch and the start alone."""
    ctx = work(driver, batch_size=10, epochs=1)
    items, anchor = ctx.net.fresh(0), {k: v + 1 for k, v in ctx.net.fresh(1).items()}
    found = ctx.fit(items, on=ctx.ce, penalty=half_squared_distance(weight, anchor))
    bare = plain(items, work(batch_size=10, epochs=1).batches())
    pulled = {k: bare[k] - 0.1 * weight * (items[k] - anchor[k]) * (k not in ctx.net.buffers) for k in bare}
    assert toys.distance(found, pulled) < 1e-12


@both_drivers
def test_a_projection_leaves_statistics_to_the_batches(driver: type):
    ctx = work(driver)
    items = ctx.net.fresh(0)
    found = ctx.fit(items, on=ctx.ce, lr=1e-300, project=lambda p: {k: v.clamp(-0.01, 0.01) for k, v in p.items()})
    assert all(bool((found[k].abs() <= 0.01).all()) for k in items.keys() - ctx.net.buffers)
    assert all(found[k].abs().max() > 0.01 for k in ctx.net.buffers)


@both_drivers
def test_a_teacher_in_the_loss_is_left_alone(driver: type):
    """Also one that is the very model the training started from: the one that is trained holds tensors of its own."""
    ctx = work(driver)
    items = ctx.net.fresh(0)
    before = toys.snapshot(items)
    alone = trained(items, driver)

    def loss(model: Items, x: Tensor, y: Tensor) -> Tensor:
        own = ctx.ce(model, x, y)
        return own + 0 * ctx.constant(ctx.net.logits(items, x * 3)).sum(1)

    assert toys.distance(ctx.fit(items, on=loss), alone) < 1e-13
    assert toys.same(items, before)


@both_drivers
def test_a_part_is_trained_with_the_statistics_of_that_part_alone(driver: type):
    ctx = toys.work(*toys.batch(10), toys.normed("bn1"), epochs=2, batch_size=4, driver=driver())
    items = ctx.net.fresh(0)
    body, head = select(items, "body"), select(items, "head")
    found = ctx.fit(head, on=lambda h, x, y: ctx.ce(body | h, x, y))
    assert found.keys() == head.keys()
    assert not torch.equal(found["head.bn1.running_mean"], head["head.bn1.running_mean"])
    assert torch.equal(body["body.bn.running_mean"], items["body.bn.running_mean"])


@both_drivers
def test_several_models_keep_several_statistics(driver: type):
    """Two models in one fit, under prefixes, each on inputs of its own: as if they were trained one by one."""
    ctx = work(driver)
    one, two = ctx.net.fresh(1), ctx.net.fresh(2)

    def loss(both: Items, x: Tensor, y: Tensor) -> Tensor:
        return ctx.ce(without_prefix("one", both), x, y) + ctx.ce(without_prefix("two", both), 2 * x, y)

    both = ctx.fit(prefixed("one", one) | prefixed("two", two), on=loss, phase="main")
    alone = trained(one, driver)
    other = trained(two, driver, x=2 * ctx.x)
    assert toys.distance(without_prefix("one", both), alone) < 1e-12
    assert toys.distance(without_prefix("two", both), other) < 1e-12


def test_features_are_those_of_the_running_statistics():
    ctx = work()
    items = ctx.net.fresh(0)
    assert torch.equal(ctx.features(items), ctx.net.features(items, ctx.x))


@pytest.mark.parametrize("steps", [1, 3])
def test_adopted_statistics_keep_their_graph(steps: int):
    """The slope of the statistics after so many steps along a direction of the data, against central differences."""
    ctx = work(Unrolled, batch_size=10, epochs=steps)
    items, h = ctx.net.fresh(0), 1e-5
    direction = torch.randn(ctx.x.shape, generator=torch.Generator().manual_seed(3))

    def total(x: Tensor) -> Tensor:
        ctx = work(Unrolled, batch_size=10, epochs=steps, x=x)
        found = ctx.fit(items, on=ctx.ce)
        return torch.stack([(found[k] * (1 + i)).sum() for i, k in enumerate(sorted(ctx.net.buffers))]).sum()

    x = ctx.x.clone().requires_grad_()
    slope = float((torch.autograd.grad(total(x), x)[0] * direction).sum())
    measured = float((total(ctx.x + h * direction) - total(ctx.x - h * direction)).detach()) / (2 * h)
    assert abs(measured) > 1e-3
    assert slope == pytest.approx(measured, rel=1e-7)


def test_frozen_statistics_train_as_they_test():
    """The layer is then x -> weight * x / sqrt(1 + eps) + bias, in every step."""

    class Fixed(nn.Module):
        def __init__(self, channels: int):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

        def forward(self, x: Tensor) -> Tensor:
            along = (1, -1, *[1] * (x.dim() - 2))
            return x / (1 + 1e-5) ** 0.5 * self.weight.view(along) + self.bias.view(along)

    def fixed() -> nn.Module:
        module = toys.normed_module()
        module.bn, module.bn1 = Fixed(4), Fixed(5)
        return module

    net = Network(fixed, toys.SHAPE, toys.CLASSES)
    items = net.fresh(0)
    found = [trained(items, net=n) for n in (net, toys.normed(frozen=True))]
    assert toys.distance(*found) < 1e-12

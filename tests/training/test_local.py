"""Local training: one loop of SGD under two interpreters."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pflsec.core.items import Items
from pflsec.core.local import linear
from pflsec.training.local import Training, Unrolled, cross_entropy
from tests import toys

pytestmark = pytest.mark.usefixtures("doubles")
both = pytest.mark.parametrize("driver", [Training, Unrolled])


def ten(driver: Any = Training, **changes: Any) -> Any:
    """Return the context of a client with ten different rows."""
    x, y = toys.batch(10)
    return toys.work(x, y, driver=driver(), **changes)


@both
def test_fit_is_sgd_on_the_mean_of_each_batch(driver: Any):
    """Held against torch's own optimiser on the plain module, batch by batch."""
    ctx, net = ten(driver, epochs=3, batch_size=4), toys.tiny()
    start, module = net.fresh(0), toys.tiny_module()
    for p, v in zip(module.parameters(), start.values(), strict=True):
        p.data.copy_(v)
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1)
    for x, y in ten(epochs=3, batch_size=4).batches():
        optimiser.zero_grad()
        nn.functional.cross_entropy(module(x), y).backward()
        optimiser.step()
    found = ctx.fit(start, on=ctx.ce)
    assert toys.distance(found, dict(zip(start, module.parameters(), strict=True))) < 1e-14


@pytest.mark.parametrize(("size", "sizes"), [(4, [4, 4, 2]), (5, [5, 5]), (9, [9, 1]), (10, [10]), (99, [10])])
def test_every_row_is_seen_once_an_epoch_and_short_batches_are_kept(size: int, sizes: list[int]):
    ctx = ten(epochs=3, batch_size=size)
    batches = list(ctx.batches())
    assert [len(y) for _, y in batches] == 3 * sizes
    assert ctx.steps() == len(batches)
    for epoch in range(3):
        part = batches[epoch * len(sizes) : (epoch + 1) * len(sizes)]
        seen = torch.cat([x for x, _ in part]).flatten(1).sum(1)
        assert torch.allclose(seen.sort().values, ctx.x.flatten(1).sum(1).sort().values)


def test_labels_stay_with_their_rows():
    x = torch.arange(10.0).reshape(10, 1, 1, 1).expand(10, *toys.SHAPE)
    for xb, yb in toys.work(x, torch.arange(10), epochs=2, batch_size=3).batches():
        assert torch.equal(xb[:, 0, 0, 0].long(), yb)


def test_every_epoch_has_an_order_of_its_own():
    orders = [tuple(y.tolist()) for y in _orders(epochs=4)]
    assert len(set(orders)) == 4


def _orders(**changes: Any) -> list[Tensor]:
    x = torch.randn(10, *toys.SHAPE)
    ctx = toys.work(x, torch.arange(10), batch_size=9, **changes)
    found = [y for _, y in ctx.batches()]
    return [torch.cat(found[i : i + 2]) for i in range(0, len(found), 2)]


@pytest.mark.parametrize("change", [{"seed": 1}, {"round": 1}, {"client": 1}])
def test_the_order_depends_on_seed_round_and_client(change: dict[str, int]):
    assert torch.equal(_orders()[0], _orders()[0])
    assert not torch.equal(_orders()[0], _orders(**change)[0])


def test_another_phase_or_an_own_draw_never_shifts_the_main_order():
    """Bit for bit: a method with a second phase visits its main batches as one without."""
    plain, busy = ten(batch_size=3), ten(batch_size=3)
    list(busy.batches(5, phase="other"))
    torch.rand(7, generator=busy.rng("own"))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(plain.batches(), busy.batches(), strict=True))


def test_phases_have_orders_of_their_own():
    ctx = ten(batch_size=3)
    assert not torch.equal(*(torch.cat([x for x, _ in ctx.batches(phase=phase)]) for phase in ("main", "other")))


def test_a_second_fit_of_a_phase_draws_anew():
    ctx = ten(batch_size=3)
    first, second = (torch.cat([x for x, _ in ctx.batches()]) for _ in range(2))
    assert not torch.equal(first, second)


def test_the_global_generator_is_neither_read_nor_moved():
    ctx, start = ten(batch_size=3), toys.tiny().fresh(0)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    found = ctx.fit(start, on=ctx.ce)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    again = ten(batch_size=3)
    assert toys.same(again.fit(start, on=again.ce), found)


@both
def test_a_penalty_adds_its_gradient_to_every_step(driver: Any):
    """A linear penalty <s, theta> moves theta by -lr s a step beside the data's gradient."""
    slope = {k: torch.full_like(v, 0.5) for k, v in toys.tiny().fresh(0).items()}
    ctx, start = ten(driver), toys.tiny().fresh(0)
    expected = toys.hand_step(start, {k: g + 0.5 for k, g in toys.hand_gradient(start, ctx.x, ctx.y).items()}, 0.1)
    assert toys.distance(ctx.fit(start, on=ctx.ce, penalty=linear(slope)), expected) < 1e-15


@both
def test_a_parameter_that_the_loss_does_not_reach_stands_still(driver: Any):
    ctx, start = ten(driver), toys.tiny().fresh(0) | {"idle": torch.ones(2)}
    found = ctx.fit(start, on=ctx.ce)
    assert torch.equal(found["idle"], start["idle"])
    assert not torch.equal(found["head.bias"], start["head.bias"])


@both
def test_without_epochs_the_parameters_come_back(driver: Any):
    ctx, start = ten(driver, epochs=0), toys.tiny().fresh(0)
    assert toys.same({k: v.detach() for k, v in ctx.fit(start, on=ctx.ce).items()}, start)
    assert ctx.steps() == 0
    assert ctx.losses == []


@both
def test_a_fit_does_not_move_what_it_is_given(driver: Any):
    ctx, start = ten(driver), toys.tiny().fresh(0)
    before = toys.snapshot(start)
    found = ctx.fit(start, on=ctx.ce)
    assert toys.same(start, before)
    assert not any(found[k].data_ptr() == start[k].data_ptr() for k in start)


def test_training_keeps_no_graph_and_unrolling_does():
    start = toys.tiny().fresh(0)
    for driver, kept in ((Training, False), (Unrolled, True)):
        ctx = ten(driver)
        ctx.x.requires_grad_()
        assert all(v.requires_grad == kept for v in ctx.fit(start, on=ctx.ce).values())


def test_features_of_a_still_body_go_with_the_rows_they_replace():
    """Training a head on features that were computed once equals training it on top of the body."""
    net = toys.tiny()
    model = net.fresh(0)
    body = {k: v for k, v in model.items() if k.startswith("body.")}
    head = {k: v for k, v in model.items() if k.startswith("head.")}
    one, two = ten(epochs=2, batch_size=3), ten(epochs=2, batch_size=3)
    cached = one.fit(head, on=one.head_ce, features_of=body)
    assert toys.distance(cached, two.fit(head, on=lambda h, x, y: two.ce(body | h, x, y))) < 1e-14


def test_a_fit_has_its_own_learning_rate_and_length():
    ctx, start = ten(), toys.tiny().fresh(0)
    once = toys.hand_step(start, toys.hand_gradient(start, ctx.x, ctx.y), 0.7)
    twice = toys.hand_step(once, toys.hand_gradient(once, ctx.x, ctx.y), 0.7)
    assert toys.distance(ctx.fit(start, on=ctx.ce, lr=0.7, epochs=2), twice) < 1e-15


@both
def test_one_step_is_one_step_of_a_fit(driver: Any):
    ctx, start = ten(driver), toys.tiny().fresh(0)
    assert toys.distance(ctx.step(start, ctx.ce, ctx.x, ctx.y), ctx.fit(start, on=ctx.ce)) == 0


@both
def test_one_step_takes_a_penalty_and_reports_its_loss_as_a_fit_does(driver: Any):
    """The loss is the data's alone; another phase reports none."""
    (ctx, other), start = (ten(driver) for _ in range(2)), toys.tiny().fresh(0)
    slope = linear(toys.tiny().fresh(1))
    step = ctx.step(start, ctx.ce, ctx.x, ctx.y, penalty=slope, lr=0.3)
    assert toys.distance(step, other.fit(start, on=other.ce, penalty=slope, lr=0.3)) == 0
    assert [v.item() for v in ctx.losses] == [v.item() for v in other.losses]
    assert len(ctx.losses) == 1
    ctx.step(start, ctx.ce, ctx.x, ctx.y, phase="other")
    assert len(ctx.losses) == 1


@both
def test_the_full_gradient_is_over_all_rows_at_once(driver: Any):
    """Also where the rows are worked off in pieces: 250 rows, pieces of 100."""
    x, y = toys.batch(250)
    ctx, start = toys.work(x, y, driver=driver(), batch_size=3), toys.tiny().fresh(0)
    assert toys.distance(ctx.full_gradient(start, ctx.ce), toys.hand_gradient(start, x, y)) < 1e-14
    features = ctx.features(start)
    assert torch.allclose(features, toys.hand_features(start, x), atol=1e-15)


def test_a_step_of_the_main_phase_counts_as_training_loss():
    ctx, start = ten(), toys.tiny().fresh(0)
    once = ctx.step(start, ctx.ce, ctx.x, ctx.y)
    ctx.step(start, ctx.ce, ctx.x, ctx.y, phase="other")
    ctx.step(once, ctx.ce, ctx.x, ctx.y)
    expected = [toys.hand_loss(model, ctx.x, ctx.y).item() for model in (start, once)]
    assert [loss.item() for loss in ctx.losses] == pytest.approx(expected)


def test_losses_are_those_of_the_main_phase_before_each_step():
    ctx, start = ten(epochs=2), toys.tiny().fresh(0)
    ctx.fit(start, on=ctx.ce, phase="other")
    assert ctx.losses == []
    ctx.fit(start, on=ctx.ce)
    after = toys.hand_step(start, toys.hand_gradient(start, ctx.x, ctx.y), 0.1)
    expected = [toys.hand_loss(items, ctx.x, ctx.y).item() for items in (start, after)]
    assert [loss.item() for loss in ctx.losses] == pytest.approx(expected)


def test_cross_entropy_takes_classes_or_probabilities():
    """-sum_k p_k log softmax_k; at a one-hot p it is the loss of the class. Zero logits over 4 classes: log 4."""
    z, y = torch.randn(5, 4), torch.tensor([0, 1, 2, 3, 0])
    assert torch.allclose(cross_entropy(z, y), cross_entropy(z, nn.functional.one_hot(y, 4).double()))
    assert torch.allclose(cross_entropy(torch.zeros(2, 4), torch.full((2, 4), 0.25)), torch.tensor(4.0).log())


def test_an_unrolled_result_knows_the_start_it_came_from():
    """One step: theta - lr g(theta), so d theta_up / d theta = I - lr H, seen by a finite difference along the bias."""
    start = toys.tiny().fresh(0)

    def bias(value: Tensor) -> Tensor:
        ctx = ten(Unrolled)
        items: Items = start | {"head.bias": value}
        return ctx.fit(items, on=ctx.ce)["head.bias"]

    point = start["head.bias"].clone().requires_grad_()
    slope = torch.autograd.grad(bias(point)[0], point)[0]
    step = torch.tensor([1e-6, 0, 0])
    measured = (bias(point + step) - bias(point - step))[0] / 2e-6
    assert slope[0].item() == pytest.approx(measured.item(), rel=1e-6)
    assert 0.9 < slope[0].item() < 1


def test_labels_become_probabilities_also_where_examples_are_mapped_over():
    """A guard takes each example's gradient by vmap, which refuses to look at values; probabilities pass unchanged."""
    ctx, y = toys.work(*toys.batch()), toys.batch()[1]
    expected = nn.functional.one_hot(y, toys.CLASSES).to(ctx.x.dtype)
    assert torch.equal(ctx.one_hot(y), expected)
    assert torch.equal(torch.func.vmap(lambda row: ctx.one_hot(row[None])[0])(y), expected)
    assert ctx.one_hot(expected) is expected
    assert ctx.one_hot(y).dtype == ctx.x.dtype

"""Per-FedAvg. The checks take the method's class, so that planted bugs can be put to them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from pflsec.algorithms.meta_learning.perfedavg import PerFedAvg
from pflsec.core.algorithm import Algorithm
from pflsec.core.items import Items, select, weighted_mean
from pflsec.core.local import LossPerExample
from pflsec.runtime.executor import context
from pflsec.training.local import LocalWork, Unrolled
from tests import toys

ALPHA = 0.3
"""Large, so that what belongs to the inner step is seen."""


@dataclass
class Watched(LocalWork):
    """Local work that remembers each gradient taken: phase, point, rows and value."""

    taken: list[tuple[str, Items, Tensor, Items]] = field(default_factory=list)

    def gradient(self, params: Mapping[str, Tensor], on: LossPerExample, rows: Tensor, *, phase: str = "main") -> Items:
        found = super().gradient(params, on, rows, phase=phase)
        self.taken.append((phase, toys.snapshot(params), rows, toys.snapshot(found)))
        return found


class ThirdIsFirst(Watched):
    """Local work whose third batch is the first once more."""

    def row_sets(self, count: int, epochs: int | None = None, phase: str = "main") -> Iterator[tuple[Tensor, ...]]:
        return ((first, second, first) for first, second in super().row_sets(2, epochs, phase))


def watched(kind: type[LocalWork] = Watched, size: int = 10, **changes: Any) -> Any:
    """Return the context of a client with so many rows, batches of half of them, and lr 0.1."""
    x, y = toys.batch(size)
    return kind(**vars(toys.work(**({"x": x, "y": y, "batch_size": size // 2} | changes))))


def upload(kind: type[Algorithm], work: LocalWork, **settings: Any) -> tuple[Items, Items]:
    """Return downlink and uploaded parameters of one exchange."""
    chosen: dict[str, Any] = {"alpha": ALPHA} | settings
    algorithm = toys.method(kind, **chosen)
    down = algorithm.net.fresh(0)
    return down, select(algorithm.local(work, {}, down).up, "body", "head")


def stream_of_second_batches(work: LocalWork, down: Items, beta: float) -> Items:
    """Return the model after plain SGD on the second batch of every pair."""
    for _, outer in work.row_sets(2):
        down = work.step(down, work.ce, work.x[outer], work.y[outer], lr=beta)
    return down


def check_1_without_inner_step_it_is_fedavg_on_every_other_batch(kind: type[Algorithm]) -> None:
    """w - 0 * gradient is w: the outer gradient is the plain one, and the mean over uploads has equal weights."""
    made = toys.setup(kind, settings={"alpha": 0.0, "beta": 0.2}, batch_size=2, participation=0.75)
    for turn in toys.rounds(made):
        expected = {
            c: stream_of_second_batches(toys.context(made, turn.t, c), turn.downs[c], beta=0.2) for c in turn.ups
        }
        assert all(toys.same(turn.ups[c], model) for c, model in expected.items())
        assert toys.same(turn.next_server, weighted_mean(expected.values(), [1.0] * len(expected)))


def check_2_one_step_takes_the_gradient_ahead_and_applies_it_at_the_start(kind: type[Algorithm]) -> None:
    """w~ = w - alpha grad f(w; D),  w_up = w - beta grad f(w~; D')."""
    work = watched()
    down, up = upload(kind, work, beta=0.2)
    (_, at, inner, g), (_, ahead, outer, _) = work.taken
    assert toys.same(at, down)
    assert not set(inner.tolist()) & set(outer.tolist())
    assert len(inner) == len(outer) == 5
    assert toys.distance(g, toys.hand_gradient(down, work.x[inner], work.y[inner])) < 1e-15
    assert toys.distance(ahead, toys.hand_step(down, g, ALPHA)) < 1e-15
    expected = toys.hand_step(down, toys.hand_gradient(ahead, work.x[outer], work.y[outer]), 0.2)
    assert toys.distance(up, expected) < 1e-15


def composed(work: LocalWork, inner: Tensor, outer: Tensor) -> toys.Loss:
    """Return F(w) = f(w - alpha grad f(w; D); D'), differentiable all the way through."""

    def loss(w: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        value = toys.hand_loss(w, work.x[inner], work.y[inner])
        g = dict(zip(w, torch.autograd.grad(value, list(w.values()), create_graph=True), strict=True))
        return toys.hand_loss({k: w[k] - ALPHA * g[k] for k in w}, work.x[outer], work.y[outer])

    return loss


def check_3_exact_is_the_gradient_of_the_composed_loss(kind: type[Algorithm]) -> None:
    """d/dw f(w - alpha grad f(w; D); D') = (I - alpha H(w; D)) grad f(w~; D'): Algorithm 1 with D'' = D."""
    work = watched(ThirdIsFirst)
    down, up = upload(kind, work, beta=0.2, variant="exact")
    inner, outer = work.taken[0][2], work.taken[1][2]
    whole = toys.hand_gradient(down, work.x, work.y, composed(work, inner, outer))
    assert toys.distance(up, toys.hand_step(down, whole, 0.2)) < 1e-15


def check_3_one_sample_serves_as_all_three_batches(kind: type[Algorithm]) -> None:
    work = watched(size=1, batch_size=4)
    down, up = upload(kind, work, beta=0.2, variant="exact")
    row = torch.tensor([0])
    whole = toys.hand_gradient(down, work.x, work.y, composed(work, row, row))
    assert toys.distance(up, toys.hand_step(down, whole, 0.2)) < 1e-15


def check_3_the_curvature_is_the_third_batchs(kind: type[Algorithm]) -> None:
    """G = v - alpha H(w; D'') v, the product by differentiating <grad f(w; D''), v>."""
    work = watched(size=9, batch_size=3)
    down, up = upload(kind, work, beta=0.2, variant="exact")
    ((_, _, third),) = watched(size=9, batch_size=3).row_sets(3)
    v = work.taken[1][3]

    def slope(w: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        g = torch.autograd.grad(toys.hand_loss(w, x, y), list(w.values()), create_graph=True)
        return torch.stack([(a * v[k]).sum() for k, a in zip(w, g, strict=True)]).sum()

    product = toys.hand_gradient(down, work.x[third], work.y[third], slope)
    expected = {k: down[k] - 0.2 * (v[k] - ALPHA * product[k]) for k in down}
    assert toys.distance(up, expected) < 1e-15


def check_4_differences_go_to_the_exact_gradient_with_the_square_of_delta(kind: type[Algorithm]) -> None:
    """A central difference errs by delta^2 / 6 times the third derivative: a tenth of delta, a hundredth of the error."""
    exact = upload(kind, watched(size=9, batch_size=3), variant="exact")[1]
    errors = [
        toys.distance(upload(kind, watched(size=9, batch_size=3), variant="hf", delta=delta)[1], exact)
        for delta in (1e-1, 1e-2, 1e-3)
    ]
    assert errors[0] > 1e-8
    assert [errors[0] / errors[1], errors[1] / errors[2]] == pytest.approx([100, 100], rel=0.05)


def check_5_the_tested_model_is_one_step_from_the_shared_one(kind: type[Algorithm]) -> None:
    """The shared model itself stays as it is; it is the one of the global accuracy."""
    made = toys.setup(kind, settings={"alpha": 0.5}, lr=0.5)
    turn = toys.rounds(made)[-1]
    server, before = turn.next_server, toys.snapshot(turn.next_server)
    for row in turn.rows:
        ctx = context(made, turn.t + 1, row["client"])
        found = made.algorithm.personalise(ctx, made.algorithm.deploy({}, server))
        ((rows,), *_) = context(made, turn.t + 1, row["client"]).row_sets(1, 1, "adapt")
        expected = toys.hand_step(server, toys.hand_gradient(server, ctx.x[rows], ctx.y[rows]), 0.5)
        assert toys.distance(found, expected) < 1e-15
        x, y = made.federation.test(row["client"])
        right = (made.net.logits(expected, x).argmax(1) == y).double().mean()
        assert row["accuracy_post_agg"] == pytest.approx(float(right))
    assert toys.same(server, before)


def check_6_the_mean_is_plain(kind: type[Algorithm]) -> None:
    """Clients of 5, 8, 3 and 8 rows count alike, and none says how many it has."""
    for turn in toys.play(kind):
        assert toys.distance(turn.next_server, weighted_mean(turn.ups.values(), [1.0] * 4)) < 1e-15
        assert all("num_samples" not in up for up in turn.ups.values())


def check_without_outer_step_nothing_moves(kind: type[Algorithm]) -> None:
    down, up = upload(kind, watched(), beta=0.0)
    assert toys.same(up, down)
    algorithm = toys.method(kind, beta=0.0)
    assert algorithm.change({}, down, up, lr=0.1, steps=1) == {}


def check_the_two_step_sizes_are_two(kind: type[Algorithm]) -> None:
    """Without beta the outer step is the run's learning rate; it is never alpha."""
    for settings, outer in (({}, 0.1), ({"beta": 0.05}, 0.05)):
        work = watched()
        down, up = upload(kind, work, **settings)
        assert toys.distance(up, toys.hand_step(down, work.taken[1][3], outer)) < 1e-15


def test_perfedavg_1_without_inner_step_it_is_fedavg_on_every_other_batch():
    check_1_without_inner_step_it_is_fedavg_on_every_other_batch(PerFedAvg)


@pytest.mark.parametrize("variant", ["hf", "exact"])
def test_perfedavg_1_without_inner_step_every_variant_is_first_order(variant: str):
    """alpha = 0 takes the curvature's weight away as well: on the same batches the bits are those of fo."""
    first_order = upload(PerFedAvg, watched(), alpha=0.0)[1]
    assert toys.same(upload(PerFedAvg, watched(ThirdIsFirst), alpha=0.0, variant=variant)[1], first_order)


def test_perfedavg_2_one_step_takes_the_gradient_ahead_and_applies_it_at_the_start():
    check_2_one_step_takes_the_gradient_ahead_and_applies_it_at_the_start(PerFedAvg)


def test_perfedavg_3_exact_is_the_gradient_of_the_composed_loss():
    check_3_exact_is_the_gradient_of_the_composed_loss(PerFedAvg)


def test_perfedavg_3_one_sample_serves_as_all_three_batches():
    check_3_one_sample_serves_as_all_three_batches(PerFedAvg)


def test_perfedavg_3_the_curvature_is_the_third_batchs():
    check_3_the_curvature_is_the_third_batchs(PerFedAvg)


def test_perfedavg_4_differences_go_to_the_exact_gradient_with_the_square_of_delta():
    check_4_differences_go_to_the_exact_gradient_with_the_square_of_delta(PerFedAvg)


def test_perfedavg_5_the_tested_model_is_one_step_from_the_shared_one():
    check_5_the_tested_model_is_one_step_from_the_shared_one(PerFedAvg)


def test_perfedavg_6_the_mean_is_plain():
    check_6_the_mean_is_plain(PerFedAvg)


def test_without_outer_step_nothing_moves():
    check_without_outer_step_nothing_moves(PerFedAvg)


def test_the_two_step_sizes_are_two():
    check_the_two_step_sizes_are_two(PerFedAvg)


def test_an_observer_divides_by_the_outer_step():
    """(w - w_up)/beta = grad f(w~; D'), whatever the learning rate."""
    work = watched()
    down, up = upload(PerFedAvg, work, beta=0.02)
    seen = toys.method(PerFedAvg, beta=0.02).change({}, down, up, lr=0.1, steps=1)
    assert toys.distance(seen, work.taken[1][3]) < 1e-13


def test_the_curvature_carries_the_first_batch_times_alpha():
    """G = grad f(w; D') - alpha H(w; D') grad f(w; D) + O(alpha^2): halving alpha halves what D moves."""
    x, _ = toys.batch(10)

    def moved_by_inner(alpha: float) -> float:
        rows = watched()
        inner = next(iter(rows.row_sets(2)))[0]
        other = x.clone()
        other[inner] += 1
        ups = [upload(PerFedAvg, watched(x=data), alpha=alpha, beta=1.0)[1] for data in (x, other)]
        return toys.distance(*ups)

    assert moved_by_inner(2e-3) / moved_by_inner(1e-3) == pytest.approx(2, rel=0.02)


def test_the_reported_loss_is_the_one_that_is_minimised():
    """F_i = f(w~; D'), at the point ahead."""
    work = watched()
    upload(PerFedAvg, work)
    _, ahead, outer, _ = work.taken[1]
    assert [v.item() for v in work.losses] == [
        pytest.approx(toys.hand_loss(ahead, work.x[outer], work.y[outer]).item())
    ]


@pytest.mark.parametrize(("variant", "steps"), [("fo", [2, 4, 2, 4]), ("hf", [2, 2, 2, 2]), ("exact", [2, 2, 2, 2])])
def test_an_epoch_has_as_many_steps_as_there_are_sets_of_batches(variant: str, steps: list[int]):
    """Two epochs of floor(n / 2B) steps, or floor(n / 3B); at least one each. n is 5, 8, 3, 8; B is 2."""
    made = toys.setup(PerFedAvg, settings={"variant": variant}, batch_size=2)
    for client in range(4):
        work = toys.context(made, 0, client)
        made.algorithm.local(work, {}, made.server_fresh)
        assert len(work.losses) == steps[client]


@pytest.mark.parametrize("variant", ["hf", "exact"])
def test_the_curvatures_loss_is_per_example_and_has_per_example_gradients(variant: str):
    """Clipping each example's gradient needs on(x)[i] = on(x[i]), and a mean of gradients that is the batch's."""
    algorithm, (x, y) = toys.method(PerFedAvg, variant=variant), toys.batch(6)
    w, v = toys.tiny().fresh("w"), toys.tiny().fresh("v")
    on = algorithm._slope(toys.work(x, y, algorithm.net), v)  # type: ignore[attr-defined]
    assert torch.allclose(on(w, x, y), torch.cat([on(w, x[i : i + 1], y[i : i + 1]) for i in range(6)]), atol=1e-12)
    one = torch.func.grad(lambda p, a, b: on(p, a[None], b[None])[0])
    each = torch.func.vmap(one, in_dims=(None, 0, 0))(w, x, y)
    whole = toys.hand_gradient(w, x, y, lambda p, x, y: on(dict(p), x, y).mean())
    assert toys.distance({k: g.mean(0) for k, g in each.items()}, whole) < 1e-12


def test_private_training_takes_every_batch_from_the_guard():
    """Three independent draws a step and one gradient each: what the accountant counts."""
    from pflsec.defenses.step.dp_sgd import DPSGD, DPSGDConfig

    x, y = toys.batch(12)
    guard = DPSGD(DPSGDConfig(noise_multiplier=1.0)).guard(12, 4, 1.0, "test")
    work = toys.work(x, y, batch_size=4, epochs=2, guard=guard)
    upload(PerFedAvg, work, variant="exact")
    assert sum(steps for _, _, steps in guard.spent) == 2 * 1 * 3


def test_an_unrolled_upload_knows_both_batches():
    """Each half of the rows moves the upload, and by finite differences as much as the graph says."""
    work = watched(driver=Unrolled())
    inner, outer = next(iter(watched().row_sets(2)))
    x = work.x.clone().requires_grad_()

    def sent(data: Tensor) -> Tensor:
        return upload(PerFedAvg, watched(driver=Unrolled(), x=data), variant="exact")[1]["head.bias"][0]

    slope = torch.autograd.grad(sent(x), x)[0]
    for rows in (inner, outer):
        direction = torch.zeros_like(x)
        direction[rows] = 1
        measured = (sent(work.x + 1e-5 * direction) - sent(work.x - 1e-5 * direction)).item() / 2e-5
        assert (slope * direction).sum().item() == pytest.approx(measured, rel=1e-5)
        assert abs(measured) > 1e-5

"""FedProx. The checks take the method's class, so that planted bugs can be put to them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pflsec.algorithms.traditional.fedavg import FedAvg
from pflsec.algorithms.traditional.fedprox import FedProx
from pflsec.core.algorithm import Algorithm
from pflsec.core.errors import ConfigError, PflsecWarning
from pflsec.core.items import Items, select, weighted_mean
from pflsec.core.local import half_squared_distance
from pflsec.training.local import LocalWork
from tests import toys


def upload(kind: type[Algorithm], steps: int, **settings: Any) -> tuple[Items, Items]:
    """Return downlink and uploaded parameters after so many full-batch steps at lr 0.1 on the same batch."""
    algorithm, (x, y) = toys.method(kind, **settings), toys.batch()
    down = algorithm.init_server(algorithm.net.fresh(0))
    return down, select(algorithm.local(toys.work(x, y, algorithm.net, epochs=steps), {}, down).up, "body", "head")


def check_1_without_penalty_it_is_fedavg(kind: type[Algorithm]) -> None:
    ours = toys.play(kind, settings={"mu": 0.0}, participation=0.5, drop_rate=0.25)
    for turn, reference in zip(ours, toys.play(FedAvg, participation=0.5, drop_rate=0.25), strict=True):
        assert toys.same(turn.next_server, reference.next_server)
        assert turn.metrics["cohort"] == reference.metrics["cohort"]


def check_2_one_step_is_fedavgs_for_every_mu(kind: type[Algorithm]) -> None:
    """At theta = theta_t the penalty's gradient mu (theta - theta_t) is exactly zero."""
    for mu in (0.01, 1.0, 9.0):
        assert toys.same(upload(kind, 1, mu=mu)[1], upload(FedAvg, 1)[1])


def check_3_two_steps_discount_the_first_gradient(kind: type[Algorithm]) -> None:
    """With d = theta - theta_t:  d_1 = -lr g_0  and  d_2 = d_1 - lr (g_1 + mu d_1) = -lr ((1 - lr mu) g_0 + g_1)."""
    (x, y), lr, mu = toys.batch(), 0.1, 3.0
    down, up = upload(kind, 2, mu=mu)
    g0 = toys.hand_gradient(down, x, y)
    g1 = toys.hand_gradient(toys.hand_step(down, g0, lr), x, y)
    expected = {k: down[k] - lr * ((1 - lr * mu) * g0[k] + g1[k]) for k in down}
    assert toys.distance(up, expected) < 1e-12


def check_4_at_lr_times_mu_one_only_the_last_gradient_is_left(kind: type[Algorithm]) -> None:
    """d_(j+1) = (1 - lr mu) d_j - lr g_j = -lr g_j  when lr mu = 1."""
    (x, y), lr, mu = toys.batch(), 0.1, 10.0
    down, theta = upload(kind, 0, mu=mu)[0], upload(kind, 3, mu=mu)[1]
    last = toys.hand_gradient(theta, x, y)
    assert toys.distance(upload(kind, 4, mu=mu)[1], toys.hand_step(down, last, lr)) < 1e-12


class Quadratic(LocalWork):
    """Local work whose loss is 1/2 |theta - 1|^2 for every example, whatever the network says."""

    def ce(self, params: Any, x: Tensor, y: Tensor) -> Tensor:
        half = torch.stack([(p - 1).square().sum() for p in params.values()]).sum() / 2
        return half.expand(len(y))


def check_5_a_larger_mu_stays_nearer(kind: type[Algorithm]) -> None:
    """On 1/2 |theta - 1|^2 the distance after K steps is |theta_t - 1| (1 - (1 - lr (1 + mu))^K) / (1 + mu): it falls
    with mu as long as lr (1 + mu) <= 1."""
    x, y = toys.batch()
    moved = []
    for mu in (0.0, 0.1, 1.0, 3.0, 9.0):
        algorithm = toys.method(kind, mu=mu)
        down = algorithm.init_server(algorithm.net.fresh(0))
        work = Quadratic(**vars(toys.work(x, y, algorithm.net, epochs=4)))
        up = algorithm.local(work, {}, down).up
        far = torch.cat([(up[k] - down[k]).flatten() for k in down]).norm()
        start = torch.cat([(1 - v).flatten() for v in down.values()]).norm()
        assert far / start == pytest.approx((1 - (1 - 0.1 * (1 + mu)) ** 4) / (1 + mu))
        moved.append(far)
    assert moved == sorted(moved, reverse=True)


def check_6_stragglers_are_part_of_the_mean(kind: type[Algorithm]) -> None:
    """A straggler makes 1 to E epochs, uploads, and counts with all its samples."""
    made = toys.setup(kind, settings={"stragglers": 1.0}, local_epochs=6, batch_size=100)
    turns = toys.rounds(made)
    budgets = set()
    for turn in turns:
        assert sorted(turn.ups) == [0, 1, 2, 3]
        mean = weighted_mean([select(up, "body", "head") for up in turn.ups.values()], toys.TRAIN)
        assert toys.distance(turn.next_server, mean) < 1e-15
        for client in range(4):
            work = toys.context(made, turn.t, client)
            made.algorithm.local(work, {}, turn.downs[client])
            budgets.add(len(work.losses))
    assert min(budgets) >= 1
    assert max(budgets) <= 6
    assert len(budgets) > 2


def test_fedprox_1_without_penalty_it_is_fedavg():
    check_1_without_penalty_it_is_fedavg(FedProx)


def test_fedprox_2_one_step_is_fedavgs_for_every_mu():
    check_2_one_step_is_fedavgs_for_every_mu(FedProx)


def test_fedprox_3_two_steps_discount_the_first_gradient():
    check_3_two_steps_discount_the_first_gradient(FedProx)


def test_fedprox_4_at_lr_times_mu_one_only_the_last_gradient_is_left():
    check_4_at_lr_times_mu_one_only_the_last_gradient_is_left(FedProx)


def test_fedprox_5_a_larger_mu_stays_nearer():
    check_5_a_larger_mu_stays_nearer(FedProx)


def test_fedprox_6_stragglers_are_part_of_the_mean():
    check_6_stragglers_are_part_of_the_mean(FedProx)


def test_the_penalty_is_half_the_squared_distance():
    """d = (3, 4), mu = 0.1: 0.1/2 * 25 = 1.25 with gradient 0.1 d = (0.3, 0.4); the norm itself would give 0.25."""
    penalty = half_squared_distance(0.1, {"w": torch.zeros(2)})
    w = torch.tensor([3.0, 4.0], requires_grad=True)
    value = penalty({"w": w}, torch.Generator())
    assert value.item() == pytest.approx(1.25)
    assert torch.autograd.grad(value, w)[0].tolist() == pytest.approx([0.3, 0.4])


def test_a_client_without_stragglers_makes_all_its_epochs():
    made = toys.setup(FedProx, local_epochs=6, batch_size=100)
    work = toys.context(made, 0, 0)
    made.algorithm.local(work, {}, made.algorithm.init_server(made.server_fresh))
    assert len(work.losses) == 6


def test_sampling_by_size_goes_with_uniform_weights_only():
    sizes = [5, 8, 3]
    by_size = toys.method(FedProx, sampling="by_size", weighting="uniform")
    assert by_size.sampling_weights(sizes) == sizes
    assert toys.method(FedProx).sampling_weights(sizes) is None
    with pytest.raises(ConfigError, match="count twice"):
        toys.method(FedProx, sampling="by_size")


def test_a_penalty_that_overshoots_is_warned_about():
    with pytest.warns(PflsecWarning, match="lr \\* mu is 1.5"):
        upload(FedProx, 1, mu=15.0)

"""FedDyn. The checks take the method's class, so that planted bugs can be put to them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pflsec.algorithms.traditional.fedavg import FedAvg
from pflsec.algorithms.traditional.feddyn import FedDyn
from pflsec.core.algorithm import Algorithm
from pflsec.core.errors import PflsecWarning
from pflsec.core.items import Items, select, subtract, without_prefix
from pflsec.training.local import LocalWork
from tests import toys

PARTIAL: dict[str, Any] = {"participation": 0.75, "drop_rate": 1 / 3}
"""Three of four clients are asked, one of the three uploads is lost."""
ALPHA = 0.5


def model(items: Items) -> Items:
    """Return the model in a message, or the one that the server sends."""
    return select(items, "body", "head")


def drift(items: Items) -> Items:
    """Return d_k of a state, or the mean of all d_k that the server holds."""
    return without_prefix("drift", items)


def mean(many: list[Items]) -> Items:
    """Return the plain mean."""
    return {k: torch.stack([m[k] for m in many]).mean(0) for k in many[0]}


def check_0_steps_follow_the_objective(kind: type[Algorithm]) -> None:
    """L(theta) - <g, theta> + alpha/2 |theta - theta_t|^2 with g = -alpha d, by autograd, over three steps."""
    algorithm, (x, y) = toys.method(kind, alpha=ALPHA), toys.batch()
    cloud, d = toys.tiny().fresh("cloud"), toys.tiny().fresh("d")
    found = algorithm.local(toys.work(x, y, epochs=3), {f"drift.{k}": v for k, v in d.items()}, cloud)

    def objective(at: Any, x: Tensor, y: Tensor) -> Tensor:
        dual = sum((-ALPHA * d[k] * at[k]).sum() for k in d)
        return toys.hand_loss(at, x, y) - dual + ALPHA / 2 * sum(((at[k] - cloud[k]) ** 2).sum() for k in d)

    expected = cloud
    for _ in range(3):
        expected = toys.hand_step(expected, toys.hand_gradient(expected, x, y, objective), 0.1)
    assert toys.distance(found.up, expected) < 1e-14


def check_1_the_first_step_of_a_newcomer_is_fedavgs(kind: type[Algorithm]) -> None:
    """The pull is 0 at theta_t, and the dual starts at 0: both add exactly nothing to the gradient."""
    for alpha in (0.01, 5.0):
        ours = toys.play(kind, 1, settings={"alpha": alpha}, local_epochs=1, batch_size=100)[0]
        reference = toys.play(FedAvg, 1, local_epochs=1, batch_size=100)[0]
        assert all(toys.same(up, model(reference.ups[c])) for c, up in ours.ups.items())


def check_2_the_first_round_goes_twice_as_far(kind: type[Algorithm]) -> None:
    """theta_1 = mean + (1/N) sum_k d_k, and with everybody there both move by mean_k (theta_k - theta_0)."""
    for alpha in (1e-6, ALPHA):
        turn = toys.play(kind, 1, settings={"alpha": alpha})[0]
        start = model(turn.server)
        moved = subtract(mean(list(turn.ups.values())), start)
        assert toys.distance(model(turn.next_server), {k: v + 2 * moved[k] for k, v in start.items()}) < 1e-14


def check_3_the_server_holds_the_mean_of_all_duals(kind: type[Algorithm]) -> None:
    """h = (1/N) sum over all clients of g_k, present or not; h = -alpha times the mean of the d_k."""
    for turn in toys.play(kind, 6, **PARTIAL):
        states = [drift(state) for state in turn.next_states.values()]
        assert toys.distance(drift(turn.next_server), mean(states)) < 1e-14
        assert any(v.abs().max() > 0 for v in drift(turn.next_server).values())


def check_4_the_dual_is_the_sum_of_the_changes_that_arrived(kind: type[Algorithm]) -> None:
    """g_k = -alpha sum over accepted rounds of (theta_k - theta_t), to the last bit."""
    known: dict[int, Items] = {}
    for turn in toys.play(kind, 6, **PARTIAL):
        for c, up in turn.ups.items():
            moved = subtract(model(up), model(turn.downs[c]))
            known[c] = {k: known[c][k] + v if c in known else v for k, v in moved.items()}
        assert all(toys.same(drift(turn.next_states[c]), total) for c, total in known.items())
    assert len(known) > 2


def check_5_the_form_with_h_gives_the_same_models(kind: type[Algorithm]) -> None:
    """h <- h - alpha (1/N) sum over S of (theta_k - theta_t); theta_(t+1) = mean over S of theta_k - h/alpha."""
    h: Items = {}
    for turn in toys.play(kind, 6, settings={"alpha": ALPHA}, **PARTIAL):
        assert len(turn.ups) == 2
        start, ups = model(turn.server), [model(up) for up in turn.ups.values()]
        moved = {k: sum((up[k] - v for up in ups), torch.zeros(())) for k, v in start.items()}
        h = {k: h.get(k, torch.zeros(())) - ALPHA / 4 * v for k, v in moved.items()}
        assert toys.distance(model(turn.next_server), {k: v - h[k] / ALPHA for k, v in mean(ups).items()}) < 1e-13
        assert toys.distance(without_prefix("mean", turn.next_server), mean(ups)) < 1e-15


CURVATURE, CENTRE = (0.5, 1.0, 3.0), (-1.0, 0.5, 2.0)
"""Client k loses c_k/2 |theta - a_k|^2."""


class Quadratic(LocalWork):
    """Local work of one of these clients, whatever the network says."""

    def ce(self, params: Any, x: Tensor, y: Tensor) -> Tensor:
        off = torch.stack([(p - CENTRE[self.client]).square().sum() for p in params.values()]).sum()
        return (CURVATURE[self.client] / 2 * off).expand(len(y))


def solved(
    kind: type[Algorithm], pull: float, count: int, **settings: Any
) -> tuple[Algorithm, Items, dict[int, Items]]:
    """Return method, server and states after rounds in which every client solves its problem to the end.

    One step of size 1/(curvature + pull) leads to the minimum of a quadratic from everywhere.
    """
    algorithm = toys.method(kind, clients=3, **settings)
    server = algorithm.init_server({k: torch.zeros(v) for k, v in algorithm.net.shapes.items()})
    states, (x, y) = {c: algorithm.init_client({}, server) for c in range(3)}, toys.batch()
    for _ in range(count):
        done = {}
        for c in range(3):
            work = Quadratic(**vars(toys.work(x, y, algorithm.net, client=c, lr=1 / (CURVATURE[c] + pull))))
            done[c] = algorithm.local(work, states[c], algorithm.downlink(server, c))
        states = {c: d.state for c, d in done.items()}
        server = algorithm.aggregate(server, {c: d.up for c, d in done.items()})
    return algorithm, server, states


def check_6_heterogeneous_quadratics_are_solved(kind: type[Algorithm]) -> None:
    """The mean loss is least at sum c_k a_k / sum c_k = 6/4.5. FedAvg stays at the mean of the a_k, 0.5, for ever."""
    algorithm, server, states = solved(kind, ALPHA, 150, alpha=ALPHA)
    common = algorithm.global_model(server)
    assert common is not None
    for found in (common, model(server)):
        assert all(torch.allclose(p, torch.tensor(6 / 4.5), atol=1e-6) for p in found.values())
    _, reference, _ = solved(FedAvg, 0.0, 150, weighting="uniform")
    assert all(torch.allclose(p, torch.tensor(0.5)) for p in model(reference).values())
    for c, state in states.items():  # the dual is then the gradient of the client's loss at its own last model
        slope = CURVATURE[c] * (6 / 4.5 - CENTRE[c])
        assert all(torch.allclose(-ALPHA * d, torch.tensor(slope), atol=1e-5) for d in drift(state).values())


def check_the_participants_mean_is_tested_and_the_cloud_is_sent(kind: type[Algorithm]) -> None:
    algorithm, turn = toys.method(kind), toys.play(kind, 2, **PARTIAL)[1]
    common = mean([model(up) for up in turn.ups.values()])
    tested = algorithm.deploy(turn.next_states[0], algorithm.serve(turn.next_server, 0))
    assert toys.distance(tested, common) < 1e-15
    found = algorithm.global_model(turn.next_server)
    assert found is not None
    assert toys.same(found, tested)
    sent = algorithm.downlink(turn.next_server, 0)
    assert sent.keys() == common.keys()
    assert toys.distance(sent, {k: common[k] + v for k, v in drift(turn.next_server).items()}) < 1e-15
    cloud = toys.method(kind, tested="cloud")
    assert toys.same(cloud.deploy(turn.next_states[0], cloud.serve(turn.next_server, 0)), sent)


def check_the_gradient_is_read_without_the_dual(kind: type[Algorithm]) -> None:
    """theta^(j+1) - theta_t = (1 - lr alpha)(theta^j - theta_t) - lr (g_j - g_k): what K steps sent is
    (1/K) sum_j (1 - lr alpha)^(K-1-j) g_j, once the dual is taken out. K = 1 gives the raw gradient."""
    for steps in (1, 3):
        made = toys.setup(kind, settings={"alpha": ALPHA}, local_epochs=steps, batch_size=100)
        turn = toys.rounds(made, 3)[2]
        for c in range(4):
            at, anchor, x_y = model(turn.downs[c]), model(turn.downs[c]), made.federation.train(c)
            expected = {k: torch.zeros_like(v) for k, v in at.items()}
            for j in range(steps):
                g = toys.hand_gradient(at, *x_y)
                weight = (1 - 0.1 * ALPHA) ** (steps - 1 - j) / steps
                expected = {k: v + weight * g[k] for k, v in expected.items()}
                dual = drift(turn.states[c])
                at = {k: v - 0.1 * (g[k] + ALPHA * (v - anchor[k] + dual[k])) for k, v in at.items()}
            seen = made.algorithm.change(turn.states[c], turn.downs[c], turn.ups[c], 0.1, steps)
            assert toys.distance(seen, expected) < 1e-13


def test_feddyn_0_steps_follow_the_objective():
    check_0_steps_follow_the_objective(FedDyn)


def test_feddyn_1_the_first_step_of_a_newcomer_is_fedavgs():
    check_1_the_first_step_of_a_newcomer_is_fedavgs(FedDyn)


def test_feddyn_2_the_first_round_goes_twice_as_far():
    check_2_the_first_round_goes_twice_as_far(FedDyn)


def test_feddyn_3_the_server_holds_the_mean_of_all_duals():
    check_3_the_server_holds_the_mean_of_all_duals(FedDyn)


def test_feddyn_4_the_dual_is_the_sum_of_the_changes_that_arrived():
    check_4_the_dual_is_the_sum_of_the_changes_that_arrived(FedDyn)


def test_feddyn_5_the_form_with_h_gives_the_same_models():
    check_5_the_form_with_h_gives_the_same_models(FedDyn)


def test_feddyn_6_heterogeneous_quadratics_are_solved():
    check_6_heterogeneous_quadratics_are_solved(FedDyn)


def test_the_participants_mean_is_tested_and_the_cloud_is_sent():
    check_the_participants_mean_is_tested_and_the_cloud_is_sent(FedDyn)


def test_the_gradient_is_read_without_the_dual():
    check_the_gradient_is_read_without_the_dual(FedDyn)


def test_by_size_pulls_small_clients_more():
    """alpha mean(n)/n_k, in the first round too: 24 rows on 4 clients. What is read of an upload uses the same alpha."""
    made = toys.setup(FedDyn, settings={"alpha": 0.1, "alpha_scaling": "by_size"}, local_epochs=2, batch_size=100)
    for turn in toys.rounds(made, 2):
        for c, size in enumerate(toys.TRAIN):
            alpha, d = 0.1 * 6 / size, drift(turn.states[c])
            at = start = model(turn.downs[c])
            slopes = []
            for _ in range(2):
                slopes.append(toys.hand_gradient(at, *made.federation.train(c)))
                at = {k: v - 0.1 * (slopes[-1][k] + alpha * (v - start[k] + d[k])) for k, v in at.items()}
            assert turn.ups[c].keys() == start.keys()
            assert toys.distance(turn.ups[c], at) < 1e-14
            seen = made.algorithm.change(turn.states[c], turn.downs[c], turn.ups[c], 0.1, 2)
            assert (
                toys.distance(seen, {k: ((1 - 0.1 * alpha) * a + slopes[1][k]) / 2 for k, a in slopes[0].items()})
                < 1e-13
            )
        states = [drift(state) for state in turn.next_states.values()]
        assert toys.distance(drift(turn.next_server), mean(states)) < 1e-14


def test_by_size_changes_nothing_among_equal_clients():
    data = toys.dataset([6, 6, 6, 6])
    plain, scaled = (
        toys.play(FedDyn, data=data, settings={"alpha": ALPHA, "alpha_scaling": s})[-1].next_server
        for s in ("none", "by_size")
    )
    assert toys.same(model(plain), model(scaled))


@pytest.mark.parametrize("clip", [0.2, 1e9])
def test_clipping_shortens_the_gradient_with_the_pull_in_it(clip: float):
    """One batch, three steps: g + alpha (theta - theta_t + d), scaled to the bound where it is longer."""
    (x, y), cloud, d = toys.batch(), toys.tiny().fresh("cloud"), toys.tiny().fresh("d")
    algorithm = toys.method(FedDyn, alpha=ALPHA, clip=clip)
    found = algorithm.local(toys.work(x, y, epochs=3), {f"drift.{k}": v for k, v in d.items()}, cloud).up
    at = cloud
    for _ in range(3):
        g = toys.hand_gradient(at, x, y)
        slope = {k: g[k] + ALPHA * (at[k] - cloud[k] + d[k]) for k in at}
        length = float(sum(v.square().sum() for v in slope.values())) ** 0.5
        assert length > 0.2
        at = toys.hand_step(at, slope, 0.1 * min(1.0, clip / length))
    assert toys.distance(found, at) < 1e-14


def test_a_pull_that_overshoots_is_warned_about():
    (x, y), algorithm = toys.batch(), toys.method(FedDyn, alpha=11.0)
    state = algorithm.init_client({}, algorithm.init_server(toys.tiny().fresh(0)))
    with pytest.warns(PflsecWarning, match="overshoots"):
        algorithm.local(toys.work(x, y), state, toys.tiny().fresh(0))

"""pFedMe. The checks take the method's class, so that planted bugs can be put to them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pflsec.algorithms.regularization.pfedme import PFedMe
from pflsec.algorithms.traditional.fedavg import FedAvg
from pflsec.core.algorithm import Algorithm, Done
from pflsec.core.errors import PflsecWarning
from pflsec.core.items import Items, select
from pflsec.training.local import LocalWork
from tests import toys

PARTIAL: dict[str, Any] = {"participation": 0.75, "drop_rate": 1 / 3}
"""Three of four clients are asked, one of the three uploads is lost."""
MILD: dict[str, Any] = {"lam": 2.0, "inner_steps": 3, "inner_lr": 0.3}


def model(items: Items) -> Items:
    """Return the model in a message, or the personal one of a state."""
    return select(items, "body", "head")


def done(kind: type[Algorithm], work: LocalWork, w: Items, **settings: Any) -> Done:
    """Return one exchange of a newcomer that receives w."""
    algorithm = toys.method(kind, **settings)
    return algorithm.local(work, algorithm.init_client({}, w), w)


def check_0_the_two_loops_follow_the_algorithm(kind: type[Algorithm]) -> None:
    """theta <- theta - inner_lr (g(theta; D_r) + lam (theta - w_r) + decay theta), several times on the same batch; then
    w_(r+1) = w_r - lr lam (w_r - theta). The next batch starts at theta, or at w_r where it is reset."""
    w0, (x, y) = toys.tiny().fresh("w"), toys.batch(10)
    for settings in ({}, {"inner_reset": True}, {"decay": 0.2}, {"inner_lr": None}):
        cfg = {"decay": 0.0, "inner_reset": False, **MILD, **settings}
        result = done(kind, toys.work(x, y, epochs=2, batch_size=4), w0, **cfg)
        w = theta = w0
        for xb, yb in toys.work(x, y, epochs=2, batch_size=4).batches():
            theta = w if cfg["inner_reset"] else theta
            for _ in range(3):
                g = toys.hand_gradient(theta, xb, yb)
                slope = {k: g[k] + 2.0 * (theta[k] - w[k]) + cfg["decay"] * theta[k] for k in w}
                theta = toys.hand_step(theta, slope, cfg["inner_lr"] or 0.1 / (1 + 0.1 * 2.0))
            w = {k: v - 0.1 * 2.0 * (v - theta[k]) for k, v in w.items()}
        assert toys.distance(model(result.up), w) < 1e-14
        assert toys.distance(model(result.state), theta) < 1e-14


def check_1_one_inner_step_on_one_batch_is_a_small_step_of_sgd(kind: type[Algorithm]) -> None:
    """theta = w - inner_lr g, and w moves by lr lam of that way: SGD with learning rate lr lam inner_lr."""
    (x, y), w = toys.batch(), toys.tiny().fresh("w")
    settings = {"lam": 2.0, "inner_steps": 1, "inner_lr": 0.3}
    result = done(kind, toys.work(x, y), w, **settings)
    g = toys.hand_gradient(w, x, y)
    assert toys.distance(model(result.up), toys.hand_step(w, g, 0.1 * 2.0 * 0.3)) < 1e-15
    assert toys.distance(toys.method(kind, **settings).change(result.state, w, result.up, 0.1, 1), g) < 1e-13


def check_2_limits_of_both_paces(kind: type[Algorithm]) -> None:
    """lr lam = 1: w jumps onto theta. lam = 0: w stands still. beta = 0: the server does; 1: it takes the mean."""
    (x, y), w = toys.batch(), toys.tiny().fresh("w")
    jump = done(kind, toys.work(x, y), w, **MILD | {"lam": 10.0, "inner_lr": 0.05})
    assert toys.distance(model(jump.up), model(jump.state)) < 1e-15
    still = done(kind, toys.work(x, y), w, **MILD | {"lam": 0.0})
    assert toys.same(model(still.up), w)
    assert toys.distance(model(still.state), w) > 1e-3
    for beta in (0.0, 1.0, 1.5):
        for turn in toys.play(kind, settings=MILD | {"beta": beta}, **PARTIAL):
            ups = [model(up) for up in turn.ups.values()]
            mean = {k: torch.stack([up[k] for up in ups]).mean(0) for k in turn.server}
            new = {k: (1 - beta) * v + beta * mean[k] for k, v in turn.server.items()}
            assert toys.distance(turn.next_server, new) < 1e-15
            assert toys.same(turn.next_server, turn.server) == (beta == 0)


def check_3_the_personal_model_is_the_clients_own(kind: type[Algorithm]) -> None:
    """It shares no memory with what was received or sent, is not what was sent, and outlives the next downlink."""
    algorithm, owned = toys.method(kind, **MILD), dict[int, Items]()
    for turn in toys.play(kind, 5, settings=MILD, participation=0.5):
        for c, up in turn.ups.items():
            theta, sent = model(turn.next_states[c]), [*up.values(), *turn.downs[c].values()]
            assert not {v.data_ptr() for v in theta.values()} & {v.data_ptr() for v in sent}
            assert toys.distance(theta, model(up)) > 1e-4
            owned[c] = toys.snapshot(theta)
        for c, theta in owned.items():
            deployed = algorithm.deploy(turn.next_states[c], algorithm.downlink(turn.next_server, c))
            assert toys.same(model(deployed), theta)
    assert len(owned) > 2


def check_4_one_batch_gives_the_personal_model_away(kind: type[Algorithm]) -> None:
    """w_up = w - lr lam (w - theta), so theta = w - (w - w_up)/(lr lam), whatever the inner steps were."""
    (x, y), w = toys.batch(), toys.tiny().fresh("w")
    result = done(kind, toys.work(x, y), w, **MILD)
    found = {k: v - (v - result.up[k]) / (0.1 * 2.0) for k, v in w.items()}
    assert toys.distance(found, model(result.state)) < 1e-14


class Quadratic(LocalWork):
    """Local work whose loss is 1/2 |theta - 1|^2 for every example, whatever the network says."""

    def ce(self, params: Any, x: Tensor, y: Tensor) -> Tensor:
        return (torch.stack([(p - 1).square().sum() for p in params.values()]).sum() / 2).expand(len(y))


def check_5_many_inner_steps_solve_the_inner_problem(kind: type[Algorithm]) -> None:
    """1/2 |theta - 1|^2 + lam/2 |theta - w|^2 is least at (1 + lam w)/(1 + lam): lam = 3, w = 2 gives 7/4."""
    w = {k: torch.full_like(v, 2.0) for k, v in toys.tiny().fresh(0).items()}
    work = Quadratic(**vars(toys.work(*toys.batch())))
    theta = model(done(kind, work, w, lam=3.0, inner_steps=80, inner_lr=0.1).state)
    assert all(torch.allclose(p, torch.tensor(7 / 4)) for p in theta.values())


def check_the_personal_model_is_tested(kind: type[Algorithm]) -> None:
    made = toys.setup(kind, settings=MILD, participation=0.5, rounds=2)
    turn = toys.rounds(made)[-1]
    for c, state in turn.next_states.items():
        x, y = made.federation.test(c)
        items = model(state) if state["trained"] else turn.next_server
        right = (made.net.logits(items, x).argmax(1) == y).double().mean()
        assert turn.rows[c]["accuracy_post_agg"] == pytest.approx(float(right))
        deployed = made.algorithm.deploy(state, made.algorithm.downlink(turn.next_server, c))
        assert toys.same(model(deployed), items)
    assert turn.metrics["global_accuracy"] is not None


def test_pfedme_0_the_two_loops_follow_the_algorithm():
    check_0_the_two_loops_follow_the_algorithm(PFedMe)


def test_pfedme_1_one_inner_step_on_one_batch_is_a_small_step_of_sgd():
    check_1_one_inner_step_on_one_batch_is_a_small_step_of_sgd(PFedMe)


def test_pfedme_1_that_is_fedavg_at_its_learning_rate():
    """Over rounds, with one batch a client."""
    settings = {"lam": 2.0, "inner_steps": 1, "inner_lr": 0.3}
    ours = toys.play(PFedMe, settings=settings, local_epochs=1, batch_size=100)
    reference = toys.play(FedAvg, settings={"weighting": "uniform"}, local_epochs=1, batch_size=100, lr=0.06)
    assert toys.distance(ours[-1].next_server, reference[-1].next_server) < 1e-14


def test_pfedme_2_limits_of_both_paces():
    check_2_limits_of_both_paces(PFedMe)


def test_pfedme_3_the_personal_model_is_the_clients_own():
    check_3_the_personal_model_is_the_clients_own(PFedMe)


def test_pfedme_4_one_batch_gives_the_personal_model_away():
    check_4_one_batch_gives_the_personal_model_away(PFedMe)


def test_pfedme_5_many_inner_steps_solve_the_inner_problem():
    check_5_many_inner_steps_solve_the_inner_problem(PFedMe)


def test_the_personal_model_is_tested():
    check_the_personal_model_is_tested(PFedMe)


def test_who_never_trained_may_adapt_first():
    """inner_steps on one batch from w; whoever has trained keeps its model, and so does everybody by default."""
    w, (x, y) = toys.tiny().fresh("w"), toys.batch()
    for trained in (False, True):
        for untrained in ("global", "adapt"):
            algorithm = toys.method(PFedMe, untrained=untrained, **MILD)
            items = w | {"trained": torch.tensor(trained)}
            found = model(algorithm.personalise(toys.work(x, y), items))
            expected = w if trained or untrained == "global" else model(done(PFedMe, toys.work(x, y), w, **MILD).state)
            assert toys.same(found, expected)


def test_a_shared_model_that_overshoots_is_warned_about():
    with pytest.warns(PflsecWarning, match="beyond"):
        done(PFedMe, toys.work(*toys.batch()), toys.tiny().fresh(0), lam=11.0, inner_lr=0.01)

"""APFL. The checks take the method's class, so that planted bugs can be put to them."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from pflsec.algorithms.personalized_aggregation.apfl import APFL
from pflsec.algorithms.traditional.fedavg import FedAvg
from pflsec.core.algorithm import Algorithm, Done
from pflsec.core.items import Items, select, without_prefix
from pflsec.training.local import LocalWork
from tests import toys
from tests.algorithms.control import an_attacker_sees_what_fedavg_shows
from tests.contracts.cases import Case

PARTIAL: dict[str, Any] = {"participation": 0.75, "drop_rate": 1 / 3}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"alpha": 0.0},
    {"alpha": 1.0, "alpha_lr": 0.0},
    {"alpha": 0.3, "alpha_lr": 2.0, "alpha_every": "round"},
    {"mix": "logits", "alpha_decay": 0.5},
]


def personal(state: Items) -> Items:
    """Return the local model v of a state."""
    return select(state, "body", "head")


def models() -> tuple[Items, Items]:
    """Return a local model v and a received model w, different ones."""
    return toys.tiny().fresh("v"), toys.tiny().fresh("w")


def given(v: Items, alpha: float) -> Items:
    """Return the state of a client that has taken part before."""
    w = {f"own.{k}": torch.zeros_like(p) for k, p in v.items()}
    return v | w | {"alpha": torch.tensor(alpha), "trained": torch.tensor(True)}


def done(kind: type[Algorithm], work: LocalWork, v: Items, w: Items, alpha: float, **settings: Any) -> Done:
    """Return one exchange of a client whose local model is v, with this weight, and which receives w."""
    return toys.method(kind, **settings).local(work, given(v, alpha), w)


def mixed(w: Mapping[str, Tensor], v: Mapping[str, Tensor], alpha: Any) -> dict[str, Tensor]:
    """Return alpha v + (1 - alpha) w."""
    return {k: alpha * v[k] + (1 - alpha) * w[k] for k in w}


def check_1_what_is_sent_is_fedavgs(kind: type[Algorithm]) -> None:
    """For every weight and way to mix: the same batches, and neither v nor a in the shared model's steps."""
    reference = toys.play(FedAvg, settings={"weighting": "uniform"}, **PARTIAL)
    for settings in SETTINGS:
        for turn, other in zip(toys.play(kind, settings=settings, **PARTIAL), reference, strict=True):
            assert turn.ups.keys() == other.ups.keys()
            assert all(toys.same(up, other.ups[client]) for client, up in turn.ups.items())
            assert toys.same(turn.next_server, other.next_server)


def check_2_all_weight_on_v_is_isolated_training(kind: type[Algorithm]) -> None:
    """alpha = 1: the mixture is v, and the chain rule's factor 1."""
    made = toys.setup(kind, settings={"alpha": 1.0, "alpha_lr": 0.0}, participation=0.75)
    for turn in toys.rounds(made):
        for client in turn.ups:
            alone = toys.context(made, turn.t, client)
            expected = alone.fit(personal(turn.states[client]), on=alone.ce)
            assert toys.same(personal(turn.next_states[client]), expected)


def check_2_no_weight_on_v_leaves_it_alone(kind: type[Algorithm]) -> None:
    """alpha = 0: v has no gradient, and the mixture that is used is the client's trained w."""
    made = toys.setup(kind, settings={"alpha": 0.0, "alpha_lr": 0.0}, participation=0.75)
    for turn in toys.rounds(made):
        for client, up in turn.ups.items():
            assert toys.same(personal(turn.next_states[client]), personal(turn.states[client]))
            used = made.algorithm.deploy_trained(turn.next_states[client], turn.downs[client], up)
            assert toys.same(used, select(up, "body", "head"))


def check_3_one_step_follows_the_mixture(kind: type[Algorithm]) -> None:
    """With g the gradient at a v + (1 - a) w: v' = v - lr a g, a' = a - alpha_lr <v - w, g>; w by its own gradient."""
    (v, w), (x, y) = models(), toys.batch()
    for alpha, alpha_lr in ((0.3, 0.05), (0.8, 0.1)):
        result = done(kind, toys.work(x, y), v, w, alpha, alpha_lr=alpha_lr)
        g = toys.hand_gradient(mixed(w, v, alpha), x, y)
        assert toys.distance(personal(result.state), toys.hand_step(v, g, 0.1 * alpha)) < 1e-14
        slope = sum(float(((v[k] - w[k]) * g[k]).sum()) for k in w)
        assert abs(slope) > 1e-4
        assert result.state["alpha"].item() == pytest.approx(alpha - alpha_lr * slope, abs=1e-14)
        assert toys.distance(personal(result.up), toys.hand_step(w, toys.hand_gradient(w, x, y), 0.1)) < 1e-14


def check_3_the_weights_slope_is_the_losss(kind: type[Algorithm]) -> None:
    """(f(a + h) - f(a - h)) / 2h, whose own error is of the order of h^2; for mixed outputs as for mixed models."""
    (v, w), (x, y), h = models(), toys.batch(), 1e-5
    for mix in ("weights", "logits"):
        algorithm = toys.method(kind, mix=mix)
        assert isinstance(algorithm, APFL)

        def f(alpha: float, algorithm: APFL = algorithm) -> float:
            z = algorithm.mixed_logits(w, v, torch.tensor(alpha), x)
            return float((z.logsumexp(1) - z.gather(1, y[:, None]).squeeze(1)).mean())

        moved = done(kind, toys.work(x, y), v, w, 0.4, mix=mix).state["alpha"].item()
        assert (0.4 - moved) / 0.1 == pytest.approx((f(0.4 + h) - f(0.4 - h)) / (2 * h), rel=1e-7)


def check_3_all_gradients_are_taken_before_the_step(kind: type[Algorithm]) -> None:
    """Three batches by hand: w, v and a of every step come from the values before it."""
    (v, w), (x, y) = models(), toys.batch(10)
    result = done(kind, toys.work(x, y, batch_size=4), v, w, 0.4, alpha_lr=0.05)
    alpha = 0.4
    for a, b in toys.work(x, y, batch_size=4).batches():
        g = toys.hand_gradient(mixed(w, v, alpha), a, b)
        slope = sum(float(((v[k] - w[k]) * g[k]).sum()) for k in w)
        w = toys.hand_step(w, toys.hand_gradient(w, a, b), 0.1)
        v, alpha = toys.hand_step(v, g, 0.1 * alpha), alpha - 0.05 * slope
    assert toys.distance(personal(result.state), v) < 1e-14
    assert result.state["alpha"].item() == pytest.approx(alpha, abs=1e-14)


def check_4_the_weight_stays_in_its_interval(kind: type[Algorithm]) -> None:
    ends = set()
    for turn in toys.play(kind, 4, settings={"alpha_lr": 200.0}):
        for state in turn.next_states.values():
            assert 0 <= state["alpha"] <= 1
            ends.add(state["alpha"].item())
    assert ends & {0.0, 1.0}


def check_4_between_equal_models_the_weight_stays(kind: type[Algorithm]) -> None:
    """<v - w, g> = 0 at v = w, whatever g is."""
    (v, _), (x, y) = models(), toys.batch()
    assert done(kind, toys.work(x, y), v, v, 0.7).state["alpha"] == 0.7


def check_4_decay_pulls_the_weight_down(kind: type[Algorithm]) -> None:
    """At v = w: a' = a - alpha_lr decay a."""
    (v, _), (x, y) = models(), toys.batch()
    for alpha_lr in (0.1, 0.3):
        moved = done(kind, toys.work(x, y), v, v, 0.7, alpha_decay=0.5, alpha_lr=alpha_lr).state["alpha"]
        assert moved.item() == pytest.approx(0.7 - alpha_lr * 0.5 * 0.7, abs=1e-15)


def check_5_nothing_of_the_local_model_is_sent(kind: type[Algorithm]) -> None:
    """Neither v nor a is on the wire; absent clients keep theirs."""
    for turn in toys.play(kind, participation=0.5)[1:]:
        owned = [
            v for states in (turn.states, turn.next_states) for c in turn.ups for v in personal(states[c]).values()
        ]
        sent = [v for message in (*turn.ups.values(), *turn.downs.values()) for v in message.values()]
        assert not any(torch.equal(a, b) for a in owned for b in sent)
        assert all(
            message.keys() == toys.tiny().shapes.keys() for message in (*turn.ups.values(), *turn.downs.values())
        )
        assert all(toys.same(turn.next_states[c], turn.states[c]) for c in range(4) if c not in turn.ups)


def check_5_the_local_model_is_not_replaced_by_the_mixture(kind: type[Algorithm]) -> None:
    """Without steps nothing happens to v, while the mixture is neither v nor w."""
    (v, w), (x, y) = models(), toys.batch()
    result = done(kind, toys.work(x, y, epochs=0), v, w, 0.5)
    assert toys.same(personal(result.state), v)
    used = toys.method(kind).deploy_trained(result.state, w, result.up)
    assert toys.distance(used, mixed(w, v, 0.5)) < 1e-15
    assert toys.distance(used, v) > 1e-2


def check_once_a_round_the_weight_moves_at_the_first_step_alone(kind: type[Algorithm]) -> None:
    """Two epochs end at the weight of their first batch alone; in the other mode later steps move it too."""
    (v, w), (x, y) = models(), toys.batch(10)
    once, always = (
        done(kind, toys.work(x, y, batch_size=4, epochs=2), v, w, 0.4, alpha_every=every).state["alpha"]
        for every in ("round", "step")
    )
    first, labels = next(iter(toys.work(x, y, batch_size=4).batches()))
    assert once == done(kind, toys.work(first, labels), v, w, 0.4).state["alpha"]
    assert once != 0.4
    assert abs(once - always) > 1e-3


def test_apfl_1_what_is_sent_is_fedavgs():
    check_1_what_is_sent_is_fedavgs(APFL)


def test_apfl_2_all_weight_on_v_is_isolated_training():
    check_2_all_weight_on_v_is_isolated_training(APFL)


def test_apfl_2_no_weight_on_v_leaves_it_alone():
    check_2_no_weight_on_v_leaves_it_alone(APFL)


def test_apfl_3_one_step_follows_the_mixture():
    check_3_one_step_follows_the_mixture(APFL)


def test_apfl_3_the_weights_slope_is_the_losss():
    check_3_the_weights_slope_is_the_losss(APFL)


def test_apfl_3_all_gradients_are_taken_before_the_step():
    check_3_all_gradients_are_taken_before_the_step(APFL)


def test_apfl_4_the_weight_stays_in_its_interval():
    check_4_the_weight_stays_in_its_interval(APFL)


def test_apfl_4_between_equal_models_the_weight_stays():
    check_4_between_equal_models_the_weight_stays(APFL)


def test_apfl_4_decay_pulls_the_weight_down():
    check_4_decay_pulls_the_weight_down(APFL)


def test_apfl_5_nothing_of_the_local_model_is_sent():
    check_5_nothing_of_the_local_model_is_sent(APFL)


def test_apfl_5_the_local_model_is_not_replaced_by_the_mixture():
    check_5_the_local_model_is_not_replaced_by_the_mixture(APFL)


def test_once_a_round_the_weight_moves_at_the_first_step_alone():
    check_once_a_round_the_weight_moves_at_the_first_step_alone(APFL)


def test_outputs_are_mixed_as_outputs():
    """One step with mixed logits: v' = v - lr grad of CE(a f_v + (1 - a) f_w), f_w being constant."""
    (v, w), (x, y) = models(), toys.batch()
    net = toys.tiny()
    fixed = net.logits(w, x)

    def loss(at: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        z = 0.3 * net.logits(at, x) + 0.7 * fixed
        return (z.logsumexp(1) - z.gather(1, y[:, None]).squeeze(1)).mean()

    result = done(APFL, toys.work(x, y, net), v, w, 0.3, mix="logits")
    assert toys.distance(personal(result.state), toys.hand_step(v, toys.hand_gradient(v, x, y, loss), 0.1)) < 1e-14
    algorithm = toys.method(APFL, mix="logits")
    items = algorithm.deploy(result.state, w)
    z = torch.lerp(net.logits(result.up, x), net.logits(personal(result.state), x), result.state["alpha"])
    assert torch.equal(algorithm.scores(items, x), z)


def test_a_client_that_never_took_part_uses_the_shared_model():
    turn = toys.play(APFL, 1, participation=0.25)[0]
    algorithm = toys.method(APFL)
    for client in set(range(4)) - turn.ups.keys():
        assert toys.same(algorithm.deploy(turn.states[client], turn.next_server), turn.next_server)


@pytest.mark.parametrize("which", ["own", "fresh"])
def test_the_mixture_in_use_takes_the_clients_last_model_or_the_newest(which: str):
    made = toys.setup(APFL, settings={"eval_global": which})
    turn = toys.rounds(made, 2)[-1]
    state = turn.next_states[1]
    w = turn.ups[1] if which == "own" else turn.next_server
    used = made.algorithm.deploy(state, turn.next_server)
    assert toys.distance(used, mixed(w, personal(state), state["alpha"])) < 1e-15
    assert toys.distance(turn.ups[1], turn.next_server) > 1e-3
    assert bool(without_prefix("own", state)) == (which == "own")


@pytest.mark.parametrize("settings", [{}, {"alpha_every": "round"}, {"mix": "logits"}], ids=str)
@pytest.mark.parametrize("history", [True, False])
def test_an_attacker_sees_what_fedavg_shows_and_need_not_know_the_local_model(history: bool, settings: dict[str, Any]):
    """The target, the replay and the unknowns are those of FedAvg: another control of every table of leakage."""
    fedavg = Case("fedavg", (("weighting", "uniform"),))
    an_attacker_sees_what_fedavg_shows(Case("apfl", tuple(settings.items())), fedavg, history)

"""Ditto. The checks take the method's class, so that planted bugs can be put to them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pflsec.algorithms.regularization.ditto import Ditto
from pflsec.algorithms.traditional.fedavg import FedAvg
from pflsec.core.algorithm import Algorithm, Done
from pflsec.core.items import Items, select
from pflsec.core.local import half_squared_distance
from pflsec.training.local import LocalWork
from tests import toys
from tests.algorithms.control import an_attacker_sees_what_fedavg_shows
from tests.contracts.cases import Case

PARTIAL: dict[str, Any] = {"participation": 0.75, "drop_rate": 1 / 3}


def personal(state: Items) -> Items:
    """Return the personal model of a state."""
    return select(state, "body", "head")


def models() -> tuple[Items, Items]:
    """Return a personal model v and a received model w, different ones."""
    return toys.tiny().fresh("v"), toys.tiny().fresh("w")


def done(kind: type[Algorithm], work: LocalWork, v: Items, w: Items, **settings: Any) -> Done:
    """Return one exchange of a client whose personal model is v, and which receives w."""
    return toys.method(kind, **settings).local(work, v | {"trained": torch.tensor(True)}, w)


def check_1_what_is_sent_is_fedavgs(kind: type[Algorithm]) -> None:
    """For every pull and every personal effort: the personal task does not touch the shared one."""
    reference = toys.play(FedAvg, **PARTIAL)
    for settings in ({}, {"lam": 0.0}, {"lam": 5.0, "personal_epochs": 3}, {"personal_epochs": 0}):
        for turn, other in zip(toys.play(kind, settings=settings, **PARTIAL), reference, strict=True):
            assert turn.ups.keys() == other.ups.keys()
            assert all(toys.same(up, other.ups[client]) for client, up in turn.ups.items())
            assert toys.same(turn.next_server, other.next_server)


def check_2_without_the_pull_it_is_isolated_training(kind: type[Algorithm]) -> None:
    made = toys.setup(kind, settings={"lam": 0.0}, participation=0.75)
    for turn in toys.rounds(made):
        for client in turn.ups:
            alone = toys.context(made, turn.t, client)
            expected = alone.fit(personal(turn.states[client]), on=alone.ce, phase="personal")
            assert toys.same(personal(turn.next_states[client]), expected)


def check_3_one_personal_step_follows_the_objective(kind: type[Algorithm]) -> None:
    """F(v) + lam/2 |v - w|^2 has gradient g + lam (v - w)."""
    (v, w), (x, y) = models(), toys.batch()
    for lam in (0.5, 3.0):
        found = personal(done(kind, toys.work(x, y), v, w, lam=lam).state)
        g = toys.hand_gradient(v, x, y)
        assert toys.distance(found, {k: v[k] - 0.1 * (g[k] + lam * (v[k] - w[k])) for k in v}) < 1e-15

        def objective(at: Any, x: Tensor, y: Tensor, lam: float = lam) -> Tensor:
            return toys.hand_loss(at, x, y) + lam / 2 * sum(((at[k] - w[k]) ** 2).sum() for k in w)

        assert toys.distance(found, toys.hand_step(v, toys.hand_gradient(v, x, y, objective), 0.1)) < 1e-14


class Quadratic(LocalWork):
    """Local work whose loss is 1/2 |theta - 1|^2 for every example, whatever the network says."""

    def ce(self, params: Any, x: Tensor, y: Tensor) -> Tensor:
        return (torch.stack([(p - 1).square().sum() for p in params.values()]).sum() / 2).expand(len(y))


def check_3_the_anchor_is_the_model_that_was_received(kind: type[Algorithm]) -> None:
    """Loss (v - 1)^2 / 2, w = 0, lam = 1, one step of 0.1 from v = 0.5:
    v - 0.1 ((v - 1) + (v - 0)) = 0.5. At the trained w, which is 0.1, it would be 0.51."""
    algorithm, (x, y) = toys.method(kind), toys.batch()
    work = Quadratic(**vars(toys.work(x, y, algorithm.net)))
    v, w = ({k: torch.full_like(p, value) for k, p in models()[0].items()} for value in (0.5, 0.0))
    result = done(kind, work, v, w, lam=1.0)
    assert all(torch.allclose(p, torch.tensor(0.5)) for p in personal(result.state).values())
    assert all(torch.allclose(p, torch.tensor(0.1)) for p in personal(result.up).values())


def check_4_the_order_of_the_two_tasks_changes_nothing(kind: type[Algorithm]) -> None:
    """Shared task first, then the personal one, in a context of the same name: the same bits."""
    (v, w), (x, y) = models(), toys.batch(10)
    result = done(kind, toys.work(x, y, epochs=3, batch_size=4), v, w, lam=0.7)
    other = toys.work(x, y, epochs=3, batch_size=4)
    assert toys.same(personal(result.up), other.fit(w, on=other.ce))
    pulled = other.fit(v, on=other.ce, penalty=half_squared_distance(0.7, w), phase="personal")
    assert toys.same(personal(result.state), pulled)


def check_5_nothing_of_the_personal_model_is_sent(kind: type[Algorithm]) -> None:
    """Neither by memory nor by value; absent clients keep theirs bit for bit."""
    for turn in toys.play(kind, participation=0.5)[1:]:
        owned = [
            v for states in (turn.states, turn.next_states) for c in turn.ups for v in personal(states[c]).values()
        ]
        sent = [v for message in (*turn.ups.values(), *turn.downs.values()) for v in message.values()]
        assert not {v.data_ptr() for v in owned} & {v.data_ptr() for v in sent}
        assert not any(torch.equal(a, b) for a in owned for b in sent)
        assert all(toys.same(turn.next_states[c], turn.states[c]) for c in range(4) if c not in turn.ups)


def test_ditto_1_what_is_sent_is_fedavgs():
    check_1_what_is_sent_is_fedavgs(Ditto)


def test_ditto_2_without_the_pull_it_is_isolated_training():
    check_2_without_the_pull_it_is_isolated_training(Ditto)


def test_ditto_3_one_personal_step_follows_the_objective():
    check_3_one_personal_step_follows_the_objective(Ditto)


def test_ditto_3_the_anchor_is_the_model_that_was_received():
    check_3_the_anchor_is_the_model_that_was_received(Ditto)


def test_ditto_4_the_order_of_the_two_tasks_changes_nothing():
    check_4_the_order_of_the_two_tasks_changes_nothing(Ditto)


def test_ditto_5_nothing_of_the_personal_model_is_sent():
    check_5_nothing_of_the_personal_model_is_sent(Ditto)


def test_without_personal_epochs_the_personal_model_stays():
    for turn in toys.play(Ditto, settings={"personal_epochs": 0}):
        assert all(toys.same(personal(turn.next_states[c]), personal(turn.states[c])) for c in range(4))


def test_a_strong_pull_pins_the_personal_model():
    """v' - w = (1 - lr lam)(v - w) - lr g: at lr lam = 1 only the last gradient is left."""
    (v, w), (x, y) = models(), toys.batch()
    found = personal(done(Ditto, toys.work(x, y), v, w, lam=10.0).state)
    assert toys.distance(found, toys.hand_step(w, toys.hand_gradient(v, x, y), 0.1)) < 1e-14


@pytest.mark.parametrize("warm", [False, True])
def test_a_newcomer_starts_at_the_first_model_or_at_the_one_it_receives(warm: bool):
    """Without personal epochs the state shows the start; from the second exchange on it is the client's own."""
    settings = {"warm_start": warm, "personal_epochs": 0}
    turns = toys.play(Ditto, 8, settings=settings, participation=0.25, seed=1)
    first = personal(turns[0].server)
    own: dict[int, Items] = {}
    for turn in turns:
        (client,) = turn.ups
        own.setdefault(client, turn.downs[client] if warm else first)
        assert toys.same(personal(turn.next_states[client]), own[client])
    assert len(own) > 2
    assert len(turns) > len(own)


def test_the_personal_model_is_tested_beside_the_shared_one():
    made = toys.setup(Ditto, lr=0.5)
    turn = toys.rounds(made)[-1]
    row = turn.rows[1]
    x, y = made.federation.test(1)
    right = (made.net.logits(personal(turn.next_states[1]), x).argmax(1) == y).double().mean()
    assert row["accuracy_post_agg"] == row["accuracy_post_local"] == pytest.approx(float(right))
    assert turn.metrics["global_accuracy"] is not None


@pytest.mark.parametrize("history", [True, False])
def test_an_attacker_sees_what_fedavg_shows_and_need_not_know_the_personal_model(history: bool):
    """The target, the replay and the unknowns are those of FedAvg: the control of every table of leakage."""
    an_attacker_sees_what_fedavg_shows(Case("ditto"), Case("fedavg"), history)

"""FML. The checks take the method's class, so that planted bugs can be put to them."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pflsec.algorithms.knowledge_distillation.fml import FML
from pflsec.algorithms.traditional.fedavg import FedAvg
from pflsec.core.algorithm import Algorithm, Done
from pflsec.core.items import Items
from tests import toys

PARTIAL: dict[str, Any] = {"participation": 0.75, "drop_rate": 1 / 3}
WEIGHTS = [(0.5, 0.5), (0.2, 0.9), (0.0, 1.0), (1.0, 0.0)]
"""Pairs (alpha, beta)."""


def models() -> tuple[Items, Items]:
    """Return a personal model theta and a shared model phi, different ones."""
    return toys.tiny().fresh("theta"), toys.tiny().fresh("phi")


def hand_log_p(items: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Return the log-probabilities [B, C] of the tiny network."""
    return F.linear(toys.hand_features(items, x), items["head.weight"], items["head.bias"]).log_softmax(1)


def mutual(weight: float, teacher: Tensor) -> toys.Loss:
    """Return weight CE + (1 - weight) KL(teacher | own prediction), the KL a sum over classes and a mean over the batch."""

    def loss(model: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        kl = F.kl_div(hand_log_p(model, x), teacher, reduction="batchmean")
        return weight * toys.hand_loss(model, x, y) + (1 - weight) * kl

    return loss


def one_step(kind: type[Algorithm], theta: Items, phi: Items, alpha: float, beta: float) -> Done:
    """Return an exchange of one step at rate 0.1 on ten rows."""
    return toys.method(kind, alpha=alpha, beta=beta).local(toys.work(*toys.batch(10)), theta, phi)


def check_0_one_step_follows_both_objectives(kind: type[Algorithm]) -> None:
    """Both from the predictions before the step; the other's prediction is a constant."""
    (theta, phi), (x, y) = models(), toys.batch(10)
    p, q = hand_log_p(theta, x).exp(), hand_log_p(phi, x).exp()
    for alpha, beta in WEIGHTS:
        found = one_step(kind, theta, phi, alpha, beta)
        expected = toys.hand_step(theta, toys.hand_gradient(theta, x, y, mutual(alpha, q)), 0.1)
        assert toys.distance(found.state, expected) < 1e-14
        expected = toys.hand_step(phi, toys.hand_gradient(phi, x, y, mutual(beta, p)), 0.1)
        assert toys.distance(found.up, expected) < 1e-14


def check_1_with_labels_alone_it_is_fedavg_and_isolated_training(kind: type[Algorithm]) -> None:
    made = toys.setup(kind, settings={"alpha": 1.0, "beta": 1.0}, **PARTIAL)
    reference = toys.play(FedAvg, settings={"weighting": "uniform"}, **PARTIAL)
    for turn, other in zip(toys.rounds(made), reference, strict=True):
        assert turn.ups.keys() == other.ups.keys()
        assert all(toys.same(up, other.ups[client]) for client, up in turn.ups.items())
        assert toys.same(turn.next_server, other.next_server)
        for client in turn.ups:
            alone = toys.context(made, turn.t, client)
            assert toys.same(turn.next_states[client], alone.fit(turn.states[client], on=alone.ce))


def check_2_the_wire_shows_cross_entropy_with_a_soft_label(kind: type[Algorithm]) -> None:
    """beta CE(q, y) + (1 - beta) KL(p | q) = CE(q, s) + constant, with s = beta y + (1 - beta) p."""
    (theta, phi), (x, y) = models(), toys.batch(10)
    for alpha, beta in WEIGHTS:
        up = one_step(kind, theta, phi, alpha, beta).up
        s = beta * F.one_hot(y, toys.CLASSES) + (1 - beta) * hand_log_p(theta, x).exp()
        g = toys.hand_gradient(phi, x, y, lambda model, x, y, s=s: -(s * hand_log_p(model, x)).sum(1).mean())
        assert toys.distance({k: (phi[k] - up[k]) / 0.1 for k in phi}, g) < 1e-13


def check_3_equal_models_have_nothing_to_tell_each_other(kind: type[Algorithm]) -> None:
    """p = q: the KL is at its minimum, and beta times FedAvg's gradient is left, alpha times for the personal model."""
    (_, phi), (x, y) = models(), toys.batch(10)
    g = toys.hand_gradient(phi, x, y)
    for alpha, beta in WEIGHTS:
        found = one_step(kind, phi, phi, alpha, beta)
        assert toys.distance(found.up, toys.hand_step(phi, g, 0.1 * beta)) < 1e-15
        assert toys.distance(found.state, toys.hand_step(phi, g, 0.1 * alpha)) < 1e-15


def check_4_a_loss_moves_its_own_model_alone(kind: type[Algorithm]) -> None:
    """In one step alpha is nothing to the shared model and beta nothing to the personal one, bit for bit."""
    theta, phi = models()
    reference = one_step(kind, theta, phi, 0.3, 0.6)
    for other in (0.0, 0.9, 1.0):
        assert toys.same(one_step(kind, theta, phi, other, 0.6).up, reference.up)
        assert toys.same(one_step(kind, theta, phi, 0.3, other).state, reference.state)


def check_5_nothing_of_the_personal_model_is_sent(kind: type[Algorithm]) -> None:
    for turn in toys.play(kind, participation=0.5):
        owned = [v for states in (turn.states, turn.next_states) for c in turn.ups for v in states[c].values()]
        sent = [v for message in (*turn.ups.values(), *turn.downs.values()) for v in message.values()]
        assert not {v.data_ptr() for v in owned} & {v.data_ptr() for v in sent}
        assert not any(torch.equal(a, b) for a in owned for b in sent)


def check_6_the_shared_model_is_the_plain_mean(kind: type[Algorithm]) -> None:
    """Whatever the number of rows, which differs."""
    for turn in toys.play(kind, participation=0.75):
        mean = {k: torch.stack([up[k] for up in turn.ups.values()]).mean(0) for k in turn.server}
        assert toys.distance(turn.next_server, mean) < 1e-15


def test_fml_0_one_step_follows_both_objectives():
    check_0_one_step_follows_both_objectives(FML)


def test_fml_1_with_labels_alone_it_is_fedavg_and_isolated_training():
    check_1_with_labels_alone_it_is_fedavg_and_isolated_training(FML)


def test_fml_2_the_wire_shows_cross_entropy_with_a_soft_label():
    check_2_the_wire_shows_cross_entropy_with_a_soft_label(FML)


def test_fml_3_equal_models_have_nothing_to_tell_each_other():
    check_3_equal_models_have_nothing_to_tell_each_other(FML)


def test_fml_4_a_loss_moves_its_own_model_alone():
    check_4_a_loss_moves_its_own_model_alone(FML)


def test_fml_5_nothing_of_the_personal_model_is_sent():
    check_5_nothing_of_the_personal_model_is_sent(FML)


def test_fml_6_the_shared_model_is_the_plain_mean():
    check_6_the_shared_model_is_the_plain_mean(FML)


def test_a_client_that_returns_meets_a_newer_shared_model_with_its_own_as_it_left():
    turns = toys.play(FML, 6, participation=0.25, seed=1)
    last: dict[int, Items] = {}
    for turn in turns:
        (client,) = turn.ups
        assert client not in last or toys.same(turn.states[client], last[client])
        assert toys.same(turn.downs[client], turn.server)
        last[client] = turn.next_states[client]
    assert len(last) < len(turns)


def test_of_one_sample_and_of_one_class():
    """B = 1, and logits so far apart that a probability is 0: all stays finite."""
    theta, phi = models()
    far = {k: 1e4 * v for k, v in phi.items()}
    result = toys.method(FML).local(toys.work(*toys.batch(1)), theta, far)
    assert all(torch.isfinite(v).all() for v in (*result.up.values(), *result.state.values()))


def test_the_personal_model_is_tested_beside_the_shared_one():
    made = toys.setup(FML, lr=0.5)
    turn = toys.rounds(made)[-1]
    x, y = made.federation.test(1)
    right = (hand_log_p(turn.next_states[1], x).argmax(1) == y).double().mean()
    assert turn.rows[1]["accuracy_post_agg"] == turn.rows[1]["accuracy_post_local"] == pytest.approx(float(right))
    assert turn.metrics["global_accuracy"] is not None

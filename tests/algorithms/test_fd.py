"""FD. The checks take the method's class, so that planted bugs can be put to them."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pflsec.algorithms.knowledge_distillation.fd import FD
from pflsec.core.algorithm import Algorithm, Done
from pflsec.core.items import Items
from pflsec.models.network import Network
from tests import toys

PARTIAL: dict[str, Any] = {"participation": 0.75, "drop_rate": 1 / 3}


def hand_logits(items: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Return the logits [B, C] of the tiny network."""
    return F.linear(toys.hand_features(items, x), items["head.weight"], items["head.bias"])


def table(seed: int = 3) -> Tensor:
    """Return three probability vectors."""
    return torch.rand(toys.CLASSES, toys.CLASSES, generator=torch.Generator().manual_seed(seed)).softmax(1)


def downlink(*classes: int) -> Items:
    """Return a teacher of these classes."""
    known = torch.zeros(toys.CLASSES, dtype=torch.bool)
    known[list(classes)] = True
    return {"teacher": table()[known], "known": known}


def done(kind: type[Algorithm], down: Items, settings: Mapping[str, Any] | None = None, **changes: Any) -> Done:
    """Return one exchange of a client with ten rows of all classes."""
    algorithm, (x, y) = toys.method(kind, **(settings or {})), toys.batch(10)
    work = toys.work(**({"x": x, "y": y, "net": algorithm.net} | changes))
    return algorithm.local(work, algorithm.net.fresh(0), down)


def rows(up: Items) -> dict[int, Tensor]:
    """Return {class: row} of an upload."""
    return dict(zip(up["held"].nonzero().flatten().tolist(), up["output"], strict=True))


def taught(down: Items) -> dict[int, Tensor]:
    """Return {class: row} of a downlink."""
    return dict(zip(down["known"].nonzero().flatten().tolist(), down["teacher"], strict=True))


def means(of: Tensor, y: Tensor) -> Tensor:
    """Return the mean over each class of these rows."""
    return torch.stack([of[y == k].mean(0) for k in range(toys.CLASSES)])


def check_0_one_step_follows_the_objective(kind: type[Algorithm]) -> None:
    """L = mean_b { H(y_b, p_b) + gamma [y_b taught] H(T_(y_b), p_b) }; rows without a teacher stay in the mean."""
    model, (x, y), down = toys.tiny().fresh(0), toys.batch(10), downlink(0, 2)

    def loss(model: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        log_p = hand_logits(model, x).log_softmax(1)
        return toys.hand_loss(model, x, y) - 2.0 * (table()[y] * log_p).sum(1)[down["known"][y]].sum() / len(y)

    expected = toys.hand_step(model, toys.hand_gradient(model, x, y, loss), 0.1)
    assert toys.distance(done(kind, down, {"gamma": 2.0}).state, expected) < 1e-14


def check_0_logits_are_compared_by_their_squared_distance(kind: type[Algorithm]) -> None:
    """In that space: mean_b { H(y_b, p_b) + gamma/C [y_b taught] |z_b - T_(y_b)|^2 }."""
    model, (x, y), down = toys.tiny().fresh(0), toys.batch(10), downlink(0, 2)

    def loss(model: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        off = (hand_logits(model, x) - table()[y]).square().sum(1)
        return toys.hand_loss(model, x, y) + 2.0 / (toys.CLASSES * len(y)) * off[down["known"][y]].sum()

    result = done(kind, down, {"gamma": 2.0, "space": "logits"})
    assert toys.distance(result.state, toys.hand_step(model, toys.hand_gradient(model, x, y, loss), 0.1)) < 1e-14
    assert torch.allclose(result.up["output"], means(hand_logits(model, x), y), atol=1e-14)


def deep() -> nn.Module:
    """Return another architecture: 16 -> 7 -> 6 -> 3."""
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        flatten=nn.Flatten(), a=nn.Linear(16, 7), b=nn.Linear(7, 6), fc=nn.Linear(6, toys.CLASSES)
    )
    return nn.Sequential(layers)


def check_1_the_upload_is_rows_and_label_set(kind: type[Algorithm]) -> None:
    """For any architecture: at most C^2 numbers and C bits, nothing of a parameter's shape but [C], that of the mask."""
    for net in (toys.tiny(), Network(deep, toys.SHAPE, toys.CLASSES)):
        parameters = {shape for shape in net.shapes.values() if shape != (toys.CLASSES,)}
        for turn in toys.play(kind, net=net):
            for client, up in turn.ups.items():
                held = toys.HELD[client]
                assert {k: tuple(v.shape) for k, v in up.items()} == {
                    "output": (len(held), toys.CLASSES),
                    "held": (toys.CLASSES,),
                }
                assert up["held"].dtype == torch.bool
                assert rows(up).keys() == set(held)
                messages = (*up.values(), *turn.downs[client].values())
                assert not {tuple(v.shape) for v in messages} & parameters


def check_2_rows_are_probability_vectors(kind: type[Algorithm]) -> None:
    for turn in toys.play(kind, settings={"gamma": 3.0}, lr=0.5):
        for row in [
            r for m in (*turn.ups.values(), *turn.downs.values()) for r in m.get("output", m.get("teacher", []))
        ]:
            assert row.min() >= 0
            assert abs(float(row.sum()) - 1) < 1e-12


def check_3_without_the_teacher_it_is_isolated_training(kind: type[Algorithm]) -> None:
    made = toys.setup(kind, settings={"gamma": 0.0}, **PARTIAL)
    for turn in toys.rounds(made):
        for client in turn.ups:
            alone = toys.context(made, turn.t, client)
            assert toys.same(turn.next_states[client], alone.fit(turn.states[client], on=alone.ce))


def check_4_the_teacher_leaves_its_client_out(kind: type[Algorithm]) -> None:
    """|N_l without i| T^i_l + F^i_l = sum_j F^j_l; and what a client sends has no part in what it is sent."""
    algorithm, turn = toys.method(kind), toys.play(kind, 1)[0]
    for client in range(4):
        teacher = taught(algorithm.downlink(turn.next_server, client))
        for k in range(toys.CLASSES):
            sent = {c: rows(up)[k] for c, up in turn.ups.items() if up["held"][k]}
            others = len(sent.keys() - {client})
            assert (k in teacher) == (others > 0)
            if others:
                own = sent.get(client, torch.zeros(toys.CLASSES))
                assert torch.allclose(others * teacher[k] + own, torch.stack([*sent.values()]).sum(0), atol=1e-14)
        other = dict(turn.ups) | {client: turn.ups[client] | {"output": turn.ups[client]["output"].flip(1)}}
        again = algorithm.downlink(algorithm.aggregate(turn.server, other), client)
        assert toys.same(again, algorithm.downlink(turn.next_server, client))


def check_5_two_holders_teach_each_other(kind: type[Algorithm]) -> None:
    """Class 2 is held by clients 1 and 3 alone: each is sent the other's row, bit for bit."""
    algorithm, turn = toys.method(kind), toys.play(kind, 1)[0]
    for client, other in ((1, 3), (3, 1)):
        assert torch.equal(taught(algorithm.downlink(turn.next_server, client))[2], rows(turn.ups[other])[2])


def check_6_the_gradient_at_the_logits(kind: type[Algorithm]) -> None:
    """g_b = ((1 + gamma) p_b - y_b - gamma T_(y_b)) / B. The head's bias gets sum_b g_b, its weight sum_b g_b f(x_b)^T."""
    model, (x, y), gamma = toys.tiny().fresh(0), toys.batch(10), 2.5
    found = done(kind, downlink(0, 1, 2), {"gamma": gamma}).state
    target = F.one_hot(y, toys.CLASSES)
    g = ((1 + gamma) * hand_logits(model, x).softmax(1) - target - gamma * table()[y]) / len(y)
    assert torch.allclose((model["head.bias"] - found["head.bias"]) / 0.1, g.sum(0), atol=1e-13)
    slope = g.T @ toys.hand_features(model, x)
    assert torch.allclose((model["head.weight"] - found["head.weight"]) / 0.1, slope, atol=1e-13)


def check_what_is_sent_are_the_predictions_of_the_steps(kind: type[Algorithm]) -> None:
    """They are made before each step: with one step by the model as it was; with two, the mean over both models."""
    x, y = toys.batch(5, classes=(0, 0, 0, 1, 2))
    model, trained = toys.tiny().fresh(0), done(kind, downlink(), x=x, y=y).state
    before, between = (hand_logits(m, x).softmax(1) for m in (model, trained))
    one, two = (done(kind, downlink(), x=x, y=y, epochs=epochs).up["output"] for epochs in (1, 2))
    assert torch.allclose(one, means(before, y), atol=1e-15)
    assert torch.allclose(one[1:], before[3:], atol=1e-15)  # a class of one sample: its prediction itself
    assert torch.allclose(two, means((before + between) / 2, y), atol=1e-15)


def check_a_row_stays_while_its_client_is_away(kind: type[Algorithm]) -> None:
    """Client 0 alone in the second round: of client 3, whose class 2 nobody else sent it, client 1 keeps being taught."""
    algorithm, turn = toys.method(kind), toys.play(kind, 1)[0]
    after = algorithm.aggregate(turn.next_server, {0: turn.ups[1]})  # other classes than before: (1, 2), not (0, 1)
    assert after["held"][0].tolist() == [False, True, True]
    assert torch.equal(after["output"][1:], turn.next_server["output"][1:])
    teacher = taught(algorithm.downlink(after, 1))
    assert torch.allclose(teacher[2], (rows(turn.ups[1])[2] + rows(turn.ups[3])[2]) / 2, atol=1e-15)
    assert torch.allclose(teacher[0], (rows(turn.ups[2])[0] + rows(turn.ups[3])[0]) / 2, atol=1e-15)


def test_fd_0_one_step_follows_the_objective():
    check_0_one_step_follows_the_objective(FD)


def test_fd_0_logits_are_compared_by_their_squared_distance():
    check_0_logits_are_compared_by_their_squared_distance(FD)


def test_fd_1_the_upload_is_rows_and_label_set():
    check_1_the_upload_is_rows_and_label_set(FD)


def test_fd_2_rows_are_probability_vectors():
    check_2_rows_are_probability_vectors(FD)


def test_fd_3_without_the_teacher_it_is_isolated_training():
    check_3_without_the_teacher_it_is_isolated_training(FD)


def test_fd_4_the_teacher_leaves_its_client_out():
    check_4_the_teacher_leaves_its_client_out(FD)


def test_fd_5_two_holders_teach_each_other():
    check_5_two_holders_teach_each_other(FD)


def test_fd_6_the_gradient_at_the_logits():
    check_6_the_gradient_at_the_logits(FD)


def test_what_is_sent_are_the_predictions_of_the_steps():
    check_what_is_sent_are_the_predictions_of_the_steps(FD)


def test_a_row_stays_while_its_client_is_away():
    check_a_row_stays_while_its_client_is_away(FD)


def test_without_keep_the_teacher_is_of_this_rounds_clients():
    algorithm, turn = toys.method(FD, keep=False), toys.play(FD, 1)[0]
    after = algorithm.aggregate(turn.next_server, {0: turn.ups[0]})
    assert taught(algorithm.downlink(after, 1)).keys() == {0, 1}
    assert not taught(algorithm.downlink(after, 0))


def test_with_include_self_everybody_has_one_teacher():
    algorithm, turn = toys.method(FD, include_self=True), toys.play(FD, 1)[0]
    downs = [algorithm.downlink(turn.next_server, client) for client in range(4)]
    assert all(toys.same(down, downs[0]) for down in downs)
    expected = (rows(turn.ups[1])[2] + rows(turn.ups[3])[2]) / 2
    assert torch.allclose(taught(downs[0])[2], expected, atol=1e-15)


def test_the_trained_model_may_be_the_one_that_predicts():
    (x, y), result = toys.batch(10), done(FD, downlink(0), {"collect": "eval"}, epochs=3, batch_size=4)
    assert torch.allclose(result.up["output"], means(hand_logits(result.state, x).softmax(1), y), atol=1e-14)


def test_the_first_round_has_no_teacher_and_a_lost_upload_is_in_none():
    turns = toys.play(FD, drop_rate=0.5)
    assert not any(down["known"].any() for down in turns[0].downs.values())
    assert all(down["known"].any() for down in turns[1].downs.values())
    for turn in turns:
        for client in turn.metrics["lost"]:
            assert torch.equal(turn.next_server["held"][client], turn.server["held"][client])
            assert torch.equal(turn.next_server["output"][client], turn.server["output"][client])


def test_the_reported_loss_counts_agreement_as_nothing():
    """A teacher that says what the model says: H(T, p) less T's entropy is 0, and CE alone is left."""
    net, (x, y) = toys.tiny(), toys.batch(2, classes=(0, 1))
    model = net.fresh(0)
    p = hand_logits(model, x).softmax(1)
    down = {"teacher": p, "known": torch.tensor([True, True, False])}
    work = toys.work(x, y, net)
    toys.method(FD, net, gamma=7.0).local(work, model, down)
    assert float(work.losses[0]) == pytest.approx(float(toys.hand_loss(model, x, y)), abs=1e-14)

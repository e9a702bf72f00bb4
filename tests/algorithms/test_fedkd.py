"""FedKD. The checks take the method's class, so that planted bugs can be put to them."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pflsec.algorithms.knowledge_distillation.fedkd import FedKD
from pflsec.algorithms.traditional.fedavg import FedAvg
from pflsec.core.algorithm import Algorithm, Done
from pflsec.core.items import Items, combine, prefixed, select, subtract, weighted_mean, without_prefix
from pflsec.core.local import Local, LossPerExample
from pflsec.training import lowrank
from tests import toys
from tests.contracts.cases import CLIENT, Case, exchange

PARTIAL: dict[str, Any] = {"participation": 0.75, "drop_rate": 1 / 3}
LOSSLESS: dict[str, Any] = {"start_energy": 1.0, "end_energy": 1.0}
D = 5


def models() -> tuple[Items, Items, Tensor]:
    """Return a mentor, a mentee, and a projection."""
    w = torch.randn(D, D, generator=torch.Generator().manual_seed(5)) / D
    return toys.tiny().fresh("mentor"), toys.tiny().fresh("mentee"), w


def state_of(mentor: Items, mentee: Items, w: Tensor) -> Items:
    return mentor | prefixed("mentee", mentee) | {"projection": w}


def done(kind: type[Algorithm], mentor: Items, mentee: Items, w: Tensor, **changes: Any) -> tuple[Done, Items]:
    """Return an exchange on ten rows, lossless unless other settings are given, and the change that was sent."""
    algorithm: Any = toys.method(kind, **(LOSSLESS | changes.pop("settings", {})))
    work = toys.work(*changes.pop("rows", toys.batch(10)), net=algorithm.net, **changes)
    down = mentee | {"energy": torch.tensor(algorithm.energy(0))}
    result = algorithm.local(work, state_of(mentor, mentee, w), down)
    return result, lowrank.unpack(result.up, algorithm.net.shapes)


def parts(items: Mapping[str, Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return features, log-probabilities and the mean cross entropy of a model."""
    h = toys.hand_features(items, x)
    return h, F.linear(h, items["head.weight"], items["head.bias"]).log_softmax(1), toys.hand_loss(items, x, y)


def hand_loss(of: str, mentor: Items, mentee: Items, w: Tensor) -> toys.Loss:
    """Return L_t or L_s: CE + (KL(other | own) + mean |H_t - W H_s|^2) / (CE_t + CE_s). What is not `of` is given here."""

    def loss(own: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        t, s = (own, mentee) if of == "mentor" else (mentor, own)
        (h_t, p_t, ce_t), (h_s, p_s, ce_s) = parts(t, x, y), parts(s, x, y)
        projection = own.get("projection", w)
        teacher, student, ce = (p_s, p_t, ce_t) if of == "mentor" else (p_t, p_s, ce_s)
        kl = F.kl_div(student, teacher, reduction="batchmean", log_target=True)
        return ce + (kl + F.mse_loss(h_t, h_s @ projection.T)) / (ce_t + ce_s)

    return loss


def check_0_one_step_follows_both_objectives(kind: type[Algorithm]) -> None:
    """Each model its own loss's gradient, all of the other held constant; W goes with the mentor."""
    (mentor, mentee, w), (x, y) = models(), toys.batch(10)
    found, change = done(kind, mentor, mentee, w)
    own = mentor | {"projection": w}
    expected = toys.hand_step(own, toys.hand_gradient(own, x, y, hand_loss("mentor", mentor, mentee, w)), 0.1)
    assert toys.distance(select(found.state, "body", "head", "projection"), expected) < 1e-14
    g = toys.hand_gradient(mentee, x, y, hand_loss("mentee", mentor, mentee, w))
    assert toys.distance(change, {k: -0.1 * v for k, v in g.items()}) < 1e-14


def check_0_the_heads_gradient(kind: type[Algorithm]) -> None:
    """Features do not depend on the head, so there (1 - (KL + MSE)/S^2) grad CE_s + grad KL / S is left."""
    (mentor, mentee, w), (x, y) = models(), toys.batch(10)
    (h_t, p_t, ce_t), (h_s, p_s, ce_s) = parts(mentor, x, y), parts(mentee, x, y)
    kl = (p_t.exp() * (p_t - p_s)).sum(1).mean()
    scale, off = ce_t + ce_s, kl + (h_t - h_s @ w.T).square().mean()
    to_ce, to_kl = (p_s.exp() - F.one_hot(y, toys.CLASSES)) / len(y), (p_s.exp() - p_t.exp()) / len(y)
    _, change = done(kind, mentor, mentee, w)
    expected = ((1 - off / scale**2) * to_ce + to_kl / scale).T @ h_s
    assert torch.allclose(change["head.weight"] / -0.1, expected, atol=1e-13)
    _, change = done(kind, mentor, mentee, w, settings={"constant_scale": True})
    assert torch.allclose(change["head.weight"] / -0.1, (to_ce + to_kl / scale).T @ h_s, atol=1e-13)


def check_1_what_is_left_out_is_at_most_what_the_energy_allows(kind: type[Algorithm]) -> None:
    """|D - D_k| <= sqrt(1 - T) |D| for every matrix, k >= 1, and vectors exactly: against the same exchange, lossless."""
    (mentor, mentee, w), more = models(), {"epochs": 3, "batch_size": 4}
    _, whole = done(kind, mentor, mentee, w, **more)
    assert all(v.norm() > 0 for v in whole.values())
    for energy in (0.0, 0.3, 0.9, 0.98, 0.9999999):
        found, sent = done(kind, mentor, mentee, w, settings={"start_energy": energy}, **more)
        for (name, value), k in zip(whole.items(), found.up["ranks"].tolist(), strict=True):
            left = float((value - sent[name]).norm() / value.norm())
            assert left <= (0 if value.dim() == 1 else (1 - energy) ** 0.5 + 1e-6)
            assert k >= 1 or k == lowrank.DENSE


def without_distillation(kind: type[Algorithm]) -> type[Algorithm]:
    """Return the method with cross entropy alone for both models."""

    class Off(kind):
        def loss(self, ctx: Local) -> LossPerExample:
            return lambda both, x, y: sum(
                (ctx.ce(without_prefix(name, both), x, y) for name in ("mentor", "mentee")), torch.zeros(len(y))
            )

    return Off


def check_2_lossless_and_without_distillation_it_is_fedavg(kind: type[Algorithm]) -> None:
    """With enough rows of all classes the changes have ranks at which T = 1 compresses nothing: in the first round they are
    FedAvg's bit for bit. Weights plus a mean of changes are a mean of weights, up to rounding."""
    rows: dict[str, Any] = {"data": toys.dataset((9, 8, 8, 12), held=((0, 1, 2),))}
    ours = toys.play(without_distillation(kind), settings=LOSSLESS, **PARTIAL, **rows)
    theirs = toys.play(FedAvg, settings={"weighting": "uniform"}, **PARTIAL, **rows)
    for turn, other in zip(ours, theirs, strict=True):
        for client, up in turn.ups.items():
            change = lowrank.unpack(up, toys.tiny().shapes)
            expected = subtract(other.ups[client], other.downs[client])
            assert toys.distance(change, expected) < 1e-14 if turn.t else toys.same(change, expected)
        assert toys.distance(select(turn.next_server, "body", "head"), other.next_server) < 1e-14


def check_3_who_takes_part_has_the_servers_mentee(kind: type[Algorithm]) -> None:
    """Bit for bit, by an update or, for those who missed one, as it is. An update lost on the way leaves no trace."""
    made = toys.setup(kind, rounds=8, **PARTIAL)
    forms = set()
    for turn in toys.rounds(made):
        for client, down in turn.downs.items():
            forms.add("update" in down)
            mentee = made.algorithm.start(turn.states[client], down)
            assert toys.same(mentee, select(turn.server, "body", "head"))
            if client in turn.ups:
                assert toys.same(without_prefix("mentee", turn.next_states[client]), mentee)
    assert forms == {True, False}


def check_3_the_server_compresses_the_mean_for_itself_too(kind: type[Algorithm]) -> None:
    """What it adds to its own mentee is the mean of the changes after compression, by the same energy."""
    for energy in (0.5, 0.95):
        turn = toys.play(kind, 1, settings={"start_energy": energy}, local_epochs=3)[0]
        mean = weighted_mean([lowrank.unpack(up, toys.tiny().shapes) for up in turn.ups.values()], [1.0] * 4)
        near = lowrank.unpack(lowrank.pack(mean, energy), toys.tiny().shapes)
        moved = subtract(select(turn.next_server, "body", "head"), select(turn.server, "body", "head"))
        assert toys.distance(moved, near) < 1e-14
        assert energy > 0.5 or toys.distance(moved, mean) > 1e-4


def check_4_one_sample_loses_nothing_in_a_fully_connected_layer(kind: type[Algorithm]) -> None:
    """Its gradient is an outer product: one singular value, whatever the energy."""
    (mentor, mentee, w), (x, y) = models(), toys.batch(1)
    found, change = done(kind, mentor, mentee, w, rows=(x, y), settings={"start_energy": 0.95})
    g = toys.hand_gradient(mentee, x, y, hand_loss("mentee", mentor, mentee, w))
    assert toys.distance(change, {k: -0.1 * v for k, v in g.items()}) < 1e-14
    assert dict(zip(change, found.up["ranks"].tolist(), strict=True)) == {
        "body.fc1.weight": 1, "body.fc1.bias": lowrank.DENSE, "head.weight": 1, "head.bias": lowrank.DENSE,
    }  # fmt: skip
    assert len(found.up["update"]) == (5 + 1 + 16) + 5 + (3 + 1 + 5) + 3


def check_5_nothing_of_the_mentor_is_sent(kind: type[Algorithm]) -> None:
    """Neither mentor, nor projection, nor their changes, as items or among the numbers of an update."""
    for turn in toys.play(kind, participation=0.5):
        for client, up in turn.ups.items():
            before, after = turn.states[client], turn.next_states[client]
            own = [*select(before, "body", "head", "projection").values()]
            own += [*select(after, "body", "head", "projection").values()]
            own += [*subtract(select(after, "body", "head"), select(before, "body", "head")).values()]
            sent = torch.cat([v.flatten() for m in (up, turn.downs[client]) for v in m.values() if v.dim()])
            assert not torch.isin(torch.cat([v.flatten() for v in own]), sent).any()


def test_fedkd_0_one_step_follows_both_objectives():
    check_0_one_step_follows_both_objectives(FedKD)


def test_fedkd_0_the_heads_gradient():
    check_0_the_heads_gradient(FedKD)


def test_fedkd_1_what_is_left_out_is_at_most_what_the_energy_allows():
    check_1_what_is_left_out_is_at_most_what_the_energy_allows(FedKD)


def test_fedkd_2_lossless_and_without_distillation_it_is_fedavg():
    check_2_lossless_and_without_distillation_it_is_fedavg(FedKD)


def test_fedkd_3_who_takes_part_has_the_servers_mentee():
    check_3_who_takes_part_has_the_servers_mentee(FedKD)


def test_fedkd_3_the_server_compresses_the_mean_for_itself_too():
    check_3_the_server_compresses_the_mean_for_itself_too(FedKD)


def test_fedkd_4_one_sample_loses_nothing_in_a_fully_connected_layer():
    check_4_one_sample_loses_nothing_in_a_fully_connected_layer(FedKD)


def test_fedkd_5_nothing_of_the_mentor_is_sent():
    check_5_nothing_of_the_mentor_is_sent(FedKD)


def test_jointly_each_model_follows_the_sum():
    """Nothing is constant: the gradient of L_t + L_s in all of mentor, mentee and W."""
    (mentor, mentee, w), (x, y) = models(), toys.batch(10)
    found, change = done(FedKD, mentor, mentee, w, settings={"joint": True})
    pair = prefixed("t", mentor | {"projection": w}) | prefixed("s", mentee)

    def both(pair: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        t, s = without_prefix("t", pair), without_prefix("s", pair)
        of_t = hand_loss("mentor", t, s, w)(t, x, y)
        return of_t + hand_loss("mentee", t, s, t["projection"])(s, x, y)

    expected = toys.hand_step(pair, toys.hand_gradient(pair, x, y, both), 0.1)
    assert toys.distance(select(found.state, "body", "head", "projection"), without_prefix("t", expected)) < 1e-14
    assert toys.distance(combine(torch.add, mentee, change), without_prefix("s", expected)) < 1e-14


def test_equal_models_and_a_projection_that_does_nothing_have_nothing_to_teach():
    """KL and distance are 0 with slope 0, and stay so: both models train as FedAvg's, step by step."""
    (_, model, _), (x, y) = models(), toys.batch(10)
    found, change = done(FedKD, model, model, torch.eye(D), rows=(x, y), epochs=3, batch_size=4)
    alone = toys.work(x, y, epochs=3, batch_size=4)
    expected = alone.fit(model, on=alone.ce)
    assert toys.distance(combine(torch.add, model, change), expected) < 1e-14
    assert toys.distance(select(found.state, "body", "head"), expected) < 1e-14
    assert toys.distance({"w": found.state["projection"]}, {"w": torch.eye(D)}) < 1e-14


def test_two_models_that_make_no_mistake_divide_by_nothing():
    """CE_t + CE_s = 0 to all digits: S is held above 0."""
    (mentor, mentee, w), (x, _) = models(), toys.batch(6)
    sure = {"head.weight": torch.zeros(3, 5), "head.bias": torch.tensor([1e4, 0.0, 0.0])}
    rows = (x, torch.zeros(6, dtype=torch.int64))
    found, change = done(FedKD, mentor | sure, mentee | sure, w, rows=rows, lr=1e-9)
    assert all(torch.isfinite(v).all() for v in (*change.values(), *found.state.values()))


def test_the_energy_rises_with_the_updates_and_then_stays():
    turns = toys.play(FedKD, 6, settings={"start_energy": 0.2, "end_energy": 0.6, "energy_rounds": 4})
    energies = [float(turn.downs[0]["energy"]) for turn in turns]
    assert energies == pytest.approx([0.2, 0.3, 0.4, 0.5, 0.6, 0.6])


def test_no_training_sends_no_factors():
    for turn in toys.play(FedKD, 2, local_epochs=0):
        assert all(up["ranks"].tolist() == [0, -1, 0, -1] and not up["update"].any() for up in turn.ups.values())
        assert toys.same(select(turn.next_server, "body", "head"), select(turn.server, "body", "head"))


def test_the_mentor_is_tested_beside_the_mentee():
    made = toys.setup(FedKD, lr=0.5)
    turn = toys.rounds(made)[-1]
    x, y = made.federation.test(1)
    right = (parts(turn.next_states[1], x, y)[1].argmax(1) == y).double().mean()
    assert turn.rows[1]["accuracy_post_agg"] == turn.rows[1]["accuracy_post_local"] == pytest.approx(float(right))
    assert turn.metrics["global_accuracy"] is not None


def test_an_attacker_knows_the_mentee_and_nothing_else_of_a_client():
    """By the log, also where a client was away; the update is the gradient of the mentee, by the names of its parameters."""
    ex = exchange(Case("fedkd"))
    algorithm = ex.setup.algorithm
    known = algorithm.reconstruct_state(ex.memory)
    assert known is not None
    assert known.keys() == {f"mentee.{name}" for name in ex.setup.net.shapes}
    assert toys.same(algorithm.start(ex.state | known, ex.down), select(ex.server, "body", "head"))
    up = algorithm.local(ex.context(), ex.state, algorithm.downlink(ex.server, CLIENT)).up
    assert algorithm.change(ex.state, ex.down, up, 0.1, 2).keys() == ex.setup.net.shapes.keys()

"""GPFL. The checks take the method's class, so that planted bugs can be put to them."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pflsec.algorithms.model_splitting import gpfl as module
from pflsec.algorithms.model_splitting.gpfl import GPFL, unit, valve
from pflsec.core.algorithm import Algorithm, Done
from pflsec.core.items import Items, select
from tests import toys

COMMON = ("body", "embedding", "valve")
LINEAR = ("valve.gamma.weight", "valve.beta.weight")


def parts(kind: type[Algorithm], **settings: Any) -> tuple[Algorithm, Items, Items]:
    """Return a method, a client's state and what it receives."""
    algorithm = toys.method(kind, **settings)
    down = algorithm.init_server(algorithm.net.fresh("server"))
    return algorithm, algorithm.init_client(algorithm.net.fresh("client"), down), down


def done(kind: type[Algorithm], x: Tensor, y: Tensor, settings: dict[str, Any], **changes: Any) -> tuple[Items, Done]:
    """Return what a client received and the result of its exchange; one full-batch step unless changed."""
    algorithm, state, down = parts(kind, **settings)
    return down, algorithm.local(toys.work(x, y, algorithm.net, **changes), state, down)


def trained(result: Done) -> Items:
    """Return the model after local work."""
    return select(result.up, *COMMON) | select(result.state, "head")


# --- the model once more, by hand


def hand_valve(model: Mapping[str, Tensor], z: Tensor, u: Tensor) -> Tensor:
    """Return relu((gamma(u) + 1) z + beta(u)); either branch is layer norm of relu of a linear layer."""
    found = []
    for branch in ("gamma", "beta"):
        a = torch.relu(model[f"valve.{branch}.weight"] @ u + model[f"valve.{branch}.bias"])
        a = (a - a.mean()) / (a.var(correction=0) + 1e-5).sqrt()
        found.append(a * model[f"valve.{branch}.scale"] + model[f"valve.{branch}.shift"])
    return torch.relu((found[0] + 1) * z + found[1])


def hand_shares(y: Tensor) -> Tensor:
    return torch.stack([(y == c).double().mean() for c in range(toys.CLASSES)])


def hand_objective(down: Items, labels: Tensor, lam: float, mu: float) -> toys.Loss:
    """Return all five terms; what is received is constant, and p is made of all labels of the client."""
    received = down["embedding"]
    g, p = received.mean(0), sum((s * e for s, e in zip(hand_shares(labels), received, strict=True)), torch.zeros(5))

    def loss(model: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        z = toys.hand_features(model, x)
        own, common = hand_valve(model, z, p), hand_valve(model, z, g)
        total = F.cross_entropy(own @ model["head.weight"].T + model["head.bias"], y)
        for row, label in zip(common, y, strict=True):
            e = model["embedding"]
            cosine = (e @ row) / (e.square().sum(1).sqrt() * row.square().sum().sqrt())
            total = total + (cosine.logsumexp(0) - cosine[label]) / len(y)
            total = total + lam * (row - received[label]).square().sum().sqrt() / len(y)
        decayed = [v.square().sum() for k, v in model.items() if k.startswith(("embedding", "valve"))]
        return total + mu / 2 * torch.stack(decayed).sum()

    return loss


# --- checks


def check_0_three_steps_follow_the_objective(kind: type[Algorithm]) -> None:
    """At either learning rate, which is that of all four modules."""
    x, y = toys.batch(10)
    for settings, lr in (({}, 0.1), ({"lam": 2.0, "mu": 0.0}, 0.1), ({"lam": 0.0, "mu": 0.7}, 0.1), ({}, 0.02)):
        algorithm, state, down = parts(kind, **settings)
        cfg = algorithm.cfg
        objective = hand_objective(down, y, cfg.lam, cfg.mu)
        model = down | select(state, "head")
        for _ in range(3):
            model = toys.hand_step(model, toys.hand_gradient(model, x, y, objective), lr)
        result = done(kind, x, y, settings, epochs=3, lr=lr)[1]
        assert toys.distance(trained(result), model) < 1e-13


def check_1_the_head_stays_at_home(kind: type[Algorithm]) -> None:
    """Neither by name nor by value, and the label shares neither; absent clients keep both."""
    for turn in toys.play(kind, participation=0.5):
        owned = [v for s in (turn.states, turn.next_states) for c in turn.ups for v in s[c].values()]
        for message in (*turn.ups.values(), *turn.downs.values()):
            assert not any(name.startswith(("head", "label")) for name in message)
            assert not any(v.shape == o.shape and torch.equal(v, o) for v in message.values() for o in owned)
        assert all(toys.same(turn.next_states[c], turn.states[c]) for c in range(4) if c not in turn.ups)


def check_2_the_valve_moves_in_two_directions_only(kind: type[Algorithm]) -> None:
    """Its linear layers see g and p_i alone, constants of the round: every gradient, so their sum, is a g' + b p_i'."""
    x, y = toys.batch(10, classes=(0, 0, 1))
    down, result = done(kind, x, y, {"mu": 0.0}, epochs=4, batch_size=3)
    for name in LINEAR:
        size = torch.linalg.svdvals(down[name] - result.up[name])
        assert size[1] > 1e-5 * size[0]
        assert size[2] < 1e-10 * size[0]
    x, y = toys.batch(9)
    down, result = done(kind, x, y, {"mu": 0.0}, epochs=4, batch_size=4)
    for name in LINEAR:
        size = torch.linalg.svdvals(down[name] - result.up[name])
        assert size[0] > 1e-5
        assert size[1] < 1e-10 * size[0]


def check_3_the_pull_on_lengths_does_not_move_the_embeddings(kind: type[Algorithm]) -> None:
    """It is towards the embeddings received. The body does feel it."""
    one, other = (done(kind, *toys.batch(10), {"lam": lam})[1].up for lam in (0.0, 5.0))
    assert torch.equal(one["embedding"], other["embedding"])
    assert toys.distance(select(one, "body"), select(other, "body")) > 1e-3


def check_4_label_shares_are_of_all_rows(kind: type[Algorithm]) -> None:
    """They sum to 1, count the rows of a last short batch, and equal ones make both features the same."""
    x, y = toys.batch(9, classes=(0, 0, 0, 2))
    state = done(kind, x, y, {}, batch_size=4)[1].state
    assert torch.allclose(state["label_shares"], torch.tensor([7 / 9, 0, 2 / 9]), rtol=0, atol=1e-15)
    assert abs(float(state["label_shares"].sum()) - 1) < 1e-15
    _, newcomer, down = parts(kind)
    p, z = newcomer["label_shares"] @ down["embedding"], toys.hand_features(down, x)
    own, common = valve(down, z, p), valve(down, z, down["embedding"].mean(0))
    assert torch.allclose(own, common, rtol=0, atol=1e-13)
    lopsided = valve(down, z, state["label_shares"] @ down["embedding"])
    assert (lopsided - common).abs().max() > 1e-3


def check_5_the_means_are_by_samples(kind: type[Algorithm]) -> None:
    """Body, embeddings and valve with the same weights."""
    for turn in toys.play(kind, participation=0.75):
        total = sum(toys.TRAIN[c] for c in turn.ups)
        for k, value in turn.next_server.items():
            mean = sum((toys.TRAIN[c] / total * up[k] for c, up in turn.ups.items()), torch.zeros(()))
            assert torch.allclose(value, mean, rtol=0, atol=1e-15)


def check_the_tested_model_asks_with_its_own_shares(kind: type[Algorithm]) -> None:
    """h(V(f(x), p)) by the embeddings now received."""
    (x, y), (algorithm, state, down) = toys.batch(10, classes=(0, 0, 1)), parts(kind)
    state = algorithm.local(toys.work(x, y), state, down).state
    other = algorithm.init_server(algorithm.net.fresh("later"))
    p = hand_shares(y) @ other["embedding"]
    z = hand_valve(other, toys.hand_features(other, x), p)
    expected = z @ state["head.weight"].T + state["head.bias"]
    assert torch.allclose(algorithm.scores(algorithm.deploy(state, other), x), expected, rtol=0, atol=1e-13)


def check_a_capture_shows_gradients_without_the_decay(kind: type[Algorithm]) -> None:
    """One step: exactly. K steps: (1 - lr mu)^K w is where K steps without gradient end."""
    x, y = toys.batch(10)
    algorithm, state, down = parts(kind, mu=0.7)
    up = algorithm.local(toys.work(x, y), state, down).up
    seen = algorithm.change(state, down, up, lr=0.1, steps=1)
    gradient = toys.hand_gradient(down | select(state, "head"), x, y, hand_objective(down, y, 0.01, 0.0))
    assert toys.distance(seen, select(gradient, *COMMON)) < 1e-12
    still = dict(down)
    for _ in range(5):
        still |= {k: w - 0.1 * 0.7 * w for k, w in still.items() if not k.startswith("body")}
    nothing = algorithm.change(state, down, still, lr=0.1, steps=5)
    assert max(float(v.abs().max()) for v in nothing.values()) < 1e-14


def test_gpfl_0_three_steps_follow_the_objective():
    check_0_three_steps_follow_the_objective(GPFL)


def test_gpfl_1_the_head_stays_at_home():
    check_1_the_head_stays_at_home(GPFL)


def test_gpfl_2_the_valve_moves_in_two_directions_only():
    check_2_the_valve_moves_in_two_directions_only(GPFL)


def test_gpfl_2_the_wire_gives_the_label_shares_away():
    """After 12 steps with decay: every row of the valve's move, in coordinates of the embeddings and less its mean over
    the classes, is a multiple of shares - 1/C. Where a class is missing its size follows, and of two signs only one
    gives no negative share."""
    x, y = toys.batch(10, classes=(0, 0, 2))
    down, result = done(GPFL, x, y, {"mu": 0.1}, epochs=4, batch_size=4)
    moved = 0.99**12 * down[LINEAR[0]] - result.up[LINEAR[0]]
    rows = moved @ torch.linalg.pinv(down["embedding"])
    direction = torch.linalg.svd(rows - rows.mean(1, keepdim=True)).Vh[0]
    guesses = [1 / 3 + sign * direction / (3 * -(sign * direction).min()) for sign in (1, -1)]
    true = hand_shares(y)
    assert min(float((guess - true).abs().max()) for guess in guesses) < 1e-9


def test_gpfl_3_the_pull_on_lengths_does_not_move_the_embeddings():
    check_3_the_pull_on_lengths_does_not_move_the_embeddings(GPFL)


def test_gpfl_4_label_shares_are_of_all_rows():
    check_4_label_shares_are_of_all_rows(GPFL)


def test_gpfl_5_the_means_are_by_samples():
    check_5_the_means_are_by_samples(GPFL)


def test_gpfl_6_without_valve_and_guidance_it_is_a_shared_body_and_a_personal_head(monkeypatch: pytest.MonkeyPatch):
    """A valve of zeros is a ReLU; with it, and without the two guiding terms, body and head are trained as usual."""
    algorithm, state, down = parts(GPFL, lam=0.0)
    x, y = toys.batch(10)
    closed = {k: torch.zeros_like(v) for k, v in down.items() if k.startswith("valve")}
    z = toys.hand_features(down, x)
    assert torch.equal(valve(closed, z, down["embedding"][0]), z.relu())
    monkeypatch.setattr(module, "valve", lambda model, z, u: z.relu())
    monkeypatch.setattr(module, "cross_entropy", lambda logits, y: 0 * logits.sum(1))
    result = algorithm.local(toys.work(x, y, epochs=2, batch_size=4), state, down)
    work = toys.work(x, y, epochs=2, batch_size=4)
    plain = work.fit(
        select(down, "body") | select(state, "head"),
        on=lambda m, x, y: work.head_ce(m, work.net.features(m, x).relu(), y),
    )
    assert toys.distance(select(trained(result), "body", "head"), plain) < 1e-14


def test_the_tested_model_asks_with_its_own_shares():
    check_the_tested_model_asks_with_its_own_shares(GPFL)


def test_a_capture_shows_gradients_without_the_decay():
    check_a_capture_shows_gradients_without_the_decay(GPFL)


def test_a_single_label_is_read_off_the_embeddings():
    """B = 1: row c of the gradient is (softmax_c - [c = y]) (f - cos_c e_c) / |E_c|, f and e_c of length 1."""
    algorithm, state, down = parts(GPFL)
    for label in range(toys.CLASSES):
        x, y = toys.batch(1, classes=(label,))
        up = algorithm.local(toys.work(x, y), state, down).up
        seen = algorithm.change(state, down, up, lr=0.1, steps=1)["embedding"]
        f = unit(hand_valve(down, toys.hand_features(down, x), down["embedding"].mean(0)))[0]
        e = down["embedding"]
        cosine = unit(e) @ f
        weight = cosine.softmax(0) - F.one_hot(y, toys.CLASSES)[0]
        rows = weight[:, None] * (f - cosine[:, None] * unit(e)) / e.square().sum(1, keepdim=True).sqrt()
        assert torch.allclose(seen, rows, rtol=0, atol=1e-12)
        assert int((seen @ f).argmin()) == label


def test_a_client_of_one_class_asks_with_that_embedding():
    x, y = toys.batch(5, classes=(1,))
    down, result = done(GPFL, x, y, {})
    assert torch.equal(result.state["label_shares"] @ down["embedding"], down["embedding"][1])
    assert (result.up["embedding"][0] - 0.99 * down["embedding"][0]).abs().max() > 1e-4  # pushed away, though not held


def test_features_that_are_all_off_do_not_break_the_cosine():
    """beta = -9 shuts the valve: the guided features are 0, their cosines are 0, and no slope is infinite."""
    algorithm, state, down = parts(GPFL, mu=0.0)
    shut = down | {"valve.beta.shift": torch.full((5,), -9.0)}
    result = algorithm.local(toys.work(*toys.batch(4), epochs=2), state, shut)
    assert all(v.isfinite().all() for v in (result.up | result.state).values())
    assert torch.equal(unit(torch.zeros(2, 5)), torch.zeros(2, 5))


def test_the_other_distance_is_one_norm_of_the_batch():
    off = torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    rows, whole = (toys.method(GPFL, distance=d).length(off) for d in ("rows", "frobenius"))  # type: ignore[attr-defined]
    assert torch.allclose(rows.mean(), off.square().sum(1).sqrt().mean(), rtol=1e-14)
    assert torch.allclose(whole.mean(), off.square().sum().sqrt(), rtol=1e-14)
    assert whole.shape == rows.shape == (6,)


def test_a_local_model_is_tested_with_the_inputs_it_was_trained_with():
    algorithm, state, down = parts(GPFL)
    result = algorithm.local(toys.work(*toys.batch(10), epochs=2), state, down)
    items = algorithm.deploy_trained(result.state, down, result.up)
    assert toys.same(select(items, "body", "valve", "head"), select(trained(result), "body", "valve", "head"))
    assert torch.equal(items["embedding"], down["embedding"])

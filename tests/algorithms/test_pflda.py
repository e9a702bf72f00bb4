"""PFL-DA. The checks take the method's class, so that planted bugs can be put to them."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pflsec.algorithms.model_splitting.pflda import PFLDA
from pflsec.core.algorithm import Algorithm, Done
from pflsec.core.items import Items, select
from tests import toys

SETTINGS: list[dict[str, Any]] = [
    {},
    {"lam": 5.0},
    {"lam": 0.0},
    {"personal_head": "prox", "rho": 0.3},
    {"schedule": "two_phase", "lam": 5.0},
    {"schedule": "two_phase", "personal_head": "prox", "rho": 0.3},
]


def parts(seed: str = "personal") -> tuple[Items, Items]:
    """Return a client's state, body and personal head, and a received head, another one."""
    return toys.tiny().fresh(seed), select(toys.tiny().fresh("received"), "head")


def done(
    kind: type[Algorithm], state: Items | None = None, settings: dict[str, Any] | None = None, **changes: Any
) -> Done:
    """Return one exchange on ten rows; two epochs of batches of 4 unless changed."""
    own, down = parts()
    length: dict[str, Any] = {"epochs": 2, "batch_size": 4}
    work = toys.work(*toys.batch(10), **(length | changes))
    return toys.method(kind, **(settings or {})).local(work, own if state is None else state, down)


def hand_head_step(head: Items, body: Items, x: Tensor, y: Tensor, received: Items, settings: dict[str, Any]) -> Items:
    """Return the personal head after one batch."""
    z = toys.hand_features(body, x).detach()
    prox = settings.get("personal_head") == "prox"
    lam = 0.0 if prox else settings.get("lam", 1.0)

    def loss(h: Any, z: Tensor, y: Tensor) -> Tensor:
        ce = F.cross_entropy(z @ h["head.weight"].T + h["head.bias"], y)
        return ce + lam / 2 * sum(((h[k] - g) ** 2).sum() for k, g in received.items())

    head = toys.hand_step(head, toys.hand_gradient(head, z, y, loss), 0.1)
    return {k: settings["rho"] * g + (1 - settings["rho"]) * head[k] for k, g in received.items()} if prox else head


def check_0_steps_follow_the_objective(kind: type[Algorithm]) -> None:
    """Interleaved: b and g on a batch, then h on its new features. Two phases: h on the old body, then b and g."""
    for settings in SETTINGS:
        state, received = parts()
        model, head = select(state, "body") | received, select(state, "head")
        two_phase = settings.get("schedule") == "two_phase"
        if two_phase:
            for x, y in toys.work(*toys.batch(10), epochs=2, batch_size=4).batches(phase="head"):
                head = hand_head_step(head, state, x, y, received, settings)
        for x, y in toys.work(*toys.batch(10), epochs=2, batch_size=4).batches():
            model = toys.hand_step(model, toys.hand_gradient(model, x, y), 0.1)
            if not two_phase:
                head = hand_head_step(head, model, x, y, received, settings)
        result = done(kind, settings=settings)
        assert toys.distance(result.state, select(model, "body") | head) < 1e-14
        assert toys.distance(result.up, select(model, "head")) < 1e-14


def check_1_what_is_sent_does_not_know_the_personal_head(kind: type[Algorithm]) -> None:
    """Bit for bit, for every pull and every personal head, under one schedule or the other."""
    body, other = select(parts()[0], "body"), select(toys.tiny().fresh("other"), "head")
    reference = done(kind)
    for settings in SETTINGS:
        for state in (parts()[0], body | other):
            result = done(kind, state, settings)
            assert toys.same(result.up, reference.up)
            assert toys.same(select(result.state, "body"), select(reference.state, "body"))


def check_2_a_head_crosses_the_wire_and_nothing_else(kind: type[Algorithm]) -> None:
    """C d + C floats; neither bodies nor personal heads, by name or by value. The absent keep theirs."""
    for turn in toys.play(kind, participation=0.5, seed=2):
        owned = [v for c in turn.ups for v in turn.next_states[c].values()]
        for message in (*turn.downs.values(), *turn.ups.values()):
            assert {k: tuple(v.shape) for k, v in message.items()} == {"head.weight": (3, 5), "head.bias": (3,)}
            assert not any(v.shape == o.shape and torch.equal(v, o) for v in message.values() for o in owned)
        assert all(toys.same(turn.next_states[c], turn.states[c]) for c in range(4) if c not in turn.ups)


def check_3_the_pull_has_its_two_limits(kind: type[Algorithm]) -> None:
    """lam = 0: cross entropy alone, so the head is as if alone, whatever was received. rho = 1: exactly what was received."""
    received = parts()[1]
    for schedule in ("interleaved", "two_phase"):
        pinned = done(kind, settings={"personal_head": "prox", "rho": 1.0, "schedule": schedule})
        assert toys.same(select(pinned.state, "head"), received)
    free = done(kind, settings={"lam": 0.0})
    prox = done(kind, settings={"personal_head": "prox", "rho": 0.0})
    assert toys.same(select(free.state, "head"), select(prox.state, "head"))
    assert toys.distance(select(free.state, "head"), select(done(kind).state, "head")) > 1e-4


def check_4_either_step_leaves_the_others_items_alone(kind: type[Algorithm]) -> None:
    """Body and shared head end as if there were no personal head: one plain training of the two."""
    state, received = parts()
    for settings in SETTINGS:
        work = toys.work(*toys.batch(10), epochs=2, batch_size=4)
        plain = work.fit(select(state, "body") | received, on=work.ce)
        result = done(kind, settings=settings)
        assert toys.same(select(result.state, "body") | result.up, plain)
        still = done(kind, settings=settings, epochs=0)
        assert toys.same(still.state, state)
        assert toys.same(still.up, received)


def check_5_one_sample_shows_its_feature(kind: type[Algorithm]) -> None:
    """gW = (p - y) r', gb = p - y: every row of gW over that of gb is r, of the body before the step."""
    state, received = parts()
    x, y = toys.batch(1)
    algorithm = toys.method(kind)
    up = algorithm.local(toys.work(x, y), state, received).up
    seen = algorithm.change(state, received, up, lr=0.1, steps=1)
    r = toys.hand_features(state, x)[0]
    assert torch.allclose(seen["head.weight"], torch.outer(seen["head.bias"], r), rtol=0, atol=1e-13)
    assert (seen["head.bias"] < 0).nonzero().flatten().tolist() == y.tolist()


def check_6_equal_clients_stay_equal(kind: type[Algorithm]) -> None:
    algorithm, (state, down) = toys.method(kind, clients=2), parts()
    states = [state, state]
    for t in range(3):
        results = [
            algorithm.local(toys.work(*toys.batch(10), batch_size=4, epochs=2, round=t), s, down) for s in states
        ]
        assert toys.same(results[0].state, results[1].state)
        down = algorithm.aggregate(down, {c: result.up for c, result in enumerate(results)})
        assert all(toys.same(down, result.up) for result in results)
        states = [result.state for result in results]


def check_the_mean_is_plain(kind: type[Algorithm]) -> None:
    for turn in toys.play(kind):
        mean = {k: torch.stack([up[k] for up in turn.ups.values()]).mean(0) for k in turn.server}
        assert toys.distance(turn.next_server, mean) < 1e-15


def check_the_tested_model_is_personal(kind: type[Algorithm]) -> None:
    """Body and personal head, whatever head the server has."""
    algorithm, (x, _), (state, down) = toys.method(kind), toys.batch(20), parts()
    expected = toys.hand_features(state, x) @ state["head.weight"].T + state["head.bias"]
    assert torch.allclose(algorithm.scores(algorithm.deploy(state, down), x), expected, rtol=0, atol=1e-14)


def test_pflda_0_steps_follow_the_objective():
    check_0_steps_follow_the_objective(PFLDA)


def test_pflda_1_what_is_sent_does_not_know_the_personal_head():
    check_1_what_is_sent_does_not_know_the_personal_head(PFLDA)


def test_pflda_2_a_head_crosses_the_wire_and_nothing_else():
    check_2_a_head_crosses_the_wire_and_nothing_else(PFLDA)


def test_pflda_3_the_pull_has_its_two_limits():
    check_3_the_pull_has_its_two_limits(PFLDA)


def test_pflda_4_either_step_leaves_the_others_items_alone():
    check_4_either_step_leaves_the_others_items_alone(PFLDA)


def test_pflda_5_one_sample_shows_its_feature():
    check_5_one_sample_shows_its_feature(PFLDA)


def test_pflda_6_equal_clients_stay_equal():
    check_6_equal_clients_stay_equal(PFLDA)


def test_the_mean_is_plain():
    check_the_mean_is_plain(PFLDA)


def test_the_tested_model_is_personal():
    check_the_tested_model_is_personal(PFLDA)


def test_weights_by_samples_are_an_option():
    turn = toys.play(PFLDA, 1, settings={"weighting": "samples"})[0]
    share = {c: toys.TRAIN[c] / sum(toys.TRAIN) for c in turn.ups}
    mean = {k: torch.stack([share[c] * up[k] for c, up in turn.ups.items()]).sum(0) for k in turn.server}
    assert toys.distance(turn.next_server, mean) < 1e-15


def test_the_pull_after_a_step_is_the_exact_proximal_step():
    """argmin |h - u|^2/2 + s/2 |h - g|^2 is (u + s g) / (1 + s), which with s = rho / (1 - rho) is rho g + (1 - rho) u."""
    state, received = parts()
    u, rho = select(state, "head"), 0.8
    found = toys.method(PFLDA, personal_head="prox", rho=rho).pulled(u, received)  # type: ignore[attr-defined]
    s = rho / (1 - rho)
    assert toys.distance(found, {k: (u[k] + s * g) / (1 + s) for k, g in received.items()}) < 1e-15


def test_all_start_from_one_body_unless_told_otherwise():
    shared, apart = (toys.play(PFLDA, 1, settings={"private_start": start})[0].states for start in ("shared", "apart"))
    assert toys.same(shared[0], shared[3])
    assert toys.same(toys.play(PFLDA, 1)[0].states[1], shared[1])
    assert not toys.same(apart[0], apart[3])


def test_a_missing_class_is_pushed_down_and_averaged_in():
    """Its softmax is positive and its label never: the bias falls, and the mean takes the fall with full weight."""
    algorithm, (state, down) = toys.method(PFLDA), parts()
    ups = {
        c: algorithm.local(toys.work(*toys.batch(6, classes)), state, down).up
        for c, classes in enumerate([(0, 1), (0, 1, 2)])
    }
    assert ups[0]["head.bias"][2] < down["head.bias"][2]
    mean = algorithm.aggregate(down, ups)["head.bias"][2]
    assert torch.allclose(mean, (ups[0]["head.bias"][2] + ups[1]["head.bias"][2]) / 2, rtol=0, atol=1e-15)


@pytest.mark.parametrize("schedule", ["interleaved", "two_phase"])
def test_the_training_loss_is_that_of_the_shared_step(schedule: str):
    (state, received), work = parts(), toys.work(*toys.batch(10))
    toys.method(PFLDA, schedule=schedule).local(work, state, received)
    expected = toys.hand_loss(select(state, "body") | received, *toys.batch(10))
    assert [loss.item() for loss in work.losses] == pytest.approx([expected.item()])

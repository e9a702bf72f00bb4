"""MOON. The checks take the method's class, so that planted bugs can be put to them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from pflsec.algorithms.traditional.fedavg import FedAvg
from pflsec.algorithms.traditional.moon import MOON
from pflsec.core.algorithm import Algorithm, Done
from pflsec.core.items import Items, select
from tests import toys

PARTIAL: dict[str, Any] = {"participation": 0.75, "drop_rate": 1 / 3}
"""Three of four clients are asked, one of the three uploads is lost."""


def model(items: Items) -> Items:
    """Return the model in a message."""
    return select(items, "body", "head")


def moon(kind: type[Algorithm], **settings: Any) -> MOON:
    """Return the method."""
    return cast(MOON, toys.method(kind, **settings))


def done(kind: type[Algorithm], down: Items, last: Sequence[Items], steps: int = 1, **settings: Any) -> Done:
    """Return one exchange of a client that has trained as often as it has last models, newest first."""
    algorithm, (x, y) = toys.method(kind, pool=max(1, len(last)), **settings), toys.batch()
    state = algorithm.init_client({}, down)
    pool = {f"last.{k}": torch.stack([m[k] for m in last]) for k in select(down, "body")} if last else {}
    return algorithm.local(toys.work(x, y, epochs=steps), state | pool | {"trained": torch.tensor(len(last))}, down)


def cosine(a: Tensor, b: Tensor) -> Tensor:
    """Return the cosine of each row with the same row, by hand."""
    return (a * b).sum(1) / (a.square().sum(1).sqrt() * b.square().sum(1).sqrt())


def objective(down: Items, last: Sequence[Items], mu: float, tau: float) -> toys.Loss:
    """Return CE - mu mean_b log(e^(s_g/tau) / (e^(s_g/tau) + sum over last models of e^(s_p/tau)))."""

    def loss(at: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        z = toys.hand_features(at, x)
        near = (cosine(z, toys.hand_features(down, x)) / tau).exp()
        far = sum(((cosine(z, toys.hand_features(p, x)) / tau).exp() for p in last), torch.zeros(()))
        return toys.hand_loss(at, x, y) - mu * (near / (near + far)).log().mean()

    return loss


def check_0_steps_follow_the_objective(kind: type[Algorithm]) -> None:
    """Autograd of the loss as it is written in the paper, with one and with three last models. The first step feels no
    pull towards the model received, for it is there; later ones do, and that model stands still."""
    down, last = toys.tiny().fresh("down"), [toys.tiny().fresh(i) for i in range(3)]
    for models in (last[:1], last):
        loss, expected = objective(down, models, mu=2.0, tau=0.5), down
        for _ in range(3):
            expected = toys.hand_step(expected, toys.hand_gradient(expected, *toys.batch(), loss), 0.1)
        assert toys.distance(model(done(kind, down, models, steps=3, mu=2.0).up), expected) < 1e-14


def check_1_without_the_contrast_it_is_fedavg(kind: type[Algorithm]) -> None:
    for turn, other in zip(toys.play(kind, settings={"mu": 0.0}, **PARTIAL), toys.play(FedAvg, **PARTIAL), strict=True):
        assert all(toys.same(up, other.ups[c]) for c, up in turn.ups.items())
        assert toys.same(turn.next_server, other.next_server)


def check_2_a_clients_first_round_is_fedavgs(kind: type[Algorithm]) -> None:
    """For every mu, also where that round comes late; no later round is."""
    made = toys.setup(kind, settings={"mu": 5.0}, participation=0.5, seed=3)
    seen: set[int] = set()
    late = 0
    for turn in toys.rounds(made, 6):
        for c, up in turn.ups.items():
            plain = toys.context(made, turn.t, c)
            assert toys.same(model(up), plain.fit(turn.downs[c], on=plain.ce)) == (c not in seen)
            late += c not in seen and turn.t > 0
        seen |= turn.ups.keys()
    assert late
    assert len(seen) > 2


def check_3_equal_models_feel_nothing(kind: type[Algorithm]) -> None:
    """s_g = s_p: -log(1/2) for every row, and slopes that cancel to the last bit."""
    algorithm = moon(kind)
    z, other = (torch.randn(6, 5, generator=torch.Generator().manual_seed(i)) for i in range(2))
    z.requires_grad_()
    found = algorithm.contrast(z, other, other[None])
    assert torch.equal(found, torch.full((6,), math.log(2)))
    assert not torch.autograd.grad(found.sum(), z)[0].any()


def check_4_the_first_step_pushes_the_body_alone(kind: type[Algorithm]) -> None:
    """At theta_t the cosine with the received model is at its maximum, 1, so that its gradient is 0. Left is
    (mu/tau) mean_b sigma((s_p - 1)/tau) grad s_p, which does not reach the head."""
    (x, y), down, last = toys.batch(), toys.tiny().fresh("down"), toys.tiny().fresh("last")
    found = toys.method(kind).change({}, down, done(kind, down, [last], mu=3.0).up, 0.1, 1)
    plain = toys.method(FedAvg).change({}, down, toys.method(FedAvg).local(toys.work(x, y), {}, down).up, 0.1, 1)
    assert toys.distance(select(found, "head"), select(plain, "head")) < 1e-13
    weight = torch.sigmoid((cosine(toys.hand_features(down, x), toys.hand_features(last, x)) - 1) / 0.5)

    def pushed(at: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        s = cosine(toys.hand_features(at, x), toys.hand_features(last, x))
        return toys.hand_loss(at, x, y) + 3.0 / 0.5 * (weight * s).mean()

    assert toys.distance(found, toys.hand_gradient(down, x, y, pushed)) < 1e-13
    assert toys.distance(select(found, "body"), select(plain, "body")) > 1e-3

    def near(at: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return cosine(toys.hand_features(at, x), toys.hand_features(down, x)).sum()

    assert (
        toys.distance(toys.hand_gradient(down, x, y, near), {k: torch.zeros_like(v) for k, v in down.items()}) < 1e-14
    )


def check_5_the_last_model_is_the_one_that_was_sent(kind: type[Algorithm]) -> None:
    """Bit for bit the client's newest accepted upload, before aggregation; who was away keeps an old one."""
    sent: dict[int, list[Items]] = {}
    for turn in toys.play(kind, 8, settings={"pool": 2}, **PARTIAL):
        for c, up in turn.ups.items():
            sent[c] = [select(up, "body"), *sent.get(c, [])]
        for c, ups in sent.items():
            found = moon(kind, pool=2).last(turn.next_states[c])
            assert len(found) == min(2, len(ups))
            assert all(toys.same(a, b) for a, b in zip(found, ups, strict=False))
    assert any(len(ups) > 2 for ups in sent.values())


def check_6_a_sharp_contrast_is_finite(kind: type[Algorithm]) -> None:
    """Both forms agree where both are finite; at tau = 0.005 exp(1/tau) is 7e86, which float32 has not."""
    z, near, far = (torch.randn(6, 5, generator=torch.Generator().manual_seed(i)) for i in range(3))
    s, p = cosine(z, near) / 0.5, cosine(z, far) / 0.5
    assert torch.allclose(moon(kind).contrast(z, near, far[None]), -(s.exp() / (s.exp() + p.exp())).log(), atol=1e-14)
    sharp = moon(kind, tau=0.005).contrast(z.float(), near.float(), far.float()[None])
    assert sharp.isfinite().all()
    assert torch.allclose(sharp.double(), 200 * (cosine(z, far) - cosine(z, near)).clamp(min=0), atol=0.7)


def test_moon_0_steps_follow_the_objective():
    check_0_steps_follow_the_objective(MOON)


def test_moon_1_without_the_contrast_it_is_fedavg():
    check_1_without_the_contrast_it_is_fedavg(MOON)


def test_moon_2_a_clients_first_round_is_fedavgs():
    check_2_a_clients_first_round_is_fedavgs(MOON)


def test_moon_3_equal_models_feel_nothing():
    check_3_equal_models_feel_nothing(MOON)


def test_moon_4_the_first_step_pushes_the_body_alone():
    check_4_the_first_step_pushes_the_body_alone(MOON)


def test_moon_5_the_last_model_is_the_one_that_was_sent():
    check_5_the_last_model_is_the_one_that_was_sent(MOON)


def test_moon_6_a_sharp_contrast_is_finite():
    check_6_a_sharp_contrast_is_finite(MOON)


def test_the_very_first_model_stands_in_where_it_is_told_to():
    """In round 0 it is the model received: no push. Who comes later is pushed away from round 0's model."""
    made = toys.setup(MOON, settings={"first": "initial", "mu": 5.0}, participation=0.5, seed=3, local_epochs=1)
    played = toys.rounds(made, 4)
    early = played[0]
    for c, up in early.ups.items():
        plain = toys.context(made, 0, c)
        assert toys.distance(model(up), plain.fit(early.downs[c], on=plain.ce)) < 1e-14
    turn, c = next((t, c) for t in played for c in t.ups if c not in early.ups)
    at, loss = turn.downs[c], objective(turn.downs[c], [early.server], mu=5.0, tau=0.5)
    for x, y in toys.context(made, turn.t, c).batches():
        at = toys.hand_step(at, toys.hand_gradient(at, x, y, loss), 0.1)
    assert toys.distance(model(turn.ups[c]), at) < 1e-13


@pytest.mark.parametrize("dead", ["z", "near", "far"])
def test_dead_units_have_no_slope_and_no_nan(dead: str):
    """All units of a body may be dead for an input: cosine 0. What moves them is 0 behind their ReLU."""
    rows = {
        n: torch.randn(2, 5, generator=torch.Generator().manual_seed(i)) for i, n in enumerate(("z", "near", "far"))
    }
    rows[dead] = -rows[dead].abs()
    z = rows["z"].requires_grad_()
    found = moon(MOON).contrast(z.relu(), rows["near"].relu(), rows["far"].relu()[None])
    (slope,) = torch.autograd.grad(found.sum(), z)
    assert found.isfinite().all()
    assert slope.isfinite().all()
    assert slope.any() == (dead != "z")
    if dead == "z":
        assert torch.allclose(found, torch.full((2,), math.log(2)))


def test_one_row_is_a_batch():
    algorithm, (x, y) = toys.method(MOON), toys.batch(1)
    down = toys.tiny().fresh("down")
    state = algorithm.init_client({}, toys.tiny().fresh("last")) | {"trained": torch.tensor(1)}
    found = algorithm.local(toys.work(x, y), state, down)
    loss = objective(down, [toys.tiny().fresh("last")], mu=1.0, tau=0.5)
    assert toys.distance(model(found.up), toys.hand_step(down, toys.hand_gradient(down, x, y, loss), 0.1)) < 1e-14

"""FedPHP. The checks take the method's class, so that planted bugs can be put to them."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from pflsec.algorithms.personalized_aggregation.fedphp import FedPHP, mmd
from pflsec.algorithms.traditional.fedavg import FedAvg
from pflsec.core.algorithm import Algorithm, Done
from pflsec.core.errors import PflsecWarning
from pflsec.core.items import Items, select
from pflsec.training.local import LocalWork
from tests import toys

PARTIAL: dict[str, Any] = {"participation": 0.75, "drop_rate": 1 / 3}
FAST: dict[str, Any] = {"planned": 40, "ramp": 0.1}
"""The momentum reaches mu after four participations."""


def inherited(state: Items) -> Items:
    """Return the inherited model of a state."""
    return select(state, "body", "head")


def models() -> tuple[Items, Items]:
    """Return an inherited model h and a received model w, different ones."""
    return toys.tiny().fresh("h"), toys.tiny().fresh("w")


def done(kind: type[Algorithm], work: LocalWork, h: Items, w: Items, times: int = 3, **settings: Any) -> Done:
    """Return one exchange of a client that has taken part so often."""
    return toys.method(kind, **settings).local(work, h | {"times": torch.tensor(times)}, w)


def squared_mmd(a: Tensor, b: Tensor, widths: list[float]) -> Tensor:
    """Return mean over pairs of K(a, a') + K(b, b') - 2 K(a, b), K the sum of exp(-d/width), pair by pair."""

    def kernel(p: Tensor, q: Tensor) -> Tensor:
        return torch.stack([torch.exp(-(p - q).square().sum() / width) for width in widths]).sum()

    pairs = [(i, j) for i in range(len(a)) for j in range(len(a))]
    terms = [kernel(a[i], a[j]) + kernel(b[i], b[j]) - kernel(a[i], b[j]) - kernel(b[i], a[j]) for i, j in pairs]
    return torch.stack(terms).mean()


def widths(a: Tensor, b: Tensor) -> list[float]:
    """Return b0 2^k / 4, b0 the mean squared distance of two different ones among all features."""
    both = torch.cat([a, b]).detach()
    far = [float((p - q).square().sum()) for i, p in enumerate(both) for q in both[:i]]
    return [sum(far) / len(far) * 2**k / 4 for k in range(5)]


def taught_by(h: Items, lam: float) -> toys.Loss:
    """Return (1 - lam) CE + lam MMD^2 to the features of h, the widths being constant."""

    def loss(at: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        a, b = toys.hand_features(at, x), toys.hand_features(h, x)
        return (1 - lam) * toys.hand_loss(at, x, y) + lam * squared_mmd(a, b, widths(a, b))

    return loss


def check_0_steps_follow_the_objective(kind: type[Algorithm]) -> None:
    """Two batches by hand: the teacher stands still, the kernels' widths are those of each step."""
    (h, w), (x, y) = models(), toys.batch(8)
    result = done(kind, toys.work(x, y, batch_size=4), h, w, lam=0.4)
    for a, b in toys.work(x, y, batch_size=4).batches():
        w = toys.hand_step(w, toys.hand_gradient(w, a, b, taught_by(h, 0.4)), 0.1)
    assert toys.distance(select(result.up, "body", "head"), w) < 1e-14


def check_0_outputs_follow_softened_ones(kind: type[Algorithm]) -> None:
    """teacher = kd: cross entropy of softmax(w) to softmax(h / 4); the student is not softened."""
    (h, w), (x, y) = models(), toys.batch()
    net = toys.tiny()
    soft = (net.logits(h, x) / 4).softmax(1)

    def loss(at: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        z = net.logits(at, x)
        taught = -(soft * (z - z.logsumexp(1, keepdim=True))).sum(1).mean()
        return 0.6 * toys.hand_loss(at, x, y) + 0.4 * taught

    up = select(done(kind, toys.work(x, y), h, w, lam=0.4, teacher="kd").up, "body", "head")
    assert toys.distance(up, toys.hand_step(w, toys.hand_gradient(w, x, y, loss), 0.1)) < 1e-14


def check_1_without_a_teacher_what_is_sent_is_fedavgs(kind: type[Algorithm]) -> None:
    reference = toys.play(FedAvg, **PARTIAL)
    for settings in ({"mu": 0.9}, {"mu": 0.0}, {"mu": 1.0, "teacher": "kd", **FAST}):
        for turn, other in zip(toys.play(kind, settings={"lam": 0.0} | settings, **PARTIAL), reference, strict=True):
            assert turn.ups.keys() == other.ups.keys()
            assert all(toys.same(up, other.ups[client]) for client, up in turn.ups.items())
            assert toys.same(turn.next_server, other.next_server)


def check_2_the_first_model_is_inherited_whole(kind: type[Algorithm]) -> None:
    """Whenever that is: a client that joins late has m = 0 too, however far the run has come."""
    joined: set[int] = set()
    for turn in toys.play(kind, 8, settings=FAST, participation=0.25, seed=1):
        for client in turn.ups.keys() - joined:
            assert toys.same(inherited(turn.next_states[client]), select(turn.ups[client], "body", "head"))
        joined |= turn.ups.keys()
    assert len(joined) > 2


def check_3_the_log_tells_the_inherited_model(kind: type[Algorithm]) -> None:
    """h <- m h + (1 - m) w from the uploads alone, m = mu min(1, z/4), z counted; with gaps and lost uploads."""
    first = toys.play(kind, 1)[0].server
    found, times = dict.fromkeys(range(4), first), dict.fromkeys(range(4), 0)
    turns = toys.play(kind, 9, settings=FAST, **PARTIAL)
    for turn in turns:
        for client, up in turn.ups.items():
            m = 0.9 * min(1, times[client] / 4)
            found[client] = {k: m * v + (1 - m) * up[k] for k, v in found[client].items()}
            times[client] += 1
        for client, state in turn.next_states.items():
            assert toys.distance(inherited(state), found[client]) < 1e-14
            assert state["times"] == times[client]
    assert max(times.values()) > 4
    assert min(times.values()) < 9


def check_4_the_head_shows_its_share_of_fedavgs_gradient(kind: type[Algorithm]) -> None:
    """MMD sees features alone. At h = w it is at its least, so then that holds for the body too."""
    (h, w), (x, y) = models(), toys.batch()
    g = toys.hand_gradient(w, x, y)
    for lam in (0.3, 0.8):
        moved = toys.method(kind).change({}, w, done(kind, toys.work(x, y), h, w, lam=lam).up, 0.1, 1)
        share = {k: (1 - lam) * v for k, v in g.items()}
        assert toys.distance(select(moved, "head"), select(share, "head")) < 1e-13
        assert toys.distance(select(moved, "body"), select(share, "body")) > 1e-3
        moved = toys.method(kind).change({}, w, done(kind, toys.work(x, y), w, w, lam=lam).up, 0.1, 1)
        assert toys.distance(moved, share) < 1e-13


def check_5_the_teacher_stands_still(kind: type[Algorithm]) -> None:
    """What is given stays what it is, and what is kept is m h + (1 - m) w, w being what is sent."""
    (h, w), (x, y) = models(), toys.batch(10)
    before = toys.snapshot(h)
    result = done(kind, toys.work(x, y, epochs=3, batch_size=4), h, w, times=3, lam=0.4, **FAST)
    assert toys.same(h, before)
    m = 0.9 * 3 / 4
    assert toys.distance(inherited(result.state), {k: m * h[k] + (1 - m) * result.up[k] for k in h}) < 1e-15


def check_the_inherited_model_is_tested(kind: type[Algorithm]) -> None:
    made = toys.setup(kind, settings=FAST, participation=0.5)
    turns = toys.rounds(made, 4)
    for client, state in turns[-1].next_states.items():
        used = made.algorithm.deploy(state, turns[-1].next_server)
        part = any(client in turn.ups for turn in turns)
        assert toys.same(used, inherited(state) if part else turns[-1].next_server)
    client, up = next(iter(turns[-1].ups.items()))
    used = made.algorithm.deploy_trained(turns[-1].next_states[client], turns[-1].downs[client], up)
    assert toys.same(used, inherited(turns[-1].next_states[client]))


def test_fedphp_0_steps_follow_the_objective():
    check_0_steps_follow_the_objective(FedPHP)


def test_fedphp_0_outputs_follow_softened_ones():
    check_0_outputs_follow_softened_ones(FedPHP)


def test_fedphp_1_without_a_teacher_what_is_sent_is_fedavgs():
    check_1_without_a_teacher_what_is_sent_is_fedavgs(FedPHP)


def test_fedphp_2_the_first_model_is_inherited_whole():
    check_2_the_first_model_is_inherited_whole(FedPHP)


def test_fedphp_3_the_log_tells_the_inherited_model():
    check_3_the_log_tells_the_inherited_model(FedPHP)


def test_fedphp_4_the_head_shows_its_share_of_fedavgs_gradient():
    check_4_the_head_shows_its_share_of_fedavgs_gradient(FedPHP)


def test_fedphp_5_the_teacher_stands_still():
    check_5_the_teacher_stands_still(FedPHP)


def test_the_inherited_model_is_tested():
    check_the_inherited_model_is_tested(FedPHP)


def test_mmd_of_two_features():
    """One feature each, d apart: b0 = d, so K = sum_k exp(-4/2^k), whatever d is, and MMD^2 is 2 (5 - K)."""
    ctx, a = toys.work(*toys.batch()), torch.randn(1, 7)
    expected = sum(2 - 2 * math.exp(-4 / 2**k) for k in range(5))
    for size in (1.0, 1e3):
        assert mmd(ctx, a, a + size).item() == pytest.approx(expected)
    assert mmd(ctx, a, a) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_is_no_distance(dtype: torch.dtype):
    """Without a floor the width would be the rounding error's square, and the slope its inverse."""
    z = torch.linspace(1, 2, 7, dtype=dtype)[None].requires_grad_()
    apart = mmd(toys.work(*toys.batch()), z, z.detach() * (1 + torch.finfo(dtype).eps))
    assert apart < 1e-8
    assert torch.autograd.grad(apart, z)[0].abs().max() < 0.02


def test_mmd_of_equal_features_has_no_slope():
    ctx, a = toys.work(*toys.batch()), torch.randn(6, 5)
    for b in (a, a[:1].expand(6, 5)):
        z = b.clone().requires_grad_()
        apart = mmd(ctx, z, b)
        assert apart == 0
        assert torch.autograd.grad(apart, z)[0].abs().max() < 1e-16


def test_the_first_round_may_go_without_a_teacher():
    """Its teacher would be the very first model, which has nothing to do with the one that a late client receives."""
    (h, w), (x, y) = models(), toys.batch()
    plain = toys.work(x, y)
    expected = plain.fit(w, on=plain.ce)
    first, second = (
        select(done(FedPHP, toys.work(x, y), h, w, times, skip_first=True).up, "body", "head") for times in (0, 1)
    )
    assert toys.same(first, expected)
    assert toys.distance(second, expected) > 1e-4


def test_inheritance_grows_with_every_round_a_client_takes_part():
    """ramp 0.1 of 40 planned rounds: m = 0.9 z/4 up to 0.9; without a ramp m = 0.9 from the second round on."""
    (h, w), (x, y) = models(), toys.batch()
    for ramp, expected in ((0.1, [0, 0.225, 0.45, 0.675, 0.9, 0.9]), (0.0, [0, 0.9, 0.9, 0.9, 0.9, 0.9])):
        for times, m in enumerate(expected):
            kept = done(FedPHP, toys.work(x, y, epochs=0), h, w, times, planned=40, ramp=ramp).state
            assert toys.distance(inherited(kept), {k: m * h[k] + (1 - m) * w[k] for k in h}) < 1e-15


def test_both_models_may_be_asked_together():
    """The mean of their probabilities, the shared model being the one last trained, then the one received now."""
    made = toys.setup(FedPHP, settings={"tested": "both"} | FAST)
    turn, (x, _) = toys.rounds(made)[-1], toys.batch(7)
    state, algorithm = turn.next_states[1], made.algorithm
    h = made.net.logits(inherited(state), x).softmax(1)
    for items, w in (
        (algorithm.deploy(state, turn.next_server), turn.next_server),
        (algorithm.deploy_trained(state, turn.downs[1], turn.ups[1]), turn.ups[1]),
    ):
        assert torch.equal(algorithm.scores(items, x), (h + made.net.logits(w, x).softmax(1)) / 2)


def test_a_teacher_of_all_the_weight_is_warned_about_and_teaches_nothing():
    """Its features are those of the first model at the start, where MMD has no slope: nothing moves but by rounding."""
    with pytest.warns(PflsecWarning, match="lam is 1"):
        turns = toys.play(FedPHP, 1, settings={"lam": 1.0, "mu": 0.0}, batch_size=8, local_epochs=1)
    assert toys.distance(turns[-1].next_server, turns[0].server) < 1e-15


def test_one_image_can_be_trained_on():
    (h, w), (x, y) = models(), toys.batch(1)
    assert toys.distance(select(done(FedPHP, toys.work(x, y), h, w).up, "body", "head"), w) > 1e-3

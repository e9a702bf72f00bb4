"""FedCP. The checks take the method's class, so that planted bugs can be put to them."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pflsec.algorithms.model_splitting.fedcp import FedCP, mmd_rows
from pflsec.core.algorithm import Algorithm, Done
from pflsec.core.errors import ConfigError
from pflsec.core.items import Items, prefixed, select
from pflsec.models.network import Network
from tests import toys

MOVED = ("body", "head", "policy")


def parts(kind: type[Algorithm], trained: bool = True, **settings: Any) -> tuple[Algorithm, Items, Items]:
    """Return a method, a client's state and what it receives; its head is not the one received."""
    algorithm = toys.method(kind, **settings)
    down = algorithm.init_server(algorithm.net.fresh("server"))
    return algorithm, select(algorithm.net.fresh("client"), "head") | {"trained": torch.tensor(trained)}, down


def done(kind: type[Algorithm], settings: dict[str, Any], **changes: Any) -> tuple[Items, Items, Done]:
    """Return (state, downlink, result) of one exchange on ten rows; one full-batch step unless changed."""
    algorithm, state, down = parts(kind, **settings)
    return state, down, algorithm.local(toys.work(*toys.batch(10), algorithm.net, **changes), state, down)


def trained(down: Items, result: Done) -> Items:
    """Return the model after local work: body, policy, and the personal head."""
    return select(result.up, "body", "policy") | select(result.state, "head")


# --- the model once more, by hand


def hand_shares(model: Mapping[str, Tensor], v: Tensor, z: Tensor) -> Tensor:
    """Return (s, r), [B, 2, 5]."""
    a = (v * z) @ model["policy.weight"].T + model["policy.bias"]
    a = (a - a.mean(1, keepdim=True)) / (a.var(1, keepdim=True, correction=0) + 1e-5).sqrt()
    a = torch.relu(a * model["policy.scale"] + model["policy.shift"]).reshape(-1, 2, 5)
    return a.exp() / a.exp().sum(1, keepdim=True)


def hand_context(head: Mapping[str, Tensor]) -> Tensor:
    """Return the sum of the head's rows, of length 1."""
    v = head["head.weight"].sum(0)
    return v / (v * v).sum().sqrt()


def hand_logits(model: Mapping[str, Tensor], common: Mapping[str, Tensor], v: Tensor, x: Tensor) -> Tensor:
    z = toys.hand_features(model, x)
    s, r = hand_shares(model, v, z).unbind(1)
    return (
        (s * z) @ model["head.weight"].T + model["head.bias"] + (r * z) @ common["head.weight"].T + common["head.bias"]
    )


def hand_mmd(a: Tensor, b: Tensor) -> Tensor:
    """Return mean over all pairs, each row with itself too, of k(a, a') + k(b, b') - 2 k(a, b)."""
    total = torch.zeros(())
    for i in range(len(a)):
        for j in range(len(a)):
            for width in (10, 15, 20, 50):
                for sign, p, q in ((1, a[i], a[j]), (1, b[i], b[j]), (-2, a[i], b[j])):
                    total = total + sign * torch.exp(-((p - q) ** 2).sum() / (2 * width))
    return total / len(a) ** 2


def hand_objective(state: Items, down: Items, lam: float) -> toys.Loss:
    """Return the whole loss of one batch."""
    v, received = hand_context(state), select(down, "body")

    def loss(model: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        ce = F.cross_entropy(hand_logits(model, down, v, x), y)
        return ce + lam * hand_mmd(toys.hand_features(model, x), toys.hand_features(received, x))

    return loss


# --- checks


def check_0_three_steps_follow_the_objective(kind: type[Algorithm]) -> None:
    """From the second step on the body is no longer the received one, so that the MMD has a gradient. All three modules
    have the learning rate of the round."""
    (x, y), results = toys.batch(10), []
    for lam, lr in ((0.0, 0.1), (7.0, 0.1), (7.0, 0.02)):
        state, down, result = done(kind, {"lam": lam}, epochs=3, lr=lr)
        model = select(down, "body", "policy") | select(state, "head")
        for _ in range(3):
            model = toys.hand_step(model, toys.hand_gradient(model, x, y, hand_objective(state, down, lam)), lr)
        results.append(trained(down, result))
        assert toys.distance(results[-1], model) < 1e-13
    assert toys.distance(*results[:2]) > 1e-6


def check_1_the_upload_gives_the_personal_head_away(kind: type[Algorithm]) -> None:
    """hat = mix h + (1 - mix) g and the server knows g: h = (hat - (1 - mix) g) / mix; at 1/2, 2 hat - g."""
    state, down, result = done(kind, {}, epochs=3, batch_size=4)
    for k, head in select(result.state, "head").items():
        assert torch.allclose(2 * result.up[k] - down[k], head, rtol=0, atol=1e-15)
        assert (head - state[k]).abs().max() > 1e-3
    quarter = done(kind, {"mix": 0.25}, epochs=3, batch_size=4)[2]
    for k, head in select(quarter.state, "head").items():
        assert torch.allclose(quarter.up[k], head / 4 + 3 * down[k] / 4, rtol=0, atol=1e-15)


def check_2_in_one_step_the_distance_is_nothing(kind: type[Algorithm]) -> None:
    """The body is the received one: the MMD of a sample with itself is 0, its minimum, so its gradient is 0 too."""
    plain, pulled = (done(kind, {"lam": lam})[2] for lam in (0.0, 100.0))
    assert toys.distance(plain.up, pulled.up) < 1e-10
    assert toys.distance(select(plain.state, "head"), select(pulled.state, "head")) < 1e-10


def check_3_shares_sum_to_one_and_what_is_received_stands_still(kind: type[Algorithm]) -> None:
    """In training, with noise and without; g and b_t are constants: what is sent of the head moves by mix times h alone."""
    algorithm, state, down = parts(kind)
    z = torch.randn(20, 5, generator=torch.Generator().manual_seed(0))
    for noise in (None, torch.Generator().manual_seed(1)):
        s, r = algorithm.split(down, z, noise)  # type: ignore[attr-defined]
        assert torch.allclose(s + r, torch.ones(20, 5), rtol=0, atol=1e-15)
        assert (s > 0).all()
        assert (s < 1).all()
        assert (s - 0.5).abs().max() > 0.1
    before = toys.snapshot(down)
    result = algorithm.local(toys.work(*toys.batch(10), epochs=3), state, down)
    assert toys.same(down, before)
    for k, head in select(result.state, "head").items():
        assert torch.equal(result.up[k], torch.lerp(before[k], head, 0.5))


def check_4_everybody_receives_the_same_and_the_absent_keep_their_head(kind: type[Algorithm]) -> None:
    """Body, global head and policy are of one round for all, whether or not they took part in the last one."""
    for turn in toys.play(kind, 5, participation=0.5, seed=3):
        first, *others = turn.downs.values()
        assert others
        assert all(toys.same(first, down) for down in others)
        assert toys.same(first, turn.server)
        absent = turn.states.keys() - turn.ups.keys()
        assert absent
        assert all(toys.same(turn.next_states[c], turn.states[c]) for c in absent)


def check_5_the_mean_is_by_samples(kind: type[Algorithm]) -> None:
    """All of body, head and policy; 5, 8, 3 and 8 rows, of which clients take part in threes."""
    for turn in toys.play(kind, participation=0.75):
        total = sum(toys.TRAIN[c] for c in turn.ups)
        for k, value in turn.next_server.items():
            mean = sum((toys.TRAIN[c] / total * up[k] for c, up in turn.ups.items()), torch.zeros(()))
            assert torch.allclose(value, mean, rtol=0, atol=1e-15)


def check_6_without_the_global_head_it_is_a_shared_body_and_a_personal_head(kind: type[Algorithm]) -> None:
    """s = 1, r = 0, g without bias, lam = 0: the logits are h(b(x)), so body and head move as in plain joint training."""

    class Forced(kind):
        def split(self, model: Items, conditioned: Tensor, noise: Any) -> tuple[Tensor, Tensor]:
            return torch.ones_like(conditioned), torch.zeros_like(conditioned)

    algorithm, state, down = parts(Forced, lam=0.0)
    down = down | {"head.bias": torch.zeros(toys.CLASSES)}
    result = algorithm.local(toys.work(*toys.batch(10), epochs=2, batch_size=4), state, down)
    work = toys.work(*toys.batch(10), epochs=2, batch_size=4)
    expected = work.fit(select(down, "body") | select(state, "head"), on=work.ce)
    assert toys.distance(select(trained(down, result), "body", "head"), expected) < 1e-14
    assert toys.same(select(result.up, "policy"), select(down, "policy"))


def check_the_tested_model_is_the_policys_own_mixture(kind: type[Algorithm]) -> None:
    """h(s z) + g(r z) without noise, v from the head that is tested; the same bits whenever it is asked."""
    algorithm, state, down = parts(kind, policy="gumbel")
    (x, _), items = toys.batch(30), algorithm.deploy(state, down)
    expected = hand_logits(select(down, "body", "policy") | select(state, "head"), down, hand_context(state), x)
    assert torch.allclose(algorithm.scores(items, x), expected, rtol=0, atol=1e-14)
    assert torch.equal(algorithm.scores(items, x), algorithm.scores(items, x))


def check_one_step_shows_the_gradients_of_all_three_modules(kind: type[Algorithm]) -> None:
    """With the head known, also the head's own gradient, though only a mixture of it is sent."""
    x, y = toys.batch(10)
    settings: dict[str, Any] = {"lam": 5.0, "mix": 0.25}
    state, down, result = done(kind, settings)
    seen = toys.method(kind, **settings).change(state, down, result.up, lr=0.1, steps=1)
    model = select(down, "body", "policy") | select(state, "head")
    assert toys.distance(seen, toys.hand_gradient(model, x, y, hand_objective(state, down, 0.0))) < 1e-12


def check_a_head_of_zeros_has_no_context(kind: type[Algorithm]) -> None:
    """v = 0 and no NaN: the policy sees zeros, and the head leaves zero by its own gradient."""
    algorithm, state, down = parts(kind)
    state = {k: torch.zeros_like(v) for k, v in select(state, "head").items()} | {"trained": torch.tensor(True)}
    assert torch.equal(algorithm.context(state), torch.zeros(5))  # type: ignore[attr-defined]
    result = algorithm.local(toys.work(*toys.batch(1)), state, down)
    assert all(v.isfinite().all() for v in (result.up | result.state).values())
    assert result.state["head.weight"].abs().max() > 1e-3


def test_fedcp_0_three_steps_follow_the_objective():
    check_0_three_steps_follow_the_objective(FedCP)


def test_fedcp_1_the_upload_gives_the_personal_head_away():
    check_1_the_upload_gives_the_personal_head_away(FedCP)


def test_fedcp_2_in_one_step_the_distance_is_nothing():
    check_2_in_one_step_the_distance_is_nothing(FedCP)


def test_fedcp_3_shares_sum_to_one_and_what_is_received_stands_still():
    check_3_shares_sum_to_one_and_what_is_received_stands_still(FedCP)


def test_fedcp_4_everybody_receives_the_same_and_the_absent_keep_their_head():
    check_4_everybody_receives_the_same_and_the_absent_keep_their_head(FedCP)


def test_fedcp_5_the_mean_is_by_samples():
    check_5_the_mean_is_by_samples(FedCP)


def test_fedcp_6_without_the_global_head_it_is_a_shared_body_and_a_personal_head():
    check_6_without_the_global_head_it_is_a_shared_body_and_a_personal_head(FedCP)


def test_the_tested_model_is_the_policys_own_mixture():
    check_the_tested_model_is_the_policys_own_mixture(FedCP)


def test_one_step_shows_the_gradients_of_all_three_modules():
    check_one_step_shows_the_gradients_of_all_three_modules(FedCP)


def test_a_head_of_zeros_has_no_context():
    check_a_head_of_zeros_has_no_context(FedCP)


def test_the_rows_of_the_distance_have_its_value_as_mean():
    rng = torch.Generator().manual_seed(0)
    a, b = (scale * torch.randn(6, 5, generator=rng) for scale in (1, 4))
    assert mmd_rows(a, b).shape == (6,)
    assert torch.allclose(mmd_rows(a, b).mean(), hand_mmd(a, b), rtol=1e-14)
    assert torch.equal(mmd_rows(a, a), torch.zeros(6))
    assert mmd_rows(a[:1], b[:1]).item() == pytest.approx(float(hand_mmd(a[:1], b[:1])))


def test_noise_is_drawn_in_training_alone_and_is_the_same_in_every_dtype():
    calm, noisy = (done(FedCP, {"policy": policy})[2].up for policy in ("softmax", "gumbel"))
    assert toys.distance(select(calm, "body"), select(noisy, "body")) > 1e-4
    algorithm, _, down = parts(FedCP, policy="gumbel")
    z = torch.randn(8, 5, generator=torch.Generator().manual_seed(0))
    half = {k: v.float() for k, v in down.items()}
    double, single = (
        algorithm.split(model, x, torch.Generator().manual_seed(2))[0]  # type: ignore[attr-defined]
        for model, x in ((down, z), (half, z.float()))
    )
    assert torch.allclose(double, single.double(), rtol=0, atol=1e-5)


def test_a_low_temperature_sends_a_feature_one_way():
    algorithm, _, down = parts(FedCP, temperature=1e-6)
    z = torch.randn(50, 5, generator=torch.Generator().manual_seed(0))
    s, r = algorithm.split(down, z, None)  # type: ignore[attr-defined]
    tied = s == 0.5  # both halves cut off at 0 by the ReLU
    assert ((s * r < 1e-6) | tied).all()
    assert not tied.all()


def test_the_log_shows_the_head_and_before_it_shows_nothing():
    """What a first upload is compared with: the head as it was left, not a gradient from an unknown start."""
    algorithm, state, down = parts(FedCP, trained=False)
    up = algorithm.local(toys.work(*toys.batch(10)), state, down).up
    seen = algorithm.change(state, down, up, lr=0.1, steps=1)
    found = algorithm.reconstruct_state(algorithm.observe(state, down, up))
    assert found is not None
    assert toys.distance(prefixed("trained", select(found, "head")), select(seen, "trained")) == 0
    assert not select(seen, "head")
    assert algorithm.reconstruct_state(state) == select(state, "trained")
    assert toys.method(FedCP, private_start="shared").reconstruct_state(state) == state
    shared = toys.method(FedCP, private_start="shared").change(state, down, up, lr=0.1, steps=1)
    assert shared.keys() == {k for k in down if k.partition(".")[0] in MOVED}


def test_a_local_model_is_tested_with_the_global_head_it_was_trained_with():
    _, down, result = done(FedCP, {}, epochs=2)
    items = toys.method(FedCP).deploy_trained(result.state, down, result.up)
    assert toys.same(select(items, *MOVED), trained(down, result))
    assert toys.same(select(items, "common"), prefixed("common", select(down, "head")))


def test_a_deep_head_has_the_product_of_its_layers_and_other_heads_are_refused():
    def deep() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 5), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))

    algorithm = toys.method(FedCP, Network(deep, toys.SHAPE, 3, "2"))
    head = algorithm.net.fresh(0)
    first, last = (v for k, v in head.items() if k.startswith("head.") and k.endswith("weight"))
    found = algorithm.context(head)  # type: ignore[attr-defined]
    assert torch.allclose(found, F.normalize((last @ first).sum(0), dim=0), rtol=0, atol=1e-15)

    def convolutions() -> nn.Module:
        return nn.Sequential(nn.Conv2d(1, 2, 1), nn.Conv2d(2, 1, 1), nn.Flatten(), nn.Linear(16, 3))

    with pytest.raises(ConfigError, match="linear layers"):
        toys.method(FedCP, Network(convolutions, toys.SHAPE, 3, "1"))

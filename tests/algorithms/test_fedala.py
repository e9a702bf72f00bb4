"""FedALA. The checks take the method's class, so that planted bugs can be put to them."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from pflsec.algorithms.personalized_aggregation.fedala import FedALA
from pflsec.algorithms.traditional.fedavg import FedAvg
from pflsec.attacks.problem import Problem
from pflsec.core.algorithm import Algorithm
from pflsec.core.items import Items, prefixed, select, without_prefix
from pflsec.runtime.executor import context
from pflsec.runtime.replay import capture
from pflsec.training.local import LocalWork
from tests import toys
from tests.contracts.cases import Case, exchange
from tests.contracts.test_every_method import _with, probe

HEAD = ["head.weight", "head.bias"]
PARTIAL: dict[str, Any] = {"participation": 0.75, "drop_rate": 1 / 3}


def parameters(items: Items) -> Items:
    """Return the items of the network alone."""
    return select(items, "body", "head")


def weights(state: Items) -> Items:
    """Return the mixing weights by parameter name."""
    return without_prefix("mix", state)


def veteran(algorithm: Any, mixed: bool = True, value: float = 0.75) -> tuple[Items, Items]:
    """Return the state of a client that has trained and, if so, mixed; and another model that it receives."""
    old, new = toys.tiny().fresh("old"), toys.tiny().fresh("new")
    mix = prefixed("mix", {k: torch.full_like(old[k], value) for k in algorithm.top()})
    return old | mix | {"trained": torch.tensor(True), "mixed": torch.tensor(mixed)}, new


def hand_start(state: Items, down: Items) -> Items:
    """Return old + (received - old) W where there are mixing weights, and the received model elsewhere."""
    mix = weights(state)
    return {k: state[k] + (v - state[k]) * mix[k] if k in mix else v for k, v in down.items()}


def check_1_without_learning_it_is_fedavg(kind: type[Algorithm]) -> None:
    """W stays 1, and the mixture is the received model exactly. At this rate the models lie so far apart that the
    difference of two numbers is rounded: old + (new - old) is then not always new."""
    far: dict[str, Any] = PARTIAL | {"lr": 2.0}
    ours = toys.play(kind, 4, settings={"mix_lr": 0.0, "layers": 9}, **far)
    for turn, other in zip(ours, toys.play(FedAvg, 4, **far), strict=True):
        assert all(toys.same(up, other.ups[client]) for client, up in turn.ups.items())
        assert toys.same(turn.next_server, other.next_server)


def check_2_the_start_lies_between_the_two_models(kind: type[Algorithm]) -> None:
    """Element by element in the upper layers; below them it is the received model, bit for bit. W stays in [0, 1]."""
    made = toys.setup(kind, settings={"mix_lr": 30.0, "share": 1.0}, lr=0.5)
    inside = 0
    for turn in toys.rounds(made, 4):
        for client in range(4):
            state, down = turn.states[client], turn.downs[client]
            algorithm: Any = made.algorithm
            mixed = algorithm.mix(toys.context(made, turn.t, client), state, down)
            assert all(((w >= 0) & (w <= 1)).all() for w in weights(mixed).values())
            start = algorithm.start(mixed, down)
            assert toys.distance(start, hand_start(mixed, down)) < 1e-15 or not state["trained"]
            for name, value in start.items():
                if name not in HEAD or not state["trained"]:
                    assert torch.equal(value, down[name])
                    continue
                low, high = torch.minimum(state[name], down[name]), torch.maximum(state[name], down[name])
                assert ((value >= low) & (value <= high)).all()
                inside += int(((value > low) & (value < high)).sum())
    assert inside > 10


def check_3_one_step_follows_the_chain_rule(kind: type[Algorithm]) -> None:
    """d loss / dW = g (received - old), g the gradient at the start: by hand, and by differences in W itself."""
    algorithm: Any = toys.method(kind, share=1.0, mix_lr=0.3)
    state, down = veteran(algorithm)
    x, y = toys.batch()
    found = weights(algorithm.mix(toys.work(x, y, algorithm.net), state, down))
    g = toys.hand_gradient(hand_start(state, down), x, y)
    slope = {k: g[k] * (down[k] - state[k]) for k in found}
    assert toys.distance(found, {k: (weights(state)[k] - 0.3 * slope[k]).clamp(0, 1) for k in found}) < 1e-15
    for name in found:
        step = torch.zeros_like(found[name])
        step.view(-1)[1] = 1e-6
        losses = [
            toys.hand_loss(hand_start(state | {f"mix.{name}": weights(state)[name] + sign * step}, down), x, y)
            for sign in (1, -1)
        ]
        assert slope[name].view(-1)[1].item() == pytest.approx((losses[0] - losses[1]).item() / 2e-6, rel=1e-6)


def check_3_where_the_models_agree_the_weight_stays(kind: type[Algorithm]) -> None:
    algorithm: Any = toys.method(kind, share=1.0, mix_lr=5.0)
    state, down = veteran(algorithm)
    agree = torch.zeros_like(down["head.weight"], dtype=torch.bool)
    agree[0, :3] = True
    down["head.weight"] = torch.where(agree, state["head.weight"], down["head.weight"])
    found = weights(algorithm.mix(toys.work(*toys.batch(), algorithm.net), state, down))["head.weight"]
    assert torch.equal(found[agree], torch.full((3,), 0.75))
    assert not (found[~agree] == 0.75).any()


def check_4_a_clients_first_exchange_is_fedavgs(kind: type[Algorithm]) -> None:
    """Whenever it comes: a newcomer has no model of its own to mix in. (Nor has a client that receives its own model.)"""
    made = toys.setup(kind, settings={"mix_lr": 5.0}, participation=0.25, rounds=8, seed=1)
    seen: list[int] = []
    for turn in toys.rounds(made):
        (client,) = turn.ups
        plain = toys.context(made, turn.t, client)
        expected = plain.fit(turn.downs[client], on=plain.ce)
        plain_one = client not in seen or seen[-1] == client
        assert toys.same(parameters(turn.ups[client]), expected) == plain_one
        seen.append(client)
    assert [i for i, client in enumerate(seen) if i > 1 and client not in seen[:i]]
    assert [i for i, client in enumerate(seen) if client in seen[:i] and client != seen[i - 1]]


def check_5_absent_clients_keep_model_and_weights(kind: type[Algorithm]) -> None:
    for turn in toys.play(kind, 4, settings={"mix_lr": 5.0}, **PARTIAL):
        for client in set(turn.states) - set(turn.ups):
            assert toys.same(turn.next_states[client], turn.states[client])
        for client, up in turn.ups.items():
            assert toys.same(parameters(turn.next_states[client]), parameters(up))


def check_6_lower_layers_show_the_gradient_at_the_start(kind: type[Algorithm]) -> None:
    """(down - up)/lr below; above, that is no gradient, and an observer does not take it for one."""
    algorithm: Any = toys.method(kind, share=1.0, mix_lr=0.3)
    state, down = veteran(algorithm)
    x, y = toys.batch()
    done = algorithm.local(toys.work(x, y, algorithm.net), state, down)
    g = toys.hand_gradient(hand_start(done.state | select(state, "body", "head"), down), x, y)
    body = select(down, "body")
    assert toys.distance({k: (down[k] - done.up[k]) / 0.1 for k in body}, select(g, "body")) < 1e-12
    assert not torch.allclose((down["head.bias"] - done.up["head.bias"]) / 0.1, g["head.bias"], atol=1e-3)
    seen = algorithm.change(state, down, done.up, lr=0.1, steps=1)
    assert toys.distance(seen, select(g, "body")) < 1e-12


def check_the_first_mixing_ends_when_the_loss_has_settled(kind: type[Algorithm]) -> None:
    """Ten losses must deviate by less than the threshold, so at least 11 epochs; later mixings make one."""
    lengths: list[int] = []

    class Watched(kind):  # type: ignore[misc, valid-type]
        def settled(self, losses: Sequence[float]) -> bool:
            lengths.append(len(losses))
            return super().settled(losses)  # type: ignore[misc]

    algorithm: Any = toys.method(Watched)
    state, down = veteran(algorithm, mixed=False)
    work = toys.work(*toys.batch(), algorithm.net)
    after = algorithm.mix(work, state, down)
    assert lengths == list(range(1, 12))
    assert after["mixed"]
    lengths.clear()
    again = algorithm.mix(toys.work(*toys.batch(), algorithm.net), after, down)
    assert lengths == []
    assert not toys.same(weights(again), weights(after))
    endless: Any = toys.method(Watched, threshold=0.0, most_epochs=17)
    endless.mix(toys.work(*toys.batch(), endless.net), state, down)
    assert lengths == list(range(1, 18))


def check_the_weights_are_kept(kind: type[Algorithm]) -> None:
    """The next mixing goes on from where the last one ended."""
    made = toys.setup(kind, settings={"mix_lr": 5.0})
    for turn in toys.rounds(made, 4)[1:]:
        for client in range(4):
            ctx = toys.context(made, turn.t, client)
            algorithm: Any = made.algorithm
            expected = algorithm.mix(ctx, turn.states[client], turn.downs[client])
            assert toys.same(weights(turn.next_states[client]), weights(expected))
            assert not toys.same(weights(turn.next_states[client]), weights(turn.states[client]))


def check_layers_are_whole(kind: type[Algorithm]) -> None:
    """A layer is its weight and its bias; more layers than there are means all."""
    names = list(toys.tiny().shapes)
    for layers, top in ((1, HEAD), (2, names), (9, names)):
        algorithm: Any = toys.method(kind, layers=layers)
        assert algorithm.top() == top
        assert list(weights(algorithm.init_client(toys.tiny().fresh(0), toys.tiny().fresh(0)))) == top


def check_the_tested_model_is_the_start_of_the_next_round(kind: type[Algorithm]) -> None:
    """Before any training: without epochs, the next upload is that model."""
    made = toys.setup(kind, settings={"mix_lr": 5.0}, lr=0.5)
    turn = toys.rounds(made)[-1]
    for row in turn.rows:
        client = row["client"]
        state, down = turn.next_states[client], made.algorithm.downlink(turn.next_server, client)
        untrained = toys.context(made, turn.t + 1, client, epochs=0)
        start = parameters(made.algorithm.local(untrained, state, down).up)
        deployed = made.algorithm.deploy(state, down)
        found = made.algorithm.personalise(context(made, turn.t + 1, client), deployed)
        assert toys.same(parameters(found), start)
        x, y = made.federation.test(client)
        right = (made.net.logits(start, x).argmax(1) == y).double().mean()
        assert row["accuracy_post_agg"] == pytest.approx(float(right))
        own = (made.net.logits(turn.ups[client], x).argmax(1) == y).double().mean()
        assert row["accuracy_post_local"] == pytest.approx(float(own))


def test_fedala_1_without_learning_it_is_fedavg():
    check_1_without_learning_it_is_fedavg(FedALA)


def test_fedala_1_a_weight_of_one_gives_the_received_model_in_single_precision():
    """lerp(old, new, 1) is new to the last bit; old + (new - old) is not."""
    torch.set_default_dtype(torch.float32)
    algorithm: Any = toys.method(FedALA, layers=9)
    state, down = veteran(algorithm, value=1.0)
    assert toys.same(algorithm.start(state, down), down)
    assert not toys.same(hand_start(state, down), down)


def test_fedala_2_the_start_lies_between_the_two_models():
    check_2_the_start_lies_between_the_two_models(FedALA)


def test_fedala_3_one_step_follows_the_chain_rule():
    check_3_one_step_follows_the_chain_rule(FedALA)


def test_fedala_3_where_the_models_agree_the_weight_stays():
    check_3_where_the_models_agree_the_weight_stays(FedALA)


def test_fedala_4_a_clients_first_exchange_is_fedavgs():
    check_4_a_clients_first_exchange_is_fedavgs(FedALA)


def test_fedala_5_absent_clients_keep_model_and_weights():
    check_5_absent_clients_keep_model_and_weights(FedALA)


def test_fedala_6_lower_layers_show_the_gradient_at_the_start():
    check_6_lower_layers_show_the_gradient_at_the_start(FedALA)


def test_the_first_mixing_ends_when_the_loss_has_settled():
    check_the_first_mixing_ends_when_the_loss_has_settled(FedALA)


def test_the_weights_are_kept():
    check_the_weights_are_kept(FedALA)


def test_layers_are_whole():
    check_layers_are_whole(FedALA)


def test_the_tested_model_is_the_start_of_the_next_round():
    check_the_tested_model_is_the_start_of_the_next_round(FedALA)


def test_with_all_layers_mixed_what_is_sent_is_matched_under_another_name():
    """There is no clean gradient anywhere, and no rule may take what there is for one."""
    algorithm: Any = toys.method(FedALA, layers=9)
    state, down = veteran(algorithm)
    done = algorithm.local(toys.work(*toys.batch(), algorithm.net), state, down)
    seen = algorithm.change(state, down, done.up, lr=0.1, steps=1)
    assert seen.keys() == {f"mixed.{name}" for name in toys.tiny().shapes}


def test_the_mixing_leaves_the_main_batches_alone():
    """FedAvg from the same start visits the same batches, bit for bit."""
    algorithm: Any = toys.method(FedALA)
    state, down = veteran(algorithm)
    changes: dict[str, Any] = {"epochs": 3, "batch_size": 4}
    done = algorithm.local(toys.work(*toys.batch(10), algorithm.net, **changes), state, down)
    plain: LocalWork = toys.work(*toys.batch(10), algorithm.net, **changes)
    start = algorithm.start(state | prefixed("mix", weights(done.state)), down)
    assert toys.same(plain.fit(start, on=plain.ce), parameters(done.up))


def test_the_received_model_itself_is_not_mixed():
    """Old and received agree in all tensors: nothing to learn, and W stays."""
    algorithm: Any = toys.method(FedALA)
    state, _ = veteran(algorithm, mixed=False)
    after = algorithm.mix(toys.work(*toys.batch(), algorithm.net), state, parameters(state))
    assert toys.same(after, state)


@pytest.mark.parametrize(("history", "hidden"), [(True, "joint"), (False, "none")])
def test_an_attacker_with_the_log_misses_the_mixing_weights_alone(history: bool, hidden: str):
    """Last upload and flags are known from earlier messages; without them it takes the client for a newcomer."""
    ex = exchange(Case("fedala"))
    record, _, _, up = probe(ex, 2, 1)
    whole = _with(record, up=up, memory=ex.memory)
    cap = capture(ex.setup.algorithm, ex.setup.net, whole, history=history, seed=0)
    problem = Problem(cap, "optimise", "auto", torch.Generator().manual_seed(0), torch.float64)
    assert problem.hidden == hidden
    assert problem.secret == ({"mix.head.weight", "mix.head.bias"} if history else set())
    if history:
        assert toys.same(parameters(problem.state), parameters(ex.state))
        assert problem.state["trained"]
        assert problem.state["mixed"]

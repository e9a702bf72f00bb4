"""FedPer. The checks take the method's class, so that planted bugs can be put to them."""

from typing import Any

import pytest
import torch

from pflsec.algorithms.model_splitting.fedper import FedPer
from pflsec.algorithms.other.local import Isolated
from pflsec.algorithms.traditional.fedavg import FedAvg
from pflsec.core.algorithm import Algorithm
from pflsec.core.items import Items, select
from tests import toys

HEAD_SHAPES = {(toys.CLASSES, 5), (toys.CLASSES,)}
TRAINED = {"trained": torch.tensor(True)}


def newcomer(algorithm: Algorithm[Any], *key: int | str) -> Items:
    """Return the state of a client that has drawn its own network with this key."""
    return algorithm.init_client(algorithm.net.fresh(*key), algorithm.init_server(algorithm.net.fresh("server")))


def check_1_only_the_body_is_on_the_wire(kind: type[Algorithm]) -> None:
    """By name, and by shape: no parameter of the body has that of one of the head's."""
    body = {name for name in toys.tiny().shapes if name.startswith("body.")}
    for turn in toys.play(kind, participation=0.5):
        assert all(down.keys() == body for down in turn.downs.values())
        assert all(up.keys() == body | {"num_samples"} for up in turn.ups.values())
        sent = [v for message in (*turn.downs.values(), *turn.ups.values()) for v in message.values()]
        assert not {tuple(v.shape) for v in sent} & HEAD_SHAPES


def check_2_the_body_is_the_mean_by_samples_over_who_took_part(kind: type[Algorithm]) -> None:
    """Half of the clients in a round: the weights are n_k over the participants' sum, and the others' heads stay."""
    for turn in toys.play(kind, participation=0.5):
        share = {c: toys.TRAIN[c] / sum(toys.TRAIN[k] for k in turn.ups) for c in turn.ups}
        mean = {k: torch.stack([share[c] * up[k] for c, up in turn.ups.items()]).sum(0) for k in turn.server}
        assert toys.distance(turn.next_server, mean) < 1e-15
        assert all(toys.same(turn.next_states[c], turn.states[c]) for c in range(4) if c not in turn.ups)


def check_3_with_nothing_personal_it_is_fedavg(kind: type[Algorithm]) -> None:
    """All layers in the body: the same bits in every round."""
    ours, reference = (toys.play(method, net=toys.cut("body"), participation=0.75) for method in (kind, FedAvg))
    for turn, other in zip(ours, reference, strict=True):
        assert toys.same(turn.next_server, other.next_server)
        assert all(toys.same(turn.ups[c], other.ups[c]) for c in range(4) if c in other.ups)


def check_3_with_all_personal_it_is_isolated_training(kind: type[Algorithm]) -> None:
    """All layers in the head: no tensor is sent, and each client's model is the one it would have trained alone."""
    ours, reference = (toys.play(method, net=toys.cut("head"), participation=0.75) for method in (kind, Isolated))
    for turn, other in zip(ours, reference, strict=True):
        assert all(up.keys() == {"num_samples"} for up in turn.ups.values())
        assert not any(turn.downs.values())
        for client, state in turn.next_states.items():
            assert toys.same(select(state, "head"), other.next_states[client])


def check_4_equal_heads_give_fedavgs_first_upload(kind: type[Algorithm]) -> None:
    """One full batch from the public model: the body's part of FedAvg's upload, bit for bit."""
    options: dict[str, Any] = {"local_epochs": 1, "batch_size": 8}
    turn = toys.play(kind, 1, settings={"private_start": "shared"}, **options)[0]
    other = toys.play(FedAvg, 1, **options)[0]
    for client, up in turn.ups.items():
        assert toys.same(select(up, "body"), select(other.ups[client], "body"))


def check_5_one_step_moves_both_parts_at_one_point(kind: type[Algorithm]) -> None:
    """What is seen is the body's gradient at the head as it was before, and the head moves by its own gradient there."""
    algorithm, (x, y) = toys.method(kind), toys.batch()
    state, body = newcomer(algorithm, 0), select(algorithm.net.fresh(1), "body")
    done = algorithm.local(toys.work(x, y, algorithm.net), state, body)
    head = select(state, "head")
    gradient = toys.hand_gradient(body | head, x, y)
    seen = algorithm.change(state, body, done.up, lr=0.1, steps=1)
    assert toys.distance(seen, select(gradient, "body")) < 1e-12
    assert toys.distance(select(done.state, "head"), toys.hand_step(head, select(gradient, "head"), 0.1)) < 1e-14


def check_6_clients_differ_by_data_and_head_alone(kind: type[Algorithm]) -> None:
    """Equal rows and equal heads: two clients stay equal over rounds. With heads of their own their uploads differ."""
    algorithm, (x, y) = toys.method(kind), toys.batch()
    for keys, equal in (((0, 0), True), ((0, 1), False)):
        server = algorithm.init_server(algorithm.net.fresh("server"))
        states = [newcomer(algorithm, key) for key in keys]
        for t in range(3):
            contexts = [toys.work(x, y, algorithm.net, epochs=2, client=c, round=t) for c in (0, 1)]
            done = [
                algorithm.local(ctx, s, algorithm.downlink(server, c))
                for c, (ctx, s) in enumerate(zip(contexts, states, strict=True))
            ]
            assert toys.same(done[0].up, done[1].up) == equal
            assert toys.same(done[0].state, done[1].state) == equal
            server, states = algorithm.aggregate(server, {c: d.up for c, d in enumerate(done)}), [d.state for d in done]


def check_heads_start_apart_unless_they_are_told_to_share(kind: type[Algorithm]) -> None:
    apart, shared = (toys.play(kind, 1, settings={"private_start": start})[0].states for start in ("apart", "shared"))
    assert not toys.same(apart[0], apart[1])
    assert toys.same(shared[0], shared[1])


def check_a_newcomer_is_tested_with_a_head_that_was_fitted_alone(kind: type[Algorithm]) -> None:
    """Two epochs of the head over the body as it came; who has taken part is tested as it is."""
    algorithm = toys.method(kind, newcomer_epochs=2)
    state, body, (x, y) = newcomer(algorithm, 0), select(algorithm.net.fresh(1), "body"), toys.batch()
    model = body | select(state, "head")
    ready = algorithm.personalise(toys.work(x, y, algorithm.net), algorithm.deploy(state, body))
    for _ in range(2):
        model = model | toys.hand_step(select(model, "head"), toys.hand_gradient(model, x, y), 0.1)
    assert toys.same(select(ready, "body"), body)
    assert toys.distance(select(ready, "head"), select(model, "head")) < 1e-14
    old = algorithm.deploy(state | TRAINED, body)
    assert toys.same(algorithm.personalise(toys.work(x, y, algorithm.net), old), old)


def test_fedper_1_only_the_body_is_on_the_wire():
    check_1_only_the_body_is_on_the_wire(FedPer)


def test_fedper_2_the_body_is_the_mean_by_samples_over_who_took_part():
    check_2_the_body_is_the_mean_by_samples_over_who_took_part(FedPer)


def test_fedper_3_with_nothing_personal_it_is_fedavg():
    check_3_with_nothing_personal_it_is_fedavg(FedPer)


def test_fedper_3_with_all_personal_it_is_isolated_training():
    check_3_with_all_personal_it_is_isolated_training(FedPer)


def test_fedper_4_equal_heads_give_fedavgs_first_upload():
    check_4_equal_heads_give_fedavgs_first_upload(FedPer)


def test_fedper_5_one_step_moves_both_parts_at_one_point():
    check_5_one_step_moves_both_parts_at_one_point(FedPer)


def test_fedper_6_clients_differ_by_data_and_head_alone():
    check_6_clients_differ_by_data_and_head_alone(FedPer)


def test_heads_start_apart_unless_they_are_told_to_share():
    check_heads_start_apart_unless_they_are_told_to_share(FedPer)


def test_a_newcomer_is_tested_with_a_head_that_was_fitted_alone():
    check_a_newcomer_is_tested_with_a_head_that_was_fitted_alone(FedPer)


def test_equal_weights_are_an_option():
    turn = toys.play(FedPer, 1, settings={"weighting": "uniform"})[0]
    mean = {k: torch.stack([up[k] for up in turn.ups.values()]).mean(0) for k in turn.server}
    assert toys.distance(turn.next_server, mean) < 1e-15


def test_a_head_that_was_away_meets_the_newest_body():
    """The model that is tested is the aggregated body under the client's own head, however old that is."""
    made = toys.setup(FedPer, lr=0.5, participation=0.5, seed=2)
    turn = toys.rounds(made)[-1]
    for row in turn.rows:
        client = row["client"]
        x, y = made.federation.test(client)
        state = turn.next_states[client]
        model = turn.next_server | select(state, "head")
        deployed = made.algorithm.deploy(state, made.algorithm.downlink(turn.next_server, client))
        assert toys.same(select(deployed, "body", "head"), model)
        right = (made.net.logits(model, x).argmax(1) == y).double().mean()
        assert row["accuracy_post_agg"] == pytest.approx(float(right))


def test_a_client_of_one_class_still_trains():
    """Bias and row of the class go up, all others down, and the body moves."""
    algorithm, (x, y) = toys.method(FedPer), toys.batch(classes=(1,))
    state, body = newcomer(algorithm, 0), select(algorithm.net.fresh(1), "body")
    done = algorithm.local(toys.work(x, y, algorithm.net), state, body)
    assert torch.equal((done.state["head.bias"] - state["head.bias"]).sign(), torch.tensor([-1.0, 1.0, -1.0]))
    assert toys.distance(select(done.up, "body"), body) > 1e-3

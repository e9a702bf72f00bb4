"""FedBABU. The checks take the method's class, so that planted bugs can be put to them."""

from typing import Any

import pytest
import torch

from pflsec.algorithms.model_splitting.fedbabu import FedBABU
from pflsec.algorithms.model_splitting.fedrep import FedRep
from pflsec.algorithms.traditional.fedavg import FedAvg
from pflsec.core.algorithm import Algorithm
from pflsec.core.items import Items, select
from pflsec.runtime.executor import context
from tests import toys

BODY, HEAD = ({name for name in toys.tiny().shapes if name.startswith(part)} for part in ("body.", "head."))
PARTS = {"full": ("body", "head"), "head": ("head",), "body": ("body",)}


def right(model: Items, made: Any, client: int) -> float:
    """Return the model's accuracy on the client's test rows."""
    x, y = made.federation.test(client)
    return float((made.net.logits(model, x).argmax(1) == y).double().mean())


def tuned(made: Any, server: Items, t: int, client: int, part: str, epochs: int) -> Items:
    """Return the aggregate after fitting a part of it to the client's rows, by hand."""
    model = select(server, "body", "head")
    for x, y in toys.context(made, t, client).batches(epochs, "tune"):
        gradient = select(toys.hand_gradient(model, x, y), *PARTS[part])
        model = model | toys.hand_step(select(model, *PARTS[part]), gradient, 0.1)
    return model


def check_1_the_head_never_moves(kind: type[Algorithm]) -> None:
    """One draw, the same bits on the server and on all clients after any number of rounds."""
    made = toys.setup(kind, participation=0.75)
    head = select(made.server_fresh, "head")
    for turn in toys.rounds(made, 4):
        assert toys.same(select(turn.next_server, "head"), head)
        assert all(toys.same(select(state, "head"), head) for state in turn.next_states.values())


def check_2_the_body_is_on_the_wire_and_the_head_once(kind: type[Algorithm]) -> None:
    """Down: the head until an upload of the client has arrived. Up: never."""
    met: set[int] = set()
    for turn in toys.play(kind, 5, participation=0.5, drop_rate=0.5):
        for client, down in turn.downs.items():
            assert down.keys() == (BODY if client in met else BODY | HEAD)
        assert all(up.keys() == BODY | {"num_samples"} for up in turn.ups.values())
        met |= turn.ups.keys()
    assert len(met) > 1
    assert all(down.keys() == BODY for turn in toys.play(kind, 3)[1:] for down in turn.downs.values())


def check_3_the_first_step_is_fedavgs_of_the_body(kind: type[Algorithm]) -> None:
    """One full batch, while FedAvg's head is still the first one: the same bits."""
    options: dict[str, Any] = {"local_epochs": 1, "batch_size": 8}
    turn, other = (toys.play(method, 1, **options)[0] for method in (kind, FedAvg))
    for client, up in turn.ups.items():
        assert toys.same(select(up, "body"), select(other.ups[client], "body"))


def check_4_it_is_fedrep_without_a_head_phase(kind: type[Algorithm]) -> None:
    """With one head for all and sample weights: the same uploads and the same aggregates, bit for bit."""
    settings = {"head_epochs": 0, "private_start": "shared", "weighting": "samples"}
    reference = toys.play(FedRep, 4, settings=settings, participation=0.75)
    for turn, other in zip(toys.play(kind, 4, participation=0.75), reference, strict=True):
        assert turn.ups.keys() == other.ups.keys()
        assert all(toys.same(up, other.ups[c]) for c, up in turn.ups.items())
        assert toys.same(select(turn.next_server, "body"), other.next_server)


def check_5_a_clients_model_is_the_newest_aggregate_fitted_to_its_rows(kind: type[Algorithm]) -> None:
    """Whether or not it took part, and whichever part is fitted; asked again, the same number and nothing has changed."""
    for part in PARTS:
        made = toys.setup(kind, settings={"tuned": part, "tune_epochs": 3}, participation=0.5)
        for turn in toys.rounds(made):
            for client, state in turn.next_states.items():
                expected = tuned(made, turn.next_server, turn.t + 1, client, part, 3)
                deployed = made.algorithm.deploy(state, made.algorithm.downlink(turn.next_server, client))
                before = [toys.snapshot(items) for items in (turn.next_server, state, deployed)]
                again = [context(made, turn.t + 1, client) for _ in range(2)]
                found = [made.algorithm.personalise(ctx, deployed) for ctx in again]
                assert toys.same(*found)
                assert toys.distance(found[0], expected) < 1e-13
                assert all(map(toys.same, (turn.next_server, state, deployed), before))
                assert turn.rows[client]["accuracy_post_agg"] == pytest.approx(right(expected, made, client))


def check_5_without_tuning_everybody_uses_one_model(kind: type[Algorithm]) -> None:
    made = toys.setup(kind, settings={"tune_epochs": 0}, lr=0.5)
    for turn in toys.rounds(made):
        common = made.algorithm.global_model(turn.next_server)
        assert common is not None
        for row in turn.rows:
            assert row["accuracy_post_agg"] == pytest.approx(right(common, made, row["client"]))


def check_6_the_body_is_the_mean_by_samples(kind: type[Algorithm]) -> None:
    for turn in toys.play(kind, participation=0.5):
        share = {c: toys.TRAIN[c] / sum(toys.TRAIN[k] for k in turn.ups) for c in turn.ups}
        names = select(turn.server, "body")
        mean = {k: torch.stack([share[c] * up[k] for c, up in turn.ups.items()]).sum(0) for k in names}
        assert toys.distance(select(turn.next_server, "body"), mean) < 1e-15


def test_fedbabu_1_the_head_never_moves():
    check_1_the_head_never_moves(FedBABU)


def test_fedbabu_2_the_body_is_on_the_wire_and_the_head_once():
    check_2_the_body_is_on_the_wire_and_the_head_once(FedBABU)


def test_fedbabu_3_the_first_step_is_fedavgs_of_the_body():
    check_3_the_first_step_is_fedavgs_of_the_body(FedBABU)


def test_fedbabu_4_it_is_fedrep_without_a_head_phase():
    check_4_it_is_fedrep_without_a_head_phase(FedBABU)


def test_fedbabu_5_a_clients_model_is_the_newest_aggregate_fitted_to_its_rows():
    check_5_a_clients_model_is_the_newest_aggregate_fitted_to_its_rows(FedBABU)


def test_fedbabu_5_without_tuning_everybody_uses_one_model():
    check_5_without_tuning_everybody_uses_one_model(FedBABU)


def test_fedbabu_6_the_body_is_the_mean_by_samples():
    check_6_the_body_is_the_mean_by_samples(FedBABU)


def test_equal_weights_are_an_option():
    turn = toys.play(FedBABU, 1, settings={"weighting": "uniform"})[0]
    mean = {k: torch.stack([up[k] for up in turn.ups.values()]).mean(0) for k in BODY}
    assert toys.distance(select(turn.next_server, "body"), mean) < 1e-15


def test_the_rows_of_an_orthogonal_head_are_orthonormal():
    """Three rows of five numbers: W W^T = 1. The bias is drawn as ever; another public draw gives another head."""
    algorithm = toys.method(FedBABU, head_start="orthogonal")
    fresh = algorithm.net.fresh(0)
    head = select(algorithm.init_server(fresh), "head")
    assert torch.allclose(head["head.weight"] @ head["head.weight"].T, torch.eye(3), atol=1e-14)
    assert torch.equal(head["head.bias"], fresh["head.bias"])
    assert toys.same(head, select(algorithm.init_server(fresh), "head"))
    assert toys.distance(head, select(algorithm.init_server(algorithm.net.fresh(1)), "head")) > 1e-3


def test_fitting_has_a_learning_rate_of_its_own():
    algorithm, (x, y) = toys.method(FedBABU, tune_epochs=1, tune_lr=0.7), toys.batch()
    model = algorithm.net.fresh(0)
    found = algorithm.personalise(toys.work(x, y, algorithm.net), model)
    assert toys.distance(found, toys.hand_step(model, toys.hand_gradient(model, x, y), 0.7)) < 1e-14


def test_labels_come_back_through_the_known_head():
    """One image: the slope at the five features is W^T (p - y), with W known. Least squares give the three numbers p - y,
    of which the label's alone is negative."""
    for label in range(toys.CLASSES):
        algorithm, (x, _) = toys.method(FedBABU), toys.batch(1, seed=label)
        server = algorithm.init_server(algorithm.net.fresh(0))
        down, y = algorithm.downlink(server, 0), torch.tensor([label])
        done = algorithm.local(toys.work(x, y, algorithm.net), select(server, "head"), down)
        bias = algorithm.change({}, down, done.up, lr=0.1, steps=1)["body.fc1.bias"]
        features = toys.hand_features(down, x)[0]
        slope = bias / (1 - features.square())  # tanh' = 1 - tanh^2
        found = torch.linalg.lstsq(server["head.weight"].T, slope[:, None]).solution
        assert int(found.argmin()) == label


def test_an_adversary_knows_the_whole_model_in_every_round():
    """The state of a client is the public newcomer's, bit for bit, from the first round to the last."""
    made = toys.setup(FedBABU, participation=0.5)
    public = made.algorithm.init_client(made.server_fresh, made.algorithm.init_server(made.server_fresh))
    assert all(toys.same(state, public) for turn in toys.rounds(made) for state in turn.next_states.values())

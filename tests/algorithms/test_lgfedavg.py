"""LG-FedAvg. The checks take the method's class, so that planted bugs can be put to them."""

from typing import Any

import pytest
import torch

from pflsec.algorithms.model_splitting.fedper import FedPer
from pflsec.algorithms.model_splitting.lgfedavg import LGFedAvg
from pflsec.algorithms.other.local import Isolated
from pflsec.algorithms.traditional.fedavg import FedAvg
from pflsec.core.algorithm import Algorithm, Done
from pflsec.core.items import select
from tests import toys

BODY, HEAD = ({name for name in toys.tiny().shapes if name.startswith(part)} for part in ("body.", "head."))
WARM: dict[str, Any] = {"warm_start_rounds": 2}


def step(kind: type[Algorithm], x: torch.Tensor, y: torch.Tensor) -> tuple[dict, Done, dict]:
    """Return (model before, what one step gives, what its upload shows)."""
    algorithm = toys.method(kind)
    head, body = (select(algorithm.net.fresh(i), part) for i, part in enumerate(("head", "body")))
    done = algorithm.local(toys.work(x, y, algorithm.net), body, head)
    return body | head, done, algorithm.change(body, head, done.up, lr=0.1, steps=1)


def check_1_only_the_head_is_on_the_wire(kind: type[Algorithm]) -> None:
    for turn in toys.play(kind, participation=0.5):
        assert all(down.keys() == HEAD for down in turn.downs.values())
        assert all(up.keys() == HEAD | {"num_samples"} for up in turn.ups.values())


def check_2_with_all_shared_it_is_fedavg(kind: type[Algorithm]) -> None:
    """All layers in the head: the same bits in every round."""
    ours, reference = (toys.play(method, net=toys.cut("head"), participation=0.75) for method in (kind, FedAvg))
    for turn, other in zip(ours, reference, strict=True):
        assert toys.same(turn.next_server, other.next_server)
        assert all(toys.same(up, other.ups[c]) for c, up in turn.ups.items())


def check_2_with_nothing_shared_it_is_isolated_training(kind: type[Algorithm]) -> None:
    """All layers in the body: no tensor is sent."""
    ours, reference = (toys.play(method, net=toys.cut("body"), participation=0.75) for method in (kind, Isolated))
    for turn, other in zip(ours, reference, strict=True):
        assert all(up.keys() == {"num_samples"} for up in turn.ups.values())
        assert not any(turn.downs.values())
        assert all(toys.same(state, other.next_states[c]) for c, state in turn.next_states.items())


def check_3_equal_bodies_give_fedavgs_first_step(kind: type[Algorithm]) -> None:
    """One full batch from the public model: what is sent is the head, and what is kept the body, of FedAvg's upload."""
    options: dict[str, Any] = {"local_epochs": 1, "batch_size": 8}
    turn = toys.play(kind, 1, settings={"private_start": "shared"}, **options)[0]
    other = toys.play(FedAvg, 1, **options)[0]
    for client, up in turn.ups.items():
        assert toys.same(select(up, "head"), select(other.ups[client], "head"))
        assert toys.same(turn.next_states[client], select(other.ups[client], "body"))


def check_4_the_head_is_the_mean_by_samples(kind: type[Algorithm]) -> None:
    """Over those who took part; the others' bodies stay, bit for bit."""
    for turn in toys.play(kind, participation=0.5):
        share = {c: toys.TRAIN[c] / sum(toys.TRAIN[k] for k in turn.ups) for c in turn.ups}
        mean = {k: torch.stack([share[c] * up[k] for c, up in turn.ups.items()]).sum(0) for k in turn.server}
        assert toys.distance(turn.next_server, mean) < 1e-15
        assert all(toys.same(turn.next_states[c], turn.states[c]) for c in range(4) if c not in turn.ups)


def check_5_one_image_shows_its_features_and_its_label(kind: type[Algorithm]) -> None:
    """dW = (p - y) h^T and db = p - y: any row over its bias entry is h, and the label alone has a negative entry."""
    for label in range(toys.CLASSES):
        x, _ = toys.batch(1)
        model, _, seen = step(kind, x, torch.tensor([label]))
        features = toys.hand_features(model, x)[0]
        for c in range(toys.CLASSES):
            assert torch.allclose(seen["head.weight"][c] / seen["head.bias"][c], features, rtol=0, atol=1e-10)
        assert int(seen["head.bias"].argmin()) == label


def check_6_its_wire_and_fedpers_make_up_fedavgs(kind: type[Algorithm]) -> None:
    """The same split: no name in common, and together all parameters."""
    turns = [toys.play(method, 1)[0] for method in (kind, FedPer, FedAvg)]
    for client in range(4):
        ours, theirs, whole = (turn.ups[client].keys() - {"num_samples"} for turn in turns)
        assert not ours & theirs
        assert ours | theirs == whole


def check_a_client_with_less_than_a_batch_trains(kind: type[Algorithm]) -> None:
    """Client 2 has three rows, a batch has four: its head moves all the same."""
    turn = toys.play(kind, 1)[0]
    assert all(toys.distance(select(up, "head"), turn.downs[c]) > 1e-3 for c, up in turn.ups.items())


def check_a_warm_start_is_fedavg_and_hands_out_its_body_once(kind: type[Algorithm]) -> None:
    """Two rounds with FedAvg's bits; after them the body goes to each client until an upload of it has arrived, and is
    sent back no more."""
    turns = toys.play(kind, 9, settings=WARM, participation=0.5, drop_rate=0.5)
    reference = toys.play(FedAvg, 2, participation=0.5, drop_rate=0.5)
    for turn, other in zip(turns[:2], reference, strict=True):
        assert all(toys.same(up, other.ups[c]) for c, up in turn.ups.items())
        assert toys.same(select(turn.next_server, "body", "head"), other.next_server)
    warm, served, again = select(turns[1].next_server, "body"), set(), 0
    for turn in turns[2:]:
        for client, down in turn.downs.items():
            body = select(down, "body")
            assert toys.same(body, {} if client in served else warm)
            again += client in served
        assert all(up.keys() == HEAD | {"num_samples"} for up in turn.ups.values())
        served |= turn.ups.keys()
    assert len(served) > 2
    assert again > 1


def test_lgfedavg_1_only_the_head_is_on_the_wire():
    check_1_only_the_head_is_on_the_wire(LGFedAvg)


def test_lgfedavg_2_with_all_shared_it_is_fedavg():
    check_2_with_all_shared_it_is_fedavg(LGFedAvg)


def test_lgfedavg_2_with_nothing_shared_it_is_isolated_training():
    check_2_with_nothing_shared_it_is_isolated_training(LGFedAvg)


def test_lgfedavg_3_equal_bodies_give_fedavgs_first_step():
    check_3_equal_bodies_give_fedavgs_first_step(LGFedAvg)


def test_lgfedavg_4_the_head_is_the_mean_by_samples():
    check_4_the_head_is_the_mean_by_samples(LGFedAvg)


def test_lgfedavg_5_one_image_shows_its_features_and_its_label():
    check_5_one_image_shows_its_features_and_its_label(LGFedAvg)


def test_lgfedavg_6_its_wire_and_fedpers_make_up_fedavgs():
    check_6_its_wire_and_fedpers_make_up_fedavgs(LGFedAvg)


def test_a_client_with_less_than_a_batch_trains():
    check_a_client_with_less_than_a_batch_trains(LGFedAvg)


def test_a_warm_start_is_fedavg_and_hands_out_its_body_once():
    check_a_warm_start_is_fedavg_and_hands_out_its_body_once(LGFedAvg)


def test_one_step_moves_both_parts_at_one_point():
    x, y = toys.batch()
    model, done, _ = step(LGFedAvg, x, y)
    after = toys.hand_step(model, toys.hand_gradient(model, x, y), 0.1)
    assert toys.distance(done.state | select(done.up, "head"), after) < 1e-14


def test_equal_weights_are_an_option():
    turn = toys.play(LGFedAvg, 1, settings={"weighting": "uniform"})[0]
    mean = {k: torch.stack([up[k] for up in turn.ups.values()]).mean(0) for k in turn.server}
    assert toys.distance(turn.next_server, mean) < 1e-15


@pytest.mark.parametrize("settings", [{}, WARM])
def test_a_client_is_tested_with_its_own_body_under_the_newest_head(settings: dict[str, Any]):
    """With a warm start, a client that has not trained the warm body yet is tested with it."""
    made = toys.setup(LGFedAvg, settings=settings, lr=0.5, participation=0.5, seed=2, rounds=4)
    turns = toys.rounds(made)
    warm, own = select(turns[1].next_server, "body"), {c for turn in turns[2:] for c in turn.ups}
    for row in turns[-1].rows:
        client = row["client"]
        x, y = made.federation.test(client)
        body = warm if settings and client not in own else turns[-1].next_states[client]
        model = select(turns[-1].next_server, "head") | body
        down = made.algorithm.downlink(turns[-1].next_server, client)
        assert toys.same(made.algorithm.deploy(turns[-1].next_states[client], down), model)
        right = (made.net.logits(model, x).argmax(1) == y).double().mean()
        assert row["accuracy_post_agg"] == pytest.approx(float(right))


def test_after_its_last_warm_round_a_client_starts_at_the_warm_body():
    """Its own body of the warm rounds, which was never averaged, is forgotten."""
    made = toys.setup(LGFedAvg, settings=WARM)
    turn = toys.rounds(made, 3)[2]
    for client, up in turn.ups.items():
        ctx = toys.context(made, 2, client)
        model = ctx.fit(select(turn.server, "body", "head"), on=ctx.ce)
        assert toys.same(select(up, "head"), select(model, "head"))
        assert toys.same(turn.next_states[client], select(model, "body"))

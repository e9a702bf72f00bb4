"""FedPCL. The checks take the method's class, so that planted bugs can be put to them."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from pflsec.algorithms.knowledge_distillation.fedpcl import FedPCL
from pflsec.core.algorithm import Algorithm, Done
from pflsec.core.items import Items, select
from tests import toys

C, D = toys.CLASSES, 5


def unit(z: Tensor) -> Tensor:
    """Return rows at length 1."""
    return z / z.square().sum(-1, keepdim=True).sqrt()


def drawn(*shape: int) -> Tensor:
    """Return random prototypes."""
    return unit(torch.randn(*shape, D, generator=torch.Generator().manual_seed(5)))


def downlink(*classes: int, clients: int = 2) -> Items:
    """Return prototypes of these classes: the mean ones and those of so many clients."""
    known = torch.zeros(C, dtype=torch.bool)
    known[list(classes)] = True
    table = drawn(1 + clients, C)[:, known]
    return {"mean": table[0], "sets": table[1:], "known": known}


def newcomer(algorithm: Algorithm) -> Items:
    """Return the state of a client that has not taken part."""
    fresh = algorithm.net.fresh(0)
    return algorithm.init_client(fresh, algorithm.init_server(fresh))


def done(kind: type[Algorithm], down: Items, work: dict[str, Any] | None = None, **settings: Any) -> Done:
    """Return the second exchange of a client with ten rows of all classes."""
    algorithm = toys.method(kind, **settings)
    x, y = toys.batch(10)
    context = toys.work(**({"x": x, "y": y, "net": algorithm.net} | (work or {})))
    return algorithm.local(context, newcomer(algorithm) | {"held": torch.ones(C, dtype=torch.bool)}, down)


def contrast(down: Items, tau: float, positive: bool = False) -> toys.Loss:
    """Return l(mean) + mean_p l(P_p), sample by sample and class by class."""
    known = down["known"].nonzero().flatten().tolist()

    def loss(at: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        z = unit(toys.hand_features(at, x))

        def one(table: Tensor) -> Tensor:
            terms = []
            for row, label in zip(z, y.tolist(), strict=True):
                near = {k: (row * table[i]).sum() / tau for i, k in enumerate(known)}
                others = [near[k].exp() for k in known if positive or k != label]
                terms.append(
                    -(near[label].exp() / torch.stack(others).sum()).log() if label in known else 0 * row.sum()
                )
            return torch.stack(terms).mean()

        return one(down["mean"]) + torch.stack([one(table) for table in down["sets"]]).mean()

    return loss


def means(body: Items, x: Tensor, y: Tensor) -> dict[int, Tensor]:
    """Return the mean unit feature of every class in the labels."""
    z = unit(toys.hand_features(body, x))
    return {k: z[y == k].mean(0) for k in sorted(set(y.tolist()))}


def check_0_steps_follow_the_objective(kind: type[Algorithm]) -> None:
    """Also with a class that nobody has a prototype of: its rows add nothing, but stay in the mean."""
    for positive in (False, True):
        for classes in ((0, 1, 2), (0, 2)):
            down = downlink(*classes)
            body = select(toys.tiny().fresh(0), "body")
            loss = contrast(down, 0.5, positive)
            expected = toys.hand_step(body, toys.hand_gradient(body, *toys.batch(10), loss), 0.1)
            found = done(kind, down, tau=0.5, include_positive=positive).state
            assert toys.distance(select(found, "body"), expected) < 1e-13


def check_1_the_first_round_trains_nothing(kind: type[Algorithm]) -> None:
    """Its uploads come from the first extractor, and the mean of unit rows has at most length 1."""
    made = toys.setup(kind)
    first, second = toys.rounds(made, 2)
    for client, up in first.ups.items():
        assert toys.same(select(first.next_states[client], "body"), select(first.states[client], "body"))
        assert not toys.same(select(second.next_states[client], "body"), select(second.states[client], "body"))
        rows = means(first.states[client], *made.federation.train(client))
        assert torch.allclose(up["prototype"], torch.stack(list(rows.values())), atol=1e-14)
        assert float(up["prototype"].norm(dim=1).max()) <= 1 + 1e-6


def check_1_who_joins_late_only_sends_at_first(kind: type[Algorithm]) -> None:
    """Its first extractor makes its first prototypes, whatever it receives; from its second exchange on it trains."""
    made, seen, late = toys.setup(kind, participation=0.5, seed=3), set[int](), 0
    for turn in toys.rounds(made, 6):
        for client in turn.ups:
            moved = not toys.same(select(turn.next_states[client], "body"), select(turn.states[client], "body"))
            assert moved == (client in seen)
            assert bool(turn.next_states[client]["trained"]) == (client in seen)
            late += turn.t > 0 and client not in seen
        seen |= turn.ups.keys()
    assert late


def check_2_the_order_of_classes_changes_nothing(kind: type[Algorithm]) -> None:
    """Neither the order in which they come among the rows, nor which number stands for which class."""
    (x, y), down = toys.batch(10), downlink(0, 1, 2)
    plain = done(kind, down)
    for order in (torch.arange(9, -1, -1), y.argsort(stable=True), (2 - y).argsort(stable=True)):
        other = done(kind, down, {"x": x[order], "y": y[order]})
        assert toys.distance(other.state, plain.state) < 1e-12
        assert toys.distance(other.up, plain.up) < 1e-12
    rename = torch.tensor([2, 0, 1])
    back = rename.argsort()
    renamed = {"mean": down["mean"][back], "sets": down["sets"][:, back], "known": down["known"]}
    other = done(kind, renamed, {"y": rename[y]})
    assert toys.distance(select(other.state, "body"), select(plain.state, "body")) < 1e-12
    assert torch.allclose(other.up["prototype"][rename], plain.up["prototype"], atol=1e-12)


def check_3_with_the_positive_it_is_cross_entropy_twice(kind: type[Algorithm]) -> None:
    """N = 1 and P_1 = C: L = 2 CE(z C^T / tau, y)."""
    down = downlink(0, 1, 2, clients=1)
    down = down | {"sets": down["mean"][None]}

    def loss(at: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        z = unit(toys.hand_features(at, x)) @ down["mean"].T / 0.3
        return 2 * (z.logsumexp(1) - z.gather(1, y[:, None]).squeeze(1)).mean()

    body = select(toys.tiny().fresh(0), "body")
    expected = toys.hand_step(body, toys.hand_gradient(body, *toys.batch(10), loss), 0.1)
    found = done(kind, down, tau=0.3, include_positive=True).state
    assert toys.distance(select(found, "body"), expected) < 1e-13


def check_4_sending_leaves_the_stored_sets_alone(kind: type[Algorithm]) -> None:
    """Each client's rows on the server stay those of its own last upload; what fills the gaps is in the message alone."""
    last: dict[int, Items] = {}
    for turn in toys.play(kind, 5, participation=0.5, drop_rate=0.5):
        last |= turn.ups
        server = turn.next_server
        for client in range(4):
            held = last[client]["held"] if client in last else torch.zeros(C).bool()
            assert torch.equal(server["holds"][client], held)
            assert torch.equal(server["sets"][client][held], last[client]["prototype"] if client in last else drawn(0))
            assert not server["sets"][client][~held].any()
    assert len(last) > 1


def check_4_gaps_are_filled_with_the_mean(kind: type[Algorithm]) -> None:
    algorithm, turn = toys.method(kind), toys.play(kind, 2)[-1]
    server, down = turn.next_server, algorithm.downlink(turn.next_server, 0)
    assert down["sets"].shape == (4, C, D)
    for client, classes in enumerate(toys.HELD):
        for k in range(C):
            expected = server["sets"][client][k] if k in classes else server["table"][k]
            assert torch.equal(down["sets"][client][k], expected)


def check_5_prototypes_and_label_sets_are_all_that_is_sent(kind: type[Algorithm]) -> None:
    """At most C d numbers up, (N + 1) C d down once all is known, nothing before; no part of the extractor."""
    for turn in toys.play(kind):
        for client, up in turn.ups.items():
            held = len(toys.HELD[client])
            assert {k: tuple(v.shape) for k, v in up.items()} == {"prototype": (held, D), "held": (C,)}
        for down in turn.downs.values():
            assert down["mean"].numel() + down["sets"].numel() == (5 * C * D if turn.t else 0)
            assert down.keys() == {"mean", "sets", "known"}


def check_6_a_mean_is_over_the_clients_that_hold_the_class(kind: type[Algorithm]) -> None:
    for turn in toys.play(kind, participation=0.75):
        for k in range(C):
            rows = [up["prototype"][int(up["held"][:k].sum())] for up in turn.ups.values() if up["held"][k]]
            expected = torch.stack(rows).mean(0) if rows else turn.server["table"][k]
            assert torch.allclose(turn.next_server["table"][k], expected, atol=1e-15)


def check_7_prototypes_come_from_the_trained_extractor(kind: type[Algorithm]) -> None:
    (x, y), result = toys.batch(10), done(kind, downlink(0, 1, 2), {"epochs": 3, "batch_size": 4})
    rows = means(result.state, x, y)
    assert torch.allclose(result.up["prototype"], torch.stack(list(rows.values())), atol=1e-14)
    assert toys.distance(select(result.state, "body"), select(toys.tiny().fresh(0), "body")) > 1e-2


def check_8_prediction_is_the_nearest_own_prototype(kind: type[Algorithm]) -> None:
    """On unit features, among the held classes; one that is not held is never predicted, however far the others are."""
    algorithm, (x, _) = toys.method(kind), toys.batch(30)
    body = select(algorithm.net.fresh(0), "body")
    z = unit(toys.hand_features(body, x))
    table = torch.stack([-z[0], torch.zeros(D), -z[1]])
    state = body | {"table": table, "held": torch.tensor([True, False, True]), "trained": torch.tensor(True)}
    predicted = algorithm.scores(algorithm.deploy(state, downlink(0, 1, 2)), x).argmax(1)
    nearer = (z + z[0]).norm(dim=1) < (z + z[1]).norm(dim=1)
    assert torch.equal(predicted, torch.where(nearer, 0, 2))
    assert set(predicted.tolist()) == {0, 2}


def test_fedpcl_0_steps_follow_the_objective():
    check_0_steps_follow_the_objective(FedPCL)


def test_fedpcl_1_the_first_round_trains_nothing():
    check_1_the_first_round_trains_nothing(FedPCL)


def test_fedpcl_1_who_joins_late_only_sends_at_first():
    check_1_who_joins_late_only_sends_at_first(FedPCL)


def test_fedpcl_2_the_order_of_classes_changes_nothing():
    check_2_the_order_of_classes_changes_nothing(FedPCL)


def test_fedpcl_3_with_the_positive_it_is_cross_entropy_twice():
    check_3_with_the_positive_it_is_cross_entropy_twice(FedPCL)


def test_fedpcl_4_sending_leaves_the_stored_sets_alone():
    check_4_sending_leaves_the_stored_sets_alone(FedPCL)


def test_fedpcl_4_gaps_are_filled_with_the_mean():
    check_4_gaps_are_filled_with_the_mean(FedPCL)


def test_fedpcl_5_prototypes_and_label_sets_are_all_that_is_sent():
    check_5_prototypes_and_label_sets_are_all_that_is_sent(FedPCL)


def test_fedpcl_6_a_mean_is_over_the_clients_that_hold_the_class():
    check_6_a_mean_is_over_the_clients_that_hold_the_class(FedPCL)


def test_fedpcl_7_prototypes_come_from_the_trained_extractor():
    check_7_prototypes_come_from_the_trained_extractor(FedPCL)


def test_fedpcl_8_prediction_is_the_nearest_own_prototype():
    check_8_prediction_is_the_nearest_own_prototype(FedPCL)


@pytest.mark.parametrize("classes", [(), (1,)])
def test_with_one_known_class_there_is_nothing_to_contrast(classes: tuple[int, ...]):
    """The denominator would be empty."""
    result = done(FedPCL, downlink(*classes))
    assert toys.same(select(result.state, "body"), select(toys.tiny().fresh(0), "body"))
    assert not result.state["trained"]


@pytest.mark.parametrize(("rows", "classes"), [(6, (1,)), (1, (2,)), (5, (0, 2))])
def test_a_client_without_some_classes_sends_the_others(rows: int, classes: tuple[int, ...]):
    x, y = toys.batch(rows, classes)
    result = done(FedPCL, downlink(0, 1, 2), {"x": x, "y": y, "batch_size": rows})
    assert result.up["held"].tolist() == [k in classes for k in range(C)]
    assert torch.allclose(result.up["prototype"], torch.stack(list(means(result.state, x, y).values())), atol=1e-14)


def test_means_may_be_brought_back_to_length_1():
    plain, long = (done(FedPCL, downlink(), renormalise=r).up["prototype"] for r in (False, True))
    assert float(plain.norm(dim=1).max()) < 0.99
    assert torch.allclose(long, unit(plain), atol=1e-14)


def test_by_counts_a_mean_is_that_of_the_pooled_class():
    made = toys.setup(FedPCL, settings={"weighting": "count"})
    table = toys.rounds(made, 1)[0].next_server["table"]
    x, y = (torch.cat(parts) for parts in zip(*(made.federation.train(c) for c in range(4)), strict=True))
    assert torch.allclose(table, torch.stack(list(means(made.server_fresh, x, y).values())), atol=1e-14)


@pytest.mark.parametrize("stale", [True, False])
def test_sets_of_absent_clients_are_sent_or_not(stale: bool):
    algorithm = toys.method(FedPCL, stale=stale)
    last: dict[int, Items] = {}
    for turn in toys.play(FedPCL, 5, settings={"stale": stale}, participation=0.5):
        last = {**(last if stale else {}), **turn.ups}
        assert len(algorithm.downlink(turn.next_server, 0)["sets"]) == len(last)


def test_the_log_shows_the_extractor_until_it_is_trained():
    """It starts public and stands still in a client's first exchange, so the second begins at a known one."""
    for start, count in (("shared", 1), ("shared", 2), ("apart", 1)):
        made = toys.setup(FedPCL, settings={"private_start": start}, capture_rounds="first", victim_batch=3)
        algorithm, turns = made.algorithm, toys.rounds(made, count)
        memory = algorithm.init_client(made.server_fresh, turns[0].server)
        for turn in turns:
            memory = algorithm.observe(memory, turn.downs[1], turn.ups[1])
        found = algorithm.reconstruct_state(memory) or {}
        assert bool(select(found, "body")) == (start == "shared" and count == 1)
        assert found.keys() >= {"table", "held", "trained"}
        assert toys.same(found, {k: turns[-1].next_states[1][k] for k in found})


def test_a_client_that_was_never_asked_uses_the_mean_prototypes():
    turn = toys.play(FedPCL, 1, participation=0.5)[0]
    algorithm, (x, _) = toys.method(FedPCL), toys.batch(30)
    client = next(c for c in range(4) if c not in turn.ups)
    down = algorithm.downlink(turn.next_server, client)
    z = unit(toys.hand_features(turn.states[client], x))
    known = down["known"].nonzero().flatten()
    nearest = known[torch.cdist(z, down["mean"]).argmin(1)]
    assert torch.equal(algorithm.scores(algorithm.deploy(turn.states[client], down), x).argmax(1), nearest)

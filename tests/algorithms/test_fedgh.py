"""FedGH. The checks take the method's class, so that planted bugs can be put to them."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pflsec.algorithms.model_splitting.fedgh import FedGH
from pflsec.core.algorithm import Algorithm, Done
from pflsec.core.items import Items, select
from pflsec.models.network import Network
from tests import toys


def done(kind: type[Algorithm], x: Tensor, y: Tensor, **changes: Any) -> tuple[Items, Done]:
    """Return (model before, one exchange of a client with these rows)."""
    algorithm = toys.method(kind)
    server = algorithm.init_server(algorithm.net.fresh("server"))
    state = algorithm.init_client(algorithm.net.fresh(0), server)
    down = algorithm.downlink(server, 0)
    return select(state, "body") | down, algorithm.local(toys.work(x, y, algorithm.net, **changes), state, down)


def pairs(ups: Mapping[int, Items]) -> list[tuple[Tensor, int]]:
    """Return the pairs (mean feature, class) of a round, clients in turn, classes ascending."""
    return [
        (z, int(c)) for client in sorted(ups)
        for z, c in zip(ups[client]["prototype"], ups[client]["held"].nonzero()[:, 0], strict=True)
    ]  # fmt: skip


def head_steps(head: Items, steps: Sequence[Sequence[tuple[Tensor, int]]], lr: float) -> Items:
    """Return the head after SGD on these batches of pairs, by the gradient of a linear layer: (p - y) z^T and p - y."""
    w, b = head["head.weight"], head["head.bias"]
    for batch in steps:
        z, y = torch.stack([z for z, _ in batch]), torch.tensor([c for _, c in batch])
        off = (F.linear(z, w, b).softmax(1) - F.one_hot(y, toys.CLASSES)) / len(batch)
        w, b = w - lr * off.T @ z, b - lr * off.sum(0)
    return {"head.weight": w, "head.bias": b}


def check_0_local_training_moves_both_parts(kind: type[Algorithm]) -> None:
    """One step of cross entropy from the stored body and the received head, both at the same point."""
    x, y = toys.batch()
    model, result = done(kind, x, y)
    expected = toys.hand_step(model, toys.hand_gradient(model, x, y), 0.1)
    assert toys.distance(select(result.state, "body", "head"), expected) < 1e-14


def check_1_the_upload_is_mean_features_of_held_classes(kind: type[Algorithm]) -> None:
    """Of the trained body, over all rows, the last short batch included; no parameter's shape, no count goes up."""
    parameters = {shape for shape in toys.tiny().shapes.values() if shape != (toys.CLASSES,)}
    made = toys.setup(kind)
    for turn in toys.rounds(made):
        for client, up in turn.ups.items():
            x, y = made.federation.train(client)
            assert up.keys() == {"prototype", "held"}
            assert up["held"].dtype == torch.bool
            assert up["held"].nonzero().flatten().tolist() == list(toys.HELD[client])
            assert not {tuple(v.shape) for v in up.values()} & (parameters - {(3, 5)})  # three classes of five features
            features = toys.hand_features(turn.next_states[client], x)
            means = torch.stack([features[y == c].mean(0) for c in toys.HELD[client]])
            assert torch.allclose(up["prototype"], means, rtol=0, atol=1e-14)


def check_2_without_a_server_step_clients_are_alone(kind: type[Algorithm]) -> None:
    """The head is the first one for ever, and each client trains its body as if it were the only one."""
    made = toys.setup(kind, settings={"server_lr": 0.0}, participation=0.75)
    head = select(made.server_fresh, "head")
    for turn in toys.rounds(made):
        assert toys.same(select(turn.next_server, "head"), head)
        for client in turn.ups:
            ctx = toys.context(made, turn.t, client)
            alone = ctx.fit(select(turn.states[client], "body") | head, on=ctx.ce)
            assert toys.same(select(turn.next_states[client], "body", "head"), alone)


def check_3_the_head_follows_from_the_wire(kind: type[Algorithm]) -> None:
    """From the head that was sent and the pairs that came back: one step a pair, clients in turn, classes ascending.
    Computed again from the messages alone it has the same bits."""
    made = toys.setup(kind, participation=0.75)
    for turn in toys.rounds(made):
        head = next(iter(turn.downs.values()))
        expected = head_steps(head, [[pair] for pair in pairs(turn.ups)], 0.05)
        assert toys.distance(select(turn.next_server, "head"), expected) < 1e-14
        again = made.algorithm.aggregate(turn.server | head, dict(reversed(list(turn.ups.items()))))
        assert toys.same(again, turn.next_server)


def check_4_local_training_leaves_the_servers_head_alone(kind: type[Algorithm]) -> None:
    """Of any client, the first one above all; what the others receive in the round is the same."""
    made = toys.setup(kind)
    for turn in toys.rounds(made):
        assert all(toys.same(down, select(turn.server, "head")) for down in turn.downs.values())
        before = toys.snapshot(turn.server)
        for client, down in turn.downs.items():
            ctx = toys.context(made, turn.t, client)
            result = made.algorithm.local(ctx, turn.states[client], down)
            assert toys.distance(select(result.state, "head"), down) > 1e-3
        assert toys.same(turn.server, before)


def check_5_a_class_of_one_sample_sends_its_feature(kind: type[Algorithm]) -> None:
    x, y = toys.batch(5, classes=(0, 0, 0, 1, 2))
    _, result = done(kind, x, y)
    features = toys.hand_features(result.state, x)
    assert torch.allclose(result.up["prototype"][1:], features[3:], rtol=0, atol=1e-15)


def check_5_the_order_of_rows_changes_rounding_alone(kind: type[Algorithm]) -> None:
    """Rows the other way round in one full batch, and other batches under a learning rate of almost nothing."""
    x, y = toys.batch(10)
    plain = done(kind, x, y)[1].up["prototype"]
    assert torch.allclose(done(kind, x.flip(0), y.flip(0))[1].up["prototype"], plain, rtol=0, atol=1e-14)
    still = [done(kind, x, y, lr=1e-300, batch_size=size)[1].up["prototype"] for size in (10, 4, 1)]
    assert all(torch.allclose(other, still[0], rtol=0, atol=1e-14) for other in still)


def check_6_clients_may_have_other_bodies(kind: type[Algorithm]) -> None:
    """16 -> 5 and 16 -> 7 -> 5 under one head of five features, in one federation."""

    def deeper() -> nn.Module:
        layers: OrderedDict[str, nn.Module] = OrderedDict(
            flatten=nn.Flatten(), fc0=nn.Linear(16, 7), act0=nn.Tanh(), fc1=nn.Linear(7, 5), act=nn.Tanh(),
            fc=nn.Linear(5, toys.CLASSES),
        )  # fmt: skip
        return nn.Sequential(layers)

    members = [toys.method(kind), toys.method(kind, Network(deeper, toys.SHAPE, toys.CLASSES))]
    server = members[0].init_server(members[0].net.fresh("server"))
    states = [m.init_client(m.net.fresh(c), server) for c, m in enumerate(members)]
    for t in range(2):
        ups = {}
        for c, m in enumerate(members):
            down = m.downlink(server, c)
            m.contract.check("down", down, "here")
            result = m.local(toys.work(*toys.batch(6, seed=c), m.net, client=c, round=t), states[c], down)
            m.contract.check("up", result.up, "here")
            states[c], ups[c] = result.state, result.up
        head, server = select(server, "head"), members[0].aggregate(server, ups)
        assert toys.distance(select(server, "head"), head_steps(head, [[p] for p in pairs(ups)], 0.05)) < 1e-14
    assert "body.fc0.weight" in states[1]
    assert "body.fc0.weight" not in states[0]


def check_a_client_is_tested_with_its_own_head(kind: type[Algorithm]) -> None:
    """As its last training left it, however many rounds ago; before any training with the newest one."""
    made = toys.setup(kind, lr=0.5, participation=0.5, seed=2)
    for turn in toys.rounds(made):
        for row in turn.rows:
            client = row["client"]
            x, y = made.federation.test(client)
            state = turn.next_states[client]
            head = select(state if row["last_trained_round"] is not None else turn.next_server, "head")
            model = select(state, "body") | head
            down = made.algorithm.downlink(turn.next_server, client)
            assert toys.same(made.algorithm.deploy(state, down), model)
            right = (made.net.logits(model, x).argmax(1) == y).double().mean()
            assert row["accuracy_post_agg"] == pytest.approx(float(right))
            if client in turn.ups:
                assert row["accuracy_post_local"] == row["accuracy_post_agg"]


def test_fedgh_0_local_training_moves_both_parts():
    check_0_local_training_moves_both_parts(FedGH)


def test_fedgh_1_the_upload_is_mean_features_of_held_classes():
    check_1_the_upload_is_mean_features_of_held_classes(FedGH)


def test_fedgh_2_without_a_server_step_clients_are_alone():
    check_2_without_a_server_step_clients_are_alone(FedGH)


def test_fedgh_3_the_head_follows_from_the_wire():
    check_3_the_head_follows_from_the_wire(FedGH)


def test_fedgh_4_local_training_leaves_the_servers_head_alone():
    check_4_local_training_leaves_the_servers_head_alone(FedGH)


def test_fedgh_5_a_class_of_one_sample_sends_its_feature():
    check_5_a_class_of_one_sample_sends_its_feature(FedGH)


def test_fedgh_5_the_order_of_rows_changes_rounding_alone():
    check_5_the_order_of_rows_changes_rounding_alone(FedGH)


def test_fedgh_6_clients_may_have_other_bodies():
    check_6_clients_may_have_other_bodies(FedGH)


def test_a_client_is_tested_with_its_own_head():
    check_a_client_is_tested_with_its_own_head(FedGH)


def test_with_the_newest_head_both_accuracies_are_recorded():
    """After aggregation under the new head, and after local training under the client's own."""
    made = toys.setup(FedGH, settings={"tested": "global", "server_lr": 1.0}, lr=0.5)
    turn = toys.rounds(made)[-1]
    for row in turn.rows:
        x, y = made.federation.test(row["client"])
        state = turn.next_states[row["client"]]
        for name, head in (("post_agg", turn.next_server), ("post_local", state)):
            model = select(state, "body") | select(head, "head")
            right = (made.net.logits(model, x).argmax(1) == y).double().mean()
            assert row[f"accuracy_{name}"] == pytest.approx(float(right))


def test_the_server_may_take_several_pairs_a_step_and_several_passes():
    """Batches in the order of the pairs, the last short one kept, the mean taken within each."""
    turn = toys.play(FedGH, 1, settings={"server_batch_size": 3, "server_epochs": 2})[0]
    found = pairs(turn.ups)
    batches = [found[i : i + 3] for i in range(0, len(found), 3)] * 2
    assert len(found) == 8
    assert toys.distance(select(turn.next_server, "head"), head_steps(turn.downs[0], batches, 0.05)) < 1e-14


def test_shuffling_changes_the_order_from_pass_to_pass_and_nothing_else():
    """All pairs in one step: no order, so the same head. One pair a step: another head, the same one when played again."""
    whole = [
        toys.play(FedGH, 1, settings={"server_batch_size": 99, "shuffle": s})[0].next_server for s in (False, True)
    ]
    assert toys.distance(*(select(server, "head") for server in whole)) < 1e-15
    plain, mixed, again = (toys.play(FedGH, 2, settings={"shuffle": s})[1].next_server for s in (False, True, True))
    assert toys.same(mixed, again)
    assert toys.distance(select(plain, "head"), select(mixed, "head")) > 1e-6


def test_by_counts_a_pair_weighs_as_many_rows_as_it_stands_for():
    """All pairs in one step: the loss is sum n_ic CE_ic / sum n_ic, the mean over rows were they all at their mean."""
    turn = toys.play(FedGH, 1, settings={"weighting": "count", "server_batch_size": 99})[0]
    found = pairs(turn.ups)
    counts = torch.cat([up["counts"][up["held"]] for up in turn.ups.values()])
    repeated = [pair for pair, n in zip(found, counts, strict=True) for _ in range(int(n))]
    assert len(repeated) == sum(toys.TRAIN)
    assert toys.distance(select(turn.next_server, "head"), head_steps(turn.downs[0], [repeated], 0.05)) < 1e-14


def test_a_class_that_nobody_holds_is_only_pushed_down():
    """Its bias falls in every step: p_c > 0 and no pair of its own."""
    data = toys.dataset(held=((0, 1), (1,), (0,), (0, 1)))
    turn = toys.play(FedGH, 1, data=data)[0]
    assert turn.next_server["head.bias"][2] < turn.server["head.bias"][2]
    assert not any(up["held"][2] for up in turn.ups.values())

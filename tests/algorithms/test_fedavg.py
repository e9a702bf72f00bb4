"""FedAvg. The checks take the method's class, so that planted bugs can be put to them."""

from itertools import product
from typing import Any

import pytest
import torch

from pflsec.algorithms.traditional.fedavg import FedAvg
from pflsec.core.algorithm import Algorithm
from pflsec.core.items import Items, select
from tests import toys

ONE_STEP: dict[str, Any] = {"local_epochs": 1, "batch_size": 100}


def parameters(items: Items) -> Items:
    """Return the items of the network alone."""
    return select(items, "body", "head")


def check_1_one_full_batch_gives_the_gradient(kind: type[Algorithm]) -> None:
    """theta_up = theta - lr g, so (theta - theta_up)/lr is the gradient of the cross entropy at theta."""
    algorithm, (x, y) = toys.method(kind), toys.batch()
    down = algorithm.init_server(algorithm.net.fresh(0))
    up = algorithm.local(toys.work(x, y, algorithm.net), {}, down).up
    seen = algorithm.change({}, down, up, lr=0.1, steps=1)
    assert toys.distance(seen, toys.hand_gradient(down, x, y)) < 1e-12


def check_2_the_server_takes_the_mean_by_samples(kind: type[Algorithm]) -> None:
    """sum_k n_k theta_k / sum_k n_k over the uploads of the round, added up in the order of the clients."""
    for turn in toys.play(kind, participation=0.5, seed=1):
        total = sum(toys.TRAIN[c] for c in turn.ups)
        for name in turn.server:
            shares = [(toys.TRAIN[c] / total, up[name]) for c, up in turn.ups.items()]
            mean = shares[0][1] * shares[0][0]
            for share, value in shares[1:]:
                mean = torch.add(mean, value, alpha=share)
            assert torch.equal(turn.next_server[name], mean)


def check_2_one_and_three_samples(kind: type[Algorithm]) -> None:
    """Parameters 0 with one sample and 4 with three: (1*0 + 3*4)/4 = 3."""
    algorithm = toys.method(kind)
    shape = algorithm.net.fresh(0)
    ups = {
        c: {k: torch.full_like(v, value) for k, v in shape.items()} | {"num_samples": torch.tensor(samples)}
        for c, (samples, value) in enumerate([(1, 0.0), (3, 4.0)])
    }
    assert all(torch.equal(v, torch.full_like(v, 3.0)) for v in algorithm.aggregate(shape, ups).values())


def check_3_full_batch_equals_centralised_sgd(kind: type[Algorithm]) -> None:
    """sum_k n_k/n (theta - lr g_k) = theta - lr sum_k n_k/n g_k: the gradient of the mean loss over all rows."""
    made = toys.setup(kind, **ONE_STEP)
    x, y = (torch.cat(parts) for parts in zip(*(made.federation.train(c) for c in range(4)), strict=True))
    for turn in toys.rounds(made):
        central = toys.hand_step(turn.server, toys.hand_gradient(turn.server, x, y), lr=0.1)
        assert toys.distance(turn.next_server, central) < 1e-12


def check_4_equal_clients_send_equal_uploads(kind: type[Algorithm]) -> None:
    algorithm, (x, y) = toys.method(kind), toys.batch()
    down = algorithm.init_server(algorithm.net.fresh(0))
    ups = {c: algorithm.local(toys.work(x, y, algorithm.net, epochs=3, client=c), {}, down).up for c in (0, 1)}
    assert toys.same(ups[0], ups[1])
    assert toys.distance(algorithm.aggregate(down, ups), parameters(ups[0])) == 0


def check_5_only_clients_of_the_cohort_are_on_the_wire(kind: type[Algorithm]) -> None:
    turns = toys.play(kind, participation=0.5)
    for turn in turns:
        assert sorted(turn.downs) == sorted(turn.ups) == turn.metrics["cohort"]
        assert [row["client"] for row in turn.rows if row["uploaded"]] == turn.metrics["cohort"]
    assert {tuple(turn.metrics["cohort"]) for turn in turns} != {(0, 1)}


def check_6_weights_sum_to_one_for_every_drop_pattern(kind: type[Algorithm]) -> None:
    """The mean of equal uploads is that upload, whichever of them arrive."""
    algorithm = toys.method(kind)
    same = algorithm.net.fresh(0)
    for pattern in product((False, True), repeat=4):
        if any(pattern):
            sizes = [n for n, arrives in zip(toys.TRAIN, pattern, strict=True) if arrives]
            ups = {c: same | {"num_samples": torch.tensor(n)} for c, n in enumerate(sizes)}
            assert toys.distance(algorithm.aggregate(same, ups), same) < 1e-15


def check_6_without_any_upload_the_model_stays(kind: type[Algorithm]) -> None:
    for turn in toys.play(kind, drop_rate=1.0):
        assert not turn.ups
        assert toys.same(turn.next_server, turn.server)


def test_fedavg_1_one_full_batch_gives_the_gradient():
    check_1_one_full_batch_gives_the_gradient(FedAvg)


def test_fedavg_2_the_server_takes_the_mean_by_samples():
    check_2_the_server_takes_the_mean_by_samples(FedAvg)


def test_fedavg_2_one_and_three_samples():
    check_2_one_and_three_samples(FedAvg)


def test_fedavg_3_full_batch_equals_centralised_sgd():
    check_3_full_batch_equals_centralised_sgd(FedAvg)


def test_fedavg_4_equal_clients_send_equal_uploads():
    check_4_equal_clients_send_equal_uploads(FedAvg)


def test_fedavg_5_only_clients_of_the_cohort_are_on_the_wire():
    check_5_only_clients_of_the_cohort_are_on_the_wire(FedAvg)


def test_fedavg_6_weights_sum_to_one_for_every_drop_pattern():
    check_6_weights_sum_to_one_for_every_drop_pattern(FedAvg)


def test_fedavg_6_without_any_upload_the_model_stays():
    check_6_without_any_upload_the_model_stays(FedAvg)


def test_uniform_weights_ignore_sample_counts():
    """Parameters 0 and 4: 2, whoever has more samples; and no count is sent."""
    algorithm = toys.method(FedAvg, weighting="uniform")
    ups = {c: {"body.w": torch.tensor([value])} for c, value in enumerate([0.0, 4.0])}
    assert algorithm.aggregate({}, ups)["body.w"].tolist() == [2.0]
    assert all(
        "num_samples" not in up
        for turn in toys.play(FedAvg, settings={"weighting": "uniform"})
        for up in turn.ups.values()
    )


def test_one_client_is_plain_sgd():
    """With one client the weights of the mean are 1: minibatches, epochs and rounds are those of one SGD loop."""
    made = toys.setup(FedAvg, data=toys.dataset([7]))
    turns = toys.rounds(made)
    theta = turns[0].server
    for turn in turns:
        assert toys.same(turn.server, theta)
        for x, y in toys.context(made, turn.t, 0).batches():
            theta = toys.hand_step(theta, toys.hand_gradient(theta, x, y), lr=0.1)
        assert toys.distance(turn.next_server, theta) < 1e-14
        theta = turn.next_server


def test_several_steps_give_the_sum_of_their_gradients():
    """(theta - theta_up)/lr = g(theta_0) + g(theta_1) + ..., each at its own point."""
    algorithm, (x, y) = toys.method(FedAvg), toys.batch()
    down = theta = algorithm.init_server(algorithm.net.fresh(0))
    total = {k: torch.zeros_like(v) for k, v in down.items()}
    for _ in range(3):
        g = toys.hand_gradient(theta, x, y)
        total = {k: total[k] + g[k] for k in g}
        theta = toys.hand_step(theta, g, 0.1)
    up = algorithm.local(toys.work(x, y, algorithm.net, epochs=3), {}, down).up
    assert toys.distance(algorithm.change({}, down, up, 0.1, 3), {k: v / 3 for k, v in total.items()}) < 1e-12


@pytest.mark.parametrize("batch_size", [1, 2, 4, 100])
def test_small_clients_train_on_all_their_rows(batch_size: int):
    """A client with fewer rows than a batch, and a last short batch, both count: steps = epochs * ceil(n / B)."""
    made = toys.setup(FedAvg, batch_size=batch_size)
    for client, size in enumerate(toys.TRAIN):
        seen = torch.cat([y for _, y in toys.context(made, 0, client).batches(epochs=1)])
        assert torch.equal(seen.sort().values, made.federation.train(client)[1].sort().values)
        assert toys.context(made, 0, client).steps() == 2 * -(-size // batch_size)

"""FedRoD. The checks take the method's class, so that planted bugs can be put to them."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pflsec.algorithms.model_splitting.fedrod import FedRoD
from pflsec.algorithms.traditional.fedavg import FedAvg
from pflsec.core.algorithm import Algorithm, Done
from pflsec.core.items import Items, prefixed, select
from tests import toys

COUNTS = ((3, 2, 0), (0, 4, 4), (3, 0, 0), (3, 3, 2))
"""Training rows of the four toy clients by class."""
HYPER: dict[str, Any] = {"variant": "hyper", "hidden": 8}


def model_sent(items: Items) -> Items:
    """Return body and generic head of a message."""
    return select(items, "body", "head")


def done(kind: type[Algorithm], x: Tensor, y: Tensor, own: Items | None = None, **settings: Any) -> tuple[Items, Done]:
    """Return (downlink, one full-batch step on it) of a client that has never taken part.

    own  its personal head, in place of the one it would start with
    """
    algorithm = toys.method(kind, **settings)
    server = algorithm.init_server(algorithm.net.fresh(0))
    state = algorithm.init_client(algorithm.net.fresh(1), server) | (own or {})
    down = algorithm.downlink(server, 0)
    return down, algorithm.local(toys.work(x, y, algorithm.net), state, down)


def balanced(counts: Tensor, gamma: float) -> toys.Loss:
    """Return the mean cross entropy of logits plus log(n_c^gamma), over the classes with n_c > 0."""

    def loss(model: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        z = F.linear(toys.hand_features(model, x), model["head.weight"], model["head.bias"])
        z = (z + gamma * counts.log())[:, counts > 0]
        place = (counts > 0).cumsum(0) - 1
        return (z.logsumexp(1) - z.gather(1, place[y][:, None]).squeeze(1)).mean()

    return loss


def check_0_one_step_follows_the_objective(kind: type[Algorithm]) -> None:
    """Body and generic head by the balanced loss; the personal head by the loss of the sum, at the same point."""
    x, y = toys.batch(6, classes=(0, 0, 0, 1, 1, 0))
    own = select(toys.tiny().fresh("own"), "head")
    down, result = done(kind, x, y, own, gamma=0.7)
    gradient = toys.hand_gradient(down, x, y, balanced(torch.tensor([4.0, 2.0, 0.0]), 0.7))
    assert toys.distance(model_sent(result.up), toys.hand_step(down, gradient, 0.1)) < 1e-14
    features = toys.hand_features(down, x)
    generic = F.linear(features, down["head.weight"], down["head.bias"])

    def personal(head: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(generic + F.linear(features, head["head.weight"], head["head.bias"]), y)

    expected = toys.hand_step(own, toys.hand_gradient(own, x, y, personal), 0.1)
    assert toys.distance(select(result.state, "head"), expected) < 1e-14


def check_1_without_gamma_it_sends_what_fedavg_sends(kind: type[Algorithm]) -> None:
    """Bit for bit, whatever the personal heads do."""
    reference = toys.play(FedAvg, participation=0.75)
    for settings in ({}, {"personal_start": "copy"}, HYPER):
        for turn, other in zip(
            toys.play(kind, settings={"gamma": 0.0} | settings, participation=0.75), reference, strict=True
        ):
            assert turn.ups.keys() == other.ups.keys()
            assert all(toys.same(select(up, "body", "head", "num_samples"), other.ups[c]) for c, up in turn.ups.items())


def check_1_a_class_without_rows_makes_no_nan(kind: type[Algorithm]) -> None:
    """0^0 is 1: gamma log 0 would be 0 times minus infinity."""
    x, y = toys.batch(classes=(0, 1))
    _, result = done(kind, x, y, gamma=0.0)
    assert all(torch.isfinite(v).all() for v in (*result.up.values(), *result.state.values()))


def check_2_the_personal_head_does_not_touch_what_is_sent(kind: type[Algorithm]) -> None:
    """Neither by its values nor by its start; over several steps."""
    x, y = toys.batch()
    plain = done(kind, x, y)[1]
    for seed in range(3):
        own = {k: 10 * v for k, v in select(toys.tiny().fresh(seed), "head").items()}
        assert toys.same(done(kind, x, y, own)[1].up, plain.up)
    for turn, other in zip(toys.play(kind), toys.play(kind, settings={"personal_start": "copy"}), strict=True):
        assert all(toys.same(up, other.ups[c]) for c, up in turn.ups.items())


def check_3_with_equal_counts_of_all_classes_it_sends_what_fedavg_sends(kind: type[Algorithm]) -> None:
    """The shift is the same for all logits; softmax does not see it. Six rows a client, two of each class."""
    data = toys.dataset([6, 6, 6, 6], held=[(0, 1, 2)])
    for turn, other in zip(toys.play(kind, data=data), toys.play(FedAvg, data=data), strict=True):
        assert all(toys.distance(up, other.ups[c]) < 1e-14 for c, up in turn.ups.items())


def check_4_rows_of_absent_classes_stand_still(kind: type[Algorithm]) -> None:
    """Their softmax is exactly 0; the rows of all others move, if there is more than one."""
    for turn in toys.play(kind):
        for client, up in turn.ups.items():
            held = torch.tensor(COUNTS[client]) > 0
            moved = (up["head.weight"] != turn.downs[client]["head.weight"]).any(1)
            assert torch.equal(moved, held if held.sum() > 1 else torch.zeros(3, dtype=torch.bool))
            assert torch.equal(up["head.bias"] != turn.downs[client]["head.bias"], moved)


def check_5_a_personal_head_that_never_trained_adds_nothing(kind: type[Algorithm]) -> None:
    """It starts at zero: personal and generic scores are the same bits. The generic ones know no counts."""
    x, _ = toys.batch(30)
    for settings in ({}, HYPER):
        algorithm = toys.method(kind, **settings)
        server = algorithm.init_server(algorithm.net.fresh(0))
        state = algorithm.init_client(algorithm.net.fresh(1), server)
        common = algorithm.global_model(server)
        assert common is not None
        personal = algorithm.scores(algorithm.deploy(state, algorithm.downlink(server, 0)), x)
        assert torch.equal(personal, algorithm.scores(common, x))
        assert torch.equal(personal, algorithm.net.logits(server, x))


def check_5_a_client_is_tested_with_the_sum_of_both_heads(kind: type[Algorithm]) -> None:
    algorithm, (x, _) = toys.method(kind), toys.batch(30)
    server, own = algorithm.init_server(algorithm.net.fresh(0)), select(algorithm.net.fresh("own"), "head")
    state = algorithm.init_client(algorithm.net.fresh(1), server) | own
    z = toys.hand_features(server, x)
    both = sum(F.linear(z, head["head.weight"], head["head.bias"]) for head in (server, own))
    assert torch.allclose(algorithm.scores(algorithm.deploy(state, server), x), torch.as_tensor(both), atol=1e-14)


def check_6_a_client_of_one_class_sends_back_what_it_received(kind: type[Algorithm]) -> None:
    """One class has all the softmax there is; the personal head still learns it."""
    for turn in toys.play(kind):
        assert toys.same(model_sent(turn.ups[2]), turn.downs[2])
        assert not torch.equal(turn.next_states[2]["head.bias"], turn.states[2]["head.bias"])


def check_6_the_hypernetwork_shows_the_class_shares(kind: type[Algorithm]) -> None:
    """Its input is the same in every step, so a row of nu.in moves by (sum of slopes) a_k, and its bias by that sum."""
    for turn in toys.play(kind, settings=HYPER):
        for client, up in turn.ups.items():
            w, b = (turn.downs[client][k] - up[k] for k in ("nu.in", "nu.in_bias"))
            share = torch.tensor(COUNTS[client]).double() / toys.TRAIN[client]
            moved = b.abs() > 1e-6
            assert moved.any()
            assert torch.allclose(w[moved] / b[moved, None], share.expand(int(moved.sum()), 3), rtol=0, atol=1e-6)


def check_the_counts_are_of_all_rows(kind: type[Algorithm]) -> None:
    """Also of the last short batch (five rows in batches of four); absent clients have none, others keep theirs."""
    seen: set[int] = set()
    for turn in toys.play(kind, 4, participation=0.75):
        seen |= turn.ups.keys()
        for client, state in turn.next_states.items():
            counts = torch.tensor(COUNTS[client]).double()
            assert state["counted"] == (client in seen)
            if client not in seen:
                continue
            assert torch.equal(state["held"], counts > 0)
            shares = torch.where(state["held"], state["log_share"].exp(), 0)
            assert torch.allclose(shares, counts / counts.sum(), atol=1e-15)
    assert seen == {0, 1, 2, 3}


def check_the_hypernetwork_alone_learns_from_the_personal_loss(kind: type[Algorithm]) -> None:
    """One step on nu by the loss of the sum, the head written out: nu.out relu(nu.in a + b) + c, weights then biases."""
    x, y = toys.batch(6, classes=(0, 0, 0, 1, 1, 0))
    algorithm = toys.method(kind, **HYPER)
    noise = torch.Generator().manual_seed(0)
    server = algorithm.init_server(algorithm.net.fresh(0))
    server = server | {k: torch.randn(v.shape, generator=noise) for k, v in server.items() if k.startswith("nu.")}
    state = algorithm.init_client(algorithm.net.fresh(1), server)
    result = algorithm.local(toys.work(x, y, algorithm.net), state, server)
    features = toys.hand_features(server, x)
    generic = F.linear(features, server["head.weight"], server["head.bias"])
    share = torch.tensor([4 / 6, 2 / 6, 0.0])

    def personal(nu: Mapping[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        out = nu["nu.out"] @ (nu["nu.in"] @ share + nu["nu.in_bias"]).relu() + nu["nu.out_bias"]
        return F.cross_entropy(generic + F.linear(features, out[:15].reshape(3, 5), out[15:]), y)

    nu = select(server, "nu")
    expected = toys.hand_step(nu, toys.hand_gradient(nu, x, y, personal), 0.1)
    assert toys.distance(select(result.up, "nu"), expected) < 1e-14


def check_the_server_takes_means_of_all_that_is_sent(kind: type[Algorithm]) -> None:
    """Body, generic head and hypernetwork, by samples or with equal weights, over who took part."""
    for weighting in ("samples", "uniform"):
        for turn in toys.play(kind, 2, settings=HYPER | {"weighting": weighting}, participation=0.75):
            rows = {c: float(toys.TRAIN[c]) if weighting == "samples" else 1.0 for c in turn.ups}
            share = {c: n / sum(rows.values()) for c, n in rows.items()}
            mean = {k: torch.stack([share[c] * up[k] for c, up in turn.ups.items()]).sum(0) for k in turn.server}
            assert toys.distance(turn.next_server, mean) < 1e-15


def test_fedrod_0_one_step_follows_the_objective():
    check_0_one_step_follows_the_objective(FedRoD)


def test_fedrod_1_without_gamma_it_sends_what_fedavg_sends():
    check_1_without_gamma_it_sends_what_fedavg_sends(FedRoD)


def test_fedrod_1_a_class_without_rows_makes_no_nan():
    check_1_a_class_without_rows_makes_no_nan(FedRoD)


def test_fedrod_2_the_personal_head_does_not_touch_what_is_sent():
    check_2_the_personal_head_does_not_touch_what_is_sent(FedRoD)


def test_fedrod_3_with_equal_counts_of_all_classes_it_sends_what_fedavg_sends():
    check_3_with_equal_counts_of_all_classes_it_sends_what_fedavg_sends(FedRoD)


def test_fedrod_4_rows_of_absent_classes_stand_still():
    check_4_rows_of_absent_classes_stand_still(FedRoD)


def test_fedrod_5_a_personal_head_that_never_trained_adds_nothing():
    check_5_a_personal_head_that_never_trained_adds_nothing(FedRoD)


def test_fedrod_5_a_client_is_tested_with_the_sum_of_both_heads():
    check_5_a_client_is_tested_with_the_sum_of_both_heads(FedRoD)


def test_fedrod_6_a_client_of_one_class_sends_back_what_it_received():
    check_6_a_client_of_one_class_sends_back_what_it_received(FedRoD)


def test_fedrod_6_the_hypernetwork_shows_the_class_shares():
    check_6_the_hypernetwork_shows_the_class_shares(FedRoD)


def test_the_counts_are_of_all_rows():
    check_the_counts_are_of_all_rows(FedRoD)


def test_the_hypernetwork_alone_learns_from_the_personal_loss():
    check_the_hypernetwork_alone_learns_from_the_personal_loss(FedRoD)


def test_the_server_takes_means_of_all_that_is_sent():
    check_the_server_takes_means_of_all_that_is_sent(FedRoD)


@pytest.mark.parametrize("settings", [{}, {"gamma": 0.0}, HYPER])
def test_the_log_tells_which_classes_a_client_holds(settings: dict[str, Any]):
    """By rows that moved: not without gamma, and not of a client with one class, whose upload moves nothing, unless the
    hypernetwork gives all counts away."""
    made = toys.setup(FedRoD, settings=settings, capture_rounds="8", rounds=9)
    algorithm, memories = made.algorithm, {}
    for turn in toys.rounds(made, 2):
        for client, up in turn.ups.items():
            memory = memories.get(client, algorithm.init_client(made.server_fresh, turn.server))
            memories[client] = algorithm.observe(memory, turn.downs[client], up)
            found = algorithm.reconstruct_state(memories[client])
            assert found is not None
            if turn.t == 1 and settings == HYPER:
                assert found.keys() == {"counted", "held", "log_share"}
            elif turn.t == 1:
                known = settings == {} and sum(n > 0 for n in COUNTS[client]) > 1
                assert found.keys() == ({"counted", "held"} if known else {"counted"})
            assert all(toys.same({k: v}, {k: turn.next_states[client][k]}) for k, v in found.items())


def test_before_its_first_exchange_nothing_is_known_of_a_clients_classes():
    algorithm = toys.method(FedRoD)
    server = algorithm.init_server(algorithm.net.fresh(0))
    state = algorithm.init_client(algorithm.net.fresh(1), server)
    assert not state["counted"]
    assert state["held"].all()
    assert torch.allclose(state["log_share"].exp(), torch.tensor(1 / 3))


def test_counts_stay_those_of_the_client_where_work_is_done_on_fewer_rows():
    """A probe trains on a victim batch: the shift is still that of all rows of the client."""
    made = toys.setup(FedRoD)
    turn = toys.rounds(made, 1)[0]
    x, y = made.federation.train(3)
    down = made.algorithm.downlink(turn.next_server, 3)
    result = made.algorithm.local(toys.work(x[:2], y[:2], made.net), turn.next_states[3], down)
    gradient = toys.hand_gradient(down, x[:2], y[:2], balanced(torch.tensor(COUNTS[3]).double(), 1.0))
    assert toys.distance(model_sent(result.up), toys.hand_step(down, gradient, 0.1)) < 1e-14


def test_a_newcomer_is_tested_with_the_head_that_the_hypernetwork_makes_of_its_shares():
    """Client 1 (no rows of class 0) has never taken part; nu as trained by the others still gives it a head."""
    made = toys.setup(FedRoD, settings=HYPER)
    algorithm, turns = made.algorithm, toys.rounds(made, 2)
    server = turns[-1].next_server
    newcomer = algorithm.init_client(made.server_fresh, server)
    items = algorithm.personalise(toys.context(made, 2, 1), algorithm.deploy(newcomer, server))
    share = torch.tensor(COUNTS[1]).double() / 8
    out = server["nu.out"] @ (server["nu.in"] @ share + server["nu.in_bias"]).relu() + server["nu.out_bias"]
    expected = {"head.weight": out[:15].reshape(3, 5), "head.bias": out[15:]}
    assert toys.distance(select(items, "personal"), prefixed("personal", expected)) < 1e-14
    assert out.abs().max() > 1e-3

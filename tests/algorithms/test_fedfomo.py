"""FedFomo. The checks take the method's class, so that planted bugs can be put to them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pflsec.algorithms.personalized_aggregation.fedfomo import FedFomo
from pflsec.core.algorithm import Algorithm, Done
from pflsec.core.items import Items, prefixed, select, without_prefix
from pflsec.core.streams import stream
from tests import toys

PARTIAL: dict[str, Any] = {"participation": 0.75, "drop_rate": 1 / 3}


def model(state: Items) -> Items:
    """Return the trained model of a state."""
    return select(state, "body", "head")


def drawn(*names: str) -> list[Items]:
    """Return models, different ones for different names."""
    return [toys.tiny().fresh(name) for name in names]


def trained(*, steps: int = 20) -> Items:
    """Return a model that knows the batch well."""
    theta, (x, y) = toys.tiny().fresh("base"), toys.batch(10)
    for _ in range(steps):
        theta = toys.hand_step(theta, toys.hand_gradient(theta, x, y), 0.5)
    return theta


def downlink(*peers: Items) -> Items:
    """Return what client 0 of four receives: these models, as if they were those of clients 1, 2, ..."""
    shapes = toys.tiny().shapes
    tables = {k: torch.stack([p[k] for p in peers]) if peers else torch.zeros(0, *shapes[k]) for k in shapes}
    return prefixed("peer", tables) | {"peers": torch.tensor([False] + [i < len(peers) for i in range(3)])}


def done(kind: type[Algorithm], own: Items, base: Items, *peers: Items, **settings: Any) -> Done:
    """Return one exchange, without steps, of a client with ten rows: it shows the start."""
    algorithm = toys.method(kind, **settings)
    work = toys.work(*toys.batch(10), algorithm.net, epochs=0)
    return algorithm.local(work, own | prefixed("base", base), downlink(*peers))


def held() -> tuple[Tensor, Tensor]:
    """Return the rows that this client holds back, of ten."""
    part = toys.work(*toys.batch(10)).split(0.2, "validation")[0]
    return part.x, part.y


def score(theta: Items, base: Items, order: int = 2) -> float:
    """Return (L(base) - L(theta)) / (|theta - base| + 1e-5), worked out by hand."""
    (x, y), apart = held(), torch.cat([(theta[k] - base[k]).flatten() for k in base])
    length = apart.abs().sum() if order == 1 else apart.square().sum().sqrt()
    return float((toys.hand_loss(base, x, y) - toys.hand_loss(theta, x, y)) / (length + 1e-5))


def check_0_the_start_follows_the_scores(kind: type[Algorithm]) -> None:
    """start = base + sum_j w_j (theta_j - base), w the scores above 0 over their sum, its own model among them."""
    base, worse = drawn("base", "worse")
    own, good = trained(steps=3), trained()
    for order, norm in ((2, "l2"), (1, "l1")):
        result = done(kind, own, base, worse, good, norm=norm)
        scores = [score(theta, base, order) for theta in (own, worse, good)]
        assert result.up["scores"].tolist() == pytest.approx(scores, rel=1e-10)
        assert scores[0] > 0 > scores[1]
        weights = [max(s, 0) / (scores[0] + scores[2]) for s in scores]
        theta = zip(weights, (own, worse, good), strict=True)
        moved = [{k: w * (m[k] - base[k]) for k in base} for w, m in theta]
        expected = {k: base[k] + sum(m[k] for m in moved) for k in base}
        assert toys.distance(model(result.up), expected) < 1e-13
        assert toys.same(without_prefix("base", result.state), model(result.up))


def check_1_without_peers_it_is_isolated_training(kind: type[Algorithm]) -> None:
    """On the rows that are not held back, bit for bit: the weights are (1), or the fallback is its own model too."""
    made = toys.setup(kind, settings={"peers": 0}, participation=0.75)
    for turn in toys.rounds(made):
        for client in turn.ups:
            alone = toys.context(made, turn.t, client).split(0.2, "validation")[1]
            assert toys.same(model(turn.next_states[client]), alone.fit(model(turn.states[client]), on=alone.ce))
            assert not turn.downs[client]["peers"].any()


def check_2_weights_are_shares_or_the_fallback_is_taken(kind: type[Algorithm]) -> None:
    algorithm = toys.method(kind)
    assert isinstance(algorithm, FedFomo)
    own, base, peer = drawn("own", "base", "peer")
    state = own | prefixed("base", base)
    ones = {k: torch.ones_like(v) for k, v in own.items()}
    threes = {k: 3 * v for k, v in ones.items()}
    mixed = algorithm.mixture(ones | prefixed("base", base), downlink(threes), torch.tensor([1.0, 3.0]))
    assert all(torch.allclose(v, torch.tensor(0.25 * 1 + 0.75 * 3)) for v in mixed.values())
    for scores in ([0.0, -1.0], [-2.0, -1.0]):
        assert toys.same(algorithm.mixture(state, downlink(peer), torch.tensor(scores)), own)
        reverting = toys.method(kind, fallback="base")
        assert isinstance(reverting, FedFomo)
        assert toys.same(reverting.mixture(state, downlink(peer), torch.tensor(scores)), base)


def check_2_identical_peers_score_alike(kind: type[Algorithm]) -> None:
    own, base, peer = drawn("own", "base", "peer")
    scores = done(kind, own, base, peer, own, peer).up["scores"]
    assert scores[1] == scores[3]
    assert scores[0] == scores[2]
    assert scores[0] != scores[1]


def check_3_the_log_tells_where_training_began(kind: type[Algorithm]) -> None:
    """From what was sent alone: w from the scores, models from the downlink and from the client's last upload."""
    last: dict[int, Items] = {}
    turns = toys.play(kind, 6, **PARTIAL)
    first = model(turns[0].states[0])
    for turn in turns:
        for client, up in turn.ups.items():
            own = last.get(client, first)
            peers = without_prefix("peer", turn.downs[client])
            w = up["scores"].clamp(min=0)
            total = w.sum() if w.any() else 1
            w = w if w.any() else torch.eye(len(w))[0]
            begun = {k: (w[0] * own[k] + torch.einsum("j,j...", w[1:], peers[k])) / total for k in own}
            assert toys.distance(without_prefix("base", turn.next_states[client]), begun) < 1e-13
            last[client] = model(up)
    assert len(last) > 2


def check_3_the_server_computes_the_gradient(kind: type[Algorithm]) -> None:
    """One step: the change of the upload is the gradient at the start, over the rows that are trained on."""
    algorithm, base = toys.method(kind), drawn("base")[0]
    work = toys.work(*toys.batch(10), algorithm.net)
    state, down = trained(steps=3) | prefixed("base", base), downlink(trained())
    result = algorithm.local(work, state, down)
    seen = algorithm.change(state, down, result.up, lr=0.1, steps=1)
    rest = work.split(0.2, "validation")[1]
    begun = without_prefix("base", result.state)
    assert toys.distance(begun, model(state)) > 1e-2
    assert toys.distance(model(seen), toys.hand_gradient(begun, rest.x, rest.y)) < 1e-12
    assert torch.equal(seen["scores"], result.up["scores"])


def check_4_scoring_leaves_the_servers_models_alone(kind: type[Algorithm]) -> None:
    algorithm, turn = toys.method(kind), toys.play(kind, 2)[-1]
    before, down = toys.snapshot(turn.next_server), algorithm.downlink(turn.next_server, 1)
    algorithm.local(toys.work(*toys.batch(10), algorithm.net), turn.next_states[1], down)
    assert toys.same(turn.next_server, before)
    assert toys.same(algorithm.downlink(turn.next_server, 1), down)


def check_5_held_rows_are_never_trained_on(kind: type[Algorithm]) -> None:
    """In no round: other inputs in those rows, and the model that comes out has the same bits; not so for the rest."""
    x, y = toys.batch(10)
    rows = toys.work(x, y).split(0.2, "validation")[0]
    back = torch.tensor([bool((x[i] == rows.x).flatten(1).all(1).any()) for i in range(10)])
    assert back.sum() == 2
    own = drawn("own")[0]
    for t in range(4):
        up, held_moved, rest_moved = (
            toys.method(kind).local(
                toys.work(torch.where(which[:, None, None, None], x + 1, x), y, round=t),
                own | prefixed("base", own),
                downlink(),
            )
            for which in (torch.zeros(10).bool(), back, ~back)
        )
        assert toys.same(model(up.up), model(held_moved.up))
        assert toys.distance(model(up.up), model(rest_moved.up)) > 1e-3


def check_6_the_base_scores_0_and_a_better_model_more(kind: type[Algorithm]) -> None:
    base = drawn("base")[0]
    scores = done(kind, base, base, base, trained()).up["scores"]
    assert scores[:2].tolist() == [0, 0]
    assert scores[2] > 0


def check_7_only_models_of_the_last_round_are_offered(kind: type[Algorithm]) -> None:
    """Never its own, none in the first round, none that nobody has trained; each as it was uploaded."""
    last: dict[int, Items] = {}
    for turn in toys.play(kind, 6, settings={"peers": 2, "epsilon": 1.0}, **PARTIAL):
        for client, down in turn.downs.items():
            who = down["peers"].nonzero().flatten().tolist()
            assert set(who) <= last.keys() - {client}
            assert len(who) == min(2, len(last.keys() - {client}))
            for i, peer in enumerate(who):
                assert toys.same({k: v[i] for k, v in without_prefix("peer", down).items()}, model(last[peer]))
        last = dict(turn.ups)
    assert last


def check_8_scores_add_up_to_preferences(kind: type[Algorithm]) -> None:
    """P_ij grows by s_j for its own model and those it received; P is the identity at first."""
    expected = torch.eye(4)
    for turn in toys.play(kind, 5, settings={"peers": 2}, **PARTIAL):
        assert torch.equal(turn.server["likes"], expected)
        for client, up in turn.ups.items():
            expected = expected.clone()
            expected[client, client] += up["scores"][0]
            for j, s in zip(turn.downs[client]["peers"].nonzero().flatten(), up["scores"][1:], strict=True):
                expected[client, j] += s
    assert not torch.equal(expected, torch.eye(4))


def check_few_rows_are_split_too(kind: type[Algorithm]) -> None:
    """There is something to judge by and something to train on."""
    own, peer = drawn("own", "peer")
    for rows in (1, 2, 4):
        work = toys.work(*toys.batch(rows))
        result = toys.method(kind).local(work, own | prefixed("base", own), downlink(peer))
        assert result.up["scores"][1] != 0
        assert toys.distance(model(result.up), without_prefix("base", result.state)) > 1e-3


def test_fedfomo_0_the_start_follows_the_scores():
    check_0_the_start_follows_the_scores(FedFomo)


def test_fedfomo_1_without_peers_it_is_isolated_training():
    check_1_without_peers_it_is_isolated_training(FedFomo)


def test_fedfomo_2_weights_are_shares_or_the_fallback_is_taken():
    check_2_weights_are_shares_or_the_fallback_is_taken(FedFomo)


def test_fedfomo_2_identical_peers_score_alike():
    check_2_identical_peers_score_alike(FedFomo)


def test_fedfomo_3_the_log_tells_where_training_began():
    check_3_the_log_tells_where_training_began(FedFomo)


def test_fedfomo_3_the_server_computes_the_gradient():
    check_3_the_server_computes_the_gradient(FedFomo)


def test_fedfomo_4_scoring_leaves_the_servers_models_alone():
    check_4_scoring_leaves_the_servers_models_alone(FedFomo)


def test_fedfomo_5_held_rows_are_never_trained_on():
    check_5_held_rows_are_never_trained_on(FedFomo)


def test_fedfomo_6_the_base_scores_0_and_a_better_model_more():
    check_6_the_base_scores_0_and_a_better_model_more(FedFomo)


def test_fedfomo_7_only_models_of_the_last_round_are_offered():
    check_7_only_models_of_the_last_round_are_offered(FedFomo)


def test_fedfomo_8_scores_add_up_to_preferences():
    check_8_scores_add_up_to_preferences(FedFomo)


def test_against_its_own_model_the_own_score_is_0():
    """baseline = current: 0/0 by the formula, and its own model has no weight where a peer is better."""
    own, base = drawn("own", "base")
    result = done(FedFomo, own, base, trained(), baseline="current")
    assert result.up["scores"].tolist() == [0, pytest.approx(score(trained(), own))]
    assert toys.distance(model(result.up), trained()) < 1e-15


def test_the_best_peers_left_are_chosen_or_any_of_them():
    """epsilon 0: by preference, numbers deciding between equals; 1: every peer comes up, whatever it is worth."""
    likes, offered = torch.tensor([0.0, 5.0, -1.0, 3.0, 3.0]), torch.tensor([True, False, True, True, True])
    algorithms = [toys.method(FedFomo, clients=5, peers=2, epsilon=e, epsilon_decay=0.0) for e in (0.0, 1.0)]
    draws = []
    for algorithm in algorithms:
        assert isinstance(algorithm, FedFomo)
        draws.append(
            {tuple(algorithm.choose(likes, offered, 0, stream(i)).nonzero().flatten().tolist()) for i in range(99)}
        )
    assert draws[0] == {(3, 4)}
    assert draws[1] == {(0, 2), (0, 3), (0, 4), (2, 3), (2, 4), (3, 4)}


def test_exploration_ends():
    """epsilon 0.3 less 0.05 a round: from the sixth on the best are chosen."""
    algorithm, likes, offered = toys.method(FedFomo, peers=1), torch.tensor([0.0, 1.0, 2.0, 3.0]), torch.ones(4).bool()
    assert isinstance(algorithm, FedFomo)
    explored = [sum(not algorithm.choose(likes, offered, t, stream(i, t))[3] for i in range(200)) for t in range(8)]
    assert explored[6:] == [0, 0]
    assert explored[0] == pytest.approx(200 * 0.3 * 3 / 4, abs=20)


def test_stale_models_may_be_offered_but_none_that_nobody_trained():
    last: dict[int, Items] = {}
    older, before = 0, set()
    for turn in toys.play(FedFomo, 6, settings={"stale": True}, participation=0.5):
        for client, down in turn.downs.items():
            who = set(down["peers"].nonzero().flatten().tolist())
            assert who == last.keys() - {client}
            older += len(who - before)
        last |= turn.ups
        before = set(turn.ups)
    assert older


def test_a_client_may_keep_what_it_thinks_to_itself():
    """preferences = client: it sends no scores but asks for peers, and receives those of them that were there."""
    algorithm = toys.method(FedFomo, preferences="client")
    wanted: dict[int, Tensor] = {}
    came: set[int] = set()
    received = 0
    for turn in toys.play(FedFomo, 6, settings={"preferences": "client", "peers": 2, "epsilon": 1.0}, **PARTIAL):
        for client, down in turn.downs.items():
            asked = set(wanted[client].nonzero().flatten().tolist()) if client in wanted else set()
            assert set(down["peers"].nonzero().flatten().tolist()) == asked & came
            received += int(down["peers"].sum())
        for client, up in turn.ups.items():
            assert up.keys() == toys.tiny().shapes.keys() | {"wanted"}
            assert up["wanted"].sum() == 2
            assert not up["wanted"][client]
            wanted[client] = up["wanted"]
        came = set(turn.ups)
        assert toys.same(algorithm.reconstruct_state(turn.next_states[0]) or {}, model(turn.next_states[0]))
    assert received


def test_a_client_with_few_rows_has_something_to_judge_by_and_to_train_on():
    check_few_rows_are_split_too(FedFomo)


def test_the_trained_model_is_tested():
    made = toys.setup(FedFomo)
    turn = toys.rounds(made)[-1]
    assert toys.same(made.algorithm.deploy(turn.next_states[0], turn.downs[0]), model(turn.ups[0]))
    assert turn.metrics["global_accuracy"] is None

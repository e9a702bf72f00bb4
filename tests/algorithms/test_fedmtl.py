"""FedMTL. The checks take the method's class, so that planted bugs can be put to them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pflsec.algorithms.other.fedmtl import FedMTL, similarity
from pflsec.core.algorithm import Algorithm
from pflsec.core.errors import PflsecWarning
from pflsec.core.items import Items, prefixed, select, without_prefix
from tests import toys
from tests.toys import Round

TIED: dict[str, Any] = {"lam1": 0.4, "lam2": 0.1}


def bank(count: int = 4) -> Items:
    """Return models of so many clients, all different, [count, ...] each."""
    models = [toys.tiny().fresh("bank", i) for i in range(count)]
    return {k: torch.stack([m[k] for m in models]) for k in models[0]}


def flat(models: Items) -> Tensor:
    """Return models [N, ...] as the rows of a matrix."""
    return torch.cat([w.flatten(1) for w in models.values()], 1)


def spread(server: Items) -> float:
    """Return sum_t |w_t - mean|^2."""
    models = flat(without_prefix("bank", server))
    return float((models - models.mean(0)).square().sum())


def tied(state: Items, server: Items, omega: Tensor, client: int) -> Items:
    """Return the gradient of lam1 tr(W Omega W') + lam2 |W|^2 in one client's column, which holds this state, by autograd."""
    column = {k: v.clone().requires_grad_() for k, v in state.items()}
    rows = {k: w.clone() for k, w in without_prefix("bank", server).items()}
    for k, w in rows.items():
        w[client] = column[k]
    models = flat(rows)
    total = TIED["lam1"] * torch.trace(models.T @ omega @ models) + TIED["lam2"] * models.square().sum()
    return dict(zip(column, torch.autograd.grad(total, list(column.values())), strict=True))


def check_1_without_ties_it_is_isolated_training(kind: type[Algorithm]) -> None:
    made = toys.setup(kind, settings={"lam1": 0.0}, participation=0.75)
    for turn in toys.rounds(made):
        for c, up in turn.ups.items():
            alone = toys.context(made, turn.t, c)
            assert toys.same(up, alone.fit(turn.states[c], on=alone.ce))
            assert toys.same(turn.next_states[c], up)


def check_2_the_mean_relation_measures_the_spread(kind: type[Algorithm]) -> None:
    """Rows sum to 0, Omega Omega = Omega, and tr(W Omega W') = sum_t |w_t - mean|^2."""
    algorithm = toys.method(kind)
    omega = algorithm.init_server(toys.tiny().fresh(0))["omega"]
    assert omega.sum(1).abs().max() < 1e-15
    assert torch.allclose(omega @ omega, omega, atol=1e-15)
    models = flat(bank())
    total = torch.trace(models.T @ omega @ models)
    assert float(total) == pytest.approx(spread(prefixed("bank", bank())), abs=1e-12)


def check_3_steps_follow_the_objective(kind: type[Algorithm]) -> None:
    """From the client's own model, with the others' fixed: g + d/dw_t of both penalties, for both relations, absent clients
    included. The downlink holds what is needed of the others, and their models only as a sum."""
    for relation in ("mean", "learned"):
        made = toys.setup(kind, settings=TIED | {"relation": relation, "floor": 0.5}, participation=0.5, lr=0.05)
        for turn in toys.rounds(made):
            for c, up in turn.ups.items():
                w = turn.states[c]
                for x, y in toys.context(made, turn.t, c).batches():
                    slope, g = tied(w, turn.server, turn.server["omega"], c), toys.hand_gradient(w, x, y)
                    w = {k: v - 0.05 * (g[k] + slope[k]) for k, v in w.items()}
                assert toys.distance(up, w) < 1e-13
                models = without_prefix("bank", turn.server)
                pulled = {
                    k: sum((turn.server["omega"][c, s] * m[s] for s in range(4) if s != c), torch.zeros(()))
                    for k, m in models.items()
                }
                assert toys.distance(without_prefix("reference", turn.downs[c]), pulled) < 1e-14


def check_4_equal_clients_stay_equal(kind: type[Algorithm]) -> None:
    """Equal data, equal streams: equal uploads, and no pull at their common model, which 1/N of all of them is."""
    algorithm, (x, y) = toys.method(kind, lam1=2.0), toys.batch(10)
    server = algorithm.init_server(toys.tiny().fresh(0))
    state = algorithm.init_client({}, server)
    for _ in range(2):
        ups = {}
        for c in range(4):
            work = toys.work(x, y, epochs=1)
            ups[c] = algorithm.local(work, state, algorithm.downlink(server, c)).up
            assert toys.distance(ups[c], work.fit(state, on=work.ce)) < 1e-15
            assert toys.distance(ups[c], ups[0]) < 1e-15
        state, server = ups[0], algorithm.aggregate(server, ups)


def check_5_a_stronger_tie_keeps_models_nearer(kind: type[Algorithm]) -> None:
    """The uploads change, and their spread shrinks."""
    played: list[Round] = [toys.play(kind, 4, settings={"lam1": lam1})[-1] for lam1 in (0.0, 0.1, 0.5)]
    found = [spread(turn.next_server) for turn in played]
    assert found[0] > 1.05 * found[1] > 1.1 * found[2] > 0
    assert toys.distance(played[0].ups[0], played[1].ups[0]) > 1e-3


def check_6_a_learned_relation_is_an_inverse_similarity(kind: type[Algorithm]) -> None:
    """Sigma = sqrt(W'W)/tr: symmetric, no negative eigenvalue, trace 1, its square proportional to the products W'W; Omega is
    its inverse above the floor, and at the floor for models that are all equal."""
    models, sigma = bank(), similarity(bank())
    assert torch.allclose(sigma, sigma.T, atol=1e-15)
    assert torch.linalg.eigvalsh(sigma).min() > 0
    assert float(torch.trace(sigma)) == pytest.approx(1)
    products = flat(models) @ flat(models).T
    assert torch.allclose(sigma @ sigma / torch.trace(sigma @ sigma), products / torch.trace(products), atol=1e-14)
    algorithm = toys.method(kind, relation="learned", floor=1e-7)
    ups = {c: {k: w[c] for k, w in models.items()} for c in range(4)}
    server = algorithm.init_server(ups[0])
    assert torch.allclose(algorithm.aggregate(server, ups)["omega"] @ sigma, torch.eye(4), atol=1e-10)
    equal = toys.method(kind, relation="learned", floor=0.1).aggregate(server, {0: ups[0]})["omega"]
    assert torch.linalg.eigvalsh(equal).tolist() == pytest.approx([1, 10, 10, 10])


def check_the_server_keeps_everybodys_last_upload(kind: type[Algorithm]) -> None:
    """By client, not by place in the cohort; nobody's is forgotten or averaged."""
    last: dict[int, Items] = {}
    for turn in toys.play(kind, 6, settings=TIED, participation=0.75, drop_rate=1 / 3):
        last |= turn.ups
        models = without_prefix("bank", turn.next_server)
        for c in range(4):
            expected = last.get(c, {k: w[c] for k, w in without_prefix("bank", turn.server).items()})
            assert toys.same({k: w[c] for k, w in models.items()}, expected)
    assert len(last) > 2


def check_the_gradient_is_read_without_the_tie(kind: type[Algorithm]) -> None:
    """(w_prev - w_up)/lr = g + lam1, lam2 terms at the client's own last model, all of which the server knows."""
    made = toys.setup(kind, settings=TIED, local_epochs=1, batch_size=100)
    turn = toys.rounds(made)[2]
    for c, up in turn.ups.items():
        seen = made.algorithm.change(turn.states[c], turn.downs[c], up, 0.1, 1)
        assert toys.distance(seen, toys.hand_gradient(turn.states[c], *made.federation.train(c))) < 1e-13


def test_fedmtl_1_without_ties_it_is_isolated_training():
    check_1_without_ties_it_is_isolated_training(FedMTL)


def test_fedmtl_2_the_mean_relation_measures_the_spread():
    check_2_the_mean_relation_measures_the_spread(FedMTL)


def test_fedmtl_3_steps_follow_the_objective():
    check_3_steps_follow_the_objective(FedMTL)


def test_fedmtl_4_equal_clients_stay_equal():
    check_4_equal_clients_stay_equal(FedMTL)


def test_fedmtl_5_a_stronger_tie_keeps_models_nearer():
    check_5_a_stronger_tie_keeps_models_nearer(FedMTL)


def test_fedmtl_6_a_learned_relation_is_an_inverse_similarity():
    check_6_a_learned_relation_is_an_inverse_similarity(FedMTL)


def test_the_server_keeps_everybodys_last_upload():
    check_the_server_keeps_everybodys_last_upload(FedMTL)


def test_the_gradient_is_read_without_the_tie():
    check_the_gradient_is_read_without_the_tie(FedMTL)


def test_a_client_is_tested_with_its_own_model():
    algorithm, turn = toys.method(FedMTL), toys.play(FedMTL, participation=0.5)[-1]
    for c, state in turn.next_states.items():
        assert toys.same(
            algorithm.deploy(state, algorithm.downlink(turn.next_server, c)), select(state, "body", "head")
        )
    assert turn.metrics["global_accuracy"] is None


def test_two_clients_see_each_others_model():
    """Omega_01 = -1/2: the reference is the other's last upload, up to that factor."""
    for turn in toys.play(FedMTL, data=toys.dataset([5, 8], [(0, 1), (1, 2)])):
        for c in (0, 1):
            other = {k: -w[1 - c] / 2 for k, w in without_prefix("bank", turn.server).items()}
            assert toys.distance(without_prefix("reference", turn.downs[c]), other) < 1e-15


def test_a_tie_that_overshoots_is_warned_about():
    (x, y), algorithm = toys.batch(), toys.method(FedMTL, lam1=7.0)
    server = algorithm.init_server(toys.tiny().fresh(0))
    with pytest.warns(PflsecWarning, match="overshoots"):
        algorithm.local(toys.work(x, y), algorithm.init_client({}, server), algorithm.downlink(server, 0))

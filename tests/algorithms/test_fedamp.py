"""FedAMP. The checks take the method's class, so that planted bugs can be put to them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from pflsec.algorithms.personalized_aggregation.fedamp import FedAMP
from pflsec.core.algorithm import Algorithm
from pflsec.core.errors import PflsecWarning
from pflsec.core.items import Items, prefixed, without_prefix
from tests import toys

STRONG: dict[str, Any] = {"lam": 2.0, "alpha": 4.0, "sigma": 20.0}
"""Pull 2/4 = 0.5; own weight at least 1 - 3 * 4/20 = 0.4 with four clients."""
HEURISTIC: dict[str, Any] = {"heur": True, "sigma": 25.0, "xi_self": 0.25}


def models(count: int = 4) -> Items:
    """Return a bank of different models."""
    drawn = [toys.tiny().fresh("model", i) for i in range(count)]
    return {k: torch.stack([m[k] for m in drawn]) for k in drawn[0]}


def of(bank: Items, client: int) -> Items:
    """Return one client's model."""
    return {k: v[client] for k, v in bank.items()}


def matrix(algorithm: Any, bank: Items) -> Tensor:
    """Return the mixture xi [N, N]."""
    return torch.stack([algorithm.mixture(bank, client) for client in range(algorithm.clients)])


def check_1_without_the_pull_it_is_isolated_training(kind: type[Algorithm]) -> None:
    made = toys.setup(kind, settings=STRONG | {"lam": 0.0}, participation=0.75)
    for turn in toys.rounds(made):
        for client in turn.ups:
            alone = toys.context(made, turn.t, client)
            assert toys.same(turn.next_states[client], alone.fit(turn.states[client], on=alone.ce))


def check_2_rows_of_the_mixture_sum_to_one(kind: type[Algorithm]) -> None:
    shrunk: dict[str, Any] = {"renormalise": True, "alpha": 9.0, "sigma": 3.0}
    for settings in ({}, STRONG, shrunk, HEURISTIC):
        xi = matrix(toys.method(kind, **settings), models())
        assert torch.allclose(xi.sum(1), torch.ones(4), atol=1e-15)


def check_2_the_mixture_follows_the_squared_distance(kind: type[Algorithm]) -> None:
    """xi_ij = alpha/sigma exp(-|w_i - w_j|^2 / sigma): symmetric off the diagonal, and this number."""
    bank = models()
    xi = matrix(toys.method(kind, **STRONG), bank)
    assert torch.equal(xi.triu(1), xi.T.triu(1))
    flat = torch.cat([v.flatten(1) for v in bank.values()], 1)
    for i, j in ((0, 1), (2, 3)):
        assert xi[i, j].item() == pytest.approx(0.2 * torch.exp(-(flat[i] - flat[j]).square().sum() / 20).item())


def check_2_identical_clients_receive_identical_models(kind: type[Algorithm]) -> None:
    bank = models()
    bank = {k: torch.stack([v[0], v[1], v[0], v[3]]) for k, v in bank.items()}
    for settings in (STRONG, HEURISTIC):
        algorithm = toys.method(kind, **settings)
        server = prefixed("bank", bank)
        assert toys.distance(algorithm.downlink(server, 0), algorithm.downlink(server, 2)) < 1e-14


def check_3_an_endless_sigma_gives_the_plain_mean(kind: type[Algorithm]) -> None:
    """exp(-d/sigma) = 1 and alpha/sigma = 1/N: every weight is 1/N."""
    algorithm, bank = toys.method(kind, alpha=1e12 / 4, sigma=1e12), models()
    mean = {k: v.mean(0) for k, v in bank.items()}
    for client in range(4):
        assert toys.distance(algorithm.downlink(prefixed("bank", bank), client), mean) < 1e-11


def exchange(kind: type[Algorithm], **settings: Any) -> tuple[Algorithm, Items, Items, Items]:
    """Return (method, own model w, received model u, upload) of one full-batch step at lr 0.1."""
    algorithm, (x, y) = toys.method(kind, **(STRONG | settings)), toys.batch()
    w, u = of(models(), 0), of(models(), 1)
    return algorithm, w, u, algorithm.local(toys.work(x, y, algorithm.net), w, u).up


def check_4_one_step_is_pulled_towards_the_received_model(kind: type[Algorithm]) -> None:
    """w_up = w - lr (g + (lam/alpha)(w - u)); the pull is half the squared distance's gradient."""
    for lam in (2.0, 8.0):
        _, w, u, up = exchange(kind, lam=lam)
        g = toys.hand_gradient(w, *toys.batch())
        assert toys.distance(up, {k: w[k] - 0.1 * (g[k] + lam / 4 * (w[k] - u[k])) for k in w}) < 1e-14


def check_4_another_lambda_sends_another_upload(kind: type[Algorithm]) -> None:
    assert toys.distance(exchange(kind, lam=2.0)[3], exchange(kind, lam=4.0)[3]) > 1e-3


def check_5_the_server_computes_the_gradient(kind: type[Algorithm]) -> None:
    """It knows where training began and what it sent: the change minus the pull is the gradient at the start."""
    for start in ("own", "cloud"):
        algorithm, w, u, up = exchange(kind, start=start)
        gradient = toys.hand_gradient(w if start == "own" else u, *toys.batch())
        assert toys.distance(algorithm.change(w, u, up, lr=0.1, steps=1), gradient) < 1e-12


def check_6_downlinks_differ_once_models_do(kind: type[Algorithm]) -> None:
    turns = toys.play(kind, settings=STRONG)
    for i, j in ((0, 1), (1, 2), (2, 3)):
        assert toys.distance(turns[0].downs[i], turns[0].downs[j]) < 1e-14
        assert toys.distance(turns[1].downs[i], turns[1].downs[j]) > 1e-3


def check_the_server_keeps_everybodys_last_upload(kind: type[Algorithm]) -> None:
    """Absent clients count in the mixture with the model they sent last, the first one if they never did."""
    last: dict[int, Items] = {}
    for turn in toys.play(kind, 5, settings=STRONG, participation=0.5, drop_rate=0.5):
        last |= turn.ups
        bank = without_prefix("bank", turn.next_server)
        assert all(toys.same(of(bank, c), last.get(c, turn.next_states[c])) for c in range(4))
    assert len(last) > 1


def test_fedamp_1_without_the_pull_it_is_isolated_training():
    check_1_without_the_pull_it_is_isolated_training(FedAMP)


def test_fedamp_2_rows_of_the_mixture_sum_to_one():
    check_2_rows_of_the_mixture_sum_to_one(FedAMP)


def test_fedamp_2_the_mixture_follows_the_squared_distance():
    check_2_the_mixture_follows_the_squared_distance(FedAMP)


def test_fedamp_2_identical_clients_receive_identical_models():
    check_2_identical_clients_receive_identical_models(FedAMP)


def test_fedamp_3_an_endless_sigma_gives_the_plain_mean():
    check_3_an_endless_sigma_gives_the_plain_mean(FedAMP)


def test_fedamp_4_one_step_is_pulled_towards_the_received_model():
    check_4_one_step_is_pulled_towards_the_received_model(FedAMP)


def test_fedamp_4_another_lambda_sends_another_upload():
    check_4_another_lambda_sends_another_upload(FedAMP)


def test_fedamp_5_the_server_computes_the_gradient():
    check_5_the_server_computes_the_gradient(FedAMP)


def test_fedamp_6_downlinks_differ_once_models_do():
    check_6_downlinks_differ_once_models_do(FedAMP)


def test_the_server_keeps_everybodys_last_upload():
    check_the_server_keeps_everybodys_last_upload(FedAMP)


def test_the_heuristic_weighs_by_cosine():
    """xi_ii is given; the rest of 1 goes by softmax(sigma cos(w_i, w_j))."""
    bank = models()
    xi = matrix(toys.method(FedAMP, **HEURISTIC), bank)
    flat = torch.cat([v.flatten(1) for v in bank.values()], 1)
    cosines = torch.stack([torch.cosine_similarity(flat[0], flat[j], dim=0) for j in (1, 2, 3)])
    assert torch.allclose(xi[0, 1:], 0.75 * torch.softmax(25 * cosines, 0))
    assert xi.diagonal().tolist() == pytest.approx([0.25] * 4)


def test_with_all_weight_on_itself_a_client_receives_its_own_model():
    algorithm, bank = toys.method(FedAMP, heur=True, xi_self=1.0), models()
    assert toys.distance(algorithm.downlink(prefixed("bank", bank), 2), of(bank, 2)) < 1e-15


def test_a_mixture_that_may_turn_negative_is_warned_about():
    with pytest.warns(PflsecWarning, match="alpha is 7; above sigma/\\(clients - 1\\) = 6.66667"):
        toys.method(FedAMP, alpha=7.0, sigma=20.0)


@pytest.mark.parametrize(("alpha", "each", "own"), [(9.0, 0.5, 0.0), (2.25, 0.5, 0.0), (0.75, 0.25, 0.5)])
def test_renormalised_weights_are_never_negative(alpha: float, each: float, own: float):
    """Three equal models, sigma 3: the others' weights sum to 2 alpha/3 = 6, 1.5, 0.5; above 1 they are shrunk."""
    bank = {k: v[:1].expand(3, *v.shape[1:]) for k, v in models().items()}
    xi = matrix(toys.method(FedAMP, clients=3, alpha=alpha, sigma=3.0, renormalise=True), bank)
    assert xi.tolist() == [[own, each, each], [each, own, each], [each, each, own]]


def test_the_personal_model_is_tested_not_the_mixture():
    made = toys.setup(FedAMP, settings=STRONG)
    turn = toys.rounds(made)[-1]
    assert toys.same(made.algorithm.deploy(turn.states[0], turn.downs[0]), turn.states[0])
    assert turn.rows[0]["accuracy_post_agg"] == turn.rows[0]["accuracy_post_local"]
    assert turn.metrics["global_accuracy"] is None


def test_one_client_receives_its_own_model():
    algorithm = toys.method(FedAMP, clients=1)
    assert toys.distance(algorithm.downlink(prefixed("bank", models(1)), 0), of(models(1), 0)) == 0

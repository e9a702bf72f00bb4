"""Sums in place of uploads: what the server step is given, noise on it, and the account of whole clients."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from pflsec.algorithms.traditional.fedavg import FedAvg
from pflsec.core.errors import PrivacyError
from pflsec.core.items import Items, norm, subtract
from pflsec.defenses import accounting
from pflsec.runtime import privacy
from pflsec.runtime.defending import parse_defense
from pflsec.runtime.rounds import Federated
from tests import toys

QUIET = "dp-fedavg:noise_multiplier=0,bound=1e6,sampling=fixed"
UNIFORM = {"weighting": "uniform"}


def play(defense: str, key: str = "fedavg", count: int = 2, **options: Any) -> list[toys.Round]:
    return toys.play(key, count, defense=[defense], dp_seed=3, **options)


@pytest.mark.parametrize("defense", ["secagg", QUIET])
@pytest.mark.parametrize("key", ["fedavg", "scaffold", "feddyn", "fedrep", "ditto", "lgfedavg"])
def test_without_noise_a_sum_serves_a_mean_over_clients_as_well_as_their_uploads(defense: str, key: str, doubles: None):
    settings = UNIFORM if "weighting" in toys.method(key).Config.model_fields else {}
    plain, summed = toys.play(key, 2, settings=settings), play(defense, key, settings=settings)
    assert toys.distance(plain[-1].next_server, summed[-1].next_server) < 1e-12


def test_the_server_step_sees_one_change_and_no_sample_counts():
    made = toys.setup("fedavg", defense=["secagg"])
    given: list[dict[int, Items]] = []
    own = made.algorithm.aggregate
    made.algorithm.aggregate = lambda server, ups: given.append(dict(ups)) or own(server, ups)  # type: ignore[method-assign]
    toys.rounds(made, 1)
    ups = given[-1]
    assert len(ups) == 4
    assert all(toys.same(up, ups[0]) for up in ups.values())
    assert {int(up["num_samples"]) for up in ups.values()} == {1}


def test_a_client_whose_change_is_a_thousand_times_larger_moves_the_mean_by_at_most_the_bound_over_n():
    defense, bound = parse_defense("dp-fedavg:noise_multiplier=0,bound=0.1"), 0.1
    rng = torch.Generator().manual_seed(0)
    ups = {c: {"w": torch.randn(50, generator=rng)} for c in range(5)}
    zero = {"w": torch.zeros(50)}

    def mean(many: dict[int, Items]) -> Items:
        sent = {c: defense.protect(up, zero, rng) for c, up in many.items()}
        return defense.combine(sent, 5, rng)  # type: ignore[attr-defined]

    rest = mean({c: up for c, up in ups.items() if c})
    loud = mean(ups | {0: {"w": 1000 * ups[0]["w"]}})
    assert float(norm(subtract(loud, rest))) == pytest.approx(bound / 5, rel=1e-4)
    assert float(norm(subtract(mean(ups), rest))) == pytest.approx(bound / 5, rel=1e-4)


def test_noise_on_the_sum_has_the_stated_scale_once_a_round(doubles: None):
    """Nobody trains: the server moves by N(0, (z S)^2) / n in every coordinate, and by none that is zero."""
    made = toys.setup(
        "fedavg",
        net=None,
        defense=["dp-fedavg:noise_multiplier=2,bound=0.5,sampling=fixed"],
        local_epochs=0,
        dp_seed=1,
        rounds=100,
    )
    turns = toys.rounds(made, 100)
    steps = torch.cat([v.flatten() for t in turns for v in subtract(t.next_server, t.server).values()])
    assert len(steps) > 1e4
    assert not (steps == 0).any()
    assert float(steps.std()) == pytest.approx(2 * 0.5 / 4, rel=0.05)


def test_the_clipping_is_of_all_items_together_on_the_client():
    turn = play("dp-fedavg:noise_multiplier=0,bound=0.01,sampling=fixed", "scaffold", 1)[0]
    for up in turn.ups.values():
        assert float(norm(up)) == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize(
    ("clients", "cohort", "rounds", "delta", "published"),
    [(100, 10, 100, 1e-5, 7.90), (20, 20, 100, 20**-1.1, 73.6), (100, 10, 100, 100**-1.1, 4.58),
     (1000, 50, 100, 1000**-1.1, 2.90)],
)  # fmt: skip
def test_epsilon_of_known_cohorts(clients: int, cohort: int, rounds: int, delta: float, published: float):
    dp = parse_defense(f"dp-fedavg:noise_multiplier=1,delta={delta}")
    found = dp.epsilon([(1.0, cohort / clients, rounds)], clients)  # type: ignore[attr-defined]
    assert found == pytest.approx(published, rel=2e-3)


def test_a_run_accounts_one_step_a_round_for_all_clients():
    turns = play("dp-fedavg:noise_multiplier=1,delta=1e-5", participation=0.5, count=3)
    for n, turn in enumerate(turns, 1):
        assert turn.metrics["epsilon"] == pytest.approx(accounting.epsilon([(1.0, 0.5, n)], 1e-5))
        assert turn.metrics["epsilon_unit"] == "user"
        assert {row["epsilon"] for row in turn.rows} == {turn.metrics["epsilon"]}


def test_cohorts_drawn_by_chance_vary_and_an_empty_one_is_noised_like_any_other():
    turns = play("dp-fedavg:noise_multiplier=1", participation=0.15, count=12)
    sizes = {len(turn.metrics["cohort"]) for turn in turns}
    assert 0 in sizes
    assert len(sizes) > 1
    assert all(not (v == turn.server[k]).any() for turn in turns for k, v in turn.next_server.items())


def test_the_noise_for_a_target_keeps_it_and_a_run_beyond_its_budget_stands_still():
    turns = play("dp-fedavg:epsilon=5", count=3)
    assert 4.5 < turns[-1].metrics["epsilon"] <= 5
    turns = play("dp-fedavg:epsilon=10,noise_multiplier=1,sampling=fixed", count=6)
    assert turns[-1].metrics["epsilon"] <= 10
    assert turns[-1].metrics["stopped"] == [0, 1, 2, 3]
    assert toys.same(turns[-1].server, turns[-1].next_server)


def test_strong_noise_on_two_clients_stays_finite():
    turns = play("dp-fedavg:noise_multiplier=1.1,bound=0.1", count=4, data=toys.dataset([8, 8]))
    assert all(torch.isfinite(v).all() for turn in turns for v in turn.next_server.values())


def test_two_runs_with_one_seed_have_different_noise_and_a_resumed_one_has_the_same():
    def federated(**options: Any) -> Federated:
        return Federated(toys.setup("fedavg", defense=["dp-fedavg:noise_multiplier=1"], **options))

    one, other = federated(), federated()
    for run in (one, other):
        run.advance()
    assert not torch.equal(one.server["head.bias"], other.server["head.bias"])
    state = one.state()
    saved = replace(state, states=dict(state.states), last_trained=dict(state.last_trained))
    other.restore(saved)
    again, straight = other.advance()[0], one.advance()[0]
    assert toys.same(one.server, other.server)
    assert again["epsilon"] == straight["epsilon"]


def test_the_record_of_a_run_says_whom_the_guarantee_covers():
    made = toys.setup("fedavg", defense=["dp-fedavg:noise_multiplier=1"], participation=0.5)
    said = privacy.describe(made)
    assert (said["unit"], said["guarantee"]) == ("user", "formal: (epsilon, delta) for whole clients")
    assert "server is trusted" in said["adversary"]
    assert said["coverage"] == {"body.*": "covered", "head.*": "covered", "num_samples": "not used"}
    record = privacy.describe(toys.setup("fedavg", defense=["dp-sgd:noise_multiplier=1"]))
    assert record["unit"] == "record"
    fixed = toys.setup("fedavg", defense=["dp-fedavg:noise_multiplier=1,sampling=fixed"], participation=0.5)
    assert privacy.describe(fixed)["guarantee"].startswith("none: cohorts of one size")


@pytest.mark.parametrize("defense", [[], ["gaussian:std=1"], ["clip", "laplace"], ["secagg"]])
def test_there_is_no_epsilon_without_a_mechanism(defense: list[str]):
    made = toys.setup("fedavg", defense=defense)
    assert privacy.describe(made) == {"enabled": False, "coverage": {}}
    metrics = toys.rounds(made, 1)[0].metrics
    assert metrics["epsilon"] is None
    assert metrics["epsilon_unit"] is None


def test_a_method_whose_server_needs_single_uploads_is_refused_by_what_its_server_step_does():
    for key, why in (
        ("fedamp", "a model of its own"),
        ("fedproto", "own prototype"),
        ("fedmtl", "does not count from"),
    ):
        with pytest.raises(PrivacyError, match=f"{key} cannot be trained under secagg.*{why}"):
            Federated(toys.setup(key, defense=["secagg"]))
    with pytest.raises(PrivacyError, match=r"fedbabu cannot be trained under dp-fedavg.*who took part"):
        Federated(toys.setup("fedbabu", defense=["dp-fedavg:noise_multiplier=1"]))
    Federated(toys.setup("fedbabu", defense=["secagg"]))


def test_a_server_step_that_does_more_than_add_up_is_found_out():
    class Median(FedAvg):
        """FedAvg with the median over clients in place of the mean."""

        key = "median"

        def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
            return {k: torch.stack([up[k] for up in ups.values()]).median(0).values for k in server}

    with pytest.raises(PrivacyError, match="does more with its clients' uploads than add them up"):
        Federated(toys.setup(Median, defense=["secagg"]))


def test_a_round_with_too_few_uploads_is_lost():
    turn = play("secagg:least=3", count=1, drop_rate=0.5)[0]
    assert turn.metrics["lost"] == [0, 1, 2, 3]
    assert toys.same(turn.server, turn.next_server)
    assert all(toys.same(turn.states[c], turn.next_states[c]) for c in turn.states)


def test_nothing_of_a_single_client_is_captured_where_the_server_sees_sums():
    made = toys.setup("fedavg", defense=["secagg"])
    assert made.config.captured_rounds() == []

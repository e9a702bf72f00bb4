"""What scores of membership are worth: planted ones first, then who is drawn as a candidate."""

import numpy as np
import pytest
import torch

from pflsec.core.errors import RunError
from pflsec.core.vault import VaultWriter
from pflsec.leakage import membership
from pflsec.leakage.vault import Outsiders, Truth, Vault

CLIENTS, EACH = 8, 10


def planted(of, others: int = EACH) -> list[dict]:
    """Return rows of victims, two a client, with EACH members and others; of(member, rng) gives a score."""
    rng = np.random.default_rng(3)
    return [
        {"victim": f"r0-c{client}-v{v}", "client": client, "candidate": i, "member": member, "s": repr(of(member, rng))}
        for client in range(CLIENTS)
        for v in range(2)
        for i, member in enumerate([True] * EACH + [False] * others)
    ]


def worth(rows: list[dict]) -> dict:
    return membership.summary(rows)["s"]


def test_scores_that_separate_perfectly_are_found_perfect():
    found = worth(planted(lambda member, rng: float(member) + 0.1 * rng.random()))
    assert (found["auc"], found["auc_low"], found["auc_high"], found["tpr_1pct"]) == (1, 1, 1, 1)
    assert found["verdict"] == "above chance"
    assert (found["n_victims"], found["n_clients"], found["n_members"], found["n_others"]) == (16, 8, 160, 160)


def test_scores_the_wrong_way_round_are_flagged():
    found = worth(planted(lambda member, rng: -float(member) + 0.1 * rng.random()))
    assert (found["auc"], found["auc_high"], found["tpr_1pct"]) == (0, 0, 0)
    assert found["verdict"] == "below chance"


def test_scores_at_random_are_not_distinguishable_from_chance():
    found = worth(planted(lambda member, rng: rng.random()))
    assert found["auc_low"] < 0.5 < found["auc_high"]
    assert 0.35 < found["auc"] < 0.65
    assert found["verdict"] == "not distinguishable from chance"


def test_an_overlap_lies_in_between_and_its_interval_around_it():
    found = worth(planted(lambda member, rng: rng.normal() + member))
    assert found["auc"] == pytest.approx(0.76, abs=0.07)  # P(N(1, 2) > 0)
    assert found["auc_low"] < found["auc"] < found["auc_high"]
    assert found["auc_low"] > 0.5


def test_equal_scores_are_worth_a_coin():
    member = np.array([True, False, True, False])
    assert membership.auc(member, np.zeros(4)) == 0.5
    assert membership.tpr_at(member, np.zeros(4), 0.01) == 0


@pytest.mark.parametrize("seed", range(20))
def test_auc_and_rates_equal_counts_over_all_pairs_and_thresholds(seed: int):
    rng = np.random.default_rng(seed)
    member, score = rng.random(60) < 0.3, rng.integers(0, 12, 60) / 4
    score[rng.random(60) < 0.1] = -np.inf
    pairs = [(m > o) + 0.5 * (m == o) for m in score[member] for o in score[~member]]
    assert membership.auc(member, score) == pytest.approx(np.mean(pairs), abs=1e-12)
    for level in (0.0, 0.01, 0.1, 0.5, 1.0):
        allowed = [
            np.mean(score[member] >= t) for t in [np.inf, *np.unique(score)] if np.mean(score[~member] >= t) <= level
        ]
        assert membership.tpr_at(member, score, level) == pytest.approx(max(allowed), abs=1e-12)


@pytest.mark.parametrize("member", [[True, True], [False, False]])
def test_without_both_kinds_there_is_no_curve(member: list[bool]):
    with pytest.raises(ValueError, match="members and others"):
        membership.roc(np.array(member), np.zeros(2))


def test_a_rate_of_a_thousandth_needs_a_thousand_others():
    score = lambda member, rng: rng.normal() + member  # noqa: E731
    few, enough = worth(planted(score)), worth(planted(score, others=63))
    assert few["tpr_01pct"] is None
    assert enough["n_others"] == 1008
    assert enough["tpr_01pct_low"] <= enough["tpr_01pct"] <= enough["tpr_01pct_high"]


def test_few_victims_and_one_client_get_no_interval_but_the_reason():
    rows = planted(lambda member, rng: rng.random())
    few = worth([row for row in rows if row["client"] < 2])
    assert (few["note"], few["verdict"], few["auc_low"]) == ("n too small", "n too small", None)
    one = worth([row | {"client": 0} for row in rows])
    assert one["verdict"] == "one client only"


def test_order_of_rows_makes_no_difference_to_the_numbers():
    rows = planted(lambda member, rng: rng.normal() + member)
    rows = [row for row in rows if row["client"] < 3]
    first, again = worth(rows), worth(rows[::-1])
    assert (again["auc"], again["tpr_1pct"], again["verdict"]) == (first["auc"], first["tpr_1pct"], first["verdict"])


# --- candidates


def outsiders(labels: list[int], clients: list[int]) -> Outsiders:
    x = torch.randn(len(labels), 1, 2, 2, generator=torch.Generator().manual_seed(1))
    return Outsiders(x, torch.tensor(labels), torch.arange(len(labels)) + 100, torch.tensor(clients))


def batch(*labels: int) -> Truth:
    x = torch.randn(len(labels), 1, 2, 2, generator=torch.Generator().manual_seed(0))
    return Truth(x, torch.tensor(labels), torch.arange(len(labels)), {}, 0.0)


def drawn(truth: Truth, others: Outsiders, client: int = 1, seed: int = 0) -> membership.Candidates | None:
    return membership.candidates(truth, others, client, torch.Generator().manual_seed(seed))


def test_candidates_are_the_batch_and_the_clients_own_outsiders_of_its_classes():
    found = drawn(batch(0, 2), outsiders([0, 1, 2, 0, 2], [1, 1, 1, 1, 7]))
    assert found is not None
    assert sorted(found.dataset_index.tolist()) == [0, 1, 100, 102, 103]
    assert found.dataset_index[found.member].sort().values.tolist() == [0, 1]
    assert set(found.y.tolist()) == {0, 2}


def test_other_clients_help_out_and_nobody_is_asked_about_other_classes():
    found = drawn(batch(0), outsiders([1, 0], [1, 7]))
    assert found is not None
    assert sorted(found.dataset_index.tolist()) == [0, 101]
    assert drawn(batch(0), outsiders([1, 2], [1, 7])) is None


def test_a_member_is_never_also_an_outsider():
    truth, others = batch(0), outsiders([0, 0], [1, 1])
    others.x[0] = truth.x[0]
    found = drawn(truth, others)
    assert found is not None
    assert sorted(found.dataset_index.tolist()) == [0, 101]


def test_the_attackers_seed_shuffles_them_and_members_keep_their_place():
    truth, others = batch(0, 0), outsiders([0] * 20, [1] * 20)
    first, again, other = drawn(truth, others), drawn(truth, others), drawn(truth, others, seed=1)
    assert first is not None
    assert again is not None
    assert other is not None
    assert torch.equal(first.x, again.x)
    assert not torch.equal(first.member, other.member)
    for found in (first, other):
        for x, index, member in zip(found.x, found.dataset_index.tolist(), found.member.tolist(), strict=True):
            assert torch.equal(x, truth.x[index] if member else others.x[index - 100])


# --- the vault


def test_outsiders_come_back_as_written_and_an_older_run_is_told_what_to_do(tmp_path):
    vault = Vault(tmp_path / "old" / "vault")
    with pytest.raises(
        RunError, match=r"run 'old' has no images from outside.*Train again with --capture-rounds"
    ) as refusal:
        vault.outsiders()
    assert "\n" not in str(refusal.value)
    x, numbers = torch.randn(3, 1, 2, 2), torch.arange(3)
    VaultWriter(vault.folder).outsiders(x, numbers, numbers + 5, numbers + 9)
    found = vault.outsiders()
    assert torch.equal(found.x, x)
    assert (found.y.tolist(), found.dataset_index.tolist()) == ([0, 1, 2], [5, 6, 7])
    assert found.client.tolist() == [9, 10, 11]
    VaultWriter(vault.folder).outsiders(x, numbers, numbers[:2], numbers)
    with pytest.raises(RunError, match=r"outsiders\.safetensors: 'dataset_index' is .*int64 \[3\]"):
        vault.outsiders()

"""Cases T9: what an account of privacy says, and what it must not say."""

import warnings
from pathlib import Path
from typing import Any

import pytest

from pflsec.core.errors import PflsecWarning, PrivacyError
from pflsec.core.files import append_line, to_json
from pflsec.defenses import accounting
from pflsec.reports import grids, tables
from pflsec.reports.load import load_run
from pflsec.runtime import privacy
from pflsec.runtime.defending import parse_defense
from pflsec.runtime.rounds import Federated
from tests import toys
from tests.reports.runs import round_of, write_run


def federated(defense: str, **options: Any) -> Federated:
    return Federated(toys.setup("fedavg", defense=[defense], dp_seed=5, **options))


@pytest.mark.parametrize("epsilon", [None, 7.5])
def test_u102_the_report_has_an_epsilon_where_there_is_a_mechanism_alone(tmp_path: Path, epsilon: float | None):
    run = write_run(tmp_path / "run", accuracies=())
    append_line(run / "metrics.jsonl", to_json(round_of(0, 0.5) | {"epsilon": epsilon}, indent=None))
    rows = tables.records(tables.accuracy_table([load_run(run)]))
    assert [row["epsilon"] for row in rows] == [epsilon, epsilon]
    assert ("epsilon" in [head for head, _ in grids.accuracy(rows).heads]) == (epsilon is not None)


@pytest.mark.parametrize("defense", ["dp-sgd:noise_multiplier=1", "dp-fedavg:noise_multiplier=1"])
def test_u106_reading_epsilon_between_rounds_does_not_change_it(defense: str):
    read, unread = (federated(defense, participation=0.5) for _ in range(2))
    for _ in range(3):
        before, again = (read.users.epsilon() if read.users else read.ledger.epsilon(1) for _ in range(2))  # type: ignore[union-attr]
        assert before == again
        read.advance()
        unread.advance()
    assert read.advance()[0]["epsilon"] == unread.advance()[0]["epsilon"] > 0
    assert read.state().facts == unread.state().facts


def test_u107_shuffled_batches_are_no_poisson_samples_and_say_so():
    said = {
        sampling: privacy.describe(
            toys.setup("fedavg", defense=[f"dp-sgd:noise_multiplier=1,sampling={sampling}"], dp_seed=1)
        )["guarantee"]
        for sampling in ("poisson", "shuffle")
    }
    assert said["poisson"].startswith("formal")
    assert said["shuffle"].startswith("none")
    assert accounting.epsilon([(1.0, 1.0, 10)], 1e-5) == pytest.approx(19.05, abs=0.01)  # all rows in every step


def test_u108_clients_that_are_drawn_with_unequal_chances_are_not_accounted():
    settings = {"sampling": "by_size", "weighting": "uniform"}
    with pytest.raises(PrivacyError, match="unequal chances, which the account of dp-fedavg does not know"):
        Federated(toys.setup("fedprox", defense=["dp-fedavg:noise_multiplier=1"], settings=settings))
    Federated(toys.setup("fedprox", defense=["dp-fedavg:noise_multiplier=1"]))


def test_u109_the_normaliser_is_the_expected_batch_and_tiny_clients_are_warned_about():
    """100 rows in batches of 16 are 7 steps an epoch: sample rate 1/7, 14 rows expected."""
    guard: Any = parse_defense("dp-sgd:noise_multiplier=1").guard(100, 16, 1.0, "case")  # type: ignore[attr-defined]
    assert (guard.rate, guard.expected_batch) == (1 / 7, 14)
    with pytest.warns(PflsecWarning, match=r"1 clients have no more samples than a batch .* \(first: client 2\)"):
        federated("dp-sgd:noise_multiplier=1", batch_size=4)  # 5, 8, 3 and 8 rows
    with warnings.catch_warnings():
        warnings.simplefilter("error", PflsecWarning)
        federated("dp-sgd:noise_multiplier=1", batch_size=2)

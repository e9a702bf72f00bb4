"""Cases T12: what is said of a number."""

import json
import math
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pflsec.core.statistics import paired_difference
from pflsec.reports import frontier, grids
from pflsec.reports.load import load_runs
from pflsec.reports.tables import leakage_table, records
from tests.reports.runs import CAPTURES, score, write_attack, write_run


@pytest.mark.parametrize(("mean", "verdict"), [(-0.001, "not distinguishable from 0"), (-0.1, "lower")])
def test_u131_a_negative_advantage_is_told_from_none_by_its_interval(mean: float, verdict: str):
    """1000 victims of 50 clients, advantages of standard deviation 0.1 about their mean."""
    draws = np.random.default_rng(0).standard_normal(1000)
    advantage = mean + 0.1 * (draws - draws.mean()) / draws.std()
    found = paired_difference(advantage, np.zeros(1000), [i % 50 for i in range(1000)])
    assert found["mean"] == pytest.approx(mean)
    assert found["verdict"] == verdict
    low, high = found["ci"]
    assert (low <= 0 <= high) == (verdict != "lower")


SUM = "the sum over clients 0, 1, 2"


def attacked(
    path: Path, adversary: str = "server", reason: str = "", defense: list[str] | None = None, **changes: Any
) -> Path:
    run = write_run(path, **changes)
    manifest = json.loads((run / "run.json").read_text())
    manifest["config"]["defense"] = defense or []
    (run / "run.json").write_text(json.dumps(manifest))
    write_attack(run, [score(run, c, adversary=adversary, reason=reason) for c in CAPTURES])
    return run


def said(*runs: Path, x: str = "leakage") -> str:
    return " ".join(frontier.measure(load_runs(runs), x=x).cautions)


def test_u071_a_sum_over_clients_says_so_and_stands_beside_single_uploads_with_a_caution(tmp_path: Path):
    single, summed = attacked(tmp_path / "one"), attacked(tmp_path / "all", "server-secagg", SUM)
    rows = records(leakage_table(load_runs([single, summed])))
    assert [row["summed"] for row in rows] == [1, 3]
    assert [row[5] for row in grids.leakage(rows).rows] == ["probe", "probe: a sum over 3 clients"]
    assert "Not everything is equal here: adversary." in said(single, summed)
    assert "not comparable: one: single uploads; all: a sum over 3 clients." in said(single, summed)
    other = attacked(tmp_path / "other", "server-secagg", SUM)
    assert "comparable" not in said(single)
    assert "comparable" not in said(summed, other)


def test_u071_probes_and_real_uploads_stand_side_by_side_with_a_caution(tmp_path: Path):
    probes = attacked(tmp_path / "probes")
    real = write_run(tmp_path / "real", captures=(updates := [c.replace("probe", "update") for c in CAPTURES]))
    write_attack(real, [score(real, c) for c in updates])
    assert "Not everything is equal here: kind of captures." in said(probes, real)


@pytest.mark.parametrize(("guarantee", "x"), [("none: clipping alone", math.inf), ("formal", 7.5)])
def test_u107_an_epsilon_that_guarantees_nothing_is_infinite(tmp_path: Path, guarantee: str, x: float):
    dp = {"enabled": True, "unit": "record", "guarantee": guarantee, "test_seed": False}
    run = attacked(tmp_path / "a", defense=["dp-sgd:noise_multiplier=1"], dp=dp)
    lines = [json.loads(line) | {"epsilon": 7.5} for line in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (point,) = frontier.measure(load_runs([run]), x="epsilon").points
    assert point.x == x
    assert (point.epsilon is None) == (guarantee != "formal")


@pytest.mark.parametrize("x", ["leakage", "epsilon"])
def test_u132_a_frontier_says_that_a_method_lacks_its_point_without_a_defense(tmp_path: Path, x: str):
    defended = attacked(tmp_path / "a b", defense=["fp16"])
    text = said(defended, x=x)
    assert "The point of fedrep without a defense is missing" in text
    command = shlex.split(text.partition("train it with: ")[2].removesuffix("."))
    assert command[:4] == ["pflsec", "train", "--algo", "fedrep"]
    assert command[-2:] == ["--name", "a b-undefended"]
    assert "--lr" in command
    assert "--defense" not in command
    bare = attacked(tmp_path / "bare")
    assert "without a defense is missing" not in said(defended, bare, x=x)


def test_u132_a_point_without_a_defense_that_has_no_coordinates_is_missing_for_a_reason(tmp_path: Path):
    defended, bare = attacked(tmp_path / "a", defense=["fp16"]), write_run(tmp_path / "bare")
    assert "have no reference; bare: it has not been attacked." in said(defended, bare)

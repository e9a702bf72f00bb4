"""The verdict's numbers and words against computation by hand, on scores made up for it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pflsec.audit import verdict
from pflsec.audit.verdict import CellRun
from pflsec.reports.load import load_run
from tests.reports.runs import CAPTURES, manifest, score, wire, write_attack, write_run

Psnr = Callable[[int], float | None]
"""Client -> PSNR of all its victims."""


def run(path: Path, psnr: Psnr, label: str = "mine", seed: int = 0, **changes: Any) -> CellRun:
    """Return a run whose victims have these PSNRs under dlg: 3 clients with 4 victims each, blind guess 12 dB."""
    cells = changes.pop("cells", {})
    captures = changes.pop("captures", CAPTURES)
    folder = write_run(path, captures=captures, algo=label, **changes)
    rows = [
        score(folder, c, psnr=psnr(int(c[6:8])), dataset_index=str(int(c[6:8]) * 10 + int(c[10])), **cells)
        for c in captures
    ]
    write_attack(folder, rows)
    return CellRun(label, "method", "none", seed, load_run(folder))


def leak(a: CellRun, b: CellRun) -> tuple[dict[str, Any], str]:
    found = verdict.compare([a], [b])
    return found["leakage"][0], found["words"][1]


# The interval resamples three clients. Of the 27 equally likely draws, one has the lowest client three times and one the
# highest: each has probability 1/27 > 0.025, so the 2.5 % and 97.5 % quantiles are these clients' own differences.


def test_less_leakage_by_hand(tmp_path: Path):
    ours, theirs = run(tmp_path / "a", lambda c: 20.0 + c), run(tmp_path / "b", lambda c: 30.0 + 11 * c, "fedavg")
    found, said = leak(ours, theirs)
    assert (found["mean"], found["low"], found["high"], found["n"]) == (-20.0, -30.0, -10.0, 12)
    assert said == "leaks less than fedavg under dlg: -20.0 dB [-30.0, -10.0], n = 12"
    assert leak(theirs, ours)[1] == "leaks more than mine under dlg: +20.0 dB [10.0, 30.0], n = 12"


def test_an_interval_about_zero_distinguishes_nothing(tmp_path: Path):
    ours, theirs = run(tmp_path / "a", lambda c: 20.0 + 10 * c), run(tmp_path / "b", lambda c: 30.0, "fedavg")
    assert leak(ours, theirs)[1] == "not distinguishable from fedavg under dlg: +0.0 dB [-10.0, 10.0], n = 12"


def test_equal_victims_are_said_to_be_equal(tmp_path: Path):
    ours, theirs = run(tmp_path / "a", lambda c: 25.0), run(tmp_path / "b", lambda c: 25.0, "fedavg")
    assert leak(ours, theirs)[1].startswith("leaks exactly as much as fedavg under dlg, for every victim: +0.0 dB")


def test_too_few_victims_have_no_interval(tmp_path: Path):
    few = CAPTURES[:4]
    ours = run(tmp_path / "a", lambda c: 20.0, captures=few)
    theirs = run(tmp_path / "b", lambda c: 30.0, "fedavg", captures=few)
    assert leak(ours, theirs)[1] == "-10.0 dB against fedavg under dlg, n = 4: n too small for an interval"


def test_one_client_has_no_interval(tmp_path: Path):
    one = [f"r{t:03d}-c00-v{v}-probe" for t in (0, 1, 2) for v in (0, 1)]
    ours = run(tmp_path / "a", lambda c: 20.0, captures=one)
    theirs = run(tmp_path / "b", lambda c: 30.0, "fedavg", captures=one)
    assert leak(ours, theirs)[1] == "-10.0 dB against fedavg under dlg, n = 6: one client only, so no interval"


def test_victims_are_paired_by_what_they_are_and_not_by_their_order(tmp_path: Path):
    ours = run(tmp_path / "a", lambda c: 20.0 + c, captures=tuple(reversed(CAPTURES)))
    theirs = run(tmp_path / "b", lambda c: 20.0 + c, "fedavg")
    assert leak(ours, theirs)[0]["equal"]


def test_other_images_are_no_pairs(tmp_path: Path):
    ours = run(tmp_path / "a", lambda c: 20.0)
    folder = write_run(tmp_path / "b", algo="fedavg")
    write_attack(folder, [score(folder, c, dataset_index="999") for c in CAPTURES])
    found, said = leak(ours, CellRun("fedavg", "baseline", "none", 0, load_run(folder)))
    assert (found["n"], found["alone"]) == (0, 24)
    assert said.startswith("no victim has a score on both sides under dlg")


def test_victims_without_a_score_or_a_valid_attack_are_left_out_and_counted(tmp_path: Path):
    ours = run(tmp_path / "a", lambda c: None if c == 0 else 20.0)
    theirs = run(tmp_path / "b", lambda c: 30.0, "fedavg")
    found, said = leak(ours, theirs)
    assert (found["mean"], found["n"], found["alone"]) == (-10.0, 8, 4)
    assert said.endswith("4 more victims have a score on one side only")
    invalid = run(tmp_path / "c", lambda c: 20.0, cells={"attack_valid": False})
    assert leak(invalid, theirs)[0]["n"] == 0


def test_a_difference_below_the_blind_guess_is_said_to_say_little(tmp_path: Path):
    ours, theirs = run(tmp_path / "a", lambda c: 5.0), run(tmp_path / "b", lambda c: 10.0, "fedavg")
    assert "nothing on either side is above a blind guess" in leak(ours, theirs)[1]
    above = run(tmp_path / "c", lambda c: 13.0, "fedavg")
    assert "blind guess" not in leak(ours, above)[1]


def test_seeds_are_resampled_before_clients_and_never_mixed(tmp_path: Path):
    """Victims of two seeds are other images, even where all numbers of a key but the seed agree."""
    ours = [run(tmp_path / f"a{s}", lambda c, s=s: 20.0 + s, seed=s) for s in (0, 1)]
    theirs = [run(tmp_path / f"b{s}", lambda c, s=s: 20.0 + 3 * s, "fedavg", seed=s) for s in (0, 1)]
    found = verdict.difference(ours, theirs, "dlg")
    assert (found["mean"], found["n"]) == (-1.0, 24)  # 0 dB for seed 0, -2 dB for seed 1
    assert (found["low"], found["high"]) == (-2.0, 0.0)  # both seeds alike: probability 1/4 each
    assert found["verdict"] == "not distinguishable from 0"


def test_accuracy_is_the_mean_over_seeds_of_the_last_tested_round(tmp_path: Path):
    ours = [run(tmp_path / f"a{s}", lambda c: 20.0, seed=s, accuracies=(0.1, 0.6 + s / 10)) for s in (0, 1)]
    theirs = [run(tmp_path / f"b{s}", lambda c: 20.0, "fedavg", seed=s, accuracies=(0.9, 0.5, None)) for s in (0, 1)]
    found = verdict.accuracies(ours, theirs)
    assert (found["method"], found["baseline"]) == (pytest.approx(0.65), pytest.approx(0.5))
    assert found["difference"] == pytest.approx(0.15)
    assert "+15.0 points (2 seeds; by seed +10.0, +20.0)" in found["words"]


def test_the_worst_attack_and_its_excess_by_hand(tmp_path: Path):
    one = run(tmp_path / "a", lambda c: 32.0 + 10 * c)  # 20, 30, 40 dB over the blind guess
    found = verdict.alone([one])
    assert (found["attack"], found["psnr_median"]) == ("dlg", 42.0)
    said = "median PSNR 42.0 dB, +30.0 dB over a blind guess [20.0, 40.0], n = 12: its messages leak"
    assert found["words"].endswith(f"{said}; the victim rebuilt best: 52.0 dB (dlg)")
    below = verdict.alone([run(tmp_path / "b", lambda c: 5.0 + c)])
    assert "below a blind guess; a stronger attack may find more" in below["words"]


def test_what_sends_nothing_is_not_compared_in_leakage(tmp_path: Path):
    silent = [wire("private", "body.*", 6, 183680)]
    control = run(
        tmp_path / "b", lambda c: None, "local", cells={"status": "not-applicable", "reason": "empty"}, wire=silent
    )
    found = verdict.compare([run(tmp_path / "a", lambda c: 20.0)], [control])
    assert found["leakage"] == []
    assert found["words"][-1] == "local sends nothing, so there is no leakage to compare"
    assert "nothing can leak this way" in verdict.alone([control])["words"]


def test_a_guarantee_is_told_from_the_runs_own_facts(tmp_path: Path):
    dp = {
        "enabled": True,
        "guarantee": "formal: (epsilon, delta) for single records",
        "adversary": "everybody who sees the messages",
        "noise_multiplier": {"least": 1.5, "most": 2.5},
        "delta": {"least": 1e-5, "most": 1e-5},
        "coverage": {"body.*": "covered", "num_samples": "public, by assumption"},
        "test_seed": True,
    }
    one = run(tmp_path / "a", lambda c: 20.0, dp=dp)
    said = verdict.privacy([CellRun("mine", "method", "dp-sgd:epsilon=8", 0, one.data)])["words"]
    assert "mine under dp-sgd:epsilon=8" in said
    for word in ("delta 1e-05", "1.5 to 2.5", "formal", "num_samples (public, by assumption)", "there is no guarantee"):
        assert word in said


def test_the_whole_verdict_has_its_limits_in_words(tmp_path: Path):
    ours, theirs = run(tmp_path / "a", lambda c: 20.0 + c), run(tmp_path / "b", lambda c: 30.0 + c, "fedavg")
    found = verdict.judge("mine", [ours, theirs])
    text = verdict.markdown("x", found)
    for part in ("Verdict", "Each method alone", "Threat model", "What was not tested", "Take care"):
        assert f"## {part}" in text
    for word in (
        "leaks less than fedavg",
        "Adversaries that were not tried",
        "larger ones were not tried",
        "Fewer than 20",
    ):
        assert word in text
    assert "Failed" not in text


def test_without_a_baseline_nothing_is_claimed(tmp_path: Path):
    found = verdict.judge("mine", [run(tmp_path / "a", lambda c: 20.0)])
    assert "nothing to compare" in verdict.markdown("x", found)
    assert verdict.judge("mine", [])["untested"] == ["No cell was finished, so everything is open."]


def test_the_manifest_of_these_tests_sends_something():
    assert any(row["direction"] == "up" for row in manifest("x")["wire"])

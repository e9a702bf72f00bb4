"""Tables against numbers worked out by hand."""

import math
from pathlib import Path

import pandas as pd
import pytest

from pflsec.core.files import read_json, write_json
from pflsec.reports import controls, grids, words
from pflsec.reports.groups import by_seed
from pflsec.reports.load import RunData, load_run, load_runs
from pflsec.reports.tables import (
    accuracy_table,
    configuration_table,
    headline_table,
    leakage_table,
    privacy_table,
    records,
    rounds_table,
    victims_table,
    wire_table,
)
from tests.reports.runs import CAPTURES, not_applicable, score, write_attack, write_run


def leakage_of(path, rows, **changes):
    write_attack(path, rows, **changes)
    return records(leakage_table([load_run(path)]))


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "fedrep")


def test_accuracy_of_the_final_and_the_best_round(run):
    """Rounds reach 0.5, 0.75, 0.7: final is round 2, best round 1; 3 rounds of 1.5 MB up and 2 MB down."""
    final, best = records(accuracy_table([load_run(run)]))
    assert (final["at"], final["round"], best["at"], best["round"]) == ("final", 2, "best", 1)
    assert [final[k] for k in ("mean", "weighted", "std", "worst10")] == pytest.approx([0.7, 0.75, 0.1, 0.45])
    assert [best[k] for k in ("mean", "weighted", "std", "worst10")] == pytest.approx([0.75, 0.8, 0.1, 0.5])
    assert final["global"] == best["global"] == "none"
    assert (final["mb_up"], final["mb_down"], final["rounds"], final["rounds_planned"]) == (4.5, 6.0, 3, 3)
    assert (final["epsilon"], final["defense"], final["family"]) == (None, "none", "model_splitting")


def test_accuracy_with_a_global_model_and_rounds_without_a_test(tmp_path):
    path = write_run(tmp_path / "fedavg", accuracies=(0.5, None, 0.6, None), common=0.4)
    final, best = records(accuracy_table([load_run(path)]))
    assert (final["round"], final["mean"], final["global"], best["round"]) == (2, 0.6, 0.4, 2)
    assert (final["rounds"], final["rounds_planned"]) == (4, 3)


def test_a_run_without_a_tested_round_has_one_row_without_numbers(tmp_path):
    path = write_run(tmp_path / "young", accuracies=())
    (row,) = records(accuracy_table([load_run(path)]))
    assert (row["mean"], row["global"], row["round"], row["rounds"], row["mb_up"]) == (None, None, None, 0, 0.0)


def test_leakage_by_hand(run):
    """PSNR 10 20 30 40 inf 5: capped at 100 the sum is 205, the middle pair 20 and 30; 4 of 6 reach 20 dB.

    The last attack diverged: a failure, which counts like the others. Two more victims cannot speak: they stand in no number,
    and are counted apart with their reasons.

    Wilson for 4 of 6: centre (4/6 + z2/12)/(1 + z2/6), z2 = 3.841459: 0.601611, half width 0.301618.
    """
    psnr = (10.0, 20.0, 30.0, 40.0, math.inf, 5.0)
    rows = [score(run, c, psnr=p) for c, p in zip(CAPTURES[:6], psnr, strict=True)]
    rows[5] |= {"identified": 0.0, "label_correct": 0.0, "ssim": 0.3, "status": "diverged"}
    rows.append(score(run, CAPTURES[6], psnr=3.0, attack_valid=False, reason="the replay misses"))
    rows.append(not_applicable(run, CAPTURES[7], "51 local steps") | {"attack_valid": False})
    (row,) = leakage_of(run, rows)
    assert (row["victims"], row["clients"], row["failures"], row["not_applicable"]) == (6, 3, 1, 0)
    assert (row["not_valid"], row["not_valid_reasons"]) == (2, "51 local steps; the replay misses")
    assert (row["psnr_median"], row["psnr_mean"], row["psnr_max"]) == pytest.approx((25.0, 205 / 6, 100.0))
    assert (row["psnr_q25"], row["psnr_q75"], row["psnr_blind"]) == pytest.approx((12.5, 37.5, 12.0))
    assert row["excess_mean"] == pytest.approx(205 / 6 - 12)
    assert (row["success"], row["identified"], row["label_accuracy"]) == pytest.approx((4 / 6, 5 / 6, 5 / 6))
    assert (row["success_low"], row["success_high"]) == pytest.approx((0.299993, 0.903229), abs=1e-6)
    assert row["ssim"] == pytest.approx((5 * 0.9 + 0.3) / 6)
    assert (row["lpips"], row["lpips_status"], row["rate_note"]) == (None, "weights-missing", "")


def test_the_interval_draws_whole_clients(run):
    """Two clients, always 10 and 20 dB above blind: two drawn clients have means 10, 15 or 20, the ends 1/4 each.

    Victims drawn one by one would give a narrower interval.
    """
    chosen = [c for c in CAPTURES if "-c02-" not in c]
    rows = [score(run, c, psnr=12.0 + (10 if "-c00-" in c else 20)) for c in chosen]
    (row,) = leakage_of(run, rows)
    assert (row["victims"], row["excess_mean"]) == (8, 15.0)
    assert (row["excess_low"], row["excess_high"], row["excess_note"]) == (10.0, 20.0, "")


def test_one_client_alone_gives_no_interval(run):
    captures = [f"r{t:03d}-c00-v0-probe" for t in range(6)]
    other = write_run(run.parent / "other", captures=captures)
    (row,) = leakage_of(other, [score(other, c) for c in captures])
    assert (row["excess_low"], row["excess_note"], row["rate_note"]) == (None, "one client only", "")


def test_below_five_victims_there_are_no_intervals(run):
    (row,) = leakage_of(run, [score(run, c) for c in CAPTURES[:4]])
    assert (row["victims"], row["excess_mean"]) == (4, 18.0)
    assert [row[k] for k in ("excess_low", "success_low", "identified_low")] == [None] * 3
    assert row["excess_note"] == row["rate_note"] == "n too small"


def test_victims_without_anything_to_attack_are_counted_with_their_reason(run):
    rows = [score(run, c) for c in CAPTURES[:8]]
    rows += [not_applicable(run, c, "no bias on the wire") for c in CAPTURES[8:11]]
    rows += [not_applicable(run, CAPTURES[11], "")]
    (row,) = leakage_of(run, rows)
    assert (row["victims"], row["not_applicable"], row["hidden"]) == (8, 4, "joint")
    assert row["reasons"] == "no bias on the wire; no reason given"
    assert (row["psnr_mean"], row["identified"]) == (30.0, 1.0)


def test_an_attack_that_never_applied_has_a_row_without_numbers(run):
    (row,) = leakage_of(run, [not_applicable(run, c, "nothing is sent") for c in CAPTURES])
    assert (row["victims"], row["not_applicable"], row["reasons"]) == (0, 12, "nothing is sent")
    assert [row[k] for k in ("psnr_median", "excess_mean", "identified", "success", "ssim")] == [None] * 5
    assert row["excess_note"] == "no reconstruction"


def test_labels_alone_are_leakage_without_an_image(run):
    rows = [score(run, c, psnr=None, identified=None, ssim=None, ssim_variant="no-reconstruction") for c in CAPTURES]
    (row,) = leakage_of(run, rows)
    assert (row["victims"], row["psnr_median"], row["success"]) == (12, None, None)
    assert row["label_accuracy"] == 1.0


def test_treatments_of_private_items_are_rows_and_those_of_labels_are_not(run):
    rows = [score(run, c, hidden="log" if c.startswith("r000") else "joint") for c in CAPTURES]
    rows[0]["labels"] = "optimise"
    first, second = leakage_of(run, rows)
    assert (first["hidden"], first["victims"], first["labels"]) == ("joint", 6, "restore")
    assert (second["hidden"], second["victims"], second["labels"]) == ("log", 6, "optimise, restore")


def test_batches_count_once_each(tmp_path):
    run = write_run(tmp_path / "fedrep", batch=3)
    rows = [score(run, c, batch=3, label_true="0 1 2", label_found="0 1 5", label_correct=2 / 3) for c in CAPTURES]
    (row,) = leakage_of(run, rows)
    assert (row["victims"], row["batch"], row["label_accuracy"]) == (12, 3, pytest.approx(2 / 3, abs=1e-5))


def test_victims_come_under_the_runs_name_and_the_attacks_id(run):
    write_attack(run, [score(run, c) | {"run": "another"} for c in CAPTURES])
    table = victims_table([load_run(run)])
    assert (len(table), set(table["run"]), set(table["attack_id"])) == (12, {"fedrep"}, {"dlg-1a2b3c4d"})
    assert victims_table([]).empty


def test_the_wire_table_says_what_a_guarantee_covers(run):
    manifest = read_json(run / "run.json", "run")
    manifest["dp"] = {"enabled": True, "coverage": {"body.*": "covered", "num_samples": "public, by assumption"}}
    write_json(run / "run.json", manifest)
    loaded = load_run(run)
    said = [(r["direction"], r["guarantee"]) for r in records(wire_table(loaded))]
    assert said == [("down", None), ("up", "covered"), ("up", "public, by assumption"), ("private", None)]
    assert "public, by assumption" in str(grids.wire(records(wire_table(loaded))))


def test_wire_and_configuration(run):
    loaded = load_run(run)
    wire = records(wire_table(loaded))
    assert [(r["direction"], r["item"], r["numbers"]) for r in wire] == [
        ("down", "body.*", 183680),
        ("up", "body.*", 183680),
        ("up", "num_samples", None),
        ("private", "head.*", 5130),
    ]
    said = {(r["section"], r["name"]): r["value"] for r in records(configuration_table(loaded))}
    assert said["options", "lr"] == "0.05"
    assert said["options", "split"] == said["run", "reason"] == "none"
    assert said["data", "mean"] == "[0.3]"
    assert said["method", "head_epochs"] == "10"
    assert said["versions", "torch"] == "2.14.1"
    assert ("options", "settings") not in said


def test_several_runs_share_the_tables(run):
    other = write_run(run.parent / "fedavg", algo="fedavg", common=0.3)
    config = read_json(other / "run.json", "")
    write_json(other / "run.json", config | {"config": config["config"] | {"defense": ["dp-sgd:epsilon=8", "prune"]}})
    for path in (run, other):
        write_attack(path, [score(path, c) for c in CAPTURES])
    runs = load_runs([run, other])
    assert accuracy_table(runs)["run"].tolist() == ["fedrep", "fedrep", "fedavg", "fedavg"]
    assert leakage_table(runs)["defense"].tolist() == ["none", "dp-sgd:epsilon=8+prune"]


def test_records_are_plain_values():
    table = pd.DataFrame({"a": pd.array([1, None], dtype="Int64"), "b": [math.nan, 2.5], "c": ["x", None]})
    assert records(table) == [{"a": 1, "b": None, "c": "x"}, {"a": None, "b": 2.5, "c": None}]


# --- running statistics

SENT = [{"direction": "up", "item": "body.*", "kind": "buffers"}]


def batchnorm_run(home: Path, policy: str | None, wire: list[dict[str, str]] | None = None) -> RunData:
    """Return a run whose run.json says this of its BatchNorm layers; None: it is of a version that said nothing."""
    path = write_run(home / f"run{len(list(home.iterdir()))}")
    manifest = read_json(path / "run.json", "")
    if policy is not None:
        manifest["model"]["bn_buffers"] = policy
    write_json(path / "run.json", manifest | {"wire": [*manifest["wire"], *(wire or [])]})
    return load_run(path)


@pytest.mark.parametrize(
    ("policy", "wire", "said"),
    [
        ("aggregate", SENT, "are sent and averaged like weights, which gives away the moments"),
        ("aggregate", [], "never leave a client"),
        ("local", [], "never leave a client"),
        ("frozen", [], "are frozen at 0 and 1"),
    ],
)
def test_what_became_of_running_statistics_is_said(tmp_path, policy, wire, said):
    run = batchnorm_run(tmp_path, policy, wire)
    (sentence,) = words.batchnorm_sentences(run)
    assert said in sentence
    table = configuration_table(run).set_index(["section", "name"])["value"]
    assert table["model", "bn_buffers"] == policy


@pytest.mark.parametrize("policy", ["n/a", None])
def test_nothing_is_said_where_there_are_none(tmp_path, policy):
    run = batchnorm_run(tmp_path, policy)
    assert words.batchnorm_sentences(run) == []
    assert configuration_table(run).set_index(["section", "name"])["value"]["model", "bn_buffers"] == "n/a"


def test_runs_with_other_policies_are_to_be_compared_with_care(tmp_path):
    runs = [batchnorm_run(tmp_path, policy) for policy in ("local", "frozen")]
    assert "running statistics" in " ".join(words.cautions(runs, leakage_table(runs)))


# --- the worst case


def headline_of(path: Path):
    (row,) = records(headline_table(by_seed([load_run(path)])))
    return row


def test_the_worst_case_names_attack_round_and_victim_over_all_attacks_on_the_wire(run):
    """12 victims at 30 dB but one at 44; another attack reaches 40, the oracle 90: it is no attack on what the wire shows."""
    rows = [score(run, c, psnr=44.0 if c == "r002-c01-v1-probe" else 30.0) for c in CAPTURES]
    write_attack(run, rows)
    write_attack(run, [score(run, c, "idlg", psnr=40.0) for c in CAPTURES], "idlg")
    write_attack(run, [score(run, c, knowledge="oracle", psnr=90.0) for c in CAPTURES], number="2")
    row = headline_of(run)
    assert (row["attack"], row["attack_id"], row["knowledge"]) == ("dlg", "dlg-1a2b3c4d", "wire")
    assert (row["round"], row["client"], row["victim"], row["worst"], row["blind"]) == (2, 1, 1, 44.0, 12.0)
    assert (row["n"], row["clients"], row["success"], row["note"]) == (12, 3, 1.0, "illustrates only")
    assert row["mean"] == pytest.approx(30 + 14 / 12)
    assert row["low"] == pytest.approx(30.0)
    assert row["high"] > row["mean"]
    said = words.headline_sentence(row)
    assert "44.0 dB by dlg (round 2, client 1, victim 1; a blind guess: 12.0 dB)" in said
    assert "Illustrates only: this supports no claim." in said


def test_a_victim_that_is_not_valid_is_never_the_worst_case_nor_in_its_mean(run):
    rows = [score(run, c) for c in CAPTURES[:5]]
    rows[0] |= {"psnr": 99.0, "psnr_capped": 99.0, "attack_valid": False, "reason": "the replay misses"}
    rows[1] |= {"psnr": 1.0, "psnr_capped": 1.0, "status": "diverged"}
    write_attack(run, rows)
    row = headline_of(run)
    assert (row["worst"], row["mean"], row["n"], row["not_valid"]) == (30.0, (3 * 30 + 1) / 4, 4, 1)
    assert (row["note"], row["interval_note"], row["success_low"]) == ("n too small", "n too small", None)
    assert "Victims in no number: 1 not valid." in words.headline_sentence(row)


def test_twenty_victims_are_no_longer_too_few(tmp_path):
    captures = [f"r{t:03d}-c{c:02d}-v0-probe" for t in range(5) for c in range(4)]
    run = write_run(tmp_path / "many", captures=captures)
    write_attack(run, [score(run, c) for c in captures])
    assert (headline_of(run)["n"], headline_of(run)["note"]) == (20, "")


def test_without_a_valid_image_there_is_no_worst_case_and_the_reason(run):
    assert headline_of(run)["note"] == "not attacked"
    write_attack(run, [not_applicable(run, c, "51 local steps") | {"attack_valid": False} for c in CAPTURES])
    row = headline_of(run)
    assert (row["worst"], row["n"], row["not_valid"], row["not_applicable"]) == (None, 0, 12, 0)
    assert "12 not valid" in words.headline_sentence(row)


def test_other_kinds_of_captures_are_never_joined_with_probes(run):
    captures = [c.replace("probe", "update") for c in CAPTURES[:3]]
    other = write_run(run.parent / "both", captures=[*CAPTURES[:3], *captures])
    rows = [score(other, c) for c in CAPTURES[:3]] + [score(other, c, psnr=50.0, batch=4) for c in captures]
    write_attack(other, rows)
    first, second = records(leakage_table([load_run(other)]))
    assert {(r["kind"], r["victims"], r["psnr_mean"]) for r in (first, second)} == {
        ("update", 3, 50.0), ("probe", 3, 30.0)}  # fmt: skip
    assert headline_of(other)["n"] == 3


def test_captured_rounds_have_rows_of_their_own_with_the_accuracy_about_them(run):
    """Accuracies 0.5, 0.75, 0.7: nobody has trained before round 0; round 2 begins at 0.75 and ends at 0.7."""
    rows = [score(run, c, psnr=50.0 if c.startswith("r000") else 10.0) for c in CAPTURES]
    write_attack(run, rows)
    (merged,) = records(leakage_table([load_run(run)]))
    first, last = found = records(rounds_table([load_run(run)]))
    assert (merged["rounds"], merged["psnr_median"], merged["victims"]) == ("0, 2", 30.0, 12)
    assert [(r["round"], r["psnr_median"], r["victims"]) for r in found] == [(0, 50.0, 6), (2, 10.0, 6)]
    assert (first["accuracy_before"], first["accuracy_after"]) == (None, 0.5)
    assert (last["accuracy_before"], last["accuracy_after"]) == (0.75, 0.7)
    assert grids.by_round(found).rows[0][4:7] == ["0", "untrained", "50.0\u00a0%"]


def test_a_round_that_was_not_tested_has_no_accuracy(tmp_path):
    path = write_run(tmp_path / "a", accuracies=(0.5, None, 0.6))
    write_attack(path, [score(path, c) for c in CAPTURES[6:]])
    (row,) = records(rounds_table([load_run(path)]))
    assert (row["accuracy_before"], row["accuracy_after"]) == (None, 0.6)
    assert grids.by_round([row]).rows[0][5] == "–"


def test_rows_say_how_hard_the_attack_tried(run):
    rows = [score(run, c, iterations=100 * (i + 1), restarts=2, seconds=1.5) for i, c in enumerate(CAPTURES[:3])]
    (row,) = leakage_of(run, rows)
    assert (row["iterations"], row["restarts"], row["seconds"]) == (200.0, 2.0, 4.5)
    heads = [head for head, _ in grids.leakage([row]).heads]
    assert {"attacker", "kind", "K", "B", "iterations", "restarts", "seconds", "controls"} <= set(heads)


# --- what the controls say

PASSED, OFF = {"verdict": "passed", "reason": "x"}, {"verdict": "not run", "reason": "off"}


@pytest.mark.parametrize(
    ("found", "state", "said"),
    [
        ({"positive": PASSED, "negative": PASSED}, "passed", "controls: passed"),
        (
            {"positive": {"verdict": "failed", "reason": "2.0 dB above a blind guess; 10 are needed"}, "negative": PASSED},
            "failed: positive",
            "controls: the positive control failed: with these settings the attack does not even rebuild an image that must leak "
            "(2.0 dB above a blind guess; 10 are needed); low numbers here are no evidence of privacy; negative passed",
        ),
        ({"positive": OFF, "negative": OFF}, "not run", "controls: not run (off)"),
        (None, "not run", "controls: not run (the attack is of a version without them)"),
        ({"positive": 3}, "not run", "controls: not run (no reason was recorded)"),
    ],
)  # fmt: skip
def test_controls_in_words(found, state, said):
    assert (controls.state({"controls": found}), controls.sentence({"controls": found})) == (state, said)


def test_clipping_without_noise_has_a_row_of_its_privacy_without_a_guarantee(tmp_path):
    dp = {"enabled": True, "unit": "user", "guarantee": "none: clipping alone", "delta": {"most": 1e-3}}
    (row,) = records(privacy_table(load_runs([write_run(tmp_path / "a", dp=dp), write_run(tmp_path / "b")])))
    assert (row["run"], row["unit"], row["epsilon"]) == ("a", "user", None)
    assert row["note"] == "no guarantee (none: clipping alone)"

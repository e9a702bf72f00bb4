"""Run folders as data: types, young runs, and one sentence for every kind of damage."""

import re

import numpy as np
import pandas as pd
import pytest

from pflsec.core.errors import RunError
from pflsec.core.files import read_json, write_json, write_text
from pflsec.reports.load import CLIENTS, SCORES, TOKENS, CaptureId, load_run, load_runs
from pflsec.reports.tables import tokens_table
from tests.reports.runs import CAPTURES, manifest, score, write_attack, write_run


@pytest.fixture
def run(tmp_path):
    path = write_run(tmp_path / "fedrep")
    write_attack(path, [score(path, c) for c in CAPTURES])
    return path


def edit(path, old, new):
    text = path.read_text()
    assert old in text
    write_text(path, text.replace(old, new, 1))


def test_a_young_run_has_empty_tables_with_all_columns(tmp_path):
    write_json(tmp_path / "young" / "run.json", manifest("young") | {"state": "running"})
    run = load_run(tmp_path / "young")
    assert (run.name, len(run.metrics), len(run.clients), run.attacks) == ("young", 0, 0, [])
    assert "personal_accuracy_mean" in run.metrics
    assert list(run.clients) == list(CLIENTS)


def test_columns_have_their_types(run):
    edit(run / "attacks" / "dlg-1a2b3c4d" / "scores.csv", ",30,30,", ",inf,100,")
    loaded = load_run(run)
    scores = loaded.attacks[0].scores
    assert scores["round"].dtype == "Int64"
    assert scores["attack_valid"].dtype == "boolean"
    assert scores["psnr"].dtype == scores["identified"].dtype == "float64"
    assert scores["psnr"].tolist()[:2] == [np.inf, 30.0]
    assert scores["epsilon"].isna().all()
    assert scores["reason"].tolist() == [""] * len(CAPTURES)
    assert loaded.clients["uploaded"].dtype == "boolean"
    assert loaded.metrics["round"].tolist() == [0, 1, 2]
    assert loaded.metrics["global_accuracy"].dtype == "float64"


def test_shares_may_be_written_as_true_and_false(run):
    path = run / "attacks" / "dlg-1a2b3c4d" / "scores.csv"
    text = path.read_text()
    write_text(path, re.sub(r",1,1,12,", ",true,false,12,", text))
    scores = load_run(run).attacks[0].scores
    assert set(scores["label_correct"]) == {1.0}
    assert set(scores["identified"]) == {0.0}


def test_tables_of_texts_from_earlier_versions_lack_what_was_not_measured_then(run):
    earlier = [name for name in TOKENS if name not in ("rouge_l", "in_place")]
    row = [CAPTURES[0] if name == "capture" else "1" for name in earlier]
    write_text(run / "attacks" / "dlg-1a2b3c4d" / "tokens.csv", f"{','.join(earlier)}\n{','.join(row)}\n")
    (found,) = tokens_table([load_run(run)]).to_dict("records")
    assert found["recall"] == 1
    assert np.isnan(found["rouge_l"])
    assert np.isnan(found["in_place"])


@pytest.mark.parametrize("name", ["metrics.jsonl", "clients.csv"])
def test_a_torn_last_line_is_what_a_kill_leaves(run, name):
    before = load_run(run)
    with (run / name).open("a") as file:
        file.write((run / name).read_text().splitlines()[-1][:20])
    after = load_run(run)
    pd.testing.assert_frame_equal(after.metrics, before.metrics)
    pd.testing.assert_frame_equal(after.clients, before.clients)


def test_a_torn_line_elsewhere_is_damage(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    write_text(run / "metrics.jsonl", "\n".join([lines[0], lines[1][:30], lines[2]]) + "\n")
    with pytest.raises(RunError, match="line 2 is not a round's JSON"):
        load_run(run)


def test_a_round_played_again_after_a_resume_counts_once(run):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    write_text(run / "metrics.jsonl", "\n".join([*lines, lines[1], lines[2]]) + "\n")
    assert load_run(run).metrics["round"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("file", "old", "new", "words"),
    [
        ("run.json", '"schema": 1', '"schema": 2', "schema version 2; this version of pflsec reads 1"),
        ("run.json", '"schema": 1,', "", "schema version None"),
        ("run.json", '"config": {', '"config": [], "was": {', "'config' should be dict, and is list"),
        ("run.json", '"key": "fedrep"', '"key": null', "'key' should be str, and is NoneType"),
        ("run.json", '"shape": [', '"shape": ["x",', "description of the inputs is damaged"),
        ("run.json", '"direction": "down"', '"direct": "down"', "'direction' should be str"),
        ("metrics.jsonl", '"bytes_up": 1500000', '"bytes_up": "many"', "'bytes_up' is not a number"),
        ("metrics.jsonl", '"body": 9.0', '"body": "long"', "'norms' of round 0 are not numbers by holder and part"),
        ("metrics.jsonl", '"server": {', '"somebody": {', "'norms' of round 0 are not numbers by holder and part"),
        ("clients.csv", "true", "maybe", "row 2 has 'maybe' as uploaded, which is no flag"),
        ("attacks/dlg-1a2b3c4d/attack.json", '"schema": 1', '"schema": 7', "schema version 7"),
        ("attacks/dlg-1a2b3c4d/attack.json", '"captures": [', '"other": [', "'captures' should be list"),
        ("attacks/dlg-1a2b3c4d/scores.csv", "psnr_blind", "blind", "lacks the columns psnr_blind"),
        ("attacks/dlg-1a2b3c4d/scores.csv", ",probe,0,", ",probe,", "row 2 has 37 cells, the header 38"),
        ("attacks/dlg-1a2b3c4d/scores.csv", ",30,30,", ",thirty,30,", "row 2 has 'thirty' as psnr"),
        ("attacks/dlg-1a2b3c4d/scores.csv", ",probe,0,", ",probe,0.5,", "a value of round is no integer"),
    ],
)
def test_damage_is_named(run, file, old, new, words):
    edit(run / file, old, new)
    with pytest.raises(RunError, match=re.escape(words)):
        load_run(run)


@pytest.mark.parametrize("file", ["run.json", "attacks/dlg-1a2b3c4d/attack.json", "attacks/dlg-1a2b3c4d/scores.csv"])
def test_a_truncated_file_is_named(run, file):
    text = (run / file).read_text()
    write_text(run / file, text[: len(text) - 9])
    with pytest.raises(RunError, match="truncated"):
        load_run(run)


def test_bytes_that_are_no_text_are_named(run):
    (run / "metrics.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RunError, match="damaged, or not ours"):
        load_run(run)


def test_a_folder_that_is_no_run_is_named(tmp_path):
    with pytest.raises(RunError, match=r"run 'nothing' is missing: .*run.json does not exist"):
        load_run(tmp_path / "nothing")


def test_scores_without_their_description_are_damage_and_an_empty_folder_is_none(run):
    (run / "attacks" / "begun").mkdir()
    assert len(load_run(run).attacks) == 1
    (run / "attacks" / "dlg-1a2b3c4d" / "attack.json").unlink()
    with pytest.raises(RunError, match="attack 'dlg-1a2b3c4d' is missing"):
        load_run(run)


def test_an_interrupted_attack_without_scores_has_no_rows(run):
    (run / "attacks" / "dlg-1a2b3c4d" / "scores.csv").unlink()
    scores = load_run(run).attacks[0].scores
    assert (len(scores), list(scores)) == (0, list(SCORES))


@pytest.mark.parametrize("text", ["../../secret", "r0-c0-v0-probe/../x", "", "r0-c0-v0", 7, None])
def test_a_capture_id_cannot_leave_its_folder(run, text):
    path = run / "attacks" / "dlg-1a2b3c4d" / "attack.json"
    write_json(path, read_json(path, "") | {"captures": [text]})
    with pytest.raises(RunError, match="an id looks like r000-c00-v0-probe"):
        _ = load_run(run).attacks[0].captures


def test_a_row_is_found_by_its_capture(run):
    attack = load_run(run).attacks[0]
    assert [c.text for c in attack.captures] == list(CAPTURES)
    row = attack.row(CaptureId.parse("r002-c01-v1-probe", run))
    assert row is not None
    assert (row["round"], row["client"], row["victim"]) == (2, 1, 1)
    assert attack.row(CaptureId.parse("r009-c01-v1-probe", run)) is None


def test_runs_are_named_by_as_much_of_their_path_as_it_takes(tmp_path):
    paths = [write_run(tmp_path / name, captures=()) for name in ("a/runs/x", "b/runs/x", "b/runs/y")]
    assert [run.name for run in load_runs([*paths, paths[0]])] == ["a/runs/x", "b/runs/x", "y"]


def test_a_run_is_named_by_the_link_through_which_it_is_called(tmp_path):
    path = write_run(tmp_path / "target", captures=())
    (tmp_path / "link").symlink_to(path)
    assert load_run(tmp_path / "link").name == "link"
    assert [run.name for run in load_runs([tmp_path / "link", path])] == ["link"]


def test_class_names_are_looked_up(run):
    write_json(run / "run.json", manifest("x") | {"data": manifest("x")["data"] | {"class_names": ["cat", "dog"]}})
    loaded = load_run(run)
    assert [loaded.class_name(label) for label in ("1", "2", "²", "")] == ["dog", "2", "²", ""]

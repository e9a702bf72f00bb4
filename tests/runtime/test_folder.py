"""Run folders: private, never overwritten, and never outside their place."""

import csv
import os
import stat
from pathlib import Path

import pytest

from pflsec.core.errors import ConfigError, RunError
from pflsec.runtime.folder import CLIENT_COLUMNS, RunFolder, attack_folder, secure

LEAVING = [
    "..",
    ".",
    "",
    "../x",
    "a/b",
    "/tmp/x",
    "a\\b",
    "a\x00b",
    ".hidden",
    "-x",
    "a..b",
    "x" * 101,
    "a b",
    "naïve",
]


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_run_folder_is_readable_by_its_owner_alone(tmp_path: Path):
    before = os.umask(0)
    try:
        folder = RunFolder.create(tmp_path / "runs", "one")
    finally:
        os.umask(before)
    for path in (folder.path, folder.captures, folder.vault, folder.attacks):
        assert mode(path) == 0o700


def test_a_run_of_the_same_name_gets_the_next_number(tmp_path: Path):
    made = [RunFolder.create(tmp_path, "one").path.name for _ in range(3)]
    assert made == ["one", "one-2", "one-3"]


@pytest.mark.parametrize("name", LEAVING)
def test_a_name_that_could_leave_the_folder_is_refused(tmp_path: Path, name: str):
    with pytest.raises(ConfigError, match="run name"):
        RunFolder.create(tmp_path / "runs", name)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", LEAVING)
def test_an_attacks_name_cannot_leave_the_run(tmp_path: Path, name: str):
    with pytest.raises(ConfigError):
        attack_folder(RunFolder(tmp_path), name)


def test_a_run_is_found_by_name_and_by_folder(tmp_path: Path):
    RunFolder.create(tmp_path, "one").write_manifest({"schema": 1, "n": 1})
    for wanted in ("one", tmp_path / "one", str(tmp_path / "one")):
        assert RunFolder.open(wanted, tmp_path).manifest()["n"] == 1


def test_without_a_name_the_newest_run_is_opened(tmp_path: Path):
    for number, name in enumerate(["one", "two"]):
        RunFolder.create(tmp_path, name).write_manifest({"schema": 1})
        os.utime(tmp_path / name / "run.json", (number, 1000 - number))
    assert RunFolder.open(None, tmp_path).path.name == "one"


def test_a_run_that_is_not_there_is_answered_with_those_that_are(tmp_path: Path):
    RunFolder.create(tmp_path, "one").write_manifest({"schema": 1})
    with pytest.raises(RunError, match=r"run 'other' does not exist .*Runs in .*: one"):
        RunFolder.open("other", tmp_path)
    with pytest.raises(RunError, match="Make one with"):
        RunFolder.open(None, tmp_path / "empty")


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"schema": 2}', '{"schema": "1"}', "\x00"])
def test_a_manifest_that_is_damaged_or_of_another_schema_is_refused_in_one_line(tmp_path: Path, text: str):
    folder = RunFolder.create(tmp_path, "one")
    (folder.path / "run.json").write_text(text)
    with pytest.raises(RunError, match="run 'one'") as refused:
        folder.manifest()
    assert "\n" not in str(refused.value)


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path):
    (tmp_path / "runs").write_text("a file, not a folder")
    with pytest.raises(RunError, match=r"cannot write .*--runs-dir"):
        RunFolder.create(tmp_path / "runs", "one")


def test_clients_get_one_header_and_a_row_each(tmp_path: Path):
    folder = RunFolder.create(tmp_path, "one")
    for t in range(2):
        folder.add_clients([{"round": t, "client": c, "train_loss": None, "uploaded": c == 0} for c in range(2)])
    rows = list(csv.DictReader((folder.path / "clients.csv").read_text().splitlines()))
    assert [(row["round"], row["client"]) for row in rows] == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")]
    assert [row["uploaded"] for row in rows] == ["true", "false"] * 2
    assert {row["train_loss"] for row in rows} == {""}
    assert tuple(rows[0]) == CLIENT_COLUMNS


def test_size_counts_all_files(tmp_path: Path):
    folder = RunFolder.create(tmp_path, "one")
    (folder.vault / "a").write_bytes(b"x" * 10)
    (folder.path / "b").write_bytes(b"x" * 5)
    assert folder.size() == 15


def test_secure_closes_a_folder_that_was_open(tmp_path: Path):
    (tmp_path / "open").mkdir(mode=0o755)
    secure(tmp_path / "open")
    assert mode(tmp_path / "open") == 0o700

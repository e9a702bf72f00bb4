"""pflsec doctor: what it finds in a sound installation, and in broken ones."""

import json
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

import pflsec
from pflsec import doctor
from pflsec.core import registry
from pflsec.leakage import perceptual
from tests.cli.conftest import Cli


def found(part: Any) -> dict[str, doctor.Finding]:
    return {f.name: f for f in part()}


def test_a_sound_installation_is_told_as_such(cli: Cli):
    done = cli.succeed("doctor")
    assert "all that is essential works" in done.err
    for word in ("python", "torch", "devices", "cores", "digits", "1,797 images", "alex"):
        assert word in done.out


def test_the_findings_as_json_have_a_remedy_wherever_something_lacks(cli: Cli):
    rows = json.loads(cli.succeed("doctor", "--json").out)
    assert {row["status"] for row in rows} <= {"ok", "missing"}
    assert all(row["remedy"] for row in rows if row["status"] != "ok")
    names = {(row["part"], row["name"]) for row in rows}
    assert {("versions", "opacus"), ("machine", "shared memory"), ("installation", "folders")} <= names
    assert {name for part, name in names if part == "datasets"} == set(registry.names("datasets"))


def test_a_missing_package_breaks_or_lacks(cli: Cli, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "OTHERS", ("no-such-package",))
    assert found(doctor.versions)["no-such-package"].status == "missing"
    monkeypatch.setattr(doctor, "OTHERS", ())
    monkeypatch.setattr(doctor, "ESSENTIAL", ("no-such-package",))
    done = cli("doctor")
    assert done.code == 1
    assert "python -m pip install no-such-package" in done.out
    assert "1 broken" in done.err


def test_a_clone_without_links_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in doctor.LINKS:
        (tmp_path / name).write_text(f"../{name}")  # what git leaves where it may make no links
    monkeypatch.setattr(pflsec, "__file__", str(tmp_path / "__init__.py"))
    finding = found(doctor.checkout)["folders"]
    assert finding.status == "broken"
    assert "core.symlinks" in finding.remedy


def test_a_dataset_that_is_not_here_is_missing_with_its_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from pflsec.data.torchvision_sets import mnist

    monkeypatch.setenv("PFLSEC_DATA", str(tmp_path))
    monkeypatch.setattr(registry, "names", lambda group: ["mnist"])
    monkeypatch.setattr(registry, "load", lambda group, name: mnist)
    finding = found(doctor.datasets)["mnist"]
    assert finding.status == "missing"
    assert str(tmp_path) in finding.detail
    assert "--download" in finding.remedy
    assert list(tmp_path.iterdir()) == []


def test_weights_are_missing_foreign_or_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(perceptual, "default_path", lambda net: tmp_path / f"{net}.pth")
    (tmp_path / "vgg.pth").write_bytes(b"something else")
    seen = found(doctor.weights)
    assert {name: f.status for name, f in seen.items()} == {"alex": "missing", "vgg": "missing", "squeeze": "missing"}
    assert "weights-mismatch" in seen["vgg"].detail
    assert "no " in seen["alex"].detail
    assert all("download" in f.remedy for f in seen.values())


def test_an_entry_without_its_source_is_broken(monkeypatch: pytest.MonkeyPatch):
    entry = EntryPoint("mine", "nowhere.mine:Mine", "pflsec.algorithms")
    monkeypatch.setattr(registry, "_entries", lambda group: {"mine": entry})
    assert {f.status for f in found(doctor.registered).values()} == {"broken"}


def test_shared_memory_that_is_too_small_is_seen(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "ENOUGH", 1 << 62)
    finding = doctor._shared_memory()
    assert (finding.status, "--shm-size" in finding.remedy) == ("missing", True)

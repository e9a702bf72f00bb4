"""What an audit plans to run."""

from pathlib import Path

import pytest

from pflsec.audit import plan
from pflsec.core import registry
from pflsec.core.errors import ConfigError, PflsecError, RunError
from tests.audit.methods import write


def test_every_method_meets_every_defense_and_seed_and_the_control_once_a_seed(monkeypatch: pytest.MonkeyPatch):
    known = registry.names("algorithms")
    monkeypatch.setattr(registry, "names", lambda group: sorted({*known, "local"}) if group == "algorithms" else [])
    made = plan.make("fedrep", against=["fedavg"], defenses=["none", "dp-sgd:epsilon=8"], seeds=2, seed=5)
    cells = made.cells()
    assert [(c.label, c.defense, c.seed) for c in cells] == [
        (label, defense, seed)
        for defense in ("none", "dp-sgd:epsilon=8")
        for seed in (5, 6)
        for label in ("fedrep", "fedavg")
    ] + [("local", "none", 5), ("local", "none", 6)]
    assert len({c.name for c in cells}) == len(cells)
    assert {c.label: c.role for c in cells} == {"fedrep": "method", "fedavg": "baseline", "local": "control"}


def test_settings_are_the_methods_alone():
    made = plan.make("fedrep", against=["fedavg"], settings={"head_epochs": 3}, training={"rounds": 2})
    options = {c.label: made.options(c) for c in made.cells()}
    assert (options["fedrep"]["settings"], options["fedavg"]["settings"]) == ({"head_epochs": 3}, {})
    assert {o["rounds"] for o in options.values()} == {2}
    assert {o["seed"] for o in options.values()} == {0}


def test_baselines_are_those_that_exist_and_never_the_method_itself():
    assert "fedrep" not in plan.make("fedrep").baselines
    assert plan.make("FedRep", against=["fedrep", "FedAvg", "fedavg"]).baselines == ["fedavg"]
    with pytest.raises(ConfigError, match="did you mean fedavg"):
        plan.make("fedrep", against=["fedavgg"])


def test_a_file_with_a_baselines_key_has_another_label(tmp_path: Path):
    made = plan.make(write(tmp_path / "mine.py"), against=["fedavg"])
    assert [c.label for c in made.cells()][:2] == ["fedavg-file", "fedavg"]
    assert made.file is not None
    assert made.file["path"] == str(tmp_path / "mine.py")


def test_a_plan_survives_its_file():
    made = plan.make("fedrep", defenses=["none"], attacking={"restarts": 1})
    assert plan.Plan.from_dict(made.as_dict(), "here") == made
    with pytest.raises(RunError, match="here is damaged"):
        plan.Plan.from_dict({"method": "fedrep"}, "here")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("none", ["none"]),
        ("none,dp-sgd:epsilon=8", ["none", "dp-sgd:epsilon=8"]),
        ("dp-sgd:epsilon=8,delta=1e-5,none", ["dp-sgd:epsilon=8,delta=1e-5", "none"]),
        (" none , dp-sgd:epsilon=1 ", ["none", "dp-sgd:epsilon=1"]),
    ],
)
def test_defenses_are_split_at_the_right_commas(text: str, found: list[str]):
    assert plan.split_defenses(text) == found


@pytest.mark.parametrize("text", ["epsilon=8", "none,epsilon=8"])
def test_a_value_without_its_defense_is_refused(text: str):
    with pytest.raises(ConfigError, match="without a defense before it"):
        plan.split_defenses(text)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"seeds": 0}, "--seeds is 0"),
        ({"attacks": []}, "at least one attack"),
        ({"defenses": []}, "at least one defense"),
        ({"defenses": ["dp-sdg"]}, "did you mean dp-sgd"),
        ({"attacks": ["dlgg"]}, "did you mean dlg"),
        ({"attacking": {"adversary": "nobody"}}, "nobody"),
        ({"attacking": {"knowledge": "wire+everything"}}, "flag 'everything' is not known"),
        ({"attacking": {"kind": "both"}}, "kind is 'both'"),
        ({"defenses": ["dp-sgd:epsilon=1e+5", "dp-sgd:epsilon=1e5"]}, "two cells"),
    ],
)
def test_what_makes_no_audit_is_refused(options: dict, said: str):
    with pytest.raises(PflsecError, match=said):
        plan.make("fedrep", **options)


def test_a_threat_model_by_its_letter_is_checked_before_anything_is_trained():
    made = plan.make("fedavg", against=[], attacks=["ig"], attacking={"threat_model": "E"})
    assert made.attack_options("inverting-gradients") == {"threat_model": "E"}
    with pytest.raises(ConfigError, match="threat model D"):
        plan.make("fedavg", against=[], attacks=["ig"], attacking={"threat_model": "D"})

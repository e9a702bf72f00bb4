"""What an adversary may know is checked before anything runs, and the refusal names the flag that would grant it."""

import re
from typing import Any

import pytest

from pflsec.config.attack import AttackConfig, attack_names, make_attack, make_attacks
from pflsec.core import registry
from pflsec.core.attack import Attack
from pflsec.core.config import build
from pflsec.core.errors import ConfigError, KnowledgeError
from pflsec.core.knowledge import ADVERSARIES, Knows, ThreatModel

REBUILDING = [
    name for name in registry.names("attacks") if "hidden" in registry.load("attacks", name).Config.model_fields
]
every_attack = pytest.mark.parametrize("name", REBUILDING)
"""All that seek images: they have labels and private items to treat."""


def made(name: str, **options: Any) -> Attack[Any]:
    return make_attack(name, build(AttackConfig, options, "attack"))


@every_attack
@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"labels": "known"}, "labels"),
        ({"hidden": "oracle"}, "personal_params"),
        ({"settings": {"labels": "known"}}, "labels"),
        ({"settings": {"hidden": "oracle"}}, "personal_params"),
        ({"adversary": "eavesdropper"}, "hyper"),
        ({"adversary": "client"}, "uplink"),
        ({"adversary": "server-secagg"}, "uplink"),
        ({"adversary": "client", "knowledge": "oracle"}, "uplink"),
        ({"adversary": "eavesdropper", "knowledge": "wire+hyper", "hidden": "log"}, "history"),
        ({"adversary": "malicious-server", "labels": "known"}, "labels"),
    ],
)
def test_what_is_not_known_is_refused_with_the_flag_that_grants_it(name: str, options: dict[str, Any], flag: str):
    with pytest.raises(KnowledgeError, match=rf"Grant it with --knowledge wire\+(\w+,)*{flag}\b") as refusal:
        made(name, **options)
    assert "\n" not in str(refusal.value)
    assert refusal.value.exit_code == 2


@every_attack
@pytest.mark.parametrize(
    "options",
    [
        {"labels": "known", "knowledge": "wire+labels"},
        {"hidden": "oracle", "knowledge": "wire+personal_params"},
        {"adversary": "eavesdropper", "knowledge": "wire+hyper"},
        {"adversary": "client", "knowledge": "wire+uplink"},
        {"adversary": "eavesdropper", "knowledge": "wire+hyper,history", "hidden": "log"},
        {"hidden": "log"},
        {"hidden": "cotangent"},
        {"adversary": "malicious-server"},
    ],
)
def test_the_flag_that_is_named_does_grant_it(name: str, options: dict[str, Any]):
    attack = made(name, **options)
    for setting in ("labels", "hidden"):
        if setting in options:
            assert getattr(attack.cfg, setting) == options[setting]


@every_attack
def test_the_oracle_knows_labels_and_private_items_and_uses_them(name: str):
    cfg = made(name, knowledge="oracle").cfg
    assert (cfg.labels, cfg.hidden) == ("known", "oracle")


@every_attack
def test_single_flags_are_used_one_by_one(name: str):
    usual = made(name).cfg
    assert made(name, knowledge="wire+labels").cfg == usual.model_copy(update={"labels": "known"})
    assert made(name, knowledge="wire+personal_params").cfg == usual.model_copy(update={"hidden": "oracle"})


@every_attack
def test_knowing_more_than_is_used_is_allowed(name: str):
    cfg = made(name, knowledge="oracle", labels="restore", hidden="guess").cfg
    assert (cfg.labels, cfg.hidden) == ("restore", "guess")


@pytest.mark.parametrize("adversary", ADVERSARIES)
def test_the_oracle_adds_the_truth_and_nothing_else(adversary: str):
    wire, oracle = (ThreatModel(adversary, knowledge).knows for knowledge in ("wire", "oracle"))
    truth = {Knows.LABELS, Knows.PRIVATE, Knows.CANDIDATES}
    assert oracle - wire <= truth | {Knows.HYPER, Knows.HISTORY}
    assert truth <= oracle
    assert not truth & wire


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"adversary": "sever"}, "did you mean server"),
        ({"adversary": ""}, "Known: client, eavesdropper"),
        ({"knowledge": "wire+"}, "Use wire, oracle, or wire+FLAG"),
        ({"knowledge": "oracel"}, "Use wire, oracle, or wire+FLAG"),
        ({"knowledge": "oracle+labels"}, "Use wire, oracle, or wire+FLAG"),
        ({"knowledge": "wire+lables"}, "did you mean labels"),
        ({"knowledge": ""}, "Use wire"),
    ],
)
def test_unknown_adversaries_and_flags_are_named(options: dict[str, str], says: str):
    with pytest.raises(KnowledgeError) as refusal:
        made("dlg", **options)
    assert says in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("ig", {"settings": {"tv": -1}}, "tv is -1"),
        ("ig", {"settings": {"lr": float("nan")}}, "lr is nan"),
        ("ig", {"settings": {"lr": float("inf")}}, "lr is inf"),
        ("ig", {"settings": {"tvv": 1}}, "has no setting 'tvv'; did you mean tv?"),
        ("ig", {"settings": {"rescue": 1}}, "has no setting 'rescue'"),
        ("ig", {"settings": {"precision": "float16"}}, "precision is 'float16'"),
        ("ig", {"iterations": 0}, "iterations is 0"),
        ("dlg", {"restarts": 0}, "restarts is 0"),
        ("dlg", {"iterations": -5}, "iterations is -5"),
        ("dlg", {"iterations": 2.5}, "iterations is 2.5"),
        ("dlg", {"settings": {"restarts": 0}}, "restarts is 0"),
        ("dlg", {"restarts": 2, "settings": {"restarts": 3}}, "restarts is given twice"),
        ("dlg", {"labels": "no"}, "labels is 'no'"),
        ("dlg", {"rouns": 3}, "has no setting 'rouns'; did you mean rounds?"),
        ("dlg", {"seed": -1}, "seed is -1"),
        ("dlg", {"workers": 0}, "workers is 0"),
    ],
)
def test_a_bad_setting_is_one_sentence(name: str, options: dict[str, Any], says: str):
    with pytest.raises(ConfigError) as refusal:
        made(name, **options)
    assert says in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("text", ["dlg,ig", "DLG, IG", "dlg,inverting_gradients,ig", ["dlg", "ig"]])
def test_attacks_are_found_under_their_names_and_aliases_once_each(text: Any):
    assert attack_names(text) == ["dlg", "inverting-gradients"]


def test_all_means_all():
    assert attack_names("all") == registry.names("attacks")


def test_all_leaves_out_what_the_adversary_may_not_run_and_says_so():
    config = build(AttackConfig, {}, "attack")
    made, refused = make_attacks("all", config)
    assert "membership" not in made
    assert set(REBUILDING) <= made.keys()
    assert any("membership needs some images" in why and "wire+candidates" in why for why in refused)
    everything, none = make_attacks(["all"], build(AttackConfig, {"knowledge": "oracle"}, "attack"))
    assert (list(everything), none) == (registry.names("attacks"), [])
    for text in ("membership", "dlg,membership"):
        with pytest.raises(KnowledgeError, match="membership needs"):
            make_attacks(text, config)
    with pytest.raises(KnowledgeError, match="uplink"):
        make_attacks("all", build(AttackConfig, {"adversary": "client"}, "attack"))


@pytest.mark.parametrize("text", ["", "dlg,", "all,dlg", "dgl"])
def test_unknown_attacks_are_refused(text: str):
    with pytest.raises(ConfigError, match=r"attack '.*' is not known"):
        attack_names(text)


def test_the_remedy_keeps_what_was_granted_already():
    with pytest.raises(KnowledgeError, match=re.escape("Grant it with --knowledge wire+labels,hyper, or")):
        ThreatModel("eavesdropper", "wire+labels").require({Knows.HYPER}, "this")

"""What an adversary may know is checked before anything runs, and the refusal names the flag that would grant it."""

import re
from typing import Any

import pytest

from pflsec.config.attack import AttackConfig, attack_names, make_attack, make_attacks
from pflsec.core import registry
from pflsec.core.attack import Attack
from pflsec.core.config import build
from pflsec.core.errors import ConfigError, KnowledgeError
from pflsec.core.knowledge import ADVERSARIES, POWERS, WHO, WORDS, Knows, ThreatModel, letter_words

EVERY = registry.names("attacks")
SEARCHES = [name for name in EVERY if {"labels", "hidden"} <= {s.name for s in registry.card("attacks", name).settings}]
"""Attacks that search: for the labels, and for what the client keeps to itself, where they are not known."""
every_attack = pytest.mark.parametrize("name", SEARCHES)


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
        ({"adversary": "client", "labels": "known"}, "labels"),
        ({"adversary": "server-secagg", "hidden": "log"}, "history"),
        ({"adversary": "client", "hidden": "log"}, "history"),
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
        {"adversary": "client"},
        {"adversary": "server-secagg"},
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


def test_analytic_runs_on_no_labels_that_are_not_known_and_refuses_the_options_of_a_search():
    for options in ({"labels": "known"}, {"adversary": "eavesdropper"}):
        with pytest.raises(KnowledgeError, match="Grant it with"):
            made("analytic", **options)
    assert made("analytic", knowledge="oracle").cfg.labels == "known"
    for options in ({"hidden": "joint"}, {"restarts": 2}, {"iterations": 2}):
        with pytest.raises(ConfigError, match="attack analytic has no --"):
            made("analytic", **options)


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


def test_all_says_what_the_adversary_may_not_run():
    refused = {one.name: one.refused for one in make_attacks("all", build(AttackConfig, {}, "attack")) if one.refused}
    assert refused.keys() == {"membership", "imprint"}
    assert "membership needs some images" in refused["membership"]
    assert "wire+candidates" in refused["membership"]
    everything = make_attacks(["all"], build(AttackConfig, {"knowledge": "oracle"}, "attack"))
    assert [one.name for one in everything] == registry.names("attacks")
    assert [one.name for one in everything if one.refused] == ["imprint"]
    for text in ("membership", "dlg,membership"):
        with pytest.raises(KnowledgeError, match="membership needs"):
            make_attacks(text, build(AttackConfig, {}, "attack"))


@pytest.mark.parametrize("text", ["", "dlg,", "all,dlg", "dgl"])
def test_unknown_attacks_are_refused(text: str):
    with pytest.raises(ConfigError, match=r"attack '.*' is not known"):
        attack_names(text)


def test_the_remedy_keeps_what_was_granted_already():
    with pytest.raises(KnowledgeError, match=re.escape("Grant it with --knowledge wire+labels,hyper, or")):
        ThreatModel("eavesdropper", "wire+labels").require({Knows.HYPER}, "this")


# --- what no flag grants


def test_choosing_the_downlink_takes_an_adversary_that_acts():
    for adversary in sorted(ADVERSARIES.keys() - {"malicious-server"}):
        for knowledge in ("wire", "oracle"):
            with pytest.raises(KnowledgeError, match="Use --adversary malicious-server") as refusal:
                made("imprint", adversary=adversary, knowledge=knowledge)
            assert "\n" not in str(refusal.value)
            assert "wire+" not in str(refusal.value)
    assert made("imprint", adversary="malicious-server").key == "imprint"


def test_no_flag_makes_an_adversary_act():
    with pytest.raises(KnowledgeError, match="is no knowledge; name who has it: --adversary malicious-server"):
        ThreatModel("server", "wire+downlink").knows  # noqa: B018
    with pytest.raises(KnowledgeError) as refusal:
        ThreatModel("server", "wire+nothing").knows  # noqa: B018
    assert "downlink" not in str(refusal.value)


@pytest.mark.parametrize("adversary", ["server", "eavesdropper", "client", "server-secagg"])
def test_all_leaves_out_what_the_adversary_cannot_do(adversary: str):
    config = build(AttackConfig, {"adversary": adversary, "knowledge": "wire+hyper"}, "attack")
    assert [one.name for one in make_attacks("all", config) if "choice of what the client receives" in one.refused] == [
        "imprint"
    ]
    with pytest.raises(KnowledgeError):
        make_attacks(["imprint"], config)


def test_all_of_a_malicious_server_is_all():
    config = build(AttackConfig, {"adversary": "malicious-server"}, "attack")
    assert {one.name for one in make_attacks("all", config) if one.refused} == {"membership"}
    granted = config.model_copy(update={"knowledge": "wire+candidates"})
    assert not any(one.refused for one in make_attacks("all", granted))


def test_every_flag_is_documented_and_belongs_to_somebody_or_is_granted():
    assert set(WORDS) == set(Knows)
    assert set(WHO) == set(ADVERSARIES)
    for flag in set(Knows) - POWERS:
        assert flag in ThreatModel("eavesdropper", f"wire+{flag}").knows


# --- letters


@pytest.mark.parametrize(
    ("name", "adversary", "knowledge"),
    [
        ("A", "eavesdropper", "wire"),
        ("B", "server", "wire"),
        ("C", "server", "wire"),
        ("c", "server", "wire"),
        ("E", "server", "wire+label_hist"),
        ("F", "malicious-server", "wire"),
    ],
)
def test_a_letter_stands_for_adversary_and_knowledge(name: str, adversary: str, knowledge: str):
    config = build(AttackConfig, {"threat_model": name}, "attack")
    assert (config.adversary, config.knowledge, config.threat_model) == (adversary, knowledge, name.upper())
    assert config.threat == ThreatModel(adversary, knowledge)


@pytest.mark.parametrize("name", ["D", "G", "H"])
def test_a_letter_whose_knowledge_nothing_uses_is_refused_with_the_reason(name: str):
    with pytest.raises(ConfigError, match=r"no attack here uses data from elsewhere.* Use A, B, C, E, F") as refusal:
        build(AttackConfig, {"threat_model": name}, "attack")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "other", [{"adversary": "server"}, {"knowledge": "wire"}, {"adversary": "client", "knowledge": "oracle"}]
)
def test_a_letter_goes_with_no_adversary_and_no_knowledge(other: dict[str, str]):
    with pytest.raises(ConfigError, match="--threat-model says who attacks") as refusal:
        build(AttackConfig, {"threat_model": "C"} | other, "attack")
    assert all(f"--{name}" in str(refusal.value) for name in other)


@pytest.mark.parametrize("name", ["I", "", "AB", "server"])
def test_other_letters_are_unknown(name: str):
    with pytest.raises(ConfigError, match=r"threat model '.*' is not known.* Known: A, B, C, D, E, F, G, H"):
        build(AttackConfig, {"threat_model": name}, "attack")


def test_what_is_different_from_the_survey_is_said():
    assert "B and C are the same" in letter_words("b")
    assert "label_hist" in letter_words("E")
    assert letter_words("C") == "server that knows the training details, here --adversary server --knowledge wire"

"""Configurations: frozen, strict, and refused in sentences."""

from typing import Any, Literal

import pytest
from pydantic import ValidationError

from pflsec.core.config import Config, above, at_least, between, build, option
from pflsec.core.errors import ConfigError, KnowledgeError, did_you_mean, unknown
from pflsec.core.knowledge import ADVERSARIES, Knows, ThreatModel


class Knobs(Config):
    epochs: int = at_least(0, default=10, about="epochs", paper=10, pfllib=1)
    rate: float = above(0, default=0.1)
    share: float = between(0, 1, default=0.5)
    mode: Literal["a", "b"] = option(default="a", paper="b")


@pytest.mark.parametrize("values", [{}, {"epochs": 0}, {"rate": 1e-9}, {"share": 0}, {"share": 1}, {"mode": "b"}])
def test_values_in_range_are_accepted(values: dict[str, Any]):
    assert build(Knobs, values, "knobs").model_dump() == Knobs().model_dump() | values


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"epochs": -1}, "knobs: epochs is -1; it must be greater than or equal to 0"),
        ({"epochs": 1.5}, "knobs: epochs is 1.5; it must be a valid integer"),
        ({"rate": 0}, "knobs: rate is 0; it must be greater than 0"),
        ({"rate": float("nan")}, "knobs: rate is nan; it must be"),
        ({"rate": float("inf")}, "knobs: rate is inf; it must be a finite number"),
        ({"share": 1.1}, "knobs: share is 1.1; it must be less than or equal to 1"),
        ({"mode": "c"}, "knobs: mode is 'c'; it must be 'a' or 'b'"),
        (
            {"epoch": 3},
            "knobs has no setting 'epoch'; did you mean epochs? It has: epochs, mode, rate, share.",
        ),
        ({"zzz": 3}, "knobs has no setting 'zzz'"),
    ],
)
def test_a_mistake_is_a_sentence_with_name_value_rule_and_source(values: dict[str, Any], sentence: str):
    with pytest.raises(ConfigError) as refused:
        build(Knobs, values, "knobs", "grid.toml")
    text = str(refused.value)
    assert text.startswith(sentence)
    assert text.endswith("From grid.toml.")
    assert "\n" not in text


def test_every_mistake_is_told_at_once():
    with pytest.raises(ConfigError, match=r"epochs.*share"):
        build(Knobs, {"epochs": -1, "share": 2}, "knobs")


def test_a_configuration_cannot_be_changed():
    with pytest.raises(ValidationError):
        Knobs().epochs = 3  # type: ignore[misc]


def test_published_values_are_kept_with_a_field():
    assert Knobs.model_fields["epochs"].json_schema_extra == {"cited": {"paper": 10, "pfllib": 1}}
    assert Knobs.model_fields["mode"].json_schema_extra == {"cited": {"paper": "b"}}


def test_the_nearest_name_is_offered_whatever_its_case():
    assert "did you mean fedavg?" in did_you_mean("FedAvgg", ["fedavg", "fedprox"])
    assert "did you mean" not in did_you_mean("zzzz", ["fedavg"])
    assert unknown("method", "x", []).endswith("Known: none.")


# --- what adversaries know


@pytest.mark.parametrize("adversary", ADVERSARIES)
def test_no_adversary_is_born_with_labels_or_private_items(adversary: str):
    assert not ThreatModel(adversary).knows & {Knows.LABELS, Knows.PRIVATE}


def test_knowledge_is_granted_by_flags():
    granted = ThreatModel("eavesdropper", "wire+labels,hyper").knows
    assert granted == ADVERSARIES["eavesdropper"] | {Knows.LABELS, Knows.HYPER}
    assert {Knows.LABELS, Knows.PRIVATE, Knows.HISTORY, Knows.HYPER} <= ThreatModel("client", "oracle").knows


def test_what_is_missing_is_named_with_the_flag_that_grants_it():
    with pytest.raises(KnowledgeError, match=r"dlg needs the true labels of the batch, .*--knowledge wire\+labels"):
        ThreatModel().require({Knows.LABELS, Knows.ARCH}, "dlg")
    ThreatModel("server", "wire+labels").require({Knows.LABELS}, "dlg")


@pytest.mark.parametrize("knowledge", ["all", "wire+everything", "oracle+labels", ""])
def test_unknown_knowledge_is_refused(knowledge: str):
    with pytest.raises(KnowledgeError):
        _ = ThreatModel("server", knowledge).knows


def test_an_unknown_adversary_is_refused():
    with pytest.raises(KnowledgeError, match="did you mean server"):
        _ = ThreatModel("servr").knows


@pytest.mark.parametrize("field", ["share", "most", "maybe"])
def test_a_switch_is_no_number(field: str):
    class Numbers(Config):
        share: float = at_least(0, default=0.5)
        most: int = at_least(0, default=3)
        maybe: float | None = above(0, default=None)
        on: bool = option(default=False)
        either: bool | int = option(default=1)

    with pytest.raises(ConfigError, match=f"numbers: {field} is True; it must be a number"):
        build(Numbers, {field: True}, "numbers")
    assert build(Numbers, {"on": True, "either": True}, "numbers").on is True

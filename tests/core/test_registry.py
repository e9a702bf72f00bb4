"""The registry: names, cards read from source, and imports only when something is used."""

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from pflsec.core import registry
from pflsec.core.errors import ConfigError

EVERYTHING = [(group, name) for group in registry.GROUPS for name in registry.names(group)]


@pytest.mark.parametrize(("group", "name"), EVERYTHING)
def test_every_registered_thing_has_a_card_and_can_be_imported(group: str, name: str):
    card = registry.card(group, name)
    assert card.key == name
    assert card.title.endswith(".")
    assert registry.load(group, name) is not None


@pytest.mark.parametrize("name", registry.names("algorithms"))
def test_every_method_tells_source_problem_wire_cost_and_leaks(name: str):
    card = registry.card("algorithms", name)
    assert {
        "Source",
        "Solves",
        "Wire",
        "Private",
        "Cost",
        "Leaks",
        "Limits",
        "Differs",
    } <= card.sections.keys()
    assert card.family in registry.load("algorithms", name).__module__
    assert all(card.sections.values())


@pytest.mark.parametrize("name", ["fedavg", "FedAvg", "fed-avg", "Fed_Avg", "FEDAVG"])
def test_case_and_dashes_do_not_matter(name: str):
    assert registry.find("algorithms", name) == "fedavg"


def test_an_attack_is_found_under_each_of_its_other_names():
    aliases = {
        a: n for n in registry.names("attacks") for a in registry.card("attacks", n).attributes.get("aliases", ())
    }
    assert aliases
    assert all(registry.find("attacks", alias) == name for alias, name in aliases.items())


def test_an_unknown_name_is_answered_with_the_nearest_and_the_list():
    with pytest.raises(
        ConfigError, match=r"algorithm 'fedavgg' is not known; did you mean fedavg\? Known: .*fedamp, fedavg"
    ):
        registry.find("algorithms", "fedavgg")


def test_a_thing_that_cannot_be_imported_is_one_sentence(monkeypatch: pytest.MonkeyPatch):
    entry = EntryPoint("broken", "pflsec.no_such_module:Thing", "pflsec.algorithms")
    monkeypatch.setattr(registry, "_entries", lambda group: {"broken": entry})
    with pytest.raises(ConfigError, match=r"algorithm 'broken' \(pflsec.no_such_module:Thing\) cannot be imported"):
        registry.load("algorithms", "broken")


def test_a_strangers_package_is_read_the_same_way(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
):
    """A file on the path with a docstring, a Config and a class: its card is read although importing it would fail."""
    (tmp_path / "strangers").mkdir()
    (tmp_path / "strangers" / "__init__.py").write_text("")
    (tmp_path / "strangers" / "mine.py").write_text(
        '''"""Mine: a method of my own.

Source   a paper,
         in two lines.
Wire     down w | up w     Private   nothing
"""

from pflsec.core.config import Config, at_least, option

raise RuntimeError("imported")


class MineConfig(Config):
    mu: float = at_least(0, default=0.5, about="weight", paper=1)
    on: bool = option(default=True)


class Mine:
    key, shared = "mine", ("body",)
    Config = MineConfig
    down = {"w": "weights [n]"}
'''
    )
    monkeypatch.syspath_prepend(tmp_path)
    entry = EntryPoint("mine", "strangers.mine:Mine", "pflsec.algorithms")
    monkeypatch.setattr(registry, "_entries", lambda group: {"mine": entry})
    request.addfinalizer(registry.registered_card.cache_clear)
    card = registry.card("algorithms", "mine")
    assert (card.title, card.family) == ("Mine: a method of my own.", "strangers")
    assert card.sections == {
        "Source": "a paper, in two lines.",
        "Wire": "down w | up w",
        "Private": "nothing",
    }
    assert card.attributes == {"key": "mine", "shared": ("body",), "down": {"w": "weights [n]"}}
    first = card.settings[0]
    assert (first.name, first.type, first.default, first.about) == ("mu", "float", "0.5", "weight")
    assert (first.cited, first.rule) == ({"paper": "1"}, ">= 0")
    assert [s.name for s in card.settings] == ["mu", "on"]


def test_a_strangers_module_need_not_lie_in_a_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
):
    (tmp_path / "alone.py").write_text('"""Alone: one file."""\n\n\nclass Alone:\n    key = "alone"\n')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(
        registry, "_entries", lambda group: {"alone": EntryPoint("alone", "alone:Alone", "pflsec.attacks")}
    )
    request.addfinalizer(registry.registered_card.cache_clear)
    assert (registry.card("attacks", "alone").title, registry.card("attacks", "alone").family) == (
        "Alone: one file.",
        "alone",
    )

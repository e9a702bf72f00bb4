"""Planted bugs: what public implementations got wrong, put into our methods. A check that lets one live checks nothing.

Each method's bugs stand in mutants/<key>.py: the bug, the check that must catch it, and how the bug is planted, by a subclass
of the method or a patch of the machinery around it.
"""

import importlib

import pytest

from pflsec.core import registry
from tests.algorithms.mutants.planted import Mutant

MUTANTS: list[Mutant] = [
    row
    for key in registry.names("algorithms")
    for row in importlib.import_module(f"tests.algorithms.mutants.{key}").MUTANTS
]


@pytest.mark.parametrize("row", MUTANTS, ids=str)
def test_the_check_catches_the_planted_bug(row: Mutant, monkeypatch: pytest.MonkeyPatch):
    row.check(row.original)
    if row.patch:
        row.patch(monkeypatch)
    with pytest.raises(AssertionError):
        row.check(row.mutant or row.original)

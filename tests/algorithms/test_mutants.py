"""Planted bugs: what public implementations got wrong, put into our methods. A check that lets one live checks nothing.

Each method's bugs stand in mutants/<key>.py: the bug, the check that must catch it, and how the bug is planted, by a subclass
of the method or a patch of the machinery around it.
"""

import importlib
from functools import cache
from typing import Any

import pytest

from pflsec.core import registry
from pflsec.core.algorithm import Algorithm
from tests.algorithms.mutants.planted import Check, Mutant

MUTANTS: list[Mutant] = [
    row
    for key in registry.names("algorithms")
    for row in importlib.import_module(f"tests.algorithms.mutants.{key}").MUTANTS
]


@cache
def passes(check: Check, method: type[Algorithm[Any]]) -> None:
    """Run a check on the method itself, once for all bugs that it must catch. Raises AssertionError where it fails."""
    check(method)


@pytest.mark.parametrize("row", MUTANTS, ids=str)
def test_the_check_catches_the_planted_bug(row: Mutant, monkeypatch: pytest.MonkeyPatch):
    passes(row.check, row.original)
    if row.patch:
        row.patch(monkeypatch)
    with pytest.raises(AssertionError):
        row.check(row.mutant or row.original)

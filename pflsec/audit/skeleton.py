"""The text of a new method, and of its test."""

import importlib.util
import keyword
import re

from pflsec.core.errors import ConfigError

METHOD = '''"""{title}: shared body, private head. Say in one line what your method does.

Source   your paper or note
Solves   min over body b and heads h_i of  sum_i mean_(x,y) CE(h_i(b(x)), y) + mu/2 |b - b_server|^2
Wire     down body.* | up body.*, num_samples     Private   head.*
"""

from collections.abc import Mapping
from typing import ClassVar

from pflsec.core.algorithm import Algorithm, Done, PrivateStart, mean_of_uploads, sample_count
from pflsec.core.config import at_least
from pflsec.core.items import Items, select
from pflsec.core.local import Local, half_squared_distance


class {name}Config(PrivateStart):
    mu: float = at_least(0, default=0.0, about="weight of the pull towards the server's body")


class {name}(Algorithm[{name}Config]):
    key, shared, private = "{key}", ("body",), ("head",)
    Config = {name}Config
    down: ClassVar = {{"body.*": "weights"}}
    up: ClassVar = {{"body.*": "weights", "num_samples?": "counts"}}
    dp_support = "full"  # what is sent follows from ctx.fit alone; else say "none: why"

    def local(self, ctx: Local, state: Items, down: Items) -> Done:
        """The client's maths: data are reached through ctx alone, and nothing is changed in place."""
        pull = half_squared_distance(self.cfg.mu, down)
        model = ctx.fit(down | state, on=ctx.ce, penalty=lambda params, rng: pull(select(params, "body"), rng))
        return Done(state=select(model, "head"), up=select(model, "body") | sample_count(ctx))

    def aggregate(self, server: Items, ups: Mapping[int, Items]) -> Items:
        """The server's maths: its next items from the uploads {{client: items}}."""
        return mean_of_uploads(ups, "body", weighting="samples")
'''

TEST = '''"""What must hold for {name}, as for every method. Add your own invariants: limit cases, one step by hand."""

from pathlib import Path

import pytest

from pflsec import testing

METHOD = f"{{Path(__file__).with_name('{file}.py')}}:{name}"


@pytest.fixture(scope="module")
def exchange() -> testing.Exchange:
    """One client's exchange after two rounds on digits."""
    return testing.exchange(METHOD)


@pytest.mark.parametrize("check", testing.CHECKS, ids=lambda check: check.__name__)
def test_what_every_method_must_hold(check, exchange):
    check(exchange)


def test_one_without_pull_is_the_same_as_none():
    """mu = 0 switches the penalty off: an example of a limit case."""
    assert testing.exchange(METHOD, mu=0.0).setup.algorithm.cfg.mu == 0
'''


def skeleton(name: str) -> tuple[str, dict[str, str]]:
    """Return the class's name and {file name: text} of a new method and its test. ConfigError for an unfit name."""
    if not (name.isascii() and name.isidentifier()) or keyword.iskeyword(name) or not name[0].isalpha():
        raise ConfigError(
            f"'{name}' cannot name a Python file with a class: use letters, digits and '_', beginning with a "
            "letter, and no keyword of Python."
        )
    words = [word for word in re.split(r"_+", name) if word]
    kind = "".join(word[0].upper() + word[1:] for word in words)
    values = {"name": kind, "key": name.lower().rstrip("_"), "file": name, "title": " ".join(words).capitalize()}
    return kind, {f"{name}.py": METHOD.format(**values), f"test_{name}.py": TEST.format(**values)}


def shadows(name: str) -> bool:
    """Return whether a file of this name in the current folder would hide a module that is installed."""
    return importlib.util.find_spec(name) is not None

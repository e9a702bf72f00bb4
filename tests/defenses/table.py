"""Every method under every defense, one round on the toy federation: docs/tables/defenses.md.

    python -m tests.defenses.table        play all rounds and write the table

A cell says `yes`, or the number of the reason for which the method is refused.
"""

import re
import warnings
from collections.abc import Iterable
from pathlib import Path

from pflsec.core import registry
from pflsec.core.errors import PflsecError, PflsecWarning
from pflsec.core.files import write_text
from pflsec.core.items import first_nonfinite
from pflsec.runtime import privacy
from tests import toys

PATH = Path(__file__).parents[2] / "docs" / "tables" / "defenses.md"
DEFENSES = {
    "soteria": "soteria:prune=0.4",
    "mixup": "mixup",
    "precode": "precode:width=4",
    "clip": "clip:bound=0.5",
    "gaussian": "gaussian:std=0.01",
    "laplace": "laplace:scale=0.01",
    "prune": "prune:keep=0.2",
    "qsgd": "qsgd:bits=4",
    "sign": "sign",
    "fp16": "fp16",
    "dp-sgd": "dp-sgd:noise_multiplier=1,sampling=shuffle",
    "dp-release": "dp-sgd:noise_multiplier=1,sampling=shuffle dp-release:noise_multiplier=0.3",
    "dp-fedavg": "dp-fedavg:noise_multiplier=1",
    "secagg": "secagg",
}
"""A setting of each registered defense, with those that it stands beside, in the order of the table."""


def outcome(key: str, defense: str) -> str:
    """Return "yes" where a round under the defense gives finite items, or the reason of the refusal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PflsecWarning)
        try:
            made = toys.setup(key, rounds=1, defense=DEFENSES[defense].split(), dp_seed=1)
            privacy.describe(made)
            turn = toys.rounds(made, 1)[0]
        except PflsecError as error:
            return reason(str(error))
    assert not any(first_nonfinite(items) for items in (turn.next_server, *turn.ups.values()))
    return "yes"


def reason(text: str) -> str:
    """Return why a method was refused, out of the message: without the names of method and defense, and the remedy."""
    inside = re.search(
        r"cannot be trained under (?:(?:dp-sgd|soteria|precode|mixup) \((.*)\)|.* alone: (.*))\. Choose another method",
        text,
    )
    assert inside is not None, text
    return inside[1] or inside[2]


def row(key: str) -> dict[str, str]:
    """Return what becomes of a method under every defense."""
    return {defense: outcome(key, defense) for defense in DEFENSES}


def written(rows: Iterable[tuple[str, dict[str, str]]]) -> str:
    """Return the table of these rows with its list of reasons."""
    lines, reasons = [], {}
    for key, cells in rows:
        words = [v if v == "yes" else f"no ({reasons.setdefault(v, len(reasons) + 1)})" for v in cells.values()]
        lines.append(f"| {key} | {' | '.join(words)} |")
    head = [f"| method | {' | '.join(DEFENSES)} |", f"|{'---|' * (len(DEFENSES) + 1)}"]
    return "\n".join([*head, *lines, "", *(f"{number}. {text}" for text, number in reasons.items())]) + "\n"


def read(text: str) -> dict[str, dict[str, str]]:
    """Return {method: {defense: yes, or the reason}} of a table."""
    table, _, listed = text.partition("\n\n")
    reasons = dict(line.split(". ", 1) for line in listed.strip().splitlines())
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    return {
        key: {d: c if c == "yes" else reasons[c[4:-1]] for d, c in zip(lines[0][1:], cells, strict=True)}
        for key, *cells in lines[2:]
    }


if __name__ == "__main__":
    write_text(PATH, written((key, row(key)) for key in registry.names("algorithms")))

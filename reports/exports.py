"""Tables as files: CSV and JSON with every number, LaTeX as the page shows them."""

import re
from pathlib import Path

import pandas as pd

from pflsec.core.files import to_csv, write_json, write_text
from pflsec.reports.grids import Grid
from pflsec.reports.tables import records

SIGNS = {"≥": r"$\geq$", "±": r"$\pm$", "–": "--", "…": r"\ldots{}", "·": r"$\cdot$", "\u00a0": "~"}
"""What LaTeX has no letter for, or a better sign."""


def write(folder: Path, name: str, table: pd.DataFrame, grid: Grid) -> None:
    """Write folder/name.csv and .json, all columns of the table, and .tex, what the grid shows."""
    rows = records(table)
    write_text(folder / f"{name}.csv", to_csv([str(column) for column in table.columns], rows))
    write_json(folder / f"{name}.json", rows)
    write_text(folder / f"{name}.tex", latex(grid))


def latex(grid: Grid) -> str:
    """Return a tabular with the rules of booktabs (\\\\usepackage{booktabs}); everything in it is escaped text."""
    cells = [[_one_line(cell) for cell in row] for row in grid.rows]
    frame = pd.DataFrame(cells, columns=pd.Index([_one_line(head) for head, _ in grid.heads]), dtype=object)
    columns = "".join("r" if numeric else "l" for _, numeric in grid.heads)
    text = frame.to_latex(index=False, escape=True, column_format=columns)
    for sign, command in SIGNS.items():
        text = text.replace(sign, command)
    return re.sub(r"^([\[*])", r"{\1}", text, flags=re.MULTILINE)  # \\\\ would take these as its own arguments


def _one_line(text: str) -> str:
    """Return the text without line breaks and other control characters: an empty line would end the paragraph."""
    return re.sub(r"[\s\x00-\x1f\x7f]+", lambda found: "\u00a0" if found.group() == "\u00a0" else " ", text).strip()

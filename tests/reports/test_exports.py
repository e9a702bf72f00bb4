"""LaTeX: booktabs, one line a row, and nothing in a name that TeX would obey."""

import pytest

from pflsec.reports.exports import latex
from pflsec.reports.grids import Grid

SPECIAL = r"a_b & 50% #1 $x$ {y} ~ ^ \input{z}"


def rows(text: str) -> list[str]:
    """Return the lines between the rules of booktabs."""
    return [line for line in text.split("\\midrule\n")[1].split("\\bottomrule", maxsplit=1)[0].splitlines() if line]


def test_words_stand_left_numbers_right_between_rules():
    text = latex(Grid([("run", False), ("PSNR", True)], [["one", "1.0"], ["two", "2.0"]]))
    assert text.startswith("\\begin{tabular}{lr}\n\\toprule\nrun & PSNR \\\\\n\\midrule\n")
    assert rows(text) == ["one & 1.0 \\\\", "two & 2.0 \\\\"]
    assert text.rstrip().endswith("\\bottomrule\n\\end{tabular}")


def test_everything_is_escaped():
    text = latex(Grid([(SPECIAL, False)], [[SPECIAL]]))
    said = r"a\_b \& 50\% \#1 \$x\$ \{y\} \textasciitilde \space \textasciicircum \space \textbackslash input\{z\}"
    assert text.count(said) == 2


@pytest.mark.parametrize(
    ("cell", "line"),
    [
        ("two\n\nparagraphs\t\x00here", "two paragraphs here \\\\"),
        ("[0.1, 0.2]", "{[}0.1, 0.2] \\\\"),
        ("*", "{*} \\\\"),
        ("1.0\u00a0% ± 2", "1.0~\\% $\\pm$ 2 \\\\"),
        ("≥ –", "$\\geq$ -- \\\\"),
    ],
)
def test_what_would_end_a_row_or_has_no_letter(cell: str, line: str):
    assert rows(latex(Grid([("x", False)], [[cell]]))) == [line]


def test_a_table_without_rows_has_its_head():
    assert "a & b" in latex(Grid([("a", False), ("b", True)], []))

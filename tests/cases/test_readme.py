"""The table of cases is true: the tests that it names exist, and no row stands in it twice."""

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
TABLE = (TESTS / "cases" / "README.md").read_text(encoding="utf8")


def test_every_test_that_the_table_names_exists():
    defined = set(
        re.findall(r"^def (test_\w+)", "".join(p.read_text(encoding="utf8") for p in TESTS.rglob("*.py")), re.M)
    )
    named = set(re.findall(r"(?:`|::)(test_\w+)`", TABLE))
    assert named
    assert sorted(named - defined) == []


def test_every_case_of_this_folder_has_one_row_with_a_verdict():
    rows = re.findall(r"^\| (U\d{3})[^|]*\| ([^|]+?) \|", TABLE, re.M)
    ids = [case for case, _ in rows]
    assert len(ids) == len(set(ids))
    assert {verdict for _, verdict in rows} <= {"right before", "fixed now", "not applicable"}
    here = "".join(p.read_text(encoding="utf8") for p in (TESTS / "cases").glob("test_t*.py"))
    assert {f"U{n}" for n in re.findall(r"_u(\d{3})_", "".join(re.findall(r"^def (test_\w+)", here, re.M)))} <= set(ids)

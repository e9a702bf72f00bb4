"""Every method under every defense works or is refused by name and reason, as docs/tables/defenses.md says."""

import pytest

from pflsec.core import registry
from pflsec.core.errors import PflsecError
from pflsec.runtime import privacy
from tests import toys
from tests.defenses import table

SAID = table.read(table.PATH.read_text(encoding="utf8"))


def test_the_table_has_a_row_of_every_method_and_a_column_of_every_defense():
    assert list(SAID) == registry.names("algorithms")
    assert set(table.DEFENSES) == set(registry.names("defenses"))
    assert all(list(cells) == list(table.DEFENSES) for cells in SAID.values())


@pytest.mark.parametrize("key", registry.names("algorithms"))
def test_a_method_is_defended_or_refused_as_the_table_says(key: str):
    assert table.row(key) == SAID[key]


@pytest.mark.parametrize("defense", ["dp-fedavg", "secagg", "dp-sgd"])
def test_a_refusal_names_method_defense_and_reason_in_one_line(defense: str):
    with pytest.raises(PflsecError) as refused:
        privacy.describe(toys.setup("fedproto", defense=[table.DEFENSES[defense]]))
    assert "\n" not in str(refused.value)
    for word in ("fedproto", defense, SAID["fedproto"][defense], "Choose another method"):
        assert word in str(refused.value)
    assert refused.value.exit_code == 2

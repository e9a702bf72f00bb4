"""Everything in this folder is computed in float64."""

import pytest


@pytest.fixture(autouse=True)
def _doubles(doubles: None):
    """What is equal by algebra is then equal to about 1e-15."""

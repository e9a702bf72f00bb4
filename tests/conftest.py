"""Fixtures for all tests."""

from collections.abc import Iterator

import pytest
import torch

from pflsec.models.network import Network
from tests import toys


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Two threads may change bits, and tests share the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def doubles() -> Iterator[None]:
    """Make float64 the default dtype: what is equal by algebra is then equal to about 1e-15."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def net() -> Network:
    """The tiny network."""
    return toys.tiny()

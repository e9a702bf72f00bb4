"""Fixtures for all tests."""

from collections.abc import Iterator
from pathlib import Path

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


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with small copies of real datasets; tests that need it are skipped where it is absent."""
    folder = Path(__file__).parents[1].parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"real data are not available here: {folder} does not exist")
    return folder


@pytest.fixture
def net() -> Network:
    """The tiny network."""
    return toys.tiny()

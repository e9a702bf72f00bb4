"""Fixtures of the data tests."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with small copies of real datasets; tests that need it are skipped where it is absent."""
    folder = Path(__file__).parents[2].parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"real data are not available here: {folder} does not exist")
    return folder

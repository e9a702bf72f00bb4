"""The notebooks run from top to bottom, show pictures, and show as stored what they show when run."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.blocks import REPOSITORY

nbformat = pytest.importorskip("nbformat", reason="nbclient is not installed: pip install -e '.[dev]'")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: pip install -e '.[dev]'")

NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))
LARGEST = 1_000_000
"""Bytes of a notebook with its pictures."""


def shown(notebook: Any) -> list[list[str]]:
    """Return for each cell of code the kinds of what it shows: text, pictures."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [sorted({kind for out in cell.outputs for kind in out.get("data", {"text/plain": ""})}) for cell in cells]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_with_its_pictures(path: Path):
    kinds = [kind for cell in shown(nbformat.read(path, as_version=4)) for kind in cell]
    assert kinds.count("image/png") >= 1
    assert path.stat().st_size < LARGEST


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_what_is_stored(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("MPLBACKEND", raising=False)  # the kernel's own shows figures below the cells
    stored = nbformat.read(path, as_version=4)
    fresh = nbformat.read(path, as_version=4)
    for cell in fresh.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(fresh, timeout=None, kernel_name="python3", resources=where).execute()
    assert shown(fresh) == shown(stored)


def test_there_are_notebooks():
    assert len(NOTEBOOKS) == 2

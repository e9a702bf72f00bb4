"""A place to work in, without galleries: these take longer than all the rest."""

from pathlib import Path

import pytest

from pflsec.reports import figures


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(figures, "write_gallery", lambda path, attack: None)

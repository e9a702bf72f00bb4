"""What the documentation says can be done is done: every command exists, and every block that may run does."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from pflsec.cli.app import app
from tests.docs.blocks import REPOSITORY, SHELL, blocks, documents, named

LANGUAGES = (*SHELL, "python", "toml", "text")
PAGES = documents()
NAMES = [str(page.relative_to(REPOSITORY)) for page in PAGES]


def leaf(words: list[str]) -> tuple[Any, list[str]]:
    """Return the command that the words of a line call, and the words that are left."""
    command: Any = get_command(app)
    rest = words[1:]
    while rest and hasattr(command, "commands") and not rest[0].startswith("-"):
        assert rest[0] in command.commands, f"{' '.join(words)}: no command {rest[0]}"
        command, rest = command.commands[rest[0]], rest[1:]
    return command, rest


def unknown_options(words: list[str]) -> list[str]:
    """Return the options of a line that its command does not have."""
    command, rest = leaf(words)
    known = {opt for p in command.params for opt in (*p.opts, *p.secondary_opts)} | {"--help"}
    return [word for word in rest if word.startswith("--") and word.partition("=")[0] not in known]


def test_a_command_or_an_option_that_does_not_exist_is_seen():
    assert unknown_options(["pflsec", "train", "--algo", "fedavg", "--round", "3"]) == ["--round"]
    with pytest.raises(AssertionError, match="no command atack"):
        unknown_options(["pflsec", "atack", "dlg"])


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_command_and_option_that_a_page_names_exists(page: Path):
    for words in named(page.read_text(encoding="utf8")):
        assert unknown_options(words) == [], " ".join(words)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_block_says_what_it_is(page: Path):
    text = page.read_text(encoding="utf8")
    found = blocks(text)
    assert [b.language for b in found if b.language not in LANGUAGES] == []
    assert text.count("\n```") == 2 * len(found), "a fence is not closed, or is indented"


def runs(page: Path) -> bool:
    """Return whether anything of a page is run."""
    found = blocks(page.read_text(encoding="utf8"))
    return any(b.language in ("python", *SHELL) and not b.reason for b in found)


@pytest.mark.parametrize("page", [pytest.param(p, id=n) for p, n in zip(PAGES, NAMES, strict=True) if runs(p)])
def test_a_page_runs_from_top_to_bottom(page: Path, tmp_path: Path):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MPLBACKEND": "agg", "COLUMNS": "120"}
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs.play", str(page)],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-1500:]}\n{done.stderr[-3000:]}"


def test_a_page_with_a_wrong_block_fails(tmp_path: Path):
    page = tmp_path / "wrong.md"
    page.write_text("```python\nassert 1 == 2\n```\n")
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.docs.play", str(page)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 1

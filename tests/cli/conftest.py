"""The program in this process: what it prints, how it ends, and a run to work on."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from pflsec.cli.app import main
from pflsec.reports import figures

TRAIN = ("train", "--model", "mlp", "--clients", "4", "--rounds", "1", "--partition", "iid", "--victims", "1")
QUICK = ("--restarts", "1", "--iterations", "2", "--executor", "serial", "--no-controls", "--lpips", "none")


@dataclass(frozen=True)
class Result:
    """How a command ended and what it printed."""

    code: int
    out: str
    err: str


class Cli:
    """The program, called as from a shell."""

    def __init__(self, capsys: pytest.CaptureFixture[str]):
        self.capsys = capsys

    def __call__(self, *words: str) -> Result:
        """Run a command."""
        self.capsys.readouterr()
        code = main(list(words))
        printed = self.capsys.readouterr()
        return Result(code, printed.out, printed.err)

    def succeed(self, *words: str) -> Result:
        """Run a command that must succeed."""
        result = self(*words)
        assert result.code == 0, result.err
        return result

    def mistake(self, *words: str, announced: bool = False) -> str:
        """Run a command that must end as a mistake of the user's; return the one line that says what is wrong.

        announced  the command may have said what it is about to do
        """
        result = self(*words)
        assert result.code == 2, result.err
        assert result.out == ""
        lines = result.err.splitlines()
        assert len(lines) == 1 or announced, result.err
        assert sum(line.startswith("error: ") for line in lines) == 1
        assert lines[-1].startswith("error: ")
        assert "Traceback" not in result.err
        return lines[-1]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """The program, in an empty folder of its own, drawing no galleries: these take longer than all the rest."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(figures, "write_gallery", lambda path, attack: None)
    return Cli(capsys)


@pytest.fixture(scope="session")
def _trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    for key in ("fedavg", "fedrep"):
        assert main([*TRAIN, "--algo", key, "--capture-clients", "0,1", "--name", key, "--runs-dir", str(folder)]) == 0
    return folder


@pytest.fixture
def runs(_trained: Path, tmp_path: Path, cli: Cli) -> Path:
    """The folder runs/ with the runs `fedavg` and `fedrep`, one round and two captures each; for the test to damage."""
    return Path(shutil.copytree(_trained, tmp_path / "runs"))


def tree(folder: Path) -> dict[str, bytes | None]:
    """Return all that is in a folder: path to content, None for folders."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


Damage = Callable[[Path], object]

"""Runs one page in the current folder: `python -m tests.docs.play PAGE`. Exits with 1, saying which block, at the first failure.

The blocks run in order in one interpreter, so that the program starts once a page: pflsec commands through its main function,
Python in one namespace, other shell commands in a shell. A block with a title is written to a file of that name.
"""

import importlib
import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

from pflsec.cli.app import main
from pflsec.core import registry
from tests.docs.blocks import SHELL, Block, blocks


def play(page: str) -> None:
    """Run a page. Raises whatever a block of it raises, and SystemExit for a command that fails."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    for number, block in enumerate(blocks(page)):
        print(f"block {number}: {block.text.splitlines()[0]}", flush=True)
        if block.title:
            _write(block)
        elif block.reason:
            _stand_in(block)
        elif block.language == "python":
            exec(compile(block.text, f"block {number}", "exec"), namespace)
        elif block.language in SHELL:
            for line in block.commands:
                _command(line)


def _write(block: Block) -> None:
    path = Path(block.title)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(block.text, encoding="utf8")


def _command(line: str) -> None:
    words = shlex.split(line, comments=True)
    if words[0] == "pflsec":
        if code := main(words[1:]):
            raise SystemExit(f"{line}: exit code {code}")
    else:
        subprocess.run(line, shell=True, check=True)


def _stand_in(block: Block) -> None:
    """Let `pip install -e .` have its effect, the entry points, without touching the environment: pip is not run."""
    if "pip install -e ." not in block.text or not Path("pyproject.toml").exists():
        return
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf8"))["project"]
    facts = Path(f"{project['name']}-{project['version']}.dist-info")
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = (
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())
        for group, entries in project["entry-points"].items()
    )
    (facts / "entry_points.txt").write_text("\n".join(groups))
    importlib.invalidate_caches()
    registry._entries.cache_clear()


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())
    play(Path(sys.argv[1]).read_text(encoding="utf8"))

"""Help, lists and cards: quick to come, and true."""

import json
import re
import subprocess
import sys

import pytest
from typer.main import get_command

from pflsec.cli.app import app
from tests.cli.conftest import Cli

COMMANDS = sorted(get_command(app).commands)  # type: ignore[attr-defined]
SLOW = ("torch", "torchvision", "opacus", "pandas", "scipy", "sklearn", "matplotlib", "plotly", "lpips")

SCRIPT = """
import json, sys
from pflsec.cli.app import main
codes = [main(words) for words in json.loads(sys.argv[1])]
loaded = sorted({name.partition(".")[0] for name in sys.modules} & set(json.loads(sys.argv[2])))
print("\\n" + json.dumps({"codes": codes, "loaded": loaded}))
"""


def test_help_lists_and_cards_load_no_heavy_library(tmp_path):
    """They are what people call again and again; torch alone takes seconds."""
    words = [
        ["--help"], ["--version"], *([command, "--help"] for command in COMMANDS),
        *(["list", what] for what in ("algorithms", "attacks", "defenses", "datasets", "models", "runs")),
        *(["show", name] for name in ("fedavg", "fedrep", "ig", "digits", "cnn")),
    ]  # fmt: skip
    asked = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(words), json.dumps(SLOW)],
        capture_output=True, text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    found = json.loads(asked.stdout.splitlines()[-1])
    assert found == {"codes": [0] * len(words), "loaded": []}
    assert asked.stderr == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_by_examples(cli: Cli, command: str):
    text = cli.succeed(command, "--help").out
    if f"Usage: pflsec {command} [OPTIONS] COMMAND" in text:
        return  # a group; its commands have the examples
    assert "Examples:" in text
    examples = re.findall(rf"^\s*pflsec {command}\b.*$", text, re.MULTILINE)
    assert examples
    for example in examples:
        assert all(re.search(rf"{option}\b", text.split("Options:")[-1]) for option in re.findall(r"--[\w-]+", example))


def test_help_of_the_program_names_every_command(cli: Cli):
    listed = cli.succeed("--help").out.split("Commands:\n")[1]
    assert sorted(re.findall(r"^  (\w+)", listed, re.MULTILINE)) == COMMANDS


@pytest.mark.parametrize(
    ("option", "default"),
    [("--rounds", "50"), ("--clients", "20"), ("--lr", "0.05"), ("--batch-size", "10"), ("--alpha", "0.1"),
     ("--participation", "1.0"), ("--local-epochs", "1"), ("--capture-rounds", "first,last"), ("--victims", "4"),
     ("--victim-batch", "1"), ("--victim-steps", "1"), ("--seed", "0"), ("--partition", "dirichlet")],
)  # fmt: skip
def test_the_help_of_train_states_the_agreed_defaults(cli: Cli, option: str, default: str):
    text = " ".join(cli.succeed("train", "--help").out.split("Options:")[1].split())
    described = text.split(f" {option} ")[1].split(" --")[0]
    assert f"[default: {default}]" in described

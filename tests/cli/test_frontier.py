"""pflsec frontier: from the shell's side."""

import json
from pathlib import Path

from tests.cli.conftest import QUICK, Cli


def test_attacked_runs_are_shown_and_the_others_named(cli: Cli, runs: Path):
    cli.succeed("attack", "ig", "fedavg", *QUICK)
    done = cli.succeed("frontier")
    assert "fedavg" in done.out
    assert "undefended" in done.out
    assert "without a point: fedrep: it has not been attacked" in done.err
    assert (runs / "frontier" / "index.html").exists()
    found = json.loads(cli.succeed("frontier", "fedavg", "--x", "identified", "--out", "elsewhere", "--json").out)
    assert [p["name"] for p in found["points"]] == ["fedavg"]
    assert found["points"][0]["pareto"] is True
    assert Path("elsewhere/frontier.svg").exists()


def test_mistakes_end_in_one_line(cli: Cli, runs: Path):
    assert "did you mean leakage" in cli.mistake("frontier", "--x", "leakag")
    assert "--y 'acuracy' is not known; did you mean accuracy" in cli.mistake("frontier", "--y", "acuracy")
    assert "run 'nowhere' does not exist" in cli.mistake("frontier", "nowhere")
    assert "there is no run in empty" in cli.mistake("frontier", "--runs-dir", "empty")
    assert not (runs / "frontier").exists()

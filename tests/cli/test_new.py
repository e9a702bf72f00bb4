"""pflsec new algorithm: what it writes works as it is."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from pflsec import testing
from pflsec.audit import folder
from pflsec.core import registry
from pflsec.core.errors import WireError
from tests.cli.conftest import Cli
from tests.cli.test_audit import QUICK, SMALL


def test_the_method_passes_its_test_and_can_be_audited(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    said = cli.succeed("new", "algorithm", "my_method").err
    assert "pytest test_my_method.py" in said
    assert "pflsec audit my_method.py:MyMethod" in said
    assert len((tmp_path / "my_method.py").read_text().splitlines()) <= 45
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_method.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert f"{len(testing.CHECKS) + 1} passed" in done.stdout
    monkeypatch.setattr(folder, "write_page", lambda paths, out, verdict: None)
    audited = cli.succeed("audit", "my_method.py:MyMethod", "--against", "fedavg", *SMALL, *QUICK)
    assert "my_method against fedavg" in audited.out


def test_what_is_written_is_typed_and_has_a_card(cli: Cli, tmp_path: Path):
    cli.succeed("new", "algorithm", "mine")
    tree = ast.parse((tmp_path / "mine.py").read_text())
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    assert functions
    assert all(f.returns and all(a.annotation for a in f.args.args if a.arg != "self") for f in functions)
    assert all(len(line) <= 120 for path in tmp_path.glob("*.py") for line in path.read_text().splitlines())
    card = registry.card("algorithms", f"{tmp_path / 'mine.py'}:Mine")
    assert card.key == "mine"
    assert {"Source", "Solves", "Wire", "Private"} <= card.sections.keys()
    assert [s.name for s in card.settings] == ["private_start", "mu"]


@pytest.mark.parametrize("there", ["mine.py", "test_mine.py"])
def test_nothing_is_overwritten(cli: Cli, tmp_path: Path, there: str):
    (tmp_path / there).write_text("mine\n")
    assert f"{there} is already here" in cli.mistake("new", "algorithm", "mine")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [(there, "mine\n")]


@pytest.mark.parametrize("name", ["class", "my-method", "2fast", "a b", "../x", "", "_x", "é", "None"])
def test_names_that_are_no_names_are_refused(cli: Cli, tmp_path: Path, name: str):
    assert "cannot name a Python file" in cli.mistake("new", "algorithm", name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["torch", "json"])
def test_a_name_that_would_hide_a_module_is_refused(cli: Cli, name: str):
    assert f"would hide the installed module {name}" in cli.mistake("new", "algorithm", name)


# --- the checks that the written test calls: each sees the fault that it is there for

FIT, HEAD = "        model = ctx.fit(", 'state=select(model, "head")'
NOISE = "        down = {k: v + 1e-3 * torch.rand(v.shape, dtype=v.dtype) for k, v in down.items()}\n"
FAULTS = {
    "check_pure": (FIT, "        down['body.fc1.bias'].add_(1)\n" + FIT, "changes its downlink in place"),
    "check_contract": ("| sample_count(ctx)", '| {"secret": torch.ones(2)}', "sent the item 'secret'"),
    "check_state": (HEAD, HEAD + ' | {"more": torch.ones(2)}', "other names or shapes"),
    "check_interpreters": (FIT, NOISE + FIT, "the two interpreters differ in the upload"),
    "check_replay": (FIT, NOISE + FIT, "misses the upload"),
}
"""For each check what is replaced in the method, by what, and what the check says of it."""


@pytest.mark.parametrize("name", FAULTS)
def test_each_check_sees_its_fault(cli: Cli, tmp_path: Path, name: str):
    old, new, said = FAULTS[name]
    cli.succeed("new", "algorithm", "mine")
    path = tmp_path / "mine.py"
    text = path.read_text().replace("\nfrom collections", "\nimport torch\nfrom collections", 1)
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises((AssertionError, WireError), match=said):
        getattr(testing, name)(testing.exchange(f"{path}:Mine", rounds=0))


def test_the_checks_pass_on_registered_methods():
    for name in ("fedavg", "fedproto"):
        found = testing.exchange(name, rounds=1)
        for check in testing.CHECKS:
            check(found)

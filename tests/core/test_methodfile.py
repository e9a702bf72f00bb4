"""Methods from a user's file: what is accepted, what is refused and how, and that one text is one class."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pflsec.core import methodfile, registry
from pflsec.core.errors import ConfigError, RunError
from tests.audit.methods import FEDAVG, write


def test_a_file_is_found_loaded_and_described(tmp_path: Path):
    name = write(tmp_path / "mine.py")
    assert registry.find("algorithms", name) == name
    kind = registry.load("algorithms", name)
    assert (kind.key, kind.__name__) == ("fedavg", "FedAvg")
    card, known = registry.card("algorithms", name), registry.card("algorithms", "fedavg")
    assert (card.key, card.family) == ("fedavg", "own file")
    assert (card.sections, card.attributes, card.settings) == (known.sections, known.attributes, known.settings)
    assert kind is not registry.load("algorithms", "fedavg")


def test_the_name_gets_an_absolute_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write(tmp_path / "mine.py")
    monkeypatch.chdir(tmp_path)
    assert registry.find("algorithms", "mine.py:FedAvg") == f"{tmp_path / 'mine.py'}:FedAvg"


def test_one_text_is_one_class_and_another_text_another(tmp_path: Path):
    """Of equal length and in the same second: what Python's own cache of bytecode could not tell apart."""
    path = tmp_path / "mine.py"
    path.write_text(FEDAVG + "ANSWER = 1\n")
    stamp = path.stat()
    first = methodfile.load(f"{path}:FedAvg")
    assert methodfile.load(f"{path}:FedAvg") is first
    path.write_text(FEDAVG + "ANSWER = 2\n")
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    second = methodfile.load(f"{path}:FedAvg")
    assert [sys.modules[kind.__module__].ANSWER for kind in (first, second)] == [1, 2]
    assert methodfile.facts(first) != methodfile.facts(second)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine.py"]


REFUSED = {
    "x.txt:FedAvg": (FEDAVG, r"x\.txt is no Python file"),
    "fedavg:FedAvg": (FEDAVG, "fedavg is no Python file"),
    "gone.py:FedAvg": (None, r"gone\.py does not exist"),
    "a.py": (FEDAVG, r"does not say which class.*FedAvgConfig, FedAvg"),
    "b.py:FedAvgg": (FEDAVG, r"class 'FedAvgg' is not known; did you mean fedavg\? Known: FedAvg, FedAvgConfig"),
    "c.py:X": ("\nclass X(\n", r"c\.py, line 2: .*never closed"),
    "d.py:X": ("import nowhere_at_all\nclass X: pass\n", r"d\.py, line 1 cannot be imported: ModuleNotFoundError"),
    "e.py:X": ("a = 1\nb = 1 / 0\nclass X: pass\n", r"e\.py, line 2 cannot be imported: ZeroDivisionError"),
    "f.py:X": ("class X: pass\n", r"f\.py, line 1: class X is no Algorithm"),
    "g.py:FedAvg": (FEDAVG.replace('key, shared, private = "fedavg", ', "shared, private = "), "FedAvg has no key"),
    "h.py:FedAvg": (FEDAVG.replace("    Config = FedAvgConfig\n", ""), "FedAvg has no Config"),
    "i.py:FedAvg": (FEDAVG.replace("    Config = FedAvgConfig\n", "    Config = dict\n"), "Config that is not derived"),
    "j.py:FedAvg": (FEDAVG.replace("def aggregate", "def gather"), "does not define aggregate"),
    "k.py:X": ("raise SystemExit(3)\nclass X: pass\n", r"k\.py, line 1 cannot be imported: SystemExit"),
    "l.py:X": ("x = '\0'\n", r"l\.py"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_method_is_refused_in_one_sentence(name: str, tmp_path: Path):
    text, said = REFUSED[name]
    if text is not None:
        (tmp_path / name.partition(":")[0]).write_text(text, encoding="utf8")
    with pytest.raises(ConfigError, match=said) as caught:
        methodfile.load(str(tmp_path / name))
    assert "\n" not in str(caught.value)


def test_a_change_of_the_text_is_seen_and_nothing_else(tmp_path: Path):
    path = tmp_path / "mine.py"
    found = methodfile.facts(methodfile.load(write(path)))
    path.touch()
    methodfile.check_unchanged(found, "run 'r'")
    path.write_text(FEDAVG + "\n")
    with pytest.raises(RunError, match=r"run 'r': the method's file .*is not the one .*\(its text has changed\)"):
        methodfile.check_unchanged(found, "run 'r'")
    path.unlink()
    with pytest.raises(RunError, match="cannot be read"):
        methodfile.check_unchanged(found, "run 'r'")


def test_a_registered_method_has_no_file():
    assert methodfile.facts(registry.load("algorithms", "fedavg")) is None
    methodfile.check_unchanged(None, "run 'r'")


def test_an_error_is_blamed_on_the_file_that_raised_it(tmp_path: Path):
    path = tmp_path / "mine.py"
    path.write_text(FEDAVG.replace("        return server\n", "        return server[0]\n"))
    kind = methodfile.load(f"{path}:FedAvg")
    with pytest.raises(KeyError) as caught:
        kind.global_model(None, {})
    blamed = methodfile.blame(caught.value)
    assert blamed is not None
    assert "the method's global_model" in str(blamed)
    assert "Traceback" in str(blamed)
    assert methodfile.blame(ConfigError("x")) is None
    with pytest.raises(KeyError) as ours:
        raise KeyError(0)
    assert methodfile.blame(ours.value) is None


def test_a_files_card_is_read_without_torch_and_without_running_it(tmp_path: Path):
    path = tmp_path / "mine.py"
    path.write_text(FEDAVG + "raise RuntimeError('imported')\n")
    code = (
        "import sys; from pflsec.core import registry; "
        f"card = registry.card('algorithms', {f'{path}:FedAvg'!r}); print(card.key, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["fedavg", "False"]

"""Methods that nobody has registered: a class in a file of the user's, named as FILE.py:Class.

A file is read once, described from its syntax tree, and imported under a private name from the very text that was read:
no bytecode is left beside it, and none that is older than the text can be used.
"""

import ast
import hashlib
import importlib.util
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.abc import ExecutionLoader
from pathlib import Path
from types import ModuleType
from typing import Any

from pflsec.core.errors import ConfigError, PflsecError, RunError, TrainingError, unknown

FORM = "A method of your own is named as FILE.py:Class"
PREFIX = "_pflsec_method_"
DIGEST = "__pflsec_sha256__"


@dataclass(frozen=True)
class Source:
    """A method's file as it was read, and the name of its class."""

    path: Path
    name: str
    text: str
    tree: ast.Module

    def __str__(self) -> str:
        return f"{self.path}:{self.name}"

    @property
    def node(self) -> ast.ClassDef:
        """The definition of the class."""
        return next(n for n in reversed(self.tree.body) if isinstance(n, ast.ClassDef) and n.name == self.name)


def is_reference(name: str) -> bool:
    """Return whether a name has the form of a file's method. No registered key has a colon."""
    return ":" in name or name.endswith(".py")


def locate(reference: str) -> Source:
    """Return the file and class that FILE.py:Class names, without importing anything. Raises ConfigError."""
    file, _, name = ("", "", "") if reference.endswith(".py") else reference.rpartition(":")
    path = Path(file or reference).expanduser().absolute()
    if path.suffix != ".py":
        raise ConfigError(f"method '{reference}': {path.name} is no Python file. {FORM}.")
    source = _read(path, name)
    classes = [n.name for n in source.tree.body if isinstance(n, ast.ClassDef)]
    if not name:
        raise ConfigError(
            f"method '{reference}' does not say which class. {FORM}; there: {', '.join(classes) or 'none'}."
        )
    if name not in classes:
        raise ConfigError(f"method file {path}: " + unknown("class", name, classes))
    return source


def load(reference: str) -> Any:
    """Return the class that FILE.py:Class names. Raises ConfigError when it cannot be imported, or is no method."""
    source = locate(reference)
    kind = getattr(_module(source), source.name, None)
    if fault := _fault(kind):
        raise ConfigError(f"method file {source.path}, line {source.node.lineno}: class {source.name} {fault}.")
    return kind


def facts(kind: type) -> dict[str, str] | None:
    """Return path and SHA-256 of the text that a method was made from; None for one that is registered."""
    module = sys.modules.get(kind.__module__)
    digest = getattr(module, DIGEST, None)
    return {"path": str(getattr(module, "__file__", "")), "sha256": digest} if digest else None


def check_unchanged(made_with: Mapping[str, Any] | None, what: str) -> None:
    """Raise RunError unless a method's file still has the text with which `what` was made (None: it had no file)."""
    if not made_with:
        return
    path = Path(str(made_with.get("path")))
    try:
        now = _digest(path.read_bytes())
    except OSError as error:
        now, why = None, f"it cannot be read: {error.strerror or error}"
    else:
        why = "its text has changed"
    if now != made_with.get("sha256"):
        raise RunError(
            f"{what}: the method's file {path} is not the one the run was made with ({why}). Put the old "
            "file back, or train again."
        )


def blame(error: BaseException) -> TrainingError | None:
    """Return an error that a method's file has raised as a sentence with its traceback, or None where it did not."""
    if isinstance(error, PflsecError):
        return None
    frames = [
        f for f, _ in traceback.walk_tb(error.__traceback__) if str(f.f_globals.get("__name__")).startswith(PREFIX)
    ]
    if not frames:
        return None
    path, function = frames[-1].f_code.co_filename, frames[-1].f_code.co_name
    text = "".join(traceback.format_exception(error)).rstrip()
    return TrainingError(f"the method's {function} ({path}) raised {type(error).__name__}: {error}\n{text}")


def _read(path: Path, name: str) -> Source:
    try:
        text = path.read_bytes().decode("utf8")
    except FileNotFoundError:
        raise ConfigError(f"method file {path} does not exist. {FORM}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"method file {path} cannot be read: {error}.") from error
    try:
        return Source(path, name, text, ast.parse(text))
    except SyntaxError as error:
        raise ConfigError(f"method file {path}, line {error.lineno}: {error.msg}.") from None
    except ValueError as error:
        raise ConfigError(f"method file {path} is no Python text: {error}.") from None


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class _Text(ExecutionLoader):
    """Imports a module from a text."""

    def __init__(self, source: Source):
        self.source = source

    def get_filename(self, fullname: str) -> str:
        return str(self.source.path)

    def get_source(self, fullname: str) -> str:
        return self.source.text


def _module(source: Source) -> ModuleType:
    """Return the imported module; one text at one path is imported once."""
    digest = _digest(source.text.encode())
    name = PREFIX + _digest(f"{source.path}\n{digest}".encode())[:16]
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_loader(name, _Text(source), origin=str(source.path))
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(source.path)
    setattr(module, DIGEST, digest)
    sys.modules[name] = module
    try:
        _Text(source).exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        lines = [n for f, n in traceback.walk_tb(error.__traceback__) if f.f_code.co_filename == str(source.path)]
        where = f", line {lines[-1]}" if lines else ""
        alone = " A method is one file: what lies beside it is not found." if isinstance(error, ImportError) else ""
        raise ConfigError(
            f"method file {source.path}{where} cannot be imported: {type(error).__name__}: {error}.{alone}"
        ) from error
    return module


def _fault(kind: Any) -> str | None:
    """Return what keeps a class from being a method, or None."""
    from pflsec.core.algorithm import Algorithm
    from pflsec.core.config import Config

    if not isinstance(kind, type) or not issubclass(kind, Algorithm):
        return "is no Algorithm: derive it from pflsec.core.algorithm.Algorithm"
    key = getattr(kind, "key", None)
    if not isinstance(key, str) or not key:
        return "has no key: give it a short name, as in key = 'mymethod'"
    if not any("Config" in vars(c) for c in kind.__mro__ if issubclass(c, Algorithm) and c is not Algorithm):
        return "has no Config: say which class holds its settings, as in Config = MyConfig"
    if not isinstance(kind.Config, type) or not issubclass(kind.Config, Config):
        return "has a Config that is not derived from pflsec.core.config.Config"
    missing = [name for name in ("local", "aggregate") if getattr(kind, name) is getattr(Algorithm, name)]
    return f"does not define {' and '.join(missing)}" if missing else None

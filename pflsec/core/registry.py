"""Methods, attacks, defenses, datasets and models by name, through entry points.

A stranger's package adds one the same way as ours: an entry in the group `pflsec.algorithms` (attacks, defenses, datasets,
models). Names are listed and described from source text alone: no method, and no torch, is imported for that.
"""

import ast
import importlib
import importlib.util
import re
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from pflsec.core import methodfile
from pflsec.core.errors import ConfigError, unknown

SECOND_LABEL = re.compile(r"\s{4,}([A-Z][a-z]+)\s{2,}")
"""A second label on a docstring's line: `Wire   down body.*     Private   head.*`."""
GROUPS = ("algorithms", "attacks", "defenses", "datasets", "models")


@dataclass(frozen=True)
class Setting:
    """One hyper-parameter as its source declares it."""

    name: str
    type: str
    default: str
    about: str
    cited: dict[str, str]
    rule: str


@dataclass(frozen=True)
class Card:
    """What a source file says about the thing it defines."""

    key: str
    group: str
    title: str
    family: str
    sections: dict[str, str]
    """The docstring's labelled lines: Source, Solves, Wire, Private, ..."""
    attributes: dict[str, Any]
    """Class attributes whose value is a literal: down, up, shared, private, presets, ..."""
    settings: list[Setting] = field(default_factory=list)


def names(group: str) -> list[str]:
    """Return the sorted names in a group."""
    return sorted(_entries(group))


def find(group: str, name: str) -> str:
    """Return the registered name that `name` means: case, dashes and underscores do not matter, and aliases count.

    A method may also be FILE.py:Class; its name then has the file's absolute path. Raises ConfigError with the nearest
    known name.
    """
    if _from_file(group, name):
        return str(methodfile.locate(name))
    wanted = plain(name)
    for key in _entries(group):
        if plain(key) == wanted:
            return key
    for key in _entries(group) if group == "attacks" else ():
        if wanted in (plain(alias) for alias in card(group, key).attributes.get("aliases", ())):
            return key
    raise ConfigError(unknown(group.removesuffix("s"), name, _entries(group)))


def load(group: str, name: str) -> Any:
    """Import and return the object registered under this name, or the class that FILE.py:Class names."""
    if _from_file(group, name):
        return methodfile.load(name)
    entry = _entries(group)[find(group, name)]
    try:
        return entry.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{group.removesuffix('s')} '{entry.name}' ({entry.value}) cannot be imported: {error}."
        ) from error


def card(group: str, name: str) -> Card:
    """Return the card of a registered thing, or of a method FILE.py:Class, read from its source without importing it."""
    if not _from_file(group, name):
        return registered_card(group, name)
    source = methodfile.locate(name)
    found = _card(source.tree, source.name, source.path.stem, group, "own file")
    return replace(found, key=str(found.attributes.get("key") or source.name.lower()))


@cache
def registered_card(group: str, name: str) -> Card:
    """Return the card of a registered thing."""
    entry = _entries(group)[name]
    tree = _tree(entry.module)
    if tree is None:
        raise ConfigError(f"{group.removesuffix('s')} '{name}': the module {entry.module} is not installed.")
    *_, family = entry.module.split(".")[:-1] or [entry.module]
    return _card(tree, entry.attr, name, group, family)


def _from_file(group: str, name: str) -> bool:
    return group == "algorithms" and methodfile.is_reference(name)


def _card(tree: ast.Module, attr: str, key: str, group: str, family: str) -> Card:
    node = next((n for n in tree.body if getattr(n, "name", None) == attr), None)
    text = (ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else ast.get_docstring(tree)) or ""
    title, sections = _sections(text)
    return Card(
        key=key,
        group=group,
        title=title,
        family=family,
        sections=sections,
        attributes=_literals(node) if isinstance(node, ast.ClassDef) else {},
        settings=_settings(tree, node) if isinstance(node, ast.ClassDef) else [],
    )


@cache
def settings_of(module: str, name: str) -> tuple[Setting, ...]:
    """Return the fields that a configuration class declares, read from its source without importing it."""
    tree = _tree(module)
    return tuple(_fields(name, {n.name: n for n in tree.body if isinstance(n, ast.ClassDef)}, tree)) if tree else ()


@cache
def _entries(group: str) -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=f"pflsec.{group}")}


@cache
def _tree(module: str) -> ast.Module | None:
    """Return a module's syntax tree, or None where there is no such source file."""
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:  # of a package above it
        spec = None
    if spec is None or spec.origin is None:
        return None
    return ast.parse(Path(spec.origin).read_text(encoding="utf8"))


def plain(name: str) -> str:
    """Return a name as names are compared: without case, dashes and underscores."""
    return "".join(c for c in name.lower() if c.isalnum())


def _sections(text: str) -> tuple[str, dict[str, str]]:
    """Split a docstring into its first paragraph and its labelled lines ("Source   ...", continued by indentation)."""
    title, _, rest = text.partition("\n\n")
    sections: dict[str, str] = {}
    label = ""
    for line in rest.splitlines():
        word, gap, value = line.partition("  ")
        if word and gap and not line.startswith(" ") and word.isalpha() and word[0].isupper():
            first, *more = SECOND_LABEL.split(value)
            label = word
            sections[label] = first.strip()
            sections |= {name: text.strip() for name, text in zip(more[::2], more[1::2], strict=True)}
            label = more[-2] if more else label
        elif label and line.startswith(" "):
            sections[label] += " " + line.strip()
        else:
            label = ""
    return " ".join(title.split()), sections


def _literals(node: ast.ClassDef) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value:
            pairs = [(statement.target, statement.value)]
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Tuple):
            values = statement.value.elts if isinstance(statement.value, ast.Tuple) else []
            pairs = list(zip(statement.targets[0].elts, values, strict=False))
        elif isinstance(statement, ast.Assign):
            pairs = [(statement.targets[0], statement.value)]
        else:
            continue
        for target, value in pairs:
            if isinstance(target, ast.Name) and (literal := _literal(value)) is not None:
                found[target.id] = literal
    return found


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


def _settings(tree: ast.Module, node: ast.ClassDef) -> list[Setting]:
    classes = {n.name: n for n in tree.body if isinstance(n, ast.ClassDef)}
    name = next(
        (s.value.id for s in node.body if isinstance(s, ast.Assign) and isinstance(s.value, ast.Name)
         and isinstance(s.targets[0], ast.Name) and s.targets[0].id == "Config"),
        "Config",
    )  # fmt: skip
    return _fields(name, classes, tree)


def _fields(name: str, classes: dict[str, ast.ClassDef], tree: ast.Module) -> list[Setting]:
    """Return the declared fields of a configuration class, those of its bases first."""
    if name not in classes:
        home = _imported_from(name, tree)
        if home is None or home == "pflsec.core.config":
            return []
        found = _tree(home)
        if found is None:
            return []
        tree = found
        classes = {n.name: n for n in tree.body if isinstance(n, ast.ClassDef)}
        if name not in classes:
            return []
    node = classes[name]
    settings = [s for base in node.bases if isinstance(base, ast.Name) for s in _fields(base.id, classes, tree)]
    own = [_setting(s, tree) for s in node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)]
    replaced = {s.name for s in own}
    return [s for s in settings if s.name not in replaced] + own


def _imported_from(name: str, tree: ast.Module) -> str | None:
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and any((a.asname or a.name) == name for a in node.names):
            return node.module
    return None


def _alias(annotation: ast.expr, tree: ast.Module) -> ast.expr:
    """Return what a type alias (`Labels = Literal[...]`) stands for, here or where it is imported from."""
    if not isinstance(annotation, ast.Name):
        return annotation
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == annotation.id:
            return node.value
    home = _imported_from(annotation.id, tree)
    source = _tree(home) if home else None
    return annotation if source is None else _alias(annotation, source)


def _setting(node: ast.AnnAssign, tree: ast.Module) -> Setting:
    assert isinstance(node.target, ast.Name)
    kind, value = ast.unparse(_alias(node.annotation, tree)), node.value
    if not isinstance(value, ast.Call):
        return Setting(node.target.id, kind, ast.unparse(value) if value else "", "", {}, "")
    words = {k.arg: _literal(k.value) for k in value.keywords if k.arg}
    bounds = [ast.unparse(a) for a in value.args]
    rules = {"at_least": ">= {}", "above": "> {}", "between": "{} to {}"}
    called = value.func.id if isinstance(value.func, ast.Name) else ""
    cited = {k: str(v) for k, v in words.items() if k not in ("default", "about")}
    rule = rules.get(called, "").format(*bounds) if len(bounds) == rules.get(called, "").count("{}") else ""
    return Setting(node.target.id, kind, str(words.get("default")), str(words.get("about") or ""), cited, rule)

"""Who imports whom, read from the syntax trees of all files, and what nobody calls."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from pflsec.core import registry

ROOT = Path(__file__).parents[2]
TOP_FOLDERS = ("algorithms", "attacks", "defenses", "reports")
"""Stand at the top of the repository, and are pflsec.algorithms and so on when imported."""

ALLOWED = {
    "core": set(),
    "config": {"core"},
    "data": {"core"},
    "models": {"core"},
    "training": {"core"},
    "wire": {"core"},
    "leakage": {"core"},
    "algorithms": {"core", "training", "models"},
    "attacks": {"core", "wire"},
    "defenses": {"core", "training", "wire"},
    "reports": {"core"},
    "runtime": {"core", "config", "data", "models", "training", "wire"},
    "session": {"core", "config", "data", "runtime", "wire", "leakage", "reports"},
    "tracking": {"core"},
    "api": {"core", "config", "data", "runtime", "wire", "leakage", "reports", "session", "tracking"},
    "sweep": {"config", "core", "runtime", "api", "reports"},
    "audit": {"config", "core", "api", "reports", "sweep"},
    "testing": {"core", "config", "runtime", "training"},
    "doctor": {"core", "leakage"},
    "cli": {"audit", "sweep", "doctor", "core", "config", "data", "runtime", "wire", "leakage", "reports", "api"},
}
"""For each part, the parts that it may import. `api` and `testing` are modules. A new part needs a row of its own."""


@dataclass(frozen=True)
class Import:
    """One import in one file; typing_only where it stands in a TYPE_CHECKING block, which does not run."""

    file: str
    line: int
    module: str
    typing_only: bool

    @property
    def part(self) -> str | None:
        """The part of pflsec that is imported, "" for the bare package, None for anything else."""
        words = self.module.split(".")
        return None if words[0] != "pflsec" else (words[1] if len(words) > 1 else "")


def sources() -> list[Path]:
    """Return all source files, each under the one path where it really lies."""
    inside = [p for p in (ROOT / "pflsec").rglob("*.py") if not any(parent.is_symlink() for parent in p.parents)]
    return sorted([*inside, *(p for folder in TOP_FOLDERS for p in (ROOT / folder).rglob("*.py"))])


def part_of(path: Path) -> str:
    """Return the part that a file belongs to; "" for pflsec/__init__.py."""
    words = path.relative_to(ROOT).with_suffix("").parts
    words = words[1:] if words[0] == "pflsec" else words
    return "" if words[0] == "__init__" else words[0]


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf8"))


def imports(path: Path) -> Iterator[Import]:
    """Yield every import of a file, those inside functions as well."""
    hidden = {
        id(node)
        for block in ast.walk(tree(path))
        if isinstance(block, ast.If) and ast.unparse(block.test).endswith("TYPE_CHECKING")
        for node in ast.walk(block)
    }
    for node in ast.walk(tree(path)):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = ["." * node.level + (node.module or "")]
            if node.module == "pflsec":
                modules = [f"pflsec.{alias.name}" for alias in node.names]
        for module in modules:
            yield Import(str(path.relative_to(ROOT)), getattr(node, "lineno", 0), module, id(node) in hidden)


EVERY_IMPORT = [(part_of(path), found) for path in sources() for found in imports(path)]


def test_there_is_something_to_look_at():
    assert len(sources()) > 50
    assert {part_of(path) for path in sources()} - {""} <= ALLOWED.keys()
    assert len([1 for part, found in EVERY_IMPORT if found.part]) > 100


@pytest.mark.parametrize("part", ALLOWED)
def test_a_part_imports_only_what_it_may(part: str):
    """Imports for type checkers alone do not run, and are left out."""
    wrong = [
        f"{found.file}:{found.line} imports {found.module}"
        for importer, found in EVERY_IMPORT
        if importer == part
        and not found.typing_only
        and found.part
        and found.part != part
        and found.part not in ALLOWED[part]
    ]
    assert not wrong, "\n".join(wrong)


def test_attacks_see_captures_and_nothing_else_of_the_wire():
    modules = {found.module for part, found in EVERY_IMPORT if part == "attacks" and found.part == "wire"}
    assert modules <= {"pflsec.wire.capture"}


def test_a_type_of_the_core_may_name_a_capture_and_no_more():
    late = {found.module for part, found in EVERY_IMPORT if part == "core" and found.typing_only and found.part}
    assert late <= {"pflsec.wire.capture"} | {f"pflsec.core.{p.stem}" for p in (ROOT / "pflsec" / "core").glob("*.py")}


def test_only_the_leakage_package_reads_the_vault():
    """Others may write it (core.vault); its reader is imported by the one that hands its content on, to scorer and attacks."""
    importers = {part for part, found in EVERY_IMPORT if found.module.startswith("pflsec.leakage.vault")}
    assert importers <= {"leakage", "session", "cli"}


def test_parts_do_not_import_each_other_in_a_circle():
    arrows = {
        part: {
            found.part for importer, found in EVERY_IMPORT if importer == part and not found.typing_only and found.part
        }
        - {part, None}
        for part in ALLOWED
    }
    while arrows:
        leaves = {part for part, targets in arrows.items() if not targets & arrows.keys()}
        assert leaves, f"a circle among {sorted(arrows)}"
        arrows = {part: targets for part, targets in arrows.items() if part not in leaves}


def test_nothing_is_imported_under_a_second_identity():
    """`import algorithms` would run a method's file twice, under two names, with two classes that are not equal."""
    everywhere = [*sources(), *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]
    wrong = [
        f"{found.file}:{found.line} imports {found.module}"
        for path in everywhere
        for found in imports(path)
        if found.module.split(".")[0] in TOP_FOLDERS or found.module.startswith(".")
    ]
    assert not wrong, "\n".join(wrong)


def test_a_class_has_one_identity():
    assert registry.load("algorithms", "fedavg").__module__ == "pflsec.algorithms.traditional.fedavg"
    assert not {name for name in sys.modules if name.split(".")[0] in TOP_FOLDERS}


# --- what nobody calls

FORBIDDEN_MODULES = {"cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
NARROWED = "class Reader(pickle.Unpickler):\n def find_class(self, module, name): raise KeyError(name)"
FORBIDDEN_CALLS = {"eval", "exec", "__import__", "compile"}


def _guarded_unpicklers(node: ast.AST) -> list[ast.expr]:
    """Return the bases of a class that decides by itself which names a pickle may use."""
    if isinstance(node, ast.ClassDef) and any(getattr(part, "name", "") == "find_class" for part in node.body):
        return [base for base in node.bases if ast.unparse(base) == "pickle.Unpickler"]
    return []


def dangers(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, what) for everything that could run or unpack a stranger's code. Pickle's errors may be caught,
    and its reader may be narrowed to names of one's own choice."""
    guarded = {id(base) for node in ast.walk(module) for base in _guarded_unpicklers(node)}
    for node in ast.walk(module):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from ((node.lineno, n) for n in names if n.split(".")[0] in FORBIDDEN_MODULES)
            renamed = [a.asname or a.name for a in node.names if "pickle" in (a.name, getattr(node, "module", ""))]
            yield from ((node.lineno, n) for n in renamed if n != "pickle" and not n.endswith("Error"))
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pickle" and id(node) not in guarded:
            yield from [] if node.attr.endswith("Error") else [(node.lineno, f"pickle.{node.attr}")]
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            words = {k.arg: ast.unparse(k.value) for k in node.keywords}
            if called in FORBIDDEN_CALLS:
                yield node.lineno, f"{called}()"
            if called in ("torch.load", "torch.save") and words.get("weights_only") != "True":
                yield node.lineno, f"{called} without weights_only=True"
            if called.endswith(("read_pickle", "to_pickle", "yaml.load", "os.system")):
                yield node.lineno, called
            if words.get("allow_pickle", "False") != "False":
                yield node.lineno, "allow_pickle"
            if words.get("shell", "False") != "False":
                yield node.lineno, "shell=True"
            if called in ("np.load", "numpy.load") and "allow_pickle" not in words and len(node.args) > 2:
                yield node.lineno, "np.load with positional arguments"


def test_nothing_unpickles_or_runs_what_it_reads():
    wrong = [f"{path.relative_to(ROOT)}:{line} {what}" for path in sources() for line, what in dangers(tree(path))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "code",
    [
        "import pickle as p",
        "x = pickle.loads",
        "class A(pickle.Unpickler): pass",
        "pickle.Unpickler(f).load()",
        "import dill",
        "from pickle import loads",
        "eval(x)",
        "exec('1')",
        "torch.load(f)",
        "torch.load(f, weights_only=False)",
        "np.load(f, allow_pickle=True)",
        "np.load(f, allow_pickle=flag)",
        "subprocess.run(c, shell=True)",
        "frame.to_pickle(f)",
    ],
)
def test_each_danger_would_be_seen(code: str):
    assert list(dangers(ast.parse(code)))


@pytest.mark.parametrize(
    "code",
    [
        "model.eval()",
        "import pickle",
        "pickle.UnpicklingError",
        "torch.load(f, weights_only=True)",
        "np.load(f)",
        "re.compile(x)",
    ],
)
def test_harmless_calls_are_let_through(code: str):
    assert not list(dangers(ast.parse(code)))


# --- what starts without torch


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize(
    "module", ["pflsec", "pflsec.core", "pflsec.core.registry", "pflsec.cli", "pflsec.config.train"]
)
def test_starting_imports_no_torch(module: str):
    heavy = "{'torch', 'opacus', 'torchvision', 'lpips', 'pandas', 'matplotlib', 'plotly'}"
    assert run(f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))") == "[]"


def test_every_card_is_read_without_torch_and_without_its_module():
    code = """
import sys
from pflsec.core import registry
cards = [registry.card(g, n) for g in registry.GROUPS for n in registry.names(g)]
modules = [e.module for g in registry.GROUPS for e in registry._entries(g).values()]
print(len(cards), 'torch' in sys.modules, sorted(m for m in modules if m in sys.modules))
"""
    count, rest = run(code).split(" ", 1)
    assert int(count) >= 14
    assert rest == "False []"


def test_the_command_line_starts_without_torch():
    assert run("import sys, pflsec.cli.app; print('torch' in sys.modules)") == "False"

"""run.json: what a run was, in full, so that it can be understood and repeated."""

import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pflsec
from pflsec.config.train import TrainConfig
from pflsec.core import methodfile, registry
from pflsec.core.change import untouched
from pflsec.core.contract import Direction, kind_of
from pflsec.core.network import buffer_in
from pflsec.data.federation import Federation
from pflsec.models import catalogue
from pflsec.runtime.folder import SCHEMA
from pflsec.runtime.setup import Setup

PACKAGES = ("torch", "torchvision", "opacus", "numpy", "scipy", "scikit-image", "lpips", "pydantic", "safetensors")


def describe(setup: Setup, name: str, dp: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the manifest of a run that is about to start."""
    config, contract = setup.config, setup.algorithm.contract
    return {
        "schema": SCHEMA,
        "name": name,
        "state": "running",
        "reason": None,
        "started": now(),
        "finished": None,
        "algorithm": _algorithm(setup),
        "config": config.model_dump(),
        "seed": config.seed,
        "versions": versions(),
        "git": git_revision(),
        "device": "cpu",
        "threads": 1,
        "data": _data(setup.federation),
        "model": _model(setup),
        "wire": wire_table(setup),
        "defenses": config.defense,
        "undefended": untouched(contract) if any(d.seam == "uplink" for d in setup.defenses) else [],
        "dp": dict(dp) if dp else {"enabled": False, "coverage": {}},
        "captures": _captures(config),
    }


def _algorithm(setup: Setup) -> dict[str, Any]:
    card, algorithm = registry.card("algorithms", setup.config.algo), setup.algorithm
    return {
        "key": card.key,
        "family": card.family,
        "title": card.title,
        "sections": card.sections,
        "settings": algorithm.cfg.model_dump(),
        "file": methodfile.facts(type(getattr(algorithm, "inner", algorithm))),
    }


def _data(federation: Federation) -> dict[str, Any]:
    dataset = federation.dataset
    words = {"words": list(dataset.words)} if dataset.words else {}
    return {
        "name": dataset.name,
        "source": dataset.source,
        "class_names": list(dataset.class_names),
        "input": federation.input.as_dict(),
        "partition": federation.fingerprint(),
        "histogram": federation.histogram(),
        **words,
    }


def _model(setup: Setup) -> dict[str, Any]:
    config, net = setup.config, setup.net
    return {
        "name": catalogue.resolved(config.model, setup.federation.input.vocabulary),
        "split": net.split,
        "parameters": net.size(),
        "bn_buffers": config.buffers if net.batchnorms else "n/a",
        "shapes": {k: list(v) for k, v in net.shapes.items()},
    }


def _captures(config: TrainConfig) -> dict[str, Any]:
    rounds = config.captured_rounds()
    return {
        "rounds": rounds,
        "clients": config.captured_clients() if rounds else [],
        "victims": config.victims,
        "batch": config.victim_batch,
        "steps": config.victim_steps,
        "kind": config.kind,
    }


def wire_table(setup: Setup) -> list[dict[str, Any]]:
    """Return a row for every declared item: direction, item, kind, number of tensors, parameters; and the private parts.

    Running statistics have a row of their own, beside that of the weights they come with.
    """
    algorithm, shapes = setup.algorithm, setup.net.shapes
    contract = algorithm.contract
    rows: list[dict[str, Any]] = []
    directions: tuple[tuple[Direction, Any], ...] = (("down", contract.down), ("up", contract.up))
    for direction, declared in directions:
        for key, text in declared.items():
            named = [n for n in contract.items(direction) if n == key.rstrip("?") or n.startswith(key.rstrip("?*"))]
            row = {"direction": direction, "item": key.rstrip("?"), "optional": key.endswith("?")}
            shape = text.partition(" ")[2] if "[" in text else None
            rows += _rows(setup, named, row | {"kind": kind_of(text), "shape": shape})
    kept = {f"{part}.*": [n for n in shapes if n.startswith(part)] for part in algorithm.private}
    if contract.omit:
        kept["normalisation layers"] = sorted(contract.omit)
    for item, named in kept.items():
        row = {"direction": "private", "item": item, "optional": False}
        rows += _rows(setup, named, row | {"kind": "weights", "shape": None})
    return rows


def _rows(setup: Setup, named: list[str], row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the row of these items, and one more for the running statistics among them."""
    buffers = [n for n in named if buffer_in(setup.net, n)]
    others = [n for n in named if n not in buffers]
    groups = [(row["kind"], others)] if others or not buffers else []
    return [
        row | {"kind": kind, "tensors": len(group), "numbers": _numbers(setup, group)}
        for kind, group in [*groups, *([("buffers", buffers)] if buffers else [])]
    ]


def _numbers(setup: Setup, named: list[str]) -> int | None:
    """Return how many numbers items of the network hold; None for others, whose shapes vary."""
    shapes = setup.net.shapes
    sizes = [next((s for p, s in shapes.items() if n == p or n.endswith("." + p)), None) for n in named]
    return sum(_product(s) for s in sizes if s is not None) or None


def versions() -> dict[str, str]:
    """Return the versions of Python, pflsec and the packages that results depend on."""
    found = {"python": platform.python_version(), "platform": platform.platform(), "pflsec": pflsec.__version__}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def git_revision() -> str | None:
    """Return the revision of the source tree that pflsec is imported from, or None outside one."""
    home = Path(pflsec.__file__).resolve().parents[1]
    if not (home / ".git").exists():
        return None
    try:
        found = subprocess.run(
            ["git", "-C", str(home), "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            check=True,
            timeout=5,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None


def now() -> str:
    """Return the time as an ISO 8601 string in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _product(shape: tuple[int, ...]) -> int:
    total = 1
    for n in shape:
        total *= n
    return total

"""run.json: what a run was, in full, so that it can be understood and repeated."""

import platform
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pflsec
from pflsec.core import methodfile, registry
from pflsec.core.contract import Direction, kind_of
from pflsec.runtime.folder import SCHEMA
from pflsec.runtime.setup import Setup

PACKAGES = ("torch", "torchvision", "opacus", "numpy", "scipy", "scikit-image", "lpips", "pydantic", "safetensors")


def describe(setup: Setup, name: str, dp: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the manifest of a run that is about to start."""
    config, algorithm, federation = setup.config, setup.algorithm, setup.federation
    card = registry.card("algorithms", config.algo)
    dataset = federation.dataset
    return {
        "schema": SCHEMA,
        "name": name,
        "state": "running",
        "reason": None,
        "started": now(),
        "finished": None,
        "algorithm": {
            "key": card.key,
            "family": card.family,
            "title": card.title,
            "sections": card.sections,
            "settings": algorithm.cfg.model_dump(),
            "file": methodfile.facts(type(algorithm)),
        },
        "config": config.model_dump(),
        "seed": config.seed,
        "versions": versions(),
        "git": git_revision(),
        "device": "cpu",
        "threads": 1,
        "data": {
            "name": dataset.name,
            "source": dataset.source,
            "class_names": list(dataset.class_names),
            "input": federation.input.as_dict(),
            "partition": federation.fingerprint(),
            "histogram": federation.histogram(),
        },
        "model": {
            "name": "cnn" if config.model == "auto" else config.model,
            "split": setup.net.split,
            "parameters": setup.net.size(),
            "shapes": {k: list(v) for k, v in setup.net.shapes.items()},
        },
        "wire": wire_table(setup),
        "defenses": config.defense,
        "dp": dict(dp) if dp else {"enabled": False, "coverage": {}},
        "captures": {
            "rounds": config.captured_rounds(),
            "clients": config.captured_clients() if config.captured_rounds() else [],
            "victims": config.victims,
            "batch": config.victim_batch,
            "steps": config.victim_steps,
            "kind": config.kind,
        },
    }


def wire_table(setup: Setup) -> list[dict[str, Any]]:
    """Return a row for every declared item: direction, item, kind, number of tensors, parameters; and the private parts."""
    contract, shapes = setup.algorithm.contract, setup.net.shapes
    rows: list[dict[str, Any]] = []
    directions: tuple[tuple[Direction, Any], ...] = (("down", contract.down), ("up", contract.up))
    for direction, declared in directions:
        for key, text in declared.items():
            named = [n for n in contract.items(direction) if n == key.rstrip("?") or n.startswith(key.rstrip("?*"))]
            sizes = [next((s for p, s in shapes.items() if n == p or n.endswith("." + p)), None) for n in named]
            numbers = sum(_product(s) for s in sizes if s is not None) or None
            rows.append({
                "direction": direction,
                "item": key.rstrip("?"),
                "optional": key.endswith("?"),
                "kind": kind_of(text),
                "shape": text.partition(" ")[2] if "[" in text else None,
                "tensors": len(named),
                "numbers": numbers,
            })  # fmt: skip
    rows += [
        {"direction": "private", "item": f"{part}.*", "kind": "weights", "optional": False, "shape": None,
         "tensors": sum(n.startswith(part) for n in shapes),
         "numbers": sum(_product(s) for n, s in shapes.items() if n.startswith(part))}
        for part in setup.algorithm.private
    ]  # fmt: skip
    return rows


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

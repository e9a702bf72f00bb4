"""The state of an installation: what is there, what is missing, and how to get it. Nothing is fetched or changed."""

import inspect
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from pflsec.core import registry
from pflsec.core.errors import DataError, PflsecError

Status = Literal["ok", "missing", "broken"]
ESSENTIAL = ("torch", "numpy", "scipy", "pandas", "pydantic", "safetensors", "typer", "rich", "matplotlib", "jinja2")
OTHERS = ("torchvision", "opacus", "scikit-image", "scikit-learn", "lpips")
LINKS = ("algorithms", "attacks", "defenses", "reports")
ENOUGH = 64_000_000  # bytes of shared memory for the messages of a few workers


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. `broken` keeps pflsec from working, `missing` only a part of it."""

    part: str
    name: str
    status: Status
    detail: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Return all findings, in the order in which they are shown."""
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (versions, machine, checkout, registered, datasets, weights)
    return [finding for check in checks for finding in check()]


def versions() -> Iterator[Finding]:
    """Yield the versions of Python, pflsec and the packages that results depend on."""
    import pflsec

    good = sys.version_info >= (3, 11)
    yield Finding(
        "versions", "python", "ok" if good else "broken", sys.version.split()[0], "" if good else "Use 3.11 or later."
    )
    yield Finding("versions", "pflsec", "ok", f"{pflsec.__version__} in {Path(pflsec.__file__).parent}")
    for package in (*ESSENTIAL, *OTHERS):
        try:
            yield Finding("versions", package, "ok", version(package))
        except PackageNotFoundError:
            status: Status = "broken" if package in ESSENTIAL else "missing"
            yield Finding("versions", package, status, "not installed", f"Install it: python -m pip install {package}")


def machine() -> Iterator[Finding]:
    """Yield devices, cores and threads, memory, and the shared memory that worker processes need."""
    try:
        import torch
    except Exception as error:  # a broken installation fails in any way
        yield Finding("machine", "torch", "broken", f"cannot be imported: {error}", "Install torch again.")
        return
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    others = [*(f"cuda:{i}" for i in range(torch.cuda.device_count() if cuda else 0)), *(["mps"] if mps else [])]
    yield Finding("machine", "devices", "ok", ", ".join(["cpu", *others]))
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding(
        "machine", "cores", "ok", f"{allowed} usable of {os.cpu_count()}; torch uses {torch.get_num_threads()} threads"
    )
    if memory := _memory():
        yield Finding("machine", "memory", "ok", f"{memory / 1e9:.1f} GB")
    yield _shared_memory()


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def _shared_memory() -> Finding:
    """Return whether a block of shared memory can be made and written, and how much room there is."""
    from multiprocessing.shared_memory import SharedMemory

    remedy = "Worker processes need it: give the container more (--shm-size), or use --executor serial."
    try:
        block = SharedMemory(create=True, size=1 << 16)
        block.close()
        block.unlink()
        free = os.statvfs("/dev/shm").f_bavail * os.statvfs("/dev/shm").f_frsize if Path("/dev/shm").is_dir() else None
    except OSError as error:
        return Finding("machine", "shared memory", "missing", f"cannot be used: {error.strerror or error}", remedy)
    if free is not None and free < ENOUGH:
        return Finding("machine", "shared memory", "missing", f"only {free / 1e6:.0f} MB free", remedy)
    return Finding("machine", "shared memory", "ok", "works" if free is None else f"{free / 1e6:.0f} MB free")


def checkout() -> Iterator[Finding]:
    """Yield whether the four linked folders are there. A clone without symbolic links has small text files instead."""
    import pflsec

    home = Path(pflsec.__file__).parent
    broken = [name for name in LINKS if not (home / name / "__init__.py").is_file()]
    if not broken:
        links = [name for name in LINKS if (home / name).is_symlink()]
        yield Finding(
            "installation", "folders", "ok", "links of a checkout" if links else "folders of an installed package"
        )
        return
    remedy = (
        "This clone has no symbolic links. Switch them on (git config core.symlinks true), then "
        "git checkout -- pflsec; or install a wheel."
    )
    yield Finding("installation", "folders", "broken", f"{', '.join(broken)} in {home} cannot be entered", remedy)


def registered() -> Iterator[Finding]:
    """Yield how many methods, attacks and defenses there are, and those whose source cannot be found."""
    for group in registry.GROUPS:
        names = registry.names(group)
        absent = [name for name in names if not _has_card(group, name)]
        if not names or absent:
            what = f"without their source: {', '.join(absent)}" if absent else "none registered"
            yield Finding("installation", group, "broken", what, "Install pflsec again: python -m pip install -e .")
        else:
            yield Finding("installation", group, "ok", f"{len(names)}: {', '.join(names)}")


def _has_card(group: str, name: str) -> bool:
    try:
        return bool(registry.card(group, name))
    except (PflsecError, ImportError, OSError, SyntaxError):
        return False


def datasets() -> Iterator[Finding]:
    """Yield which datasets can be loaded. Those that are given as a path are not asked."""
    for name in registry.names("datasets"):
        try:
            make = registry.load("datasets", name)
            if any(p.default is p.empty for p in inspect.signature(make).parameters.values()):
                yield Finding("datasets", name, "ok", f"yours, given as {name}:PATH")
                continue
            dataset = make()
        except DataError as error:
            first, _, remedy = str(error).partition(". ")
            yield Finding("datasets", name, "missing", first, remedy)
        except Exception as error:  # a stranger's dataset fails in any way
            status: Status = "broken" if name == "digits" else "missing"
            yield Finding("datasets", name, status, f"cannot be loaded: {error}", "Install its packages.")
        else:
            shape = "x".join(map(str, dataset.images.shape[1:]))
            yield Finding(
                "datasets", name, "ok", f"{len(dataset.images):,} images of {shape}, {dataset.classes} classes"
            )


def weights() -> Iterator[Finding]:
    """Yield which trunks of the perceptual metric are there; without one its column is empty."""
    try:
        from pflsec.leakage.perceptual import TRUNKS, Perceptual, default_path
    except ImportError as error:
        yield Finding("perceptual metric", "lpips", "missing", f"cannot be imported: {error}", "Install lpips 0.1.4.")
        return
    nets: Any = TRUNKS
    for net in nets:
        path = default_path(net)
        if not path.is_file():
            yield Finding("perceptual metric", net, "missing", f"no {path}", Perceptual.find(net).remedy)
            continue
        found, size = Perceptual.find(net), f"{path.stat().st_size / 1e6:.0f} MB"
        good = found.status == "ok"
        detail = f"{path}, {size}, hash ok" if good else f"{path}, {size}: {found.status}"
        yield Finding("perceptual metric", net, "ok" if good else "missing", detail, found.remedy)

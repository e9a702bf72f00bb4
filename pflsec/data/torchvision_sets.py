"""MNIST, Fashion-MNIST and CIFAR-10, read by torchvision from their official files.

The files lie in the folder that the environment variable PFLSEC_DATA names, or else in ~/.cache/pflsec/data. The
internet is left alone unless a download was asked for.
"""

import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from torchvision.datasets import CIFAR10, MNIST, FashionMNIST
from torchvision.datasets.utils import check_integrity

from pflsec.core.errors import DataError
from pflsec.data.datasets import Dataset, from_arrays

PATIENCE = 30.0
"""Seconds that a server may stay silent during a download."""

Kind = type[MNIST] | type[CIFAR10]


def mnist(download: bool = False) -> Dataset:
    """Handwritten digits, 28x28 grey: 60,000 official training rows, then 10,000 official test rows.

    Source   torchvision MNIST (LeCun, Cortes, Burges, 1998; from NIST Special Databases 1 and 3)
    Shape    1x28x28
    Classes  10
    Size     70,000 images, 12 MB to download (--download), 55 MB on disk and in memory
    Licence  CC BY-SA 3.0
    """
    return _load("mnist", MNIST, download)


def fashion_mnist(download: bool = False) -> Dataset:
    """Zalando's pictures of clothes, 28x28 grey: 60,000 official training rows, then 10,000 official test rows.

    Source   torchvision FashionMNIST (Xiao, Rasul, Vollgraf 2017, arXiv 1708.07747)
    Shape    1x28x28
    Classes  10
    Size     70,000 images, 31 MB to download (--download), 55 MB on disk and in memory
    Licence  MIT
    """
    return _load("fashion-mnist", FashionMNIST, download)


def cifar10(download: bool = False) -> Dataset:
    """Photographs of animals and vehicles, 32x32 colour: 50,000 official training rows, then 10,000 test rows.

    Source   torchvision CIFAR10 (Krizhevsky 2009, "Learning Multiple Layers of Features from Tiny Images")
    Shape    3x32x32
    Classes  10
    Size     60,000 images, 170 MB to download (--download), 185 MB on disk and in memory
    Licence  none stated by its authors
    """
    return _load("cifar10", CIFAR10, download)


def folder() -> Path:
    """Return the folder of all downloaded datasets; it may not exist yet."""
    return Path(os.environ.get("PFLSEC_DATA") or "~/.cache/pflsec/data").expanduser()


def _load(name: str, kind: Kind, download: bool) -> Dataset:
    root = folder()
    fault = _fault(root, kind)
    if fault and download:
        _fetch(name, root, kind)
        fault = _fault(root, kind)
    if fault:
        raise DataError(f"dataset '{name}': {fault}. {_remedy(root, kind)}")
    try:
        parts = [kind(root, train=train) for train in (True, False)]
    except Exception as error:
        # What the checks above let through, torchvision's readers refuse in as many ways as there are.
        raise DataError(
            f"dataset '{name}' in {root} cannot be read: {_one_line(error)}. {_remedy(root, kind)}"
        ) from error
    counts = [len(part.data) for part in parts]
    return from_arrays(
        np.concatenate([np.asarray(part.data) for part in parts]),
        np.concatenate([np.asarray(part.targets, dtype=np.int64) for part in parts]),
        is_test=np.repeat([False, True], counts),
        class_names=[text.partition(" - ")[0] for text in parts[0].classes],
        name=name,
        source=f"torchvision {kind.__name__}: official training rows, then official test rows",
    )


def _files(kind: Kind) -> dict[str, str | None]:
    """Return the files that a class reads, by their paths below the root, with the md5 that it demands, if any."""
    if issubclass(kind, MNIST):
        return {f"{kind.__name__}/raw/{name.removesuffix('.gz')}": None for name, _ in kind.resources}
    listed = [*kind.train_list, *kind.test_list, (kind.meta["filename"], kind.meta["md5"])]
    return {f"{kind.base_folder}/{name}": md5 for name, md5 in listed}


def _fault(root: Path, kind: Kind) -> str | None:
    """Return why a dataset cannot be read here, or None."""
    for name, md5 in _files(kind).items():
        path = root / name
        try:
            if not path.is_file():
                return f"{path} does not exist"
            if md5 is None and (why := _idx_fault(path)):
                return f"{path} is truncated or damaged: {why}"
            if md5 is not None and not check_integrity(path, md5):
                return f"{path} is not the official file: its md5 is not {md5}. It is a pickle, so it is not opened"
        except OSError as error:
            return f"{path} cannot be read: {error.strerror or error}"
    return None


def _idx_fault(path: Path) -> str | None:
    """Return what is wrong with the size of a file in the format of MNIST: magic number, lengths, bytes."""
    with path.open("rb") as stream:
        magic = stream.read(4)
        if len(magic) < 4 or magic[:3] != b"\0\0\x08":
            return "it does not begin as an idx file of bytes does"
        header = stream.read(4 * magic[3])
    lengths = [int.from_bytes(header[i : i + 4], "big") for i in range(0, 4 * magic[3], 4)]
    expected, found = 4 + 4 * magic[3] + prod(lengths), path.stat().st_size
    return None if found == expected else f"it has {found} bytes, and should have {expected}"


def _remedy(root: Path, kind: Kind) -> str:
    listed = [Path(name) for name in _files(kind)]
    names = ", ".join(path.name for path in listed)
    return f"Use --download, or put the official files, unpacked, into {root / listed[0].parent}: {names}."


def _fetch(name: str, root: Path, kind: Kind) -> None:
    """Download a dataset and move its files into place once all of them are complete; otherwise leave no trace."""
    absent = [path for path in (root, *root.parents) if not path.exists()]
    try:
        root.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".download-", dir=root) as new, _quiet_network():
            kind(new, train=True, download=True)
            for file in _files(kind):
                (root / file).parent.mkdir(parents=True, exist_ok=True)
                os.replace(Path(new) / file, root / file)
    except BaseException as error:
        with suppress(OSError):
            for path in absent:
                path.rmdir()
        if not isinstance(error, Exception):
            raise
        # A network, a mirror and a disk can fail in any way.
        raise DataError(
            f"dataset '{name}' could not be downloaded to {root}: {_one_line(error)}; nothing was kept. Try again "
            f"later, or fetch the files elsewhere. {_remedy(root, kind).replace('Use --download, or put', 'Put')}"
        ) from error


@contextmanager
def _quiet_network() -> Iterator[None]:
    """Keep torchvision's messages off stdout, where results are printed, and give up on servers that fall silent."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(PATIENCE)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        socket.setdefaulttimeout(before)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__

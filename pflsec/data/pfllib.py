"""Datasets that PFLlib has divided and saved: image folders, read without trusting their pickles.

PFLlib keeps each client's images as a Python dictionary in a pickle, and a pickle can run any code when it is opened.
The reader here knows the few names of NumPy that such a file needs. In their place it puts stand-ins of its own,
which accept numbers and nothing else; every other name is refused before anything is called.
"""

import io
import json
import os
import pickle
import pickletools
import re
import warnings
import zipfile
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from pflsec.core.errors import DataError, PflsecWarning
from pflsec.data.datasets import Dataset

SIDES = ("train", "test")
LARGEST = 4 * 2**30
"""Bytes of one client's file when unpacked."""
EXACT = 1e-4
"""Levels of 0..255 within which a normalised pixel counts as a whole level."""
ROUNDING = 1e-6
CONFIG = ("num_clients", "num_classes", "Size of samples for labels in clients")
FORMS = "only folders of images are read: train/<i>.npz and test/<i>.npz, each with y [n] and x [n, C, H, W], C 1 or 3"


def pfllib(path: str) -> Dataset:
    """A PFLlib dataset folder (images), with its clients and their test parts; given as pfllib:PATH.

    Source   a folder made by PFLlib: train/<i>.npz and test/<i>.npz, perhaps with config.json. Its clients come
             back with --partition natural --test given
    Shape    as in the files, x [n, C, H, W] with C 1 or 3, normalised to [-1, 1] or [0, 1]; turned back into pixels
    Classes  as in config.json, or up to the largest label
    Size     as the files; they are read into memory
    Licence  that of the data
    """
    folder = Path(os.path.expanduser(path))
    clients = _clients(folder)
    files = [folder / side / f"{client}.npz" for client in range(clients) for side in SIDES]
    images, labels = zip(*(_read(file) for file in files), strict=True)
    for file, x in zip(files, images, strict=True):
        if (x.dtype, x.shape[1:]) != (images[0].dtype, images[0].shape[1:]):
            found = f"{x.dtype} {list(x.shape[1:])}"
            _reject(file, f"images are {found}, but in {files[0]} {images[0].dtype} {list(images[0].shape[1:])}")
    rows = [len(y) for y in labels]
    whole = np.concatenate(labels)
    client_ids = np.repeat(np.arange(clients).repeat(2), rows)
    classes = _compare(folder, whole, client_ids)
    return Dataset(
        name=folder.resolve().name,
        images=_pixels(folder, images),
        labels=whole,
        classes=classes,
        class_names=tuple(str(c) for c in range(classes)),
        client_ids=client_ids,
        is_test=np.repeat(np.tile([False, True], clients), rows),
        source=f"PFLlib folder {folder}",
    )


def _reject(file: Path, sentence: str) -> NoReturn:
    raise DataError(f"PFLlib file {file}: {sentence}.")


def _clients(folder: Path) -> int:
    """Return the number of clients; DataError when a client's file is missing, or the folder has another form."""
    if not folder.is_dir():
        raise DataError(f"PFLlib folder {folder} does not exist; give it as in --data pfllib:PATH.")
    names = re.compile(r"(0|[1-9]\d{0,8})\.npz")
    found = {
        side: {int(m[1]) for entry in (folder / side).glob("*.npz") if (m := names.fullmatch(entry.name))}
        for side in SIDES
    }
    everyone = found["train"] | found["test"]
    if not everyone:
        beside = next(folder.glob("train*.npz"), None)
        what = f"has {beside.name} beside train/, as PFLlib's FEMNIST has" if beside else "has no train/0.npz"
        raise DataError(f"PFLlib folder {folder} {what}; {FORMS}.")
    last = max(everyone)
    for client in range(last + 1):
        for side in SIDES:
            if client not in found[side]:
                raise DataError(
                    f"PFLlib folder {folder} lacks {side}/{client}.npz, though it has clients up to {last}; every "
                    "client from 0 on has a train and a test file. Copy the folder again."
                )
    return last + 1


# --- one file


def _read(file: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return one file's images [n, C, H, W] as saved (float32, uint8 or bool), and its labels, int64 [n]."""
    try:
        content = _unpack(file, _payload(file))
    except DataError:
        raise
    except _Refused as error:
        _reject(file, f"{error}; {FORMS}")
    except OSError as error:
        _reject(file, f"cannot be read: {error.strerror or error}")
    except MemoryError:
        _reject(file, "its content does not fit into memory")
    except Exception as error:
        # Decoding bytes that nobody vouches for can fail in any way.
        _reject(file, f"is truncated or damaged ({' '.join(str(error).split())}); copy it again")
    if not isinstance(content, dict) or not {"x", "y"} <= content.keys():
        _reject(file, f"it does not hold a dictionary with x and y; {FORMS}")
    x, y = _array(file, "x", content["x"]), _array(file, "y", content["y"])
    if x.ndim != 4 or x.shape[1] not in (1, 3) or not (x.dtype.kind in "fb" or x.dtype == np.uint8):
        _reject(file, f"x is {x.dtype} {list(x.shape)}, which is no set of images; {FORMS}")
    if y.dtype.kind not in "iu" or y.shape != (len(x),) or not x.size:
        _reject(file, f"y is {y.dtype} {list(y.shape)} for {len(x)} images; it must be one whole number per image")
    if not np.isfinite([x.min(), x.max()]).all():
        _reject(file, "x holds a NaN or an infinity; repair or drop such images")
    return x.astype(np.float32, copy=False) if x.dtype.kind == "f" else x, y.astype(np.int64)


def _payload(file: Path) -> bytes:
    """Return the pickle in a file's only member; the header in front of it must announce one Python object."""
    if not zipfile.is_zipfile(file):
        _reject(file, "is no .npz (zip) archive, or is truncated")
    with zipfile.ZipFile(file) as archive:
        if archive.namelist() != ["data.npy"]:
            held = ", ".join(archive.namelist()[:5]) or "nothing"
            _reject(file, f"must hold data.npy alone, as PFLlib's files do, but holds {held}")
        size = archive.getinfo("data.npy").file_size
        if size > LARGEST:
            _reject(file, f"unpacks to {size / 2**30:.1f} GiB; at most {LARGEST / 2**30:.0f} GiB per client are read")
        stream = io.BytesIO(archive.read("data.npy"))
    version = np.lib.format.read_magic(stream)
    header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = header(stream)
    if shape != () or dtype != np.dtype(object):
        _reject(file, f"data.npy is {dtype} {list(shape)}, not a dictionary as PFLlib saves it")
    return stream.read()


def _array(file: Path, what: str, value: Any) -> np.ndarray:
    """Return x or y as an array; some of PFLlib's generators save lists of arrays, or of numbers."""
    items = value if isinstance(value, list) else [value]
    plain = [item.value if isinstance(item, _Array) else item for item in items]
    kinds = (np.ndarray, int, float, bool)
    if not isinstance(value, list | _Array) or not all(isinstance(item, kinds) for item in plain):
        _reject(file, f"{what} is no array and no list of arrays; {FORMS}")
    if isinstance(value, _Array):
        return plain[0]
    if len({np.shape(item) for item in plain}) != 1:
        _reject(file, f"{what} is a list of arrays of different shapes, or empty; {FORMS}")
    return np.stack([np.asarray(item) for item in plain])


# --- pickles


class _Refused(Exception):
    """A sound pickle of something that the reader does not take."""


class _Kind:
    """Stands for numpy.dtype: truth values and numbers, and O for the one object around everything."""

    def __init__(self, code: Any, *_: Any):
        if not isinstance(code, str) or not re.fullmatch(r"b1|[iu][1248]|f[248]|O8?", code):
            raise _Refused(f"an array holds elements of kind {str(code)[:20]!r}, not numbers")
        self.code, self.order = code, "<"

    def __setstate__(self, state: Any) -> None:
        self.order = ">" if state[1] == ">" else "<"

    def values(self, raw: Any, shape: Any, order: Any = "C") -> np.ndarray:
        """Return the numbers in these bytes; as many as the shape says, and no memory taken beforehand."""
        if self.code.startswith("O") or not isinstance(raw, bytes | bytearray):
            raise _Refused("an array holds Python objects (as PFLlib's texts do), not numbers")
        if not isinstance(shape, tuple) or not all(type(n) is int and n >= 0 for n in shape):
            raise pickle.UnpicklingError("the shape of an array is no tuple of lengths")
        numbers = np.frombuffer(raw, self.order + self.code).astype(self.code)
        if len(numbers) != prod(shape):
            raise pickle.UnpicklingError(f"an array of shape {list(shape)} has {len(numbers)} numbers")
        return numbers.reshape(shape, order="F" if order == "F" else "C")


class _Array:
    """Stands for numpy.ndarray; `value` is the array, or what a one-element array of objects holds."""

    value: Any = None

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, by_columns, content = state
        boxed = isinstance(kind, _Kind) and kind.code.startswith("O") and shape == ()
        if boxed and isinstance(content, list) and len(content) == 1:
            self.value = content[0]
        else:
            self.value = kind.values(content, shape, "F" if by_columns else "C")


class _Stand:
    """What a name of NumPy becomes: it can be called, and neither changed nor subclassed by a pickle."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[..., Any]):
        self._make = make

    def __call__(self, *arguments: Any) -> Any:
        return self._make(*arguments)

    def __setstate__(self, state: Any) -> NoReturn:
        raise _Refused("its pickle tries to change a function of NumPy")


def _empty(*_: Any) -> _Array:
    return _Array()


def _scalar(kind: _Kind, raw: Any) -> Any:
    return kind.values(raw, ()).item()


def _from_buffer(raw: Any, kind: _Kind, shape: Any, order: Any, *_: Any) -> _Array:
    if order not in ("C", "F"):
        raise _Refused("an array has its axes in a mixed order")
    array = _Array()
    array.value = kind.values(raw, shape, order)
    return array


def _never(*_: Any) -> NoReturn:
    raise _Refused("its pickle asks for an array without saying what it holds")


STANDS: dict[str, Callable[..., Any]] = {
    "numpy.ndarray": _never,
    "numpy.dtype": _Kind,
    **{f"numpy.{core}.multiarray._reconstruct": _empty for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": _scalar for core in ("core", "_core")},
    **{f"numpy.{core}.numeric._frombuffer": _from_buffer for core in ("core", "_core")},
}


class _Reader(pickle.Unpickler):
    """An unpickler for which the names in STANDS are all that exists."""

    def __init__(self, file: Path, payload: bytes):
        super().__init__(io.BytesIO(payload))
        self._file = file

    def find_class(self, module: str, name: str, /) -> Any:
        make = STANDS.get(f"{module}.{name}")
        if make is None:
            _reject(
                self._file,
                f"its pickle names {module}.{name}, which images do not need and which could run code; it was not "
                "opened further. Do not trust this file",
            )
        return _Stand(make)


def _unpack(file: Path, payload: bytes) -> Any:
    """Return what a pickle holds, with _Array for arrays. Nothing in it is run."""
    for code, number, position in pickletools.genops(payload):
        # Room is made for as many remembered values as the largest number says, so it has to be an honest one.
        if code.name in ("PUT", "LONG_BINPUT") and (number is None or number > (position or 0)):
            raise pickle.UnpicklingError("it numbers its values without need")
    whole = _Reader(file, payload).load()
    return whole.value if isinstance(whole, _Array) else None


# --- all files together


def _pixels(folder: Path, images: Sequence[np.ndarray]) -> np.ndarray:
    """Return all images as uint8, or as float32 in [0, 1] where the saved floats are no whole levels of 0..255."""
    if images[0].dtype == np.bool_:
        return np.concatenate(images).astype(np.uint8) * np.uint8(255)
    if images[0].dtype == np.uint8:
        return np.concatenate(images)
    low, high = min(float(x.min()) for x in images), max(float(x.max()) for x in images)
    if not (low >= -1 - ROUNDING and high <= 1 + ROUNDING):
        raise DataError(
            f"PFLlib folder {folder}: pixels lie in [{low:g}, {high:g}], but PFLlib normalises images to [-1, 1] or "
            "[0, 1]; undo any other normalisation."
        )
    # One rule for all files: a client whose images happen to have no dark pixel is scaled as the others are.
    scale, shift = (0.5, 0.5) if low < -ROUNDING else (1.0, 0.0)
    whole = np.empty((sum(map(len, images)), *images[0].shape[1:]), dtype=np.uint8)
    start, exact = 0, True
    for x in images:
        levels = (x.astype(np.float64) * scale + shift) * 255
        nearest = np.rint(levels)
        exact = exact and bool((np.abs(levels - nearest) <= EXACT).all())
        whole[start : start + len(x)] = nearest.clip(0, 255)
        start += len(x)
    return whole if exact else (np.concatenate(images) * np.float32(scale) + np.float32(shift)).clip(0, 1)


def _compare(folder: Path, labels: np.ndarray, client_ids: np.ndarray) -> int:
    """Return the number of classes; warn about everything that config.json says otherwise than the files."""
    largest, clients = int(labels.max()) + 1, int(client_ids.max()) + 1
    if largest > 2 * len(labels):
        raise DataError(
            f"PFLlib folder {folder}: labels go up to {largest - 1} in {len(labels)} rows; number them from 0."
        )
    path = folder / "config.json"
    if not path.exists():
        return largest
    try:
        config = json.loads(path.read_text(encoding="utf8"))
        named, classes, listed = (config.get(key) for key in CONFIG)
        differences = [] if named == clients else [f"num_clients is {named}, but there are {clients}"]
        if type(classes) is not int or not largest <= classes <= 2 * len(labels):
            differences.append(f"num_classes is {classes}, but labels go up to {largest - 1}")
            classes = largest
        differences += _differing_counts(listed, labels, client_ids)
    except (OSError, ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        classes, differences = largest, [f"it cannot be understood ({' '.join(str(error).split())})"]
    if differences:
        more = f", and {len(differences) - 3} more" if len(differences) > 3 else ""
        warnings.warn(
            f"{path} differs from the files, which are believed: {'; '.join(differences[:3])}{more}.",
            PflsecWarning,
            stacklevel=3,
        )
    return classes


def _differing_counts(listed: Any, labels: np.ndarray, client_ids: np.ndarray) -> list[str]:
    """Return a sentence for each client whose listed [label, count] pairs are not those of its files."""
    if listed is None:
        return []
    found, clients = [], int(client_ids.max()) + 1
    if len(listed) != clients:
        return [f"it counts the labels of {len(listed)} clients, but there are {clients}"]
    for client, pairs in enumerate(listed):
        held, counts = np.unique(labels[client_ids == client], return_counts=True)
        if {int(label): int(count) for label, count in pairs} != dict(zip(held.tolist(), counts.tolist(), strict=True)):
            found.append(f"its counts of labels of client {client} are not those of its files")
    return found

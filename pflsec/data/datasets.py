"""Datasets: labelled images or texts in memory, checked once on the way in so that nothing else has to."""

import inspect
import os
import warnings
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from pflsec.core.errors import DataError, PflsecWarning, unknown
from pflsec.core.registry import plain

if TYPE_CHECKING:
    from torch import Tensor

GROUP = "pflsec.datasets"
MEMBERS = ("images", "labels", "client", "is_test", "class_names")


@dataclass(frozen=True, eq=False)
class Dataset:
    """Labelled images or texts, with what is known about who made them and which of them are for testing.

    name          short name, used in messages and reports
    images        [N, C, H, W], uint8 (0..255), or float32 in [0, 1]; for texts the tokens, int64 [N, T], each a place in `words`
    labels        int64 [N], each in 0..classes-1; at least two classes occur
    classes       number of classes, at least 2
    class_names   one name per class
    client_ids    int64 [N], the natural client of each row, or None
    is_test       bool [N], the rows that the publisher set aside for testing, or None
    source        where the data come from, for the report
    words         the vocabulary of texts, those for padding and for unknown words first; None for images

    Raises DataError, naming the dataset, when one of these rules is broken.
    """

    name: str
    images: np.ndarray
    labels: np.ndarray
    classes: int
    class_names: tuple[str, ...]
    client_ids: np.ndarray | None
    is_test: np.ndarray | None
    source: str
    words: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if self.words is None:
            _check_images(self.name, self.images)
        else:
            _check_tokens(self.name, self.images, len(self.words))
        _check_labels(self.name, self.labels, len(self.images), self.classes)
        if len(self.class_names) != self.classes:
            _reject(self.name, f"class_names has {len(self.class_names)} names for {self.classes} classes.")
        if self.client_ids is not None:
            _check_vector(self.name, "client_ids", self.client_ids, len(self.images), np.int64)
        if self.is_test is not None:
            _check_vector(self.name, "is_test", self.is_test, len(self.images), np.bool_)

    def pixels(self, rows: np.ndarray | Sequence[int]) -> "Tensor":
        """Return the images with these row numbers as float32 [n, C, H, W] in [0, 1], a copy; of texts the tokens [n, T]."""
        import torch

        images = torch.from_numpy(self.images[np.asarray(rows, dtype=np.int64)])
        return images.float().div_(255) if self.images.dtype == np.uint8 else images


def _reject(name: str, sentence: str) -> NoReturn:
    raise DataError(f"dataset '{name}': {sentence}")


def _check_images(name: str, images: np.ndarray) -> None:
    if images.ndim != 4 or 0 in images.shape:
        _reject(name, f"images have shape {list(images.shape)}; give one or more as [N, C, H, W].")
    if images.dtype not in (np.uint8, np.float32):
        _reject(name, f"images have dtype {images.dtype}; use uint8 (0..255) or float32 in [0, 1].")
    if images.dtype == np.uint8:
        return
    low, high = float(images.min()), float(images.max())
    if not np.isfinite([low, high]).all():
        bad = int((~np.isfinite(images).all(axis=(1, 2, 3))).argmax())
        _reject(name, f"image {bad} (counted from 0) holds a NaN or an infinity; repair or drop such rows.")
    if low < 0 or high > 1:
        _reject(
            name,
            f"images of a float type must lie in [0, 1], but these lie in [{low:g}, {high:g}]; "
            "undo any normalisation, or divide by 255.",
        )


def _check_tokens(name: str, tokens: np.ndarray, words: int) -> None:
    if tokens.ndim != 2 or 0 in tokens.shape or tokens.dtype != np.int64:
        _reject(name, f"tokens are {tokens.dtype} {list(tokens.shape)}; give one text or more as int64 [N, T].")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= words:
        _reject(name, f"token {low if low < 0 else high} is outside 0..{words - 1}; number the words from 0.")


def _check_vector(name: str, what: str, values: np.ndarray, rows: int, kind: type) -> None:
    if values.ndim != 1:
        _reject(name, f"{what} has shape {list(values.shape)}; give a vector [N], one value per image.")
    if len(values) != rows:
        _reject(name, f"{what} has {len(values)} values for {rows} images; give one per image.")
    if values.dtype != kind:
        _reject(name, f"{what} has dtype {values.dtype}; it must be {np.dtype(kind)}.")


def _check_labels(name: str, labels: np.ndarray, rows: int, classes: int) -> None:
    _check_vector(name, "labels", labels, rows, np.int64)
    low, high = int(labels.min()), int(labels.max())
    if classes < 2 or low == high:
        _reject(name, f"at least 2 classes are needed, but all labels are {high}; add another class.")
    if low < 0 or high >= classes:
        bad = low if low < 0 else high
        _reject(name, f"label {bad} is outside 0..{classes - 1}; number the classes from 0.")


def _array(name: str, what: str, values: Any) -> np.ndarray:
    """Return a numpy array of the values (an array, a tensor on any device, or nested lists)."""
    if hasattr(values, "detach"):
        values = values.detach().cpu()
        values = values.float() if values.is_floating_point() else values
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise DataError(f"dataset '{name}': {what} is no regular array; give all rows one shape.") from error
    if array.dtype == object:
        _reject(name, f"{what} holds Python objects; store it as a plain numeric array.")
    return array


def _integers(name: str, what: str, values: Any) -> np.ndarray:
    array = _array(name, what, values)
    if not np.issubdtype(array.dtype, np.integer):
        _reject(name, f"{what} must be whole numbers, but its dtype is {array.dtype}; store it as int64.")
    return array.astype(np.int64)


def _flags(name: str, what: str, values: Any) -> np.ndarray:
    array = _array(name, what, values)
    if array.dtype != np.bool_ and (array.dtype.kind not in "iu" or not np.isin(array, (0, 1)).all()):
        _reject(name, f"{what} must be true/false or 0/1 (1: test), but is {array.dtype} with other values.")
    return array.astype(np.bool_)


def _pictures(name: str, values: Any) -> np.ndarray:
    """Return images as [N, C, H, W], uint8 or float32, from any of the accepted layouts and dtypes."""
    images = _array(name, "images", values)
    if images.dtype == np.bool_:
        images = images.astype(np.uint8) * 255
    elif images.dtype.kind == "f":
        images = images.astype(np.float32, copy=False)
    if images.ndim == 3:
        return images[:, None]
    if images.ndim != 4:
        _reject(name, f"images have shape {list(images.shape)}; use [N, H, W], [N, H, W, C] or [N, C, H, W].")
    if images.shape[2] == 1 and images.shape[3] not in (1, 3):
        return images  # signals: C channels of that length, whatever their number
    first, last = images.shape[1] in (1, 3), images.shape[3] in (1, 3)
    if first == last:
        found = "both the second and the last axis" if first else "neither the second nor the last axis"
        _reject(
            name,
            f"the layout of images {list(images.shape)} is ambiguous: {found} can be 1 or 3 channels; "
            "use [N, H, W] for grey images, [N, H, W, 3] or [N, 3, H, W] for colour.",
        )
    return images if first else np.ascontiguousarray(images.transpose(0, 3, 1, 2))


def _names(name: str, labels: np.ndarray, given: Any) -> tuple[str, ...]:
    """Return the class names: the given ones, or the numbers 0..max(label)."""
    if given is not None:
        names = np.asarray(given)
        if names.ndim != 1 or names.dtype.kind != "U":
            _reject(name, f"class_names must be a list of texts, but is {names.dtype} {list(names.shape)}.")
        return tuple(str(n) for n in names)
    if labels.ndim != 1 or not labels.size:
        return ()
    classes = max(int(labels.max()) + 1, 0)
    if classes > 2 * len(labels):
        _reject(name, f"labels go up to {classes - 1} in {len(labels)} rows; number the classes from 0.")
    return tuple(str(c) for c in range(classes))


def _assemble(
    name: str,
    source: str,
    images: Any,
    labels: Any,
    *,
    client: Any = None,
    is_test: Any = None,
    class_names: Any = None,
) -> Dataset:
    pictures = _pictures(name, images)
    whole = _integers(name, "labels", labels)
    names = _names(name, whole, class_names)
    dataset = Dataset(
        name=name,
        images=pictures,
        labels=whole,
        classes=len(names),
        class_names=names,
        client_ids=None if client is None else _integers(name, "client", client),
        is_test=None if is_test is None else _flags(name, "is_test", is_test),
        source=source,
    )
    absent = np.setdiff1d(np.arange(len(names)), whole)
    if absent.size and class_names is None:
        warnings.warn(
            f"dataset '{name}': no row has label {absent[0]}, though labels go up to {whole.max()}; number "
            "the classes from 0 without gaps, or give class_names to say that the class exists.",
            PflsecWarning,
            stacklevel=3,
        )
    return dataset


def from_arrays(
    images: Any,
    labels: Any,
    *,
    client_ids: Any = None,
    is_test: Any = None,
    class_names: Sequence[str] | None = None,
    name: str = "arrays",
    source: str = "arrays given through Python",
) -> Dataset:
    """Return a dataset of numpy arrays, torch tensors or nested lists.

    images        [N, H, W], [N, H, W, C] or [N, C, H, W], C 1 or 3; uint8, bool, or floats in [0, 1]. Signals of C channels,
                  as many as there are, are images of height 1: [N, C, 1, L]
    labels        [N] whole numbers from 0
    client_ids    [N] whole numbers: the natural client of each row
    is_test       [N] booleans or 0/1: rows set aside for testing
    class_names   one per class; without them the classes are the numbers up to the largest label
    name, source  what messages and reports call the dataset, and where they say that it comes from

    Raises DataError when a rule is broken; warns when a class below the largest label has no row.
    """
    more = {"client": client_ids, "is_test": is_test, "class_names": class_names}
    return _assemble(name, source, images, labels, **more)


def digits() -> Dataset:
    """Handwritten digits of 43 people, 8x8 grey; comes with scikit-learn, so it needs no network.

    Source   scikit-learn load_digits (the test part of UCI "Optical Recognition of Handwritten Digits", 1998)
    Shape    1x8x8, 17 grey levels
    Classes  10
    Size     1,797 images, 0.5 MB
    Licence  CC BY 4.0 (UCI); the copy in scikit-learn is BSD-3-Clause
    """
    from sklearn.datasets import load_digits

    raw: Any = load_digits()
    # 16 is a power of two: v / 16 is exact in float32, and would not be as a multiple of 1/255.
    images = raw["images"].astype(np.float32) / np.float32(16)
    return _assemble("digits", "scikit-learn load_digits", images, raw["target"])


def npz(path: str) -> Dataset:
    """Your own images: a NumPy .npz file with the arrays `images` and `labels`; given as npz:PATH.

    Source   a file of yours; optional arrays `client` (natural client ids), `is_test` (0/1), `class_names`
    Shape    images [N, H, W], [N, H, W, C] or [N, C, H, W]; uint8, bool, or floats in [0, 1]; signals [N, C, 1, L]
    Classes  as in the file: labels [N], whole numbers from 0
    Size     as the file; it is read into memory
    Licence  that of your data
    """
    file = Path(os.path.expanduser(path))
    arrays = _read(file)
    return _assemble(file.stem, str(file), **arrays)


def labelled_images(file: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the arrays of an .npz file: images float32 [N, C, H, W] in [0, 1] and labels int64 [N], of any classes.

    The layouts are those of `npz`. Raises DataError when the file, or what it holds, is not usable.
    """
    arrays = _read(file)
    images = _pictures(file.stem, arrays["images"])
    labels = _integers(file.stem, "labels", arrays["labels"])
    _check_images(file.stem, images)
    _check_vector(file.stem, "labels", labels, len(images), np.int64)
    return images.astype(np.float32) / 255 if images.dtype == np.uint8 else images, labels


def _read(file: Path) -> dict[str, np.ndarray]:
    """Return the known arrays of an untrusted .npz file: no pickles, and every failure is one DataError."""
    if not file.is_file():
        kind = "is not a file" if file.exists() else "does not exist"
        raise DataError(f"dataset file {file} {kind}; give the path of an .npz file, as in --data npz:PATH.")
    try:
        with file.open("rb") as stream:
            if stream.read(2) != b"PK":
                raise DataError(f"dataset file {file} is no .npz (zip) archive; write it with numpy.savez.")
        if not zipfile.is_zipfile(file):
            raise DataError(f"dataset file {file} is truncated or damaged; copy or write it again.")
        with np.load(file, allow_pickle=False) as archive:
            missing = [key for key in ("images", "labels") if key not in archive.files]
            if missing:
                there = ", ".join(repr(key) for key in archive.files[:10]) or "nothing"
                raise DataError(f"dataset file {file} lacks the array {missing[0]!r}; it holds {there}.")
            return {key: _member(file, archive, key) for key in MEMBERS if key in archive.files}
    except OSError as error:
        raise DataError(f"dataset file {file} cannot be read: {error.strerror or error}.") from error
    except zipfile.BadZipFile as error:
        raise DataError(f"dataset file {file} is truncated or damaged; copy or write it again.") from error


def _member(file: Path, archive: Any, key: str) -> np.ndarray:
    try:
        array = archive[key]
    except MemoryError as error:
        raise DataError(f"dataset file {file}: the array {key!r} does not fit into memory.") from error
    except Exception as error:
        # Decoding bytes that nobody vouches for can fail in any way: zlib, zip, header and length errors.
        if "allow_pickle" in str(error):
            why = "holds Python objects, which could run code when read; store it as a plain numeric array"
        else:
            why = f"is truncated or damaged ({' '.join(str(error).split())}); copy or write the file again"
        raise DataError(f"dataset file {file}: the array {key!r} {why}.") from error
    if not isinstance(array, np.ndarray):
        raise DataError(f"dataset file {file}: {key!r} is no NumPy array; write the file with numpy.savez.")
    return array


def load(spec: str, download: bool = False) -> Dataset:
    """Return the dataset with this name, `NAME` or `NAME:ARGUMENT`, e.g. `digits` or `npz:~/mine.npz`.

    Names are the entry points of the group `pflsec.datasets`, so another package can add its own: a function
    that takes nothing or one text, and perhaps the keyword `download`, and returns a Dataset. Case, dashes and
    underscores in a name do not matter. Raises DataError for an unknown name, an argument too few or too many,
    or an entry point that does not work.

    download   allow datasets that are files on the internet to be fetched; others take no notice
    """
    name, _, argument = spec.partition(":")
    known = {entry.name: entry for entry in entry_points(group=GROUP)}
    entry = next((e for key, e in known.items() if plain(key) == plain(name)), None)
    if entry is None:
        raise DataError(unknown("dataset", name, known))
    try:
        make = entry.load()
    except (ImportError, AttributeError) as error:
        raise DataError(f"dataset '{name}' ({entry.value}) cannot be imported: {error}.") from error
    named = dict(inspect.signature(make).parameters)
    keywords = {"download": download} if named.pop("download", None) else {}
    parameters = named.values()
    if argument and not parameters:
        raise DataError(f"dataset '{name}' takes no argument, but got '{argument}'; write --data {name}.")
    if not argument and any(p.default is p.empty for p in parameters):
        raise DataError(f"dataset '{name}' needs an argument and got none; write --data {name}:PATH.")
    dataset = make(argument, **keywords) if argument else make(**keywords)
    if not isinstance(dataset, Dataset):
        raise DataError(f"dataset '{name}' ({entry.value}) returned a {type(dataset).__name__}, not a Dataset.")
    return dataset

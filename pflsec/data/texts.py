"""Texts: a CSV file of the layout of AG News as rows of token numbers, by a tokeniser and a vocabulary of our own."""

import csv
import os
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pflsec.core.errors import DataError
from pflsec.core.inputs import PAD, SPECIALS, UNKNOWN
from pflsec.data.datasets import Dataset

WORDS, LENGTH = 2000, 32
MOST_WORDS, LONGEST = 100_000, 4096
SPECIAL_WORDS = ("<pad>", "<unk>")
TOKEN = re.compile(r"\w+(?:'\w+)?|[^\w\s]")
OPTION = re.compile(r"^(?P<rest>.+),(?P<name>[a-z]+)=(?P<value>[^,=/]*)$")
NAMES = "classes.txt"


def text(path: str) -> Dataset:
    """Your own texts: a CSV file with the columns class (from 1), title, description; given as text:PATH.

    Source   a file of yours in the layout of AG News (Zhang, Zhao, LeCun, 2015), perhaps with classes.txt beside it
    Shape    32 tokens of a vocabulary of 2,000 words; other numbers as text:PATH,words=5000,length=64
    Classes  as in the file
    Size     as the file; it is read into memory
    Licence  that of your data
    """
    path, words, length = _options(path)
    file = Path(os.path.expanduser(path))
    labels, texts = _read(file)
    split = [tokenised(t) for t in texts]
    names = vocabulary(split, words)
    return Dataset(
        name=file.parent.name if file.stem in ("train", "test") else file.stem,
        images=numbered(split, names, length),
        labels=labels,
        classes=int(labels.max()) + 1,
        class_names=_class_names(file.parent / NAMES, int(labels.max()) + 1),
        client_ids=None,
        is_test=None,
        source=str(file),
        words=names,
    )


def tokenised(text: str) -> list[str]:
    """Return the words and punctuation marks of a text, in lower case; a backslash, AG News' line break, is a space."""
    return TOKEN.findall(text.replace("\\", " ").lower())


def vocabulary(texts: Sequence[Sequence[str]], limit: int) -> tuple[str, ...]:
    """Return the words for padding and for unknown words, then the commonest others, at most `limit` in all.

    All texts are counted: which of them will be trained on is decided later. Equally common words stand in alphabetical order.
    """
    counts = Counter(word for text in texts for word in text)
    common = sorted(counts, key=lambda word: (-counts[word], word))
    return (*SPECIAL_WORDS, *common[: limit - SPECIALS])


def numbered(texts: Sequence[Sequence[str]], words: Sequence[str], length: int) -> np.ndarray:
    """Return texts as token numbers int64 [N, length]: cut, padded, and with one unknown word where there is none at all."""
    place = {word: i for i, word in enumerate(words)}
    rows = np.full((len(texts), length), PAD, dtype=np.int64)
    for row, text in zip(rows, texts, strict=True):
        found = [place.get(word, UNKNOWN) for word in text[:length]] or [UNKNOWN]
        row[: len(found)] = found
    return rows


def _options(text: str) -> tuple[str, int, int]:
    """Return (path, words, length) of PATH[,words=N][,length=N]."""
    limits = {"words": (SPECIALS + 1, MOST_WORDS), "length": (1, LONGEST)}
    found = {"words": WORDS, "length": LENGTH}
    while (option := OPTION.match(text)) and option["name"] in limits:
        low, high = limits[option["name"]]
        value = option["value"]
        if not (value.isascii() and value.isdigit() and len(value) < 10 and low <= int(value) <= high):
            raise DataError(
                f"--data text: {option['name']} is '{value}'; it must be a whole number from {low} to {high}."
            )
        found[option["name"]], text = int(value), option["rest"]
    return text, found["words"], found["length"]


def _read(file: Path) -> tuple[np.ndarray, list[str]]:
    """Return labels from 0, int64 [N], and titles with descriptions. Raises DataError naming the row at fault."""
    if not file.is_file():
        kind = "is not a file" if file.exists() else "does not exist"
        raise DataError(f"text file {file} {kind}; give the path of a CSV file, as in --data text:PATH.")
    labels, texts = [], []
    try:
        with file.open(encoding="utf8", newline="") as stream:
            for number, row in enumerate(csv.reader(stream, strict=True), start=1):
                if len(row) != 3:
                    raise DataError(
                        f"text file {file}: row {number} has {len(row)} columns; give class, title, description."
                    )
                if not (row[0].isascii() and row[0].isdigit() and 1 <= int(row[0][:9]) <= 10_000):
                    raise DataError(
                        f"text file {file}: row {number} has the class '{row[0][:40]}'; number classes from 1."
                    )
                labels.append(int(row[0]) - 1)
                texts.append(f"{row[1]} {row[2]}")
    except OSError as error:
        raise DataError(f"text file {file} cannot be read: {error.strerror or error}.") from error
    except UnicodeDecodeError as error:
        raise DataError(f"text file {file} is not UTF-8 ({error.reason}); save it as UTF-8.") from error
    except csv.Error as error:
        raise DataError(f"text file {file} is no CSV table ({error}); quote every cell.") from error
    if not labels:
        raise DataError(f"text file {file} has no row; give class, title, description in each.")
    return np.array(labels, dtype=np.int64), texts


def _class_names(file: Path, classes: int) -> tuple[str, ...]:
    """Return the lines of the file of names, if there are as many as classes; else their numbers, from 1."""
    try:
        lines = file.read_text(encoding="utf8").split("\n")
    except (OSError, UnicodeDecodeError):
        lines = []
    names = tuple(line.strip() for line in lines if line.strip())
    return names if len(names) == classes else tuple(str(i + 1) for i in range(classes))

"""A TOML file that knows where its keys stand, so that a mistake in it can be pointed at."""

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pflsec.core.errors import ConfigError

MOST = 1_000_000
"""Bytes. A larger file is no list of options."""
PLACE = re.compile(r"^(.*?)\s*\(at (?:line (\d+), column (\d+)|end of document)\)$", re.DOTALL)
"""How tomllib's messages end."""

Key = Sequence[str | int]
"""The way to a value: names of tables and keys, and numbers in arrays."""


@dataclass(frozen=True)
class TomlFile:
    """A file's values, and its text."""

    path: Path
    text: str
    values: dict[str, Any]

    def mistake(self, key: Key, reason: str) -> ConfigError:
        """Return the error about the value at `key`: file, line, column, reason. What is not there is the table's mistake."""
        place = next((found for n in range(len(key), 0, -1) if (found := self.locate(key[:n]))), None)
        where = f", line {place[0]}, column {place[1]}" if place else ""
        return ConfigError(f"{self.path}{where}: {reason}")

    def locate(self, key: Key) -> tuple[int, int] | None:
        """Return line and column, from 1 on, of a key that is spelt as it is meant; None where it is not found.

        It stands on the line before which the text has no such key, and with whose statement it has.
        """
        names = [part for part in key if isinstance(part, str)]
        lines = self.text.splitlines(keepends=True)
        for i, line in enumerate(lines):
            if names and (column := line.find(names[-1])) >= 0:
                before, after = _parsed(lines[:i]), self._statement(lines, i)
                if before is not None and after is not None and not _has(before, key) and _has(after, key):
                    return i + 1, column + 1
        return None

    def _statement(self, lines: list[str], start: int) -> dict[str, Any] | None:
        """Return the values of the text up to the end of the statement that begins on this line."""
        ends = (_parsed(lines[:end]) for end in range(start + 1, len(lines) + 1))
        return next((found for found in ends if found is not None), None)


def read(path: Path) -> TomlFile:
    """Return a TOML file. Raises ConfigError naming the file, and line and column of what is no TOML."""
    try:
        with path.open("rb") as file:
            data = file.read(MOST + 1)
    except FileNotFoundError:
        raise ConfigError(f"the file {path} does not exist.") from None
    except OSError as error:
        raise ConfigError(f"the file {path} cannot be read: {error.strerror or error}.") from None
    if len(data) > MOST:
        raise ConfigError(f"the file {path} has more than {MOST // 1_000_000} MB; that is no TOML file of options.")
    try:
        text = data.decode("utf8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"the file {path} is no text in UTF-8: byte {error.start} is none of its.") from None
    try:
        return TomlFile(path, text, tomllib.loads(text))
    except (ValueError, RecursionError) as error:
        found = PLACE.match(str(error))
        what, line, column = found.groups() if found else (str(error), None, None)
        where = f", line {line}, column {column}" if line else ", at its end" if found else ""
        raise ConfigError(f"{path}{where}: this is no TOML: {what}.") from None


def _parsed(lines: Sequence[str]) -> dict[str, Any] | None:
    try:
        return tomllib.loads("".join(lines))
    except ValueError:
        return None


def _has(values: Any, key: Key) -> bool:
    for part in key:
        try:
            values = values[part]
        except (KeyError, IndexError, TypeError):
            return False
    return True

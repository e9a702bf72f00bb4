"""Reading and writing files: writes are atomic, reads trust nothing, names cannot leave their folder."""

import csv
import fcntl
import io
import json
import math
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pflsec.core.errors import ConfigError, RunError

SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def safe_name(name: str, what: str) -> str:
    """Return the name if it can be a single file or folder name; raise ConfigError otherwise."""
    if not SAFE_NAME.fullmatch(name) or ".." in name:
        raise ConfigError(
            f"{what} '{name}' is not usable as a folder name; use letters, digits, '.', '_' and '-' "
            "(at most 100, no path separators, starting with a letter or digit)."
        )
    return name


def plain(value: Any) -> Any:
    """Return the value as JSON can hold it: NaN and infinities become None, tuples lists, paths strings."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in (sorted(value) if isinstance(value, set | frozenset) else value)]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item") and not isinstance(value, str | bytes):
        return plain(value.item())
    return value


def to_json(value: Any, indent: int | None = 2) -> str:
    """Return JSON text without NaN or Infinity."""
    return json.dumps(plain(value), indent=indent, allow_nan=False)


@contextmanager
def disk_errors(path: Path):
    """Turn an operating-system error while writing `path` into one sentence for the user."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"cannot write {path}: {error.strerror or error}. Check the permissions and the free space of "
            f"{path.parent}, or choose another folder with --runs-dir."
        ) from error


@contextmanager
def locked(path: Path, busy: str) -> Iterator[None]:
    """Hold a lock file for this process. Raises RunError(busy) while another one holds it; a killed process holds nothing."""
    with disk_errors(path):
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RunError(busy) from None
        yield
    finally:
        os.close(handle)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file in full or not at all: a temporary file beside it, flushed to disk, then renamed."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file atomically."""
    write_bytes(path, text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    write_text(path, to_json(value) + "\n")


def read_json(path: Path, what: str) -> Any:
    """Return a JSON file's content; RunError names the file when it is missing or damaged."""
    try:
        return json.loads(path.read_text(encoding="utf8"))
    except FileNotFoundError:
        raise RunError(f"{what} is missing: {path} does not exist.") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise RunError(f"{what} cannot be read: {path} is damaged or truncated ({error}).") from error


def append_line(path: Path, text: str) -> None:
    """Append one line to a log file."""
    with disk_errors(path), path.open("a", encoding="utf8") as file:
        file.write(text + "\n")


def cell(value: Any) -> str:
    """Return a value as a CSV cell: empty for None and NaN, 'inf' for infinities, true/false for booleans."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def to_csv(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """Return CSV text with a header; a row's missing columns are empty cells."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([cell(row.get(name)) for name in columns] for row in rows)
    return text.getvalue()

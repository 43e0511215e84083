"""Read JSON from files that others wrote."""

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from megarl.errors import ConfigError

MAX_LINE = 64 << 20  # bytes
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(data: bytes, fraction: Callable[[str], Any] = float) -> Any:
    """Return the value of a JSON text in UTF-8; `fraction` reads a number with a point or an exponent.

    Raises ValueError with a one-line message: not JSON, a duplicate key in an object (of which Python would keep the last), half a
    surrogate pair (which no file and no tokenizer accepts), or nesting deeper than Python allows.
    """
    try:
        text = data.decode("utf-8-sig")
        value = json.loads(text, object_pairs_hook=_once, parse_float=fraction)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value


def read_json(path: Path, most: int) -> Any:
    """`parse_json` a plain file of at most `most` bytes. Raises ValueError, and OSError if it cannot be read."""
    return parse_json(read_plain(path, most))


def read_plain(path: Path, most: int) -> bytes:
    """Read a plain file of at most `most` bytes. Raises ValueError if it is larger, and OSError if it cannot be read."""
    if (size := _plain(path).stat().st_size) > most:
        raise ValueError(f"{size:,} bytes, more than {most:,}")
    return path.read_bytes()


def lines_of(path: Path, place: str, start: int = 0) -> Iterator[tuple[str, bytes]]:
    """Stream the lines of a plain file.

    Args:
        path: the file.
        place: the name of the file in messages.
        start: the byte of the file to start at.

    Yields:
        ("place:1", the first line with its line ending), and so on.

    Raises:
        ConfigError: a line of more than MAX_LINE bytes.
        OSError: the file cannot be read.
    """
    with _plain(path).open("rb") as file:
        file.seek(start)
        for number, line in enumerate(iter(partial(file.readline, MAX_LINE + 1), b""), 1):
            if len(line) > MAX_LINE:
                raise ConfigError(f"{place}:{number}: a line of more than {MAX_LINE:,} bytes")
            yield f"{place}:{number}", line


def _plain(path: Path) -> Path:
    """Return the path of a plain file. Raises FileNotFoundError for anything else, such as a pipe or device that a reader could wait on."""
    if not path.is_file():
        raise FileNotFoundError(2, "not a plain file" if path.exists() else "missing", str(path))
    return path


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
    return entries

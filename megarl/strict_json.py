"""JSON from files that others wrote."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def parse_json(data: bytes) -> Any:
    """The value of a JSON text in UTF-8.

    Raises ValueError, whose text is one line: not JSON, a key twice in one object (of which Python keeps the last), half a surrogate pair
    (which no file and no tokenizer takes), deeper than Python nests.
    """
    try:
        text = data.decode("utf-8-sig")
        value = json.loads(text, object_pairs_hook=_once)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return value


def read_json(path: Path, most: int) -> Any:
    """`parse_json` of a plain file of at most `most` bytes. Raises ValueError, and OSError where it cannot be read."""
    if not path.is_file():  # a pipe would be waited for
        raise FileNotFoundError(2, "not a plain file" if path.exists() else "missing", str(path))
    if (size := path.stat().st_size) > most:
        raise ValueError(f"{size:,} bytes, more than {most:,}")
    return parse_json(path.read_bytes())


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} is there twice")
    return found

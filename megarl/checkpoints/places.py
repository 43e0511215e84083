"""What lies at the paths of a configuration, so that a run goes on where models or data have moved.

A fingerprint takes names and sizes, and of large files pieces: a model of 60 GB in a moment. Another model of the same shape differs in
every piece, another large file of rows in its size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

WHOLE = 1 << 26  # bytes of a file that is read as a whole
PIECES, PIECE = 8, 1 << 16  # of a larger one, and bytes of each
# Of a directory: what megarl, tokenizers and `datasets` read. Pages, hidden files and caches come and go.
READ = {".json", ".safetensors", ".model", ".txt", ".jinja", ".arrow"}
CACHE = "cache-"  # of `datasets`


def paths(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Path]]:
    """The paths in a configuration (model_dump()), each with its dotted key."""
    for name, value in tree.items():
        inside = {str(number): one for number, one in enumerate(value)} if isinstance(value, list) else value
        if isinstance(inside, Mapping):
            yield from paths(inside, f"{above}{name}.")
        elif isinstance(inside, Path):
            yield f"{above}{name}", inside


def by_content(value: Any) -> Any:
    """A part of a configuration (model_dump()) as plain values for JSON, with what lies at a path, where anything does, for the path."""
    if isinstance(value, Mapping):
        return {name: by_content(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [by_content(inner) for inner in value]
    return (fingerprint(value) or str(value)) if isinstance(value, Path) else value


def fingerprint(path: Path) -> str | None:
    """Of a file or directory; None where it is not there, or cannot be read."""
    found = hashlib.sha256()
    try:
        for name, file in _files(path):
            size = file.stat().st_size
            found.update(f"{name}\0{size}\0".encode())
            with file.open("rb") as content:
                if size <= WHOLE:
                    found.update(content.read())
                    continue
                for number in range(PIECES):
                    content.seek(number * (size - PIECE) // (PIECES - 1))
                    found.update(content.read(PIECE))
    except OSError:
        return None
    return found.hexdigest()


def _files(path: Path) -> list[tuple[str, Path]]:
    if not path.is_dir():
        return [("", path)]  # whatever its name is
    inside = {str(file.relative_to(path)): file for file in path.rglob("*") if file.suffix in READ and file.is_file()}
    return sorted((name, file) for name, file in inside.items() if not name.startswith((".", CACHE)))

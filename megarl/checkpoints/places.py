"""Fingerprints of the files at a configuration's paths, so that a run can resume after models or data have been moved.

A fingerprint covers names, sizes and contents, but only pieces of large files, so that a model of 60 GB takes a moment. A different model
of the same shape differs in every piece; a different large data file differs in size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

WHOLE = 1 << 26  # bytes; files up to this size are read completely
PIECES, PIECE = 8, 1 << 16  # number of pieces read from a larger file, and bytes of each
# In a directory, only the files that megarl, tokenizers and `datasets` read count: pages, hidden files and caches come and go.
READ = {".json", ".safetensors", ".model", ".txt", ".jinja", ".arrow"}
CACHE = "cache-"  # prefix of the caches of `datasets`


def paths(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Path]]:
    """Yield the paths in a configuration (model_dump()), each with its dotted key."""
    for name, value in tree.items():
        inside = {str(number): one for number, one in enumerate(value)} if isinstance(value, list) else value
        if isinstance(inside, Mapping):
            yield from paths(inside, f"{above}{name}.")
        elif isinstance(inside, Path):
            yield f"{above}{name}", inside


def by_content(value: Any) -> Any:
    """Return a part of a configuration (model_dump()) as plain JSON values, replacing each path that exists by its fingerprint."""
    if isinstance(value, Mapping):
        return {name: by_content(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [by_content(inner) for inner in value]
    return (fingerprint(value) or str(value)) if isinstance(value, Path) else value


def fingerprint(path: Path) -> str | None:
    """Return the fingerprint of a file or directory; None if it does not exist or cannot be read."""
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
        return [("", path)]  # the file's own name does not count
    inside = {str(file.relative_to(path)): file for file in path.rglob("*") if file.suffix in READ and file.is_file()}
    return sorted((name, file) for name, file in inside.items() if not name.startswith((".", CACHE)))

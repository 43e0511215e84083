"""Fingerprints of the files at a configuration's paths: a run can resume after models or data have been moved, and notices other contents.

A fingerprint covers names, sizes and contents: all of a file up to 64 MiB; of a larger one 1,024 pieces of 64 KiB at even distances, of a
file of weights 8, so that a model of 60 GB takes a moment. Another model of the same shape, and data in another order, differ in every
piece; a few bytes that were changed within a large file, without changing its size, may lie between the pieces.
"""

import hashlib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

WHOLE = 1 << 26  # bytes; files up to this size are read completely
PIECE = 1 << 16  # bytes of one of the pieces that are read from a larger file
PIECES = 1024  # number of these pieces
PIECES_OF_WEIGHTS = 8  # the same for .safetensors
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
    inside = contents(path)
    return None if inside is None else hashlib.sha256("".join(f"{name}\0{one}\0" for name, one in inside.items()).encode()).hexdigest()


def contents(path: Path) -> dict[str, str] | None:
    """Return the fingerprint of every file of a directory, by its name inside, or of a file, whose own name does not count ("").

    None if it does not exist or cannot be read.
    """
    try:
        stats = {name: (file, file.stat()) for name, file in _files(path)}
        return {name: _print(file, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, (file, stat) in stats.items()}
    except OSError:
        return None


@lru_cache(maxsize=1 << 14)
def _print(file: Path, size: int, modified: int, inode: int) -> str:
    """Return the fingerprint of a file; the time of its last change and its inode make a file that was changed since another one."""
    del modified, inode
    digest = hashlib.sha256(f"{size}\0".encode())
    pieces = PIECES_OF_WEIGHTS if file.suffix == ".safetensors" else PIECES
    with file.open("rb") as content:
        if size <= WHOLE:
            digest.update(content.read())
        else:
            for number in range(pieces):
                content.seek(number * (size - PIECE) // (pieces - 1))
                digest.update(content.read(PIECE))
    return digest.hexdigest()


def _files(path: Path) -> list[tuple[str, Path]]:
    if not path.is_dir():
        return [("", path)]
    inside = {str(file.relative_to(path)): file for file in path.rglob("*") if file.suffix in READ and file.is_file()}
    return sorted((name, file) for name, file in inside.items() if not name.startswith((".", CACHE)))

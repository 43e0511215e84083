"""Find, verify and list step directories: `step_000123`, with a manifest of every file. Nothing here needs torch.

A directory of that name was complete when it was written: it is written as `step_000123.partial`, and renamed when everything is on disk.
Damage since then is detected with the manifest, which has each file's size and XXH128 hash. That hash is not cryptographic: the manifest
is not signed, so it reveals accidents only.
"""

import json
import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, TypeAdapter, ValidationError
from xxhash import xxh3_128_hexdigest

from megarl import __version__
from megarl.checkpoints.files import FileRecord, read_record
from megarl.errors import ConfigError, DamagedFile
from megarl.text.display import one_line
from megarl.text.strict_json import read_json

CHECKPOINTS = "checkpoints"  # a run's folder that contains the step directories
MANIFEST, LATEST, PARTIAL = "manifest.json", "latest", ".partial"
HF = "hf"  # folder of each model, with config.json, generation defaults and tokenizer, as in a Hugging Face directory
COMMON = "common.pt"  # file of each model that Megatron's own tools expect; megarl never opens it
DAMAGED = "damaged.txt"  # added to a step directory of which a file was found damaged as it was loaded: says which
FORMAT = 2
FLIPPED = "flipped: its hash is not the manifest's"
_STEP = re.compile(r"step_(\d{6,})")
_UNFINISHED = re.compile(r"step_(\d{6,})\.(partial|replaced|deleted)")
_MANIFEST_BYTES = 256 << 20
_THREADS = 8  # number of threads that hash files
_PICKLES = {".pkl", ".pickle", ".pt", ".pth", ".bin", ".ckpt", ".joblib"}


def _have_optimizers(models: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Mapping[str, Any]]:
    for name, model in models.items():
        if not isinstance(model.get("optimizer", ""), Mapping | None):
            raise ValueError(f"{name} does not say what its optimizer is")
    return models


@dataclass(frozen=True)
class Manifest:
    """The contents of a step directory, and how it was made."""

    step: int
    world: int  # number of ranks
    layout: Mapping[str, Any]
    versions: Mapping[str, str]
    models: Annotated[Mapping[str, Mapping[str, Any]], AfterValidator(_have_optimizers)]  # by name: what the ranks need to know about each
    files: Mapping[str, FileRecord]  # by path inside the directory; all files except the manifest

    @property
    def size(self) -> int:
        """The total size of all files in bytes."""
        return sum(record.size for record in self.files.values())


_KINDS = TypeAdapter(Manifest)


def versions() -> dict[str, str]:
    """Return the versions of the software that writes step directories here, for their manifests."""
    return {"megarl": __version__} | {name: version(name) for name in ("torch", "megatron-core")} | {"python": platform.python_version()}


@dataclass(frozen=True)
class SavedStep:
    """An intact step directory: every file has the size that was written and, unless hashes were skipped, the content."""

    path: Path
    manifest: Manifest

    @property
    def files(self) -> dict[Path, FileRecord]:
        """All files except the manifest, with their records in it."""
        return {self.path / name: record for name, record in self.manifest.files.items()}

    def read(self, name: str) -> bytes:
        """Return a file's content.

        Raises:
            ConfigError: it is not in the manifest; DamagedFile if it cannot be read or has changed since it was written.
        """
        record = self.manifest.files.get(name)
        if record is None:
            raise ConfigError(f"checkpoint: {self.path} has no {name}")
        try:
            data = (self.path / name).read_bytes()
        except OSError as error:
            raise DamagedFile(str(self.path / name), f"unreadable: {error.strerror}") from None
        if xxh3_128_hexdigest(data) != record.xxh128:
            raise DamagedFile(str(self.path / name), FLIPPED)
        return data


@dataclass(frozen=True)
class Entry:
    """A step directory, finished or not, and what is wrong with it."""

    path: Path
    step: int
    finished: bool  # false: left by an interrupted save
    faults: tuple[str, ...]  # one line each: the file, and what is wrong with it
    saved: SavedStep | None  # None if there are faults


def step_name(step: int) -> str:
    """Return the name of a step's directory."""
    return f"step_{step:06d}"


def encode(manifest: Manifest) -> bytes:
    """Return the contents of the manifest's file: the manifest, and the hash of its text."""
    content = _canonical({"format": FORMAT, **asdict(manifest)})
    return f'{{"xxh128": "{xxh3_128_hexdigest(content.encode())}",\n"content": {content}}}\n'.encode()


def is_step(path: Path) -> bool:
    """Return whether a path is named like a step directory, finished or not."""
    return bool(_STEP.fullmatch(path.name) or _UNFINISHED.fullmatch(path.name))


def verify(path: Path, contents: bool = True) -> Entry:
    """Compare a step directory with its manifest; contents=False skips the hashes and checks only names and sizes."""
    matched = _STEP.fullmatch(path.name)
    if matched is None:
        unfinished = _UNFINISHED.fullmatch(path.name)
        if unfinished is None:
            raise ConfigError(f"checkpoint: {path} is not a step directory")
        return Entry(path, int(unfinished[1]), False, (f"{unfinished[2]}: left by an unfinished save",), None)
    step = int(matched[1])
    try:
        manifest = read_manifest(path)
    except ConfigError as error:
        return Entry(path, step, True, (str(error),), None)
    faults = _faults(path, manifest, contents)
    if manifest.step != step:
        faults.append(f"{MANIFEST}: of step {manifest.step}, in a directory of step {step}")
    return Entry(path, step, True, tuple(faults), None if faults else SavedStep(path, manifest))


def trusted(path: Path) -> SavedStep:
    """Return a step directory that must be intact but for hashes, which are not read. Raise ConfigError with its first fault."""
    entry = verify(path, contents=False)
    if entry.saved is None:
        raise ConfigError(f"checkpoint: {path}: {entry.faults[0]}")
    return entry.saved


def listing(root: Path, contents: bool = True) -> list[Entry]:
    """Return every step directory of `root`, finished or not, newest first."""
    entries = [verify(path, contents) for path in _directories(root)]
    return sorted(entries, key=lambda entry: (entry.step, entry.finished), reverse=True)


def verified(root: Path, skipped: Callable[[Entry], None]) -> Iterator[SavedStep]:
    """Yield the step directories of `root` whose names and sizes match their manifests, newest first, checking each lazily.

    The others are passed to `skipped`.
    """
    for path in sorted(_directories(root), key=lambda path: int(path.name.removeprefix("step_").partition(".")[0]), reverse=True):
        entry = verify(path, contents=False)
        if entry.saved is not None:
            yield entry.saved
        else:
            skipped(entry)


def finished_steps(root: Path) -> list[Path]:
    """Return the step directories of `root` that were complete when they were written, unverified."""
    return [path for path in _directories(root) if _STEP.fullmatch(path.name)] if root.is_dir() else []


def _directories(root: Path) -> list[Path]:
    return [path for path in root.iterdir() if is_step(path) and path.is_dir()]


def _faults(path: Path, manifest: Manifest, contents: bool) -> list[str]:
    present = {
        os.path.relpath(os.path.join(folder, name), path): Path(folder, name)
        for folder, folders, names in os.walk(path)
        for name in [*names, *(name for name in folders if os.path.islink(os.path.join(folder, name)))]
    }
    del present[MANIFEST]
    faults = [f"{name}: missing" for name in sorted(manifest.files.keys() - present.keys())]
    faults += [_extra(name, present[name]) for name in sorted(present.keys() - manifest.files.keys())]
    names = {present[name]: name for name in sorted(manifest.files.keys() & present.keys())}
    return faults + [
        f"{names[file]}: {fault}" for file, fault in damaged({file: manifest.files[names[file]] for file in names}, contents).items()
    ]


def damaged(files: Mapping[Path, FileRecord], contents: bool = True) -> dict[Path, str]:
    """Return what is wrong with files recorded in a manifest, for those at fault; contents=False skips the hashes."""
    with ThreadPoolExecutor(_THREADS) as pool:
        faults = zip(files, pool.map(lambda file: _fault(file, files[file], contents), files), strict=True)
        return {file: fault for file, fault in faults if fault is not None}


def _fault(file: Path, record: FileRecord, contents: bool) -> str | None:
    if file.is_symlink() or not file.is_file():
        return "not a plain file"
    if file.suffix in _PICKLES and file.name != COMMON:
        return "a pickle, which is never loaded"
    try:
        size = file.stat().st_size
        if size != record.size:
            return f"{'truncated' if size < record.size else 'longer'}: {size} bytes of {record.size}"
        if contents and read_record(file) != record:
            return FLIPPED
    except OSError as error:
        return f"unreadable: {error.strerror}"
    return None


def _extra(name: str, file: Path) -> str:
    pickled = file.suffix in _PICKLES
    if file.is_file() and not file.is_symlink():
        with file.open("rb") as stream:
            if name == DAMAGED:
                return f"{name}: {one_line(stream.read(1000).decode(errors='replace'))}"
            pickled |= stream.read(1) == b"\x80"  # the first byte of every pickle of protocol 2 and later
    return f"{name}: extra: not in the manifest" + (", a pickle" if pickled else "")


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of a step directory. Raise ConfigError if it is missing or damaged."""
    try:
        given = read_json(path / MANIFEST, _MANIFEST_BYTES)
        content = given["content"]
        if content["format"] != FORMAT:
            raise ConfigError(f"{MANIFEST}: of another format than {FORMAT}")
        if xxh3_128_hexdigest(_canonical(content).encode()) != given["xxh128"]:
            raise ConfigError(f"{MANIFEST}: flipped: its hash is not its own")
        del content["format"]
        manifest = _KINDS.validate_json(json.dumps(content), strict=True)
        if outside := [name for name in manifest.files if os.path.normpath(name) != name or name.startswith(("/", ".."))]:
            raise ConfigError(f"{MANIFEST}: names {outside[0]!r}, which is not inside the directory")
        return manifest
    except FileNotFoundError as error:
        raise ConfigError(f"{MANIFEST}: {error.strerror}") from None
    except OSError as error:
        raise ConfigError(f"{MANIFEST}: unreadable: {error.strerror}") from None
    except ValidationError as error:
        fault = error.errors()[0]
        raise ConfigError(
            f"{MANIFEST}: damaged: {'.'.join(map(str, fault['loc']))}: {fault['msg']} (got {fault['input']!r:.200})"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{MANIFEST}: damaged: {type(error).__name__}: {one_line(str(error))}") from None


def _canonical(content: Any) -> str:
    return json.dumps(content, indent=1, sort_keys=True)

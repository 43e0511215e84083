"""`megarl verify DIRECTORY`: every step directory with its state, as a table."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from megarl.checkpoints.steps import CHECKPOINTS, Entry, is_step, listing, verify
from megarl.errors import ConfigError
from megarl.text.paths import nameable
from megarl.text.stdout import say


def main(arguments: Sequence[str]) -> int:
    """Print the table. Return 1 if a finished step directory is damaged, else 0. Raise ConfigError if there are no step directories."""
    top = argparse.ArgumentParser(prog="megarl verify", description="Checks every file of step directories against its manifest.")
    top.add_argument("directory", type=Path, metavar="DIRECTORY", help="a run, its checkpoints, or one step directory")
    try:
        entries = _entries(nameable(top.parse_args(arguments).directory))
    except (ValueError, OSError) as error:
        raise ConfigError(str(error) if isinstance(error, ConfigError) else f"verify: {error}") from None
    say(*table(entries))
    return 1 if any(entry.finished and entry.faults for entry in entries) else 0


def table(entries: Sequence[Entry]) -> Iterator[str]:
    """Yield the lines of the table, newest step first; the line of a damaged step is followed by what is wrong with it."""
    yield f"{'step':>8}  {'state':10} {'size':>10}  {'files':>5}  {'saved on':24} models"
    for entry in entries:
        if entry.saved is None:
            yield f"{entry.step:8}  {'damaged' if entry.finished else 'unfinished':10} {entry.path}"
            yield from (f"{'':10}{fault}" for fault in entry.faults)
            continue
        manifest = entry.saved.manifest
        layout = ", ".join(f"{key}={value}" for key, value in manifest.layout.items() if value not in (1, None))
        models = ", ".join(name + (" + optimizer" if model["optimizer"] else "") for name, model in manifest.models.items())
        size = f"{manifest.size / 1e9:.3f} GB"
        saved = layout or ("one rank" if manifest.world else "converted")
        yield f"{entry.step:8}  {'good':10} {size:>10}  {len(manifest.files):5}  {saved:24} {models}"


def _entries(directory: Path) -> list[Entry]:
    if not directory.is_dir():
        raise ConfigError(f"verify: no such directory: {directory}")
    if is_step(directory):
        return [verify(directory)]
    # Models with their own ranks have their own folders.
    folders = sorted(directory.glob(f"{CHECKPOINTS}*")) if (directory / CHECKPOINTS).is_dir() else [directory]
    entries = sorted((entry for folder in folders for entry in listing(folder)), key=lambda entry: -entry.step)
    if not entries:
        raise ConfigError(f"verify: {directory} has no step directories")
    return entries

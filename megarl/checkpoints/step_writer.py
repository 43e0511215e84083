"""Writes a step directory: under another name until it is whole, then renamed; moves `latest`, removes steps no longer kept."""

from __future__ import annotations

import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from megarl.checkpoints.files import sync, write_file
from megarl.checkpoints.steps import LATEST, MANIFEST, PARTIAL, Manifest, encode, listing, step_name


@dataclass(frozen=True)
class StepWriter:
    """`root`/step_<step>.partial. One process begins it and commits it; any may write files into it in between."""

    root: Path
    step: int

    @property
    def path(self) -> Path:
        return self.root / (step_name(self.step) + PARTIAL)

    def begin(self, folders: list[str]) -> None:
        """Makes the directory with the given folders inside, empty; what earlier saves left unfinished goes. Raises OSError."""
        self.root.mkdir(parents=True, exist_ok=True)
        for entry in listing(self.root, contents=False):
            if not entry.finished:
                shutil.rmtree(entry.path)
        for folder in folders:
            (self.path / folder).mkdir(parents=True)

    def discard(self) -> None:
        """Removes what there is of it."""
        shutil.rmtree(self.path, ignore_errors=True)

    def commit(self, manifest: Manifest, *, keep_last: int, keep_every: int) -> None:
        """Writes the manifest and gives the directory its name; then removes steps that are no longer kept.

        The files must lie on the disk. An earlier directory of this step is replaced. Later steps, from before the run went back to this
        one, are left alone.

        Args:
            manifest: of every file.
            keep_last: so many of the newest whole steps stay, this one included; damaged ones leave when they are older than all of these.
            keep_every: steps divisible by it stay too; 0: none.

        Raises:
            OSError: other steps are untouched. This one is absent or whole; where it is whole, `latest` may not name it yet and steps that
                are no longer kept may remain. An earlier directory of this step may be left under its name with `.replaced`.
        """
        write_file(self.path / MANIFEST, encode(manifest))
        for folder, _, _ in os.walk(self.path):
            sync(Path(folder))
        final = self.root / step_name(self.step)
        replaced = final.with_name(final.name + ".replaced")
        if final.exists():
            final.rename(replaced)
        self.path.rename(final)
        sync(self.root)
        point(self.root, final.name)
        if replaced.exists():
            shutil.rmtree(replaced)
        self._retire(keep_last, keep_every)

    def _retire(self, keep_last: int, keep_every: int) -> None:
        entries = listing(self.root, contents=False)
        whole = [entry.step for entry in entries if entry.saved is not None and entry.step <= self.step]
        oldest = min(whole[:keep_last])  # the new one at least is whole
        for entry in entries:
            if entry.finished and entry.step < oldest and not (keep_every and entry.step % keep_every == 0):
                shrinking = entry.path.with_name(entry.path.name + ".deleted")  # a name that nobody takes for a whole one
                entry.path.rename(shrinking)
                shutil.rmtree(shrinking)


def point(root: Path, name: str) -> None:
    """Lets `latest` name a step directory."""
    new = root / f".{LATEST}"
    with contextlib.suppress(FileNotFoundError):
        new.unlink()
    write_file(new, f"{name}\n".encode())
    new.replace(root / LATEST)
    sync(root)

"""Write a step directory under a temporary name, rename it when it is complete, update `latest`, and remove steps no longer kept."""

import contextlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from megarl.checkpoints.files import sync, write_file
from megarl.checkpoints.steps import DAMAGED, LATEST, MANIFEST, PARTIAL, Manifest, encode, listing, step_name


@dataclass(frozen=True)
class StepWriter:
    """The writer of `root`/step_<step>.partial. One process begins and commits it; any process may write files into it in between."""

    root: Path
    step: int

    @property
    def path(self) -> Path:
        return self.root / (step_name(self.step) + PARTIAL)

    def begin(self, folders: list[str]) -> None:
        """Create the directory with the given empty folders, and remove what unfinished saves left. Raise OSError if that fails."""
        self.root.mkdir(parents=True, exist_ok=True)
        for entry in listing(self.root, contents=False):
            if not entry.finished:
                shutil.rmtree(entry.path)
        for folder in folders:
            (self.path / folder).mkdir(parents=True)

    def discard(self) -> None:
        """Remove the unfinished directory, if it exists."""
        shutil.rmtree(self.path, ignore_errors=True)

    def commit(self, manifest: Manifest, *, keep_last: int, keep_every: int) -> None:
        """Write the manifest and give the directory its final name; then remove steps that are no longer kept.

        All files must already be on disk. An existing directory of this step is replaced. Later steps, left from before the run went back
        to this one, are not touched.

        Args:
            manifest: the manifest of every file.
            keep_last: how many of the newest intact steps to keep, including this one; damaged steps older than all of these are removed.
            keep_every: also keep steps divisible by this; 0: none.

        Raises:
            OSError: other steps are intact. This one is absent or complete; if it is complete, `latest` may not name it yet, and steps that
                are no longer kept may remain. An earlier directory of this step may be left with the suffix `.replaced`.
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
        if not whole:  # somebody else has moved or damaged what was just written
            raise OSError(f"{self.root}: no step is intact, {step_name(self.step)} included, which has just been written")
        oldest = min(whole[:keep_last])
        for entry in entries:
            if entry.finished and entry.step < oldest and not (keep_every and entry.step % keep_every == 0):
                shrinking = entry.path.with_name(entry.path.name + ".deleted")  # must not look like a complete step
                entry.path.rename(shrinking)
                shutil.rmtree(shrinking)


def mark_damaged(step: Path, fault: str) -> None:
    """Mark a step directory as damaged, so that it is skipped from now on, until it is saved again."""
    write_file(step / DAMAGED, f"{fault}\n".encode())
    sync(step)


def point(root: Path, name: str) -> None:
    """Make `latest` name a step directory."""
    new = root / f".{LATEST}"
    with contextlib.suppress(FileNotFoundError):
        new.unlink()
    write_file(new, f"{name}\n".encode())
    new.replace(root / LATEST)
    sync(root)

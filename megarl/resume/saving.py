"""Saving a run so that it can be killed at any moment: its state and models in one step directory."""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn, Protocol

from megarl.checkpoints.files import Content, LargeContent
from megarl.checkpoints.may_differ import held_by
from megarl.checkpoints.steps import SavedStep, damaged
from megarl.config import CheckpointSettings, TrainingSettings, dump
from megarl.errors import Alarmed, DamagedFile, SaveError
from megarl.host import termination
from megarl.host.shared_memory import MemoryFile
from megarl.observe.run import Run
from megarl.resume.point import TRAINER, ResumePoint
from megarl.rewards.score import RewardUnavailable


class State(Protocol):
    """The state of a run between two steps."""

    step: int

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any], /) -> None: ...

    def files(self) -> Mapping[str, LargeContent]:
        """Return the additional files of a checkpoint for this state, by name."""

    def restore_files(self, files: Mapping[str, PathLike[str]], /) -> None:
        """Restore what `files` returned; a name is missing if the checkpoint has no such file."""


class Trained(Protocol):
    """The ranks that train a run's models."""

    @property
    def folders(self) -> Mapping[str, str]:
        """The folder of the run that holds each model's checkpoints."""

    def checkpoint(self, directory: Path, step: int, settings: CheckpointSettings, extra: Mapping[str, Content], /) -> None: ...

    def wait_for_save(self) -> None: ...

    def load(self, steps: Mapping[str, SavedStep], /) -> None: ...

    def copy(self, step: int, record: object, /) -> None: ...

    def restore(self, step: int, /) -> None: ...


class Checkpoints:
    """Saves one run's checkpoints and copies, and loads them.

    Args:
        config: the run's configuration.
        verb: the run's verb.
        run: where saves are reported and timed.
        models: the models to save and load.
    """

    def __init__(self, config: TrainingSettings, verb: str, run: Run, models: Trained) -> None:
        self._settings, self._config, self._verb, self._run, self._models = config.save, config, verb, run, models
        self._saved: int | None = None  # the last step that was saved
        self._since = time.monotonic()  # the last save, or the start
        self._held = held_by(config.model_dump())

    def load(self, resume: ResumePoint, state: State) -> None:
        """Restore models, optimizers, random states and `state` from the checkpoint. Raise DamagedFile if a file has changed."""
        with self._run.phase("load"):
            if resume.copy is None:
                records = {path: record for step in resume.steps.values() for path, record in step.files.items()}
                for path, fault in damaged({path: records[path] for path in map(Path, resume.files.values())}).items():
                    raise DamagedFile(str(path), fault)
                self._models.load(resume.steps)
            else:
                self._models.restore(resume.copy)
            state.restore(resume.progress)
            state.restore_files(resume.files)
        self._saved = state.step if resume.copy is None else None

    def after_step(self, state: State) -> None:
        """Copy and save the finished step, as the section `save` says."""
        self.copy(state)
        late = self._settings.minutes and time.monotonic() - self._since >= 60 * self._settings.minutes
        if late or every(self._settings.every, state.step):
            self.save(state)

    def copy(self, state: State) -> None:
        """Copy the finished step, if `save.rolling` is on; if there is no room, report that and continue."""
        if self._settings.rolling == "off":
            return
        record = json.loads(json.dumps({"progress": state.state(), "run": self._run.state()}))
        with self._run.phase("rolling"):
            try:
                record["files"] = {name: MemoryFile(content.write) for name, content in state.files().items()}
                self._models.copy(state.step, record)
            except OSError as error:
                self._run.event("copy_failed", f"save.rolling at step {state.step}: {error.strerror or error}")

    def save(self, state: State) -> None:
        """Save the current models, with the state of the run.

        SaveError if this save or the one before failed and `save.on_failure` is stop; otherwise a failure is reported, and the run
        continues.
        """
        self._save(state.state(), state)

    def _save(self, progress: Mapping[str, Any], state: State) -> None:
        step = int(progress["step"])
        self._since = time.monotonic()
        if step == self._saved:
            return
        where, config = self._models.folders, dump(self._config)
        trainer = {"verb": self._verb, "progress": progress, "run": self._run.state(), "where": where, "config": config, "held": self._held}
        with self._run.phase("save"):
            with self._failures():
                self._models.wait_for_save()  # a failure of the previous save must not prevent this one
            with self._failures():
                files: dict[str, Content] = {TRAINER: json.dumps(trainer).encode(), **state.files()}
                self._models.checkpoint(self._config.directory, step, self._settings, files)
                self._saved = step

    @contextmanager
    def checkpoint_on_failure(self, state: State) -> Iterator[None]:
        """Wrap a step or an evaluation: if rewards are unavailable, the run stops with a checkpoint of the state before it.

        So it does on SIGTERM, SIGHUP or SIGUSR1. These abandon the work inside, unless it has already counted the step and begun to change
        the models.
        """
        before = state.state()
        try:
            with termination.interruptible(lambda: state.step == before["step"]):
                yield
        except RewardUnavailable:
            self._save_now(before, state)
            raise
        except termination.Terminated as stop:
            self._end(stop.number, before, state)

    def stop_where_asked(self, state: State, on_alarm: str = "continue") -> None:
        """Save and end the run after SIGTERM, SIGHUP or SIGUSR1, or if `on_alarm` is stop and there was an alarm."""
        number = termination.asked()
        if number is not None:
            self._end(number, state.state(), state)
        if on_alarm != "stop" or self._run.alarm is None:
            return
        self._run.ended_by = self._run.alarm
        self._save_now(state.state(), state)
        raise Alarmed(f"{self._run.alarm} (train.on_alarm=stop; started again with train.on_alarm=continue, the run resumes)")

    def _end(self, number: int, progress: Mapping[str, Any], state: State) -> NoReturn:
        written = self._save_now(progress, state)
        saved = f"saved at step {progress['step']}" if written else f"NOT saved at step {progress['step']}, see above"
        raise termination.Terminated(number, f": {saved}; started again, the run resumes") from None

    def _save_now(self, progress: Mapping[str, Any], state: State) -> bool:
        """Save, and wait until the checkpoint is written. Returns whether it was: a failure may only be reported (`save.on_failure`)."""
        self._save(progress, state)
        with self._failures():
            self._models.wait_for_save()
            return self._saved == progress["step"]
        return False

    def finish(self) -> None:
        """Wait for saves in progress."""
        with self._run.phase("save"), self._failures():
            self._models.wait_for_save()

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except SaveError as error:
            self._saved = None
            if self._settings.on_failure == "stop":
                raise
            self._run.event("save_failed", str(error))


def every(number: int, count: int) -> bool:
    """Whether `count` is a multiple of `number`; 0 means never."""
    return bool(number) and count % number == 0

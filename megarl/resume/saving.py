"""Saving a run so that it can be killed at any moment: its state and models in one step directory, and how it resumes from there."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, NoReturn, Protocol

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from megarl.checkpoints.files import Content, LargeContent
from megarl.checkpoints.may_differ import Contents, compare, completed, held_by
from megarl.checkpoints.steps import CHECKPOINTS, HF, Entry, SavedStep, damaged, listing, verified, verify
from megarl.config import CheckpointSettings, ConfigError, ModelSettings, TrainingSettings, dump, yaml_text
from megarl.errors import Alarmed, DamagedFile, SaveError
from megarl.host import termination
from megarl.host.shared_memory import MemoryFile
from megarl.models.arithmetic import differences
from megarl.models.description import ModelDescription
from megarl.models.hf import CONFIG
from megarl.observe.run import Run
from megarl.rewards.score import RewardUnavailable

TRAINER = "trainer.json"
AHEAD = "ahead."  # prefix of the names of `State.files`


class _Sampler(BaseModel, extra="allow"):
    count: int


class _Progress(BaseModel, extra="allow"):
    step: int
    sampler: _Sampler


class _Run(BaseModel, extra="allow"):
    step: int
    learned: int
    metrics_bytes: int
    evaluations: dict[str, dict[str, Any]]
    results: dict[str, dict[str, Any]]
    whole: dict[str, list[Any]]
    warnings: dict[str, str]
    ended_by: str | None
    restarts: list[dict[str, Any]]


class _Trainer(BaseModel):
    """The parts of TRAINER that decide whether a run may resume from it."""

    verb: str
    progress: _Progress
    run: _Run
    where: dict[str, Annotated[str, Field(pattern=r"^[\w\-]+$")]]
    config: Annotated[dict[str, Any], BeforeValidator(yaml_text.read)]
    held: dict[str, Contents | str]  # fingerprints of what the configuration's paths lead to; one text for each in earlier versions


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


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint whose files have their original sizes, or the copy of a step in the machines' memory."""

    steps: Mapping[str, SavedStep]  # which step directory holds each trained model
    progress: Mapping[str, Any]
    run: Mapping[str, Any]
    copy: int | None = None  # the step of the copy in memory; None for a checkpoint
    files: Mapping[str, PathLike[str]] = field(default_factory=dict)  # the files of `State.files`


def resume_point(config: TrainingSettings, verb: str, items: int, *, own: bool = False) -> ResumePoint | None:
    """Find the newest checkpoint of the run, if `save.resume` is set. A damaged one is reported and skipped.

    Only names and sizes are checked against the manifest, and the content of TRAINER: the other files are checked when they are loaded.

    Args:
        config: the run's configuration.
        verb: the run's verb, say "train".
        items: number of items in `data.train`.
        own: this very run has saved them, or was compared with them as it started: they are not compared with its configuration.

    Returns:
        The checkpoint, with the run's progress; None if no save has ever finished.

    Raises:
        ConfigError: as in `check_resume`, for the chosen checkpoint; or all of them are damaged.
    """
    root, faulty = config.directory / CHECKPOINTS, False
    if not config.save.resume or not root.is_dir():
        return None

    def skip(entry: Entry) -> None:
        nonlocal faulty
        faulty |= entry.finished
        for fault in entry.faults:
            report_skipped(entry.path, fault)

    for step in verified(root, skip):
        try:
            trainer = step.read(TRAINER)
        except ConfigError as error:
            report_skipped(step.path, str(error))
            faulty = True
            continue
        saved = _trainer(trainer, step.path)
        steps = {role: step if folder == CHECKPOINTS else _sibling_step(step, folder, skip) for role, folder in saved.where.items()}
        if None in steps.values():
            continue
        if not own:
            _check_same_run(saved, step.path, config, verb, items)
        whole = {role: part for role, part in steps.items() if part is not None}
        files = {name: step.path / name for name in step.manifest.files if name.startswith(AHEAD)}
        return ResumePoint(whole, saved.progress.model_dump(), saved.run.model_dump(), files=files)
    if faulty:
        raise ConfigError(f"save.resume: no checkpoint in {root} is intact; with false the run starts over, and what is there is kept")
    return None


def check_resume(config: TrainingSettings, verb: str, items: int) -> None:
    """Check that a run could resume from the newest checkpoint in its directory, of which only trainer.json is read.

    Args:
        config: the run's configuration.
        verb: the run's verb, say "train".
        items: number of items in `data.train`.

    Raises:
        ConfigError: the checkpoint was saved by another verb, its configuration differs in a fixed setting, its `data.train` had a
            different number of items, or what lies at one of its paths has changed.
    """
    root = config.directory / CHECKPOINTS
    if not config.save.resume or not root.is_dir():
        return
    for entry in listing(root, contents=False):
        if entry.saved is None:
            continue
        try:
            data = entry.saved.read(TRAINER)
        except ConfigError:  # damaged, and skipped when the run starts
            continue
        _check_same_run(_trainer(data, entry.path), entry.path, config, verb, items)
        return


def _trainer(data: bytes, path: Path) -> _Trainer:
    """Parse the TRAINER of the step directory `path`. ConfigError if it is invalid."""
    try:
        return _Trainer.model_validate_json(data, strict=True)
    except ValidationError as error:
        fault = error.errors()[0]
        place = ": ".join(filter(None, [str(path / TRAINER), ".".join(map(str, fault["loc"])), fault["msg"]]))
        raise ConfigError(f"save.resume: {place}") from None


def _check_same_run(saved: _Trainer, path: Path, config: TrainingSettings, verb: str, items: int) -> None:
    differing = compare(completed(saved.config, type(config)), config.model_dump(mode="json"), saved.held)
    model = _other_model(saved, path, config.model)
    if model:
        differing = [model, *(line for line in differing if not line.startswith("model.path: "))]
    before = saved.progress.sampler.count
    if saved.verb != verb:
        differing.append(f"name: {config.directory} holds checkpoints of `megarl {saved.verb}`, and this is `megarl {verb}`")
    if before != items:
        differing.append(f"data.train: {before} items in the checkpoint and {items} now: a resumed run cannot change it")
    if differing:
        raise ConfigError("\n".join([*differing, f"save.resume=true, but {path} was saved with other settings; false starts over"]))


def _other_model(saved: _Trainer, step: Path, settings: ModelSettings) -> str | None:
    """Return a line that says where the arithmetic of the run's model is not that of the model that the step directory holds."""
    own = next((step / name / HF for name in saved.where if name != "critic"), step)
    if not (own / CONFIG).is_file():
        return None
    path = settings.path
    pairs = differences(ModelDescription.read(own), ModelDescription.read(path, drop_images=settings.drop_images))
    changed = [f"{key} is {now!r}, and {then!r} in the checkpoint" for key, (then, now) in pairs.items()]
    return f"model.path: {path / CONFIG}: {'; '.join(changed)}: a resumed run cannot change it" if changed else None


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


def _sibling_step(step: SavedStep, folder: str, skip: Callable[[Entry], None]) -> SavedStep | None:
    """Return the part of a checkpoint that other ranks wrote; None if it is missing, which is reported, or damaged: then `skip` gets it."""
    path = step.path.parent.with_name(folder) / step.path.name
    if not path.is_dir():
        report_skipped(step.path, f"{path}, which belongs to it, is missing")
        return None
    entry = verify(path, contents=False)
    if entry.saved is None:
        skip(entry)
    return entry.saved


def report_skipped(step: Path, why: str) -> None:
    """Report that a step directory is skipped."""
    print(f"megarl: checkpoint {step} is skipped: {why}", flush=True)

"""A run that can be killed at any moment: where it stands, saved with its models in one step directory, and how it goes on from there."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, NoReturn, Protocol

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from megarl import termination
from megarl.checkpoints.files import Content, LargeContent
from megarl.checkpoints.resume import compare, held_by
from megarl.checkpoints.steps import CHECKPOINTS, Entry, SavedStep, listing, verified, verify
from megarl.config import CheckpointSettings, ConfigError, TrainingSettings, dump, yaml_text
from megarl.config.loading import absolute
from megarl.errors import Alarmed, SaveError
from megarl.observe.run import Run
from megarl.rewards.score import RewardUnavailable
from megarl.shared_memory import MemoryFile

TRAINER = "trainer.json"
AHEAD = "ahead."  # begins the names of `State.files`
# Keys of `data` that older supervised runs were saved with; at these values they did nothing.
RETIRED = {"demonstration": "answer", "corrupt_copy": 0.0, "corrupt_last": 0.0}


class _Sampler(BaseModel, extra="allow"):
    count: int


class _Progress(BaseModel, extra="allow"):
    step: int
    sampler: _Sampler


class _Run(BaseModel, extra="allow"):
    step: int
    learned: int
    metrics_bytes: int
    evaluations: dict[str, dict[str, Any]] = {}  # older checkpoints have none
    results: dict[str, dict[str, Any]]
    whole: dict[str, list[Any]]
    warnings: dict[str, str]


class _Trainer(BaseModel):
    """TRAINER, as far as it says whether a run may go on from it."""

    verb: str
    progress: _Progress
    run: _Run
    where: dict[str, Annotated[str, Field(pattern=r"^[\w\-]+$")]]
    config: Annotated[dict[str, Any], BeforeValidator(yaml_text.read)]
    held: dict[str, str] = {}  # of what its paths lead to; older checkpoints do not say


class State(Protocol):
    """Where a run stands between two steps."""

    step: int

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any], /) -> None: ...

    def files(self) -> Mapping[str, LargeContent]:
        """Further files that a checkpoint holds for this state, by name."""

    def restore_files(self, files: Mapping[str, PathLike[str]], /) -> None:
        """Gets back what `files` gave; none of a name where the checkpoint has none."""


class Trained(Protocol):
    """The ranks that train a run's models."""

    @property
    def folders(self) -> Mapping[str, str]:
        """In which folder of the run the checkpoints hold each model."""

    def checkpoint(self, directory: Path, step: int, settings: CheckpointSettings, extra: Mapping[str, Content], /) -> None: ...

    def wait_for_save(self) -> None: ...

    def load(self, steps: Mapping[str, SavedStep], /) -> None: ...

    def copy(self, step: int, record: object, /) -> None: ...

    def restore(self, step: int, /) -> None: ...


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint whose files have the sizes that were written; or the copy of a step in the memory of the machines."""

    steps: Mapping[str, SavedStep]  # which step directory holds each trained model
    progress: Mapping[str, Any]
    run: Mapping[str, Any]
    copy: int | None = None  # the step
    files: Mapping[str, PathLike[str]] = field(default_factory=dict)  # of `State.files`


def resume_point(config: TrainingSettings, verb: str, items: int, damaged: Collection[Path] = ()) -> ResumePoint | None:
    """The newest checkpoint of the run, where `save.resume` asks for one. A damaged one is named and passed over.

    Only names and sizes are compared with the manifest, and the content of TRAINER; `recovery.intact` reads the rest.

    Args:
        config: of the run.
        verb: megarl's, say "train".
        items: how many `data.train` has.
        damaged: step directories that are passed over, too.

    Returns:
        The checkpoint, with what the run had reached; None where no save has ever finished.

    Raises:
        ConfigError: as `check_resume` has it, of the checkpoint that is taken; or all of them are damaged.
    """
    root, faulty = config.directory / CHECKPOINTS, bool(damaged)
    if not config.save.resume or not root.is_dir():
        return None

    def skip(entry: Entry) -> None:
        nonlocal faulty
        faulty |= entry.finished
        for fault in entry.faults:
            passed_over(entry.path, fault)

    for step in verified(root, skip):
        if step.path in damaged:
            continue
        try:
            trainer = step.read(TRAINER)
        except ConfigError as error:
            passed_over(step.path, str(error))
            faulty = True
            continue
        saved = _trainer(trainer, step.path)
        steps = {role: step if folder == CHECKPOINTS else _beside(step, folder, skip) for role, folder in saved.where.items()}
        if any(found is None or found.path in damaged for found in steps.values()):
            continue
        _refuse_another(saved, step.path, config, verb, items)
        whole = {role: found for role, found in steps.items() if found is not None}
        files = {name: step.path / name for name in step.manifest.files if name.startswith(AHEAD)}
        return ResumePoint(whole, saved.progress.model_dump(), saved.run.model_dump(), files=files)
    if faulty:
        raise ConfigError(f"save.resume: no checkpoint in {root} is whole; with false the run begins anew, and what is there is kept")
    return None


def check_resume(config: TrainingSettings, verb: str, items: int) -> None:
    """Refuses what could not go on from the newest checkpoint in the run's directory, of which trainer.json alone is read.

    Args:
        config: of the run.
        verb: megarl's, say "train".
        items: how many `data.train` has.

    Raises:
        ConfigError: it was saved by another verb, its configuration differs in what must not differ, or `data.train` had another number of
            items.
    """
    root = config.directory / CHECKPOINTS
    if not config.save.resume or not root.is_dir():
        return
    for entry in listing(root, contents=False):
        if entry.saved is None:
            continue
        try:
            data = entry.saved.read(TRAINER)
        except ConfigError:  # damaged, and passed over when the run starts
            continue
        _refuse_another(_trainer(data, entry.path), entry.path, config, verb, items)
        return


def _trainer(data: bytes, path: Path) -> _Trainer:
    """The TRAINER of the step directory `path`. ConfigError where it is none."""
    try:
        return _Trainer.model_validate_json(data, strict=True)
    except ValidationError as error:
        fault = error.errors()[0]
        place = ": ".join(filter(None, [str(path / TRAINER), ".".join(map(str, fault["loc"])), fault["msg"]]))
        raise ConfigError(f"save.resume: {place}") from None


def _refuse_another(saved: _Trainer, path: Path, config: TrainingSettings, verb: str, items: int) -> None:
    differing = compare(resolved(saved.config, type(config)), config.model_dump(mode="json"), saved.held)
    before = saved.progress.sampler.count
    if saved.verb != verb:
        differing.append(f"name: {config.directory} holds checkpoints of `megarl {saved.verb}`, and this is `megarl {verb}`")
    if before != items:
        differing.append(f"data.train: {before} items in the checkpoint and {items} now: a resumed run cannot change it")
    if differing:
        raise ConfigError("\n".join([*differing, f"save.resume: true, and {path} was saved otherwise; false starts anew"]))


def resolved(tree: dict[str, Any], root: type[TrainingSettings]) -> dict[str, Any]:
    """A saved configuration with today's defaults for the keys that it did not know; as it is where it is not valid any more."""
    data = {name: value for name, value in tree.get("data", {}).items() if RETIRED.get(name, ...) != value}
    try:
        return absolute(root.model_validate({**tree, "data": data})).model_dump(mode="json")
    except ValidationError:
        return tree


class Checkpoints:
    """The saves of one run.

    Args:
        config: of the run.
        verb: that the run is of.
        run: where it is told and timed.
        models: that are saved and loaded.
    """

    def __init__(self, config: TrainingSettings, verb: str, run: Run, models: Trained) -> None:
        self._settings, self._config, self._verb, self._run, self._models = config.save, config, verb, run, models
        self._saved: int | None = None  # the last step that was saved
        self._held = held_by(config.model_dump())

    def load(self, resume: ResumePoint, state: State) -> None:
        """Puts models, optimizers, random states and `state` where the checkpoint has them."""
        with self._run.phase("load"):
            if resume.copy is None:
                self._models.load(resume.steps)
            else:
                self._models.restore(resume.copy)
            state.restore(resume.progress)
            state.restore_files(resume.files)
        self._saved = state.step if resume.copy is None else None

    def after_step(self, state: State) -> None:
        """Copies and saves the step that is done, as `save` asks for it."""
        self.copy(state)
        if every(self._settings.every, state.step):
            self.save(state)

    def copy(self, state: State) -> None:
        """Copies the step that is done, where `save.rolling` asks for it; where there is no room for it, the run is told and goes on."""
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
        """Saves the models as they are now, with where the run stands.

        SaveError where this save or the one before failed and `save.on_failure` is stop; else the run is told, and goes on.
        """
        self._save(state.state(), state)

    def _save(self, progress: Mapping[str, Any], state: State) -> None:
        step = int(progress["step"])
        if step == self._saved:
            return
        where, config = self._models.folders, dump(self._config)
        trainer = {"verb": self._verb, "progress": progress, "run": self._run.state(), "where": where, "config": config, "held": self._held}
        with self._run.phase("save"):
            with self._failures():
                self._models.wait_for_save()  # a failure of the one before must not prevent this one
            with self._failures():
                files: dict[str, Content] = {TRAINER: json.dumps(trainer).encode(), **state.files()}
                self._models.checkpoint(self._config.directory, step, self._settings, files)
                self._saved = step

    @contextmanager
    def checkpoint_on_failure(self, state: State) -> Iterator[None]:
        """A step or an evaluation inside: where no reward can be had, the run stops with a checkpoint of the moment before.

        So it does after SIGTERM, SIGHUP or SIGUSR1, which abandon what is inside until it counts the step and changes the models.
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
        """Saves and ends the run after SIGTERM, SIGHUP or SIGUSR1, and where `on_alarm` is stop and there was an alarm."""
        number = termination.asked()
        if number is not None:
            self._end(number, state.state(), state)
        if on_alarm != "stop" or self._run.alarm is None:
            return
        self._run.ended_by = self._run.alarm
        self._save_now(state.state(), state)
        raise Alarmed(f"{self._run.alarm} (train.on_alarm=stop; started again with train.on_alarm=continue, the run goes on)")

    def _end(self, number: int, progress: Mapping[str, Any], state: State) -> NoReturn:
        written = self._save_now(progress, state)
        saved = f"saved at step {progress['step']}" if written else f"NOT saved at step {progress['step']}, see above"
        raise termination.Terminated(number, f": {saved}; started again, the run goes on") from None

    def _save_now(self, progress: Mapping[str, Any], state: State) -> bool:
        """Saves, and waits until it is written. Whether it is: a failure may let the run go on."""
        self._save(progress, state)
        with self._failures():
            self._models.wait_for_save()
            return self._saved == progress["step"]
        return False

    def finish(self) -> None:
        """Waits for what is being written."""
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
    """Whether `count` is one of every `number`; 0 means never."""
    return bool(number) and count % number == 0


def _beside(step: SavedStep, folder: str, skip: Callable[[Entry], None]) -> SavedStep | None:
    """The part of a checkpoint that other ranks wrote; None where it is missing or damaged, which goes to `skip`."""
    path = step.path.parent.with_name(folder) / step.path.name
    if not path.is_dir():
        passed_over(step.path, f"{path}, which belongs to it, is missing")
        return None
    entry = verify(path, contents=False)
    if entry.saved is None:
        skip(entry)
    return entry.saved


def passed_over(step: Path, why: str) -> None:
    """Tells that a step directory is not taken."""
    print(f"megarl: checkpoint {step} is passed over: {why}", flush=True)

"""From where a run resumes: its newest intact checkpoint, which must be of the same run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from megarl.checkpoints.may_differ import Contents, compare, completed
from megarl.checkpoints.steps import CHECKPOINTS, HF, Entry, SavedStep, listing, verified, verify
from megarl.config import ConfigError, ModelSettings, TrainingSettings, yaml_text
from megarl.models.arithmetic import differences
from megarl.models.description import ModelDescription
from megarl.models.hf import CONFIG

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

"""A run that can be killed at any moment: where it stands, saved with its models in one step directory, and how it goes on from there."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import yaml
from pydantic import ValidationError

from megarl.checkpoints.resume import compare
from megarl.checkpoints.steps import Entry, Verified, verified, verify
from megarl.config import CheckpointSettings, ConfigError, TrainConfig, TrainingSettings, dump
from megarl.data.prompts import Prompt
from megarl.data.sampler import Sampler
from megarl.errors import Alarmed, SaveError
from megarl.observe.run import Run
from megarl.rewards.scale import RewardScale
from megarl.rewards.score import RewardUnavailable
from megarl.stages.pretraining import ValuePretraining
from megarl.workers.keeper import CHECKPOINTS

TRAINER = "trainer.json"


class Standing(Protocol):
    """Where a run stands between two steps."""

    step: int

    def state(self) -> dict[str, Any]: ...

    def restore(self, state: Mapping[str, Any], /) -> None: ...


class Savable(Protocol):
    """The ranks that train a run's models."""

    @property
    def folders(self) -> Mapping[str, str]:
        """In which folder of the run the checkpoints hold each model."""

    def checkpoint(self, directory: Path, step: int, settings: CheckpointSettings, extra: Mapping[str, bytes], /) -> None: ...

    def settle(self) -> None: ...

    def load(self, steps: Mapping[str, Verified], /) -> None: ...


class Progress:
    """Where an RL run stands between two steps: all of it that no model holds and no metric shows."""

    def __init__(self, config: TrainConfig, prompts: int) -> None:
        self.step = self.learned = 0  # steps, and those in which the policy learned
        self.evaluated = 0  # the step after which it was last evaluated
        self.kl_coef = config.algorithm.kl_coef
        self.scale: RewardScale | None = None  # of the rewards, where they are normalised
        self.sampler = Sampler(prompts, config.seed, config.data.shuffle)
        self.pretraining = ValuePretraining(config.critic)

    def draw(self, prompts: Sequence[Prompt], count: int) -> list[Prompt]:
        """The next `count` prompts."""
        return [prompts[index] for index in self.sampler.take(count)]

    def state(self) -> dict[str, Any]:
        """As plain values for JSON."""
        plain = {"step": self.step, "learned": self.learned, "evaluated": self.evaluated, "kl_coef": self.kl_coef}
        scale = None if self.scale is None else self.scale.plain()
        return {**plain, "scale": scale, "sampler": self.sampler.state(), "pretraining": self.pretraining.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Stands where `state` was taken. ValueError where the prompts are others."""
        self.step, self.learned = state["step"], state["learned"]
        self.evaluated, self.kl_coef = state["evaluated"], state["kl_coef"]
        scale = state.get("scale")  # older checkpoints have none
        self.scale = None if scale is None else RewardScale(*scale)
        self.sampler.restore(state["sampler"])
        self.pretraining.restore(state["pretraining"])


@dataclass(frozen=True)
class Found:
    """A checkpoint that verified, byte by byte."""

    steps: Mapping[str, Verified]  # which step directory holds each trained model
    progress: Mapping[str, Any]
    run: Mapping[str, Any]


def find(config: TrainingSettings, verb: str, items: int) -> Found | None:
    """The newest checkpoint of the run that is whole, where `save.resume` asks for one. A damaged one is named and passed over.

    ConfigError where it is of another verb, the configuration differs from its own in what must not differ, or `data.train` has not its
    `items`.
    """
    root = config.directory / CHECKPOINTS
    if not config.save.resume or not root.is_dir():
        return None
    for step in verified(root, _name):
        saved = json.loads(step.read(TRAINER))
        steps = {role: step if folder == CHECKPOINTS else _beside(step, folder) for role, folder in saved["where"].items()}
        if any(found is None for found in steps.values()):
            continue
        differing = compare(resolved(yaml.safe_load(saved["config"]), type(config)), config.model_dump(mode="json"))
        before = saved["progress"]["sampler"]["count"]
        if saved["verb"] != verb:
            differing.append(f"name: {config.directory} holds checkpoints of `megarl {saved['verb']}`, and this is `megarl {verb}`")
        if before != items:
            differing.append(f"data.train: {before} items in the checkpoint and {items} now: a resumed run cannot change it")
        if differing:
            raise ConfigError("\n".join([*differing, f"save.resume: true, and {step.path} was saved otherwise; false starts anew"]))
        return Found({role: found for role, found in steps.items() if found is not None}, saved["progress"], saved["run"])
    return None


def resolved(tree: dict[str, Any], root: type[TrainingSettings]) -> dict[str, Any]:
    """A saved configuration with today's defaults for the keys that it did not know; as it is where it is not valid any more."""
    try:
        return root.model_validate(tree).model_dump(mode="json")
    except ValidationError:
        return tree


class Checkpoints:
    """The saves of one run. On leaving, it waits for the last one."""

    def __init__(self, config: TrainingSettings, verb: str, run: Run, team: Savable) -> None:
        self._settings, self._config, self._verb, self._run, self._team = config.save, config, verb, run, team
        self._saved: int | None = None  # the last step that was saved

    def load(self, found: Found, progress: Standing) -> None:
        """Puts models, optimizers, random states and `progress` where the checkpoint has them."""
        with self._run.phase("load"):
            self._team.load(found.steps)
            progress.restore(found.progress)
        self._saved = progress.step

    def save(self, progress: Mapping[str, Any]) -> None:
        """Saves the models as they are now, as those of the step that `progress` (a state) says.

        SaveError where this save or the one before failed and `save.on_failure` is stop; else the run is told, and goes on.
        """
        step = int(progress["step"])
        if step == self._saved:
            return
        where, config = self._team.folders, dump(self._config)
        state = {"verb": self._verb, "progress": progress, "run": self._run.state(), "where": where, "config": config}
        with self._run.phase("save"):
            with self._failures():
                self._team.settle()  # whatever became of the one before, this one is another
            with self._failures():
                self._team.checkpoint(self._config.directory, step, self._settings, {TRAINER: json.dumps(state).encode()})
                self._saved = step

    @contextmanager
    def kept(self, progress: Standing) -> Iterator[None]:
        """A step inside: where no reward can be had, the run stops with a checkpoint of the moment before."""
        before = progress.state()
        try:
            yield
        except RewardUnavailable:
            self.save(before)
            with self._failures():
                self._team.settle()
            raise

    def stop_at_alarm(self, progress: Standing, on_alarm: str) -> None:
        """Saves and ends the run, where `on_alarm` is stop and there was an alarm."""
        if on_alarm != "stop" or self._run.alarm is None:
            return
        self._run.ended_by = self._run.alarm
        self.save(progress.state())
        with self._failures():
            self._team.settle()
        raise Alarmed(f"{self._run.alarm} (train.on_alarm=stop; started again with train.on_alarm=continue, the run goes on)")

    def finish(self) -> None:
        """Waits for what is being written."""
        with self._run.phase("save"), self._failures():
            self._team.settle()

    @contextmanager
    def _failures(self) -> Iterator[None]:
        try:
            yield
        except SaveError as error:
            if self._settings.on_failure == "stop":
                raise
            self._run.event("save_failed", str(error))


def every(number: int, count: int) -> bool:
    """Whether `count` is one of every `number`; 0 means never."""
    return bool(number) and count % number == 0


def _beside(step: Verified, folder: str) -> Verified | None:
    """The part of a checkpoint that other ranks wrote; None where it is missing or damaged."""
    path = step.path.parent.with_name(folder) / step.path.name
    if not path.is_dir():
        print(f"megarl: checkpoint {step.path} is passed over: {path}, which belongs to it, is missing", flush=True)
        return None
    entry = verify(path)
    _name(entry)
    return entry.verified


def _name(entry: Entry) -> None:
    for fault in entry.faults:
        print(f"megarl: checkpoint {entry.path} is passed over: {fault}", flush=True)

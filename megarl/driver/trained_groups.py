"""The ranks that train a run's models, as saving and recovery see them: every group saves, copies and loads its models at once."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megarl.checkpoints.files import Content
from megarl.checkpoints.steps import SavedStep
from megarl.cluster.actor_group import ActorGroup
from megarl.config import CheckpointSettings, RunSettings, TrainingSettings
from megarl.resume.copies import Copies


class TrainedGroups:
    """What the groups of ranks of RL and of the supervised stages have in common."""

    config: RunSettings

    def __post_init__(self) -> None:
        self.copies = Copies(isinstance(self.config, TrainingSettings) and self.config.save.rolling == "peer")

    @property
    def trainers(self) -> Mapping[str, ActorGroup]:
        """The groups that train a model, by name. The first holds the policy, or the only model."""
        raise NotImplementedError

    @property
    def folders(self) -> Mapping[str, str]:
        """The folder of the run that holds each trained model's checkpoints; each group's name is that of one of its models."""
        raise NotImplementedError

    @property
    def timeout_s(self) -> float:
        """Time limit of a call."""
        return self.config.cluster.phase_timeout_s

    def take_devices(self, *, keep_weights: bool = True) -> None:
        """If devices are shared, make the engines leave them."""

    def checkpoint(self, directory: Path, step: int, settings: CheckpointSettings, extra: Mapping[str, Content]) -> None:
        """Save all trained models and their optimizers.

        Args:
            directory: the run's directory.
            step: the step's number.
            settings: the section `save`.
            extra: further files of the step, by name, which the first group saves.

        Raises:
            SaveError: this save or the one before failed.
        """
        self.take_devices()
        several = len(set(self.folders.values())) > 1
        # One more, so that all folders still have a step in common if the run is killed between their last writes.
        keep = settings.model_copy(update={"keep_last": settings.keep_last + 1}) if several else settings
        [writer, *_] = [actor for group in self.trainers.values() for actor in group.actors]  # of `extra`, which holds whole batches
        running = [
            [
                actor.checkpoint.remote(directory / self.folders[name], step, keep, dict(extra) if actor is writer else {})
                for actor in group.actors
            ]
            for name, group in self.trainers.items()
        ]
        self._wait(running, "checkpoint")

    def copy(self, step: int, record: object) -> None:
        """Copy all trained models and their optimizers into the machines' memory (`save.rolling`). Raise OSError if there is no room."""
        self.take_devices()
        self.copies.save(step, self.trainers, self.timeout_s, record)

    def restore(self, step: int) -> None:
        """Restore the trained models and their optimizers from the copies of a step."""
        self.take_devices()
        self.copies.load(step, self.trainers, self.timeout_s)

    def wait_for_save(self) -> None:
        """Wait until the last checkpoint is written. Raise SaveError if it failed."""
        self._wait([group.start("wait_for_save") for group in self.trainers.values()], "wait_for_save")

    def load(self, steps: Mapping[str, SavedStep]) -> None:
        """Load the trained models and their optimizers from the step directories."""
        self.take_devices()
        self._wait([group.start("load", steps) for group in self.trainers.values()], "load")

    def _wait(self, running: Sequence[Sequence[Any]], doing: str) -> None:
        for group, calls in zip(self.trainers.values(), running, strict=True):
            group.wait(calls, doing, self.timeout_s)

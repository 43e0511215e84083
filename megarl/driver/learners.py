"""The driver's handle to the ranks of the supervised stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from megarl.checkpoints.files import Content
from megarl.checkpoints.steps import CHECKPOINTS, SavedStep
from megarl.cluster.actor_group import ActorGroup, end
from megarl.cluster.demand import demand
from megarl.cluster.reserve import release
from megarl.config import CheckpointSettings, RunSettings, TrainingSettings
from megarl.driver.rank_group import must_move, reserve_workers, start_ranks
from megarl.observe.metrics import Metric, merge
from megarl.ranks.learner import MODEL, Learner, MiniBatch, TrainSpec
from megarl.resume.copies import Copies


@dataclass
class Learners:
    """The driver's handle to the ranks, which together hold one model."""

    config: RunSettings
    spec: TrainSpec
    places: Sequence[Any]
    group: ActorGroup

    def __post_init__(self) -> None:
        self.copies = Copies(isinstance(self.config, TrainingSettings) and self.config.save.rolling == "peer")

    @property
    def timeout_s(self) -> float:
        """Time limit of a call."""
        return self.config.cluster.phase_timeout_s

    def restart(self, beginning: bool) -> bool:
        """End all ranks and start them again. Return whether a node was gone, so that they are on others now.

        beginning: the model begins again as at the start of the run; if false, `load` or `restore` comes next.
        """
        end(self.group.actors)
        moved = must_move(self.config, self.places)
        if moved:
            release(self.places)
            [self.places] = reserve_workers(self.config, demand(self.config))
        self.group = start_ranks(Learner, self.config, self.config.layout, self.places, self.spec, blank=not beginning)
        return moved

    def train(self, plan: MiniBatch) -> dict[str, Metric]:
        """Take one optimizer step."""
        return merge(self.group.call("train", ray.put(plan), timeout_s=self.timeout_s))

    def measure(self, plan: MiniBatch) -> dict[str, Metric]:
        """Compute the loss's metrics on sequences without training on them."""
        return merge(self.group.call("measure", ray.put(plan), timeout_s=self.timeout_s))

    @property
    def folders(self) -> dict[str, str]:
        """The folder of the model's checkpoints in the run."""
        return {MODEL: CHECKPOINTS}

    def checkpoint(self, directory: Path, step: int, settings: CheckpointSettings, extra: Mapping[str, Content]) -> None:
        """Save the model and its optimizer.

        Args:
            directory: the run's directory.
            step: the step's number.
            settings: the section `save`.
            extra: further files of the step, by name.

        Raises:
            SaveError: this save or the one before failed.
        """
        self.group.call("checkpoint", directory / CHECKPOINTS, step, settings, dict(extra), timeout_s=self.timeout_s)

    def copy(self, step: int, record: object) -> None:
        """Copy a step of the model and its optimizer into the machines' memory (`save.rolling`). Raise OSError if there is no room."""
        self.copies.save(step, {MODEL: self.group}, self.timeout_s, record)

    def restore(self, step: int) -> None:
        """Restore the model and its optimizer from the copies of a step."""
        self.copies.load(step, {MODEL: self.group}, self.timeout_s)

    def wait_for_save(self) -> None:
        """Wait until the last checkpoint is written. Raise SaveError if it failed."""
        self.group.call("wait_for_save", timeout_s=self.timeout_s)

    def load(self, steps: Mapping[str, SavedStep]) -> None:
        """Load the model and its optimizer from the step directory."""
        self.group.call("load", steps, timeout_s=self.timeout_s)

    def save(self, directory: Path) -> None:
        """Write the model as a Hugging Face directory."""
        self.group.call("save", directory, timeout_s=self.timeout_s)


def start_learners(config: RunSettings, spec: TrainSpec, *, blank: bool = False) -> Learners:
    """Start the ranks of `config.layout` and build the models.

    Args:
        config: the run's configuration.
        spec: what to optimise, and how.
        blank: a checkpoint is loaded next.
    """
    [places] = reserve_workers(config, demand(config))
    return Learners(config, spec, places, start_ranks(Learner, config, config.layout, places, spec, blank=blank))

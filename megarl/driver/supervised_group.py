"""The driver's handle to the ranks of the supervised stages."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from megarl.checkpoints.steps import CHECKPOINTS
from megarl.cluster.actor_group import ActorGroup, end
from megarl.cluster.process_kinds import demand
from megarl.cluster.reserve import release
from megarl.config import RunSettings
from megarl.driver.rank_group import must_move, reserve_workers, start_ranks
from megarl.driver.trained_groups import TrainedGroups
from megarl.observe.metrics import Metric, merge
from megarl.ranks.supervised_worker import MODEL, MiniBatch, SupervisedWorker, TrainSpec


@dataclass
class SupervisedGroup(TrainedGroups):
    """The driver's handle to the ranks, which together hold one model."""

    config: RunSettings
    spec: TrainSpec
    places: Sequence[Any]
    group: ActorGroup

    def restart(self, beginning: bool) -> bool:
        """End all ranks and start them again. Return whether a node was gone, so that they are on others now.

        beginning: the model begins again as at the start of the run; if false, `load` or `restore` comes next.
        """
        end(self.group.actors)
        moved = must_move(self.config, self.places)
        if moved:
            release(self.places)
            [self.places] = reserve_workers(self.config, demand(self.config))
        self.group = start_ranks(SupervisedWorker, self.config, self.config.layout, self.places, self.spec, blank=not beginning)
        return moved

    def train(self, plan: MiniBatch) -> dict[str, Metric]:
        """Take one optimizer step."""
        return merge(self.group.call("train", ray.put(plan), timeout_s=self.timeout_s))

    def measure(self, plan: MiniBatch) -> dict[str, Metric]:
        """Compute the loss's metrics on sequences without training on them."""
        return merge(self.group.call("measure", ray.put(plan), timeout_s=self.timeout_s))

    @property
    def trainers(self) -> dict[str, ActorGroup]:
        return {MODEL: self.group}

    @property
    def folders(self) -> dict[str, str]:
        return {MODEL: CHECKPOINTS}

    def save(self, directory: Path) -> None:
        """Write the model as a Hugging Face directory."""
        self.group.call("save", directory, timeout_s=self.timeout_s)


def start_supervised(config: RunSettings, spec: TrainSpec, *, blank: bool = False) -> SupervisedGroup:
    """Start the ranks of `config.layout` and build the models.

    Args:
        config: the run's configuration.
        spec: what to optimise, and how.
        blank: a checkpoint is loaded next.
    """
    [places] = reserve_workers(config, demand(config))
    return SupervisedGroup(config, spec, places, start_ranks(SupervisedWorker, config, config.layout, places, spec, blank=blank))

"""One Ray session and one engine for many RL runs: for tests whose subject is not how a run starts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.util import remove_placement_group

from megarl.config import TrainConfig, load
from megarl.observe.run import Run
from megarl.stages.checks import check_train
from megarl.stages.judge import open_scorers
from megarl.stages.saving import find
from megarl.trainer import learn
from megarl.workers.cluster import ray_session
from megarl.workers.engines import Engines
from megarl.workers.ranks import reserve_workers
from megarl.workers.team import cast, start_team
from tests.e2e.job import Job

MOST_RANKS = 4  # of a run, over all its models


@dataclass(frozen=True)
class Lab:
    """Where jobs run one after the other. The engine is that of the template; each run brings it the weights that it starts from."""

    engines: Engines

    def run(self, job: Job) -> Job:
        """`megarl train` in this process, on ranks of its own, to the end."""
        config = load(job.write(), list(job.overrides), TrainConfig)
        data = check_train(config)
        found = find(config, "train", len(data.train))
        with Run(config, None if found is None else found.run) as run, open_scorers(config.reward) as scorers:
            places = reserve_workers(config, ranks=sum(layout.ranks for _, layout in cast(config)))
            team = start_team(config, places)
            try:
                learn(config, data, found, run, scorers, team, Engines(self.engines.group, config.rollout))
            finally:
                for group in team.groups:
                    for actor in group.group.actors:
                        ray.kill(actor)
                remove_placement_group(places[0].placement_group)
        return job


@contextmanager
def open_lab(runs: Path, model: Path) -> Iterator[Lab]:
    """Starts the session and the engine, and ends them."""
    config = load(Job(runs, model).write(), [], TrainConfig)
    with ray_session(config.cluster, actors=MOST_RANKS + 1):
        engines = Engines.create(config, config.rollout, reserve_workers(config, engines=config.rollout))
        engines.group.wait(engines.open(config.model.path, config), "start", config.cluster.start_timeout_s)
        yield Lab(engines)

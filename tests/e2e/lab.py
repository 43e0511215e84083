"""One Ray session and one engine for many RL runs: for tests whose subject is not how a run starts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import ray

from megarl.config import TrainConfig, load
from megarl.observe.run import Run
from megarl.stages.checks import check_train
from megarl.stages.judge import open_scorers
from megarl.stages.saving import find
from megarl.trainer import learn
from megarl.workers.cluster import ray_session
from megarl.workers.engines import Engines
from megarl.workers.ranks import reserve_workers
from megarl.workers.team import cast, start, start_team
from tests.e2e.job import Job

ACTORS = 64  # over all runs: places are not given back


@dataclass(frozen=True)
class Lab:
    """Where jobs run one after the other. Each run of its model brings the engine, which is the template's, the weights it starts from."""

    model: Path
    engines: Engines

    def run(self, job: Job) -> Job:
        """`megarl train` in this process, to the end, on ranks of its own; a job of another model has an engine of its own too."""
        config = load(job.write(), list(job.overrides), TrainConfig)
        data = check_train(config)
        found = find(config, "train", len(data.train))
        with Run(config, None if found is None else found.run) as run, open_scorers(config.reward) as scorers:
            if job.model == self.model:
                ranks = sum(layout.ranks for _, layout in cast(config))
                team, engines = start_team(config, reserve_workers(config, ranks=ranks)), Engines(self.engines.group, config.rollout)
                own = [group.group for group in team.groups]
            else:
                team, engines = start(config)
                own = [*(group.group for group in team.groups), engines.group]
            try:
                learn(config, data, found, run, scorers, team, engines)
            finally:
                for group in own:
                    for actor in group.actors:
                        ray.kill(actor)
        return job


@contextmanager
def open_lab(runs: Path, model: Path) -> Iterator[Lab]:
    """Starts the session and the engine, and ends them."""
    config = load(Job(runs, model).write(), [], TrainConfig)
    with ray_session(config.cluster, ACTORS):
        engines = Engines.create(config, config.rollout, reserve_workers(config, engines=config.rollout))
        engines.group.wait(engines.open(config.model.path, config), "start", config.cluster.start_timeout_s)
        yield Lab(model, engines)

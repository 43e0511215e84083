"""One Ray session, one engine and a few ranks for many RL runs: for tests whose subject is not how a run starts."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray

from megarl import cli
from megarl.config import TrainConfig, load
from megarl.observe.run import Run
from megarl.stages import learning, pairs
from megarl.stages.checks import check_train
from megarl.stages.judge import open_scorers
from megarl.stages.saving import find
from megarl.trainer import learn
from megarl.workers.cluster import Group, ray_session
from megarl.workers.engines import Engines, start_engines
from megarl.workers.model_worker import ModelWorker
from megarl.workers.ranks import create_ranks, reserve_workers
from megarl.workers.team import Team, build_team, cast, objective
from tests.e2e.job import Job

ACTORS = 64  # over all runs: places are not given back
LENGTHS = ("rollout.max_prompt_tokens=64", "rollout.max_response_tokens=64", "rollout.kv_cache_mb=32")  # room for every job's


class Lab:
    """Where runs come one after the other. Each brings the engine, which is the template's model's, the weights it starts from."""

    def __init__(self, model: Path, config: TrainConfig) -> None:
        self._model, self._config = model, config
        self.engines = start_engines(config)
        self._ranks: list[Any] = []  # processes that wait for a part

    def run(self, job: Job) -> Job:
        """`megarl train` in this process, to the end."""
        self.train(load(job.write(), list(job.overrides), TrainConfig))
        return job

    def train(self, config: TrainConfig) -> None:
        """The same from a configuration; a model of another shape has an engine of its own."""
        data = check_train(config)
        found = find(config, "train", len(data.train))
        with (
            Run(config, None if found is None else found.run) as run,
            open_scorers(config.reward) as scorers,
            self.workers(config) as (team, engines),
        ):
            learn(config, data, found, run, scorers, team, engines)

    def learn(self, job: Job) -> Job:
        """`megarl sft`, `rm` or `dpo` in this process, to the end, on ranks of its own."""
        before = signal.getsignal(signal.SIGTERM)  # the command line takes it over
        try:
            with in_this_session():
                assert cli.main([job.verb, str(job.write()), *job.overrides]) == 0
        finally:
            signal.signal(signal.SIGTERM, before)
        return job

    @contextmanager
    def workers(self, config: TrainConfig) -> Iterator[tuple[Team, Engines]]:
        """The ranks and engines of a run. Ranks that fail are not used again."""
        own = shape(config.model.path) != shape(self._model)
        engines = start_engines(config) if own else Engines(self.engines.group, config.rollout)
        parts = [(roles, layout, rank) for roles, layout in cast(config) for rank in range(layout.ranks)]
        ranks = self._take(config, len(parts))
        try:
            plays = [
                actor.__ray_call__.remote(_begin, rank, config, layout, objective(config, roles), roles)
                for actor, (roles, layout, rank) in zip(ranks, parts, strict=True)
            ]
            ray.get(plays)
            yield build_team(config, _dealt(ranks, [layout.ranks for _, layout in cast(config)])), engines
            ray.get([actor.__ray_call__.remote(_end) for actor in ranks])
        except BaseException:
            _kill(ranks)
            raise
        else:
            self._ranks += ranks
        finally:
            if own:
                _kill(engines.group.actors)

    def _take(self, config: TrainConfig, count: int) -> list[Any]:
        """So many processes of ranks: those that wait, and new ones."""
        missing = max(0, count - len(self._ranks))
        places = reserve_workers(self._config, ranks=missing) if missing else []
        waiting = [*self._ranks, *create_ranks(ModelWorker, config, config.layout, places, objective(config, ()), ()).actors]
        self._ranks = waiting[count:]
        return waiting[:count]


@contextmanager
def in_this_session() -> Iterator[None]:
    """A stage inside asks for a Ray session, and gets none of its own."""

    @contextmanager
    def session(*_: Any) -> Iterator[None]:
        yield

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learning, "ray_session", session)
        patch.setattr(pairs, "ray_session", session)
        yield


def shape(model: Path) -> str:
    return (model / "config.json").read_text()


def _begin(worker: Any, *part: Any) -> None:
    """In a rank's process: it becomes the worker of another run."""
    worker.__init__(*part)


def _end(worker: Any) -> None:
    """In a rank's process: what it held is gone."""
    import gc

    from megarl.parallel.grid import destroy_grid

    destroy_grid()
    worker.__dict__.clear()
    gc.collect()


def _dealt(actors: Sequence[Any], sizes: Sequence[int]) -> list[Group]:
    rest = iter(actors)
    return [Group("rank", [next(rest) for _ in range(size)]) for size in sizes]


def _kill(actors: Sequence[Any]) -> None:
    for actor in actors:
        ray.kill(actor)


@contextmanager
def open_lab(runs: Path, model: Path) -> Iterator[Lab]:
    """Starts the session and the engine, and ends them."""
    config = load(Job(runs, model).write(), list(LENGTHS), TrainConfig)
    with ray_session(config.cluster, ACTORS):
        yield Lab(model, config)

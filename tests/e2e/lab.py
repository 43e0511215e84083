"""One Ray session, one engine and a few ranks for many RL runs: for tests whose subject is not how a run starts."""

import gc
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
from ray.exceptions import RayError
from safetensors.torch import load_file, save_file

from megarl.checks.train import check_train, check_value
from megarl.cli import command as cli
from megarl.cluster.actor_group import ActorGroup, WorkerDied, end
from megarl.cluster.placement import ProcessKind
from megarl.cluster.process_kinds import assign_roles, engine_kind, teacher_kinds
from megarl.cluster.reserve import release
from megarl.cluster.server import ProcessStalled
from megarl.cluster.session import ray_session
from megarl.config import EvalConfig, Layout, PairsConfig, RunSettings, TrainConfig, ValueConfig, load
from megarl.driver import supervised_group
from megarl.driver.device_turns import Turns
from megarl.driver.engines import Engines, EngineStarter, playing, start_engines
from megarl.driver.model_groups import ModelGroups, build_groups, rl_spec
from megarl.driver.rank_group import build_ranks, reserve_workers
from megarl.driver.teachers import Teachers
from megarl.engines.registry import ENGINES
from megarl.engines.worker import RolloutWorker
from megarl.loops import evaluate as eval_stage
from megarl.loops import pairs
from megarl.loops.train import learn
from megarl.loops.value import learn_values
from megarl.observe import report
from megarl.observe.restarts import Restarts
from megarl.observe.run import Run
from megarl.ranks.megatron_worker import MegatronWorker, RankSettings
from megarl.ranks.model_worker import ModelWorker
from megarl.ranks.supervised_worker import SupervisedWorker
from megarl.resume.point import resume_point
from megarl.resume.recovery import newest, recovering
from megarl.step import context
from megarl.step.context import RunContext
from megarl.step.reward import open_scorers
from tests.e2e.job import Job
from tests.signals import taken

IDLE_S = 10.0  # for ranks of a run that has failed to end their part: those that wait for others never do
ACTORS = 64  # over all runs: places are not given back
LENGTHS = ("rollout.max_prompt_tokens=64", "rollout.max_response_tokens=64", "rollout.kv_cache_mb=64", "rollout.max_num_seqs=256")


class Lab:
    """Where runs come one after the other. Each brings the engine, which is the template's model's, the weights it starts from."""

    def __init__(self, model: Path, config: TrainConfig) -> None:
        self._model, self._config = model, config
        self.engines = start_engines(config)
        self._host: Any = None  # the process of engines that one run has for itself: an actor of EngineHost
        self._ranks: list[Any] = []  # processes that wait for a part: actors of Player
        self.playing: list[int] = []  # process ids of those that were taken last

    def forget(self) -> None:
        """Drop the keys and values in the engines' caches: after numbers that are not finite, since on a CPU 0 x nan is nan."""
        turns = Turns(self.engines.group, timeout_s=60)
        turns.to_ranks()
        turns.to_engines()

    def run(self, job: Job, own_engine: bool = False) -> Job:
        """`megarl train` or `megarl value` in this process, to the end."""
        root = {"train": TrainConfig, "value": ValueConfig}[job.verb]
        self.train(load(job.write(), list(job.overrides), root), own_engine)
        return job

    def train(self, config: TrainConfig, own_engine: bool = False) -> None:
        """The same from a configuration."""
        verb, steps = ("value", learn_values) if isinstance(config, ValueConfig) else ("train", learn)
        data = check_value(config) if isinstance(config, ValueConfig) else check_train(config)
        resume = resume_point(config, verb, len(data.train))
        with (
            pytest.MonkeyPatch.context() as patch,
            Run(config, None if resume is None else resume.run) as run,
            open_scorers(config.reward, run.note) as scorers,
            self.workers(config, own_engine, resume is not None) as (models, engines),
        ):
            without_picture(patch)
            engines.note_sandbox(run.note)
            ctx = RunContext(config, run, models, engines, *scorers.rewards(models), Restarts(0, run.restarted, run.note))
            recovering(lambda start: steps(ctx, data, start), resume, ctx.recoverable, newest(config, verb, len(data.train)))

    def learn(self, job: Job, picture: bool = False) -> Job:
        """`megarl sft`, `rm` or `dpo` in this process, to the end."""
        with self.stage(picture):
            assert command(job) == 0
        return job

    def evaluate(self, *arguments: object) -> int:
        """The exit status of `megarl eval` in this process."""
        with self.stage():
            return called("eval", *arguments)

    @contextmanager
    def stage(self, picture: bool = False) -> Iterator[None]:
        """The stage inside runs in this session, on these ranks or on this engine, which is given the weights of the stage's model.

        picture: the run leaves one, as from the command line.
        """
        played: list[Any] = []

        def play(
            kind: type[MegatronWorker], config: RunSettings, layout: Layout, places: Sequence[Any], *arguments: Any, blank: bool = False
        ) -> ActorGroup:
            group = ActorGroup("rank", self._take(len(places)))
            played[:] = group.actors  # ranks that start again are others
            _begin(group, kind, config, layout, *arguments)
            build_ranks([group], config.cluster.start_timeout_s, blank=blank)
            return group

        def engines_of(config: EvalConfig | PairsConfig, restarts: Restarts) -> Engines:
            assert shape(config.model.path) == shape(self._model), "the engine is of another model"
            again = self._config.model_copy(update={"model": config.model})
            with self.workers(again) as (models, engines):
                models.sync(engines, 0)
            return Engines(engines.group, config.rollout, playing=playing(config), restarts=restarts)

        with in_this_session(), pytest.MonkeyPatch.context() as patch:
            if not picture:
                without_picture(patch)
            patch.setattr(supervised_group, "reserve_workers", lambda config, kinds: [[None] * kind.processes for kind in kinds])
            patch.setattr(supervised_group, "start_ranks", play)
            patch.setattr(supervised_group, "must_move", lambda config, places: False)
            for stage in (pairs, eval_stage):
                patch.setattr(stage, "start_engines", engines_of)
            with self._returned(played):
                yield

    @contextmanager
    def workers(self, config: TrainConfig, own_engine: bool = False, blank: bool = False) -> Iterator[tuple[ModelGroups, Engines]]:
        """The ranks and engines of a run; a model of another shape has an engine of its own in any case. `blank`: it loads a checkpoint."""
        own = own_engine or shape(config.model.path) != shape(self._model)
        turns = Turns(self.engines.group, config.cluster.phase_timeout_s) if config.placement.engines == "shared" and not own else None
        engines = self._start_engine(config) if own else Engines(self.engines.group, config.rollout, turns, playing=playing(config))
        ranks = self._take(sum(layout.ranks for _, layout in assign_roles(config)))
        try:
            with self._returned(ranks):
                groups = _dealt(ranks, [layout.ranks for _, layout in assign_roles(config)])
                for group, (roles, layout) in zip(groups, assign_roles(config), strict=True):
                    _begin(group, ModelWorker, config, layout, rl_spec(config, roles), roles)
                if turns is not None:
                    turns.to_ranks()
                models = build_groups(config, groups, turns, blank=blank)
                with teachers_of(config) as models.teachers:
                    yield models, engines
                if turns is not None:
                    turns.to_engines()  # for the next run
        finally:
            if own:
                ray.get(self._host.close.remote())

    def _start_engine(self, config: TrainConfig) -> Engines:
        """An engine of the run's own, in a process that has vLLM imported from the second one on."""
        if self._host is None:
            [[place]] = reserve_workers(config, [engine_kind(config.rollout, gpus=False)])
            actor = ray.remote(EngineHost).options(num_cpus=1, scheduling_strategy=place)
            self._host = actor.remote("engine 0", ENGINES[config.rollout.engine.type])
        starter = EngineStarter(config, config.rollout, [None], config.model.path)
        ray.get(self._host.keep_images.remote(config.directory))
        engines = Engines(ActorGroup("engine", [self._host]), config.rollout, None, starter, playing=playing(config))
        engines.group.wait(engines.open(), "start", config.cluster.start_timeout_s)
        return engines

    def _take(self, count: int) -> list[Any]:
        """So many processes of ranks: those that wait, and new ones."""
        missing = max(0, count - len(self._ranks))
        [places] = reserve_workers(self._config, [ProcessKind("ranks", missing)]) if missing else [[]]
        new = [ray.remote(Player).options(num_cpus=1, scheduling_strategy=place).remote() for place in places]
        waiting = [*self._ranks, *new]
        self._ranks = waiting[count:]
        self.playing = ray.get([actor.pid.remote() for actor in waiting[:count]])
        return waiting[:count]

    @contextmanager
    def _returned(self, ranks: Sequence[Any]) -> Iterator[None]:
        """Ranks that were taken wait again after it, unless it fails and leaves one of them dead or busy."""
        try:
            yield
        except BaseException as error:
            if isinstance(error, (WorkerDied, ProcessStalled)) or not _ended(ranks):
                _kill(ranks)
            else:
                self._ranks += ranks
            raise
        ray.get([actor.end.remote() for actor in ranks])
        self._ranks += ranks


@contextmanager
def teachers_of(config: TrainConfig) -> Iterator[Teachers | None]:
    """The teachers of a run that are on no ranks."""
    if not config.taught_apart:
        yield None
        return
    [places] = reserve_workers(config, teacher_kinds(config))
    teachers = Teachers(config, places)
    teachers.begin()
    try:
        teachers.ready()
        yield teachers
    finally:
        end(teachers.group.actors)
        release(places)


class EngineHost(RolloutWorker):
    """A process that has one engine after the other."""

    def __init__(self, label: str, engine: str) -> None:
        self._arguments: tuple[str, str, dict[str, str], Path] = (label, engine, {}, Path(os.devnull))
        super().__init__(*self._arguments)

    def keep_images(self, run: Path) -> None:
        """Those of environments, in the directory of the run that comes."""
        self._run = run

    async def close(self) -> None:
        await self._engine.close()
        if self._host is not None:
            self._host[1].close()
        super().__init__(*self._arguments)
        gc.collect()


class Player:
    """A process that is a rank of one run after the other, of whatever kind."""

    def pid(self) -> int:
        return os.getpid()

    def begin(self, kind: type[MegatronWorker], *arguments: Any) -> None:
        self.part = kind(*arguments)

    def end(self) -> None:
        """What the part held is gone."""
        from megarl.parallel.grid import destroy_grid

        destroy_grid()
        self.part.__dict__.clear()
        gc.collect()


def _played(name: str) -> Callable[..., Any]:
    return lambda player, *arguments: getattr(player.part, name)(*arguments)


for _name in {name for kind in (ModelWorker, SupervisedWorker) for name in dir(kind) if not name.startswith("_")}:
    setattr(Player, _name, _played(_name))


def with_nan(model: Path, target: Path) -> str:
    """Copy a model and make one number of its second layer nan; return the name of the weight."""
    shutil.copytree(model, target)
    weights = load_file(target / "model.safetensors")
    weights[name := "model.layers.1.self_attn.q_proj.weight"][0, 0] = torch.nan
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return name


def command(job: Job) -> int:
    """The exit status of the job's command line in this process."""
    return called(job.verb, job.write(), *job.overrides)


def called(*arguments: object) -> int:
    """The exit status of a command line in this process."""
    with taken():
        return cli.main([*map(str, arguments)])


@contextmanager
def in_this_session() -> Iterator[None]:
    """A stage inside asks for a Ray session, and gets none of its own."""

    @contextmanager
    def session(*_: Any) -> Iterator[None]:
        yield

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context, "ray_session", session)
        yield


def without_picture(patch: pytest.MonkeyPatch) -> None:
    """Runs leave no report.png, which takes half a second and which nobody looks at."""
    patch.setattr(report, "draw", lambda *_: None)


def shape(model: Path) -> dict[str, Any]:
    """What an engine is built for; the weights come in its own dtype."""
    config: dict[str, Any] = json.loads((model / "config.json").read_text())
    return {name: value for name, value in config.items() if name not in ("dtype", "torch_dtype")}


def _begin(group: ActorGroup, kind: type[MegatronWorker], config: RunSettings, layout: Layout, *arguments: Any) -> None:
    settings = RankSettings.of(config, layout)
    ray.get([actor.begin.remote(kind, rank, settings, *arguments) for rank, actor in enumerate(group.actors)])


def _dealt(actors: Sequence[Any], sizes: Sequence[int]) -> list[ActorGroup]:
    rest = iter(actors)
    return [ActorGroup("rank", [next(rest) for _ in range(size)]) for size in sizes]


def _ended(ranks: Sequence[Any]) -> bool:
    """Ends the parts of ranks that are alive and idle; whether all were."""
    ends = [actor.end.remote() for actor in ranks]
    ready, busy = ray.wait(ends, num_returns=len(ends), timeout=IDLE_S)
    with suppress(RayError):
        ray.get(ready)
        return not busy
    return False


def _kill(actors: Sequence[Any]) -> None:
    for actor in actors:
        ray.kill(actor)


@contextmanager
def open_lab(runs: Path, model: Path) -> Iterator[Lab]:
    """Starts the session and the engine, and ends them."""
    config = load(Job(runs, model).write(), list(LENGTHS), TrainConfig)
    with ray_session(config.cluster, ACTORS):
        yield Lab(model, config)

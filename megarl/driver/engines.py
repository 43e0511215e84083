"""The driver's handle to the rollout engines of a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, TypeVar

import ray

from megarl.cluster import watch
from megarl.cluster.actor_group import ActorGroup, end
from megarl.cluster.process_kinds import engine_kind
from megarl.config import AgentEnvironment, ClusterSettings, EvalConfig, PairsConfig, RolloutSettings, RunSettings, TrainConfig
from megarl.data.prompts import Prompt
from megarl.driver.device_turns import Turns
from megarl.driver.dispatch import ENGINE_FAULTS, Dispatcher, NoEngine, Wanted
from megarl.driver.rank_group import must_move, reserve_workers
from megarl.engines.engine import Setup
from megarl.engines.episodes import Limits, Start
from megarl.engines.generate import Sampling
from megarl.engines.member import MemberToStart
from megarl.engines.registry import ENGINES, engine_type
from megarl.engines.worker import ExpertsWanted, Playing, RolloutWorker
from megarl.environments.checks import rewriting, tool_schemas
from megarl.host.shell import FULL_PRECISION, differing, named
from megarl.observe.restarts import Restarts
from megarl.response import Response

PING_S = 60.0  # longest time in which an idle engine must answer a ping

Result = TypeVar("Result")


@dataclass
class EngineStarter:
    """Starts the engines of a run.

    Args:
        config: the run's configuration; says whether GPUs are used, and whether they are shared with ranks.
        settings: the engines' settings.
        places: a scheduling strategy for each member of each engine, from `reserve_workers`.
        model: a Hugging Face directory; its weights are read unless a sync comes before the first request.
        devices: the GPUs of the ranks that share them with the engines, `rollout.devices` for each; empty: Ray gives engines their own.
    """

    config: RunSettings
    settings: RolloutSettings
    places: Sequence[Any]
    model: Path
    devices: Sequence[str] = ()

    @property
    def shared(self) -> bool:
        """Whether the engines share devices with ranks and take turns with them."""
        return isinstance(self.config, TrainConfig) and self.config.placement.engines == "shared"

    @property
    def blank(self) -> bool:
        """Whether a sync brings the weights before the first request; not so with `model.base`, which is evaluated before the sync."""
        return isinstance(self.config, TrainConfig) and self.config.model.base is None and not self.config.sync.adapters

    def create(self, index: int) -> Any:
        """Start the process of an engine; `open` starts the engine in it."""
        return ray.remote(RolloutWorker).options(**self._options(index, 0)).remote(f"engine {index}", *self._actor_arguments)

    def open(self, index: int, actor: Any) -> Any:
        """Start the engine itself, with its other members; return at once, with the reference to wait for."""
        config = self.config
        setup = Setup(
            self.model,
            self.settings.dtype or config.model.dtype,
            self.settings,
            config.seed,
            gpu=config.cluster.gpus,
            report_experts=isinstance(config, TrainConfig) and config.routing.reported > 0,
            sleeps=self.shared,
            affinity=affinity(config, self.settings),
            blank=self.blank,
            pixels=(config.model.min_pixels, config.model.max_pixels),
            drop_images=config.model.drop_images,
            lora=config.model.lora if isinstance(config, TrainConfig) and config.sync.adapters else None,
        )
        members = [
            MemberToStart(self._options(index, rank), (f"engine {index} member {rank}", *self._actor_arguments, self._devices(index, rank)))
            for rank in range(1, self.settings.dp)
        ]
        return actor.open.remote(setup, self._devices(index, 0), members)

    def _options(self, index: int, rank: int) -> dict[str, Any]:
        """Ray's options of the actor for one data-parallel rank of an engine."""
        gpus = self.settings.tp if self.config.cluster.gpus else 0
        as_guest = self.shared and self.config.cluster.gpus  # in a place that is reserved for a rank
        options: dict[str, Any] = {"num_cpus": 0, "num_gpus": 0} if as_guest else {"num_cpus": 1, "num_gpus": gpus}
        return {**options, "scheduling_strategy": self.places[index * self.settings.dp + rank]}

    @property
    def _actor_arguments(self) -> tuple[str, dict[str, str], Path]:
        """The engine's class, environment variables of its processes, and the run's directory."""
        return ENGINES[self.settings.engine.type], engine_environment(self.config.cluster), self.config.directory

    def _devices(self, index: int, rank: int) -> Sequence[str]:
        start, count = index * self.settings.devices + rank * self.settings.tp, self.settings.tp
        return self.devices[start : start + count]


class Engines:
    """The rollout engines. With a `starter`, one that dies, is stopped or answers too late is replaced, and nothing else is lost.

    Args:
        group: the engines' actors.
        settings: the engines' settings.
        turns: whose turn it is, if the engines share devices with the policy's ranks.
        starter: starts replacements.
        restarts: limits how often engines are replaced.
        playing: how responses become episodes; None: they do not, and each response is a single turn.
    """

    def __init__(
        self,
        group: ActorGroup,
        settings: RolloutSettings,
        turns: Turns | None = None,
        starter: EngineStarter | None = None,
        restarts: Restarts | None = None,
        playing: Playing | None = None,
    ) -> None:
        self.playing = playing
        self.group, self.settings, self.turns, self.starter, self._restarts = group, settings, turns, starter, restarts
        self.starting: set[int] = set()  # replacements that do not have the weights of the others yet
        self.busy_s = 0.0  # seconds in which an engine had prompts to respond to, summed over the engines
        self.refill: Callable[[], object] = lambda: None  # brings the weights of the last sync into all engines
        if turns is not None:
            turns.guard = self.keeping
        if starter is not None and restarts is not None:
            watch.spare(group.actors)

    @classmethod
    def create(cls, starter: EngineStarter, restarts: Restarts | None = None) -> Engines:
        """Start the processes; `open` starts the engines in them."""
        group = ActorGroup("engine", [starter.create(index) for index in range(starter.settings.replicas)])
        turns = Turns(group, starter.config.cluster.phase_timeout_s) if starter.shared else None
        return cls(group, starter.settings, turns, starter, restarts, playing(starter.config))

    @property
    def places(self) -> Sequence[Any]:
        """The scheduling strategy of each member of each engine."""
        assert self.starter is not None
        return self.starter.places

    def open(self) -> list[Any]:
        """Start every engine; return at once, with the references to wait for."""
        assert self.starter is not None
        return [self.starter.open(index, actor) for index, actor in enumerate(self.group.actors)]

    def note_sandbox(self, note: Callable[[str], object]) -> None:
        """Note how the environment's processes are sandboxed on the engines' machines, and whether the chat template rewrites turns.

        ConfigError if the processes are sandboxed less than was asked for.
        """
        if self.playing is not None:
            if self.playing.rewriting is not None:
                note(self.playing.rewriting)
            guarantees = self.group.call("guarantee", self.playing.environment, timeout_s=PING_S)
            for guarantee in dict.fromkeys(guarantees):
                if guarantee is not None:
                    note(f"the environment runs in a sandbox: {guarantee}")

    def generate(
        self, prompts: Sequence[Prompt], sampling: Sampling, experts: ExpertsWanted | None = None, step: int = 0
    ) -> list[Response]:
        """Generate the responses to every prompt, in the order of the prompts.

        Args:
            prompts: the prompts, with their tokens.
            sampling: how many responses to generate per prompt, and how they are sampled.
            experts: which responses' routed experts to keep; None: none.
            step: as of `wanted`.
        """
        self.take_turn()
        work, answers = self.work(), dict[Any, list[Response]]()
        with self.finishing(work):
            for number, prompt in enumerate(prompts):
                work.ask(self.wanted(number, prompt, number, sampling, experts, step))
            while work.open:
                answers |= self.finished(work)
        return [response for number in range(len(prompts)) for response in answers[number]]

    def wanted(
        self, key: Any, prompt: Prompt, number: int, sampling: Sampling, experts: ExpertsWanted | None = None, step: int = 0
    ) -> Wanted:
        """Make a request to a dispatcher for the responses to one prompt.

        Args:
            key: the dispatcher's answer comes under this key.
            prompt: the prompt to respond to.
            number: the prompt's number; with `sampling.seed` it determines the random draws, and the responses have it as `prompt`.
            sampling: how to sample; the engines' settings say which tokens may be drawn and what ends a response.
            experts: which responses' routed experts to keep; None: none.
            step: the step that the responses are for, under which images of their environments are kept; 0: those that are always kept.
        """
        start = Start(number, prompt.tokens, prompt.seed, prompt.task, step, images=prompt.images)
        return Wanted(key, start, sampling.within(self.settings), experts)

    def work(self) -> Dispatcher:
        """Return a dispatcher that takes prompts for the engines. It must be the engines' turn (`take_turn`)."""
        return Dispatcher(self.group, self.settings, self.playing, self.starting)

    def take_turn(self) -> None:
        """If devices are shared, make the ranks leave them. Call it before asking for responses."""
        if self.turns is not None:
            self.turns.to_engines()

    @contextmanager
    def finishing(self, work: Dispatcher, *, refill: bool = True) -> Iterator[None]:
        """At the end of the block, replace the engines that were lost in the work; if the block fails, cancel the work.

        refill: whether replacements get the weights of the last sync.
        """
        try:
            yield
            self.replace(work, refill=refill)
        except BaseException:
            work.cancel()
            raise
        finally:
            self.busy_s += work.busy_s

    def finished(self, work: Dispatcher) -> dict[Any, list[Response]]:
        """Call `Dispatcher.finished`; if no engine is left, replace them all. The ranks must have the weights of the last sync."""
        try:
            return work.finished()
        except NoEngine:
            self.replace(work)
            return {}

    def replace(self, work: Dispatcher, *, refill: bool = True) -> None:
        """Replace the engines that were lost in the work; with `refill`, the replacements get the weights of the last sync."""
        faults = work.lost
        if not faults:
            return
        with self._replacements(refill) as lost:
            for engine, fault in faults.items():
                lost(engine, fault)
        self.take_turn()

    def keeping(self, doing: str, work: Callable[[], Result], *, refill: bool = True) -> Result:
        """Do `work` on idle engines; if an engine turns out to be lost, replace it and do the work again.

        Args:
            doing: names the work in errors.
            work: the work, which may be repeated.
            refill: whether a replacement needs the weights of the last sync first.
        """
        while True:
            try:
                return work()
            except Exception:
                if not self._replaced_any(doing, refill):
                    raise

    def start_again(self, places: Sequence[Any]) -> dict[int, Any]:
        """End all engines and start them again at other places; return at once, with what `ready` waits for."""
        assert self.starter is not None
        end(self.group.actors)
        self.starter.places = places
        self.group.actors[:] = [self.starter.create(index) for index in range(self.settings.replicas)]
        if self.turns is not None:
            self.turns.begin_again()
        return dict(enumerate(self.open()))

    def start_lost(self) -> dict[int, Any]:
        """Replace the engines that do not answer; return at once, with what `ready` waits for. They get their weights next.

        It is called while something else that failed is restarted: these replacements belong to that restart and are not counted.
        """
        opening = dict[int, Any]()

        def failed(index: int, fault: Exception) -> None:
            if self.starter is None or not isinstance(fault, ENGINE_FAULTS):
                raise fault
            opening[index] = self._start_another(index)

        calls = {index: actor.ping.remote(PING_S) for index, actor in enumerate(self.group.actors)}
        self.group.wait_each(calls, "recovery", PING_S, failed)
        return opening

    def ready(self, opening: Mapping[int, Any]) -> None:
        """Wait until engines have started. `opening` is what `open` returned for each, by the engine's number."""

        def failed(_: int, fault: Exception) -> None:
            raise fault

        assert self.starter is not None
        self.group.wait_each(opening, "start", self.starter.config.cluster.start_timeout_s, failed)

    def _replaced_any(self, doing: str, refill: bool) -> bool:
        """Replace the engines that do not answer; return whether there were any."""
        if self.starter is None:
            return False
        replaced = list[int]()
        with self._replacements(refill) as lost:

            def failed(index: int, fault: Exception) -> None:
                lost(index, fault)
                replaced.append(index)

            calls = {index: actor.ping.remote(PING_S) for index, actor in enumerate(self.group.actors)}
            self.group.wait_each(calls, doing, PING_S, failed)
        return bool(replaced)

    @contextmanager
    def _replacements(self, refill: bool = True) -> Iterator[Callable[[int, Exception], None]]:
        """Yield a function to call with each failed engine: it starts a replacement if the engine is lost, and raises any other fault.

        When the block ends, all replacements are ready. All engines lost within one block count as one restart.
        """
        opening = dict[int, Any]()
        with ExitStack() as recovery:

            def lost(index: int, fault: Exception) -> None:
                if self.starter is None or self._restarts is None or not isinstance(fault, ENGINE_FAULTS):
                    raise fault
                watch.renew()
                if must_move(self.starter.config, self.starter.places):
                    raise fault
                if not opening:
                    if not self._restarts.allow(fault):
                        raise fault
                    recovery.enter_context(self._restarts.recovery("engine", fault))
                opening[index] = self._start_another(index)

            yield lost
            if not opening:
                return
            assert self.starter is not None
            while opening:
                calls = dict(opening)
                opening.clear()
                self.group.wait_each(calls, "start", self.starter.config.cluster.start_timeout_s, lost)
            if self.turns is not None:
                self.turns.admit()
            if refill:
                self.refill()
                self.starting.clear()

    def _start_another(self, index: int) -> Any:
        """End an engine and start another in its place; return the reference to wait for until it is open."""
        assert self.starter is not None
        end([self.group.actors[index]])
        self.starting.add(index)  # before its actor changes: a dispatcher may be at work in another thread
        self.group.actors[index] = self.starter.create(index)
        if self.turns is not None:
            self.turns.make_room()
        return self.starter.open(index, self.group.actors[index])


def affinity(config: RunSettings, settings: RolloutSettings) -> bool:
    """Whether the engines of this run keep conversations where their prefixes are cached."""
    if settings.request_routing is not None:
        return settings.request_routing == "affinity"
    environment = config.environment if isinstance(config, EvalConfig | TrainConfig) else None
    return environment is not None and isinstance(environment.source, AgentEnvironment) and not config.cluster.deterministic


def engine_environment(settings: ClusterSettings) -> dict[str, str]:
    """The environment variables of engines that follow from the section `cluster`, whatever the shell says."""
    variables = {"VLLM_ENGINE_READY_TIMEOUT_S": str(ceil(settings.start_timeout_s))}  # vLLM's own is 600 (v1/engine/core_client.py:714)
    if settings.gpus:
        return variables | {"VLLM_BATCH_INVARIANT": str(int(settings.deterministic))}
    return variables | {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # or else vLLM warns about the memory's NUMA node at every start


def overruled(config: RunSettings) -> str | None:
    """Return a line that names the variables of this process's environment that the run does not use; None if it uses all.

    Call it before Ray starts, since the session sets some of them.
    """
    gpus, own = config.cluster.gpus, dict[str, str]()
    names: list[str] = []
    if isinstance(config, EvalConfig | PairsConfig | TrainConfig):
        names += engine_type(config.rollout).overruled(os.environ, gpu=gpus)
        own |= engine_environment(config.cluster)
    if gpus:
        own |= FULL_PRECISION
        if config.cluster.deterministic:
            from megarl.parallel.backend import DETERMINISTIC  # it imports torch

            own |= DETERMINISTIC
    return named([*names, *differing(own)])


def playing(config: RunSettings) -> Playing | None:
    """How responses become episodes in this run; None if they do not."""
    if not isinstance(config, EvalConfig | TrainConfig) or config.environment is None:
        return None
    rollout, environment = config.rollout, config.environment
    limits = Limits(rollout.max_prompt_tokens, rollout.max_response_tokens, environment.max_turns, environment.max_turn_tokens)
    rewritten = rewriting(environment, config.data, config.model.path)
    return Playing(environment, limits, config.data, tool_schemas(environment), rewritten)


def start_engines(config: EvalConfig | PairsConfig | TrainConfig, restarts: Restarts | None = None) -> Engines:
    """Start engines without ranks; return when they are ready."""
    [places] = reserve_workers(config, [engine_kind(config.rollout, config.cluster.gpus)])
    engines = Engines.create(EngineStarter(config, config.rollout, places, config.model.path), restarts)
    engines.group.wait(engines.open(), "start", config.cluster.start_timeout_s)
    return engines


def call_seed(run_seed: int, step: int, part: int = 0) -> int:
    """The seed of the random draws for some prompts; it depends on these arguments only.

    Args:
        run_seed: the configuration's `seed`.
        step: the step that the responses are for; 0 for evaluations; for `megarl pairs` the number of the file.
        part: the part of the step: the round of dynamic sampling, the set of an evaluation, or the call for a file of `megarl pairs`.
    """
    return (run_seed * 1_000_000 + step) * 1_000 + part

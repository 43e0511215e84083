"""The driver's handle to teachers that are on no model ranks: on engines of their own, or on servers."""

from collections.abc import Sequence
from itertools import count
from typing import Any

import ray

from megarl.batch import balance
from megarl.cluster.actor_group import ActorGroup, WorkerDied, end
from megarl.config import TeacherServer, TrainConfig
from megarl.driver.engines import engine_environment
from megarl.engines.engine import EngineDead, RolloutTimeout, Scoring, Setup, as_rollout
from megarl.engines.registry import ENGINES
from megarl.engines.teacher import Columns, EngineTeacher, ServerTeacher, Stored, Unit, named
from megarl.engines.teacher_server import server_of
from megarl.models.description import ModelDescription
from megarl.ranks.step_plan import Group, StepPlan


class Teachers:
    """The processes that score for the teachers: as many for each, one teacher after the other.

    Args:
        config: the run's configuration.
        places: a scheduling strategy for each process, from `reserve_workers`.
    """

    def __init__(self, config: TrainConfig, places: Sequence[Any]) -> None:
        assert config.distillation is not None
        self._config, self._teaching, self.places = config, config.distillation, places
        self.group, self._opening = ActorGroup("teacher", []), list[Any]()

    def begin(self) -> None:
        """Start the processes and their engines, also if there are some already; return at once. `ready` waits for them."""
        end(self.group.actors)
        columns = Columns(self._teaching.top_k, ModelDescription.read(self._config.model.path).vocab)
        self.group.actors[:], self._opening = self._engines(columns) if self._teaching.models else self._clients(columns)

    def _engines(self, columns: Columns) -> tuple[list[Any], list[Any]]:
        """Start the processes of the engines, and the engines; return the processes, and what to wait for."""
        config, teaching, engines = self._config, self._teaching, self._config.placement.teacher_engines
        assert engines is not None
        actor, arguments = ray.remote(EngineTeacher), (ENGINES["vllm"], engine_environment(config.cluster), config.directory)
        options = {"num_cpus": 1, "num_gpus": engines.tp if config.cluster.gpus else 0}
        actors = [
            actor.options(**options, scheduling_strategy=place).remote(f"teacher {number}", *arguments)
            for number, place in enumerate(self.places)
        ]
        settings, opening = as_rollout(engines, config.rollout.max_prompt_tokens + config.rollout.max_response_tokens), []
        for number, one in enumerate(actors):
            path = list(teaching.models.values())[number // engines.replicas]
            scoring = Scoring(named(teaching.top_k, ModelDescription.read(path).vocab, columns.vocabulary), config.rollout.temperature)
            setup = Setup(
                path,
                engines.dtype or config.model.dtype,
                settings,
                config.seed,
                gpu=config.cluster.gpus,
                scoring=scoring,
                drop_images=config.model.drop_images,
                pixels=(config.model.min_pixels, config.model.max_pixels),
            )
            opening.append(one.open.remote(setup, columns, config.cluster.phase_timeout_s))
        return actors, opening

    def _clients(self, columns: Columns) -> tuple[list[Any], list[Any]]:
        """Start the processes that ask servers; return them, and what to wait for."""
        actor, actors = ray.remote(ServerTeacher), []
        for place, (name, one) in zip(self.places, self._teaching.scorers.items(), strict=True):
            assert isinstance(one, TeacherServer)
            key = f"distillation.{name}"
            actors.append(actor.options(num_cpus=1, scheduling_strategy=place).remote(one, key, server_of(one, key), columns))
        return actors, [one.__ray_ready__.remote() for one in actors]

    def ready(self) -> None:
        """Wait until all have started."""
        self.group.wait(self._opening, "start", self._config.cluster.start_timeout_s)

    def of(self, number: int) -> list[Any]:
        """The processes of a teacher."""
        each = len(self.group.actors) // len(self._teaching.scorers)
        return self.group.actors[number * each : (number + 1) * each]

    def start(self, plan: StepPlan, groups: Sequence[Group]) -> list[Any]:
        """Let every sample of a step be scored by its teacher; return at once, with what `wait` waits for.

        Args:
            plan: the plan of the policy's ranks.
            groups: the step's responses.
        """
        responses = [response for group in groups for response in group.responses]
        sample_S = plan.sample_S or [(n, 0) for n in range(len(responses))]
        running = []
        for number in range(len(self._teaching.scorers)):
            actors = self.of(number)
            own = [s for s, (n, _) in enumerate(sample_S) if plan.teacher_N is None or plan.teacher_N[n] == number]
            entries = [responses[sample_S[s][0]].entries[sample_S[s][1]] for s in own]
            for actor, share in zip(actors, balance(entries, min(len(actors), len(own))) if own else [], strict=False):
                running.append(self._ask(actor, plan, sample_S, {own[index] for index in share}))
        return running

    def _ask(self, actor: Any, plan: StepPlan, sample_S: Sequence[tuple[int, int]], own: set[int]) -> Any:
        """Let a process score some samples: those of a micro-batch are a unit, since the same rank needs them."""
        micro_batches = (micro_batch for mini_batch in plan.split for shard in mini_batch for micro_batch in shard)
        numbers, number_of = count(), dict[int, int]()  # each response, in the order in which they come first
        units: list[Unit] = []
        for micro_batch in micro_batches:
            chosen = [s for s in micro_batch if s in own]
            for s in chosen:
                if sample_S[s][0] not in number_of:
                    number_of[sample_S[s][0]] = next(numbers)
            if chosen:
                units.append([(s, number_of[sample_S[s][0]], sample_S[s][1]) for s in chosen])
        return actor.score.remote(units, [plan.payload_N[n] for n in number_of])

    def wait(self, running: Sequence[Any]) -> Stored:
        """Wait for the columns of all samples.

        Raises:
            WorkerDied: an engine is gone, or answers too late: it can be started again, as ranks can.
        """
        try:
            parts = self.group.wait(running, "teachers", self._config.cluster.phase_timeout_s)
        except (EngineDead, RolloutTimeout) as error:
            raise WorkerDied(f"teachers: {error}") from error
        return [unit for part in parts for unit in part]

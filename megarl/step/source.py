"""The source of a run's batches. `rollout.mode` says how far the engines run ahead of the ranks; the training loop need not know it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from megarl.cluster import watch
from megarl.cluster.actor_group import LOOK_S, WorkerDied
from megarl.driver.dispatch import DOING, NoEngine
from megarl.observe.metrics import Last, Metric
from megarl.ranks.step_plan import Group
from megarl.rewards.score import RewardUnavailable
from megarl.step.budget import Rounds
from megarl.step.context import RunContext
from megarl.step.free import STOP_S, Flow
from megarl.step.groups import InProgress, RolloutCollector, StepGroups, finish
from megarl.step.state import TrainState


class RolloutSource:
    """Provides the batches of the steps, in order. Use it as a context manager: work in progress ends with it.

    `sync`: the engines generate while the ranks wait, and vice versa. `ahead`: while the ranks learn from a batch, the engines generate the
    next one, with the weights that the ranks started from; they finish before they get new ones. `budget`: the same, except that each
    response gets only a limited number of tokens (`Rounds`). `free`: the engines never wait (`Flow`).

    Args:
        ctx: the run's context.
        state: the run's state, with the batch ahead and the groups that wait for further rounds.
    """

    def __init__(self, ctx: RunContext, state: TrainState) -> None:
        self._ctx, self._state = ctx, state
        self._ahead = ctx.config.rollout.mode != "sync"
        self._flow = Flow(ctx, state) if ctx.config.rollout.mode == "free" else None
        self._background: _Background | None = None
        self._sampler = state.sampler.state()  # before the draws of the batch ahead
        self._pool: list[Group] = []  # besides the current batch
        self._failure: RewardUnavailable | None = None
        self._clock, self._busy_s, self._waited_s = time.monotonic(), ctx.engines.busy_s, 0.0

    def next_groups(self) -> StepGroups:
        """Return the groups that the next step learns from. RewardUnavailable if they could not be scored."""
        begun, state = time.monotonic(), self._state
        if self._flow is not None:
            with self._ctx.run.phase("rollout"):
                taken = self._flow.take()
            self._waited_s += time.monotonic() - begun
            return taken
        if self._failure is not None:
            raise self._failure
        groups, self._pool = state.ahead, state.pool
        if groups is None:
            progress = self._begin(state.step + 1, self._pool)
            groups, self._pool = finish(self._ctx, progress), _rest(progress)
        if self._ahead and (state.pretraining.active or state.learned + 1 < self._ctx.config.train.steps):
            self._sampler = state.sampler.state()
            self._background = _Background(self._begin(state.step + 2, self._pool))
        self._waited_s += time.monotonic() - begun
        return groups

    def after_update(self, *, sync_follows: bool) -> None:
        """Call when the step has learned from its batch: finishes the batch ahead, so that the engines can get new weights.

        `sync_follows` says whether they will. If not, replaced engines need the weights of the last sync.
        """
        begun, background, self._background = time.monotonic(), self._background, None
        if self._flow is not None:
            with self._ctx.run.phase("rollout"):
                self._flow.after_update(sync_follows=sync_follows)
        else:
            self._state.ahead, self._state.pool = None, self._pool
        if background is not None:
            with self._ctx.run.phase("rollout"):
                self._finish(background, sync_follows)
        self._waited_s += time.monotonic() - begun

    def _begin(self, step: int, pool: Sequence[Group]) -> InProgress:
        ctx, state = self._ctx, self._state
        if ctx.config.rollout.mode == "budget":
            return Rounds(ctx, state.draw, step, state.scale, pool)
        return RolloutCollector(ctx, state.draw, step, state.scale, ctx.config.train.dynamic_sampling_rounds)

    def _finish(self, background: _Background, sync_follows: bool) -> None:
        """Turn the work in progress into the batch ahead. If it cannot be scored, `next_groups` raises, and its prompts are drawn again."""
        ctx, state, progress = self._ctx, self._state, background.progress
        try:
            with ctx.engines.finishing(progress.work, refill=not sync_follows):
                background.wait()
                while progress.proceed(lambda work: work.finished(), ranks=True):
                    pass
            ctx.run.failures(progress.scores)
        except RewardUnavailable as error:
            self._failure = error
            state.sampler.restore(self._sampler)
        except NoEngine:
            fault = next(iter(progress.work.lost.values()))
            raise WorkerDied(f"{fault}: no remaining engine has the weights of the batch ahead") from fault
        else:
            state.ahead, state.pool = progress.result(), _rest(progress)

    def metrics(self) -> dict[str, Metric]:
        """Return the share of time since the last call in which the ranks waited for a batch, and in which an engine was idle."""
        now, busy_s, engines = time.monotonic(), self._ctx.engines.busy_s, self._ctx.config.rollout.replicas
        seconds = now - self._clock
        metrics: dict[str, Metric] = {
            "perf/idle_ranks": Last(min(1.0, self._waited_s / seconds)),
            "perf/idle_engines": Last(max(0.0, 1 - (busy_s - self._busy_s) / (seconds * engines))),
        }
        self._clock, self._busy_s, self._waited_s = now, busy_s, 0.0
        return metrics

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for under_way in (self._background, self._flow):
            if under_way is not None:
                under_way.stop()


def _rest(progress: InProgress) -> list[Group]:
    """The groups that wait for further rounds or a later step."""
    return progress.rest() if isinstance(progress, Rounds) else []


class _Background:
    """Runs the work in progress in a background thread."""

    def __init__(self, progress: InProgress) -> None:
        self.progress = progress
        self._error: BaseException | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="rollout", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Return when the thread can do no more without the ranks. Raises its error if it failed, and what the session's watch has seen."""
        while self._thread.is_alive():
            self._thread.join(LOOK_S)
            watch.check(DOING, {})  # the thread may be waiting for something else
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Stop the thread, and cancel the work."""
        self._stopped = True
        self._thread.join(STOP_S)
        self.progress.work.cancel()

    def _run(self) -> None:
        try:
            while not self._stopped and self.progress.proceed(lambda work: work.finished(), ranks=False):
                pass
        except BaseException as error:
            self._error = error

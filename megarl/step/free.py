"""`rollout.mode: free`: the engines never wait; responses in progress when new weights arrive continue under them."""

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from megarl.cluster import watch
from megarl.data.prompts import Prompt
from megarl.driver.dispatch import DOING, Dispatcher, NoEngine
from megarl.driver.engines import call_seed
from megarl.engines.generate import Sampling
from megarl.ranks.step_plan import Group
from megarl.response import Response
from megarl.rewards.score import Score
from megarl.step.context import RunContext
from megarl.step.groups import StepGroups, scored
from megarl.step.state import TrainState

POLL_S = 0.005
LOOK_S = 0.05  # how long new prompts may wait to be handed out
STOP_S = 60.0  # longest wait for scoring in progress when a run ends
GroupId = tuple[int, int]
"""The identity of a group: the step it was requested for, and its number within that step."""


class Schedule:
    """Decides which groups may begin and which ones a step learns from.

    No token is ever more than `max_lag` updates older than the weights trained on it, and no group is dropped.

    Args:
        wanted: number of groups per step.
        max_lag: largest lag in updates.
    """

    def __init__(self, wanted: int, max_lag: int) -> None:
        self._wanted, self._lag = wanted, max_lag
        self._latest: dict[GroupId, int] = {}  # for each group, the last update count at which it may still be learned from
        self._done: set[GroupId] = set()

    @property
    def room(self) -> int:
        """How many more groups may begin."""
        return (self._lag + 1) * self._wanted - len(self._latest)

    def begin(self, name: GroupId, learned: int) -> None:
        """Record that a group begins after `learned` updates."""
        self._latest[name] = learned + self._lag

    def end(self, name: GroupId) -> None:
        """Record that a group is finished."""
        self._done.add(name)

    def take(self, learned: int) -> list[GroupId] | None:
        """Take the oldest finished groups for the step after `learned` updates; None if the step has to wait for older ones.

        It waits if the following steps could not use all remaining groups in time.
        """
        order = sorted(self._latest, key=lambda name: (self._latest[name], name))
        chosen = [name for name in order if name in self._done][: self._wanted]
        if len(chosen) < self._wanted:
            return None
        for last in set(self._latest.values()):
            due = sum(latest <= last for latest in self._latest.values())
            if sum(self._latest[name] <= last for name in chosen) < due - (last - learned) * self._wanted:
                return None
        for name in chosen:
            del self._latest[name]
            self._done.remove(name)
        return chosen


class Flow:
    """Keeps the engines as busy as `Schedule` allows.

    Args:
        ctx: the run's context.
        state: the run's state, with the groups that have begun as in a checkpoint: unfinished ones begin again.
    """

    def __init__(self, ctx: RunContext, state: TrainState) -> None:
        rollout = ctx.config.rollout
        assert rollout.max_lag is not None
        self._ctx, self._state = ctx, state
        self._schedule = Schedule(ctx.config.train.prompts_per_step, rollout.max_lag)
        self._reward = ctx.train_reward.on(state.scale)
        self._work: Dispatcher = ctx.engines.work()
        self._pool: dict[GroupId, Group] = {}
        self._arrived: deque[tuple[GroupId, list[Response], list[Score] | None]] = deque()
        self._scores: list[Score] = []  # since the last step
        self._error: BaseException | None = None
        self._counted_s = 0.0  # seconds of engine work
        for group in state.pool:
            frozen = state.step - state.learned
            versions = [span.version for response in group.responses for span in response.weight_versions]
            self._add(group, max(0, min(versions) - frozen) if versions else state.learned)
        self._start()

    def take(self) -> StepGroups:
        """Take the next step's groups while the ranks wait with the weights of the last sync. Raises errors of engines or reward."""
        state = self._state
        for number, (place, prompt) in enumerate(state.draw(self._schedule.room)):
            self._add(Group(place, prompt, [], [], None, (state.step + 1, number)), state.learned)
        self._gather(ranks_wait=True)
        while (chosen := self._schedule.take(state.learned)) is None:
            while not self._arrived:
                if self._error is not None:
                    self._mend(self._error)
                watch.check(DOING, {})  # the thread may be waiting for something else
                time.sleep(POLL_S)
            self._gather(ranks_wait=True)
        self._ctx.run.failures(self._scores)
        self._scores = []
        return StepGroups([self._pool.pop(name) for name in sorted(chosen)], {"rollout/waiting": float(len(self._pool))})

    def after_update(self, *, sync_follows: bool) -> None:
        """Call when the step has learned from its groups. Replaces lost engines.

        New ones get no requests before they have weights: those of the sync that follows, or without one, at once those of the last sync.
        """
        self._gather(ranks_wait=False)
        self._state.pool = [group if group.scores else replace(group, responses=[]) for group in self._pool.values()]
        self._ctx.engines.replace(self._work, refill=not sync_follows)
        busy_s = self._work.busy_s
        self._ctx.engines.busy_s, self._counted_s = self._ctx.engines.busy_s + busy_s - self._counted_s, busy_s

    def stop(self) -> None:
        """Abandon everything in progress."""
        self._stopped = True
        self._thread.join(STOP_S)
        self._work.cancel()

    def _add(self, group: Group, learned: int) -> None:
        """Add a group that begins, or has begun, after `learned` updates."""
        self._pool[group.asked] = group
        self._schedule.begin(group.asked, learned)
        if group.scores:
            self._schedule.end(group.asked)
            return
        rollout, (step, number) = self._ctx.config.rollout, group.asked
        sampling = Sampling(
            rollout.samples_per_prompt, rollout.temperature, rollout.max_response_tokens, call_seed(self._ctx.config.seed, step)
        )
        self._work.ask(self._ctx.engines.wanted(group.asked, group.prompt, number, sampling, self._ctx.models.experts, step))

    def _gather(self, *, ranks_wait: bool) -> None:
        """Assign arrived responses to their groups. `ranks_wait`: the ranks are idle, so a reward model can read the responses."""
        while self._arrived:
            name, responses, scores = self._arrived.popleft()
            self._keep(name, responses, scores)
        waiting = {name: group for name, group in self._pool.items() if group.responses and not group.scores}
        if waiting and ranks_wait:
            scores_of = self._scored([group.prompt for group in waiting.values()], [group.responses for group in waiting.values()])
            for (name, group), own in zip(waiting.items(), scores_of, strict=True):
                self._keep(name, group.responses, own)

    def _keep(self, name: GroupId, responses: list[Response], scores: list[Score] | None) -> None:
        self._pool[name] = replace(self._pool[name], responses=responses, scores=scores or [])
        if scores is not None:
            self._schedule.end(name)
            self._scores += scores

    def _mend(self, error: BaseException) -> None:
        """Replace the engines if all were lost; raise any other error."""
        if not isinstance(error, NoEngine):
            raise error
        self._ctx.engines.replace(self._work)
        self._error = None
        self._start()

    def _start(self) -> None:
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="rollout", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stopped:
                if not self._work.open:
                    time.sleep(POLL_S)
                    continue
                finished = self._work.finished(LOOK_S)
                scores: Sequence[list[Score] | None] = [None] * len(finished)
                if not self._reward.on_ranks and finished:
                    scores = self._scored([self._pool[name].prompt for name in finished], list(finished.values()))
                self._arrived.extend((name, responses, own) for (name, responses), own in zip(finished.items(), scores, strict=True))
        except BaseException as error:
            self._error = error

    def _scored(self, prompts: Sequence[Prompt], answers: Sequence[list[Response]]) -> list[list[Score]]:
        return scored(self._reward, prompts, answers, self._ctx.config.rollout.max_response_tokens)

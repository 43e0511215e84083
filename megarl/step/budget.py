"""`rollout.mode: budget`: in each round every response gets a fixed budget of tokens; unfinished ones continue with the next weights.

Nothing depends on timing: token counts decide which weights sample which token, so runs are reproducible.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from megarl.driver.dispatch import Dispatcher, Segment
from megarl.driver.engines import call_seed
from megarl.engines.generate import Sampling
from megarl.ranks.step_plan import Group
from megarl.response import Response
from megarl.rewards.scale import RewardScale
from megarl.rewards.score import Score
from megarl.step.context import RunContext
from megarl.step.groups import Draw, StepGroups, scored

POOL = 2  # steps' worth of prompts in flight


class Rounds:
    """The rounds of one step: as many as it takes to finish enough groups, of which the step gets the oldest.

    A response of T tokens is finished after T / `rollout.budget_tokens` rounds, rounded up, and each step has at least one round. There are
    never more than `POOL` steps' worth of groups, and a finished group is never overtaken by a later one: it is used in the step of its
    last round, or in the next.

    Args:
        ctx: the run's context.
        draw: draws the prompts.
        step: the step that the rounds are for; with the number of a prompt that begins in it, it determines the random draws.
        scale: the scale of the rewards, if they are normalised.
        pool: groups of earlier rounds, in the order in which they began.

    Attributes:
        work: the engines' work in progress.
        scores: the scores of the finished responses.
    """

    def __init__(self, ctx: RunContext, draw: Draw, step: int, scale: RewardScale | None, pool: Sequence[Group]) -> None:
        self._ctx, self._reward = ctx, ctx.train_reward.on(scale)
        self._wanted = ctx.config.train.prompts_per_step
        new = draw(POOL * self._wanted - len(pool))
        self._pool = [*pool, *(Group(place, prompt, [], [], None, (step, number)) for number, (place, prompt) in enumerate(new))]
        self.work: Dispatcher = ctx.engines.work()
        self.scores: list[Score] = []
        self._rounds = 0
        self._begin()

    def proceed(self, finished: Callable[[Dispatcher], dict[Any, list[Response]]], *, ranks: bool) -> bool:
        """Do the same as `RolloutCollector.proceed`."""
        if self.work.open:
            for index, responses in finished(self.work).items():
                by_index = {response.index: response for response in self._pool[index].responses}
                for more in responses:
                    by_index[more.index] = self._carried_on(by_index[more.index], more) if more.index in by_index else more
                self._pool[index] = replace(self._pool[index], responses=[*by_index.values()])
        if not self._reward.on_ranks or (ranks and not self.work.open):
            self._score()
        if self.work.open:
            return True
        if sum(bool(group.scores) for group in self._pool) >= self._wanted:
            return False
        if any(self._done(group) and not group.scores for group in self._pool):
            return ranks
        self._begin()
        return True

    def result(self) -> StepGroups:
        """The step's groups."""
        groups = [group for group in self._pool if group.scores][: self._wanted]
        return StepGroups(groups, {"rollout/budget_rounds": float(self._rounds), "rollout/waiting": float(len(self._pool) - len(groups))})

    def rest(self) -> list[Group]:
        """The groups that are not in `result`."""
        chosen = {id(group) for group in self.result().groups}
        return [group for group in self._pool if id(group) not in chosen]

    def _begin(self) -> None:
        rollout = self._ctx.config.rollout
        assert rollout.budget_tokens is not None
        self._rounds += 1
        for index, group in enumerate(self._pool):
            if self._done(group):
                continue
            step, number = group.asked
            seed = call_seed(self._ctx.config.seed, step)
            sampling = Sampling(rollout.samples_per_prompt, rollout.temperature, rollout.max_response_tokens, seed)
            left = {response.index: [*response.before, response.payload] for response in group.responses if self._open(response)}
            segment = Segment(rollout.budget_tokens, left if group.responses else dict.fromkeys(range(sampling.n), ()))
            wanted = self._ctx.engines.wanted(index, group.prompt, number, sampling, self._ctx.models.experts)
            self.work.ask(replace(wanted, segment=segment))

    def _score(self) -> None:
        ready = [index for index, group in enumerate(self._pool) if self._done(group) and not group.scores]
        if not ready:
            return
        groups = [self._pool[index] for index in ready]
        longest = self._ctx.config.rollout.max_response_tokens
        new_scores = scored(self._reward, [group.prompt for group in groups], [group.responses for group in groups], longest)
        for index, scores in zip(ready, new_scores, strict=True):
            self._pool[index] = replace(self._pool[index], scores=scores)
            self.scores += scores

    def _carried_on(self, before: Response, more: Response) -> Response:
        """Append what a round has added to a response. Earlier parts are passed by reference; only the engine reads their tokens again."""
        parts = [*before.before, before.payload] if self._open(more) else []
        experts = None if before.experts is None or more.experts is None else [*before.experts, *more.experts]
        return replace(more, before=parts, experts=experts)

    def _done(self, group: Group) -> bool:
        return bool(group.responses) and not any(map(self._open, group.responses))

    def _open(self, response: Response) -> bool:
        return not response.finished and response.length < self._ctx.config.rollout.max_response_tokens

"""Episodes of several turns, with any engine and any environment: what the policy says is answered until one of them, or a limit, ends it.

One request to the engine a turn, whose prompt is all tokens so far. Nothing is tokenised twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from megarl.batch import Sample
from megarl.data.turns import TurnTokens
from megarl.environments.hosts import Episode, Host, in_tokens
from megarl.environments.protocol import EnvironmentFailed, Turn
from megarl.rollout.engine import Request, RolloutTimeout
from megarl.rollout.generate import Sampling, request_for, request_seed
from megarl.rollout.parts import versions
from megarl.rollout.responder import Responder


@dataclass(frozen=True)
class Start:
    """What episodes begin with; `sampling.n` of them begin alike."""

    id: int | str
    tokens: list[int]  # the prompt of the data; empty where the environment has to begin
    seed: int  # of the environment
    task: Mapping[str, Any] | None = None  # what the data knows of the prompt, for the environment


@dataclass(frozen=True)
class Limits:
    """Of an episode."""

    prompt_tokens: int  # longest opening
    response_tokens: int  # all that follows it: turns of the policy, and answers to them
    turns: int
    turn_tokens: int | None = None  # longest turn of the policy


@dataclass(frozen=True)
class Played:
    """One episode. A sample of an episode that failed before the policy spoke holds no token to learn from."""

    sample: Sample  # finish reason "stop": the environment ended it after a whole turn; "length": a limit did; "abort": it failed
    text: str  # the policy's last turn
    reward: float  # of all turns, added up; 0 where it failed
    turns: int
    error: str | None = None  # how the environment failed
    info: Mapping[str, float] = field(default_factory=dict)  # of its last answer


async def play(
    responder: Responder,
    host: Host,
    tokens: TurnTokens,
    text_of: Callable[[Sample], str],
    starts: Sequence[Start],
    sampling: Sampling,
    limits: Limits,
    timeout_s: float,
) -> list[list[Played]]:
    """`sampling.n` episodes of each start, at once. Several calls may be under way.

    The same call plays the same episodes, where the environment repeats itself and the engine's bits do not depend on what is computed
    together.

    Args:
        responder: of the engine.
        host: holds the environments.
        tokens: of the messages that they write.
        text_of: the text of a turn.
        starts: each with an id of its own.
        sampling: how the policy speaks; `max_tokens` is not read.
        limits: of an episode.
        timeout_s: for all of them together.

    Returns:
        The episodes of each start.

    Raises:
        RolloutTimeout: with the number of episodes that are late, and whom they wait for.
        RolloutError: what else the engine raises.
    """

    asking = 0

    async def ask(request: Request) -> Sample:
        nonlocal asking
        asking += 1
        try:
            return await responder(request)
        finally:
            asking -= 1

    async def one(start: Start, number: int) -> Played:
        player = _Player(ask, tokens, text_of, start, number, sampling, limits)
        episode = host.open()
        try:
            return await player.play(episode)
        finally:
            with suppress(EnvironmentFailed):  # what it has earned, it has
                await episode.close()

    tasks = [asyncio.create_task(one(start, number)) for start in starts for number in range(sampling.n)]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        late = [task for task in tasks if not task.done()]
        played = [task.result() for task in tasks if task.done()]
        if late:
            raise RolloutTimeout(
                f"{responder.label}: {len(late)} of {len(tasks)} episodes not done after {timeout_s:g} s: {asking} wait for the engine, "
                f"{len(late) - asking} for environments"
            )
    finally:
        await responder.withdraw(tasks)
    return [played[first : first + sampling.n] for first in range(0, len(played), sampling.n)]


class _Player:
    """The policy's side of one episode."""

    def __init__(
        self,
        ask: Callable[[Request], Awaitable[Sample]],
        tokens: TurnTokens,
        text_of: Callable[[Sample], str],
        start: Start,
        number: int,
        sampling: Sampling,
        limits: Limits,
    ) -> None:
        self._ask, self._tokens, self._text_of = ask, tokens, text_of
        self._start, self._number, self._sampling, self._limits = start, number, sampling, limits
        self._turns: list[Sample] = []
        self._rewards: list[tuple[int, float]] = []
        self._text, self._info = "", dict[str, float]()

    async def play(self, episode: Episode) -> Played:
        """The whole episode."""
        try:
            context = await self._begin(episode)
            whole = await self._go_on(episode, context)
        except EnvironmentFailed as failure:
            return self._played("abort", str(failure))
        return self._played("stop" if whole else "length")

    async def _begin(self, episode: Episode) -> list[int]:
        opening = await episode.reset(self._start.seed, None if self._start.task is None else dict(self._start.task))
        context = self._start.tokens if opening.messages is None else in_tokens(self._tokens.opening, opening.messages)
        if not context:
            raise EnvironmentFailed("bad return: reset returned nothing, and the data has no prompt")
        if len(context) > self._limits.prompt_tokens:
            raise EnvironmentFailed(f"too long: an opening of {len(context)} tokens, more than {self._limits.prompt_tokens}")
        return context

    async def _go_on(self, episode: Episode, context: list[int]) -> bool:
        """Plays turn by turn. Returns whether the environment ended it after a turn that was whole."""
        longest = len(context) + self._limits.response_tokens
        while True:
            number, most = len(self._turns), min(self._limits.turn_tokens or longest, longest - len(context))
            seed = request_seed(self._sampling.seed, self._start.id, self._number, number)
            said = await self._ask(request_for((self._start.id, self._number, number), context, most, self._sampling, seed))
            finished, spoken = said.finish_reason == "stop", said.tokens[said.prompt_length :].tolist()
            self._turns.append(said)
            self._text = self._text_of(said)
            answer = await episode.step(self._text, spoken, finished)
            self._take(answer, context, spoken)
            if answer.done:
                return finished
            if len(self._turns) == self._limits.turns:
                return False
            assert answer.messages is not None
            read = in_tokens(self._tokens.after, answer.messages, spoken)
            context = [*context, *spoken, *read]
            if len(context) >= longest:  # the policy could say nothing more
                return False

    def _take(self, answer: Turn, context: list[int], spoken: list[int]) -> None:
        self._rewards.append((len(context) + len(spoken) - self._turns[0].prompt_length, answer.reward))
        self._info = dict(answer.info)

    def _played(self, finish_reason: str, error: str | None = None) -> Played:
        reward = 0.0 if error is not None else sum(reward for _, reward in self._rewards)
        sample = joined(self._turns, finish_reason) if self._turns else _NOTHING
        sample = replace(sample, turn_rewards=() if error is not None else tuple(self._rewards))
        return Played(sample, self._text, reward, len(self._turns), error, self._info)


_NOTHING = Sample(np.zeros(2, np.int32), 1, np.zeros(1, np.float32), "abort", loss_mask=np.zeros(1, np.bool_))


def joined(turns: Sequence[Sample], finish_reason: str) -> Sample:
    """The turns of one conversation as one sample, whose loss tokens are those that the policy wrote.

    The prompt of each turn is all tokens before it. Of a token's experts those count that were chosen when it was first fed. What a
    conversation of one turn gives is that turn as it is, but for the finish reason.

    Args:
        turns: in order, at least one.
        finish_reason: of the whole.
    """
    first, last = turns[0], turns[-1]
    start = first.prompt_length
    mask = np.zeros(len(last.tokens) - start, np.bool_)
    logp = np.zeros(len(mask), np.float32)
    experts: list[np.ndarray] = []
    rows = 0
    for turn in turns:
        begin = turn.prompt_length - start
        mask[begin : begin + turn.response_length] = True
        logp[begin : begin + turn.response_length] = turn.rollout_logp
        if turn.routed_experts is not None:
            experts.append(turn.routed_experts[rows:])
            rows = len(turn.routed_experts)
    return Sample(
        last.tokens,
        start,
        logp,
        finish_reason,
        versions((turn.prompt_length - start, turn) for turn in turns),
        np.concatenate(experts) if len(experts) == len(turns) else None,
        None if mask.all() else mask,
    )

"""Episodes of several turns, with any engine and any environment: policy and environment alternate until the latter or a limit ends it.

Each turn is one request to the engine, whose prompt is the turn's context: all tokens so far, or the conversation as the chat template
renders it anew (see `megarl.data.turns`). What was sampled is never tokenised again in the context in which it was sampled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from megarl.batch import Sample
from megarl.data.images import shown_task
from megarl.data.messages import arguments_of
from megarl.data.turns import Dialogue, TurnTokens
from megarl.engines.engine import Request, RolloutTimeout
from megarl.engines.generate import Sampling, TokenPrompt, request_for, request_seed
from megarl.engines.parts import versions
from megarl.engines.responder import Responder
from megarl.environments.hosts import Episode, Host, Rendered, in_tokens
from megarl.environments.protocol import EnvironmentFailed, Turn
from megarl.images import PlacedImage

if TYPE_CHECKING:
    from megarl.environments.agents.host import AgentHost


_conversations = count()  # numbers the episodes of this process


@dataclass(frozen=True)
class Start(TokenPrompt):
    """The start of an episode, shared by `sampling.n` episodes. Its tokens are empty if the environment has to write the opening."""

    seed: int  # of the environment
    task: Mapping[str, Any] | None = None  # prompt, answer and meta from the data, as in `Prompt.task`
    step: int = 0  # the step that it was requested for, under which the images of the environment are kept; 0: for no step


@dataclass(frozen=True)
class Limits:
    """The limits of an episode."""

    prompt_tokens: int  # longest opening
    response_tokens: int  # most tokens after the opening in any context, and most tokens that the policy writes in all of them together
    turns: int
    turn_tokens: int | None = None  # longest turn of the policy


class Prefill(NamedTuple):
    """Of the prompts of an episode's turns, how many tokens the engine had to compute before it could sample."""

    tokens: int  # of all prompts
    cached: int  # of these, those whose keys and values it had
    again: int  # of those that it had not, those that it had computed for an earlier turn of the same context


@dataclass(frozen=True)
class Played:
    """One finished episode. If it failed before the policy's first turn, its sample has no token to learn from."""

    sample: Sample  # finish reason "stop": the environment ended it after a complete turn; "length": a limit did; "abort": it failed
    text: str  # the policy's last turn
    reward: float  # the sum over all turns; 0 if the episode failed
    turns: int
    error: str | None = None  # how the environment failed
    unreadable: bool = False  # it ended since the policy cannot read what it wrote, as template and tokenizer take it
    follows: Sequence[str] = ()  # for each context but the first, the text that follows the turn before it
    info: Mapping[str, float] = field(default_factory=dict)  # from the environment's last answer
    prefill: Prefill = Prefill(0, 0, 0)


async def play(
    responder: Responder,
    host: Host | AgentHost,
    tokens: TurnTokens,
    text_of: Callable[[Sample], str],
    starts: Sequence[Start],
    sampling: Sampling,
    limits: Limits,
    timeout_s: float,
) -> list[list[Played]]:
    """Play `sampling.n` episodes of each start, all concurrently. Several calls may run at once.

    The same call plays the same episodes if the environment is deterministic and the engine's results are bitwise independent of
    what it batches together.

    Args:
        responder: the engine's responder.
        host: the host of the environments.
        tokens: tokenises the environments' messages.
        text_of: returns the text of a turn.
        starts: the starts, each with a unique id.
        sampling: how the policy is sampled; `max_tokens` is ignored.
        limits: the limits of an episode.
        timeout_s: the time limit for all episodes together.

    Returns:
        The episodes of each start.

    Raises:
        RolloutTimeout: the message has the number of late episodes, and how many of them wait for the engine or for environments.
        RolloutError: any other failure of the engine.
    """

    from megarl.engines import agents  # and with it aiohttp, which only engines need

    asking = 0

    async def ask(request: Request) -> Sample:
        nonlocal asking
        asking += 1
        try:
            return await responder(request)
        finally:
            asking -= 1

    async def one(start: Start, number: int) -> Played:
        conversation = next(_conversations)

        async def answered(request: Request) -> Sample:
            return await ask(replace(request, conversation=conversation))

        if isinstance(host, agents.AgentHost):
            return await agents.AgentPlayer(answered, tokens, text_of, start, number, sampling, limits).play(host)
        player = EnvironmentPlayer(answered, tokens, text_of, start, number, sampling, limits)
        episode = host.open()
        try:
            return await player.play(episode)
        finally:
            with suppress(EnvironmentFailed):  # a failure to close does not change the episode's result
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


@dataclass(eq=False)
class Player:
    """The policy's side of one episode."""

    ask: Callable[[Request], Awaitable[Sample]]  # samples the answer to a request
    tokens: TurnTokens  # tokenises conversations
    text_of: Callable[[Sample], str]  # returns the text of a turn
    start: Start
    number: int  # of the episode among those of this start
    sampling: Sampling  # its `max_tokens` is ignored
    limits: Limits


@dataclass(eq=False)
class EnvironmentPlayer(Player):
    """Answers an environment turn by turn."""

    def __post_init__(self) -> None:
        self._contexts: list[list[Sample]] = [[]]  # the turns in each context
        self._follows: list[str] = []
        self._unreadable = False
        self._rewards: list[tuple[int, float]] = []
        self._conversation: Dialogue
        self._images: list[PlacedImage] = []  # of the context
        self._text, self._info = "", dict[str, float]()

    async def play(self, episode: Episode) -> Played:
        """Play the whole episode."""
        try:
            whole = await self._go_on(episode, await self._begin(episode))
        except EnvironmentFailed as failure:
            return self._played("abort", str(failure))
        return self._played("stop" if whole else "length")

    async def _begin(self, episode: Episode) -> list[int]:
        opening = await episode.reset(self.start.seed, shown_task(self.start.task))
        task = self.start.task or {}
        if opening.messages is not None:
            arguments = arguments_of(task.get("meta", {}), "the row")
            self._conversation = await self._rendered(self.tokens.opened, opening.messages, arguments, None, self.start.step)
            context = await self._rendered(self._conversation.opening)
            self._images = [*(await self._rendered(self._conversation.placed, context))]
        elif self.start.tokens:
            self._conversation = await self._rendered(self.tokens.prompted, task, self.start.images, self.start.step)
            context, self._images = self.start.tokens, [*self.start.images]
        else:
            raise EnvironmentFailed("bad return: reset returned nothing, and the data has no prompt")
        if len(context) > self.limits.prompt_tokens:
            raise EnvironmentFailed(f"too long: an opening of {len(context)} tokens, more than {self.limits.prompt_tokens}")
        return context

    async def _go_on(self, episode: Episode, context: list[int]) -> bool:
        """Play turn by turn. Return whether the environment ended the episode after a complete turn."""
        longest, left = len(context) + self.limits.response_tokens, self.limits.response_tokens
        number = 0
        while True:
            most = min(self.limits.turn_tokens or longest, longest - len(context), left)
            seed = request_seed(self.sampling.seed, self.start.id, self.number, number)
            request = request_for((self.start.id, self.number, number), context, most, self.sampling, seed)
            turn = await self.ask(replace(request, images=tuple(self._images)))
            finished, spoken = turn.finish_reason == "stop", turn.tokens[turn.prompt_length :].tolist()
            self._contexts[-1].append(turn)
            number, left = number + 1, left - len(spoken)
            self._text = self.text_of(turn)
            answer = await episode.step(self._text, spoken, finished)
            self._take(answer)
            if answer.done:
                return finished
            if number == self.limits.turns:
                return False
            assert answer.messages is not None
            reading = await self._rendered(self._conversation.after, spoken, self._text, answer.messages)
            if reading is None:
                self._unreadable = True
                return False
            before = 0 if reading.anew else len(context) + len(spoken)
            context = reading.tokens if reading.anew else [*context, *spoken, *reading.tokens]
            self._images = [] if reading.anew else self._images
            self._images += [replace(one, start=one.start + before) for one in reading.images]
            if len(context) >= longest or not left:  # no room for another turn of the policy
                return False
            if reading.anew:
                self._contexts.append([])
                self._follows.append(reading.follows)

    async def _rendered(self, render: Callable[..., Rendered], *said: Any) -> Rendered:
        """Return `render(*said)`, without holding up the other episodes. Raises EnvironmentFailed as `in_tokens` does."""
        return await self.tokens.apart(in_tokens, render, *said)

    def _take(self, answer: Turn) -> None:
        tokens = sum(len(turns[-1].tokens) for turns in self._contexts)
        self._rewards.append((tokens - self._contexts[0][0].prompt_length, answer.reward))
        self._info = dict(answer.info)

    def _played(self, finish_reason: str, error: str | None = None) -> Played:
        reward = 0.0 if error is not None else sum(reward for _, reward in self._rewards)
        contexts = [turns for turns in self._contexts if turns]
        sample = chained([joined(turns, finish_reason) for turns in contexts]) if contexts else NOTHING
        sample = replace(sample, turn_rewards=() if error is not None else tuple(self._rewards))
        turns = sum(map(len, contexts))
        follows = self._follows[: len(contexts) - 1]
        return Played(sample, self._text, reward, turns, error, self._unreadable, follows, self._info, prefill(contexts))


NOTHING = Sample(np.zeros(2, np.int32), 1, np.zeros(1, np.float32), "abort", loss_mask=np.zeros(1, np.bool_))


def prefill(contexts: Sequence[Sequence[Sample]]) -> Prefill:
    """Return how much of an episode's prompts its engine had cached.

    Args:
        contexts: the turns in each context.
    """
    turns = [turn for context in contexts for turn in context]
    again = [max(0, len(before.tokens) - 1 - turn.cached_tokens) for context in contexts for before, turn in pairwise(context)]
    return Prefill(sum(turn.prompt_length for turn in turns), sum(turn.cached_tokens for turn in turns), sum(again))


def chained(contexts: Sequence[Sample]) -> Sample:
    """Put the contexts of one episode, of one sample each, one after the other into one sample; its finish reason is the last one's."""
    first, last = contexts[0], contexts[-1]
    if last is first:
        return first
    ends = np.cumsum([len(one.tokens) for one in contexts]).tolist()
    begins = [end - one.response_length - first.prompt_length for end, one in zip(ends, contexts, strict=True)]  # of what follows a prompt
    mask, logp = np.zeros(ends[-1] - first.prompt_length, np.bool_), np.zeros(ends[-1] - first.prompt_length, np.float32)
    for begin, one in zip(begins, contexts, strict=True):
        here = slice(begin, begin + one.response_length)
        mask[here], logp[here] = True if one.loss_mask is None else one.loss_mask, one.rollout_logp
    experts = [one.routed_experts for one in contexts if one.routed_experts is not None]
    return Sample(
        np.concatenate([one.tokens for one in contexts]),
        first.prompt_length,
        logp,
        last.finish_reason,
        versions(zip(begins, contexts, strict=True)),
        np.concatenate(experts) if len(experts) == len(contexts) else None,
        mask,
        starts=tuple(ends[:-1]),
        images=[
            replace(image, start=image.start + end - len(one.tokens))
            for end, one in zip(ends, contexts, strict=True)
            for image in one.images
        ],
    )


def joined(turns: Sequence[Sample], finish_reason: str) -> Sample:
    """Join the turns in one context into one sample, whose loss tokens are those that the policy wrote.

    The prompt of each turn is all tokens before it. A token keeps the experts that were chosen when it was first fed. A conversation
    of one turn yields that turn unchanged, but for the finish reason.

    Args:
        turns: the turns in order, at least one.
        finish_reason: the finish reason of the whole episode.
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
        images=last.images,
    )

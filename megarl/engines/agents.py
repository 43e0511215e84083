"""The policy's side of an agent's episode: every request of the agent is a turn, in one of the episode's contexts.

A request's conversation goes on from an earlier answer of the same episode if it begins with what was asked then and with what was
answered. There the tokens that were read and sampled are kept, as in episodes of environments (see `megarl.data.turns`). A turn whose
prompt extends the tokens of a context joins it, and each sampled token is in one context alone; any other turn begins a context of the same
episode.
"""

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megarl.batch import Sample
from megarl.data.images import sent_task
from megarl.data.intake import TooLong
from megarl.data.messages import Message, arguments_of
from megarl.data.spelled import unmarked
from megarl.data.tokenizer import check_size, decode, encode, first_line
from megarl.data.turns import Dialogue
from megarl.engines.engine import RolloutError
from megarl.engines.episodes import NOTHING, Played, Player, chained, joined, prefill
from megarl.engines.generate import request_for, request_seed
from megarl.environments.agents.contents import images_of
from megarl.environments.agents.host import AgentHost
from megarl.environments.agents.questions import Answer, Call, ChatRequest, Refusal, heard
from megarl.environments.protocol import EnvironmentFailed, Turn
from megarl.image_source import MOST_BYTES
from megarl.images import PlacedImage

NO_CALL = "no call: the agent ended without asking the policy"
TOO_LONG = "context_length_exceeded"


@dataclass(frozen=True)
class _Read:
    """What the policy reads before an answer."""

    tokens: list[int]
    dialogue: Dialogue | None  # None: a text or tokens, and no conversation
    text: str
    images: Sequence[PlacedImage] = ()


@dataclass(frozen=True)
class _FinishedTurn:
    """A finished turn."""

    read: _Read
    sample: Sample
    text: str
    tools: Sequence[dict[str, Any]] | None
    conversation: Sequence[Any]  # what was heard and, at last, said


@dataclass(eq=False)
class AgentPlayer(Player):
    """Answers the agent of one episode, within the limits of the configuration, and keeps what was sampled."""

    def __post_init__(self) -> None:
        self._finished: dict[int, _FinishedTurn] = {}  # by the number of the call
        self._asked, self._written = 0, 0
        self._longest: int | None = None  # tokens of a context
        self._draws = Counter[bytes]()  # requests by their tokens and images
        self._images: dict[bytes, int] = {}  # bytes of the images that it was sent, by their SHA-256
        self._cut = self._refused = self._unreadable = self._over = False
        self._failure: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()

    async def play(self, host: AgentHost) -> Played:
        """Play the whole episode. Raises what the engine raises."""
        task = await asyncio.to_thread(sent_task, self.start.task, [placed.image for placed in self.start.images])
        playing = asyncio.create_task(host.play(self.start.seed, task, self))
        try:
            await asyncio.wait({playing, self._failure}, return_when=asyncio.FIRST_COMPLETED)
            turn = self._failure.result() if self._failure.done() else playing.result()
            error = None if self._finished else NO_CALL
        except EnvironmentFailed as failure:
            # An agent that fails since a limit has refused its last request has not earned anything; it has not failed to be scored.
            turn, error = Turn(None), None if self._refused and self._finished else str(failure)
        finally:
            self._over = True
            playing.cancel()
            await asyncio.wait({playing})
        return self._played(turn, error)

    async def answer(self, question: ChatRequest) -> Answer:
        """Answer a request of the agent. Raises Refusal."""
        read = await self.tokens.apart(self._read, question)
        most = self._room(read.tokens)
        limit = min(most, question.max_tokens or most)
        number, self._asked = self._asked, self._asked + 1
        sampling = replace(self.sampling, stop=(*self.sampling.stop, *question.stop))
        draw = self._draw(read)
        seed = request_seed(self.sampling.seed, self.start.id, self.number, draw)
        try:
            request = request_for((self.start.id, self.number, draw), read.tokens, limit, sampling, seed)
            sample = await self.ask(replace(request, images=tuple(read.images)))
        except RolloutError as error:
            if not self._failure.done():
                self._failure.set_exception(error)
            raise Refusal(500, "engine_failed", "the engine has failed") from None
        if self._over:
            raise Refusal(401, "episode_ended", "the episode has ended")
        reply, answer = await self.tokens.apart(self._taken, number, question, read, sample)
        self._written += sample.response_length
        self._cut, self._refused = sample.finish_reason == "length" and limit == most, False
        self._finished[number] = reply
        return answer

    def _room(self, context: Sequence[int]) -> int:
        """Return how many tokens may follow a context. Raises Refusal if there is no room for any."""
        try:
            if self._asked == self.limits.turns:
                raise Refusal(400, "max_turns", f"the episode has had its environment.max_turns={self._asked} answers")
            if self._longest is None:
                if len(context) > self.limits.prompt_tokens:
                    raise Refusal(
                        400, TOO_LONG, f"{len(context)} tokens are more than rollout.max_prompt_tokens={self.limits.prompt_tokens}"
                    )
                self._longest = len(context) + self.limits.response_tokens
            room, left = self._longest - len(context), self.limits.response_tokens - self._written
            if room < 1:
                raise Refusal(400, TOO_LONG, f"{len(context)} tokens leave no room for an answer: a context has at most {self._longest}")
            if left < 1:
                raise Refusal(
                    400, "max_response_tokens", f"the episode has had its rollout.max_response_tokens={self.limits.response_tokens}"
                )
        except Refusal:
            self._cut = self._refused = self._longest is not None
            raise
        return min(self.limits.turn_tokens or room, room, left)

    def _draw(self, read: _Read) -> int:
        """Return the number of a request's draws: it depends on what is read and on how many requests had the same, not on when it came."""
        shown = "".join(placed.image.digest for placed in read.images).encode()
        digest = hashlib.blake2b(np.array(read.tokens, np.int64).tobytes() + shown, digest_size=8).digest()
        self._draws[digest] += 1
        return (int.from_bytes(digest, "big") << 16) + self._draws[digest]

    def _read(self, question: ChatRequest) -> _Read:
        """Return what the policy reads. Raises Refusal if the chat template refuses the conversation."""
        try:
            return self._read_prompt(question.prompt) if question.prompt is not None else self._read_messages(question)
        except Refusal:
            raise
        except TooLong as error:
            raise Refusal(400, TOO_LONG, str(error)) from None
        except Exception as error:  # a template may raise anything
            raise Refusal(400, "invalid_messages", f"it cannot be read: {first_line(error)}") from None

    def _read_prompt(self, prompt: str | Sequence[int]) -> _Read:
        vocabulary = len(self.tokens.tokenizer)
        if not isinstance(prompt, str):
            if not all(0 <= token < vocabulary for token in prompt):
                raise Refusal(400, "invalid_prompt", f"tokens are from 0 to {vocabulary - 1}")
            self._check_blind(prompt)
            return _Read(list(prompt), None, "")
        self._check_size(prompt)
        before = max(
            (one for one in list(self._finished.values()) if one.read.dialogue is None and one.text and prompt.startswith(one.text)),
            key=lambda one: len(one.text),
            default=None,
        )
        known, text = ([], "") if before is None else (before.sample.tokens.tolist(), before.text)
        added = encode(self.tokens.tokenizer, [prompt[len(text) :]], special=False)[0]
        self._check_blind(added)
        return _Read([*known, *added], None, prompt)

    def _check_blind(self, tokens: Sequence[int]) -> None:
        """Raise ValueError if a prompt of text or tokens, which has no images, has tokens of some."""
        if self.tokens.reader is not None:
            self.tokens.reader.placed(np.array(tokens, np.int64), (), "the prompt")

    def _read_messages(self, question: ChatRequest) -> _Read:
        if question.tools and question.calls and self.tokens.template.calls is None:
            raise Refusal(
                400, "invalid_tools", "the model's chat template writes calls in a form that is not read; tool_choice=none leaves them text"
            )
        conversation = list(map(heard, question.messages))
        self._check_size(json.dumps([question.messages, question.tools], ensure_ascii=False, default=lambda image: ""))
        self._count_images(question.messages)
        before = [
            one
            for one in list(self._finished.values())  # a copy, since another thread adds to it
            if one.read.dialogue is not None and one.tools == question.tools and one.conversation == conversation[: len(one.conversation)]
        ]
        if not before:
            arguments = arguments_of((self.start.task or {}).get("meta", {}), "the row")
            dialogue = self.tokens.opened(question.messages, arguments, question.tools, self.start.step)
            tokens = dialogue.opening()
            return _Read(tokens, dialogue, "", dialogue.placed(tokens))
        last = max(before, key=lambda one: len(one.conversation))
        assert last.read.dialogue is not None
        dialogue, spoken = last.read.dialogue.branch(), last.sample.tokens[last.sample.prompt_length :].tolist()
        reading = dialogue.after(spoken, last.text, question.messages[len(last.conversation) :])
        if reading is None:
            self._cut = self._refused = self._unreadable = True
            raise Refusal(400, "unreadable", "template and tokenizer cannot write what the policy wrote as plain text")
        if reading.anew:
            return _Read(reading.tokens, dialogue, "", reading.images)
        read = [*last.read.tokens, *spoken]
        added = [replace(placed, start=placed.start + len(read)) for placed in reading.images]
        return _Read([*read, *reading.tokens], dialogue, "", [*last.read.images, *added])

    def _count_images(self, messages: Sequence[Message]) -> None:
        """Refuse more images than an episode may have; each counts once."""
        sizes = self._images | {hashlib.sha256(image).digest(): len(image) for image in images_of(messages)}
        if (total := sum(sizes.values())) > MOST_BYTES:
            raise Refusal(413, "images_too_large", f"the images of the episode have {total} bytes, more than {MOST_BYTES}")
        self._images = sizes

    def _check_size(self, text: str) -> None:
        """Refuse what cannot fit, before the chat template and the tokenizer take their time."""
        most = self.limits.prompt_tokens + self.limits.response_tokens
        try:
            check_size(self.tokens.tokenizer, text, most, "the request", "rollout.max_prompt_tokens + max_response_tokens")
        except ValueError as error:
            raise Refusal(400, TOO_LONG, str(error)) from None

    def _taken(self, number: int, question: ChatRequest, read: _Read, sample: Sample) -> tuple[_FinishedTurn, Answer]:
        """Take a turn apart for the client."""
        spoken = sample.tokens[sample.prompt_length :].tolist()
        whole = decode(self.tokens.tokenizer, spoken, finished=False)
        stop = min((whole.find(stop) for stop in question.stop if stop in whole), default=None)
        text = self.text_of(sample) if stop is None else whole
        shown, reasoning, calls = text[:stop], None, list[Call]()
        if read.dialogue is not None:
            parts = read.dialogue.parts(shown, question.calls)
            shown, reasoning = parts.content, parts.reasoning
            for index, call in enumerate(parts.calls):
                arguments = unmarked(json.dumps(call["function"]["arguments"], ensure_ascii=False))
                name = unmarked(call["function"]["name"])
                calls.append(Call(call.get("id", f"call_{number}_{index}"), name, arguments))
        finished = sample.finish_reason == "stop"
        answer = Answer(number, shown, reasoning, calls, finished, sample.prompt_length, len(spoken))
        conversation = [*map(heard, question.messages), heard(answer.message)]
        return _FinishedTurn(read, sample, text if read.dialogue is not None else read.text + whole, question.tools, conversation), answer

    def _played(self, turn: Turn, error: str | None) -> Played:
        replies = [self._finished[number] for number in sorted(self._finished)]
        reason = "abort" if error is not None else "length" if self._cut else "stop"
        turns = contexts([one.sample for one in replies])
        sample = chained([joined(one, reason) for one in turns]) if turns else NOTHING
        rewards = () if error is not None else ((sample.response_length, turn.reward),)
        follows = [f"\n\n{self._shown(one[0].tokens[: one[0].prompt_length].tolist())}" for one in turns[1:]]
        reward, text = 0.0 if error is not None else turn.reward, replies[-1].text if replies else ""
        sample = replace(sample, turn_rewards=rewards)
        return Played(sample, text, reward, len(replies), error, self._unreadable, follows, turn.info, prefill(turns))

    def _shown(self, tokens: list[int]) -> str:
        """Return a prompt as others read it."""
        text, reader = decode(self.tokens.tokenizer, tokens, finished=False), self.tokens.reader
        return text if reader is None else reader.shown(text, self.tokens.tokenizer)


def contexts(turns: Sequence[Sample]) -> list[list[Sample]]:
    """Group the turns of an episode, in the order in which they were asked, into contexts.

    A turn joins the context whose tokens and images, all of them, its prompt begins with (the longest such context); else it begins one.
    """
    grouped: list[list[Sample]] = []
    for turn in turns:
        begun = [one for one in grouped if _begins(turn, one[-1])]
        if begun:
            max(begun, key=lambda one: len(one[-1].tokens)).append(turn)
        else:
            grouped.append([turn])
    return grouped


def _begins(turn: Sample, before: Sample) -> bool:
    """Whether a turn's prompt begins with an earlier turn, its prompt and its answer."""
    length = len(before.tokens)
    images = [placed for placed in turn.images if placed.start < length]
    return length <= turn.prompt_length and np.array_equal(before.tokens, turn.tokens[:length]) and images == [*before.images]

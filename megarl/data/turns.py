"""What the policy reads in each turn of a conversation, in tokens.

The context of a turn is what the chat template renders of the conversation at that turn. Where that begins with the very text that was read
and written so far, the context keeps the tokens that were read and sampled, and only what follows is tokenised. Where the template renders
an earlier message in another way (many leave out earlier reasoning, or trim texts), the whole rendering is a new context: a new sample
begins there, and the samples before it keep the tokens that were sampled. What the policy wrote stays the text that it was: its control
tokens are those that it sampled as such (see `megarl.data.spelled`).
"""

from __future__ import annotations

import asyncio
import copy
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import takewhile
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from megarl.config import ConfigError, PromptFormat
from megarl.data.calls import CallFormat, WrittenCall
from megarl.data.chat import PROBE, Chat
from megarl.data.images import HERE, ImageReader
from megarl.data.messages import SPOKEN, Message, arguments_of, tools_of
from megarl.data.rendering import THINK, THOUGHT, continued, prompt_texts
from megarl.data.spelled import Spelled, unmarked
from megarl.data.template import ChatTemplate
from megarl.data.tokenizer import decode, encode, first_line
from megarl.images import MARK, Image, PlacedImage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TAIL = 64  # characters of a context that decide how the tokens after them are written
PLACE = "the conversation"  # its name in errors

Result = TypeVar("Result")


@dataclass(frozen=True)
class Reading:
    """What the policy reads before its next turn."""

    tokens: list[int]
    anew: bool  # they are a whole context; else they follow the turn before
    follows: str  # the text that follows the turn before, in either case
    images: Sequence[PlacedImage] = ()  # by their places in `tokens`


@dataclass(frozen=True)
class TurnForm:
    """How a template writes a turn of the assistant after the generation prompt."""

    header: str  # before a content alone
    key: str | None = None  # the key of a message that has its reasoning; None: there is none
    openings: Sequence[str] = ()  # what may begin the reasoning
    separator: str = ""  # between reasoning and content


@dataclass(frozen=True)
class Parts:
    """A turn of the policy, taken apart by the conventions of its template."""

    content: str
    reasoning: str | None  # None: there is none that is told apart
    calls: Sequence[dict[str, Any]]  # as a message has them; none unless all that is written as a call is one, and nothing follows


class TurnTokens:
    """Makes conversations, with what a run adds to each.

    Args:
        tokenizer: the tokenizer with the chat template.
        data: how a run's prompts are rendered.
        tools: schemas of the tools that the policy may call.
        reader: reads the images of environments' answers; None: the model sees none.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        data: PromptFormat | None = None,
        tools: Sequence[dict[str, Any]] | None = None,
        reader: ImageReader | None = None,
    ) -> None:
        self.tokenizer, self.reader = tokenizer, reader
        self._data, self._tools = data or PromptFormat(), tools

    async def apart(self, work: Callable[..., Result], *given: Any) -> Result:
        """Return `work(*given)`, something of this object or of its conversations: one at a time, in a thread that holds up no event loop.

        Args:
            work: what to call.
            *given: its arguments.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *given)

    @cached_property
    def _thread(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "turns")

    @cached_property
    def spelled(self) -> Spelled:
        """Keeps what spells a control token plain text."""
        return Spelled(self.tokenizer, self.template.ends)

    @cached_property
    def template(self) -> ChatTemplate:
        """The tokenizer's chat template."""
        template = ChatTemplate(self.tokenizer, self._data, self._tools)
        template.sees = self.reader is not None
        return template

    def opened(
        self,
        messages: Sequence[Message],
        arguments: Mapping[str, Any] = MappingProxyType({}),
        tools: Sequence[dict[str, Any]] | None = None,
        step: int = 0,
    ) -> Dialogue:
        """Return the conversation that begins with these messages of an environment.

        Args:
            messages: the messages.
            arguments: the conversation's own arguments of the chat template.
            tools: the conversation's own schemas of tools.
            step: the step under which the images of the environment are kept.

        Raises:
            ValueError: the template refuses them.
        """
        texts, images = self.heard(messages, step)
        chat = self.template.chat(texts, "the opening", None if tools is None else list(tools), arguments)
        return Dialogue(self, chat, images, step)

    def prompted(self, task: Mapping[str, Any], images: Sequence[PlacedImage] = (), step: int = 0) -> Dialogue:
        """Return the conversation that begins with a prompt of the data.

        Args:
            task: its parts, as in `Prompt.task`.
            images: its images, for each of which its texts have `MARK`.
            step: as of `opened`.
        """
        prompt, meta = task.get("prompt", ""), task.get("meta", {})
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        chat = self.template.chat(messages, PLACE, tools_of(meta, PLACE), arguments_of(meta, PLACE))
        return Dialogue(self, chat, [one.image for one in images], step)

    def heard(self, messages: Sequence[Message], step: int = 0) -> tuple[list[Message], list[Image]]:
        """Return messages of an environment with marks in the place of their images, and these, which are kept under `step`.

        Raises ValueError for an image that is not taken.
        """
        if self.reader is not None:
            return self.reader.heard(messages, step)
        if any(isinstance(message.get("content"), list) for message in messages):
            raise ConfigError("a message has parts that may be images, and the model sees none")
        return list(messages), []

    def form(self, arguments: Mapping[str, Any]) -> TurnForm:
        """Return how the template, with these arguments, writes a turn."""
        name = json.dumps(dict(arguments), sort_keys=True, default=str)
        if name not in self._forms:
            self._forms[name] = self._form(arguments)
        return self._forms[name]

    @cached_property
    def _forms(self) -> dict[str, TurnForm]:
        return {}

    def _form(self, arguments: Mapping[str, Any]) -> TurnForm:
        question: Message = {"role": "user", "content": f"{PROBE}question"}
        answer, thought = f"{PROBE}answer", f"{PROBE}thought"

        def written(message: Message) -> str:
            [text] = self.template.texts([Chat([question, {"role": "assistant", **message}], None, arguments)], generation=False)
            return text if isinstance(text, str) else ""

        prompt, bare = (self.template.texts([Chat([question], None, arguments)], generation)[0] for generation in (True, False))
        if not isinstance(prompt, str) or not isinstance(bare, str):
            return TurnForm("")

        def begins(text: str) -> str:
            return text[len(os.path.commonprefix([prompt, text])) :].strip()

        header = begins(written({"content": answer}).partition(answer)[0])
        for key in SPOKEN[1:]:
            before, _, rest = written({"content": answer, key: thought}).partition(thought)
            separator, marker, _ = rest.partition(answer)
            if marker and separator.strip():
                word = before[len(os.path.commonprefix([bare, before])) :].split()[-1:]
                return TurnForm(header, key, [*filter(None, (begins(before), *word))], separator.strip())
        return TurnForm(header)


class Dialogue:
    """One conversation: its messages, and the text of the policy's context.

    Args:
        turns: makes such conversations.
        chat: the opening, as the chat template takes it.
        images: those for which it has marks.
        step: the step under which further ones are kept.
    """

    def __init__(self, turns: TurnTokens, chat: Chat, images: Sequence[Image] = (), step: int = 0) -> None:
        self._turns, self._chat, self._images, self._step = turns, chat, list(images), step
        self._text: str | None = None  # of the context; None: the opening has not been rendered yet

    @property
    def context(self) -> str:
        """The text of the context. Raises ValueError if the template refuses the opening, or leaves out something of it."""
        if self._text is None:
            self._text = self._rendered(self._chat, self._images)
        return self._text

    def branch(self) -> Dialogue:
        """Return a conversation that has been the same so far."""
        return copy.copy(self)

    def opening(self) -> list[int]:
        """Return the tokens of the opening; raises as `context`."""
        return self._encoded(self.context)

    def placed(self, tokens: Sequence[int]) -> Sequence[PlacedImage]:
        """Return where the images of the conversation so far stand in the tokens of a context. Raise ValueError if they are not there."""
        return self._placed(tokens, self._images)

    def after(self, tokens: Sequence[int], text: str, messages: Sequence[Message]) -> Reading | None:
        """Return what the policy reads before its next turn; None if it cannot read what it wrote, as template and tokenizer take it.

        Args:
            tokens: the turn's tokens.
            text: the turn without its end token.
            messages: what follows the turn.

        Raises:
            ValueError: the template refuses these messages, or leaves out one, or a part of one that is not the policy's.
        """
        messages, images = self._turns.heard(messages, self._step)
        self._turns.template.check_control(Chat(messages), PLACE)
        turn_text = self._written(tokens)
        if self._turns.reader is not None and MARK in turn_text:
            return None
        images = [*self._images, *images]
        before = self.context + turn_text
        candidate: tuple[Chat, str] | None = None
        goes_on = False
        messages = [self._turns.template.adapted(one) if one["role"] == "assistant" else one for one in messages]
        for message in self._forms(*(self._turns.spelled.turn(tokens, form) for form in (text, turn_text))):
            chat = replace(self._chat, messages=[*self._chat.messages, message, *messages])
            with suppress(Exception):  # what a policy writes may be anything
                candidate = chat, self._rendered(chat, images)
                goes_on = unmarked(candidate[1]).startswith(before)
            if goes_on:
                break
        if candidate is None:  # it raises if what follows is at fault
            probe: Message = {"role": "assistant", "content": PROBE}
            self._rendered(replace(self._chat, messages=[*self._chat.messages, probe, *messages]), images)
            return None
        new, self._images = images[len(self._images) :], images
        self._chat, marked = candidate
        self._text = unmarked(marked)
        if goes_on:
            rest = self._text[len(before) :]
            added = self._encoded(rest)
            return Reading(added, False, rest, self._placed(added, new))
        context = self._turns.spelled.encoded(marked)
        if context is None:
            return None
        try:
            placed = self._placed(context, images)
        except ValueError:  # the policy has written tokens of images
            return None
        return Reading(context, True, self._follows(turn_text, messages), placed)

    def _placed(self, tokens: Sequence[int], images: Sequence[Image]) -> Sequence[PlacedImage]:
        reader = self._turns.reader
        return () if reader is None else reader.placed(np.array(tokens, np.int64), images, PLACE)

    def _follows(self, turn_text: str, messages: Sequence[Message]) -> str:
        """Return what the template writes between a turn and the next one; `turn_text`: the turn with its end token."""
        opening = takewhile(lambda message: message["role"] != "assistant", self._chat.messages)
        chat = replace(self._chat, messages=[*opening, {"role": "assistant", "content": PROBE}, *messages])
        [text] = self._turns.template.texts([chat])
        _, turn, rest = text.rpartition(PROBE) if isinstance(text, str) else ("", "", "")
        rest = rest if self._turns.reader is None else rest.replace(MARK, HERE)
        if not turn:  # a template may want a call before a tool's answer
            return "\n".join(["", *(str(message.get("content", "")) for message in messages)])
        end = self._turns.template.end
        return rest.removeprefix(end) if turn_text.endswith(end) else rest

    def _written(self, tokens: Sequence[int]) -> str:
        """Return the text of a turn's tokens as it follows the context: some tokenizers write the start of a text in another way."""
        tail = self._encoded(self.context[-TAIL:])
        before, whole = (decode(self._turns.tokenizer, all_, finished=False) for all_ in (tail, [*tail, *tokens]))
        return whole[len(before) :] if whole.startswith(before) else decode(self._turns.tokenizer, tokens, finished=False)

    def _forms(self, text: str, turn_text: str) -> Iterator[Message]:
        """Yield a turn of the policy as messages: its text as content, then with its reasoning and its calls as data, if it has any.

        White space that begins it is the template's or, as it follows the context, a part of the content; so is a token that has ended it
        and that the template does not write. In calls, which are data, no text is a control token.

        Args:
            text: the turn without its end token.
            turn_text: the turn with it.
        """
        plain: Message = {"role": "assistant", "content": text}
        for content in dict.fromkeys((text.lstrip(), text, turn_text.removesuffix(self._turns.template.end))):
            yield {**plain, "content": content}
        parts, key = self.parts(text), self._turns.form(self._chat.arguments).key
        parsed: Message = {**plain, "content": parts.content, **({} if parts.reasoning is None else {str(key): parts.reasoning})}
        if parts.calls:
            with_calls = parsed | {"tool_calls": parts.calls, "content": parts.content or None}
            yield self._turns.template.adapted({key: value for key, value in with_calls.items() if value is not None})
        elif parsed != plain:
            yield parsed

    def parts(self, text: str, calling: bool = True) -> Parts:
        """Take the text of a turn of the policy apart.

        Args:
            text: the text, which may have marks. In calls, which are data, all that spells a control token is marked.
            calling: tell calls apart.
        """
        form, thought, content = self._turns.form(self._chat.arguments), None, text
        head, marker, rest = text.partition(form.separator) if form.separator else (text, "", "")
        if form.key is not None and marker:
            bare = head.strip()
            opening = next(filter(bare.startswith, form.openings), "")
            thought, content = bare.removeprefix(opening).strip(), rest.strip()
        elif form.header and text.lstrip().startswith(form.header):
            content = text.lstrip().removeprefix(form.header).lstrip()
        form_of_calls = self._turns.template.calls if calling else None
        if form_of_calls is not None and (written := form_of_calls.calls(content)):
            calls = [call for one in written if (call := self._call(form_of_calls, one)) is not None]
            rest = form_of_calls.without(content).strip()
            if len(calls) == len(written) and content.strip().startswith(rest):
                return Parts(rest, thought, calls)
        return Parts(content, thought, [])

    def _call(self, form: CallFormat, written: WrittenCall) -> dict[str, Any] | None:
        """Return a call as data; None if it is none. Its texts spell no control token."""
        try:
            name, arguments = self._turns.spelled.marked(list(form.read(written.body, self._chat.tools)))
            json.dumps([name, arguments], ensure_ascii=False).encode()  # half a surrogate pair is no text
        except (ValueError, RecursionError):
            return None
        own = {} if (own_id := form.id_of(written.body)) is None else {"id": own_id}
        return {"type": "function", **own, "function": {"name": name, "arguments": arguments}} if written.closed else None

    def _rendered(self, chat: Chat, images: Sequence[Image]) -> str:
        [text] = prompt_texts(self._turns.template, [(PLACE, chat)])
        if isinstance(text, ConfigError):
            raise text
        return text if self._turns.reader is None else self._turns.reader.filled(text, images, self._turns.template)

    def _encoded(self, text: str) -> list[int]:
        return encode(self._turns.tokenizer, [text], special=False)[0]


def check_turns(tokenizer: PreTrainedTokenizerBase, roles: Sequence[str], key: str, data: PromptFormat | None = None) -> bool:
    """Check that the template renders every message of a conversation of several turns.

    Args:
        tokenizer: the tokenizer with the chat template.
        roles: the roles that may speak after the policy, such as "user" or "tool".
        key: the start of an error's message.
        data: how a run's prompts are rendered.

    Returns:
        Whether it renders some turns in another way than they were written, so that new samples begin after them.

    Raises:
        ConfigError: the template refuses such a conversation, or leaves out a message.
    """
    turns, rewrites = TurnTokens(tokenizer, data), False
    answer = f"{PROBE}-answer"
    for role in roles:
        try:
            for text in (answer, "", f" {answer}\n\n", f"{THINK}\n{PROBE}\n{THOUGHT}\n\n{answer}"):
                conversation = turns.opened([{"role": "user", "content": "Q"}])
                for _ in range(2):
                    turn = continued(conversation.context, text)
                    [tokens] = encode(tokenizer, [turn + turns.template.end], special=False)
                    reading = conversation.after(tokens, turn, [{"role": role, "content": PROBE}])
                    if reading is None:
                        break
                    rewrites |= reading.anew
        except (ValueError, TimeoutError) as error:
            raise ConfigError(
                f"{key}: the model's chat template cannot go on after an answer of the role {role!r}: {first_line(error)}"
            ) from None
    return rewrites

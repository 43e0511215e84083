"""What a model reads and learns of a chat: exactly what its chat template writes, or the row is refused.

The rendering of a conversation up to one of the assistant's messages begins with what is read before that message (the rendering up to the
generation prompt); what follows, up to the end token, is learned. Nothing that a row says may be missing from either.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import TypeVar

from megarl.data.chat import Chat, Omission
from megarl.data.messages import ARGUMENTS, SPOKEN, TOOLS, Message, spoken
from megarl.data.rows import Row
from megarl.data.template import ChatTemplate
from megarl.data.tokenizer import first_line, unknown_characters
from megarl.errors import ConfigError
from megarl.images import MARK, Image

THINK, THOUGHT = "<think>", "</think>"  # around reasoning that is part of a text
PROMPT_END = 64  # characters at the end of what is read that may belong to a turn, such as an opened <think>
TAIL = 128  # characters at the end of a rendering that hold every token after the assistant's message
MAX_TEXT = 1 << 24  # characters that are rendered together

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Lesson:
    """A conversation to learn from."""

    place: str  # its name in error messages
    chat: Chat  # the whole of it
    learned: Sequence[int]  # the assistant's messages that are learned
    images: Sequence[Image] = ()

    @classmethod
    def of(cls, template: ChatTemplate, row: Row, learned: Sequence[int]) -> Lesson:
        """The lesson of a row whose `messages` are a whole conversation; `learned`: numbers among them. Raises as `ChatTemplate.chat`."""
        chat = template.chat(row.messages, row.place, row.tools, row.arguments)
        return cls(row.place, chat, [number + chat.inserted for number in learned])

    @property
    def end(self) -> int:
        """The number of messages up to the last one that is learned. Those after it are checked, but nothing reads them."""
        return self.learned[-1] + 1

    @property
    def size(self) -> int:
        """About how many characters its renderings have."""
        return (len(self.learned) + 2) * sum(len(text) for message in self.chat.messages for _, text in spoken(message))

    @property
    def unread_messages(self) -> Sequence[Message]:
        """The messages after the last one that is learned."""
        return self.chat.messages[self.end :]

    @property
    def unread(self) -> str:
        """What these messages say, a line for each text."""
        return "\n".join(f"{message['role']}: {text}" for message in self.unread_messages for _, text in spoken(message))


@dataclass(frozen=True, slots=True)
class Reply:
    """One of the assistant's messages, as the template renders it."""

    read: str  # everything before it, the generation prompt included
    text: str  # the message without its end token
    end: str  # the end token


def batches(items: Iterable[Item], most: int, size: Callable[[Item], int]) -> Iterator[list[Item]]:
    """Group consecutive items.

    Args:
        items: the items.
        most: the maximum number of items in a group.
        size: the number of characters that an item takes, of which a group has about `MAX_TEXT` at most.
    """
    group, total = list[Item](), 0
    for item in items:
        group.append(item)
        total += size(item)
        if len(group) == most or total > MAX_TEXT:
            yield group
            group, total = [], 0
    if group:
        yield group


def prompt_texts(template: ChatTemplate, chats: Sequence[tuple[str, Chat]], known: bool = False) -> list[str | ConfigError]:
    """Render prompts up to where the assistant speaks.

    Args:
        template: the chat template.
        chats: place, which starts an error's message, and chat of each prompt.
        known: refuse characters that the tokenizer does not have.

    Returns:
        The text of each prompt, or why it is refused: the template refuses it, or leaves something out.

    Raises:
        ConfigError: the template takes too much time.
    """

    def of(place: str, chat: Chat, text: str | ConfigError) -> str:
        rendered = _result(text)
        if known:
            _check_known(template, place, chat, rendered)
        return rendered

    return [_attempt(of, *one, text) for one, text in zip(chats, _wholes(template, chats, "prompt"), strict=True)]


def _wholes(template: ChatTemplate, chats: Sequence[tuple[str, Chat]], name: str) -> list[str | ConfigError]:
    """Return the texts of chats, or why they are refused.

    Args:
        template: the chat template.
        chats: place and chat of each.
        name: what a chat is called in errors: a prompt, which goes on to where the assistant speaks, or a conversation.
    """
    generation = name == "prompt"
    texts, omissions = _in_time(template, chats, lambda given: (template.texts(given, generation), template.omissions(given, generation)))

    def of(place: str, chat: Chat, text: str | Exception, omission: Omission) -> str:
        rendered = _text(place, text, name)
        _check_omission(place, chat, omission)
        _check_context(place, chat, len(chat.messages), rendered)
        return rendered

    return [_attempt(of, *one, text, omission) for one, text, omission in zip(chats, texts, omissions, strict=True)]


def _text(place: str, text: str | Exception, name: str = "conversation") -> str:
    if isinstance(text, Exception):
        raise ConfigError(f"{place}: the model's chat template refuses the {name}: {first_line(text)}")
    return text


def replies(template: ChatTemplate, lessons: Sequence[Lesson]) -> list[list[Reply] | ConfigError]:
    """Render the messages that are to be learned, each after everything before it.

    Args:
        template: the chat template.
        lessons: the conversations.

    Returns:
        The replies of each conversation, or why it is refused: the template refuses it or leaves something out, or what it writes does not
        begin with what the model reads.

    Raises:
        ConfigError: the template takes too much time.
    """
    chats = [(lesson.place, lesson.chat.until(number)) for lesson in lessons for number in lesson.learned]
    whole = [(lesson.place, lesson.chat.until(number + 1)) for lesson in lessons for number in lesson.learned]
    before = iter(_in_time(template, chats, partial(_before, template)))
    after = iter(_in_time(template, whole, lambda given: template.texts(given, generation=False)))
    chats = [(lesson.place, lesson.chat.until(lesson.end)) for lesson in lessons]
    omissions = _in_time(template, chats, lambda given: template.omissions(given, generation=False))
    longer = [(lesson.place, lesson.chat) for lesson in lessons if lesson.unread_messages]
    unread = iter(_wholes(template, longer, "conversation") if longer else ())

    def of(
        lesson: Lesson, omission: Omission, texts: list[tuple[str | Exception, str | Exception]], whole: str | ConfigError
    ) -> list[Reply]:
        pairs = [(_text(lesson.place, before), _text(lesson.place, after)) for before, after in texts]
        _check_omission(lesson.place, lesson.chat, omission)
        turns = [_reply(template, lesson, number, *pair) for number, pair in zip(lesson.learned, pairs, strict=True)]
        _check_context(lesson.place, lesson.chat, lesson.learned[-1], turns[-1].read)
        for turn in turns:
            _check_known(template, lesson.place, lesson.chat, turn.read, turn.text)
        _result(whole)
        return turns

    return [
        _attempt(
            of, lesson, omission, [(next(before), next(after)) for _ in lesson.learned], next(unread) if lesson.unread_messages else ""
        )
        for lesson, omission in zip(lessons, omissions, strict=True)
    ]


def _before(template: ChatTemplate, chats: Sequence[Chat]) -> list[str | Exception]:
    """Render chats of which neighbours may be the same, as the prompts of a pair are."""
    runs = [list(run) for _, run in groupby(chats)]
    return [text for run, text in zip(runs, template.texts([run[0] for run in runs]), strict=True) for _ in run]


def samples(turns: Sequence[Reply]) -> list[list[Reply]]:
    """Group the replies of a conversation into training samples.

    A sample goes on as long as the template renders what came before as it was read and said; where it rewrites that (as many do with
    earlier reasoning), the next message begins a sample of its own.

    Returns:
        For each sample the replies in it; `read` of any but the first is only what follows the end token of the one before.
    """
    grouped, context = list[list[Reply]](), ""
    for turn in turns:
        if grouped and turn.read.startswith(context):
            grouped[-1].append(Reply(turn.read[len(context) :], turn.text, turn.end))
        else:
            grouped.append([turn])
        context = turn.read + turn.text + turn.end
    return grouped


def continued(prompt_text: str, response: str) -> str:
    """Return a response as it follows what is read: without a <think> that the latter has already opened."""
    bare, text = prompt_text.rstrip(), response.lstrip()
    if not bare.endswith(THINK) or not text.startswith(THINK):
        return response
    rest = text.removeprefix(THINK)
    return rest[len(os.path.commonprefix([rest, prompt_text[len(bare) :]])) :]


def contains(text: str, part: str) -> bool:
    """Whether a rendered text has a part in it, up to white space, or as JSON writes it."""
    part = part.strip()
    if part in text:
        return True
    bare = "".join(text.split())
    forms = (part, *(json.dumps(part, ensure_ascii=ascii)[1:-1] for ascii in (False, True)))
    return any("".join(form.split()) in bare for form in forms)


def _reply(template: ChatTemplate, lesson: Lesson, number: int, before: str, after: str) -> Reply:
    """Return one of the assistant's messages.

    Args:
        template: the chat template.
        lesson: the conversation.
        number: the message.
        before: what is read before it.
        after: the rendering up to and with it.
    """
    message, place = lesson.chat.messages[number], f"{lesson.place}: {lesson.chat.named(number)}"
    content = message.get("content") or ""
    opened = before.rstrip().endswith(THINK)
    again = opened and content.lstrip().startswith(THINK)  # the message opens what the generation prompt has opened
    missing_part = ""
    if after.startswith(before):
        text, end = _unclosed(template, after[len(before) :])
        if not again or text.count(THINK) < content.count(THINK):
            missing_part = _lost(message, before[-PROMPT_END:] + text)
            if not missing_part:
                return Reply(before, text, end)
    if opened and (again or THOUGHT in content) and not any(key in message for key in (*SPOKEN[1:], "tool_calls")):
        return Reply(before, continued(before, content), template.end)  # finished turns lose their reasoning, as DeepSeek-R1's do
    if missing_part:
        raise ConfigError(f"{place}: the chat template leaves out a part of its {missing_part}")
    start = len(os.path.commonprefix([before, after]))
    start -= len(re.findall(r"(?:<[^<>\s]*)?\Z", before[:start])[0])  # from the beginning of a tag on
    rendering, prompt = after[start : start + PROMPT_END], before[start : start + PROMPT_END]
    why = f", and the message has no {THOUGHT}" if opened and THOUGHT not in content else ""
    raise ConfigError(f"{place}: the chat template writes {rendering!r} where the model reads {prompt!r} before it speaks{why}")


def _unclosed(template: ChatTemplate, text: str) -> tuple[str, str]:
    """Split what the template writes for the assistant's message into the message and the end token; what follows that is left out."""
    closing, start = list[re.Match[str]](), len(text)
    for token in reversed(list(template.ends.finditer(text, max(0, len(text) - TAIL)))):
        if text[token.end() : start].strip():
            break
        closing.append(token)
        start = token.start()
    if not closing:
        return text.removesuffix(template.closing), template.end
    end = next((token for token in reversed(closing) if token[0] == template.end), closing[0])
    return text[: end.start()], end[0]


def _check_omission(place: str, chat: Chat, omission: Omission) -> None:
    if omission.number is not None:
        part = "tools" if omission.number < 0 else chat.named(omission.number)
        raise ConfigError(f"{place}: {part}: the chat template leaves out {omission.what}")


def _check_known(template: ChatTemplate, place: str, chat: Chat, *texts: str) -> None:
    """Raise ConfigError if the tokenizer does not have a character that the row gave.

    Args:
        template: the chat template.
        place: the row's name in errors.
        chat: the row.
        *texts: its rendering, in parts.
    """
    texts = tuple(text.replace(MARK, "") for text in texts) if template.sees else texts
    unknown = "".join(unknown_characters(template.tokenizer, text) for text in texts)
    if not unknown:
        return
    fields = [(f"{chat.named(number)}: its {key}", value) for number, message in enumerate(chat.messages) for key, value in message.items()]
    for name, value in (*fields, (TOOLS, chat.tools or ""), (ARGUMENTS, dict(chat.arguments))):
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
        if part := "".join(dict.fromkeys(one for one in text if one in unknown)):
            raise ConfigError(f"{place}: {name} has characters that the tokenizer does not have: {part!r:.80}")


def _check_context(place: str, chat: Chat, count: int, text: str) -> None:
    """Raise ConfigError if something is missing in the text of the first messages, of which the assistant's may have been rewritten."""
    for number, message in enumerate(chat.messages[:count]):
        role = message["role"]
        if role != "assistant" and not contains(text, message["content"]):
            raise ConfigError(f"{place}: {chat.named(number)}: the chat template leaves out a part of what the role {role!r} says")
    for tool in chat.tools or ():
        name = tool.get("function", tool).get("name")
        if isinstance(name, str) and name not in text:
            raise ConfigError(f"{place}: tools: the chat template leaves out {name!r:.80}")


def _lost(message: Message, text: str) -> str:
    """Return which part of what a message says is not in its text; empty if none is missing."""
    missing = next(((key, part) for key, part in spoken(message) if not contains(text, part)), None)
    return "" if missing is None else f"{missing[0]}: {missing[1].strip()!r:.80}"


Result = TypeVar("Result")


def _result(result: Result | ConfigError) -> Result:
    """Return a result. Raises what is none."""
    if isinstance(result, ConfigError):
        raise result
    return result


def _attempt(make: Callable[..., Result], *given: object) -> Result | ConfigError:
    try:
        return make(*given)
    except ConfigError as error:
        return error


def _in_time(template: ChatTemplate, chats: Sequence[tuple[str, Chat]], work: Callable[[list[Chat]], Result]) -> Result:
    """Return `work` of the chats. Raise ConfigError, which names the first chat's place, if the template takes too much time."""
    try:
        return work([chat for _, chat in chats])
    except TimeoutError as error:
        one = "the prompt" if len(chats) == 1 else f"one of {len(chats)} prompts from here on"
        raise ConfigError(f"{chats[0][0]}: the model's chat template refuses {one}: {first_line(error)}") from None

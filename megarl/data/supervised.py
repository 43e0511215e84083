"""The data of supervised training: conversations, and prompts with their reference answers as responses."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from megarl.config import ConfigError, ConversationSource, FileSource, ReasoningGymSource, SftData, SftMixture, SftSource, TaughtSource
from megarl.data.answers import text_of
from megarl.data.columns import at
from megarl.data.conversations import Conversation, Script, plain_script, tokenised
from megarl.data.files import taken_rows
from megarl.data.images import COLUMN, COLUMNS, RESERVED, ImageReader, check_folder
from megarl.data.intake import UNUSED, Intake
from megarl.data.messages import ARGUMENTS, TOOLS, Message, arguments_of, check_text, checked, checked_chat, says_something, tools_of
from megarl.data.mixture import Mixture
from megarl.data.prompts import Renderer, check_turn
from megarl.data.rendering import Lesson, batches, replies, samples
from megarl.data.rows import Row, source_rows
from megarl.data.taught import load_taught
from megarl.data.template import ChatTemplate
from megarl.images import Image, marked

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHUNK = 4096  # conversations rendered and tokenised together
LIMIT_KEY = "sft.max_tokens"


def load_demonstrations(
    source: SftSource, tokenizer: PreTrainedTokenizerBase, data: SftData, max_tokens: int, key: str, reader: ImageReader | None = None
) -> list[Conversation]:
    """Return the training samples of any source; see `load_conversations` and `load_answers` for arguments and errors."""
    if isinstance(source, SftMixture):
        parts = [
            (load_demonstrations(part.source, tokenizer, data, max_tokens, f"{key}.parts.{n}.source", reader), part.weight)
            for n, part in enumerate(source.parts)
        ]
        return list(Mixture(parts, source.seed, key))
    if isinstance(source, TaughtSource):
        return load_taught(source, tokenizer, data, max_tokens, key)
    if not isinstance(source, ConversationSource):
        return load_answers(source, tokenizer, data, max_tokens, key, reader)
    if not data.chat:
        raise ConfigError(f"data.chat=false: {key}.type=conversations goes through the tokenizer's chat template")
    return load_conversations(source, tokenizer, data, max_tokens, key, reader)


def load_conversations(
    source: ConversationSource,
    tokenizer: PreTrainedTokenizerBase,
    data: SftData,
    max_tokens: int,
    key: str,
    reader: ImageReader | None = None,
) -> list[Conversation]:
    """Return the training samples of the conversations in a file.

    What is read and learned is what the chat template writes. Where it rewrites earlier messages once later ones follow, a conversation
    becomes several samples, in which each message of the assistant's is learned once.

    Args:
        source: the file, and the column of the messages.
        tokenizer: the model's tokenizer.
        data: how conversations are rendered, which messages are learned, and what happens to bad rows.
        max_tokens: maximum length of one sample.
        key: the source's dotted key, such as "data.train".
        reader: reads images for a model that sees them; None: they are refused.

    Raises:
        ConfigError: one line: the first row that is refused; a file without conversations; a tokenizer without a chat template.
    """
    if not tokenizer.chat_template:
        raise ConfigError(f"{key}: the tokenizer has no chat template, and conversations need one")
    check_folder(source, reader, key)
    intake = Intake.of(data)
    template, filled = ChatTemplate(tokenizer, data, intake=intake), source.path.suffix != ".jsonl"
    used = {name.partition(".")[0] for name in (source.messages_key, *source.where)} | {source.messages_key, TOOLS, ARGUMENTS}
    if reader is not None:
        template.sees, used = True, used | {COLUMN}

    def lesson(item: tuple[str, dict[str, Any]]) -> Lesson:
        place, row = item
        given, images = at(row, source.messages_key, place, f"{key}.messages_key"), list[Image]()
        if reader is not None:
            given, images = reader.take(given, row, source, place)
        intake.note(UNUSED, row.keys() - used - (COLUMNS if images else set()))
        messages = checked(given, place, filled)
        if isinstance(messages, str):
            raise ConfigError(f"{place}: a conversation is a list of chat messages, not a text")
        numbers = learned_messages(messages, data.train_on == "last", place)
        whole = Row(place, messages, "", {}, tools_of(row, place, filled), arguments_of(row, place))
        return replace(Lesson.of(template, whole, numbers), images=images)

    conversations = _learned(intake.each(taken_rows(source, key, intake.refuse), lesson), template, max_tokens, intake, reader=reader)
    if not conversations and not intake.dropped:
        raise ConfigError(f"{key}.path: {source.path} holds no conversations{f' after the first {source.skip}' if source.skip else ''}")
    intake.tell(len(conversations), key, f"{LIMIT_KEY}={max_tokens}")
    return conversations


def load_answers(
    source: ReasoningGymSource | FileSource,
    tokenizer: PreTrainedTokenizerBase,
    data: SftData,
    max_tokens: int,
    key: str,
    reader: ImageReader | None = None,
) -> list[Conversation]:
    """Return each prompt of a source with its reference answer as the response, in order.

    Args:
        source: the source of the prompts and answers.
        tokenizer: the model's tokenizer.
        data: how prompts are rendered, and what happens to bad rows.
        max_tokens: maximum length of a prompt and its answer, including the end token.
        key: the source's dotted key, such as "data.train".
        reader: as of `load_conversations`.

    Raises:
        ConfigError: one line: the first row that is refused; a source without prompts.
    """
    intake = Intake.of(data)
    renderer = Renderer(tokenizer, data, max_tokens, LIMIT_KEY, intake=intake, reader=reader)
    template, rows = renderer.chat_template, source_rows(source, key, intake, reader)
    file = source if isinstance(source, FileSource) else None
    used = {TOOLS, ARGUMENTS, *(name.partition(".")[0] for name in file.where)} if file is not None else set[str]()
    filled = file is not None and file.path.suffix != ".jsonl"

    def response(row: Row) -> list[Message]:
        intake.note(UNUSED, row.meta.keys() - used - (COLUMNS if row.images else set()) if file is not None else ())
        check_turn(row)
        return _response(row, filled)

    def lesson(template: ChatTemplate, row: Row) -> Lesson:
        reply = response(row)
        if row.images and marked(reply):
            raise ConfigError(f"{row.place}: the response has {RESERVED}")
        whole = replace(row, prompt=[*row.messages, *reply])
        numbers = learned_messages(whole.messages, data.train_on == "last", row.place, len(row.messages))
        return replace(Lesson.of(template, whole, numbers), images=row.images)

    def script(row: Row) -> Script:
        [*others, message] = response(row)
        if others or message.keys() != {"role", "content"}:
            raise ConfigError(f"{row.place}: a response of several parts needs data.chat=true")
        return plain_script(renderer, row, message["content"])

    if template is not None:
        conversations = _learned(intake.each(rows, partial(lesson, template)), template, max_tokens, intake, "response", reader)
    else:
        conversations = list[Conversation]()
        for batch in batches(intake.each(rows, script), CHUNK, lambda script: len(script.turns[0].text)):
            conversations += _tokenised(batch, tokenizer, max_tokens, intake, special=True)
    intake.tell(len(conversations), key, f"{LIMIT_KEY}={max_tokens}")
    return conversations


def learned_messages(messages: list[Message], last: bool, place: str, start: int = 0) -> list[int]:
    """Return the numbers of the assistant's messages that are learned.

    Args:
        messages: a conversation.
        last: only the last of them.
        place: the start of an error's message.
        start: the first message that may be learned.

    Raises:
        ConfigError: there are none, or one says nothing.
    """
    numbers = [number for number, message in enumerate(messages) if message["role"] == "assistant" and number >= start]
    if not numbers:
        others = sorted({message["role"] for message in messages} - {"system", "user", "tool"})
        also = f": its roles are {', '.join(others)}" if others else ""
        raise ConfigError(f"{place}: the conversation has no message of the assistant's{also}")
    if numbers[0] == 0:
        raise ConfigError(f"{place}: the conversation begins with the assistant's message, which answers nothing")
    numbers = [number for number in (numbers[-1:] if last else numbers) if messages[number].get("weight", 1)]
    if not numbers:
        raise ConfigError(f"{place}: nothing is learned: the weight of {'the last' if last else 'each'} message of the assistant's is 0")
    if (empty := next((number for number in numbers if not says_something(messages[number])), None)) is not None:
        raise ConfigError(f"{place}: message {empty}: the assistant says nothing")
    return numbers


def _response(row: Row, filled: bool) -> list[Message]:
    """Return a row's answer as messages. Raise ConfigError if it is neither a text nor messages that end with the assistant's."""
    answer = row.answer
    if isinstance(answer, list) and all(isinstance(message, dict) and "role" in message for message in answer):
        messages = checked_chat(answer, f"{row.place}: the response", filled)
        if messages[-1]["role"] != "assistant":
            raise ConfigError(f"{row.place}: the messages of the response must end with one of the assistant's")
        return messages
    if isinstance(answer, list | dict) or not text_of(answer).strip():
        raise ConfigError(f"{row.place}: the response must be a text or messages, not {answer!r:.80}")
    check_text(text_of(answer), f"{row.place}: the response")
    return [{"role": "assistant", "content": text_of(answer)}]


def _learned(
    lessons: Iterable[Lesson],
    template: ChatTemplate,
    most: int,
    intake: Intake,
    name: str = "conversation",
    reader: ImageReader | None = None,
) -> list[Conversation]:
    conversations = list[Conversation]()
    for batch in batches(lessons, CHUNK, lambda lesson: lesson.size):
        turns = intake.taken(zip(batch, replies(template, batch), strict=True))
        scripts = list[Script]()
        for lesson, replied in turns:
            own = [Script(lesson.place, sample, name) for sample in samples(replied)]
            if reader is not None:
                written = [reader.written(script.turns, lesson.images, template) for script in own]
                own = [replace(script, turns=turns, images=images) for script, (turns, images) in zip(own, written, strict=True)]
            scripts += [*own[:-1], replace(own[-1], unread=lesson.unread)]
            if lesson.unread_messages:
                intake.note_unread(lesson.place)
        conversations += _tokenised(scripts, template.tokenizer, most, intake, reader=reader)
    return conversations


def _tokenised(
    scripts: Iterable[Script],
    tokenizer: PreTrainedTokenizerBase,
    most: int,
    intake: Intake,
    special: bool = False,
    reader: ImageReader | None = None,
) -> list[Conversation]:
    items = [(None, [script]) for script in scripts]
    return [conversation for _, [conversation] in tokenised(tokenizer, items, most, LIMIT_KEY, intake, special, reader)]

"""Conversations to train on: their tokens, and which of these are the assistant's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.config import ConfigError, ConversationSource
from megarl.data.columns import at
from megarl.data.files import taken_rows
from megarl.data.overlong import Overlong, TooLong
from megarl.data.prompts import Prompt, checked, instructed
from megarl.data.tokenizer import Message, check_size, check_template, encode, first_line, render_chats

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHUNK = 4096  # conversations tokenised together


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt and what follows it.

    Attributes:
        tokens: int32 [prompt + response]; each of the assistant's messages ends with the end token.
        prompt_length: number of tokens before the assistant's first one.
        loss_mask: bool [response], true for the assistant's tokens; None: all tokens are the assistant's.
    """

    tokens: np.ndarray
    prompt_length: int
    loss_mask: np.ndarray | None = None


def ended(prompt: Prompt, response: Sequence[int], end: int, max_tokens: int, called: str, limit_key: str) -> Conversation:
    """Return a prompt and its response, with the end token, as a rollout would have produced them.

    Args:
        prompt: the tokenised prompt.
        response: the response's tokens, without the end token.
        end: the end token.
        max_tokens: maximum length of both together; raises TooLong if it is exceeded.
        called: what the message calls prompt and response.
        limit_key: the setting that gives the limit, for the message.
    """
    tokens = np.array([*prompt.ids, *response, end], dtype=np.int32)
    if len(tokens) > max_tokens:
        raise TooLong(f"{called} are {len(tokens)} tokens, more than {limit_key}={max_tokens}")
    return Conversation(tokens, len(prompt.ids))


def answered(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, max_tokens: int, key: str, drop: bool = False
) -> list[Conversation]:
    """Return each prompt with its reference answer as the response, in order.

    Args:
        prompts: tokenised prompts with answers.
        tokenizer: the model's tokenizer.
        max_tokens: maximum length of a prompt and its answer, including the end token.
        key: the dotted key of the prompts' source, for messages.
        drop: leave out longer ones.

    Raises:
        ConfigError: one is longer, and `drop` is false; the message starts with `key`.
    """

    def sized(prompt: Prompt) -> Prompt:
        check_size(tokenizer, prompt.answer, max_tokens, f"{key}: the response to prompt {prompt.id}", "sft.max_tokens")
        return prompt

    def conversation(pair: tuple[Prompt, Sequence[int]]) -> Conversation:
        called = f"{key}: prompt {pair[0].id} and its response"
        return ended(*pair, tokenizer.eos_token_id, max_tokens, called, "sft.max_tokens")

    overlong = Overlong(drop)
    fitting = overlong.made(prompts, sized)
    answers = encode(tokenizer, [prompt.answer for prompt in fitting], special=False) if fitting else []
    found = overlong.made(zip(fitting, answers, strict=True), conversation)
    overlong.tell(len(found), key, f"sft.max_tokens={max_tokens}")
    return found


def load_conversations(
    source: ConversationSource,
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
    key: str,
    system: str | None = None,
    drop: bool = False,
) -> list[Conversation]:
    """Return every conversation of a file, rendered with the tokenizer's chat template.

    Each message of the assistant is tokenised as a rollout would have produced it: after the rendered conversation before it, and with the
    end token.

    Args:
        source: the file, and the column of the messages.
        tokenizer: the model's tokenizer.
        max_tokens: maximum length of one conversation.
        key: the source's dotted key, such as "data.train".
        system: a system message for each conversation that does not begin with one.
        drop: leave out longer ones.

    Raises:
        ConfigError: one line: the first row that is malformed, has no message of the assistant, is longer than `max_tokens`, or whose
            earlier messages are rendered differently once later ones follow; a file without conversations; a tokenizer without a chat
            template.
    """
    if not tokenizer.chat_template:
        raise ConfigError(f"{key}: the tokenizer has no chat template, and conversations need one")
    check_template(tokenizer, "data.chat")
    rows = (
        (place, instructed(_messages(at(row, source.messages_key, place, f"{key}.messages_key"), place), system))
        for place, row in taken_rows(source, key)
    )
    made, overlong = list[Conversation](), Overlong(drop)
    while chunk := list(islice(rows, CHUNK)):
        made += _tokenised(chunk, tokenizer, max_tokens, overlong)
    overlong.tell(len(made), key, f"sft.max_tokens={max_tokens}")
    if not made:
        raise ConfigError(f"{key}.path: {source.path} holds no conversations{f' after the first {source.skip}' if source.skip else ''}")
    return made


def _messages(value: Any, place: str) -> list[Message]:
    """Return the unchanged messages up to the assistant's last one. Raise ConfigError if they are malformed."""
    messages = checked(value, place)
    if isinstance(messages, str):
        raise ConfigError(f"{place}: a conversation is a list of chat messages, not a text")
    last = max((number for number, message in enumerate(messages) if message["role"] == "assistant"), default=None)
    if last is None:
        raise ConfigError(f"{place}: the conversation has no message of the assistant's")
    if messages[0]["role"] == "assistant":
        raise ConfigError(f"{place}: the conversation begins with the assistant's message, which answers nothing")
    return messages[: last + 1]


def _tokenised(
    chunk: Sequence[tuple[str, list[Message]]], tokenizer: PreTrainedTokenizerBase, max_tokens: int, overlong: Overlong
) -> list[Conversation]:
    def turns(item: tuple[str, list[Message]]) -> tuple[str, list[tuple[str, str]]]:
        place, messages = item
        pairs = list(_turns(messages, tokenizer, place))
        check_size(tokenizer, "".join(map("".join, pairs)), max_tokens, f"{place}: the conversation", "sft.max_tokens")
        return place, pairs

    def conversation(item: tuple[str, list[tuple[str, str]]]) -> Conversation:
        place, pairs = item
        parts: list[tuple[list[int], bool]] = []
        for _ in pairs:
            parts += [(next(texts), False), ([*next(texts), tokenizer.eos_token_id], True)]
        tokens = np.concatenate([np.array(ids, dtype=np.int32) for ids, _ in parts])
        if len(tokens) > max_tokens:
            raise TooLong(f"{place}: the conversation has {len(tokens)} tokens, more than sft.max_tokens={max_tokens}")
        mask = np.concatenate([np.full(len(ids), assistant) for ids, assistant in parts[1:]])
        return Conversation(tokens, len(parts[0][0]), None if mask.all() else mask)

    fitting = overlong.made(chunk, turns)
    said = [text for _, pairs in fitting for pair in pairs for text in pair]
    texts = iter(encode(tokenizer, said, special=False) if said else [])
    return overlong.made(fitting, conversation)


def _turns(messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase, place: str) -> Iterator[tuple[str, str]]:
    """Yield (the text that the model reads since the last end token, the message's text) for each of the assistant's messages."""
    read = ""  # all text up to the last end token
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        try:
            [before] = render_chats(tokenizer, [list(messages[:number])])
        except Exception as error:  # a template may raise anything
            raise ConfigError(f"{place}: the model's chat template refuses the conversation: {first_line(error)}") from None
        if not before.startswith(read):
            raise ConfigError(f"{place}: message {number}: the chat template changes the messages before it")
        yield before[len(read) :], message["content"]
        read = before + message["content"] + str(tokenizer.eos_token)

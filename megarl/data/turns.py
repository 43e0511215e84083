"""Tokenise new messages of a conversation without tokenising the earlier ones again.

The context of a conversation always consists of the very tokens that were sampled and read: nothing in it is rendered or tokenised a second
time, so that every log-prob refers to what the policy has seen. The text after a turn of the policy is the suffix that the chat template
writes after a fixed stand-in conversation. `check_turns` verifies once that the template allows this.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from megarl.config import ConfigError, PromptFormat
from megarl.data.chat import Chat
from megarl.data.messages import Message
from megarl.data.rendering import contains, prompt_texts
from megarl.data.template import ChatTemplate, render, render_chats
from megarl.data.tokenizer import encode, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ASKED: Message = {"role": "user", "content": "Q"}
_SAID: Message = {"role": "assistant", "content": "A"}
_PROBE = "f7Zq0-answer"  # a text that no template contains


class TurnTokens:
    """Convert chat messages into tokens, at the start of a conversation and after a turn of the policy."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, data: PromptFormat | None = None) -> None:
        """
        Args:
            tokenizer: the tokenizer with the chat template.
            data: how a run's prompts are rendered.
        """
        self._data = data or PromptFormat()
        self._tokenizer, self._end, self._end_id = tokenizer, str(tokenizer.eos_token), tokenizer.eos_token_id
        self._stand_ins: dict[str, str] = {}  # the stand-in conversation, by the arguments of the chat template

    @cached_property
    def _template(self) -> ChatTemplate:
        return ChatTemplate(self._tokenizer, self._data)

    def opening(self, messages: Sequence[Message], arguments: Mapping[str, Any] = MappingProxyType({})) -> list[int]:
        """Return the prompt's tokens for a conversation that begins with these messages.

        Args:
            messages: the messages.
            arguments: the conversation's own arguments of the chat template.

        Raises:
            ValueError: the template leaves something out.
        """
        chat = self._template.chat(list(messages), "the opening", arguments=arguments)
        [text] = prompt_texts(self._template, [("the opening", chat)])
        if isinstance(text, ConfigError):
            raise text
        return encode(self._tokenizer, [text], special=False)[0]

    def after(self, messages: Sequence[Message], turn: Sequence[int], arguments: Mapping[str, Any] = MappingProxyType({})) -> list[int]:
        """Return the tokens that follow a turn, up to where the policy speaks next, preceded by the end token if the turn lacks one.

        Args:
            messages: what follows the turn.
            turn: the turn's tokens.
            arguments: the conversation's own arguments of the chat template.

        Raises:
            ValueError: the template renders earlier messages differently once others follow, or leaves some of these out.
        """
        if (key := json.dumps(dict(arguments), sort_keys=True, default=str)) not in self._stand_ins:
            self._stand_ins[key] = self._before([_ASKED, _SAID], arguments)
        text = self.suffix([_ASKED, _SAID], self._stand_ins[key], messages, arguments)
        return encode(self._tokenizer, [text if list(turn[-1:]) == [self._end_id] else self._end + text], special=False)[0]

    def _before(self, chat: Sequence[Message], arguments: Mapping[str, Any]) -> str:
        """Return a conversation's text without the last end token: what is read before the last message, and that message."""
        read = render_chats(self._tokenizer, [list(chat[:-1])], arguments=self._template.given(arguments))[0]
        return read + str(chat[-1]["content"])

    def suffix(
        self,
        said: Sequence[Message],
        before: str,
        messages: Sequence[Message],
        arguments: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Return the text that the template writes after the end token of `said`'s last message when `messages` follow.

        Args:
            said: the conversation so far.
            before: its text as an episode's context has it, without the last end token.
            messages: the messages that follow.
            arguments: the conversation's own arguments of the chat template.

        Raises:
            ValueError: the template renders `said` otherwise once `messages` follow, or leaves some of these out.
        """
        chat = Chat([*said, *messages], None, self._template.given(arguments), len(said))
        [whole] = render(self._tokenizer, [chat])
        if not whole.startswith(before + self._end):
            context = before + self._end
            raise ValueError(f"renders {whole[: len(context)]!r:.120} where {context!r:.120} was read and said, and is kept")
        text, [missing] = whole[len(before + self._end) :], self._template.omissions([chat])
        lost = [message["role"] for message in messages if not contains(text, message["content"])]
        if missing.number is not None or lost:
            raise ValueError(f"leaves out {missing.what if missing.number is not None else f'a part of what the role {lost[0]!r} says'}")
        return text


def check_turns(tokenizer: PreTrainedTokenizerBase, roles: Sequence[str], key: str, data: PromptFormat | None = None) -> None:
    """Check that rendering a conversation as a whole gives the same text as rendering it turn by turn.

    Args:
        tokenizer: the tokenizer with the chat template.
        roles: the roles that may speak after the policy, such as "user" or "tool".
        key: the start of an error's message.
        data: how a run's prompts are rendered.

    Raises:
        ConfigError: the template leaves out a message, changes earlier ones, or writes different text after different conversations.
    """
    arguments = {} if data is None else data.template_args
    for role in roles:
        answer: Message = {"role": role, "content": _PROBE}
        try:
            turns = TurnTokens(tokenizer, data)
            expected = turns.suffix([_ASKED, _SAID], turns._before([_ASKED, _SAID], {}), [answer])
            # Two turns of another conversation: each suffix must equal the stand-in's, and the whole text the concatenation of the turns.
            said: list[Message] = [{"role": "user", "content": "Q 2"}]
            [text] = render_chats(tokenizer, [said], arguments=arguments)
            for turn in ("B", "C 3"):
                said, text = [*said, {"role": "assistant", "content": turn}], text + turn
                suffix = turns.suffix(said, text, [answer])
                if suffix != expected:
                    raise ValueError(f"writes {suffix!r:.120} after one turn and {expected!r:.120} after another")
                said, text = [*said, answer], text + str(tokenizer.eos_token) + suffix
        except Exception as error:  # a template may raise anything
            raise ConfigError(
                f"{key}: the model's chat template cannot be continued turn by turn, since for an answer of the role {role!r} it "
                f"{first_line(error) if isinstance(error, ValueError) else f'raises {type(error).__name__}: {first_line(error)}'}"
            ) from None

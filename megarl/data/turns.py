"""Tokenise new messages of a conversation without tokenising the earlier ones again.

The context of a conversation always consists of the very tokens that were sampled and read: nothing in it is rendered or tokenised a second
time, so that every log-prob refers to what the policy has seen. The text after a turn of the policy is the suffix that the chat template
writes after a fixed stand-in conversation. `check_turns` verifies once that the template allows this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megarl.config import ConfigError
from megarl.data.prompts import instructed
from megarl.data.tokenizer import Message, encode, first_line, render_chats

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ASKED: Message = {"role": "user", "content": "Q"}
_SAID: Message = {"role": "assistant", "content": "A"}
_PROBE = "f7Zq0-answer"  # a text that no template contains


class TurnTokens:
    """Convert chat messages into tokens, at the start of a conversation and after a turn of the policy."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, system: str | None = None) -> None:
        """
        Args:
            tokenizer: the tokenizer with the chat template.
            system: a system message for each conversation that does not begin with one.
        """
        self._system = system
        self._tokenizer, self._end, self._end_id = tokenizer, str(tokenizer.eos_token), tokenizer.eos_token_id
        [asked] = render_chats(tokenizer, [[_ASKED]])
        self._before = asked + _SAID["content"]

    def opening(self, messages: Sequence[Message]) -> list[int]:
        """Return the prompt's tokens for a conversation that begins with these messages."""
        [text] = render_chats(self._tokenizer, [instructed(list(messages), self._system)])
        return encode(self._tokenizer, [text], special=False)[0]

    def after(self, messages: Sequence[Message], turn: Sequence[int]) -> list[int]:
        """Return the tokens that follow a turn, up to where the policy speaks next, preceded by the end token if the turn lacks one.

        Raises ValueError if the template renders earlier messages differently once others follow.
        """
        text = self.suffix([_ASKED, _SAID], self._before, messages)
        return encode(self._tokenizer, [text if list(turn[-1:]) == [self._end_id] else self._end + text], special=False)[0]

    def suffix(self, said: Sequence[Message], before: str, messages: Sequence[Message]) -> str:
        """Return the text that the template writes after the end token of `said`'s last message when `messages` follow.

        Args:
            said: the conversation so far.
            before: its rendered text, without the last end token.
            messages: the messages that follow.

        Raises:
            ValueError: the template renders `said` differently once `messages` follow.
        """
        [whole] = render_chats(self._tokenizer, [[*said, *messages]])
        if not whole.startswith(before + self._end):
            raise ValueError(
                f"renders {before + self._end!r:.120} differently once messages follow: {whole[: len(before + self._end)]!r:.120}"
            )
        return whole[len(before + self._end) :]


def check_turns(tokenizer: PreTrainedTokenizerBase, roles: Sequence[str], key: str) -> None:
    """Check that rendering a conversation as a whole gives the same text as rendering it turn by turn.

    Args:
        tokenizer: the tokenizer with the chat template.
        roles: the roles that may speak after the policy, such as "user" or "tool".
        key: the start of an error's message.

    Raises:
        ConfigError: the template leaves out a message, changes earlier ones, or writes different text after different conversations.
    """
    for role in roles:
        answer: Message = {"role": role, "content": _PROBE}
        try:
            turns = TurnTokens(tokenizer)
            expected = turns.suffix([_ASKED, _SAID], turns._before, [answer])
            # Two turns of another conversation: each suffix must equal the stand-in's, and the whole text the concatenation of the turns.
            said: list[Message] = [{"role": "user", "content": "Q 2"}]
            [text] = render_chats(tokenizer, [said])
            for turn in ("B", "C 3"):
                said, text = [*said, {"role": "assistant", "content": turn}], text + turn
                found = turns.suffix(said, text, [answer])
                if found != expected:
                    raise ValueError(f"writes {found!r:.120} after one turn and {expected!r:.120} after another")
                said, text = [*said, answer], text + str(tokenizer.eos_token) + found
        except Exception as error:  # a template may raise anything
            raise ConfigError(
                f"{key}: the model's chat template cannot be continued turn by turn, since for an answer of the role {role!r} it "
                f"{first_line(error) if isinstance(error, ValueError) else f'raises {type(error).__name__}: {first_line(error)}'}"
            ) from None
        if _PROBE not in expected:
            raise ConfigError(f"{key}: the model's chat template leaves out what the role {role!r} says")

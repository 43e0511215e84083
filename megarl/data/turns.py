"""New messages of a conversation as tokens, without tokenising again what is there.

The context of a conversation is the tokens that were sampled and read, for ever: nothing in it is rendered or tokenised a second time, so
that every log-prob is that of what the policy has seen. What comes after a turn of the policy's is the suffix that the chat template writes
after a fixed stand-in conversation. `check_turns` makes sure, once, that the template allows that.
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
_PROBE = "f7Zq0-answer"  # no template has it


class TurnTokens:
    """Turns chat messages into tokens, at the start of a conversation and after a turn of the policy's."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, system: str | None = None) -> None:
        """
        Args:
            tokenizer: with the chat template.
            system: a message before each conversation that begins with none.
        """
        self._system = system
        self._tokenizer, self._end, self._end_id = tokenizer, str(tokenizer.eos_token), tokenizer.eos_token_id
        [asked] = render_chats(tokenizer, [[_ASKED]])
        self._before = asked + _SAID["content"]

    def opening(self, messages: Sequence[Message]) -> list[int]:
        """The prompt of a conversation that begins with these messages."""
        [text] = render_chats(self._tokenizer, [instructed(list(messages), self._system)])
        return encode(self._tokenizer, [text], special=False)[0]

    def after(self, messages: Sequence[Message], turn: Sequence[int]) -> list[int]:
        """What follows the tokens of a turn, so that the policy speaks next; the end token, too, after a turn without one.

        Raises ValueError where the template renders what came before otherwise than it was said.
        """
        text = self.suffix([_ASKED, _SAID], self._before, messages)
        return encode(self._tokenizer, [text if list(turn[-1:]) == [self._end_id] else self._end + text], special=False)[0]

    def suffix(self, said: Sequence[Message], before: str, messages: Sequence[Message]) -> str:
        """What the template writes after the end token of `said`'s last message, which it has rendered as `before` up to that token.

        Args:
            said: the conversation so far.
            before: its text, without the last end token.
            messages: that follow.

        Raises:
            ValueError: with them the template renders the conversation otherwise.
        """
        [whole] = render_chats(self._tokenizer, [[*said, *messages]])
        if not whole.startswith(before + self._end):
            raise ValueError(
                f"renders {before + self._end!r:.120} differently once messages follow: {whole[: len(before + self._end)]!r:.120}"
            )
        return whole[len(before + self._end) :]


def check_turns(tokenizer: PreTrainedTokenizerBase, roles: Sequence[str], key: str) -> None:
    """Checks the suffix rule: a conversation rendered as a whole is what was rendered turn by turn.

    Args:
        tokenizer: with the chat template.
        roles: who may speak after the policy, say "user" or "tool".
        key: what a message begins with.

    Raises:
        ConfigError: the template leaves a message out, changes what came before, or writes other text after other conversations.
    """
    for role in roles:
        answer: Message = {"role": role, "content": _PROBE}
        try:
            turns = TurnTokens(tokenizer)
            expected = turns.suffix([_ASKED, _SAID], turns._before, [answer])
            # Two turns of another conversation: the suffix must be the stand-in's each time, and the whole the turns put together.
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

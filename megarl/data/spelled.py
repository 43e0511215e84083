"""Control tokens that a policy has only spelled, as plain text: read again in a rewritten context, they stay plain text.

In the policy's messages a mark stands for each of them, which a chat template renders like any word. In the rendering the marks become the
text again, and what is between two control tokens that the template has written is tokenised without any.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any

from megarl.data.chat import PROBE
from megarl.data.tokenizer import decode, encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARK = re.compile(rf"{PROBE}x((?:[0-9a-f]{{2}})+)x")


def unmarked(text: str) -> str:
    """Return a text with what its marks stand for."""
    return MARK.sub(lambda mark: bytes.fromhex(mark[1]).decode(errors="replace"), text)


class Spelled:
    """Marks what spells a control token, and tokenises marked text.

    Args:
        tokenizer: the model's tokenizer.
        control: the pattern of a control token in a text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, control: re.Pattern[str]) -> None:
        self._tokenizer, self._control = tokenizer, control

    @cached_property
    def _ids(self) -> set[int]:
        added = self._tokenizer.added_tokens_decoder.items()
        return {*self._tokenizer.all_special_ids, *(number for number, token in added if self._control.fullmatch(str(token)))}

    def marked(self, value: Any) -> Any:
        """Return a text, or what is read from JSON, with marks in place of all control tokens in its texts."""
        if isinstance(value, str):
            return self._control.sub(lambda token: f"{PROBE}x{token[0].encode(errors='replace').hex()}x", value)
        if isinstance(value, dict):
            return {self.marked(key): self.marked(inner) for key, inner in value.items()}
        return [self.marked(inner) for inner in value] if isinstance(value, list) else value

    def turn(self, tokens: Sequence[int], text: str) -> str:
        """Return the text of a turn with marks in place of the control tokens that it spells; those that were sampled stay.

        Args:
            tokens: the turn's tokens.
            text: their text, with or without the last one.
        """
        if self._control.search(text) is None:
            return text
        for sampled in (tokens, tokens[:-1]):
            marked = self._sampled(sampled)
            if text.endswith(whole := unmarked(marked)):  # some tokenizers write the start of a text in another way
                return text.removesuffix(whole) + marked
        return str(self.marked(text))

    def _sampled(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, decoded from one control token to the next, with marks in place of those that it spells."""
        starts = [0, *(place for place, token in enumerate(tokens) if place and token in self._ids), len(tokens)]
        texts = list[str]()
        for start, end in pairwise(starts):
            control = tokens[start : start + 1 if {*tokens[start : start + 1]} & self._ids else start]
            head, text = (decode(self._tokenizer, own, finished=False) for own in (control, tokens[start:end]))
            texts += [head, self.marked(text.removeprefix(head))]
        return "".join(texts)

    def encoded(self, text: str) -> list[int] | None:
        """Return the tokens of a rendered text; None if the tokenizer cannot write what is marked as the same plain text."""
        plain = unmarked(text)
        [tokens] = encode(self._tokenizer, [plain], special=False)
        if plain == text:
            return tokens
        plain_tokens = list[int]()
        parts = re.split(f"({self._control.pattern})", text)
        for spelled, group in groupby(parts, lambda part: MARK.search(part) is not None):
            plain_tokens += self._tokenizer(unmarked("".join(group)), add_special_tokens=False, split_special_tokens=spelled)["input_ids"]
        same = decode(self._tokenizer, plain_tokens, finished=False) == decode(self._tokenizer, tokens, finished=False)
        return plain_tokens if same and sum(token in self._ids for token in plain_tokens) == len(self._control.findall(text)) else None

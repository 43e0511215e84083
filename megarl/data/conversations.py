"""Conversations to train on: their tokens, and which of these are learned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from megarl.batch import Sample
from megarl.data.images import ImageReader
from megarl.data.intake import Intake, TooLong
from megarl.data.prompts import Renderer
from megarl.data.rendering import Reply
from megarl.data.rows import Row
from megarl.data.tokenizer import check_known, check_size, encode
from megarl.images import Image, PlacedImage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt and what follows it.

    Attributes:
        tokens: int32 [prompt + response]; each of the assistant's messages ends with the end token.
        prompt_length: number of tokens before the assistant's first one that is learned.
        loss_mask: bool [response], true for the tokens that are learned; None: all are.
        place: its row's name in messages.
        unread: what the row says after the last message that is learned, and nothing reads.
        taught: what a teacher says of each token of the response; see `megarl.data.taught.taught`. None: there is no teacher.
    """

    tokens: np.ndarray
    prompt_length: int
    loss_mask: np.ndarray | None = None
    place: str = field(default="", repr=False, compare=False)
    unread: str = field(default="", repr=False, compare=False)
    images: Sequence[PlacedImage] = ()
    taught: np.ndarray | None = field(default=None, repr=False, compare=False)


def sample(conversation: Conversation) -> Sample:
    """Make a training sample of a conversation that no engine has sampled."""
    nothing = np.zeros(len(conversation.tokens) - conversation.prompt_length, np.float32)
    return Sample(
        conversation.tokens, conversation.prompt_length, nothing, "stop", loss_mask=conversation.loss_mask, images=conversation.images
    )


@dataclass(frozen=True, slots=True)
class Script:
    """The texts of a training sample: what is read and what is learned, in turns."""

    place: str  # its name in error messages
    turns: Sequence[Reply]
    name: str = "conversation"  # the whole, or the one learned text after a prompt ("response"), in messages
    unread: str = ""  # as of `Conversation`
    images: Sequence[Image] = ()

    def check_size(self, tokenizer: PreTrainedTokenizerBase, most: int, limit_key: str) -> None:
        """Raise TooLong if there are more characters than `most` tokens can have; see `megarl.data.tokenizer.check_size`."""
        parts = {"prompt": self.turns[0].read, self.name: self.turns[0].text}
        if self.name == "conversation":
            parts = {self.name: "".join(turn.read + turn.text for turn in self.turns)}
        for name, text in parts.items():
            check_size(tokenizer, text, most, f"{self.place}: {name if name in ('chosen', 'rejected') else f'the {name}'}", limit_key)

    def too_long(self, prompt: int, whole: int, most: int, limit_key: str) -> TooLong:
        """Return the error for a sample that is too long.

        Args:
            prompt: the number of tokens before the first learned one.
            whole: the number of all tokens.
            most: maximum length.
            limit_key: the setting that gives it.
        """
        if self.name == "conversation":
            return TooLong(f"{self.place}: the conversation has {whole} tokens, more than {limit_key}={most}")
        if prompt > most:
            return TooLong(f"{self.place}: prompt of {prompt} tokens is longer than {limit_key}={most}")
        return TooLong(f"{self.place}: prompt and response are {whole} tokens, more than {limit_key}={most}")


def tokenised(
    tokenizer: PreTrainedTokenizerBase,
    items: Iterable[tuple[Item, Sequence[Script]]],
    most: int,
    limit_key: str,
    intake: Intake,
    special: bool = False,
    reader: ImageReader | None = None,
) -> list[tuple[Item, list[Conversation]]]:
    """Tokenise training samples as a rollout would have produced them: each turn after the text before it, and with its end token.

    Args:
        tokenizer: the model's tokenizer.
        items: samples that are kept or left out together, each group with whatever belongs to it.
        most: maximum length of a sample.
        limit_key: the setting that gives the limit, for messages.
        intake: what to do with samples that are longer.
        special: the samples are raw texts and no rendered chats; see `encode`.
        reader: finds the places of images; None: there are none.
    """

    def sized(item: tuple[Item, Sequence[Script]]) -> tuple[Item, Sequence[Script]]:
        for script in item[1]:
            script.check_size(tokenizer, most, limit_key)
        return item

    def whole(item: tuple[Item, Sequence[Script]]) -> tuple[Item, list[Conversation]]:
        conversations = [conversation(script, [next(parts) for _ in script.turns for _ in range(2)]) for script in item[1]]
        for script, one in zip(item[1], conversations, strict=True):
            if len(one.tokens) > most:
                raise script.too_long(one.prompt_length, len(one.tokens), most, limit_key)
        return item[0], conversations

    def conversation(script: Script, parts: Sequence[list[int]]) -> Conversation:
        ids = [part if number % 2 == 0 else [*part, ends[script.turns[number // 2].end]] for number, part in enumerate(parts)]
        tokens = np.array(list(chain.from_iterable(ids)), dtype=np.int32)
        mask = np.repeat(np.arange(len(ids) - 1) % 2 == 0, [len(part) for part in ids[1:]])
        images = () if reader is None else reader.placed(tokens, script.images, script.place)
        return Conversation(tokens, len(ids[0]), None if mask.all() else mask, script.place, script.unread, images)

    fitting = intake.made(items, sized)
    turns = [turn for _, group in fitting for script in group for turn in script.turns]
    ends = {end: tokenizer.convert_tokens_to_ids(end) for end in {turn.end for turn in turns}}
    prompts = list(dict.fromkeys(turn.read for turn in turns))  # the sides of a pair share theirs
    ids = dict(zip(prompts, encode(tokenizer, prompts, special=special) if turns else [], strict=True))
    responses = encode(tokenizer, [turn.text for turn in turns], special=False) if turns else []
    parts = chain.from_iterable((ids[turn.read], text) for turn, text in zip(turns, responses, strict=True))
    return intake.made(fitting, whole)


def plain_script(renderer: Renderer, row: Row, response: str, name: str = "response") -> Script:
    """Return a prompt in `data.template` and the response to it.

    Args:
        renderer: fills in the template.
        row: the prompt.
        response: the response.
        name: what the response is called in messages.

    Raises:
        ConfigError: the prompt needs a chat template.
    """
    prompt_text = renderer.plain(row)
    check_known(renderer.tokenizer, response, f"{row.place}: {name if name in ('chosen', 'rejected') else f'the {name}'}")
    return Script(row.place, [Reply(prompt_text, renderer.response(prompt_text, response), renderer.end)], name)

"""Data as a person sees it: what the model reads and what it learns, line by line, from the very tokens that are trained on.

Every line of a text begins with what becomes of it (`read |`, `learned |`, ...), so that nothing inside the data can be taken for a mark.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import TYPE_CHECKING

import numpy as np

from megarl.batch import Sample
from megarl.data.answers import text_of
from megarl.data.conversations import Conversation, sample
from megarl.data.preferences import NAMES, Preference
from megarl.data.prompts import Prompt
from megarl.data.tokenizer import decode
from megarl.images import PlacedImage
from megarl.text.display import escaped

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Item = Conversation | Preference | Prompt

READ, LEARNED, MASKED, SCORED, ANSWER, UNREAD = "read", "learned", "masked", "scored", "answer", "unread"
WIDTH = max(map(len, (READ, LEARNED, MASKED, SCORED, ANSWER, UNREAD)))
COLOURS = {LEARNED: "\x1b[32m", SCORED: "\x1b[32m", ANSWER: "\x1b[36m", MASKED: "\x1b[2m", UNREAD: "\x1b[2m"}
PLAIN = "\x1b[0m"

Line = tuple[str, str]
"""What becomes of a text ("" for a heading), and a line of it that is safe to print."""


def place_of(item: Item) -> str:
    """Return the name of an item's row in messages."""
    return item.chosen.place if isinstance(item, Preference) else item.place


def rows_of(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Yield the items of each row. A conversation of which the chat template rewrites history has several."""
    return (list(group) for _, group in groupby(items, place_of))


def row_lines(tokenizer: PreTrainedTokenizerBase, row: Sequence[Item], by: str = LEARNED, most: int | None = None) -> Iterator[Line]:
    """Yield the lines of one row.

    Args:
        tokenizer: the model's tokenizer.
        row: the items of the row.
        by: what becomes of a response: it is learned, or scored (by a reward model).
        most: maximum number of characters of a text, of which the middle is left out; None: show all.
    """
    for number, item in enumerate(row):
        if isinstance(item, Prompt):
            yield from _prompt_lines(tokenizer, item, most)
        elif isinstance(item, Preference):
            margin = f", margin {item.margin:g}" if item.margin else ""
            for name, side in zip(NAMES, (item.chosen, item.rejected), strict=True):
                yield from _sample_lines(tokenizer, sample(side), f"{side.place}: {name}{margin}", by, most)
        else:
            split = f", sample {number + 1} of {len(row)} (the chat template rewrites what came before)" if len(row) > 1 else ""
            yield from _sample_lines(tokenizer, sample(item), item.place + split, by, most)
            yield from _text_lines(UNREAD, item.unread, most) if item.unread else ()


def spans(tokenizer: PreTrainedTokenizerBase, one: Sample, by: str = LEARNED) -> Iterator[tuple[str, str, int]]:
    """Yield (what becomes of it, text, number of tokens) of each run of tokens of a training sample: read, learned, masked.

    Args:
        tokenizer: the model's tokenizer.
        one: the sample.
        by: as of `row_lines`.
    """
    mask = [True] * one.response_length if one.loss_mask is None else one.loss_mask.tolist()
    runs = [(kind, len(list(run))) for kind, run in groupby([READ] * one.prompt_length + [by if learned else MASKED for learned in mask])]
    tokens, ends = one.tokens.tolist(), [0]
    for _, length in runs:
        ends.append(ends[-1] + length)
    texts = [decode(tokenizer, tokens[:end], finished=False) for end in ends]  # a token may be written otherwise at the start of a text
    for (kind, length), (start, end), (before, text) in zip(runs, pairwise(ends), pairwise(texts), strict=True):
        is_split = not text.startswith(before)  # a character ends in this run that has begun before it
        yield kind, decode(tokenizer, tokens[start:end], finished=False) if is_split else text[len(before) :], length


def counts(samples: Iterable[Sample], by: str = LEARNED) -> str:
    """Return how many tokens of samples are read, learned and masked; the prompts are read, and masked is what is read after them."""
    prompts = learned = whole = 0
    for one in samples:
        prompts, learned, whole = prompts + one.prompt_length, learned + one.loss_tokens, whole + len(one.tokens)
    masked = whole - prompts - learned
    return f"{_counted(whole, 'token')}: {prompts:,} {READ}, {learned:,} {by}, {masked:,} {MASKED}"


def summary(items: Sequence[Item], by: str = LEARNED) -> str:
    """Return how much data there is: prompts, or rows, samples and their tokens."""
    if isinstance(items[0], Prompt):  # those of a large file are not all tokenised
        return _counted(len(items), "prompt" if items[0].episode is None else "episode")
    kind = "pair" if isinstance(items[0], Preference) else "sample"
    rows, samples = sum(1 for _ in rows_of(items)), [one for item in items for one in _samples(item)]
    return f"{_counted(rows, 'row')}, {_counted(len(items), kind)}, {counts(samples, by)}"


def coloured(lines: Iterable[Line], colours: bool) -> Iterator[str]:
    """Yield lines as they are printed, each with its mark; `colours`: for a terminal."""
    for kind, text in lines:
        line = f"{kind:>{WIDTH}} | {text}" if kind else text
        colour = COLOURS.get(kind) if colours else None
        yield line if colour is None else f"{colour}{line}{PLAIN}"


def _samples(item: Item) -> list[Sample]:
    if isinstance(item, Prompt):
        return []
    return [sample(side) for side in ((item.chosen, item.rejected) if isinstance(item, Preference) else (item,))]


def _prompt_lines(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, most: int | None) -> Iterator[Line]:
    if prompt.episode is not None:
        yield "", f"{prompt.text}: the environment writes what is read"
        return
    yield "", escaped(f"{prompt.place}: a prompt of {_counted(len(prompt.ids), 'token')}")
    text = decode(tokenizer, prompt.tokens, finished=False)
    yield from _text_lines(READ, _folded(tokenizer, text, prompt.tokens, prompt.images), most)
    yield from _text_lines(ANSWER, text_of(prompt.answer), most)


def _sample_lines(tokenizer: PreTrainedTokenizerBase, one: Sample, title: str, by: str, most: int | None) -> Iterator[Line]:
    where = " (the score is read at the last one)" if by == SCORED else ""
    yield "", escaped(f"{title}: {counts([one], by)}{where}")
    for kind, text, _ in spans(tokenizer, one, by):
        yield from _text_lines(kind, _folded(tokenizer, text, one.tokens, one.images), most)


def _folded(tokenizer: PreTrainedTokenizerBase, text: str, tokens: Sequence[int] | np.ndarray, images: Sequence[PlacedImage]) -> str:
    """Return a text with one token for each image, and how many there are: the others say the same."""
    if not images:
        return text
    piece = str(tokenizer.convert_ids_to_tokens(int(tokens[images[0].start])))
    return re.sub(f"(?:{re.escape(piece)}){{2,}}", lambda run: f"{piece} x {len(run[0]) // len(piece)}", text)


def _text_lines(kind: str, text: str, most: int | None) -> Iterator[Line]:
    """Yield the lines of a text; one that ends with a line break ends with an empty line."""
    if most is not None and len(text) > most:
        text = f"{text[: most // 2]} [{len(text) - 2 * (most // 2):,} characters left out] {text[-(most // 2) :]}"
    yield from ((kind, line) for line in escaped(text).split("\n"))


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"

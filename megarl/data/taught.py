"""Responses with a teacher's likeliest tokens at each position, for supervised distillation: token ids, since log-probs are of tokens.

Axes: T tokens of a response, K tokens that the teacher names at each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.config import ConfigError, SftData, TaughtSource
from megarl.data.conversations import Conversation
from megarl.data.files import taken_rows
from megarl.data.images import check_folder
from megarl.data.intake import UNUSED, Intake, TooLong

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROMPT, RESPONSE, IDS, LOGPS = "prompt_ids", "response_ids", "top_ids", "top_logps"
COLUMNS = (PROMPT, RESPONSE, IDS, LOGPS)
LEAST = 1e-6  # probability of all other tokens: what float32 log-probs of the named ones leave of 1 is not known more exactly
ABOVE = 1e-3  # by how much the named probabilities may exceed 1, as of log-probs that were written in 16 bits or with few digits


def load_taught(source: TaughtSource, tokenizer: PreTrainedTokenizerBase, data: SftData, max_tokens: int, key: str) -> list[Conversation]:
    """Return the training samples of a file of tokens and a teacher's log-probs.

    Args:
        source: the file.
        tokenizer: the model's tokenizer, whose ids the file has.
        data: what happens to bad rows.
        max_tokens: maximum length of one sample.
        key: the source's dotted key, such as "data.train".

    Raises:
        ConfigError: one line: the first row that is refused; rows that name different numbers of tokens; a file without rows; a folder of
            images, which nothing reads.
    """
    check_folder(source, None, key)
    intake, vocabulary, widths = Intake.of(data), len(tokenizer), dict[int, str]()

    def conversation(item: tuple[str, dict[str, Any]]) -> Conversation:
        place, row = item
        intake.note(UNUSED, row.keys() - {*COLUMNS, "finish_reason", *(name.partition(".")[0] for name in source.where)})
        for name in COLUMNS:
            if row.get(name) is None:
                raise ConfigError(f"{place}: there is no column {name} (a row has {', '.join(COLUMNS)})")
        prompt, response = (ids(row[name], f"{place}: {name}", vocabulary, axes=1) for name in (PROMPT, RESPONSE))
        taught_TC = taught(row, place, len(response), vocabulary)
        if (whole := len(prompt) + len(response)) > max_tokens:
            raise TooLong(f"{place}: prompt and response are {whole} tokens, more than sft.max_tokens={max_tokens}")
        widths.setdefault((taught_TC.shape[1] - 1) // 2, place)
        return Conversation(np.concatenate([prompt, response]).astype(np.int32), len(prompt), place=place, taught=taught_TC)

    conversations = intake.made(taken_rows(source, key, intake.refuse), conversation)
    if len(widths) > 1:
        (one, place), (other, there), *_ = widths.items()
        raise ConfigError(f"{there}: {IDS} names {other} tokens for each of the response, and {place} {one}; all rows must name as many")
    if not conversations and not intake.dropped:
        raise ConfigError(f"{key}.path: {source.path} holds no rows{f' after the first {source.skip}' if source.skip else ''}")
    intake.tell(len(conversations), key, f"sft.max_tokens={max_tokens}")
    return conversations


def taught(row: dict[str, Any], place: str, response: int, vocabulary: int) -> np.ndarray:
    """Read what the teacher says of each token of a response.

    Args:
        row: the row's columns.
        place: its name in messages.
        response: T.
        vocabulary: the number of token ids.

    Returns:
        float32 [T, 2 K + 1]: the ids (exact in float32), their log-probs, and that of all other tokens together, which is 1 less the named
        ones and at least 1e-6.
    """
    token_TK, logp_TK = ids(row[IDS], f"{place}: {IDS}", vocabulary, axes=2), numbers(row[LOGPS], f"{place}: {LOGPS}", "iuf", axes=2)
    for name, array in ((IDS, token_TK), (LOGPS, logp_TK)):
        if len(array) != response:
            raise ConfigError(f"{place}: {name} has {len(array)} positions, and {RESPONSE} {response} tokens")
    if token_TK.shape != logp_TK.shape:
        raise ConfigError(f"{place}: {IDS} names {token_TK.shape[1]} tokens for each of the response, and {LOGPS} {logp_TK.shape[1]}")
    if len(twice := np.flatnonzero((np.diff(np.sort(token_TK, 1), axis=1) == 0).any(1))):
        raise ConfigError(f"{place}: {IDS} names a token twice at position {twice[0]}")
    if not (logp_TK <= 0).all():  # nor is one that is no number
        raise ConfigError(f"{place}: {LOGPS} has {logp_TK[~(logp_TK <= 0)][0]:g}; a log-prob is at most 0")
    mass_T = np.exp(logp_TK.astype(np.float64)).sum(1)
    if mass_T.max() > 1 + ABOVE:
        raise ConfigError(f"{place}: the probabilities of {LOGPS} at position {mass_T.argmax()} sum to {mass_T.max():.4f}, more than 1")
    return with_rest(token_TK, logp_TK)


def with_rest(token_TK: np.ndarray, logp_TK: np.ndarray) -> np.ndarray:
    """Return named tokens, their log-probs and that of all others together (1 less the named ones, at least 1e-6), float32 [T, 2 K + 1]."""
    rest_T = np.log(np.maximum(1 - np.exp(logp_TK.astype(np.float64)).sum(1), LEAST))
    return np.concatenate([token_TK, logp_TK, rest_T[:, None]], axis=1, dtype=np.float32)


def ids(value: Any, what: str, vocabulary: int, axes: int) -> np.ndarray:
    """Read token ids.

    Args:
        value: a list of them, or of lists of as many each.
        what: the beginning of an error's message.
        vocabulary: the number of token ids.
        axes: 1 for a list, 2 for lists.

    Raises:
        ConfigError: it is no such list, or one of them is not of the vocabulary.
    """
    array = numbers(value, what, "iu", axes)
    if array.min() < 0 or array.max() >= vocabulary:
        bad = array[(array < 0) | (array >= vocabulary)][0]
        raise ConfigError(f"{what} has {bad}; the tokenizer's ids are 0 to {vocabulary - 1}")
    return array


def numbers(value: Any, what: str, kinds: str, axes: int) -> np.ndarray:
    """Read a list of numbers, or of lists of as many each.

    Args:
        value: the list.
        what: the beginning of an error's message.
        kinds: numpy's kinds of number that it may have: "iu" for integers, "iuf" for all.
        axes: 1 for a list, 2 for lists.

    Raises:
        ConfigError: it is no such list, or empty.
    """
    try:
        array = np.array(value)
    except (ValueError, TypeError, OverflowError):  # lists of different lengths
        array = np.array(None)
    if array.ndim != axes or array.dtype.kind not in kinds or not array.size:
        form = "a list of" if axes == 1 else "a list of lists, all as long, of"
        raise ConfigError(f"{what} is not {form} {'numbers' if 'f' in kinds else 'token ids'}: {value!r:.80}")
    return array

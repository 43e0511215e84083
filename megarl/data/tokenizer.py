"""The tokenizer of a Hugging Face directory, loaded offline and without running code from that directory."""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.config import ConfigError
from megarl.data.intake import TooLong
from megarl.errors import Absent
from megarl.text.strict_json import read_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CONFIG = "tokenizer_config.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
MAX_CONFIG = 64 << 20  # bytes
RARE = "".join(map(chr, range(0x12000, 0x12040)))  # cuneiform, which only a tokenizer that falls back to bytes has


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of `path`.

    Raises ConfigError if it does not load without running the directory's code, or if it has no end token; Absent if there is none.
    """
    tokenizer = _load(path)
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"model.path: the tokenizer in {path} has no eos_token, which ends each response")
    return tokenizer


def _load(path: Path) -> PreTrainedTokenizerBase:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a notebook may need the hub for other things; `local_files_only` holds anyway
    if not any((path / name).is_file() for name in TOKENIZER_FILES):  # transformers would create one without a single token
        raise Absent(f"model.path: no tokenizer in {path} (none of {', '.join(TOKENIZER_FILES)})")
    try:
        if (path / "tokenizer.json").is_file():
            # The class of all fast tokenizers. AutoTokenizer would find the same one, but imports torch, which takes 3 s more.
            from transformers import PreTrainedTokenizerFast

            tokenizer = PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
            # transformers/tokenization_utils_base.py:1780 ignores the key beside a tokenizer.json, and DeepSeek's begins no text by itself.
            adds_bos = (path / CONFIG).is_file() and read_json(path / CONFIG, MAX_CONFIG).get("add_bos_token") is True
            if adds_bos and tokenizer.bos_token_id not in (None, *tokenizer("a")["input_ids"]):
                tokenizer.add_bos_token = True
            return tokenizer
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises plain Exceptions
        raise ConfigError(f"model.path: no usable tokenizer in {path}: {first_line(error)}") from None


def check_same_tokenizer(path_a: Path, key_a: str, path_b: Path, key_b: str) -> None:
    """Check that two directories' tokenizers assign the same meaning to tokens.

    The ids of all tokens and the special tokens are compared, not the files.

    Args:
        path_a: a Hugging Face directory.
        key_a: the setting that gave `path_a`.
        path_b: the other directory.
        key_b: the setting that gave `path_b`.

    Raises:
        ConfigError: the tokenizers differ (the message has the first difference), or a directory has no usable tokenizer.
    """
    a, b = _tokenizer_of(path_a, key_a), _tokenizer_of(path_b, key_b)
    ids = {**b.get_vocab(), **a.get_vocab()}
    compared = [
        (a.get_vocab(), b.get_vocab(), sorted(ids, key=lambda token: ids[token]), "token {!r}"),
        (a.special_tokens_map, b.special_tokens_map, sorted({**a.special_tokens_map, **b.special_tokens_map}), "{}"),
    ]
    for left, right, names, called in compared:
        for name in names:
            if left.get(name) != right.get(name):
                raise ConfigError(
                    f"{key_a}: its tokenizer differs from {key_b}'s: {called.format(name)} is {left.get(name)!r} in {path_a} "
                    f"and {right.get(name)!r} in {path_b}"
                )


def _tokenizer_of(path: Path, key: str) -> PreTrainedTokenizerBase:
    try:
        return load_tokenizer(path)
    except ConfigError as error:
        kind = Absent if isinstance(error, Absent) else ConfigError
        raise kind(str(error).replace("model.path", key, 1)) from None


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, special: bool) -> list[list[int]]:
    """Return the tokens of each text.

    Args:
        tokenizer: the model's tokenizer.
        texts: raw texts, or rendered chats.
        special: begin each text with the special tokens that the tokenizer puts before a raw text, unless it begins with them already; a
            rendered chat already has them. What the tokenizer would put after a text is left out, since something follows it.
    """
    tokens: list[list[int]] = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False)[
        "input_ids"
    ]
    if not special or not (opening := list(_opening(tokenizer))):
        return tokens
    return [ids if ids[: len(opening)] == opening else [*opening, *ids] for ids in tokens]


@lru_cache(maxsize=8)
def _opening(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the special tokens that the tokenizer puts before a raw text."""
    special = set(tokenizer.all_special_ids)
    return tuple(takewhile(special.__contains__, tokenizer("a")["input_ids"]))


@lru_cache(maxsize=8)
def special_tokens(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Return the pattern of a special token in a text."""
    tokens = {str(token) for token in tokenizer.added_tokens_decoder.values() if token.special} | set(tokenizer.all_special_tokens)
    return re.compile("|".join(map(re.escape, sorted(filter(None, tokens), key=len, reverse=True))) or r"(?!)")


def unended(text: str, *ends: str) -> str:
    """Return a text without the end tokens, of `ends`, that it already has at its end."""
    while (end := next((end for end in ends if text.rstrip().endswith(end)), None)) is not None:
        text = text.rstrip().removesuffix(end)
    return text


class _Alphabet(dict[str, bool]):
    """Whether a tokenizer has a character, found out once for each: its tokens decode to it."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def __missing__(self, character: str) -> bool:
        self[character] = _plain(_written(self._tokenizer, character)) == _plain(character)
        return self[character]


@lru_cache(maxsize=8)
def _alphabet(tokenizer: PreTrainedTokenizerBase) -> _Alphabet | None:
    """Return the characters of a tokenizer; None if it has all that there are."""
    return None if RARE in _written(tokenizer, RARE) else _Alphabet(tokenizer)


def _written(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """Return the text that the tokens of a text decode to."""
    return decode(tokenizer, encode(tokenizer, [text], special=False)[0], finished=False)


def _plain(text: str) -> str:
    """Return a text without the differences that tokenizers level: those of white space, compatible characters and case."""
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())


def unknown_characters(tokenizer: PreTrainedTokenizerBase, text: str) -> str:
    """Return the characters of a text that the tokenizer does not have, so that its tokens decode to something else."""
    if (alphabet := _alphabet(tokenizer)) is None or not (unknown := {one for one in set(text) if not alphabet[one]}):
        return ""
    if _plain(_written(tokenizer, text)) == _plain(text):  # it has them in tokens of several characters
        return ""
    return "".join(one for one in dict.fromkeys(text) if one in unknown)


def doubtful_characters(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return the pattern of characters that the tokenizer may not have: all but its ASCII ones; None if it has all that there are."""
    if (alphabet := _alphabet(tokenizer)) is None:
        return None
    return "[^" + "".join(f"\\x{number:02x}" for number in range(128) if alphabet[chr(number)]) + "]"


def check_known(tokenizer: PreTrainedTokenizerBase, text: str, place: str) -> None:
    """Check that the tokenizer has every character of a text.

    Args:
        tokenizer: the model's tokenizer.
        text: the text.
        place: the text's name in messages.

    Raises:
        ConfigError: it does not; the message starts with `place`.
    """
    if unknown := unknown_characters(tokenizer, text):
        raise ConfigError(f"{place} has characters that the tokenizer does not have: {unknown!r:.80}")


def check_size(tokenizer: PreTrainedTokenizerBase, text: str, most: int, place: str, limit_key: str) -> None:
    """Refuse a text with more characters than the allowed number of tokens could have, since tokenising it could take forever.

    Args:
        tokenizer: the model's tokenizer.
        text: the text to be tokenised.
        most: maximum number of tokens.
        place: the text's name in messages.
        limit_key: the setting that gives the limit.

    Raises:
        TooLong: the text is too long; the message starts with `place`.
    """
    longest = _longest_token(tokenizer)
    if len(text) > most * longest:
        raise TooLong(f"{place}: {len(text):,} characters are more than {limit_key}={most} tokens of at most {longest}")


@lru_cache(maxsize=8)
def _longest_token(tokenizer: PreTrainedTokenizerBase) -> int:
    return max(map(len, tokenizer.get_vocab()))


def decode(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], *, finished: bool) -> str:
    """Return the text of a response. Special tokens inside it stay visible, so that no verifier takes `12<|pad|>3` for 123.

    Args:
        tokenizer: the model's tokenizer.
        tokens: the response's tokens.
        finished: the response ended by itself; its last token, which ended it, is left out.
    """
    body = tokens[:-1] if finished else tokens
    return tokenizer.decode(list(body), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def first_line(error: Any) -> str:
    """Return the first line of an error's message, at most 300 characters."""
    text = str(error).strip()
    return (text.splitlines()[0] if text else type(error).__name__)[:300]

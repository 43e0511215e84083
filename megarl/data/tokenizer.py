"""The tokenizer of a Hugging Face directory: offline, and never with code from that directory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.config import ConfigError
from megarl.data.bounds import in_memory, within_cpu_time
from megarl.data.overlong import TooLong
from megarl.imports import uncollected
from megarl.light_transformers import light_transformers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, str]  # of a chat: role and content
TEMPLATE_S, CHAT_S, TEMPLATE_MB = 2.0, 0.005, 384  # for rendering: CPU time of a call, and of each chat; memory
_PROBE = "f7Zq0-prompt"  # no template has it


TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer of `path`. Raises ConfigError where there is none that loads without running code of the directory, or none that
    has an end token."""
    tokenizer = _load(path)
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"model.path: the tokenizer in {path} has no eos_token, which ends each response")
    return tokenizer


def _load(path: Path) -> PreTrainedTokenizerBase:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if not any((path / name).is_file() for name in TOKENIZER_FILES):  # transformers would make one without a single token
        raise ConfigError(f"model.path: no tokenizer in {path} (none of {', '.join(TOKENIZER_FILES)})")
    try:
        if (path / "tokenizer.json").is_file():
            # The class that every fast tokenizer is made of. AutoTokenizer finds the same one, and takes 7 s more to import.
            with uncollected(), light_transformers():
                from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises plain ones
        raise ConfigError(f"model.path: no usable tokenizer in {path}: {first_line(error)}") from None


def check_same_tokenizer(path_a: Path, key_a: str, path_b: Path, key_b: str) -> None:
    """Checks that the tokens of one directory mean the same in the other.

    Compared by content: the id of every token, and the special tokens.

    Args:
        path_a: a Hugging Face directory.
        key_a: the setting that gave it.
        path_b: the other directory.
        key_b: the setting that gave that one.

    Raises:
        ConfigError: with the first difference, or where a directory has no usable tokenizer.
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
        raise ConfigError(str(error).replace("model.path", key, 1)) from None


def render_chats(
    tokenizer: PreTrainedTokenizerBase, chats: Sequence[list[Message]], tools: Sequence[dict[str, Any]] | None = None
) -> list[str]:
    """Each chat as the text after which the assistant speaks.

    Args:
        tokenizer: has the template.
        chats: messages.
        tools: the schemas of those that the assistant may call; None: none.

    Raises:
        TimeoutError, MemoryError: the template loops or swells (in the main thread).
        Exception: whatever the template raises.
    """
    with in_memory(TEMPLATE_MB), within_cpu_time(TEMPLATE_S + len(chats) * CHAT_S):
        given = None if tools is None else list(tools)
        return tokenizer.apply_chat_template(list(chats), tools=given, tokenize=False, add_generation_prompt=True)


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, special: bool) -> list[list[int]]:
    """Tokens of each text.

    Args:
        tokenizer: of the model.
        texts: raw, or rendered chats.
        special: add what the tokenizer puts around a raw text; a rendered chat already has it.
    """
    return tokenizer(list(texts), add_special_tokens=special, return_attention_mask=False, return_token_type_ids=False)["input_ids"]


def check_template(tokenizer: PreTrainedTokenizerBase, key: str) -> None:
    """ConfigError, starting with `key`, where the chat template leaves out what the user says, or could take for ever.

    One that raises is left to the prompts.
    """
    from jinja2 import Environment, TemplateSyntaxError

    templates = tokenizer.chat_template.values() if isinstance(tokenizer.chat_template, dict) else [tokenizer.chat_template]
    with suppress(TemplateSyntaxError):
        if any(token[1:] == ("operator", "**") for template in templates for token in Environment().lex(template)):
            raise ConfigError(f"{key}: the model's chat template raises to a power (**), which can take forever")
    try:
        [said] = render_chats(tokenizer, [[{"role": "user", "content": _PROBE}]])
    except (TimeoutError, MemoryError) as error:
        raise ConfigError(f"{key}: the model's chat template: {first_line(error)}") from None
    except Exception:  # a template may raise anything, and may want more than one message
        return
    if _PROBE not in said:
        raise ConfigError(f"{key}: the model's chat template leaves the prompt out: it renders {_PROBE!r} as {said!r:.200}")


def check_size(tokenizer: PreTrainedTokenizerBase, text: str, most: int, place: str, limit_key: str) -> None:
    """Refuses a text with more characters than its tokens could have: tokenising it could take for ever.

    Args:
        tokenizer: of the model.
        text: to be tokenised.
        most: tokens that it may have.
        place: names it.
        limit_key: the setting that has the limit.

    Raises:
        TooLong: starting with `place`.
    """
    longest = _longest_token(tokenizer)
    if len(text) > most * longest:
        raise TooLong(f"{place}: {len(text):,} characters are more than {limit_key}={most} tokens of at most {longest}")


@lru_cache(maxsize=8)
def _longest_token(tokenizer: PreTrainedTokenizerBase) -> int:
    return max(map(len, tokenizer.get_vocab()))


def decode(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], *, finished: bool) -> str:
    """The text of a response. Special tokens inside it stay visible, so that no verifier takes `12<|pad|>3` for 123.

    Args:
        tokenizer: of the model.
        tokens: of the response.
        finished: it ended by itself: its last token, which ended it, is left out.
    """
    kept = tokens[:-1] if finished else tokens
    return tokenizer.decode(list(kept), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def first_line(error: Any) -> str:
    """What an error says, as one line of at most 300 characters."""
    text = str(error).strip()
    return (text.splitlines()[0] if text else type(error).__name__)[:300]

"""The tokenizer of a Hugging Face directory, loaded offline and without running code from that directory."""

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

Message = dict[str, str]  # one message of a chat: role and content
TEMPLATE_S, CHAT_S, TEMPLATE_MB = 2.0, 0.005, 384  # limits of rendering: CPU time per call, plus per chat; memory
_PROBE = "f7Zq0-prompt"  # a text that no template contains


TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def load_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of `path`.

    Raises ConfigError if there is none that loads without running the directory's code, or if it has no end token.
    """
    tokenizer = _load(path)
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"model.path: the tokenizer in {path} has no eos_token, which ends each response")
    return tokenizer


def _load(path: Path) -> PreTrainedTokenizerBase:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a notebook may need the hub for other things; `local_files_only` holds anyway
    if not any((path / name).is_file() for name in TOKENIZER_FILES):  # transformers would create one without a single token
        raise ConfigError(f"model.path: no tokenizer in {path} (none of {', '.join(TOKENIZER_FILES)})")
    try:
        if (path / "tokenizer.json").is_file():
            # The class of all fast tokenizers. AutoTokenizer would find the same one, but takes 7 s longer to import.
            with uncollected(), light_transformers():
                from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

            return PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
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
        raise ConfigError(str(error).replace("model.path", key, 1)) from None


def render_chats(
    tokenizer: PreTrainedTokenizerBase, chats: Sequence[list[Message]], tools: Sequence[dict[str, Any]] | None = None
) -> list[str]:
    """Render each chat as the text up to where the assistant's next message begins.

    Args:
        tokenizer: the tokenizer with the chat template.
        chats: the messages of each chat.
        tools: the schemas of the tools that the assistant may call; None: none.

    Raises:
        TimeoutError, MemoryError: the template takes too much CPU time, or (checked only in the main thread) memory.
        Exception: whatever the template raises.
    """
    with in_memory(TEMPLATE_MB), within_cpu_time(TEMPLATE_S + len(chats) * CHAT_S):
        given = None if tools is None else list(tools)
        return tokenizer.apply_chat_template(list(chats), tools=given, tokenize=False, add_generation_prompt=True)


def encode(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], *, special: bool) -> list[list[int]]:
    """Return the tokens of each text.

    Args:
        tokenizer: the model's tokenizer.
        texts: raw texts, or rendered chats.
        special: add the special tokens that the tokenizer puts around a raw text; a rendered chat already has them.
    """
    return tokenizer(list(texts), add_special_tokens=special, return_attention_mask=False, return_token_type_ids=False)["input_ids"]


def check_template(tokenizer: PreTrainedTokenizerBase, key: str) -> None:
    """Raise ConfigError, starting with `key`, if the chat template leaves out the user's message or could run forever.

    A template that raises is not refused here, but when the prompts are rendered.
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
    except Exception:  # a template may raise anything, and may require more than one message
        return
    if _PROBE not in said:
        raise ConfigError(f"{key}: the model's chat template leaves the prompt out: it renders {_PROBE!r} as {said!r:.200}")


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
    kept = tokens[:-1] if finished else tokens
    return tokenizer.decode(list(kept), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def first_line(error: Any) -> str:
    """Return the first line of an error's message, at most 300 characters."""
    text = str(error).strip()
    return (text.splitlines()[0] if text else type(error).__name__)[:300]

"""Demonstrations for supervised training, made from prompts and their reference answers.

Imperfect ones are made on purpose and openly: a tiny model trained on clean demonstrations leaves reinforcement learning nothing to do.
With the last steps of its training on a share of demonstrations that copy instead of solving, it stands in for a weak base model.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from megarl.config import ConfigError
from megarl.data.prompts import Prompt
from megarl.data.tokenizer import encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Kind = Literal["answer", "chain_sum_steps"]
NUMBER_CHAIN = re.compile(r"-?\d+(?: [+-] -?\d+)+")


@dataclass(frozen=True, slots=True)
class Demonstration:
    """A prompt and the response to learn."""

    tokens: np.ndarray  # int32 [prompt + response], the end token included
    prompt_length: int


def demonstration_text(prompt: Prompt, kind: Kind) -> str:
    """The right response: the reference answer, or for chain_sum the steps to it ("4 - 1 - 7" -> "4-1=3;3-7=-4").

    Raises ValueError where the question is not of that kind.
    """
    return prompt.answer if kind == "answer" else _steps(prompt, solve=True)


def copied_text(prompt: Prompt, kind: Kind) -> str:
    """The wrong response of a model that copies: the question's last word forward, or steps that keep their left number ("4-1=4;4-7=4")."""
    return prompt.text.split()[-1] if kind == "answer" else _steps(prompt, solve=False)


def _steps(prompt: Prompt, *, solve: bool) -> str:
    expression = NUMBER_CHAIN.search(prompt.text)
    if expression is None:
        raise ValueError(f"prompt {prompt.id} has no sum to work out: {prompt.text!r}")
    first, *rest = expression.group().split(" ")
    total, steps = int(first), []
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        result = (total + int(term) if sign == "+" else total - int(term)) if solve else total
        steps.append(f"{total}{sign}{term}={result}")
        total = result
    return ";".join(steps)


def demonstrations(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, kind: Kind, *, copied: bool, max_tokens: int, key: str
) -> list[Demonstration]:
    """One demonstration a prompt, in their order; `copied` ones are wrong on purpose.

    Raises ConfigError, starting with `key`, for a question of another kind and for a demonstration longer than `max_tokens`.
    """
    text = copied_text if copied else demonstration_text
    try:
        texts = [text(prompt, kind) for prompt in prompts]
    except ValueError as error:
        raise ConfigError(f"{key}: demonstration={kind}: {error}") from None
    made = []
    for prompt, response in zip(prompts, encode(tokenizer, texts, special=False), strict=True):
        tokens = np.array([*prompt.ids, *response, tokenizer.eos_token_id], dtype=np.int32)
        if len(tokens) > max_tokens:
            raise ConfigError(f"{key}: prompt {prompt.id} and its response are {len(tokens)} tokens, more than sft.max_tokens={max_tokens}")
        made.append(Demonstration(tokens, len(prompt.ids)))
    return made


def mix(
    clean: Sequence[Demonstration], copied: Sequence[Demonstration], indices: Sequence[int], share: float, seed: int, step: int
) -> list[Demonstration]:
    """The demonstrations `indices` of one step, each a copied one with probability `share`. The same (seed, step) draws the same."""
    draw = random.Random(f"{seed}:{step}")
    return [copied[index] if draw.random() < share else clean[index] for index in indices]

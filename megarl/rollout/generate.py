"""Responses to a list of prompts, with any engine."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megarl.batch import Sample
from megarl.config import RolloutSettings
from megarl.data.tokenizer import decode
from megarl.rollout.engine import Request, RequestId
from megarl.rollout.responder import Responder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class TokenPrompt:
    """What an engine needs of a prompt: a name that is unique in the call, and the tokens."""

    id: int | str
    tokens: list[int]


@dataclass(frozen=True)
class Sampling:
    """How to respond."""

    n: int  # responses a prompt
    temperature: float  # 0: greedy
    max_tokens: int  # longest response
    seed: int  # with the prompt's id and the sample's number it fixes the random draws, on whatever replica and in whatever order
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop_token_ids: Sequence[int] = ()
    stop: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.n < 1 or self.max_tokens < 1 or self.temperature < 0:
            given = f"n={self.n}, max_tokens={self.max_tokens}, temperature={self.temperature}"
            raise ValueError(f"sampling: {given}: must be at least 1, 1 and 0")

    def within(self, settings: RolloutSettings) -> Sampling:
        """The same with what the settings say of which tokens may be drawn and what ends a response."""
        names = ("top_p", "top_k", "min_p", "stop_token_ids", "stop")
        return replace(self, **{name: getattr(settings, name) for name in names})


@dataclass(frozen=True)
class Generated:
    """The responses to one prompt, sample 0 .. n-1."""

    prompt_id: int | str
    samples: list[Sample]


def request_seed(seed: int, prompt_id: int | str, sample: int, turn: int = 0) -> int:
    """The seed of one response, which depends on nothing else.

    Args:
        seed: of the call.
        prompt_id: the caller's name for the prompt.
        sample: which of the responses to it.
        turn: which of an episode's turns.

    Returns:
        63 bits.
    """
    text = (f"{seed}/{prompt_id!r}/{sample}" + (f"/{turn}" if turn else "")).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


async def generate(responder: Responder, prompts: Sequence[TokenPrompt], sampling: Sampling, timeout_s: float) -> list[Generated]:
    """Responses to each prompt. Several calls may be under way at once.

    The same call gives the same tokens and log-probs where what an engine computes does not depend on what it computes beside it. The
    end-of-sequence token is part of a response that ends by itself. Whatever makes the call fail, its requests are withdrawn.

    Args:
        responder: of the engine.
        prompts: each with an id of its own.
        sampling: `n` responses to each, and how.
        timeout_s: for all of them together.

    Returns:
        The responses in the order of the prompts.

    Raises:
        ValueError: prompts that do not fit, or two of one id.
        RolloutTimeout: with the number of responses that are late.
        RolloutError: what else the engine raises.
    """
    if len({prompt.id for prompt in prompts}) != len(prompts):
        raise ValueError("two prompts of one call have the same id, and would draw the same responses")
    requests = [
        request_for((prompt.id, number), prompt.tokens, sampling.max_tokens, sampling, request_seed(sampling.seed, prompt.id, number))
        for prompt in prompts
        for number in range(sampling.n)
    ]
    samples = iter(await responder.all(requests, timeout_s))
    return [Generated(prompt.id, [next(samples) for _ in range(sampling.n)]) for prompt in prompts]


def request_for(id_: RequestId, tokens: list[int], max_tokens: int, sampling: Sampling, seed: int) -> Request:
    """What an engine is asked for one response.

    Args:
        id_: the caller's name for it.
        tokens: the prompt.
        max_tokens: most that may follow.
        sampling: how they are drawn.
        seed: of the draws.
    """
    return Request(
        id_,
        tokens,
        max_tokens,
        sampling.temperature,
        seed,
        sampling.top_p,
        sampling.top_k,
        sampling.min_p,
        sampling.stop_token_ids,
        sampling.stop,
    )


def text_of(said: Sample, sampling: Sampling, tokenizer: PreTrainedTokenizerBase, ends: Collection[int]) -> str:
    """The text of a response, or a turn, without the token that ended it; a token that completed a stop text stays.

    Args:
        said: the response.
        sampling: how it was asked for; has the texts and tokens that end responses.
        tokenizer: of the model.
        ends: the model's tokens that end a response beside the tokenizer's (`models.hf.end_tokens`).
    """
    tokens = said.tokens[said.prompt_length :].tolist()
    by_token = not sampling.stop or tokens[-1] in (tokenizer.eos_token_id, *ends, *sampling.stop_token_ids)
    return decode(tokenizer, tokens, finished=said.finish_reason == "stop" and by_token)

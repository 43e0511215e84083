"""Responses to a list of prompts, with any engine."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from megarl.batch import Sample
from megarl.config import RolloutSettings
from megarl.data.tokenizer import decode
from megarl.engines.engine import Request, RequestId
from megarl.engines.responder import Responder
from megarl.images import PlacedImage

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class TokenPrompt:
    """A tokenised prompt, with an id that is unique within the call."""

    id: int | str
    tokens: list[int]
    images: Sequence[PlacedImage] = field(default=(), kw_only=True)  # in order; their tokens are among the prompt's


@dataclass(frozen=True)
class Sampling:
    """How responses are sampled."""

    n: int  # responses per prompt
    temperature: float  # 0: greedy
    max_tokens: int  # longest response
    seed: int  # with the prompt's id and the sample's number it fixes the random draws, on any replica and in any order
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
        """Return a copy with the settings' top-p, top-k, min-p, stop tokens and stop texts."""
        names = ("top_p", "top_k", "min_p", "stop_token_ids", "stop")
        return replace(self, **{name: getattr(settings, name) for name in names})


@dataclass(frozen=True)
class Generated:
    """The responses to one prompt, samples 0 .. n-1."""

    prompt_id: int | str
    samples: list[Sample]


def request_seed(seed: int, prompt_id: int | str, sample: int, turn: int = 0) -> int:
    """Return the seed of one response, which depends on these arguments alone.

    Args:
        seed: the seed of the call.
        prompt_id: the caller's id of the prompt.
        sample: the response's number among those to this prompt.
        turn: the turn's number in its episode.

    Returns:
        A seed of 63 bits.
    """
    text = (f"{seed}/{prompt_id!r}/{sample}" + (f"/{turn}" if turn else "")).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


async def generate(responder: Responder, prompts: Sequence[TokenPrompt], sampling: Sampling, timeout_s: float) -> list[Generated]:
    """Generate responses to each prompt. Several calls may run at once.

    The same call returns the same tokens and log-probs if the engine's results do not depend on what it batches together. A response
    that ends by itself includes the end-of-sequence token. If the call fails, for whatever reason, its requests are withdrawn.

    Args:
        responder: the engine's responder.
        prompts: the prompts, each with a unique id.
        sampling: how many responses to each prompt, and how they are sampled.
        timeout_s: the time limit for all responses together.

    Returns:
        The responses in the order of the prompts.

    Raises:
        ValueError: a prompt is too long, or two have the same id.
        RolloutTimeout: the message has the number of late responses.
        RolloutError: any other failure of the engine.
    """
    if len({prompt.id for prompt in prompts}) != len(prompts):
        raise ValueError("two prompts of one call have the same id, and would draw the same responses")
    requests = [
        replace(
            request_for((prompt.id, number), prompt.tokens, sampling.max_tokens, sampling, request_seed(sampling.seed, prompt.id, number)),
            images=prompt.images,
        )
        for prompt in prompts
        for number in range(sampling.n)
    ]
    samples = iter(await responder.all(requests, timeout_s))
    return [Generated(prompt.id, [next(samples) for _ in range(sampling.n)]) for prompt in prompts]


def request_for(id_: RequestId, tokens: list[int], max_tokens: int, sampling: Sampling, seed: int) -> Request:
    """Return the request to an engine for one response.

    Args:
        id_: the caller's id of the request.
        tokens: the prompt.
        max_tokens: the longest response.
        sampling: how it is sampled; `n`, `max_tokens` and `seed` are ignored.
        seed: the seed of this response.
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


def text_of(sample: Sample, sampling: Sampling, tokenizer: PreTrainedTokenizerBase, ends: Collection[int]) -> str:
    """Return the text of a response or turn, without its end token; a token that completed a stop text stays.

    Args:
        sample: the response.
        sampling: how it was sampled; has the texts and tokens that end responses.
        tokenizer: the model's tokenizer.
        ends: the model's end tokens besides the tokenizer's (`models.hf.end_tokens`).
    """
    tokens = sample.tokens[sample.prompt_length :].tolist()
    by_token = not (sampling.stop and tokens) or tokens[-1] in (tokenizer.eos_token_id, *ends, *sampling.stop_token_ids)
    return decode(tokenizer, tokens, finished=sample.finish_reason == "stop" and by_token)

"""Translate requests to vLLM's sampling parameters, and its outputs to samples."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from megarl.batch import Sample, VersionSpan
from megarl.engines.engine import Request, RolloutError, TokenScores

BY_POSITION = "megarl_by_position"  # a key of SamplingParams.extra_args


def check_request(request: Request, limit: int) -> None:
    """Raise ValueError if prompt and response together could exceed `limit` tokens, or the prompt is empty."""
    if not request.tokens or len(request.tokens) + request.max_tokens > limit:
        size = f"{len(request.tokens)} tokens and up to {request.max_tokens} more"
        raise ValueError(f"request {request.id!r}: {size}; the engine takes 1 + 1 to {limit} in all")


def sampling_parameters(request: Request) -> Any:
    """Return vLLM's SamplingParams for a request."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        stop_token_ids=list(request.stop_token_ids),
        stop=list(request.stop),
        max_tokens=request.max_tokens,
        seed=request.seed if request.temperature else None,
        extra_args={BY_POSITION: True} if request.by_position else None,
        routed_experts_prompt_start=request.experts_from,
        logprobs=0,  # of the sampled token only
        flat_logprobs=True,
        detokenize=bool(request.stop),
        skip_special_tokens=False,  # a stop text may be a special token
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def sample_of(request: Request, output: Any, versions: Sequence[VersionSpan], label: str) -> Sample:
    """Return the sample in vLLM's final output. An aborted response may be empty, and then has no routed experts.

    Args:
        request: the request.
        output: vLLM's RequestOutput for it.
        versions: the weight versions that the response was sampled from.
        label: names the engine in an error.

    Raises:
        RolloutError: the response ended for an unknown reason, or lacks routed experts of some tokens.
    """
    (response,) = output.outputs
    if response.finish_reason not in ("stop", "length", "abort"):
        raise RolloutError(f"{label}: request {request.id!r} ended with {response.finish_reason!r}")
    tokens = np.array([*request.tokens, *response.token_ids], dtype=np.int32)
    logp = np.array(response.logprobs.logprobs, dtype=np.float32)
    assert list(response.logprobs.token_ids) == list(response.token_ids), "vLLM returns one log-prob a token: the sampled one's"
    routed_experts = response.routed_experts
    if routed_experts is not None and routed_experts.shape[0] != len(tokens) - 1 - request.experts_from:
        rows = f"{routed_experts.shape[0]} rows of routed experts from token {request.experts_from} on"
        raise RolloutError(f"{label}: request {request.id!r}: {rows} for {len(tokens)} tokens")
    spans = tuple(span for span in versions if span.start < max(1, len(logp)))  # an aborted response may have no token of the last version
    cached = output.num_cached_tokens or 0
    finish = response.finish_reason
    return Sample(tokens, len(request.tokens), logp, finish, spans, routed_experts, images=request.images, cached_tokens=cached)


def scoring_parameters(named: int) -> Any:
    """Return vLLM's SamplingParams of a text whose tokens are scored, and so many of the likeliest at each. It must sample one more."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        prompt_logprobs=named,
        flat_logprobs=True,
        detokenize=False,  # vLLM would look up the text of every token that it names
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def scores_of(text: Sequence[int], output: Any, named: int, label: str) -> TokenScores:
    """Return the scores in vLLM's final output for a text.

    Args:
        text: its tokens.
        output: vLLM's RequestOutput.
        named: the argument of `scoring_parameters`.
        label: names the engine in an error.

    Raises:
        RolloutError: vLLM has scored other tokens.
    """
    scored = output.prompt_logprobs
    token_TC = np.array(scored.token_ids, dtype=np.int32).reshape(-1, 1 + named)  # the text's own first, even if it is among the others
    if token_TC[:, 0].tolist() != list(text[1:]):
        raise RolloutError(f"{label}: log-probs of {len(token_TC)} tokens, and not those of a text of {len(text)}")
    return TokenScores(token_TC, np.array(scored.logprobs, dtype=np.float32).reshape(token_TC.shape))

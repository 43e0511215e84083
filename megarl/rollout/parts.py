"""A response that is sampled part by part, each in a request of its own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from megarl.batch import Sample, VersionSpan


def added(said: Sample) -> Sample:
    """What a request that goes on with a response has added to it: no prompt, and the first token's version begins at 0."""
    return replace(said, tokens=said.tokens[said.prompt_length :], prompt_length=0)


def whole(parts: Sequence[Sample]) -> Sample:
    """The response as far as it has got, without the experts of its tokens.

    Args:
        parts: in order; the first has the prompt, each other is what was `added`.
    """
    ends = np.cumsum([part.response_length for part in parts]).tolist()
    return Sample(
        np.concatenate([part.tokens for part in parts]),
        parts[0].prompt_length,
        np.concatenate([part.rollout_logp for part in parts]),
        parts[-1].finish_reason,
        versions(zip([0, *ends], parts, strict=False)),
    )


def versions(begun: Iterable[tuple[int, Sample]]) -> tuple[VersionSpan, ...]:
    """The weight versions of a response.

    begun: in order, what it was sampled as, and at which of its tokens that begins.
    """
    spans: list[VersionSpan] = []
    for begin, sample in begun:
        for span in sample.weight_versions:
            if not spans or spans[-1].version != span.version:
                spans.append(VersionSpan(begin + span.start if spans else 0, span.version))
    return tuple(spans)

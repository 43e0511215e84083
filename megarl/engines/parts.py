"""Responses sampled in several parts, each by a separate request."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from megarl.batch import Sample, VersionSpan


def added(sample: Sample) -> Sample:
    """Return what a continuing request has added to a response: without the prompt, the version spans starting at 0."""
    return replace(sample, tokens=sample.tokens[sample.prompt_length :], prompt_length=0, images=())


def whole(parts: Sequence[Sample]) -> Sample:
    """Join the parts sampled so far into one response, without the experts of its tokens.

    Args:
        parts: the parts in order; the first includes the prompt, each later one comes from `added`.
    """
    ends = np.cumsum([part.response_length for part in parts]).tolist()
    return Sample(
        np.concatenate([part.tokens for part in parts]),
        parts[0].prompt_length,
        np.concatenate([part.rollout_logp for part in parts]),
        parts[-1].finish_reason,
        versions(zip([0, *ends], parts, strict=False)),
        images=parts[0].images,
    )


def versions(begun: Iterable[tuple[int, Sample]]) -> tuple[VersionSpan, ...]:
    """Return the weight versions of a response that was sampled in parts.

    Args:
        begun: the parts in order, each with the index of the response token at which it begins.
    """
    spans: list[VersionSpan] = []
    for begin, sample in begun:
        for span in sample.weight_versions:
            if not spans or spans[-1].version != span.version:
                spans.append(VersionSpan(begin + span.start if spans else 0, span.version))
    return tuple(spans)

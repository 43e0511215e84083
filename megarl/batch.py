"""A batch is a bag of tokens.

Axes: T predicted tokens, N sequences, C contexts, L layers, K experts per token.
A sequence is one response. It has one context, or several: those of an episode whose chat template has rewritten earlier turns. A context
of l tokens gives l - 1 entries: entry t feeds token t to the model and is scored on token t + 1. A model reads each context by itself; for
everything else, the entries of a sequence are one chain, context after context. Any subset of entries (a data-parallel shard, a
context-parallel zigzag, a micro-batch) is again a valid `Batch`.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from megarl.images import PlacedImage
from megarl.lazy_torch import Tensor, torch

EXPERTS = (
    "routed_experts",
    "critic_experts",
)  # keys of `Batch.extra_T` that only routers read: the experts of the policy's and the critic's tokens


class VersionSpan(NamedTuple):
    """The response tokens from `start` up to the next span were sampled with the weights of sync number `version`."""

    start: int
    version: int


@dataclass(frozen=True)
class Sample:
    """One prompt and the response to it. With several turns, the response is everything after the first prompt, and the mask has holes.

    An episode whose context was written anew has its contexts one after the other: each is a prompt of its own, and what follows it.
    """

    tokens: np.ndarray  # int32 [prompt + response]
    prompt_length: int
    rollout_logp: np.ndarray  # float32 [response]: log-prob of each response token as sampled (temperature included)
    finish_reason: str  # "stop" (ended by itself), "length" (cut off), "abort"
    weight_versions: Sequence[VersionSpan] = ()  # in order, the first starting at 0; empty if no engine sampled it
    routed_experts: np.ndarray | None = None  # uint8 or uint16 [prompt + response - contexts, L, K]: experts of every fed token
    loss_mask: np.ndarray | None = None  # bool [response]: tokens written by the policy, not by a tool or the user; None: all of them
    turn_rewards: Sequence[tuple[int, float]] = ()  # from an environment: (response tokens up to the end of a turn, its reward)
    starts: Sequence[int] = ()  # indices of the tokens with which further contexts begin
    images: Sequence[PlacedImage] = ()  # in order, by the tokens' indices
    cached_tokens: int = 0  # of an engine's answer to one request: prompt tokens whose keys and values it had cached

    @property
    def response_length(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def loss_tokens(self) -> int:
        """The number of response tokens that are trained on."""
        return self.response_length if self.loss_mask is None else int(np.count_nonzero(self.loss_mask))

    @property
    def version_tokens(self) -> list[int]:
        """The number of loss tokens of each span of `weight_versions`."""
        bounds = pairwise([*(span.start for span in self.weight_versions), self.response_length])
        return [end - begin if self.loss_mask is None else int(np.count_nonzero(self.loss_mask[begin:end])) for begin, end in bounds]


@dataclass(frozen=True)
class Batch:
    """A bag of entries from N sequences. Per-sequence tensors are global: the same on every rank, whichever entries it holds."""

    input_T: Tensor  # int64, the token fed
    target_T: Tensor  # int64, the token scored
    mask_T: Tensor  # bool, true where the target is a loss token
    seq_T: Tensor  # int64, index into the N axis
    position_T: Tensor  # int64, index of the entry inside its sequence
    length_N: Tensor  # int64, number of entries in the whole sequence
    count_N: Tensor  # int64, number of loss tokens in the whole sequence
    start_N: Tensor  # int64, position of the entry that is scored on the response's first token
    extra_T: Mapping[str, Tensor] = field(default_factory=dict)  # e.g. old_logp, ref_logp, rollout_logp, advantage, weight
    in_order: bool = False  # true if known to hold every entry of every sequence, sequence by sequence, in order of position
    begin_T: Tensor | None = None  # int64, position of the first entry of the entry's context; None: each sequence is one context
    images_N: Sequence[Sequence[PlacedImage]] | None = None  # of each sequence, by position of their entries; None: no sequence has any

    def __len__(self) -> int:
        return len(self.input_T)

    def take(self, index_T: Tensor | slice) -> Batch:
        """The sub-bag of the given entries, in the given order; a slice gives views."""
        return replace(
            self,
            input_T=self.input_T[index_T],
            target_T=self.target_T[index_T],
            mask_T=self.mask_T[index_T],
            seq_T=self.seq_T[index_T],
            position_T=self.position_T[index_T],
            extra_T={name: value[index_T] for name, value in self.extra_T.items()},
            in_order=False,
            begin_T=None if self.begin_T is None else self.begin_T[index_T],
        )

    def with_extra(self, **values_T: Tensor) -> Batch:
        """The same bag with additional per-entry tensors."""
        for name, value in values_T.items():
            assert len(value) == len(self), f"{name}: {len(value)} values for {len(self)} entries"
        return replace(self, extra_T={**self.extra_T, **values_T})

    def to(self, device: torch.device) -> Batch:
        """The same bag on another device."""
        moved: dict[str, Any] = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        return replace(self, **moved, extra_T={name: value.to(device) for name, value in self.extra_T.items()})

    def without(self, *names: str) -> Batch:
        """The same bag without the named per-entry tensors; names that it lacks are ignored."""
        return replace(self, extra_T={other: value for other, value in self.extra_T.items() if other not in names})

    def contexts(self) -> tuple[Tensor, Tensor]:
        """The contexts in order of sequence and position.

        Returns:
            The index of each entry's context, int64 [T], and the number of entries of each context, int64 [C].
        """
        if self.begin_T is None:
            return self.seq_T, self.length_N
        name_T = self.seq_T * (int(self.length_N.max()) + 1) + self.begin_T
        _, context_T, count_C = torch.unique(name_T, return_inverse=True, return_counts=True)
        return context_T, count_C

    def seen(self) -> list[Sequence[PlacedImage]]:
        """The images of each sequence of which entries are held here."""
        return [] if self.images_N is None else [self.images_N[n] for n in self.seq_T.unique().tolist()]

    def spread(self, value_N: Tensor) -> Tensor:
        """A per-sequence value, repeated for each entry of the sequence: [N] -> [T]."""
        return value_N.index_select(0, self.seq_T)  # three times as fast as value_N[seq_T] on CPU

    def sequence_sum(self, value_T: Tensor) -> Tensor:
        """The sum over the loss tokens held here, per sequence: [T] -> [N]. Values at masked entries are ignored."""
        kept = torch.where(self.mask_T, value_T, torch.zeros_like(value_T))
        return torch.zeros(len(self.length_N), dtype=value_T.dtype, device=value_T.device).index_add(0, self.seq_T, kept)


def pack(samples: Sequence[Sample]) -> Batch:
    """All entries of the samples, sequence by sequence; the loss tokens are those of `Sample.loss_mask`. No samples give an empty bag.

    `extra_T["rollout_logp"]` (float32) holds the engine's log-prob at loss tokens and 0 in the prompt. Routed experts are not included.
    """
    if any(sample.starts for sample in samples):
        return _pack_contexts(samples)
    lengths = np.array([len(sample.tokens) - 1 for sample in samples], dtype=np.int64)
    prompts = np.array([sample.prompt_length - 1 for sample in samples], dtype=np.int64)  # entries before the first loss token
    position = np.arange(int(lengths.sum()))
    position -= np.repeat(np.cumsum(lengths) - lengths, lengths)
    nothing = np.zeros(prompts.max(initial=0), dtype=np.float32)
    rollout_logp = [part for sample in samples for part in (nothing[: sample.prompt_length - 1], sample.rollout_logp)]
    extra = {"rollout_logp": torch.from_numpy(_join(rollout_logp, np.float32))}
    mask = position >= np.repeat(prompts, lengths)
    if any(sample.loss_mask is not None for sample in samples):
        mask[mask] = _join([_loss_mask(sample) for sample in samples], np.bool_)
    return Batch(
        input_T=torch.from_numpy(_join([sample.tokens[:-1] for sample in samples], np.int64)),
        target_T=torch.from_numpy(_join([sample.tokens[1:] for sample in samples], np.int64)),
        mask_T=torch.from_numpy(mask),
        seq_T=torch.from_numpy(np.repeat(np.arange(len(samples)), lengths)),
        position_T=torch.from_numpy(position),
        length_N=torch.from_numpy(lengths),
        start_N=torch.from_numpy(prompts),
        count_N=torch.from_numpy(np.array([sample.loss_tokens for sample in samples], dtype=np.int64)),
        extra_T=extra,
        in_order=True,
        images_N=_images(samples),
    )


def _images(samples: Sequence[Sample]) -> list[list[PlacedImage]] | None:
    """The images of each sample, each at the position of the entry that feeds its first token."""
    if not any(sample.images for sample in samples):
        return None
    images_N = list[list[PlacedImage]]()
    for sample in samples:
        learned, ends, fed = _loss_mask(sample), [*sample.starts, len(sample.tokens)], list[PlacedImage]()
        for one in sample.images:
            of_response = (max(0, place - sample.prompt_length) for place in (one.start, one.end))
            assert not learned[slice(*of_response)].any(), "tokens of images are never loss tokens"
            context = bisect.bisect_right(sample.starts, one.start)
            if one.start < ends[context] - 1:  # a context's last token is not fed
                fed.append(replace(one, start=one.start - context))
        images_N.append(fed)
    return images_N


def _pack_contexts(samples: Sequence[Sample]) -> Batch:
    """`pack`, of samples of which some have several contexts: without the entries that would score a context's last token on the next one.

    Those are no loss tokens.
    """
    joined = pack([replace(sample, starts=()) for sample in samples])
    ends = [(number, start - 1) for number, sample in enumerate(samples) for start in sample.starts]
    seq_E, position_E = torch.tensor(ends).unbind(1)
    entry_E = (joined.length_N.cumsum(0) - joined.length_N)[seq_E] + position_E
    keep_T = torch.ones(len(joined), dtype=torch.bool).index_fill(0, entry_E, False)
    dropped_N = torch.bincount(seq_E, minlength=len(samples))
    length_N = joined.length_N - dropped_N
    batch = replace(joined.take(keep_T.nonzero().squeeze(1)), length_N=length_N, in_order=True, images_N=_images(samples))
    position_T = torch.arange(len(batch)) - batch.spread(length_N.cumsum(0) - length_N)
    begins = [(0, *(start - place for place, start in enumerate(sample.starts, 1))) for sample in samples]
    counts = [np.diff([*begin, int(length)]) for begin, length in zip(begins, length_N, strict=True)]
    begin_T = torch.from_numpy(np.concatenate([np.repeat(begin, count) for begin, count in zip(begins, counts, strict=True)]))
    return replace(batch, position_T=position_T, begin_T=begin_T)


def last_context(sample: Sample) -> np.ndarray:
    """The tokens of the last context, which is what is read at the end of the response."""
    return sample.tokens[sample.starts[-1] :] if sample.starts else sample.tokens


def pack_scored(samples: Sequence[Sample]) -> Batch:
    """Like `pack`, for a scalar head that scores whole responses: a sequence's only loss token is the entry that feeds its last token.

    Of several contexts the last is scored. That entry needs a target, so each sequence gets one more token, which is never fed.
    """
    nothing = np.zeros(1, dtype=np.float32)

    def judged(sample: Sample) -> Sample:
        read = last_context(sample)
        tokens, first = np.append(read, read[-1]), len(sample.tokens) - len(read)
        images = [replace(one, start=one.start - first) for one in sample.images if one.start >= first]
        return replace(sample, tokens=tokens, prompt_length=len(read), rollout_logp=nothing, loss_mask=None, starts=(), images=images)

    return pack([judged(sample) for sample in samples])


def concat(batches: Sequence[Batch], names: Sequence[Sequence[int]] | None = None) -> Batch:
    """The bags merged into one, entry after entry. All must have the same `extra_T` keys.

    Args:
        batches: the bags.
        names: a number for each sequence of each bag; those of the same number are one sequence, of which each bag has a part. None: all
            are different.

    Returns:
        The bag, with sequences numbered in the order in which they come first.
    """
    starts = np.cumsum([0, *(len(batch.length_N) for batch in batches)])
    begins = [batch.begin_T for batch in batches]
    whole = Batch(
        input_T=torch.cat([batch.input_T for batch in batches]),
        target_T=torch.cat([batch.target_T for batch in batches]),
        mask_T=torch.cat([batch.mask_T for batch in batches]),
        seq_T=torch.cat([batch.seq_T + int(start) for batch, start in zip(batches, starts, strict=False)]),
        position_T=torch.cat([batch.position_T for batch in batches]),
        length_N=torch.cat([batch.length_N for batch in batches]),
        count_N=torch.cat([batch.count_N for batch in batches]),
        start_N=torch.cat([batch.start_N for batch in batches]),
        extra_T={name: torch.cat([batch.extra_T[name] for batch in batches]) for name in batches[0].extra_T},
        in_order=all(batch.in_order for batch in batches),
        begin_T=None
        if all(begin_T is None for begin_T in begins)
        else torch.cat([torch.zeros_like(b.seq_T) if begin_T is None else begin_T for b, begin_T in zip(batches, begins, strict=True)]),
    )
    if any(batch.images_N is not None for batch in batches):
        whole = replace(whole, images_N=[own for b in batches for own in (b.images_N or [()] * len(b.length_N))])
    flat = range(len(whole.length_N)) if names is None else [name for own in names for name in own]
    first = {name: n for n, name in reversed([*enumerate(flat)])}
    if len(first) == len(flat):
        return whole
    order = {name: n for n, name in enumerate(dict.fromkeys(flat))}
    first_N = torch.tensor([first[name] for name in order])
    return replace(
        whole,
        seq_T=torch.tensor([order[name] for name in flat])[whole.seq_T],
        length_N=whole.length_N[first_N],
        count_N=whole.count_N[first_N],
        start_N=whole.start_N[first_N],
        in_order=False,
        images_N=None if whole.images_N is None else [whole.images_N[n] for n in first_N.tolist()],
    )


def _loss_mask(sample: Sample) -> np.ndarray:
    return np.ones(sample.response_length, dtype=np.bool_) if sample.loss_mask is None else sample.loss_mask


def _join(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *arrays], dtype=dtype)


def balance(length_N: Sequence[int], bins: int) -> list[list[int]]:
    """A partition of the sequences into `bins` bins of nearly equal token counts, by the longest-first greedy rule. No bin is empty.

    Deterministic: among equally full bins, the one with the fewest sequences takes the next sequence, then the one with the lowest index;
    each bin lists its sequences in ascending order. Raises ValueError if N < bins.
    """
    if len(length_N) < bins:
        raise ValueError(f"{len(length_N)} sequences cannot fill {bins} bins")
    length = np.asarray(length_N, dtype=np.int64)
    order = np.argsort(-length, kind="stable")
    # One integer per bin encodes (tokens, sequences, index) in sort order. Heaps of integers are three times as fast as heaps of tuples.
    token = (len(length) + 1) * bins
    heap = list(range(bins))
    chosen: list[list[int]] = [[] for _ in range(bins)]
    for sequence, tokens in zip(order.tolist(), length[order].tolist(), strict=True):
        chosen[heap[0] % bins].append(sequence)
        heapq.heapreplace(heap, heap[0] + tokens * token + bins)
    return [sorted(sequences) for sequences in chosen]


def bins_needed(length_N: Sequence[int], capacity: int) -> int:
    """The smallest number of bins of at most `capacity` tokens that `balance` fills without overflow.

    Raises ValueError if a single sequence is longer than `capacity`.
    """
    longest_first = sorted(np.asarray(length_N, dtype=np.int64).tolist(), reverse=True)
    if longest_first and longest_first[0] > capacity:
        raise ValueError(f"a sequence of {longest_first[0]} tokens does not fit into a micro-batch of {capacity}")

    def fits(bins: int) -> bool:
        heap = [0] * bins
        for tokens in longest_first:
            if heap[0] + tokens > capacity:
                return False
            heapq.heapreplace(heap, heap[0] + tokens)
        return True

    # Two sequences of more than half the capacity cannot share a bin. The greedy rule's loads never rise with the number of bins, so
    # doubling steps followed by bisection find the minimum.
    fewest = most = max(1, -(-sum(longest_first) // capacity), sum(2 * tokens > capacity for tokens in longest_first))
    step = 1
    while not fits(most):
        fewest, most, step = most + 1, min(len(longest_first), most + step), 2 * step
    return bisect.bisect_left(range(most), True, lo=fewest, key=fits)

"""Packing samples, and splitting them into balanced bins."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.batch import Sample, balance, bins_needed, concat, pack, pack_scored
from megarl.engines.episodes import chained
from megarl.image_source import ImageSource
from megarl.images import Image, PlacedImage


def sample(prompt: int, response: int, start: int = 0) -> Sample:
    tokens = np.arange(start, start + prompt + response, dtype=np.int32)
    return Sample(tokens, prompt, -np.arange(1, response + 1, dtype=np.float32), "stop")


def test_pack_lays_out_entries_and_masks() -> None:
    first = Sample(np.array([5, 6, 7, 8], np.int32), 2, np.array([-1.0, -2.0], np.float32), "stop")
    second = Sample(np.array([9, 10], np.int32), 1, np.array([-3.0], np.float32), "length")
    batch = pack([first, second])
    assert batch.input_T.tolist() == [5, 6, 7, 9] and batch.target_T.tolist() == [6, 7, 8, 10]
    assert batch.mask_T.tolist() == [False, True, True, True]
    assert batch.extra_T["rollout_logp"].tolist() == [0.0, -1.0, -2.0, -3.0]
    assert batch.position_T.tolist() == [0, 1, 2, 0] and batch.count_N.tolist() == [2, 1]
    assert len(pack([])) == 0


def test_what_a_tool_said_is_read_and_not_learned() -> None:
    """A response of two turns with a tool's answer between them, beside one without a mask."""
    logp = np.array([-1.0, 0.0, 0.0, -2.0], np.float32)
    turns = Sample(np.arange(10, 16, dtype=np.int32), 2, logp, "stop", loss_mask=np.array([True, False, False, True]))
    batch = pack([turns, sample(1, 2)])
    assert batch.target_T[batch.mask_T].tolist() == [12, 15, 1, 2]
    assert batch.count_N.tolist() == [turns.loss_tokens, 2] == [2, 2] and batch.length_N.tolist() == [5, 2]
    assert batch.extra_T["rollout_logp"].tolist() == [0.0, -1.0, 0.0, 0.0, -2.0, -1.0, -2.0]
    judged = pack_scored([turns])
    assert judged.mask_T.tolist() == [False] * 5 + [True], "a reward model judges the whole"


def test_only_pack_promises_the_order_of_entries() -> None:
    batch = pack([sample(2, 3), sample(1, 4)])
    assert batch.in_order and batch.with_extra(reward=torch.zeros(len(batch))).to(torch.device("cpu")).in_order
    assert not batch.take(torch.arange(len(batch))).in_order


def test_pack_equals_one_sample_after_the_other() -> None:
    """Prompts of one token (every entry is a loss token), responses of none, a sample of one token (no entry)."""
    samples = [sample(3, 4), sample(1, 2, 50), sample(5, 0, 90), sample(1, 0), sample(2, 7, 200)]
    batch = pack(samples)
    rows = [
        (one.tokens[t], one.tokens[t + 1], t >= one.prompt_length - 1, n, t, one.rollout_logp[t - one.prompt_length + 1])
        for n, one in enumerate(samples)
        for t in range(len(one.tokens) - 1)
        if t >= one.prompt_length - 1
    ]
    loss = batch.mask_T
    columns = (batch.input_T, batch.target_T, batch.mask_T, batch.seq_T, batch.position_T, batch.extra_T["rollout_logp"])
    assert list(zip(*(column[loss].tolist() for column in columns), strict=True)) == rows
    assert len(batch) == sum(len(one.tokens) - 1 for one in samples)
    assert batch.position_T.tolist() == [t for one in samples for t in range(len(one.tokens) - 1)]
    assert bool((batch.extra_T["rollout_logp"][~loss] == 0).all())
    assert batch.length_N.tolist() == [6, 2, 4, 0, 8] and batch.count_N.tolist() == [4, 2, 0, 0, 7]
    assert torch.equal(batch.sequence_sum(torch.ones(len(batch))), batch.count_N.float())
    assert {str(column.dtype) for column in columns} == {"torch.int64", "torch.bool", "torch.float32"}


@pytest.mark.parametrize("kind", ["uniform", "heavy"])
def test_load_of_8192_sequences_differs_by_two_in_ten_thousand(kind: str) -> None:
    random = np.random.default_rng(0)
    uniform, heavy = random.integers(1, 32769, 8192), np.minimum(32768, random.pareto(1.2, 8192) * 400 + 16).astype(int)
    lengths = (uniform if kind == "uniform" else heavy).tolist()
    bins = balance(lengths, 64)
    loads = [sum(lengths[n] for n in members) for members in bins]
    assert max(loads) / (sum(loads) / 64) <= 1.0002
    assert bins == balance(list(np.array(lengths)), 64), "the same from NumPy's integers"


@settings(deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.data())
def test_every_sequence_is_in_one_bin_and_none_is_empty(lengths: list[int], data: st.DataObject) -> None:
    bins = balance(lengths, data.draw(st.integers(1, len(lengths))))
    assert sorted(n for members in bins for n in members) == list(range(len(lengths)))
    assert all(members and members == sorted(members) for members in bins)
    # The greedy rule's bound: the fullest bin is at most one sequence above any other.
    loads = [sum(lengths[n] for n in members) for members in bins]
    assert max(loads) - min(loads) <= max(lengths)


@settings(deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=40), st.integers(0, 60))
def test_bins_needed_are_the_fewest_that_hold(lengths: list[int], spare: int) -> None:
    capacity = max(1, max(lengths) + spare)
    fullest = [max(sum(lengths[n] for n in members) for members in balance(lengths, bins)) for bins in range(1, len(lengths) + 1)]
    assert bins_needed(lengths, capacity) == next(bins for bins, load in enumerate(fullest, 1) if load <= capacity)


def test_what_cannot_be_split_is_refused() -> None:
    with pytest.raises(ValueError, match="2 sequences cannot fill 3 bins"):
        balance([1, 2], 3)
    with pytest.raises(ValueError, match="a sequence of 9 tokens does not fit into a micro-batch of 8"):
        bins_needed([3, 9], 8)


def image(tokens: int) -> Image:
    return Image(f"{tokens}", (8, 8), (1, 2, 2 * tokens), 2, ImageSource("nowhere"))


def test_images_of_several_contexts_are_at_the_entries_that_feed_them() -> None:
    """As those of the contexts by themselves; a context's last token feeds nothing."""
    one, two = sample(9, 3), sample(7, 2, start=20)
    one = replace(one, images=[PlacedImage(1, image(2)), PlacedImage(5, image(3))])
    two = replace(two, images=[PlacedImage(2, image(4))])
    whole = chained([one, two])
    assert [placed.start for placed in whole.images] == [1, 5, 14]
    batch = pack([sample(1, 3), whole])
    assert batch.images_N is not None and [placed.start for placed in batch.images_N[1]] == [1, 5, 13] and not batch.images_N[0]
    assert batch.input_T[batch.seq_T == 1][13] == whole.tokens[14]
    judged = pack_scored([whole])
    assert judged.images_N is not None and [placed.start for placed in judged.images_N[0]] == [2]
    both = concat([batch, pack([sample(2, 2)])], [[7, 8], [7]])
    assert both.images_N is not None and [list(images) for images in both.images_N] == [[], batch.images_N[1]]
    with pytest.raises(AssertionError, match="tokens of images are never loss tokens"):
        pack([replace(one, images=[PlacedImage(8, image(2))])])

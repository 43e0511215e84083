"""Packs the contexts of a micro-batch into one row of tokens, of which each context-parallel rank holds a part.

Axes: T entries of a Batch, C contexts, R local rows (tokens of this rank's packed row, padding included).
Contexts are sorted shortest first, so that those of equal length are adjacent (see `attention`). With cp > 1, each is padded to a multiple
of 2 * cp tokens; one more dummy sequence fills the row up to a multiple of tp on every context-parallel rank.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megarl.batch import Batch
from megarl.images import PlacedImage, axes_of
from megarl.parallel.attention import zigzag
from megarl.parallel.vision import ImageSeqParams


@dataclass(frozen=True)
class Packed:
    """The inputs of one micro-batch for one rank."""

    input_ids: Tensor  # int64 [1, R]
    position_ids: Tensor  # int64 [1, R], position inside the context
    padding_mask: Tensor | None  # bool [1, R], true for padding; None if no rank has any
    params: PackedSeqParams
    entry_T: Tensor  # int64 [T local] on the CPU, indices of the micro-batch's entries that this rank holds
    row_T: Tensor  # int64 [T local], their rows on the R axis, ascending


def pack_micro(batch: Batch, *, cp_rank: int, cp_size: int, tp: int, device: torch.device) -> Packed:
    """Pack whole contexts into one row, and take the part of it that one context-parallel rank holds.

    Args:
        batch: on the CPU, with every entry of each of its contexts, in any order; an empty batch gives a row of padding only.
        cp_rank: this rank's place in its context-parallel group.
        cp_size: size of that group.
        tp: tensor-parallel size; R is a multiple of it.
        device: device of the model's inputs.

    Returns:
        The rank's R rows, on `device` except `Packed.entry_T`.

    Raises:
        AssertionError: a context is not whole.
    """
    context_T, length_C = batch.contexts()
    position_T = batch.position_T if batch.begin_T is None else batch.position_T - batch.begin_T
    order_T = torch.argsort(position_T, stable=True)
    order_T = order_T[torch.argsort(_shortest_first(length_C)[context_T[order_T]], stable=True)]
    contexts, counts = torch.unique_consecutive(context_T[order_T], return_counts=True)
    last_T = position_T[order_T[counts.cumsum(0) - 1]]
    assert torch.equal(counts, length_C[contexts]) and torch.equal(last_T + 1, counts), "a micro-batch holds whole contexts, each once"
    lengths, multiple = counts.tolist(), 2 * cp_size if cp_size > 1 else 1
    padded = [-(-length // multiple) * multiple for length in lengths]
    fill = -sum(padded) % (cp_size * math.lcm(tp, 2 if cp_size > 1 else 1)) if padded else cp_size * math.lcm(tp, 2)
    source = _source(lengths, padded, fill, cp_rank, cp_size)
    real = source >= 0
    entry = order_T[source[real]]
    row_T = real.nonzero().squeeze(1)
    bounds = torch.tensor([0, *padded, *([fill] if fill else [])]).cumsum(0)
    params = _params(bounds.to(torch.int32).to(device), max([*padded, fill]))
    if batch.images_N is not None and any(images := _images(batch, order_T[counts.cumsum(0) - counts].tolist(), lengths)):
        params = _with_images(params, images, lengths, [*padded, fill], source, device)
    ids = torch.zeros(len(source), dtype=torch.int64)
    ids[real] = batch.input_T[entry]
    positions = torch.zeros(len(source), dtype=torch.int64)
    positions[real] = position_T[entry]
    return Packed(
        input_ids=ids[None].to(device),
        position_ids=positions[None].to(device),
        padding_mask=(~real)[None].to(device) if sum(padded) + fill > sum(lengths) else None,
        params=params,
        entry_T=entry,
        row_T=row_T.to(device),
    )


def _images(batch: Batch, firsts: Sequence[int], lengths: Sequence[int]) -> list[Sequence[PlacedImage]]:
    """The images of contexts, by their places in them.

    Args:
        batch: the micro-batch.
        firsts: the first entry of each context.
        lengths: its number of entries.
    """
    assert batch.images_N is not None
    images_C = list[Sequence[PlacedImage]]()
    for first, length in zip(firsts, lengths, strict=True):
        own, begin = batch.images_N[int(batch.seq_T[first])], 0 if batch.begin_T is None else int(batch.begin_T[first])
        images_C.append([replace(one, start=one.start - begin) for one in own if begin <= one.start < begin + length])
    return images_C


def _shortest_first(length_C: Tensor) -> Tensor:
    """For each context, its place when they are sorted by length (ties by index)."""
    return torch.empty_like(length_C).index_copy_(0, torch.argsort(length_C, stable=True), torch.arange(len(length_C)))


def _source(lengths: list[int], padded: list[int], fill: int, cp_rank: int, cp_size: int) -> Tensor:
    """For each local row, the index of its entry in that order, or -1 for padding."""
    rows, start = [], 0
    for length, size in zip([*lengths, 0], [*padded, fill], strict=True):
        position = zigzag(size, cp_rank, cp_size)
        rows.append(torch.where(position < length, position + start, -1))
        start += length
    return torch.cat(rows)


def _with_images(
    params: PackedSeqParams,
    images_C: list[Sequence[PlacedImage]],
    lengths: list[int],
    padded: list[int],
    source: Tensor,
    device: torch.device,
) -> ImageSeqParams:
    """Add the images of a row's contexts.

    Args:
        params: the bounds of the contexts.
        images_C: the images of each.
        lengths: its entries.
        padded: its rows on all context-parallel ranks, and those that fill the row.
        source: for each local row, the index of its entry, or -1.
        device: device of the model's inputs.
    """
    axes_3A, feature_T, count = torch.zeros((3, sum(padded)), dtype=torch.int64), torch.full((sum(lengths),), -1), 0
    row = entry = 0
    for images, length, rows in zip(images_C, lengths, padded, strict=False):
        axes_3A[:, row : row + length] = torch.from_numpy(axes_of(length, images))
        for one in images:
            end = min(one.end, length)
            feature_T[entry + one.start : entry + end] = torch.arange(count, count + end - one.start)
            count += one.image.tokens
        row, entry = row + rows, entry + length
    feature_R = torch.where(source >= 0, feature_T[source], -1)
    row_F = (feature_R >= 0).nonzero().squeeze(1)
    return ImageSeqParams(
        **{one.name: getattr(params, one.name) for one in fields(PackedSeqParams)},
        images=[one.image for images in images_C for one in images],
        axes_3A=axes_3A.to(device),
        row_F=row_F.to(device),
        feature_F=feature_R[row_F].to(device),
    )


def _params(bounds: Tensor, longest: int) -> PackedSeqParams:
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest)

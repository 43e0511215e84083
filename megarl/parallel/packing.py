"""Packs the whole sequences of a micro-batch into one row of tokens, of which each context-parallel rank holds a part.

Axes: T entries of a Batch, R local rows (tokens of this rank's packed row, padding included).
Sequences are sorted shortest first, so that those of equal length are adjacent (see `attention`). With cp > 1, each is padded to a multiple
of 2 * cp tokens; one more dummy sequence fills the row up to a multiple of tp on every context-parallel rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megarl.batch import Batch
from megarl.parallel.attention import zigzag


@dataclass(frozen=True)
class Packed:
    """The inputs of one micro-batch for one rank."""

    input_ids: Tensor  # int64 [1, R]
    position_ids: Tensor  # int64 [1, R], position inside the sequence
    padding_mask: Tensor | None  # bool [1, R], true for padding; None if no rank has any
    params: PackedSeqParams
    entry_T: Tensor  # int64 [T local] on the CPU, indices of the micro-batch's entries that this rank holds
    row_T: Tensor  # int64 [T local], their rows on the R axis, ascending


def pack_micro(batch: Batch, *, cp_rank: int, cp_size: int, tp: int, device: torch.device) -> Packed:
    """Pack whole sequences into one row, and take the part of it that one context-parallel rank holds.

    Args:
        batch: on the CPU, with every entry of each of its sequences, in any order; an empty batch gives a row of padding only.
        cp_rank: this rank's place in its context-parallel group.
        cp_size: size of that group.
        tp: tensor-parallel size; R is a multiple of it.
        device: device of the model's inputs.

    Returns:
        The rank's R rows, on `device` except `Packed.entry_T`.

    Raises:
        AssertionError: a sequence is not whole.
    """
    order_T = torch.argsort(batch.position_T, stable=True)
    order_T = order_T[torch.argsort(_shortest_first(batch)[order_T], stable=True)]
    sequences, counts = torch.unique_consecutive(batch.seq_T[order_T], return_counts=True)
    assert torch.equal(counts, batch.length_N[sequences]), "a micro-batch holds whole sequences, each once"
    lengths, multiple = counts.tolist(), 2 * cp_size if cp_size > 1 else 1
    padded = [-(-length // multiple) * multiple for length in lengths]
    fill = -sum(padded) % (cp_size * math.lcm(tp, 2 if cp_size > 1 else 1)) if padded else cp_size * math.lcm(tp, 2)
    source = _source(lengths, padded, fill, cp_rank, cp_size)
    real = source >= 0
    entry = order_T[source[real]]
    row_T = real.nonzero().squeeze(1)
    bounds = torch.tensor([0, *padded, *([fill] if fill else [])]).cumsum(0)
    ids = torch.zeros(len(source), dtype=torch.int64)
    ids[real] = batch.input_T[entry]
    positions = torch.zeros(len(source), dtype=torch.int64)
    positions[real] = batch.position_T[entry]
    return Packed(
        input_ids=ids[None].to(device),
        position_ids=positions[None].to(device),
        padding_mask=(~real)[None].to(device) if sum(padded) + fill > sum(lengths) else None,
        params=_params(bounds.to(torch.int32).to(device), max([*padded, fill])),
        entry_T=entry,
        row_T=row_T.to(device),
    )


def _shortest_first(batch: Batch) -> Tensor:
    """For each entry, the place of its sequence when sequences are sorted by length (ties by index)."""
    place_N = torch.empty_like(batch.length_N)
    place_N[torch.argsort(batch.length_N, stable=True)] = torch.arange(len(place_N))
    return place_N[batch.seq_T]


def _source(lengths: list[int], padded: list[int], fill: int, cp_rank: int, cp_size: int) -> Tensor:
    """For each local row, the index of its entry in sequence order, or -1 for padding."""
    rows, start = [], 0
    for length, size in zip([*lengths, 0], [*padded, fill], strict=True):
        position = zigzag(size, cp_rank, cp_size)
        rows.append(torch.where(position < length, position + start, -1))
        start += length
    return torch.cat(rows)


def _params(bounds: Tensor, longest: int) -> PackedSeqParams:
    return PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest)

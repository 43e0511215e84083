"""Fingerprints of weights, to compare what the trainer sent with what an engine holds, tensor by tensor, bit for bit.

The fingerprint of a matrix W is the sum over (i, j) of bits(W[i, j]) * key_row(i) * key_column(j) mod 2^64 with odd pseudo-random keys: a
single changed element always changes it, moved or swapped elements change it, and two changes cancel with a chance of about 2^-63.
It is linear, so the fingerprints of the shards of a matrix, each taken at its own offset, add up to that of the whole: a
tensor-parallel engine is checked without gathering its weights.

Bits are the raw pattern of the element. In 16 and 32 bits zeros and subnormal numbers all count as 0, since matrix units flush them, and
some weights are read through one. Weights of 8 bits (fp8 engines) are read from memory, and 14 of e4m3's 254 numbers are subnormal: there
every bit counts.

On a CPU a compiled function (`fingerprint.c`) computes them in one pass, where there is a compiler; else, and on GPUs, torch does.

Both sides import this file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from ctypes import c_size_t, c_void_p
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megarl.lazy_torch import Tensor, torch
from megarl.sync.kernel import compiled

if TYPE_CHECKING:
    from megarl.sync.wire import TensorName

_BITS = {"float32": "int32", "bfloat16": "int16", "float16": "int16", "float8_e4m3fn": "int8"}  # dtype -> integer view
# Elements hashed at a time: the int64 temporaries stay in a CPU's cache (8 times the speed), and take 128 MB each on a GPU. Half as many
# elements cost a CPU a fifth more time, in call overhead.
_CHUNK = {"cpu": 1 << 18, "cuda": 1 << 24}
_STRETCH = 1 << 13  # places of rearranged matrices hashed together for all matrices, so that their keys stay in a CPU's cache
_ROWS, _COLUMNS = 0x1234567, 0x89ABCDE  # seeds of the two key sequences


@dataclass(frozen=True)
class Print:
    """The fingerprint of one tensor, or of one shard of it at its place in the whole."""

    value: int  # signed 64-bit
    numel: int  # elements covered


@dataclass(frozen=True)
class Piece:
    """A shard held by a tensor-parallel worker: where it lies in the whole tensor, and its fingerprint there."""

    row: int
    column: int
    rows: int
    columns: int
    value: int
    place: int = 0  # index among the places in this worker that hold the tensor; pieces of one place do not overlap in the whole


class FingerprintMismatch(RuntimeError):
    """An engine does not hold the weights that the trainer sent. `names`: the sorted Hugging Face names of the differing tensors."""

    def __init__(self, names: list[str], engine: str) -> None:
        self.names = names
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        super().__init__(f"{engine} does not hold the weights that the trainer sent: {shown}")

    def __reduce__(self) -> tuple[type[FingerprintMismatch], tuple[list[str], str]]:
        return type(self), (self.names, str(self).partition(" does not hold")[0])


def fingerprints(stack_BRC: Tensor, row: int = 0, column: int = 0) -> Tensor:
    """The fingerprint of each matrix of a stack, or of a shard at its place in the whole: one call for all the experts of a layer.

    Args:
        stack_BRC: [B, R, C], floating, of a dtype in `_BITS`.
        row: where each matrix's first row lies in its whole.
        column: where each matrix's first column lies in its whole.

    Returns:
        int64 [B], on the stack's device.

    Raises:
        TypeError: the dtype is not supported.
    """
    return _sums(stack_BRC, row, column)[0]


def keys(rows: int, columns: int, row: int, column: int, device: torch.device) -> Tensor:
    """The keys by which `fingerprints` multiplies the elements of a matrix that lies at (row, column) of its whole: int64 [rows, columns].

    Args:
        rows: number of rows of the matrix.
        columns: number of columns of the matrix.
        row: row of its first element in the whole.
        column: column of its first element in the whole.
        device: device of the result.
    """
    return _keys(_ROWS, row, rows, device)[:, None] * _keys(_COLUMNS, column, columns, device)


def rearranged_fingerprints(stack_BP: Tensor, key_P: Tensor) -> Tensor:
    """`fingerprints` of matrices whose elements are stored in another order: the keys are rearranged once, instead of the elements.

    Args:
        stack_BP: [B, P], of a dtype that `fingerprints` accepts.
        key_P: from `keys`, each key at the place of its element; 0 where there is no element.

    Returns:
        int64 [B], on the stack's device.
    """
    count, places = stack_BP.shape
    if (sums := _compiled_sums(stack_BP[:, None], key_P.new_ones(1), key_P)) is not None:
        return sums[0]
    total_B = torch.zeros(count, dtype=torch.int64, device=stack_BP.device)
    chunk = _CHUNK[stack_BP.device.type]
    step = max(1, min(places, max(_STRETCH, chunk // max(1, count))))
    together = max(1, chunk // step)
    patterns = _Patterns(stack_BP, min(count, together) * step)
    for start in range(0, places, step):
        for first in range(0, count, together):
            bits = patterns.of(stack_BP[first : first + together, start : start + step])
            total_B[first : first + together] += _weighted(bits, key_P[start : start + step])
    return total_B


def _sums(stack_BRC: Tensor, row: int, column: int) -> tuple[Tensor, Tensor | None]:
    """The `fingerprints` of matrices, and whether all elements of each are finite, bool [B], where the compiled function did both."""
    count, rows, columns = stack_BRC.shape
    device = stack_BRC.device
    key_C, key_R = _keys(_COLUMNS, column, columns, device), _keys(_ROWS, row, rows, device)
    if (sums := _compiled_sums(stack_BRC, key_R, key_C)) is not None:
        return sums
    sum_BR = torch.empty(count, rows, dtype=torch.int64, device=device)
    chunk = _CHUNK[device.type]
    together = max(1, chunk // max(1, rows * columns))
    step = max(1, chunk // max(1, columns))
    patterns = _Patterns(stack_BRC, min(count, together) * min(rows, step) * columns)
    for first in range(0, count, together):
        for start in range(0, rows, step):
            bits = patterns.of(stack_BRC[first : first + together, start : start + step])
            sum_BR[first : first + together, start : start + step] = _weighted(bits, key_C)
    return _weighted(sum_BR, key_R), None


def _compiled_sums(stack_BRC: Tensor, key_R: Tensor, key_C: Tensor) -> tuple[Tensor, Tensor] | None:
    """The weighted sums of matrices' patterns, int64 [B], and whether all their elements are finite, bool [B], by `fingerprint.c`.

    None where that cannot read them.
    """
    count, rows, columns = stack_BRC.shape
    dtype = str(stack_BRC.dtype).removeprefix("torch.")
    readable = stack_BRC.device.type == "cpu" and dtype in _BITS and (stack_BRC.stride(2) == 1 or columns == 1)
    if not readable or (kernel := compiled()) is None:
        return None
    sum_B, largest_B = torch.zeros(count, dtype=torch.int64), torch.zeros(count, dtype=torch.int32)
    sizes = (c_size_t(size) for size in (count, rows, columns, stack_BRC.stride(0), stack_BRC.stride(1)))
    memory = (c_void_p(tensor.data_ptr()) for tensor in (key_R, key_C, sum_B, largest_B))
    kernel[f"sums_{dtype}"](c_void_p(stack_BRC.data_ptr()), *sizes, *memory)
    greatest = torch.tensor(torch.finfo(stack_BRC.dtype).max, dtype=stack_BRC.dtype).view(getattr(torch, _BITS[dtype]))
    return sum_B, largest_B <= greatest


class _Patterns:
    """Converts elements to their bit patterns as int64, in memory that each call reuses; see above for zeros and subnormal numbers.

    Args:
        like: a tensor of their dtype on their device. Raises TypeError for a dtype that is not in `_BITS`.
        room: the most elements per call.
    """

    def __init__(self, like: Tensor, room: int) -> None:
        dtype = str(like.dtype).removeprefix("torch.")
        if dtype not in _BITS:
            raise TypeError(f"no fingerprint for dtype {like.dtype}")
        info = torch.finfo(like.dtype)
        self._subnormal, self._integer = info.smallest_normal * (1 - info.eps), getattr(torch, _BITS[dtype])  # the largest one
        self._flushed = torch.empty(room, dtype=like.dtype, device=like.device) if like.element_size() > 1 else None
        self._numbers = torch.empty(room, dtype=torch.int64, device=like.device)

    def of(self, elements: Tensor) -> Tensor:
        """The patterns, int64 of the elements' shape, valid until the next call."""
        numbers, kept = self._numbers[: elements.numel()].view(elements.shape), elements.detach()
        if self._flushed is not None:
            kept = self._flushed[: elements.numel()].view(elements.shape)
            torch.hardshrink(elements.detach(), self._subnormal, out=kept)
        return numbers.copy_(kept.view(self._integer))


def _extremes(matrices: Tensor) -> Tensor:
    """The least and the greatest element of each matrix, float32 [2, B], or twice their sum where that is finite, which on a CPU is faster;
    of 8 bits: 0, or NaN if one element is."""
    if matrices.device.type == "cpu" and matrices.dtype in (torch.float32, torch.bfloat16):
        sum_B = matrices.flatten(1).sum(1)  # not of fewer exponent bits, in which sums overflow
        if sum_B.isfinite().all():
            return sum_B.float().expand(2, -1)
    if matrices.element_size() > 1:
        return torch.stack([matrices.amin((1, 2)), matrices.amax((1, 2))]).float()
    bits = matrices.view(torch.int8)  # e4m3fn has no infinity, and its NaN is 127 with either sign
    return torch.where(((bits & 127) == 127).any(2).any(1), torch.nan, 0.0).float().expand(2, -1)


def _weighted(numbers: Tensor, key_C: Tensor) -> Tensor:
    """The sum over the last axis, weighted by its keys."""
    if numbers.device.type == "cpu":  # one pass instead of two; CUDA has no integer matrix-vector product
        return torch.mv(numbers.view(-1, len(key_C)), key_C).view(numbers.shape[:-1])
    return (numbers * key_C).sum(-1)


class Fingerprinter:
    """Collects the fingerprints of a weight stream. Values stay on the device until `digest` transfers all of them at once."""

    def __init__(self) -> None:
        self._numel: dict[str, int] = {}
        self._values: list[Tensor] = []  # each for one or several tensors, in the order of the names
        self._finite: list[Tensor] = []

    def add(self, name: TensorName, tensor: Tensor) -> None:
        """Add one tensor, or the tensors of a stack. Raises ValueError if a name was added before."""
        names, stack = ([name], tensor[None]) if isinstance(name, str) else (name, tensor)
        for one in names:
            if one in self._numel:
                raise ValueError(f"{one} came twice in one weight stream")
            self._numel[one] = stack[0].numel()
        matrices = stack.flatten(2) if stack.ndim > 2 else stack.reshape(len(names), 1, -1)
        values, finite = _sums(matrices, 0, 0)
        self._values.append(values)
        self._finite.append(_extremes(matrices.detach()).isfinite().all(0) if finite is None else finite)

    def digest(self) -> dict[str, Print]:
        """All fingerprints by name. Raises FloatingPointError naming tensors with NaN or infinity, whose bits engines do not preserve."""
        if not self._numel:
            return {}
        finite = torch.cat(self._finite).tolist()
        broken = [name for name, whole in zip(self._numel, finite, strict=True) if not whole]
        if broken:
            more = f" and {len(broken) - 8} more" if len(broken) > 8 else ""
            raise FloatingPointError(f"weights that are not finite: {', '.join(broken[:8])}{more}")
        values = torch.cat(self._values).tolist()
        return {name: Print(value, numel) for value, (name, numel) in zip(values, self._numel.items(), strict=True)}


def join(workers: Iterable[Mapping[str, Iterable[Piece]]]) -> dict[str, list[Print]]:
    """Combine the pieces that the workers of one engine hold into the fingerprints of whole tensors.

    A tensor may be held in several places of one worker (tied embeddings: the lookup table and the packed output layer); each place gets
    a list entry of its own, in the workers' order. Pieces at the same position in the whole (replicated layers, replicated KV heads) must
    agree; if they do not, the tensor gets a fingerprint that covers no element and so equals no other.
    """
    copies: dict[str, list[dict[tuple[int, int, int, int], set[int]]]] = {}
    for digest in workers:
        for name, pieces in digest.items():
            places = copies.setdefault(name, [])
            for piece in pieces:
                places += [{} for _ in range(len(places), piece.place + 1)]
                places[piece.place].setdefault((piece.row, piece.column, piece.rows, piece.columns), set()).add(piece.value)
    return {name: [_sum(place) for place in places] for name, places in copies.items()}


def compare(trainer: Mapping[str, Print], engine: Mapping[str, Iterable[Print]]) -> list[str]:
    """The sorted names of the tensors that differ: other bits, held only in part, not held, or held but never sent."""
    differing = {name for name in trainer.keys() ^ engine.keys()}
    for name in trainer.keys() & engine.keys():
        places = list(engine[name])
        if not places or any(place != trainer[name] for place in places):
            differing.add(name)
    return sorted(differing)


def check(trainer: Mapping[str, Print], engine: Mapping[str, Iterable[Print]], label: str) -> None:
    """Compare what an engine holds with what the trainer sent.

    Args:
        trainer: from `Fingerprinter.digest`.
        engine: from `join`: one entry for each place that holds the tensor.
        label: names the engine in the error.

    Raises:
        FingerprintMismatch: with the names of the tensors that differ.
    """
    names = compare(trainer, engine)
    if names:
        raise FingerprintMismatch(names, label)


def _sum(place: dict[tuple[int, int, int, int], set[int]]) -> Print:
    if any(len(values) > 1 for values in place.values()):
        return Print(0, 0)
    total = sum(next(iter(values)) for values in place.values())
    numel = sum(rows * columns for _, _, rows, columns in place)
    return Print((total + (1 << 63)) % (1 << 64) - (1 << 63), numel)


def _keys(seed: int, start: int, count: int, device: torch.device) -> Tensor:
    """The odd 64-bit keys of the indices start .. start+count-1: splitmix64 of the index, int64 [count]."""
    cache_key = (seed, device)
    known = _KEYS.get(cache_key)
    if known is None or len(known) < start + count:
        size = max(1 << 14, 1 << (start + count - 1).bit_length())
        z = torch.arange(1, size + 1, dtype=torch.int64, device=device) * _signed(0x9E3779B97F4A7C15) + seed
        z = (z ^ _shift(z, 30)) * _signed(0xBF58476D1CE4E5B9)
        z = (z ^ _shift(z, 27)) * _signed(0x94D049BB133111EB)
        known = _KEYS[cache_key] = (z ^ _shift(z, 31)) | 1
    return known[start : start + count]


_KEYS: dict[tuple[int, torch.device], Tensor] = {}  # grows to the largest dimension seen: 8 bytes per row or column


def _shift(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)  # a logical shift: torch's is arithmetic


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value

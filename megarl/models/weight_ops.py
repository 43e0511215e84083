"""The operations between Hugging Face tensors and Megatron parameters.

An `Op` packs the tensors into one whose tensor-parallel shard is a plain chunk along one axis; reshaped to two dimensions or one, that
shard is the Megatron parameter. Every operation commutes with slicing: packing the slices [a, b) of the Hugging Face tensors (for a `Fused`
one: of each of its parts) gives the slice [a, b) of the packed tensor. `Sections` alone are parameters in another order than their shard.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from megarl.lazy_torch import Tensor, torch

Shape = tuple[int, ...]
ReadSlice = Callable[[int, int | None, int, int], Tensor]  # (index of the Hugging Face tensor, dimension or None for all, start, stop)


class Op(ABC):
    """The conversion between Hugging Face tensors and a packed tensor."""

    pads: bool = False  # the split axis may be padded with zeros up to a multiple of the ranks

    @property
    @abstractmethod
    def shapes(self) -> tuple[Shape, ...]:
        """The shapes of the Hugging Face tensors."""

    @property
    @abstractmethod
    def packed_shape(self) -> Shape:
        """The shape of the packed tensor, without padding."""

    @property
    @abstractmethod
    def dim(self) -> int | None:
        """The dimension along which tensor parallelism splits each Hugging Face tensor; None if it is replicated."""

    @property
    @abstractmethod
    def axis(self) -> int | None:
        """The axis along which tensor parallelism splits the packed tensor; None if it is replicated."""

    @abstractmethod
    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """Pack Hugging Face tensors, or the same slice of each, into one tensor."""

    @abstractmethod
    def unpack(self, packed: Tensor) -> tuple[Tensor, ...]:
        """Invert `pack` exactly, returning views where possible."""

    def units(self, ranks: int) -> int:
        """Return how many indices of the split axis each of `ranks` ranks holds."""
        assert self.axis is not None
        extent = self.packed_shape[self.axis]
        assert self.pads or extent % ranks == 0, f"{extent} units do not divide by {ranks} ranks"
        return -(-extent // ranks)

    def shard_shape(self, ranks: int) -> Shape:
        """Return the shape of one rank's chunk of the packed tensor."""
        if self.axis is None:
            return self.packed_shape
        return self.packed_shape[: self.axis] + (self.units(ranks),) + self.packed_shape[self.axis + 1 :]

    def read_shard(self, read: ReadSlice, rank: int, ranks: int) -> Tensor:
        """Build one rank's chunk of the packed tensor, reading only the slices that it needs.

        Args:
            read: returns a slice of one of the Hugging Face tensors (see `ReadSlice`).
            rank: the rank's index among those that share the parameter.
            ranks: the number of these ranks.

        Returns:
            A tensor of `shard_shape(ranks)`, in the dtype of the tensors read; padding is 0.
        """
        if self.axis is None or self.dim is None or ranks == 1:
            return self._padded(self.pack([read(index, None, 0, 0) for index in range(len(self.shapes))]), ranks)
        extent, units = self.packed_shape[self.axis], self.units(ranks)
        start, stop = min(rank * units, extent), min((rank + 1) * units, extent)
        pieces = []
        for index, shape in enumerate(self.shapes):
            rows = shape[self.dim] // extent  # rows of this Hugging Face tensor per unit
            pieces.append(read(index, self.dim, start * rows, stop * rows))
        return self._padded(self.pack(pieces), ranks)

    @property
    def pieces(self) -> dict[str, Op]:
        """The tensors of Megatron's checkpoints that hold the parameter, by what they add to its name; in order, they are its rows."""
        return {"": self}

    @property
    def projections(self) -> Op:
        """The conversion between the packed tensor and the matrices [out, in] that it consists of, however checkpoints store them."""
        return self

    def parameter(self, chunk: Tensor) -> Tensor:
        """Return a rank's parameter, given its chunk of the packed tensor: the leading axes merged into one."""
        return chunk.flatten(0, chunk.ndim - len(self.shapes[0]))

    def chunk(self, parameter: Tensor, ranks: int) -> Tensor:
        """Invert `parameter` for one of `ranks` ranks."""
        return parameter.view(self.shard_shape(ranks))

    def join(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the Hugging Face tensors, given the chunks of all ranks in rank order; padding is dropped."""
        if self.axis is None:
            return self.unpack(shards[0])
        packed = shards[0] if len(shards) == 1 else torch.cat(list(shards), dim=self.axis)
        return self.unpack(packed.narrow(self.axis, 0, self.packed_shape[self.axis]))

    def _padded(self, chunk: Tensor, ranks: int) -> Tensor:
        if not self.pads:
            return chunk
        assert self.axis == 0, "only rows are padded"
        missing = self.units(ranks) - chunk.shape[0]
        return chunk if not missing else torch.cat([chunk, chunk.new_zeros((missing, *chunk.shape[1:]))])


@dataclass(frozen=True)
class Plain(Op):
    """One unchanged tensor, split along `axis` (0: column parallel and vocabulary, 1: row parallel, None: replicated)."""

    shape: Shape
    axis: int | None = None  # a field here, a property in the base
    pads: bool = False

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return (self.shape,)

    @property
    def packed_shape(self) -> Shape:
        return self.shape

    @property
    def dim(self) -> int | None:
        return self.axis

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0]

    def unpack(self, packed: Tensor) -> tuple[Tensor, ...]:
        return (packed,)


@dataclass(frozen=True)
class QKV(Op):
    """Query, key and value projections, interleaved by query group: packed [groups, (heads/groups + 2) * head_dim, ...], split by group.

    If the heads' outputs have gates, each head's gate follows its query in the Hugging Face tensor; packed, a group's follow its queries.
    """

    heads: int
    groups: int
    head_dim: int
    rest: Shape  # (hidden,) for weights, () for biases
    gated: bool = False
    axis = 0
    dim = 0

    @property
    def shapes(self) -> tuple[Shape, ...]:
        query, key = self.groups * self._queries, self.groups * self.head_dim
        return (query, *self.rest), (key, *self.rest), (key, *self.rest)

    @property
    def packed_shape(self) -> Shape:
        return (self.groups, self._queries + 2 * self.head_dim, *self.rest)

    @property
    def _queries(self) -> int:
        """Rows of a group's queries, with their gates."""
        return self.heads // self.groups * self.head_dim * (2 if self.gated else 1)

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        query, *others = tensors
        groups = others[0].shape[0] // self.head_dim
        if self.gated:
            query = query.reshape(groups, -1, 2, self.head_dim, *self.rest).transpose(1, 2)
        return torch.cat([tensor.reshape(groups, -1, *self.rest) for tensor in (query, *others)], dim=1)

    def unpack(self, packed: Tensor) -> tuple[Tensor, ...]:
        query, *others = packed.split([self._queries, self.head_dim, self.head_dim], dim=1)
        if self.gated:
            query = query.unflatten(1, (2, -1, self.head_dim)).transpose(1, 2)
        return tuple(part.reshape(-1, *self.rest) for part in (query, *others))


@dataclass(frozen=True)
class GateUp(Op):
    """The gate and up projections of a gated MLP: packed [2, ffn, hidden], split along ffn."""

    ffn: int
    hidden: int
    axis = 1
    dim = 0

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return (self.ffn, self.hidden), (self.ffn, self.hidden)

    @property
    def packed_shape(self) -> Shape:
        return (2, self.ffn, self.hidden)

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.stack(list(tensors))

    def unpack(self, packed: Tensor) -> tuple[Tensor, ...]:
        return tuple(packed.unbind(0))


@dataclass(frozen=True)
class Interleaved(Op):
    """The gate and up projections of a gated MLP, in turn in the columns of one tensor [..., 2 * ffn]: packed [2, ffn, ...]."""

    ffn: int
    rest: Shape  # (hidden,) for weights, () for biases
    axis = 1

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return ((*self.rest, 2 * self.ffn),)

    @property
    def packed_shape(self) -> Shape:
        return (2, self.ffn, *self.rest)

    @property
    def dim(self) -> int | None:
        return len(self.rest)

    @property
    def projections(self) -> Op:
        return GateUp(self.ffn, *self.rest) if self.rest else self

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0].unflatten(-1, (-1, 2)).movedim(-1, 0).movedim(-1, 1)

    def unpack(self, packed: Tensor) -> tuple[Tensor, ...]:
        return (packed.movedim(1, -1).movedim(0, -1).flatten(-2),)


@dataclass(frozen=True)
class GateUpColumns(Op):
    """The gate and up projections of a gated MLP, side by side in the columns of one tensor [hidden, 2 * ffn]: packed [2, ffn, hidden]."""

    ffn: int
    hidden: int
    axis = 1
    dim = 1

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return ((self.hidden, 2 * self.ffn),)

    @property
    def packed_shape(self) -> Shape:
        return (2, self.ffn, self.hidden)

    @property
    def projections(self) -> Op:
        return GateUp(self.ffn, self.hidden)

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0].t().unflatten(0, (2, -1))

    def unpack(self, packed: Tensor) -> tuple[Tensor, ...]:
        return (packed.flatten(0, 1).t(),)

    def read_shard(self, read: ReadSlice, rank: int, ranks: int) -> Tensor:
        if ranks == 1:
            return super().read_shard(read, rank, ranks)
        units = self.units(ranks)
        return self.pack([torch.cat([read(0, 1, start, start + units) for start in (rank * units, self.ffn + rank * units)], dim=1)])


@dataclass(frozen=True)
class Transposed(Op):
    """The matrix of a row-parallel layer, stored [columns, rows]: packed [rows, columns], split by column."""

    rows: int
    columns: int
    axis = 1
    dim = 0

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return ((self.columns, self.rows),)

    @property
    def packed_shape(self) -> Shape:
        return (self.rows, self.columns)

    @property
    def projections(self) -> Op:
        return Plain((self.rows, self.columns), 1)

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0].t()

    def unpack(self, packed: Tensor) -> tuple[Tensor, ...]:
        return (packed.t(),)


@dataclass(frozen=True)
class Turned(Op):
    """The transposes of the matrices of another operation, which have the same packed tensor."""

    of: Op

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return tuple((columns, rows) for rows, columns in self.of.shapes)

    @property
    def packed_shape(self) -> Shape:
        return self.of.packed_shape

    @property
    def axis(self) -> int | None:
        return self.of.axis

    @property
    def dim(self) -> int | None:
        return None if self.of.dim is None else 1 - self.of.dim

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        return self.of.pack([tensor.t() for tensor in tensors])

    def unpack(self, packed: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.t() for tensor in self.of.unpack(packed))


@dataclass(frozen=True)
class OneRow(Op):
    """A vector that is stored as a matrix of one row, replicated."""

    size: int
    axis = None
    dim = None

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return ((1, self.size),)

    @property
    def packed_shape(self) -> Shape:
        return (self.size,)

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0].squeeze(0)

    def unpack(self, packed: Tensor) -> tuple[Tensor, ...]:
        return (packed[None],)


@dataclass(frozen=True)
class Fused(Op):
    """The tensors of `parts`, concatenated by rows into a single tensor [sum of their rows, ...]; each part is split separately."""

    parts: Op
    dim = 0

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return ((sum(self._rows), *self.parts.shapes[0][1:]),)

    @property
    def packed_shape(self) -> Shape:
        return self.parts.packed_shape

    @property
    def axis(self) -> int | None:
        return self.parts.axis

    @property
    def _rows(self) -> list[int]:
        return [shape[0] for shape in self.parts.shapes]

    @property
    def projections(self) -> Op:
        return self.parts.projections

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        return self.parts.pack(tensors[0].split(self._rows))

    def unpack(self, packed: Tensor) -> tuple[Tensor, ...]:
        return (torch.cat(self.parts.unpack(packed)),)

    def read_shard(self, read: ReadSlice, rank: int, ranks: int) -> Tensor:
        if ranks == 1:
            return super().read_shard(read, rank, ranks)
        begin = [0, *accumulate(self._rows)]
        return self.parts.read_shard(lambda part, dim, start, stop: read(0, 0, begin[part] + start, begin[part] + stop), rank, ranks)


@dataclass(frozen=True)
class Sections(Op):
    """Rows of several kinds for each group of heads (a gated delta net's projections): packed [groups, its rows, ...], split by group.

    Megatron's parameter has them kind after kind, each with all groups of the rank; its checkpoints store each kind by itself.
    """

    groups: int
    kinds: tuple[tuple[str, int], ...]  # the name of each kind in checkpoints, and its rows in a group
    counts: tuple[int, ...]  # how many consecutive kinds each Hugging Face tensor holds
    rest: Shape
    interleaved: bool = False  # the Hugging Face tensors hold group after group, not kind after kind
    axis = 0
    dim = 0

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return tuple((self.groups * sum(widths), *self.rest) for widths in self._widths)

    @property
    def packed_shape(self) -> Shape:
        return (self.groups, sum(self._rows), *self.rest)

    @property
    def pieces(self) -> dict[str, Op]:
        return {f".{kind}": Plain((self.groups * width, *self.rest), 0) for kind, width in self.kinds}

    @property
    def projections(self) -> Op:
        return replace(self, counts=(1,) * len(self.kinds), interleaved=False)

    @property
    def _rows(self) -> list[int]:
        return [rows for _, rows in self.kinds]

    @property
    def _widths(self) -> list[list[int]]:
        """The rows in a group of each kind in each Hugging Face tensor."""
        ends = accumulate(self.counts)
        return [self._rows[end - count : end] for count, end in zip(self.counts, ends, strict=True)]

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        groups = tensors[0].shape[0] // sum(self._widths[0])
        if self.interleaved:
            return torch.cat([tensor.reshape(groups, -1, *self.rest) for tensor in tensors], dim=1)
        return self.chunk(torch.cat(list(tensors)), self.groups // groups)

    def unpack(self, packed: Tensor) -> tuple[Tensor, ...]:
        tensors = packed.split([sum(widths) for widths in self._widths], dim=1)
        if self.interleaved:
            return tuple(tensor.reshape(-1, *self.rest) for tensor in tensors)
        return tuple(_kind_after_kind(tensor, widths) for tensor, widths in zip(tensors, self._widths, strict=True))

    def parameter(self, chunk: Tensor) -> Tensor:
        return _kind_after_kind(chunk, self._rows)

    def chunk(self, parameter: Tensor, ranks: int) -> Tensor:
        groups = self.groups // ranks
        parts = parameter.split([groups * rows for rows in self._rows])
        return torch.cat([part.reshape(groups, -1, *self.rest) for part in parts], dim=1)

    def read_shard(self, read: ReadSlice, rank: int, ranks: int) -> Tensor:
        if ranks == 1 or self.interleaved:
            return super().read_shard(read, rank, ranks)
        units, tensors = self.units(ranks), []
        for index, widths in enumerate(self._widths):
            begins = [self.groups * before for before in (0, *accumulate(widths[:-1]))]
            cuts = [(begin + rank * units * width, begin + (rank + 1) * units * width) for begin, width in zip(begins, widths, strict=True)]
            tensors.append(torch.cat([read(index, 0, start, stop) for start, stop in cuts]))
        return self.pack(tensors)


def _kind_after_kind(chunk: Tensor, widths: list[int]) -> Tensor:
    """Order the rows of a chunk [groups, sum of widths, ...] by kind, then by group."""
    return torch.cat([part.flatten(0, 1) for part in chunk.split(widths, dim=1)])

"""The weight map of a model family: which Hugging Face tensors make each Megatron parameter, and how.

A `WeightMapping` names one kind of Megatron parameter, its Hugging Face tensors, and the `Op` between them. The operation packs the
tensors into one whose tensor-parallel shard is a plain chunk along one axis; reshaped to two dimensions or one, that shard is the Megatron
parameter. Every operation commutes with cutting: packing the slices [a, b) of the Hugging Face tensors (of a `Fused` one: of each of its
parts) gives the slice [a, b) of the packed tensor. So one mapping loads a shard by reading only its slices, exports, converts and gives
the shapes a checkpoint must have.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from megarl.errors import ConfigError
from megarl.lazy_torch import Tensor, torch
from megarl.models.rope import Rope

Shape = tuple[int, ...]
HeadKind = Literal["lm", "value"]  # logits over the vocabulary, or one number a token (critic, reward model)
OUTPUT = "output_layer.weight"  # Megatron's name of any head's one parameter
_MOST_PARTS = 1 << 18  # ten times what the largest models have
ReadSlice = Callable[[int, int | None, int, int], Tensor]  # (which Hugging Face tensor, dimension or None for all of it, start, stop)


class Op(ABC):
    """Hugging Face tensors <-> packed tensor."""

    pads: bool = False  # the cut axis may be padded with zeros up to a multiple of the ranks

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
        """The dimension of each Hugging Face tensor that tensor parallelism cuts; None if it is replicated."""

    @property
    @abstractmethod
    def axis(self) -> int | None:
        """The axis of the packed tensor that tensor parallelism cuts; None if it is replicated."""

    @abstractmethod
    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """The packed tensor of Hugging Face tensors, or of their equal cuts."""

    @abstractmethod
    def unpack(self, packed: Tensor) -> tuple[Tensor, ...]:
        """The exact inverse of `pack`: views where possible."""

    def units(self, ranks: int) -> int:
        """How many indices of the cut axis each of `ranks` ranks holds."""
        assert self.axis is not None
        extent = self.packed_shape[self.axis]
        assert self.pads or extent % ranks == 0, f"{extent} units do not divide by {ranks} ranks"
        return -(-extent // ranks)

    def shard_shape(self, ranks: int) -> Shape:
        """The shape of one rank's chunk of the packed tensor."""
        if self.axis is None:
            return self.packed_shape
        return self.packed_shape[: self.axis] + (self.units(ranks),) + self.packed_shape[self.axis + 1 :]

    def read_shard(self, read: ReadSlice, rank: int, ranks: int) -> Tensor:
        """Makes one rank's chunk of the packed tensor from the slices that it needs and no more.

        Args:
            read: gives a slice of one of the Hugging Face tensors (see `ReadSlice`).
            rank: the rank's place among those that share the parameter.
            ranks: how many those are.

        Returns:
            A tensor of `shard_shape(ranks)`, in the dtype of what is read; padding is 0.
        """
        if self.axis is None or self.dim is None or ranks == 1:
            return self._padded(self.pack([read(index, None, 0, 0) for index in range(len(self.shapes))]), ranks)
        extent, units = self.packed_shape[self.axis], self.units(ranks)
        start, stop = min(rank * units, extent), min((rank + 1) * units, extent)
        pieces = []
        for index, shape in enumerate(self.shapes):
            rows = shape[self.dim] // extent  # of this Hugging Face tensor in one unit
            pieces.append(read(index, self.dim, start * rows, stop * rows))
        return self._padded(self.pack(pieces), ranks)

    def join(self, shards: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The Hugging Face tensors of the chunks of all ranks, in the order of the ranks; padding is dropped."""
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
    """One tensor as it is, cut along `axis` (0 column parallel and vocabulary, 1 row parallel, None replicated)."""

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
    """Query, key and value projections, interleaved by query group: packed [groups, (heads/groups + 2) * head_dim, ...], cut by groups."""

    heads: int
    groups: int
    head_dim: int
    rest: Shape  # (hidden,) for weights, () for biases
    axis = 0
    dim = 0

    @property
    def shapes(self) -> tuple[Shape, ...]:
        query, key = self.heads * self.head_dim, self.groups * self.head_dim
        return (query, *self.rest), (key, *self.rest), (key, *self.rest)

    @property
    def packed_shape(self) -> Shape:
        return (self.groups, (self.heads // self.groups + 2) * self.head_dim, *self.rest)

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        groups = tensors[1].shape[0] // self.head_dim
        return torch.cat([tensor.reshape(groups, -1, *self.rest) for tensor in tensors], dim=1)

    def unpack(self, packed: Tensor) -> tuple[Tensor, ...]:
        sizes = [self.heads // self.groups * self.head_dim, self.head_dim, self.head_dim]
        return tuple(part.reshape(-1, *self.rest) for part in packed.split(sizes, dim=1))


@dataclass(frozen=True)
class GateUp(Op):
    """The gate and up projections of a gated MLP: packed [2, ffn, hidden], cut by ffn."""

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
class Fused(Op):
    """The tensors of `parts` lie one behind the other in a single one: [sum of their rows, ...], cut part by part."""

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
class WeightMapping:
    """One kind of Megatron parameter. Names hold `{layer}` and `{expert}`, both counted from 0 over the whole model."""

    megatron: str
    hf: tuple[str, ...]
    op: Op
    alias: bool = False  # a second copy of tensors that another mapping exports (tied embeddings)
    layers: range | None = None  # those that have it; None: all
    float32: bool = False  # a buffer of float32 whatever the model's dtype, saved and sent so (a router's expert bias)


@dataclass(frozen=True)
class Weight:
    """One Megatron parameter (or persistent buffer) of the whole model: a mapping at one layer and expert."""

    name: str
    hf: tuple[str, ...]
    op: Op
    layer: int | None
    expert: int | None  # set: the parameter is cut by expert tensor parallelism, and lives on one expert-parallel rank
    alias: bool = False
    float32: bool = False


@dataclass(frozen=True)
class Sizes:
    """The numbers of a model that layouts must divide and that builders need."""

    layers: int
    hidden: int
    heads: int
    groups: int  # key-value heads
    head_dim: int  # of queries and keys
    vocab: int
    ffn: int | None = None  # of dense MLPs; None: there is none
    experts: int = 0  # 0: no mixture
    expert_ffn: int = 0
    shared_ffn: int = 0  # of the experts that every token takes, together; 0: there is none
    dense: int = 0  # the first layers, which have a dense MLP where the others have experts

    def __post_init__(self) -> None:
        """Raises ConfigError where there are more parts than can be listed."""
        if self.layers * max(1, self.experts) > _MOST_PARTS:
            raise ConfigError(
                f"model.path: config.json has {self.layers} layers of {self.experts} experts, more than {_MOST_PARTS} together"
            )


@dataclass(frozen=True)
class Head:
    """What stands on the backbone of a family, on the last pipeline stage."""

    architecture: str  # config.json's architectures[0]
    mapping: Callable[[dict[str, Any]], WeightMapping]  # of the parameter OUTPUT
    labels: dict[str, Any]  # what config.json says of the head beside its architecture
    known: bool = True  # to transformers; else megarl alone loads what it saves


def scalar_head(architecture: str, sizes: Callable[[dict[str, Any]], Sizes], *, known: bool = True) -> Head:
    """One number a token, as transformers' sequence classification with one label keeps it in every family that has a class for it.

    Args:
        architecture: what config.json's architectures[0] says of it.
        sizes: as in `Family`; the hidden size is read.
        known: whether transformers has this class.
    """

    def mapping(hf: dict[str, Any]) -> WeightMapping:
        return WeightMapping(OUTPUT, ("score.weight",), Plain((1, sizes(hf).hidden)))

    return Head(architecture, mapping, {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}, known)


def _nothing(hf: dict[str, Any]) -> tuple[str, ...]:
    return ()


def _as_it_is(layer: Any, backend: Any) -> None: ...


@dataclass(frozen=True)
class Family:
    """What megarl knows of one kind of model: a backbone, and the heads that it may carry."""

    heads: dict[HeadKind, Head]
    sizes: Callable[[dict[str, Any]], Sizes]  # raises ConfigError where config.json asks for what the family's weight map does not hold
    weight_map: Callable[[dict[str, Any]], list[WeightMapping]]  # of the backbone
    rope: Callable[[dict[str, Any]], Rope]  # raises ConfigError for what no rank could build
    fields: Callable[[dict[str, Any]], dict[str, Any]]  # of Megatron's (MLA)TransformerConfig; raises ConfigError as `rope` does
    optional: Callable[[dict[str, Any]], tuple[str, ...]] = _nothing  # Hugging Face tensors that may be there and are not used
    predictors: Callable[[dict[str, Any]], tuple[str, ...]] = _nothing  # what names of multi-token-prediction tensors begin with
    layer_spec: Callable[[Any, Any], None] = _as_it_is  # changes Megatron's ModuleSpec of a layer, with modules of the `parallel.Backend`

    def head_of(self, hf: dict[str, Any]) -> HeadKind:
        """The head that a config.json of this family names."""
        [kind] = [kind for kind, head in self.heads.items() if head.architecture == hf["architectures"][0]]
        return kind

    def labels(self, hf: dict[str, Any], head: HeadKind) -> dict[str, Any]:
        """What config.json says where `head` stands on the backbone of `hf`, without layers that predict further tokens."""
        none = {key: 0 for key in ("num_nextn_predict_layers", "num_mtp_layers") if hf.get(key)}
        return {"architectures": [self.heads[head].architecture], **self.heads[head].labels, **none}

    def weights(self, hf: dict[str, Any], head: HeadKind = "lm") -> list[Weight]:
        """Every Megatron parameter of the backbone of `hf` under `head`, whichever head `hf` names, in the order of the model: what
        stands outside the layers, then layer by layer."""
        sizes, mappings = self.sizes(hf), [*self.weight_map(hf), self.heads[head].mapping(hf)]
        weights = [weight for one in mappings if "{layer}" not in one.megatron for weight in _expand(one, None, 0)]
        inner = [one for one in mappings if "{layer}" in one.megatron]
        for layer in range(sizes.layers):
            for one in inner:
                if one.layers is None or layer in one.layers:
                    weights += _expand(one, layer, sizes.experts)
        return weights

    def expected(self, hf: dict[str, Any]) -> dict[str, Shape]:
        """The name and shape of every tensor that a checkpoint with this config.json must hold."""
        weights = self.weights(hf, self.head_of(hf))
        return {name: shape for weight in weights for name, shape in zip(weight.hf, weight.op.shapes, strict=True)}

    def update(self, hf: dict[str, Any], dtype: str) -> dict[str, tuple[list[int], str]]:
        """The shape and dtype of every tensor that an update brings an engine with weights of `dtype`, by Hugging Face name."""
        return {
            name: (list(shape), "float32" if weight.float32 else dtype)
            for weight in self.weights(hf)
            for name, shape in zip(weight.hf, weight.op.shapes, strict=True)
        }


def _expand(mapping: WeightMapping, layer: int | None, experts: int) -> Iterator[Weight]:
    for expert in range(experts) if "{expert}" in mapping.megatron else [None]:
        numbers = {"layer": layer, "expert": expert}
        name, hf = mapping.megatron.format(**numbers), tuple(name.format(**numbers) for name in mapping.hf)
        yield Weight(name, hf, mapping.op, layer, expert, mapping.alias, mapping.float32)

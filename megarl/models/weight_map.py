"""The weight map of a model family: the Hugging Face tensors of which each Megatron parameter is made, and how.

A `WeightMapping` names one kind of Megatron parameter, its Hugging Face tensors, and the `Op` between them. The operation packs the
tensors into one whose tensor-parallel shard is a plain chunk along one axis; reshaped to two dimensions or one, that shard is the Megatron
parameter. Every operation commutes with slicing: packing the slices [a, b) of the Hugging Face tensors (for a `Fused` one: of each of its
parts) gives the slice [a, b) of the packed tensor. One mapping is thus enough to load a shard by reading only its slices, to export, to
convert, and to derive the shapes that a checkpoint must have. `Sections` alone are parameters in another order than their shard.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

from megarl.errors import ConfigError
from megarl.lazy_torch import Tensor, torch
from megarl.models.config_json import ConfigJson
from megarl.models.rope import Rope

if TYPE_CHECKING:
    from megarl.models.vision import VisionSizes

Shape = tuple[int, ...]
HeadKind = Literal["lm", "value"]  # logits over the vocabulary, or one number per token (critic, reward model)
INDEXER = ".core_attention.indexer."  # part of the names of an indexer's parameters in Megatron
VISION = "vision."  # begins the names of a vision tower's parameters in Megatron
LAYER, BLOCK = "decoder.layers.{layer}.", "model.layers.{layer}."  # Megatron's and Hugging Face's prefixes of a layer
PREDICTOR = "mtp.layers.0."  # begins the names of a multi-token prediction layer's parameters in Megatron
OUTPUT = "output_layer.weight"  # Megatron's name of the single parameter of any head
FP8_BLOCK = 128  # rows and columns of the blocks in which fp8 engines quantise matrices (sync/quantize.py)
FP8, SCALES = "float8_e4m3fn", "_scale_inv"  # their dtype, and what the name of a matrix's scales adds to its own
MAMBA, ATTENTION, MIXTURE, MLP = "M*E-"  # kinds of layers that are a single block each; see `Sizes.blocks`
_MAX_PARTS = 1 << 18  # layers x experts; ten times what the largest models have
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

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        return tensors[0].t()

    def unpack(self, packed: Tensor) -> tuple[Tensor, ...]:
        return (packed.t(),)


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


@dataclass(frozen=True)
class WeightMapping:
    """One kind of Megatron parameter. Names may contain `{layer}` and `{expert}`, both counted from 0 over the whole model."""

    megatron: str
    hf: tuple[str, ...]
    op: Op
    alias: bool = False  # a second copy of tensors that another mapping exports (tied embeddings)
    layers: Collection[int] | None = None  # layers that have it; None: all
    float32: bool = False  # a buffer kept, saved and sent in float32, whatever the model's dtype (a router's expert bias)

    @property
    def linear(self) -> bool:
        """See `Weight.linear`."""
        return is_linear(self.megatron)

    @property
    def frozen(self) -> bool:
        """Whether it is not trained: an indexer has no part in the loss, and a vision tower is frozen unless `model.vision` trains it."""
        return is_frozen(self.megatron)


@dataclass(frozen=True)
class Weight:
    """One Megatron parameter (or persistent buffer) of the whole model: a mapping at one layer and expert."""

    name: str
    hf: tuple[str, ...]
    op: Op
    layer: int | None
    expert: int | None  # if set: the parameter is split by expert tensor parallelism, and belongs to one expert-parallel rank
    alias: bool = False
    float32: bool = False

    @property
    def linear(self) -> bool:
        """Whether it is the matrix of a linear layer or of an expert, which an fp8 engine quantises.

        Megatron calls these modules linear_*, and only these: embeddings, output layer, routers, norms and biases have other names.
        """
        return is_linear(self.name)


def is_frozen(name: str, tower: bool = False) -> bool:
    """Whether a parameter of this name is not trained; see `WeightMapping.frozen`. `tower`: the vision tower is."""
    return INDEXER in name or (name.startswith(VISION) and not tower)


def is_linear(name: str) -> bool:
    """See `Weight.linear`."""
    *_, module, parameter = name.split(".")
    # Published fp8 checkpoints have an indexer's weights of heads in bfloat16.
    return module.startswith("linear_") and not name.startswith(VISION) and module != "linear_weights_proj" and parameter == "weight"


@dataclass(frozen=True)
class Indexer:
    """The sizes of the indexer that chooses keys for a sparse attention."""

    heads: int
    head_dim: int
    topk: int  # keys that a query attends to
    interleaved: bool  # RoPE rotates neighbouring dimensions, not the two halves


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model: those that layouts must divide, and those needed to build it."""

    layers: int
    hidden: int
    heads: int
    groups: int  # key-value heads
    head_dim: int  # per-head dimension of queries and keys
    vocab: int
    ffn: int | None = None  # hidden units of dense MLPs; None: no dense MLPs
    experts: int = 0  # 0: no mixture of experts
    expert_ffn: int = 0
    shared_ffn: int = 0  # hidden units of all shared experts together; 0: no shared experts
    dense: int = 0  # number of first layers that have a dense MLP instead of experts
    # Key heads of its gated delta nets, or groups of its Mamba mixers, which tensor and context parallelism divide; 0: it has none.
    linear_heads: int = 0
    gated: bool = True  # MLPs and experts have a projection of gates
    blocks: str = ""  # the kind of each layer that is attention, a Mamba mixer or an MLP alone; empty: layers have attention and an MLP
    indexer: Indexer | None = None  # None: attention to all keys
    vision: VisionSizes | None = None  # of what sees images; None: a model of text

    @property
    def mixtures(self) -> int:
        """The number of layers with experts."""
        if self.blocks:
            return self.blocks.count(MIXTURE)
        return self.layers - self.dense if self.experts else 0

    @property
    def linear_parts(self) -> str:
        """What `linear_heads` counts, in words."""
        return "groups in its Mamba layers" if self.blocks else "key heads in its gated delta nets"

    @property
    def dense_width(self) -> float:
        """Hidden units of the MLP of the average layer without experts."""
        plain = self.layers - self.mixtures
        return (self.ffn or 0) * (self.blocks.count(MLP) / plain if self.blocks and plain else 1)

    @property
    def matrices(self) -> int:
        """The number of an MLP's or an expert's projections."""
        return 3 if self.gated else 2

    def __post_init__(self) -> None:
        """Raise ConfigError if there are too many layers and experts to list."""
        if self.layers * max(1, self.experts) > _MAX_PARTS:
            raise ConfigError(
                f"model.path: config.json has {self.layers} layers of {self.experts} experts, more than {_MAX_PARTS} together"
            )


@dataclass(frozen=True)
class Head:
    """A head on a family's backbone, on the last pipeline stage."""

    architecture: str  # config.json's architectures[0]
    mapping: Callable[[ConfigJson], WeightMapping]  # the mapping of the parameter OUTPUT
    labels: dict[str, Any]  # the head's other entries in config.json
    known: bool = True  # transformers has a class for it; otherwise only megarl can load a saved model


def scalar_head(architecture: str, sizes: Callable[[ConfigJson], Sizes], *, known: bool = True) -> Head:
    """Return a head with one number per token, stored like that of transformers' sequence classification with one label.

    Args:
        architecture: its name in config.json's architectures[0].
        sizes: as in `Family`; only the hidden size is used.
        known: whether transformers has this class.
    """

    def mapping(config: ConfigJson) -> WeightMapping:
        return WeightMapping(OUTPUT, ("score.weight",), Plain((1, sizes(config).hidden)))

    return Head(architecture, mapping, {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}, known)


@dataclass(frozen=True)
class Multipliers:
    """Numbers by which a model scales its embeddings, what each of a layer's two parts adds to the residual stream, and its logits."""

    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0


@dataclass(frozen=True)
class Images:
    """Models of text and images whose language model is of the family: config.json has its own as `text_config`."""

    architecture: str  # config.json's architectures[0]
    text: str  # what the names of the language model's tensors begin with, in the place of `model.`
    tower: str  # what those of the images' begin with


@dataclass(frozen=True)
class PredictorNames:
    """Hugging Face's names of a multi-token prediction layer, which is one of the model's layers with a projection before it.

    The projection's input is the normalised embedding of the next token, then the normalised state of the model at this one.
    """

    layer: str  # prefix of what any layer has
    embedding_norm: str
    state_norm: str
    projection: str
    norm: str  # after the layer
    copies: tuple[str, ...] = ()  # tensors that checkpoints may hold and that are the model's embedding and its output layer once more


def _nothing(config: ConfigJson) -> tuple[str, ...]:
    return ()


def _no_predictor(config: ConfigJson) -> PredictorNames | None:
    return None


def _unscaled(config: ConfigJson) -> Multipliers:
    return Multipliers()


def _as_it_is(layer: Any, backend: Any) -> None: ...


@dataclass(frozen=True)
class Family:
    """One model family: a backbone, and the heads that it can have."""

    heads: dict[HeadKind, Head]
    sizes: Callable[[ConfigJson], Sizes]  # raises ConfigError if config.json needs what the family's weight map does not support
    weight_map: Callable[[ConfigJson], list[WeightMapping]]  # the mappings of the backbone
    rope: Callable[[ConfigJson], Rope]  # raises ConfigError for a RoPE that cannot be built
    fields: Callable[[ConfigJson], dict[str, Any]]  # fields of Megatron's (MLA)TransformerConfig; raises ConfigError as `rope` does
    multipliers: Callable[[ConfigJson], Multipliers] = _unscaled
    optional: Callable[[ConfigJson], tuple[str, ...]] = _nothing  # names of Hugging Face tensors that may exist but are not used
    predictors: Callable[[ConfigJson], tuple[str, ...]] = _nothing  # name prefixes of multi-token prediction tensors
    # The layer of multi-token prediction that can be trained; None: none can. Raises ConfigError if config.json has several.
    predictor: Callable[[ConfigJson], PredictorNames | None] = _no_predictor
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of every key of config.json that the functions above read
    nullable: tuple[str, ...] = ()  # keys whose null has a meaning of its own, though it is not their default
    spellings: Mapping[str, str] = field(default_factory=dict)  # other names of these keys -> theirs
    names: tuple[str, ...] = ()  # further values of config.json's model_type
    stacked: bool = False  # checkpoints stack each tensor of a layer's experts along a first axis; see `hf.Stack`
    # Of stacks that may be stored transposed, too: which axis of an expert's tensor is `hidden_size` where it is not.
    hidden_axes: Mapping[str, int] = field(default_factory=dict)
    nested: bool = False  # config.json has the language model as `text_config`, and the tower as `vision_config`
    # Stacks that checkpoints may hold in the place of experts' tensors, and what an expert has in each, one after the other on its rows.
    stacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    images: Images | None = None  # of which models the language model is one of the family
    layer_spec: Callable[[Any, Any], None] = _as_it_is  # edits a layer's ModuleSpec; see `Backend.replicated_linear`

    def head_of(self, config: ConfigJson) -> HeadKind:
        """Return the kind of head that a config.json of this family names."""
        [kind] = [kind for kind, head in self.heads.items() if head.architecture == config["architectures"][0]]
        return kind

    def labels(self, config: ConfigJson, head: HeadKind, *, mtp: bool = False) -> dict[str, Any]:
        """Return the entries of config.json for a head on a backbone.

        Args:
            config: config.json of the backbone.
            head: the head.
            mtp: the model keeps the multi-token prediction layers of `config`.
        """
        keys = ("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules", "mtp_num_hidden_layers")
        none = {key: 0 for key in keys if config.get(key) and not mtp}
        return {"architectures": [self.heads[head].architecture], **self.heads[head].labels, **none}

    def mappings(self, config: ConfigJson, head: HeadKind, *, predicts: bool = False) -> list[WeightMapping]:
        """Return the mappings of the backbone of `config` and of `head`, whichever head `config` names.

        Args:
            config: config.json.
            head: the head.
            predicts: the model's multi-token prediction layer is trained, and its mappings come last.
        """
        return [
            *self.weight_map(config),
            self.heads[head].mapping(config),
            *(self.predictor_mappings(config) if predicts and head == "lm" else []),
        ]

    def predictor_mappings(self, config: ConfigJson) -> list[WeightMapping]:
        """Return the mappings of the multi-token prediction layer: those of the model's last layer with attention, and its own."""
        names, sizes = self.predictor(config), self.sizes(config)
        assert names is not None, "no multi-token prediction layer can be trained"
        layers = [one for one in self.weight_map(config) if one.megatron.startswith(LAYER)]
        attention = next(one for one in layers if one.megatron == f"{LAYER}self_attention.linear_proj.weight")
        last = sizes.layers - 1 if attention.layers is None else max(attention.layers)
        within = [
            replace(
                one,
                megatron=f"{PREDICTOR}transformer_layer.{one.megatron.removeprefix(LAYER)}",
                hf=tuple(names.layer + name.removeprefix(BLOCK) for name in one.hf),
                layers=None,
            )
            for one in layers
            if one.layers is None or last in one.layers
        ]
        width = sizes.hidden
        return [
            WeightMapping(f"{PREDICTOR}enorm.weight", (names.embedding_norm,), Plain((width,))),
            WeightMapping(f"{PREDICTOR}hnorm.weight", (names.state_norm,), Plain((width,))),
            WeightMapping(f"{PREDICTOR}eh_proj.weight", (names.projection,), Plain((width, 2 * width), 0)),
            *within,
            WeightMapping(f"{PREDICTOR}final_layernorm.weight", (names.norm,), Plain((width,))),
        ]

    def weights(self, config: ConfigJson, head: HeadKind = "lm", *, predicts: bool = False) -> list[Weight]:
        """Return every Megatron parameter of the backbone of `config` with `head`, whichever head `config` names.

        Parameters outside the layers come first, then those of each layer. `predicts`: see `mappings`.
        """
        sizes, mappings = self.sizes(config), self.mappings(config, head, predicts=predicts)
        weights = [weight for one in mappings if "{layer}" not in one.megatron for weight in _expand(one, None, sizes.experts)]
        inner = [one for one in mappings if "{layer}" in one.megatron]
        for layer in range(sizes.layers):
            for one in inner:
                if one.layers is None or layer in one.layers:
                    weights += _expand(one, layer, sizes.experts)
        return weights

    def expected(self, config: ConfigJson, *, predicts: bool = False) -> dict[str, Shape]:
        """Return the name and shape of every tensor that a checkpoint with this config.json must hold; `predicts`: see `mappings`."""
        weights = self.weights(config, self.head_of(config), predicts=predicts)
        return {name: shape for weight in weights for name, shape in zip(weight.hf, weight.op.shapes, strict=True)}

    def update(
        self, config: ConfigJson, dtype: str, quantization: str | None = None, *, predicts: bool = False
    ) -> dict[str, tuple[list[int], str]]:
        """Return the shape and dtype of every tensor in a weight update of an engine, by Hugging Face name.

        Args:
            config: config.json.
            dtype: the dtype of the engine's weights that are not quantised.
            quantization: `rollout.quantization`; with "fp8", the matrices of linear layers and experts come in FP8, each with its scales.
            predicts: see `mappings`.
        """
        expected = dict[str, tuple[list[int], str]]()
        for weight in self.weights(config, predicts=predicts):
            quantized = quantization == "fp8" and weight.linear
            for name, shape in zip(weight.hf, weight.op.shapes, strict=True):
                expected[name] = list(shape), FP8 if quantized else "float32" if weight.float32 else dtype
                if quantized:
                    expected[name + SCALES] = [-(-size // FP8_BLOCK) for size in shape], "float32"
        return expected

    def unquantized(self, config: ConfigJson) -> list[str]:
        """Return the Hugging Face names of the modules in the layers that multiply by a matrix which an fp8 engine does not quantise.

        These are the routers. Some of vLLM's models would quantise theirs.
        """
        kept = (weight for weight in self.weights(config) if weight.layer is not None and not weight.linear and not weight.float32)
        return [name.removesuffix(".weight") for weight in kept for name in weight.hf if len(weight.op.shapes[0]) == 2]


def _expand(mapping: WeightMapping, layer: int | None, experts: int) -> Iterator[Weight]:
    for expert in range(experts) if "{expert}" in mapping.megatron else [None]:
        numbers = {"layer": layer, "expert": expert}
        name, tensors = mapping.megatron.format(**numbers), tuple(name.format(**numbers) for name in mapping.hf)
        yield Weight(name, tensors, mapping.op, layer, expert, mapping.alias, mapping.float32)

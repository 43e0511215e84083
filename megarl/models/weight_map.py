"""The weight map of a model family: the Hugging Face tensors of which each Megatron parameter is made, and how.

A `WeightMapping` names one kind of Megatron parameter, its Hugging Face tensors, and the `Op` between them (see `weight_ops`). It is enough
to load a shard by reading only its slices, to export, to convert, and to derive the shapes that a checkpoint must have.
"""

from collections.abc import Collection
from dataclasses import dataclass

from megarl.models.weight_ops import Op

INDEXER = ".core_attention.indexer."  # part of the names of an indexer's parameters in Megatron
VISION = "vision."  # begins the names of a vision tower's parameters in Megatron
LAYER, BLOCK = "decoder.layers.{layer}.", "model.layers.{layer}."  # Megatron's and Hugging Face's prefixes of a layer
PREDICTOR = "mtp.layers.0."  # begins the names of a multi-token prediction layer's parameters in Megatron
OUTPUT = "output_layer.weight"  # Megatron's name of the single parameter of any head
FP8_BLOCK = 128  # rows and columns of the blocks in which fp8 engines quantise matrices (sync/quantize.py)
FP8, SCALES = "float8_e4m3fn", "_scale_inv"  # their dtype, and what the name of a matrix's scales adds to its own


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


def is_matrix(name: str) -> bool:
    """Whether a parameter of this name is the matrix of a trained linear layer of the language model, or of an expert.

    Beside those of `is_linear` these are the projections of delta nets, Mamba mixers and multi-token prediction, which no fp8 engine
    quantises.
    """
    others = (".in_proj.weight", ".out_proj.weight", ".eh_proj.weight")
    return (is_linear(name) or name.endswith(others)) and INDEXER not in name and not name.startswith(VISION)


def is_router(name: str) -> bool:
    """Whether a parameter of this name is the matrix of a router of experts."""
    return name.endswith(".mlp.router.weight")

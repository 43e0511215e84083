"""Loads Hugging Face weights into this rank's Megatron parameters, and gives the parameters canonical names.

Canonical parameter names are those of Megatron's local layers (`te_names`), with layers and experts numbered over the whole model.
"""

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from megarl.models.description import ModelDescription
from megarl.models.family import HeadKind
from megarl.models.hf import Checkpoint
from megarl.models.te_names import from_te
from megarl.models.weight_map import OUTPUT, VISION, Weight
from megarl.parallel.grid import Grid

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
ADAPTERS = "adapters."  # begins the names of adapters' parameters in a chunk, beside those of the base model
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.")


def unwrap(chunk: Any) -> Any:
    """The GPTModel inside Float16Module, DistributedDataParallel and the like."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def head_of(chunks: Iterable[Any]) -> HeadKind:
    """The head that `build_chunks` gave these chunks' model, known on every pipeline stage."""
    [head] = {unwrap(chunk).head for chunk in chunks}
    return head


def local_parameters(chunks: Iterable[Any], ep_rank: int) -> dict[str, Tensor]:
    """The parameters of this rank's model chunks by canonical name, and the buffers that are also weights (a router's expert bias).

    Adapters are not among them: see `lora.adapters_of`.
    """
    parameters: dict[str, Tensor] = {}
    for chunk in map(unwrap, chunks):
        own = {name: tensor for name, tensor in (*chunk.named_parameters(), *weight_buffers(chunk)) if not name.startswith(ADAPTERS)}
        for given, name in canonical_names(chunk, own, ep_rank).items():
            assert name not in parameters, f"{name} twice on one rank"
            parameters[name] = own[given]
    return parameters


def canonical_names(chunk: Any, names: Iterable[str], ep_rank: int) -> dict[str, str]:
    """The canonical names of a chunk's parameters, by their names in the chunk.

    Args:
        chunk: the chunk, without wrappers.
        names: names of parameters in it.
        ep_rank: this rank's among the expert-parallel ones.
    """
    numbers = [layer.layer_number - 1 for layer in chunk.decoder.layers]  # Megatron numbers from 1, over all stages and chunks
    return {name: canonical(name, numbers, ep_rank * _local_experts(chunk)) for name in names}


def weight_buffers(chunk: Any) -> list[tuple[str, Tensor]]:
    """The buffers of a chunk that are also weights, by name."""
    return [(name, buffer) for name, buffer in chunk.named_buffers() if name.endswith(".expert_bias")]


def load_hf(chunks: Iterable[Any], model: ModelDescription, grid: Grid) -> None:
    """Fill every parameter of this rank from the model's directory, reading only this rank's slices.

    Call it before `make_trainable` copies parameters into the optimizer. A model with a scalar head may be loaded from a language model's
    directory: it takes the backbone and keeps its newly initialised head.

    Args:
        chunks: from `build_chunks`; each parameter keeps its dtype.
        model: the model.
        grid: this rank's grid.

    Raises:
        ValueError: the built model and the family's weight map differ (the error names the parameters), or the directory lacks the
            model's head (the error names both heads).
    """
    chunks = list(chunks)
    path, head = model.directory, head_of(chunks)
    if model.head != head and head == "lm":
        raise ValueError(f"{path} is a {model.architecture}, from which no {model.family.heads[head].architecture} can be loaded")
    weights = {weight.name: weight for weight in model.weights(head)}
    parameters = local_parameters(chunks, grid.ep_rank)
    unknown, absent = sorted(parameters.keys() - weights.keys()), sorted(_required(chunks, weights.values(), grid) - parameters.keys())
    if unknown or absent:
        raise ValueError(f"rank {grid.rank}: the built model and its family differ: not in the family {unknown}, not built {absent}")
    with Checkpoint(path, predictors=model.predicts, drop_images=model.drop_images) as checkpoint, torch.no_grad():
        for name, parameter in parameters.items():
            if name == OUTPUT and model.head != head:
                continue
            rank, ranks = tensor_parallel(weights[name], grid)
            shard = _shard(weights[name], checkpoint, rank, ranks)
            if shard.numel() != parameter.numel():
                built, packed = list(parameter.shape), list(shard.shape)
                raise ValueError(f"rank {grid.rank}: {name} is built as {built}, and its shard {rank} of {ranks} packs to {packed}")
            parameter.copy_(weights[name].op.parameter(shard))


def tensor_parallel(weight: Weight, grid: Grid) -> tuple[int, int]:
    """(rank, ranks) of the tensor parallelism that shards this weight: the experts' own, or the dense layers'."""
    if weight.expert is not None:
        return grid.etp_rank, grid.layout.etp
    return grid.tp_rank, grid.layout.tp


def _shard(weight: Weight, checkpoint: Checkpoint, rank: int, ranks: int) -> Tensor:
    def read(index: int, dim: int | None, start: int, stop: int) -> Tensor:
        return checkpoint.read(weight.hf[index], dim, start, stop)

    return weight.op.read_shard(read, rank, ranks)


def _required(chunks: list[Any], weights: Iterable[Weight], grid: Grid) -> set[str]:
    """The parameter names that these chunks must have, by their layers, their experts and the ends of the model that they hold."""
    inner = [unwrap(chunk) for chunk in chunks]
    layers = {layer.layer_number - 1 for chunk in inner for layer in chunk.decoder.layers}
    count = max(_local_experts(chunk) for chunk in inner)
    experts = range(grid.ep_rank * count, (grid.ep_rank + 1) * count)
    first, last = any(chunk.pre_process for chunk in inner), any(chunk.post_process for chunk in inner)

    def here(weight: Weight) -> bool:
        if weight.expert is not None and weight.expert not in experts:
            return False
        if weight.layer is not None:
            return weight.layer in layers
        return not weight.alias and (first if weight.name.startswith(("embedding.", VISION)) else last)

    return {weight.name for weight in weights if here(weight)}


def _local_experts(chunk: Any) -> int:
    return (chunk.config.num_moe_experts or 0) // chunk.config.expert_model_parallel_size


def canonical(name: str, layers: list[int], first_expert: int) -> str:
    """The canonical name of a chunk's parameter.

    Args:
        name: its name in the chunk, of local or of Transformer Engine's layers.
        layers: the numbers of the chunk's layers in the whole model.
        first_expert: the number of the chunk's first expert in the whole model.
    """
    name = _LAYER.sub(lambda match: f"decoder.layers.{layers[int(match[1])]}.", from_te(name))
    name = name.replace(".mtp_model_layer.", ".transformer_layer.", 1)  # as in upstream's checkpoints (multi_token_prediction.py:1556)
    return _EXPERT.sub(lambda match: f"mlp.experts.local_experts.{first_expert + int(match[1])}.", name)

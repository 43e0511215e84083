"""A layer of multi-token prediction (https://arxiv.org/abs/2412.19437, section 2.2), trained beside the model that it reads.

At a token it reads the model's last state there and the embedding of the next token, and predicts the token after that through the model's
output layer. States, embedding and output layer are detached: the gradient of the layer's loss reaches its own weights alone, and the rest
of the model is trained bit for bit as without it.

Axes: T entries of a micro-batch, R rows of it on a context-parallel rank, S = R / tp rows of a sequence-parallel shard, H hidden size,
V local vocabulary shard.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import reduce_scatter_to_sequence_parallel_region
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megarl.batch import Batch
from megarl.models.description import ModelDescription
from megarl.observe.metrics import Mean, Metric
from megarl.parallel.backend import Backend
from megarl.parallel.grid import Grid
from megarl.parallel.logprobs import likeliest, logprob_entropy
from megarl.parallel.packing import Packed
from megarl.parallel.weights import unwrap

GROUP = "mtp"  # upstream's name of the group of parameters whose gradients have a norm of their own (optimizer.py:150)
_TARGET, _WEIGHT = "mtp_target", "mtp_weight"  # columns of a batch
# What the layer's attention and experts take of what the model's layers were given.
_ARGUMENTS = ("attention_mask", "padding_mask", "rotary_pos_emb", "rotary_pos_cos", "rotary_pos_sin", "packed_seq_params")


def put_predictor(chunk: GPTModel, model: ModelDescription, backend: Backend, stage: int | None) -> None:
    """Add the layer, with weights not yet loaded, to the model's last chunk.

    Args:
        chunk: the chunk.
        model: the model.
        backend: the hardware.
        stage: the chunk's virtual stage.
    """
    config = _of_one_layer(chunk.config)
    layer = backend.layer_spec(config, stage).layer_specs[-1]
    model.family.layer_spec(layer, backend)
    norm, projection = backend.norm, backend.column_parallel_linear
    parts = MultiTokenPredictionLayerSubmodules(enorm=norm, hnorm=norm, layer_norm=norm, eh_proj=projection, mtp_model_layer=layer)
    spec = MultiTokenPredictionBlockSubmodules([ModuleSpec(MultiTokenPredictionLayer, submodules=parts)])
    chunk.mtp = MultiTokenPredictionBlock(config, spec, stage, chunk.pg_collection)


def _of_one_layer(config: TransformerConfig) -> TransformerConfig:
    """The configuration of the layer: that of a model whose chunks have one layer each, with attention to all tokens and, if any, experts.

    Its router has no auxiliary loss, which would be upstream's mean over micro-batches.
    """
    config = copy.copy(config)
    config.mtp_num_layers, config.mtp_detach_heads = 1, True
    config.num_layers = config.pipeline_model_parallel_size * (config.virtual_pipeline_model_parallel_size or 1)
    config.num_layers_in_first_pipeline_stage = config.num_layers_in_last_pipeline_stage = None
    config.moe_layer_freq, config.experimental_attention_variant, config.linear_attention_freq = 1, None, None
    config.moe_router_load_balancing_type, config.moe_aux_loss_coeff, config.moe_z_loss_coeff = "none", 0.0, None
    return config


def with_second_targets(batch: Batch) -> Batch:
    """Add what the layer is to predict at each entry: the target of the next entry in its context, with that entry's weight.

    The weight is 0 at a context's last entry, and where the target is no loss token.

    Args:
        batch: whole contexts; `extra_T` has `weight`.
    """
    context_T, _ = batch.contexts()
    order_T = torch.argsort(batch.position_T, stable=True)
    order_T = order_T[torch.argsort(context_T[order_T], stable=True)]
    entry_T, next_T = order_T[:-1], order_T[1:]
    inside = context_T[entry_T] == context_T[next_T]
    entry_T, next_T = entry_T[inside], next_T[inside]
    target_T, weight_T = torch.zeros_like(batch.target_T), torch.zeros(len(batch))
    target_T[entry_T] = batch.target_T[next_T]
    weight_T[entry_T] = torch.where(batch.mask_T, batch.extra_T["weight"].float(), 0.0)[next_T]
    return batch.with_extra(**{_TARGET: target_T, _WEIGHT: weight_T})


@dataclass
class _Trunk:
    """What the layer reads of the model's pass over a micro-batch."""

    state_S1H: Tensor | None = None  # after the last norm
    arguments: dict[str, Any] = field(default_factory=dict)


class PredictorPass:
    """One run over micro-batches in which the layer runs, too: `schedule.run` drives it. Collective.

    Args:
        chunks: this rank's chunks.
        grid: this rank's grid.
        vocabulary: the size of the model's vocabulary.
        weight: the weight of the layer's loss.
    """

    def __init__(self, chunks: Sequence[Any], grid: Grid, vocabulary: int, weight: float) -> None:
        self._grid, self._vocabulary, self._weight = grid, vocabulary, weight
        self.results: list[dict[str, Metric]] = []
        """The metrics of each micro-batch, on the last stage: mtp/loss, the mean of -log p of the layer's targets, and mtp/accuracy, how
        often the target is the likeliest token: so many of an engine's drafts would be accepted, if the model has sampled the tokens."""
        self._embedding_VH = _embedding(list(map(unwrap, chunks)), grid)

    @contextmanager
    def reading(self, chunk: Any) -> Iterator[_Trunk | None]:
        """Keep what the layer reads of a chunk's forward pass; None if the chunk does not have the layer."""
        own = unwrap(chunk)
        if not hasattr(own, "mtp"):
            yield None
            return
        trunk = _Trunk()

        def keep(_: Any, given: tuple[Any, ...], named: dict[str, Any], state_S1H: Tensor) -> None:
            assert not given, "the layers' arguments are named"
            trunk.state_S1H, trunk.arguments = state_S1H.detach(), {name: named[name] for name in _ARGUMENTS if name in named}

        handle = own.decoder.register_forward_hook(keep, with_kwargs=True)
        try:
            yield trunk
        finally:
            handle.remove()

    def logits(self, trunk: _Trunk, chunk: Any, batch: Batch, packed: Packed) -> Tensor:
        """Run the layer on a micro-batch.

        Args:
            trunk: from `reading`.
            chunk: the last chunk.
            batch: the micro-batch.
            packed: its rows.

        Returns:
            This rank's shard of the logits [R, V].
        """
        own = unwrap(chunk)
        assert trunk.state_S1H is not None and self._embedding_VH is not None
        next_R = torch.zeros_like(packed.input_ids[0])
        next_R[packed.row_T] = batch.target_T[packed.entry_T].to(next_R.device)
        [layer] = own.mtp.layers
        arguments = {
            "hidden_states": trunk.state_S1H.requires_grad_(torch.is_grad_enabled()),  # recomputation needs an input with a gradient
            "decoder_input": self._embedded(next_R),
            **trunk.arguments,
        }
        recomputed = layer.config.recompute_granularity == "full" and layer.training
        state_S1H = (layer._checkpointed_forward if recomputed else layer._proj_and_transformer_layer)(**arguments)
        weight = own.shared_embedding_or_output_weight() if own.share_embeddings_and_output_weights else own.output_layer.weight
        logits_R1V, _ = own.output_layer(state_S1H, weight=weight.detach())
        return logits_R1V.squeeze(1)

    @torch.no_grad()
    def _embedded(self, token_R: Tensor) -> Tensor:
        """This rank's shard of the tokens' embeddings, [S, 1, H]."""
        weight_VH, tp = self._embedding_VH, self._grid.groups.tp
        assert weight_VH is not None
        if tp.size() == 1:
            return F.embedding(token_R, weight_VH)[:, None]
        local_R = token_R - tp.rank() * len(weight_VH)
        here_R = (local_R >= 0) & (local_R < len(weight_VH))
        part_RH = F.embedding(torch.where(here_R, local_R, 0), weight_VH) * here_R[:, None]
        return reduce_scatter_to_sequence_parallel_region(part_RH[:, None], group=tp)

    def loss(self, logits_RV: Tensor, row_T: Tensor, batch: Batch) -> Tensor:
        """The layer's loss on this rank's entries of a micro-batch, which `row_T` places; appends its metrics to `results`."""
        target_T, weight_T = batch.extra_T[_TARGET], batch.extra_T[_WEIGHT]
        settings = (self._grid.groups.tp, self._vocabulary)
        with torch.no_grad():
            hit_T = likeliest(logits_RV, row_T, target_T, *settings)
        logp_T, _ = logprob_entropy(logits_RV, row_T, target_T, 1.0, *settings, overwrite=True)  # nothing else reads the logits
        scored_T = weight_T != 0
        count = float(scored_T.count_nonzero())
        self.results.append(
            {
                "mtp/loss": Mean(-float(logp_T.detach()[scored_T].sum()), count),
                "mtp/accuracy": Mean(float((hit_T & scored_T).count_nonzero()), count),
            }
        )
        return -self._weight * (weight_T * logp_T).sum()


def _embedding(chunks: list[Any], grid: Grid) -> Tensor | None:
    """The embedding's shard on the ranks of the last stage, to which those of the first send it; None elsewhere. Collective."""
    own = next((chunk.embedding.word_embeddings.weight for chunk in chunks if chunk.pre_process), None)
    last = next((chunk for chunk in chunks if hasattr(chunk, "mtp")), None)
    if grid.layout.pp == 1:
        assert own is not None
        return own.detach()
    if any(chunk.share_embeddings_and_output_weights for chunk in chunks):  # the last stage has a copy, which is trained as the first's
        return None if last is None else last.shared_embedding_or_output_weight().detach()
    if own is not None:
        dist.send(own.detach(), group=grid.groups.pp, group_dst=grid.layout.pp - 1)
    if last is None:
        return None
    weight_VH = torch.empty_like(last.output_layer.weight)
    dist.recv(weight_VH, group=grid.groups.pp, group_src=0)
    return weight_VH

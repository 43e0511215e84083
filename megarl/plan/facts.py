"""The numbers of a model that determine its bytes and FLOPs, read from config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from megarl.models.delta_nets import DeltaNets, delta_nets
from megarl.models.description import ModelDescription
from megarl.models.sizes import ATTENTION, MIXTURE, Sizes


@dataclass(frozen=True)
class Latents:
    """Widths of multi-latent attention."""

    query: int  # rank of the queries' latent; 0: there is none
    key_value: int
    rotary: int
    plain: int  # of the part of a query or key without rotary embedding
    value: int


@dataclass(frozen=True)
class PredictorSize:
    """The numbers of parameters of a multi-token prediction layer."""

    dense: int  # outside its experts
    experts: int


@dataclass(frozen=True)
class Facts:
    """What the plan must know about a model."""

    n: Sizes
    topk: int  # experts per token; 0: a dense model
    groups: int  # of experts; 1: they are not grouped
    chosen: int  # groups in which a token's experts are, at most
    head_norm: bool  # whether queries and keys are normalised
    rotary: int  # width of the part of a head with rotary embedding
    latents: Latents | None
    delta_nets: DeltaNets | None
    gated: bool  # whether each head's output has a gate, as wide as its query
    shared_gate: bool  # whether what the shared experts put out has a gate
    tied: bool
    window: int | None  # tokens that a query sees in the layers that have a sliding window; None: no layer has one
    windowed: float  # share of the layers that have one
    predictor: PredictorSize | None  # a multi-token prediction layer that is trained beside the model

    def has_experts(self, layer: int) -> bool:
        """Whether a layer is a mixture of experts."""
        return self.n.blocks[layer] == MIXTURE if self.n.blocks else bool(self.n.experts) and layer >= self.n.dense

    def block(self, layer: int) -> str:
        """The kind of a layer that is a single block (`Sizes.blocks`); empty: it has attention, or a gated delta net, and an MLP."""
        return self.n.blocks[layer] if self.n.blocks else ""

    def chooses_keys(self, length: float) -> bool:
        """Whether the attention of a sequence of so many tokens is sparse."""
        return self.n.indexer is not None and length > self.n.indexer.topk

    def is_linear(self, layer: int) -> bool:
        """Whether a layer has a gated delta net or a Mamba mixer in the place of attention."""
        return self.delta_nets is not None and layer in self.delta_nets.layers

    @property
    def attention_layers(self) -> int:
        """The number of layers with attention."""
        return self.n.blocks.count(ATTENTION) if self.n.blocks else self.n.layers - self.linear_layers

    @property
    def linear_layers(self) -> int:
        """The number of layers with a gated delta net or a Mamba mixer."""
        return len(self.delta_nets.layers) if self.delta_nets is not None else 0


def facts(model: ModelDescription) -> Facts:
    """Return the facts about a model. Raises ConfigError, as the family does."""
    n, fields = model.sizes, model.fields
    latents = _latents(fields) if model.latent else None
    return Facts(
        n=n,
        topk=fields["moe_router_topk"] if n.experts else 0,
        groups=fields.get("moe_router_num_groups", 1),
        chosen=fields.get("moe_router_group_topk", 1),
        head_norm=bool(fields["qk_layernorm"]),
        rotary=latents.rotary if latents else int(n.head_dim * model.rope.fraction),
        latents=latents,
        delta_nets=delta_nets(fields, model.config, n.blocks),
        gated=bool(fields.get("attention_output_gate")),
        shared_gate=bool(fields.get("moe_shared_expert_gate")),
        tied=model.tied,
        window=model.window,
        windowed=sum(some) / len(some) if (some := fields.get("window_attn_skip_freq")) else float(model.window is not None),
        predictor=_predictor(model) if model.predicts else None,
    )


def _predictor(model: ModelDescription) -> PredictorSize:
    dense = experts = 0
    for one in model.family.predictor_mappings(model.config):
        size = 0 if one.float32 else prod(one.op.packed_shape)
        if "{expert}" in one.megatron:
            experts += size * model.sizes.experts
        else:
            dense += size
    return PredictorSize(dense, experts)


def _latents(fields: Mapping[str, Any]) -> Latents:
    return Latents(
        query=fields["q_lora_rank"] or 0,
        key_value=fields["kv_lora_rank"],
        rotary=fields["qk_pos_emb_head_dim"],
        plain=fields["qk_head_dim"],
        value=fields["v_head_dim"],
    )

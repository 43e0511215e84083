"""The numbers of a model that its bytes and FLOPs follow from, read from config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.models.families import family_of
from megarl.models.weight_map import Sizes


@dataclass(frozen=True)
class Latents:
    """Widths of multi-latent attention."""

    query: int  # rank of the queries' latent; 0: there is none
    key_value: int
    rotary: int
    plain: int  # of a query's or key's part that is not turned
    value: int


@dataclass(frozen=True)
class Facts:
    """A model, as far as the plan must know it."""

    n: Sizes
    topk: int  # experts a token; 0: a dense model
    head_norm: bool  # queries and keys are normalised
    rotary: int  # width of the part of a head that is turned
    latents: Latents | None
    tied: bool

    def has_experts(self, layer: int) -> bool:
        """Whether a layer is a mixture."""
        return bool(self.n.experts) and layer >= self.n.dense


def facts(hf: dict[str, Any]) -> Facts:
    """Of a config.json of a known family. Raises ConfigError, as the family does."""
    family = family_of(hf)
    n, fields = family.sizes(hf), family.fields(hf)
    latents = _latents(fields) if fields.get("multi_latent_attention") else None
    return Facts(
        n=n,
        topk=fields["moe_router_topk"] if n.experts else 0,
        head_norm=bool(fields["qk_layernorm"]),
        rotary=latents.rotary if latents else int(n.head_dim * family.rope(hf).fraction),
        latents=latents,
        tied=bool(hf.get("tie_word_embeddings")),
    )


def _latents(fields: Mapping[str, Any]) -> Latents:
    return Latents(
        query=fields["q_lora_rank"] or 0,
        key_value=fields["kv_lora_rank"],
        rotary=fields["qk_pos_emb_head_dim"],
        plain=fields["qk_head_dim"],
        value=fields["v_head_dim"],
    )

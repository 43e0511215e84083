"""DeepSeek's sparse attention (DSA, https://arxiv.org/abs/2512.02556): a lightning indexer chooses the keys that each query of multi-latent
attention sees. What its families share: sizes, weight map and Megatron's fields of the indexer, which is frozen.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megarl.config import ConfigError
from megarl.lazy_torch import Tensor, torch
from megarl.models.config_json import ConfigJson, number
from megarl.models.decoder import check_mlp_layer_types, shared_sizes
from megarl.models.mla import sizes as mla_sizes
from megarl.models.sizes import Indexer, Sizes
from megarl.models.weight_map import BLOCK, INDEXER, LAYER, WeightMapping
from megarl.models.weight_ops import Plain

KIND = "indexed_attention"  # in config.json's layer_types
SCORES = 1 << 26  # scores of single heads that a rank computes together


def sizes(family: str, config: ConfigJson, *, interleaved: bool, **expected: Any) -> Sizes:
    """Return the sizes of a decoder with sparse attention and a sigmoid router. Raise ConfigError for what is not supported.

    Args:
        family: its name, for the message.
        config: config.json.
        interleaved: see `Indexer.interleaved`.
        **expected: the only supported value of further keys.
    """
    router = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    rotation = {"indexer_rope_interleave": interleaved}  # which transformers does not read, and vLLM does
    n = mla_sizes(family, config, shared_sizes(config), kind=KIND, mlp_bias=False, **router, **rotation, **expected)
    check_mlp_layer_types(config, n, n.dense)
    number(config, "q_lora_rank")
    heads, width, topk = (number(config, key) for key in ("index_n_heads", "index_head_dim", "index_topk"))
    if width < config["qk_rope_head_dim"]:
        raise ConfigError(f"model.path: config.json's index_head_dim={width} is below qk_rope_head_dim={config['qk_rope_head_dim']}")
    return replace(n, indexer=Indexer(heads, width, topk, interleaved))


def weight_map(config: ConfigJson, n: Sizes) -> list[WeightMapping]:
    """Return the mappings of the indexers, which every tensor-parallel rank has whole."""
    assert n.indexer is not None
    ours, theirs = f"{LAYER}self_attention{INDEXER}", BLOCK + "self_attn.indexer."
    shapes = {
        "linear_wq_b.weight": (n.indexer.heads * n.indexer.head_dim, config["q_lora_rank"]),
        "linear_wk.weight": (n.indexer.head_dim, n.hidden),
        "k_norm.weight": (n.indexer.head_dim,),
        "k_norm.bias": (n.indexer.head_dim,),
        "linear_weights_proj.weight": (n.indexer.heads, n.hidden),
    }
    return [WeightMapping(ours + name, (theirs + name.removeprefix("linear_"),), Plain(shape)) for name, shape in shapes.items()]


def fields(n: Sizes) -> dict[str, Any]:
    """Return the fields of Megatron's configuration that describe the indexer."""
    assert n.indexer is not None
    return {
        "dsa_indexer_n_heads": n.indexer.heads,
        "dsa_indexer_head_dim": n.indexer.head_dim,
        "dsa_indexer_topk": n.indexer.topk,
        "dsa_indexer_rope_interleaved": n.indexer.interleaved,
    }


def chosen(score_QS: Tensor, topk: int) -> Tensor:
    """Return the places [Q, K] of the K = min(topk, S) keys of the highest scores, in the order of the keys; of equal scores the earliest.

    The order matters where the products of all heads are negative, or those of a query are 0, so that scores are exactly 0 for several
    keys: torch's own topk takes any of them, and others for rows of another length. Scores that are not numbers are the lowest.
    """
    score_QS, count = score_QS.nan_to_num(-torch.inf, torch.inf, -torch.inf), min(topk, score_QS.shape[-1])
    least_Q1 = score_QS.topk(count, dim=-1).values[:, -1:]
    above_QS, equal_QS = score_QS > least_Q1, score_QS == least_Q1
    taken_QS = above_QS | (equal_QS & (equal_QS.cumsum(-1) <= count - above_QS.sum(-1, keepdim=True)))
    return taken_QS.nonzero()[:, 1].view(-1, count)

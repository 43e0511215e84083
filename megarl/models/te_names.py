"""Parameter names of Transformer Engine's layers beside those of Megatron's local layers, which are megarl's own.

Checkpoints hold Transformer Engine's names whatever layers a model is made of; everything else speaks of parameters by the local names.
"""

from __future__ import annotations

import re
from collections.abc import Collection

_FUSED = {  # a norm -> the linear layer behind it, of which Transformer Engine makes it a part
    "input_layernorm.weight": "self_attention.linear_qkv.",
    "pre_mlp_layernorm.weight": "mlp.linear_fc1.",
    "self_attention.q_layernorm.weight": "self_attention.linear_q_up_proj.",
    "self_attention.kv_layernorm.weight": "self_attention.linear_kv_up_proj.",
}
_NORM = "layer_norm_weight"  # of such a linear layer
_EXPERT = re.compile(r"mlp\.experts\.linear_fc([12])\.(weight|bias)(\d+)$")


def to_te(names: Collection[str]) -> dict[str, str]:
    """Local names -> Transformer Engine's. `names` are those of whole layers: a norm before a mixture of experts stays on its own."""
    found = dict.fromkeys(names)
    renamed = {}
    for name in found:
        renamed[name] = name
        for norm, linear in _FUSED.items():
            if name.endswith("." + norm):
                layer = name.removesuffix(norm)
                if f"{layer}{linear}weight" in found:
                    renamed[name] = f"{layer}{linear}{_NORM}"
    return renamed


def from_te(name: str) -> str:
    """The local name of a parameter of Transformer Engine's layers; a local name stays as it is."""
    for norm, linear in _FUSED.items():
        if name.endswith(linear + _NORM):
            return name.removesuffix(linear + _NORM) + norm
    return _EXPERT.sub(r"mlp.experts.local_experts.\3.linear_fc\1.\2", name)

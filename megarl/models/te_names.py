"""Parameter names of Transformer Engine's layers and of Megatron's local layers, and the translation between them.

Checkpoints have Transformer Engine's names, whichever layers a model is built from; everywhere else, megarl uses the local names.
"""

import re
from collections.abc import Collection

_FUSED = (  # a norm, and the linear layer after it, into which Transformer Engine fuses it
    ("input_layernorm.weight", "self_attention.linear_qkv."),
    ("input_layernorm.weight", "self_attention.in_proj."),
    ("pre_mlp_layernorm.weight", "mlp.linear_fc1."),
    ("self_attention.q_layernorm.weight", "self_attention.linear_q_up_proj."),
    ("self_attention.kv_layernorm.weight", "self_attention.linear_kv_up_proj."),
)
_NORM = "layer_norm_weight"  # the fused norm's name in such a linear layer
_EXPERT = re.compile(r"mlp\.experts\.linear_fc([12])\.(weight|bias)(\d+)$")


def to_te(names: Collection[str]) -> dict[str, str]:
    """Map local names to Transformer Engine's. `names` must cover whole layers, since a norm before a mixture of experts is not fused."""
    targets = dict.fromkeys(names)
    renamed = {}
    for name in targets:
        renamed[name] = name
        for norm, linear in _FUSED:
            if name.endswith("." + norm):
                layer = name.removesuffix(norm)
                if f"{layer}{linear}weight" in targets:
                    renamed[name] = f"{layer}{linear}{_NORM}"
    return renamed


def from_te(name: str) -> str:
    """Return the local name of a parameter of Transformer Engine's layers; a local name is returned unchanged."""
    for norm, linear in _FUSED:
        if name.endswith(linear + _NORM):
            return name.removesuffix(linear + _NORM) + norm
    name = name.replace(".self_attention.conv1d_", ".self_attention.conv1d.")  # of Mamba mixers; in checkpoints, too (mamba_mixer.py:1333)
    return _EXPERT.sub(r"mlp.experts.local_experts.\3.linear_fc\1.\2", name)

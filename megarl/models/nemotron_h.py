"""Nemotron-H and Nemotron-3 (Nano): each layer is a Mamba-2 mixer (https://arxiv.org/abs/2405.21060), attention without rotary embedding, a
mixture of experts or an MLP, with one norm before it. MLPs have no gate, and their activation is the square of ReLU; the router is
DeepSeek-V3's.

Time steps have no bounds, as in the Megatron that trained these models and in vLLM; transformers' class raises them to time_step_min,
whatever time_step_limit says, where it computes whole prompts. Multi-token prediction is not trained here. Refused: experts in a latent
space (moe_latent_size: Nemotron-3 Super and Ultra), more than one shared expert, biases but the convolution's, a convolution over more or
fewer than 4 tokens, time_step_limit, and what every family refuses (`decoder.refuse`).
"""

from typing import Any

from megarl.config import ConfigError
from megarl.models import decoder
from megarl.models import decoder_blocks as blocks
from megarl.models.config_json import ConfigJson, number
from megarl.models.family import Family, no_tensors
from megarl.models.rope import Rope
from megarl.models.sizes import ATTENTION, MAMBA, MIXTURE, MLP, Sizes
from megarl.models.weight_map import LAYER, WeightMapping
from megarl.models.weight_ops import QKV, Op, Plain, Sections

NAME = "Nemotron-H"
KERNEL = 4  # tokens that the convolution sees
UNLIMITED = ([0.0, float("inf")], [0.0, {"__float__": "Infinity"}])  # time_step_limit, as transformers 4 and 5 write it
BLOCK = "backbone.layers.{layer}."
# Names of a layer's kind in layers_block_type, among them those of transformers 4, and its letter in hybrid_override_pattern.
KINDS = {"linear_attention": MAMBA, "mamba": MAMBA, "full_attention": ATTENTION, "attention": ATTENTION, "moe": MIXTURE, "mlp": MLP}

DEFAULTS: dict[str, Any] = {  # of transformers' NemotronHConfig
    "vocab_size": 131072,
    "hidden_size": 4096,
    "num_hidden_layers": None,
    "layers_block_type": None,
    "hybrid_override_pattern": None,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "sliding_window": None,
    "max_position_embeddings": 4096,
    "intermediate_size": 21504,
    "mlp_hidden_act": "relu2",
    "mlp_bias": False,
    "use_bias": False,
    "tie_word_embeddings": False,
    "layer_norm_epsilon": 1e-5,
    "residual_in_fp32": False,
    "ssm_state_size": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "mamba_proj_bias": False,
    "mamba_ssm_cache_dtype": "float32",
    "n_groups": 8,
    "conv_kernel": KERNEL,
    "use_conv_bias": True,
    "time_step_limit": UNLIMITED[0],
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "moe_latent_size": None,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "num_nextn_predict_layers": 0,
}
SUPPORTED: dict[str, Any] = {  # the only values of these keys
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "use_conv_bias": True,
    "conv_kernel": KERNEL,
    "n_shared_experts": 1,
    "hidden_dropout": 0.0,
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_bias", "mamba_proj_bias", "residual_in_fp32", "tie_word_embeddings"), False),
    **dict.fromkeys(("sliding_window", "moe_latent_size", "time_step_limit")),
}
# Other names of these keys in transformers' class.
SPELLINGS = {
    "layer_types": "layers_block_type",
    "num_local_experts": "n_routed_experts",
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_dt_limit": "time_step_limit",
}


def kinds(config: ConfigJson) -> str:
    """Return the kind of each layer (`Sizes.blocks`). Raise ConfigError if config.json does not say it of each, or says it twice."""
    pattern, types, count = config["hybrid_override_pattern"], config["layers_block_type"], config["num_hidden_layers"]
    if pattern is None and types is None:
        raise ConfigError("model.path: config.json lacks layers_block_type or hybrid_override_pattern")
    named = "".join(KINDS.get(kind, "?") for kind in types) if types is not None else pattern
    if not named or not set(named) <= set(KINDS.values()):
        raise ConfigError(f"model.path: config.json's kinds of layers are {types or pattern!r:.200}, expected {', '.join(KINDS)}")
    if pattern not in (None, named) or count not in (None, len(named)):
        raise ConfigError(
            f"model.path: config.json's layers_block_type, hybrid_override_pattern={pattern!r:.200} and num_hidden_layers={count} differ"
        )
    return named


def layers_of(config: ConfigJson, given: str) -> tuple[int, ...]:
    """Return the layers of these kinds."""
    return tuple(layer for layer, kind in enumerate(kinds(config)) if kind in given)


def sizes(config: ConfigJson) -> Sizes:
    """Return the model's sizes. Raise ConfigError for what this weight map does not support."""
    limit = config["time_step_limit"]
    given = {**config, "layer_types": None, "time_step_limit": None if limit in UNLIMITED else limit}
    decoder.refuse(NAME, given, **SUPPORTED)
    pattern, groups, heads = kinds(config), number(config, "n_groups"), number(config, "mamba_num_heads")
    if heads % groups:
        raise ConfigError(f"model.path: config.json's n_groups={groups} does not divide mamba_num_heads={heads}")
    mixture = {
        "experts": number(config, "n_routed_experts"),
        "expert_ffn": number(config, "moe_intermediate_size"),
        "shared_ffn": number(config, "moe_shared_expert_intermediate_size"),
    }
    return decoder.sizes(
        {**config, "num_hidden_layers": len(pattern)},
        ffn=number(config, "intermediate_size") if MLP in pattern else None,
        linear_heads=groups if MAMBA in pattern else 0,
        gated=False,
        blocks=pattern,
        **(mixture if MIXTURE in pattern else {}),
    )


def weight_map(config: ConfigJson) -> list[WeightMapping]:
    """Return the weight map of the backbone: Megatron parameter <- Hugging Face tensors."""
    n = sizes(config)
    vocabulary, norm, mixed = Plain((n.vocab, n.hidden), 0, pads=True), Plain((n.hidden,)), "self_attention."
    parts: dict[str, list[tuple[str, tuple[str, ...], Op]]] = {
        MAMBA + ATTENTION: [("input_layernorm.weight", ("norm.weight",), norm)],
        MIXTURE + MLP: [("pre_mlp_layernorm.weight", ("norm.weight",), norm)],
        MAMBA: _mamba(config, n) if n.linear_heads else [],
        ATTENTION: [
            (mixed + "linear_qkv.weight", tuple(f"mixer.{x}_proj.weight" for x in "qkv"), QKV(n.heads, n.groups, n.head_dim, (n.hidden,))),
            (mixed + "linear_proj.weight", ("mixer.o_proj.weight",), Plain((n.hidden, n.heads * n.head_dim), 1)),
        ],
        MLP: _mlp("mlp.", "mixer.", n.ffn or 0, n.hidden),
        MIXTURE: [
            ("mlp.router.weight", ("mixer.gate.weight",), Plain((n.experts, n.hidden))),
            ("mlp.router.expert_bias", ("mixer.gate.e_score_correction_bias",), Plain((n.experts,))),
            *_mlp("mlp.experts.local_experts.{expert}.", "mixer.experts.{expert}.", n.expert_ffn, n.hidden),
            *_mlp("mlp.shared_experts.", "mixer.shared_experts.", n.shared_ffn, n.hidden),
        ],
    }
    return [
        WeightMapping("embedding.word_embeddings.weight", ("backbone.embeddings.weight",), vocabulary),
        *(
            WeightMapping(LAYER + ours, tuple(BLOCK + name for name in names), op, layers=layers, float32=ours.endswith("expert_bias"))
            for kinds, rows in parts.items()
            if (layers := layers_of(config, kinds))
            for ours, names, op in rows
        ),
        WeightMapping("decoder.final_layernorm.weight", ("backbone.norm_f.weight",), norm),
    ]


def _mlp(ours: str, theirs: str, ffn: int, hidden: int) -> list[tuple[str, tuple[str, ...], Op]]:
    ours, up, down = ours + "linear_fc", Plain((ffn, hidden), 0), Plain((hidden, ffn), 1)
    return [
        (ours + "1.weight", (theirs + "up_proj.weight",), up),
        (ours + "2.weight", (theirs + "down_proj.weight",), down),
    ]


def _mamba(config: ConfigJson, n: Sizes) -> list[tuple[str, tuple[str, ...], Op]]:
    """The rows of Mamba mixers, which tensor parallelism splits by group."""
    heads, states, groups = number(config, "mamba_num_heads"), number(config, "ssm_state_size"), n.linear_heads
    shared, inner = heads // groups, heads * number(config, "mamba_head_dim")
    turned = (("x", inner // groups), ("B", states), ("C", states))
    kinds = (("z", inner // groups), *turned, ("dt", shared))
    rows: list[tuple[str, str, Op]] = [
        ("in_proj.weight", "in_proj.weight", Sections(groups, kinds, (5,), (n.hidden,))),
        ("conv1d.weight", "conv1d.weight", Sections(groups, turned, (3,), (1, KERNEL))),
        ("conv1d.bias", "conv1d.bias", Sections(groups, turned, (3,), ())),
        ("norm.weight", "norm.weight", Plain((inner,), 0)),
        ("out_proj.weight", "out_proj.weight", Plain((n.hidden, inner), 1)),
        *((name, name, Plain((heads,), 0)) for name in ("dt_bias", "A_log", "D")),
    ]
    return [("self_attention." + ours, ("mixer." + theirs,), op) for ours, theirs, op in rows]


def rope(config: ConfigJson) -> Rope:
    """Return a rotary embedding, which no layer applies (`no_rope_freq`)."""
    return Rope("default", 10000.0, 1.0, {})


def fields(config: ConfigJson) -> dict[str, Any]:
    """Return the fields of Megatron's TransformerConfig."""
    n = sizes(config)
    return {
        **decoder.fields({**config, "rms_norm_eps": config["layer_norm_epsilon"]}, n, rope(config)),
        **(decoder.sigmoid_fields(NAME, config, n) if n.experts else {}),
        "moe_layer_freq": [int(kind == MIXTURE) for kind in n.blocks],
        "no_rope_freq": [1] * n.layers,
        "gated_linear_unit": False,
        "activation_func": "squared_relu",
        "bias_activation_fusion": False,  # Megatron has none for this activation
        "mamba_state_dim": number(config, "ssm_state_size"),
        "mamba_head_dim": number(config, "mamba_head_dim"),
        "mamba_num_groups": number(config, "n_groups"),
        "mamba_num_heads": number(config, "mamba_num_heads"),
    }


def predictors(config: ConfigJson) -> tuple[str, ...]:
    """Return the name prefix of the multi-token prediction layers."""
    return ("mtp.",)


FAMILY = Family(
    heads=blocks.heads("NemotronH", sizes, known=False),
    sizes=sizes,
    weight_map=weight_map,
    rope=rope,
    fields=fields,
    defaults=DEFAULTS,
    optional=no_tensors,
    predictors=predictors,
    spellings=SPELLINGS,
)

"""The large published models: their config.json, as far as it says anything about shapes, and what their publishers count."""

from dataclasses import dataclass, replace
from typing import Any

from megarl.config import Layout
from megarl.models.description import ModelDescription
from megarl.models.registry import completed


@dataclass(frozen=True)
class Published:
    """A model of the model hub."""

    kind: str  # config.json's model_type
    architecture: str
    config: dict[str, Any]
    parameters: int  # as published; without layers of multi-token prediction
    layout: Layout  # a sensible large one
    first: int | None = None  # layers of its first pipeline stage, where the stages are not equal
    quantization: dict[str, Any] | None = None  # config.json's quantization_config


def decoder(
    layers: int, hidden: int, heads: int, groups: int, vocabulary: int, positions: int, epsilon: float, theta: float | None, **more: Any
) -> dict[str, Any]:
    """What every config.json says (groups: key-value heads; theta: RoPE's base, None where it stands in `rope_parameters`), and more."""
    rope = {} if theta is None else {"rope_theta": theta}
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": groups}
    ends = {"vocab_size": vocabulary, "max_position_embeddings": positions, "rms_norm_eps": epsilon, "tie_word_embeddings": False}
    return {**sizes, **ends, **rope, **more}


def routed(experts: int, chosen: int, hidden: int, shared: int, dense: int, scale: float, groups: int = 1, topk: int = 1) -> dict[str, Any]:
    """DeepSeek's words for experts of a hidden size, of which each token's are chosen out of `topk` of the groups, after dense layers."""
    counts = {"n_routed_experts": experts, "num_experts_per_tok": chosen, "n_shared_experts": shared, "first_k_dense_replace": dense}
    return {**counts, "moe_intermediate_size": hidden, "routed_scaling_factor": scale, "n_group": groups, "topk_group": topk}


def latent(query: int | None, value: int = 128, key: int = 128) -> dict[str, Any]:
    """Multi-head latent attention: the rank of the queries, the sizes of a head's value and of its key without RoPE."""
    return {"kv_lora_rank": 512, "q_lora_rank": query, "qk_rope_head_dim": 64, "v_head_dim": value, "qk_nope_head_dim": key}


def qwen3_moe(layers: int, hidden: int, heads: int, expert: int) -> dict[str, Any]:
    experts = {"moe_intermediate_size": expert, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True}
    return decoder(layers, hidden, heads, 4, 151936, 40960, 1e-6, 1000000.0, head_dim=128, **experts)


def gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    yarn = {"factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 4096, "truncate": False}
    return {
        **decoder(layers, 2880, 64, 8, 201088, 131072, 1e-5, 150000, head_dim=64, attention_bias=True, intermediate_size=2880),
        **{"num_local_experts": experts, "num_experts_per_tok": 4, "experts_per_token": 4, "initial_context_length": 4096},
        **{"sliding_window": 128, "swiglu_limit": 7.0, "rope_scaling": {"rope_type": "yarn", **yarn}},
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
    }


MXFP4 = {
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"],
    "quant_method": "mxfp4",
}
FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
V2 = {"norm_topk_prob": False, "scoring_func": "softmax", "moe_layer_freq": 1}
V3 = {"norm_topk_prob": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
NO_WINDOW = {"use_sliding_window": False}
TOWER = {  # of Qwen3-VL-30B-A3B and Qwen3.5-35B-A3B alike
    **{"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16, "out_hidden_size": 2048, "in_channels": 3},
    **{"num_position_embeddings": 2304, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2},
    "hidden_act": "gelu_pytorch_tanh",
}
DELTA_NETS = {  # of Qwen3-Next and Qwen3.5-35B-A3B alike
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "mlp_only_layers": [],
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
MODELS = {
    "Qwen3-30B-A3B": Published(
        "qwen3_moe", "Qwen3MoeForCausalLM", qwen3_moe(48, 2048, 32, 768), 30_532_122_624, Layout(ranks=64, tp=4, pp=4, ep=8)
    ),
    "Qwen3-235B-A22B": Published(
        "qwen3_moe", "Qwen3MoeForCausalLM", qwen3_moe(94, 4096, 64, 1536), 235_093_634_560, Layout(ranks=128, tp=4, pp=4, ep=8), first=22
    ),
    "DeepSeek-V3": Published(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        {
            **decoder(61, 7168, 128, 128, 129280, 163840, 1e-6, 10000, intermediate_size=18432, num_nextn_predict_layers=1, **V3),
            **latent(1536),
            **routed(256, 8, 2048, 1, 3, 2.5, 8, 4),
            "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        671_026_419_200,
        Layout(ranks=256, tp=4, pp=4, ep=8),
        first=13,
        quantization=FP8,
    ),
    "Qwen2.5-0.5B": Published(
        "qwen2",
        "Qwen2ForCausalLM",
        {**decoder(24, 896, 14, 2, 151936, 32768, 1e-6, 1000000.0, intermediate_size=4864, **NO_WINDOW), "tie_word_embeddings": True},
        494_032_768,
        Layout(ranks=8, tp=2, pp=2),
    ),
    "Qwen3-8B": Published(
        "qwen3",
        "Qwen3ForCausalLM",
        decoder(36, 4096, 32, 8, 151936, 40960, 1e-6, 1000000, intermediate_size=12288, head_dim=128, **NO_WINDOW),
        8_190_735_360,
        Layout(ranks=8, tp=4, pp=2),
    ),
    "Llama-3-70B": Published(
        "llama",
        "LlamaForCausalLM",
        decoder(80, 8192, 64, 8, 128256, 8192, 1e-5, 500000.0, intermediate_size=28672),
        70_553_706_496,
        Layout(ranks=64, tp=8, pp=4, vpp=5),
    ),
    "Mistral-Small-24B": Published(
        "mistral",
        "MistralForCausalLM",
        decoder(40, 5120, 32, 8, 131072, 32768, 1e-5, 100000000.0, intermediate_size=32768, head_dim=128, sliding_window=None),
        23_572_403_200,
        Layout(ranks=16, tp=2, pp=4, vpp=5),
    ),
    "Mistral-7B-v0.1": Published(
        "mistral",
        "MistralForCausalLM",
        decoder(32, 4096, 32, 8, 32000, 32768, 1e-5, 10000.0, intermediate_size=14336, sliding_window=4096),
        7_241_732_096,
        Layout(ranks=8, tp=2, pp=2),
    ),
    "Phi-4": Published(
        "phi3",
        "Phi3ForCausalLM",
        decoder(40, 5120, 40, 10, 100352, 16384, 1e-5, 250000, intermediate_size=17920, sliding_window=None),
        14_659_507_200,
        Layout(ranks=16, tp=2, pp=4, vpp=5),
    ),
    "Mixtral-8x7B": Published(
        "mixtral",
        "MixtralForCausalLM",
        {
            **decoder(32, 4096, 32, 8, 32000, 32768, 1e-5, 1000000.0, intermediate_size=14336, sliding_window=None),
            **{"num_local_experts": 8, "num_experts_per_tok": 2},
        },
        46_702_792_704,
        Layout(ranks=64, tp=4, pp=4, ep=8, etp=2),
    ),
    "GLM-4.5-Air": Published(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        {
            **decoder(46, 4096, 96, 8, 151552, 131072, 1e-5, 1000000, intermediate_size=10944, num_nextn_predict_layers=1, head_dim=128),
            **routed(128, 8, 1408, 1, 1, 1.0),
            **{"partial_rotary_factor": 0.5, "attention_bias": True, "use_qk_norm": False, "norm_topk_prob": True},
        },
        106_852_251_264,  # the model hub counts 110,468,824,832 with the layer of multi-token prediction
        Layout(ranks=64, tp=4, pp=4, ep=8),
        first=10,
    ),
    "DeepSeek-V2-Lite": Published(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        {
            **decoder(27, 2048, 16, 16, 102400, 163840, 1e-6, 10000, intermediate_size=10944, topk_method="greedy", **V2),
            **latent(None),
            **routed(64, 6, 1408, 2, 1, 1.0),
            "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
        15_706_484_224,
        Layout(ranks=8, tp=2, ep=4),
    ),
    "DeepSeek-V2.5": Published(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        {
            **decoder(60, 5120, 128, 128, 102400, 163840, 1e-6, 10000, intermediate_size=12288, topk_method="group_limited_greedy", **V2),
            **latent(1536),
            **routed(160, 6, 1536, 2, 1, 16.0, 8, 3),
            "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        235_741_434_880,
        Layout(ranks=128, tp=4, pp=4, ep=8),
    ),
    "Moonlight-16B-A3B": Published(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        {
            **decoder(27, 2048, 16, 16, 163840, 8192, 1e-5, 50000.0, intermediate_size=11264, num_nextn_predict_layers=0, **V3),
            **latent(None),
            **routed(64, 6, 1408, 2, 1, 2.446),
            "moe_layer_freq": 1,
        },
        15_960_110_208,  # published as 16B
        Layout(ranks=8, tp=2, ep=4),
    ),
    "Kimi-K2-Instruct": Published(
        "kimi_k2",
        "DeepseekV3ForCausalLM",
        {
            **decoder(61, 7168, 64, 64, 163840, 131072, 1e-6, 50000.0, intermediate_size=18432, num_nextn_predict_layers=0, **V3),
            **latent(1536),
            **routed(384, 8, 2048, 1, 1, 2.827),
            "moe_layer_freq": 1,
            "rope_scaling": {**YARN, "factor": 32.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        1_026_408_232_448,  # published as 1T, or 1.04T
        Layout(ranks=256, tp=8, pp=8, ep=32),
        first=5,
        quantization=FP8,
    ),
    "GLM-4.6": Published(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        {
            **decoder(92, 5120, 96, 8, 151552, 202752, 1e-5, 1000000, intermediate_size=12288, num_nextn_predict_layers=1, head_dim=128),
            **routed(160, 8, 1536, 1, 3, 2.5),
            **{"partial_rotary_factor": 0.5, "attention_bias": True, "use_qk_norm": True, "norm_topk_prob": True, "rope_scaling": None},
        },
        352_797_829_024,  # the model hub counts 357B with the layer of multi-token prediction
        Layout(ranks=128, tp=4, pp=4, ep=8),
    ),
    "GLM-4.7-Flash": Published(
        "glm4_moe_lite",
        "Glm4MoeLiteForCausalLM",
        {
            **decoder(47, 2048, 20, 20, 154880, 202752, 1e-5, 1000000, intermediate_size=10240, num_nextn_predict_layers=1),
            **latent(768, 256, 192),
            **routed(64, 4, 1536, 1, 1, 1.8),
            **{"norm_topk_prob": True, "topk_method": "noaux_tc", "partial_rotary_factor": 1.0, "rope_scaling": None},
        },
        29_943_393_920,  # the model hub counts 31B with the layer of multi-token prediction
        Layout(ranks=16, tp=4, ep=4),
    ),
    "MiniMax-M2": Published(
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        {
            **decoder(62, 3072, 48, 8, 200064, 196608, 1e-6, 5000000, intermediate_size=1536, attn_type_list=[1] * 62, head_dim=128),
            **{"num_local_experts": 256, "num_experts_per_tok": 8, "scoring_func": "sigmoid", "use_routing_bias": True},
            **{"rotary_dim": 64, "use_qk_norm": True, "qk_norm_type": "per_layer", "shared_intermediate_size": 0},
            **{"use_mtp": True, "num_mtp_modules": 3, "mtp_transformer_layers": 1},
        },
        228_689_764_864,  # 230 billion, as published
        Layout(ranks=64, tp=4, pp=2, ep=8),
    ),
    "Qwen1.5-MoE-A2.7B": Published(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        {
            **decoder(24, 2048, 16, 16, 151936, 8192, 1e-6, 1000000.0, intermediate_size=5632, moe_intermediate_size=1408, **NO_WINDOW),
            **{"num_experts": 60, "num_experts_per_tok": 4, "shared_expert_intermediate_size": 5632, "norm_topk_prob": False},
            **{"decoder_sparse_step": 1, "sliding_window": 32768, "max_window_layers": 21},
        },
        14_315_784_192,
        Layout(ranks=16, tp=4, pp=2, ep=4),
    ),
    "OLMoE-1B-7B": Published(
        "olmoe",
        "OlmoeForCausalLM",
        {
            **decoder(16, 2048, 16, 16, 50304, 4096, 1e-5, 10000.0, intermediate_size=1024),
            **{"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False, "clip_qkv": None},
        },
        6_919_161_856,
        Layout(ranks=16, tp=2, pp=2, ep=8),
    ),
    "Qwen3-Next-80B-A3B": Published(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        {
            **DELTA_NETS,
            **decoder(48, 2048, 16, 2, 151936, 262144, 1e-6, 10000000, partial_rotary_factor=0.25, rope_scaling=None, **NO_WINDOW),
            **{"num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True, "decoder_sparse_step": 1, "intermediate_size": 5120},
        },
        79_674_391_296,
        Layout(ranks=64, tp=2, pp=4, ep=8),
    ),
    "Qwen3.5-35B-A3B": Published(
        "qwen3_5_moe",
        "Qwen3_5MoeForConditionalGeneration",
        {
            "text_config": {
                **DELTA_NETS,
                **decoder(40, 2048, 16, 2, 248320, 262144, 1e-6, None, num_experts=256, num_experts_per_tok=8),
                "model_type": "qwen3_5_moe_text",
                "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 10,
                "attention_bias": False,
                "attn_output_gate": True,
                "dtype": "bfloat16",
                "eos_token_id": 248044,
                "mamba_ssm_dtype": "float32",
                "mtp_num_hidden_layers": 1,
                "mtp_use_dedicated_embeddings": False,
                "rope_parameters": {
                    "mrope_interleaved": True,
                    "mrope_section": [11, 11, 10],
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 10000000,
                    "rope_type": "default",
                },
            },
            "image_token_id": 248056,
            "tie_word_embeddings": False,
            "vision_config": {**TOWER, "model_type": "qwen3_5_moe", "deepstack_visual_indexes": []},
        },
        34_660_610_688,  # of its language model
        Layout(ranks=32, tp=2, pp=2, ep=8),
    ),
    "gpt-oss-20b": Published(
        "gpt_oss",
        "GptOssForCausalLM",
        gpt_oss(24, 32),
        20_914_757_184,  # published as 20.91B
        Layout(ranks=16, tp=2, pp=2, ep=4, etp=1),
        quantization=MXFP4,
    ),
    "gpt-oss-120b": Published(
        "gpt_oss",
        "GptOssForCausalLM",
        gpt_oss(36, 128),
        116_829_156_672,  # published as 116.83B
        Layout(ranks=64, tp=4, pp=2, ep=8, etp=1),
        quantization=MXFP4,
    ),
    "Granite-3.1-8B": Published(
        "granite",
        "GraniteForCausalLM",
        {
            "hidden_size": 4096,
            "intermediate_size": 12800,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "attention_bias": False,
            "mlp_bias": False,
            "attention_multiplier": 0.0078125,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "logits_scaling": 16.0,
            "vocab_size": 49155,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000000.0,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
        },
        8_170_848_256,  # published as 8.17B
        Layout(ranks=8, pp=2),
    ),
    "Granite-3.1-3B-A800M": Published(
        "granitemoe",
        "GraniteMoeForCausalLM",
        {
            "hidden_size": 1536,
            "intermediate_size": 512,
            "num_hidden_layers": 32,
            "num_attention_heads": 24,
            "num_key_value_heads": 8,
            "num_local_experts": 40,
            "num_experts_per_tok": 8,
            "attention_bias": False,
            "attention_multiplier": 0.015625,
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "logits_scaling": 6.0,
            "vocab_size": 49155,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1500000.0,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
        },
        3_298_793_472,  # published as 3.3B
        Layout(ranks=16, pp=2, ep=8),  # 3 divides the vocabulary, 2 does not
    ),
    "ERNIE-4.5-21B-A3B": Published(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        {
            **decoder(28, 2560, 20, 4, 103424, 131072, 1e-5, 500000.0, intermediate_size=12288, moe_intermediate_size=1536),
            **{"moe_num_experts": 64, "moe_num_shared_experts": 2, "moe_k": 6, "moe_layer_start_index": 1, "moe_layer_interval": 1},
            **{"moe_use_aux_free": True, "use_bias": False, "tie_word_embeddings": True},
        },
        21_825_437_888,  # published as 21B
        Layout(ranks=16, tp=4, pp=2, ep=4),
    ),
    "Nemotron-3-Nano-30B-A3B": Published(
        "nemotron_h",
        "NemotronHForCausalLM",
        {
            "num_hidden_layers": 52,
            "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
            "hidden_size": 2688,
            "intermediate_size": 1856,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "mamba_num_heads": 64,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "n_groups": 8,
            "conv_kernel": 4,
            "expand": 2,
            "time_step_limit": [0.0, float("inf")],
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1856,
            "moe_shared_expert_intermediate_size": 3712,
            "routed_scaling_factor": 2.5,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "vocab_size": 131072,
            "layer_norm_epsilon": 1e-5,
            "rope_theta": 10000,
            "max_position_embeddings": 262144,
            "tie_word_embeddings": False,
        },
        31_577_940_288,  # published as 31.6B
        Layout(ranks=16, tp=2, pp=2, ep=8),
    ),
}
MODELS["DeepSeek-V3.2"] = replace(
    MODELS["DeepSeek-V3"],
    kind="deepseek_v32",
    architecture="DeepseekV32ForCausalLM",
    config={**MODELS["DeepSeek-V3"].config, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 2048},
    # The model hub counts 685,396,921,376, with scales and a layer of multi-token prediction, and 684,531,386,000 of DeepSeek-V3: the
    # difference is 62 indexers of 13,959,424 with 824 scales each. Here there are 61.
    parameters=MODELS["DeepSeek-V3"].parameters + 61 * 13_959_424,
)
MODELS["GLM-5"] = Published(
    "glm_moe_dsa",
    "GlmMoeDsaForCausalLM",
    {
        **decoder(78, 6144, 64, 64, 154880, 202752, 1e-5, None, intermediate_size=12288, num_nextn_predict_layers=1, head_dim=64, **V3),
        **latent(2048, 256, 192),
        **routed(256, 8, 2048, 1, 3, 2.5),
        **{"moe_layer_freq": 1, "index_n_heads": 32, "index_head_dim": 128, "index_topk": 2048, "indexer_rope_interleave": True},
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    },
    743_911_218_432,  # the model hub counts 753,864,139,008 with the layer of multi-token prediction
    Layout(ranks=192, tp=4, pp=6, ep=8),
)


def whole_config(model: Published) -> dict[str, Any]:
    """config.json."""
    quantized = {"quantization_config": model.quantization} if model.quantization else {}
    return {"architectures": [model.architecture], "model_type": model.kind, **model.config, **quantized}


def config_of(model: Published) -> dict[str, Any]:
    """config.json as `read_config` returns it: of a model of text and images, that of its language model."""
    return completed(whole_config(model), drop_images=True)


def description_of(model: Published) -> ModelDescription:
    """Its description, as if its config.json had been read."""
    return ModelDescription.of(config_of(model))


# Models that see images, whose config.json is nested. Of Qwen3-VL-30B-A3B-Instruct, as published.
QWEN3_VL_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3VLMoeForConditionalGeneration"],
    "model_type": "qwen3_vl_moe",
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "tie_word_embeddings": False,
    "text_config": {
        **qwen3_moe(48, 2048, 32, 768),
        "model_type": "qwen3_vl_moe_text",
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rope_theta": 5000000,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "max_position_embeddings": 262144,
        "dtype": "bfloat16",
    },
    "vision_config": {**TOWER, "model_type": "qwen3_vl_moe", "deepstack_visual_indexes": [8, 16, 24]},
}
QWEN3_5_35B_A3B = whole_config(MODELS["Qwen3.5-35B-A3B"])

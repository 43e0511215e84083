"""The large published models: their config.json, as far as it says anything about shapes, and what their publishers count."""

from __future__ import annotations

from dataclasses import dataclass
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


def qwen3(layers: int, hidden: int, heads: int, expert: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "moe_intermediate_size": expert,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "vocab_size": 151936,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    }


YARN = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
MODELS = {
    "Qwen3-30B-A3B": Published(
        "qwen3_moe", "Qwen3MoeForCausalLM", qwen3(48, 2048, 32, 768), 30_532_122_624, Layout(ranks=64, tp=4, pp=4, ep=8)
    ),
    "Qwen3-235B-A22B": Published(
        "qwen3_moe", "Qwen3MoeForCausalLM", qwen3(94, 4096, 64, 1536), 235_093_634_560, Layout(ranks=128, tp=4, pp=4, ep=8), first=22
    ),
    "DeepSeek-V3": Published(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        {
            "vocab_size": 129280,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 61,
            "num_nextn_predict_layers": 1,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "n_shared_experts": 1,
            "n_routed_experts": 256,
            "routed_scaling_factor": 2.5,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "qk_nope_head_dim": 128,
            "n_group": 8,
            "topk_group": 4,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
            "norm_topk_prob": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000,
            "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
            "max_position_embeddings": 163840,
            "tie_word_embeddings": False,
        },
        671_026_419_200,
        Layout(ranks=256, tp=4, pp=4, ep=8),
        first=13,
        quantization={"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
    ),
    "Qwen2.5-0.5B": Published(
        "qwen2",
        "Qwen2ForCausalLM",
        {
            "num_hidden_layers": 24,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "max_position_embeddings": 32768,
            "use_sliding_window": False,
            "tie_word_embeddings": True,
        },
        494_032_768,
        Layout(ranks=8, tp=2, pp=2),
    ),
    "Llama-3-70B": Published(
        "llama",
        "LlamaForCausalLM",
        {
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "max_position_embeddings": 8192,
            "tie_word_embeddings": False,
        },
        70_553_706_496,
        Layout(ranks=64, tp=8, pp=4, vpp=5),
    ),
    "Mistral-Small-24B": Published(
        "mistral",
        "MistralForCausalLM",
        {
            "hidden_size": 5120,
            "head_dim": 128,
            "intermediate_size": 32768,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "sliding_window": None,
            "vocab_size": 131072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 100000000.0,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": False,
        },
        23_572_403_200,
        Layout(ranks=16, tp=2, pp=4, vpp=5),
    ),
    "Mistral-7B-v0.1": Published(
        "mistral",
        "MistralForCausalLM",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "vocab_size": 32000,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": False,
        },
        7_241_732_096,
        Layout(ranks=8, tp=2, pp=2),
    ),
    "Phi-4": Published(
        "phi3",
        "Phi3ForCausalLM",
        {
            "hidden_size": 5120,
            "intermediate_size": 17920,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "num_key_value_heads": 10,
            "sliding_window": None,
            "vocab_size": 100352,
            "rms_norm_eps": 1e-5,
            "rope_theta": 250000,
            "max_position_embeddings": 16384,
            "tie_word_embeddings": False,
        },
        14_659_507_200,
        Layout(ranks=16, tp=2, pp=4, vpp=5),
    ),
    "Mixtral-8x7B": Published(
        "mixtral",
        "MixtralForCausalLM",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": None,
            "vocab_size": 32000,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": False,
        },
        46_702_792_704,
        Layout(ranks=64, tp=4, pp=4, ep=8, etp=2),
    ),
    "GLM-4.5-Air": Published(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        {
            "hidden_size": 4096,
            "intermediate_size": 10944,
            "moe_intermediate_size": 1408,
            "num_hidden_layers": 46,
            "num_nextn_predict_layers": 1,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "partial_rotary_factor": 0.5,
            "attention_bias": True,
            "use_qk_norm": False,
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "first_k_dense_replace": 1,
            "vocab_size": 151552,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": False,
        },
        106_852_251_264,  # the model hub counts 110,468,824,832 with the layer of multi-token prediction
        Layout(ranks=64, tp=4, pp=4, ep=8),
        first=10,
    ),
}


def config_of(model: Published) -> dict[str, Any]:
    """config.json as `read_config` returns it."""
    quantized = {"quantization_config": model.quantization} if model.quantization else {}
    return completed({"architectures": [model.architecture], "model_type": model.kind, **model.config, **quantized})


def description_of(model: Published) -> ModelDescription:
    """Its description, as if its config.json had been read."""
    return ModelDescription.of(config_of(model))

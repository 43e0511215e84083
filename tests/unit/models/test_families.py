"""What a checkpoint of each family must hold, under every spelling of its config.json, and what is refused before a process starts."""

import ast
import importlib.util
import json
import math
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl.config import ConfigError, Layout, Mtp
from megarl.models.description import ModelDescription
from megarl.models.families import FAMILIES, check_checkpoint, check_layout, family_of
from megarl.models.hf import read_config, stack_of
from megarl.models.megatron_fields import check_fields, fixed_fields, megatron_fields, unread
from megarl.models.te_names import from_te, to_te
from megarl.parallel.weights import canonical
from tests.published_models import MODELS, config_of
from tools.make_tiny_model import FAMILIES as TINY
from tools.make_tiny_model import build

DEEPSEEK_V3, KIMI_K2 = (config_of(MODELS[name]) for name in ("DeepSeek-V3", "Kimi-K2-Instruct"))
LAST = {"num_layers_in_last_pipeline_stage": 1}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("families")
    for family in TINY:
        build(folder / family, layers=2, hidden=128, experts=8, expert_hidden=32, seed=1, family=family)
    return {family: folder / family for family in TINY}


def copied(path: Path, target: Path, tensors: dict[str, Tensor | None] | None = None, **config: Any) -> Path:
    """The checkpoint with other fields in config.json (None removes one) and other tensors."""
    target.mkdir()
    changed = {**json.loads((path / "config.json").read_text()), **config}
    (target / "config.json").write_text(json.dumps({key: value for key, value in changed.items() if config.get(key, 0) is not None}))
    kept = {**load_file(path / "model.safetensors"), **(tensors or {})}
    save_file({name: tensor for name, tensor in kept.items() if tensor is not None}, target / "model.safetensors")
    return target


@pytest.mark.parametrize("family", TINY)
def test_missing_misshaped_and_unknown_tensors_are_named(tiny: dict[str, Path], tmp_path: Path, family: str) -> None:
    path = tiny[family]
    expected = check_checkpoint(path).expected()
    names, tensors = [name for name in expected if ".layers.1." in name], load_file(path / "model.safetensors")
    for place in (0, len(names) // 2, len(names) - 1):
        name, stored, wrong = names[place], names[place], torch.zeros(3)
        if name not in tensors:  # a part of a stack, of which the first is named
            own = ModelDescription.read(path).family
            stored, _, parts = stack_of(own, name)
            wrong, name = torch.zeros(8, 3 * parts), next(one for one in names if stack_of(own, one)[0] == stored)
        with pytest.raises(ConfigError, match=f"lacks the tensor {name} "):
            check_checkpoint(copied(path, tmp_path / f"missing{place}", {stored: None}))
        with pytest.raises(ConfigError, match=rf": {name} has shape \[3\], expected \[{expected[name][0]}"):
            check_checkpoint(copied(path, tmp_path / f"shape{place}", {stored: wrong}))
    with pytest.raises(ConfigError, match=r"holds the tensor model\.layers\.2\.self_attn\.q_proj\.bias, which"):
        check_checkpoint(copied(path, tmp_path / "unknown", {"model.layers.2.self_attn.q_proj.bias": torch.zeros(3)}))


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_multi_token_prediction_is_refused_or_left_out_or_kept_by_choice(tiny: dict[str, Path], tmp_path: Path, family: str) -> None:
    further: dict[str, Tensor | None] = {f"model.layers.2.{name}": torch.zeros(2) for name in ("eh_proj.weight", "shared_head.head.weight")}
    path = copied(tiny[family], tmp_path / "mtp", further, num_nextn_predict_layers=1)
    expected = r"holds model\.layers\.2\.eh_proj\.weight and 1 more multi-token prediction tensors \(model\.mtp=keep has them unchanged"
    with pytest.raises(ConfigError, match=expected):
        check_checkpoint(path)
    for mtp in ("drop", "keep"):
        assert check_checkpoint(path, mtp=mtp).config["num_nextn_predict_layers"] == 1
    without = copied(tiny[family], tmp_path / "without", {}, num_nextn_predict_layers=1)
    chosen: tuple[Mtp, ...] = ("keep", "train")
    for mtp in chosen:
        with pytest.raises(ConfigError, match=rf"holds no multi-token prediction layers \(model.mtp={mtp}\)"):
            check_checkpoint(without, mtp=mtp)
    later = copied(tiny[family], tmp_path / "later", {"model.layers.3.eh_proj.weight": torch.zeros(2)}, num_nextn_predict_layers=1)
    with pytest.raises(ConfigError, match=r"holds the tensor model\.layers\.3\.eh_proj\.weight"):
        check_checkpoint(later, mtp="drop")


def test_a_layer_of_multi_token_prediction_that_is_trained_is_checked(tiny: dict[str, Path], tmp_path: Path) -> None:
    model = ModelDescription.read(copied(tiny["glm4_moe"], tmp_path / "bare", {}, num_nextn_predict_layers=1), mtp="train")
    own = {name: torch.zeros(shape) for name, shape in model.expected().items() if name not in model.trunk.expected()}
    head = load_file(tiny["glm4_moe"] / "model.safetensors")["lm_head.weight"]
    copy = "model.layers.2.shared_head.head.weight"
    faults: list[tuple[dict[str, Tensor | None], dict[str, Any], str]] = [
        ({"model.layers.2.enorm.weight": None}, {}, r"lacks the tensor model\.layers\.2\.enorm\.weight \(1 of"),
        ({"model.layers.2.eh_proj.weight": torch.zeros(3)}, {}, r"model\.layers\.2\.eh_proj\.weight has shape \[3\]"),
        ({"model.layers.2.further.weight": torch.zeros(3)}, {}, r"holds the tensor model\.layers\.2\.further\.weight, which"),
        ({copy: head + 1}, {}, r"shared_head\.head\.weight differs from lm_head\.weight by up to 1: model\.mtp=train"),
        ({copy: head[:2].clone()}, {}, r"shared_head\.head\.weight differs from lm_head\.weight by up to inf"),
        ({}, {"num_nextn_predict_layers": 2}, r"num_nextn_predict_layers=2: model\.mtp=train takes 1"),
    ]
    for place, (changes, config, message) in enumerate(faults):
        path = copied(tiny["glm4_moe"], tmp_path / str(place), {**own, **changes}, **{"num_nextn_predict_layers": 1, **config})
        with pytest.raises(ConfigError, match=message):
            check_checkpoint(path, mtp="train")
    whole = copied(tiny["glm4_moe"], tmp_path / "whole", {**own, copy: head.clone()}, num_nextn_predict_layers=1)
    assert check_checkpoint(whole, mtp="train").predicts
    with pytest.raises(ConfigError, match=r"model\.mtp=train: not for Qwen3MoeForCausalLM"):
        check_checkpoint(tiny["qwen3_moe"], mtp="train")


def test_a_tied_output_layer_may_be_stored_all_the_same(tiny: dict[str, Path], tmp_path: Path) -> None:
    embedding = load_file(tiny["qwen2_tied"] / "model.safetensors")["model.embed_tokens.weight"]
    check_checkpoint(copied(tiny["qwen2_tied"], tmp_path / "stored", {"lm_head.weight": embedding.clone()}))


OLD: dict[str, dict[str, Any]] = {
    "llama": {
        "rope_theta": 500000.0,
        "rope_scaling": {
            "type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
    "qwen2": {"rope_theta": 10000.0, "rope_scaling": None, "sliding_window": 4096, "use_sliding_window": False},
    "mistral": {"rope_theta": 10000.0, "rope_scaling": None},
    "phi3": {"rope_theta": 10000.0, "rope_scaling": None, "sliding_window": None, "attention_bias": False},
    "mixtral": {"rope_theta": 1000000.0, "sliding_window": None},
    "glm4_moe": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "moonlight": {"rope_theta": 10000.0, "ep_size": 1, "seq_aux": True, "head_dim": None},
    "deepseek_v2": {
        "rope_theta": 10000,
        "rope_scaling": {"type": "yarn", "factor": 8, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 1.0},
        "moe_layer_freq": 1,
    },
    "glm4_moe_lite": {"rope_theta": 10000, "rope_scaling": None, "partial_rotary_factor": 1.0, "mlp_layer_types": None},
    "qwen2_moe": {"rope_theta": 10000.0, "sliding_window": 32768, "max_window_layers": 28, "layer_types": None},
    "olmoe": {"rope_theta": 10000.0, "rope_scaling": None},
    "granitemoe": {"rope_theta": 10000.0, "rope_scaling": None, "head_dim": None},
    "granite": {"rope_theta": 10000.0, "rope_scaling": None, "head_dim": None},
    "ernie4_5_moe": {"rope_theta": 500000.0, "moe_layer_end_index": -1, "moe_use_aux_free": True, "moe_gate": "topk", "use_bias": None},
    "minimax_m2": {"rope_theta": 5000000, "partial_rotary_factor": None, "use_qk_norm": True, "qk_norm_type": "per_layer"},
    "deepseek_v3": {
        "rope_theta": 10000,
        "rope_scaling": {"type": "yarn", "factor": 8, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 1.0},
        "ep_size": 1,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
}


@pytest.mark.parametrize("family", OLD)
def test_older_spelling_means_the_same(tiny: dict[str, Path], tmp_path: Path, family: str) -> None:
    new = check_checkpoint(tiny[family])
    old = check_checkpoint(copied(tiny[family], tmp_path / "old", rope_parameters=None, **OLD[family]))
    assert fixed_fields(old, "float32", Layout()) == fixed_fields(new, "float32", Layout())
    one, two = old.rope, new.rope
    assert torch.equal(one.frequencies(32), two.frequencies(32)) and one.fraction == two.fraction


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
        "RoPE of type 'dynamic'; supported: 'default'",
    ),
    (
        "llama",
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}},
        "has low_freq_factor=None, expected a positive",
    ),
    ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": None}}, "config.json's rope_theta is null, which says nothing"),
    ("llama", {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "LlamaForCausalLM rotates whole heads"),
    (
        "llama",
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        "rope_scaling and rope_parameters, which differ: rope_type is 'linear' and 'llama3'; transformers uses rope_scaling alone",
    ),
    ("llama", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "a RoPE for each kind of layer"),
    ("llama", {"mlp_bias": True}, "mlp_bias=True is not supported for Llama"),
    ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types are not all 'full_attention', one for each layer"),
    ("qwen3", {"use_sliding_window": True}, "use_sliding_window=True is not supported for Qwen3"),
    (
        "qwen2",
        {"layer_types": ["full_attention", "sliding_attention"]},
        "layer_types have 'sliding_attention', and its sliding_window is null",
    ),
    (
        "qwen2",
        {"layer_types": ["full_attention"]},
        "layer_types has 1 entries, expected 'full_attention' or 'sliding_attention' for each of 2",
    ),
    (
        "ministral",
        {"layer_types": ["full_attention", "chunked_attention"]},
        "layer_types has 'chunked_attention', expected 'full_attention'",
    ),
    ("mistral", {"sliding_window": 0}, "sliding_window=0 is not a positive integer"),
    ("mistral", {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}, "are not all 'sliding_attention', as its"),
    ("phi3", {"layer_types": ["sliding_attention"] * 2}, "layer_types have 'sliding_attention', and its sliding_window is null"),
    ("phi3", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "RoPE of type 'longrope'; supported: 'default'"),
    (
        "phi3",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}},
        "RoPE of type 'yarn' is not supported for Phi-3",
    ),
    ("gpt_oss", {"swiglu_alpha": 1.5}, "swiglu_alpha=1.5 is not supported for gpt-oss"),
    ("gpt_oss", {"swiglu_limit": 0.0}, "swiglu_limit=0.0 is not a positive number"),
    ("gpt_oss", {"attention_bias": False}, "attention_bias=False is not supported for gpt-oss"),
    ("mixtral", {"sliding_window": 4096}, "sliding_window=4096 is not supported for Mixtral"),
    ("llama", {"attention_dropout": 0.1}, "attention_dropout=0.1 is not supported for Llama"),
    ("llama", {"per_layer_config": {"0": {"head_dim": 16}}}, "per_layer_config={'0': {'head_dim': 16}} is not supported for Llama"),
    ("mixtral", {"router_jitter_noise": 0.01}, "router_jitter_noise=0.01 is not supported for Mixtral"),
    ("deepseek_v3", {"quantization_config": {"quant_method": "gptq", "bits": 4}}, "is not supported: {'quant_method': 'gptq'"),
    ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "has a quantization_config, but no tensor is stored with scales"),
    ("deepseek_v3", {"head_dim": 24}, "head_dim=24 is not qk_rope_head_dim=16"),
    ("deepseek_v3", {"rope_interleave": False}, "rope_interleave=False is not supported"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax' is not supported"),
    ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads=2 is not num_attention_heads=4"),
    ("deepseek_v3", {"num_experts_per_tok": 5}, "num_experts_per_tok=5 is more than the 4 experts of topk_group=2 groups"),
    ("deepseek_v3", {"n_group": 8}, "n_group=8: a group's score is the sum of its two best experts, and it has 1"),
    ("deepseek_v3", {"n_group": 3}, "n_group=3 and topk_group=2 do not divide 8 experts"),
    ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob=false or num_experts_per_tok=1 is not supported"),
    ("deepseek_v3", {"first_k_dense_replace": 2}, "first_k_dense_replace=2 is not between 0 and 1"),
    ("deepseek_v3", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}, "'default' and plain 'yarn' are"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=True is not supported for DeepSeek-V2"),
    ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func='sigmoid' is not supported for DeepSeek-V2"),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc' is none of greedy, group_limited_greedy"),
    ("deepseek_v2", {"topk_group": 5}, "n_group=4 and topk_group=5 do not divide 8 experts"),
    ("deepseek_v2", {"mlp_bias": True}, "mlp_bias=True is not supported for DeepSeek-V2"),
    (
        "glm4_moe_lite",
        {"first_k_dense_replace": 0},
        "mlp_layer_types=['dense', 'sparse'] are not first_k_dense_replace=0 times 'dense', then 'sparse'",
    ),
    ("glm4_moe_lite", {"scoring_func": "softmax"}, "scoring_func='softmax' is not supported for GLM-4.7-Flash"),
    ("minimax_m2", {"attn_type_list": [1, 0]}, "attn_type_list=[1, 0] is not supported for MiniMax-M2"),
    ("minimax_m2", {"use_routing_bias": False}, "use_routing_bias=False is not supported"),
    ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func='softmax' is not supported"),
    ("minimax_m2", {"qk_norm_type": "per_head"}, "qk_norm_type='per_head' is not supported"),
    ("minimax_m2", {"use_qk_norm": False}, "use_qk_norm=False is not supported"),
    ("minimax_m2", {"shared_intermediate_size": 64}, "shared_intermediate_size=64 is not supported"),
    ("minimax_m2", {"num_experts_per_tok": 1}, "num_experts_per_tok=1 is not supported for MiniMax-M2"),
    ("minimax_m2", {"rotary_dim": 24}, "rotary_dim=24 is not partial_rotary_factor=0.5 of head_dim=32"),
    ("qwen2_moe", {"mlp_only_layers": [1]}, "decoder_sparse_step=1 and mlp_only_layers=[1] make other layers dense than the first"),
    ("qwen2_moe", {"mlp_only_layers": [0, 1]}, "mlp_only_layers=[0, 1] make other layers dense"),
    ("qwen2_moe", {"qkv_bias": False}, "qkv_bias=False is not supported for Qwen2-MoE"),
    ("qwen2_moe", {"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention_config={'chunk_size': 8} is not supported"),
    ("qwen2_moe", {"head_dim": 16}, "head_dim=16 is not hidden_size=128 / num_attention_heads=4"),
    ("granite", {"attention_bias": True}, "attention_bias=True is not supported for Granite"),
    ("granite", {"mlp_bias": True}, "mlp_bias=True is not supported for Granite"),
    ("granite", {"layer_types": ["full_attention"] * 2}, "layer_types=['full_attention', 'full_attention'] is not supported for Granite"),
    ("granite", {"attention_sinks": True}, "attention_sinks=True is not supported for Granite"),
    ("granite", {"logits_scaling": "16"}, "logits_scaling='16' is not a positive number"),
    ("granite", {"attention_multiplier": 0}, "attention_multiplier=0 is not a positive number"),
    ("granitemoe", {"attention_bias": True}, "attention_bias=True is not supported for Granite-MoE"),
    (
        "granitemoe",
        {"layer_types": ["full_attention"] * 2},
        "layer_types=['full_attention', 'full_attention'] is not supported for Granite-MoE",
    ),
    ("granitemoe", {"logits_scaling": 0.0}, "logits_scaling=0.0 is not a positive number"),
    ("granitemoe", {"residual_multiplier": True}, "residual_multiplier=True is not a positive number"),
    ("granitemoe", {"embedding_multiplier": -1}, "embedding_multiplier=-1 is not a positive number"),
    ("granitemoe", {"attention_multiplier": float("inf")}, "attention_multiplier=inf is not a positive number"),
    ("granitemoe", {"head_dim": 16}, "head_dim=16 is not hidden_size=128 / num_attention_heads=4"),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv=8.0 is not supported for OLMoE"),
    ("olmoe", {"attention_bias": True}, "attention_bias=True is not supported for OLMoE"),
    ("olmoe", {"rms_norm_eps": 1e-6}, "rms_norm_eps=1e-06 is not supported for OLMoE"),
    ("olmoe", {"norm_topk_prob": True}, "norm_topk_prob=True is not supported for OLMoE"),
    ("olmoe", {"head_dim": 16}, "head_dim=16 is not hidden_size=128 / num_attention_heads=4"),
    ("ernie4_5_moe", {"use_bias": True}, "use_bias=True is not supported for Ernie-4.5-MoE"),
    ("ernie4_5_moe", {"moe_norm_min": 1e-3}, "moe_norm_min=0.001 is not supported for Ernie-4.5-MoE"),
    ("ernie4_5_moe", {"moe_layer_interval": 2}, "moe_layer_interval=2 for 2 layers, with moe_num_shared_experts=1: for Ernie-4.5-MoE all"),
    ("ernie4_5_moe", {"moe_layer_end_index": 0}, "moe_layer_end_index=0 and moe_layer_interval=1 for 2 layers"),
    ("ernie4_5_moe", {"moe_layer_start_index": 2}, "moe_layer_start_index=2, moe_layer_end_index=1"),
    ("ernie4_5_moe", {"moe_k": 9}, "num_experts_per_tok=9 is more than its 8 experts"),
    ("deepseek_v32", {"index_head_dim": 8}, "index_head_dim=8 is below qk_rope_head_dim=16"),
    ("deepseek_v32", {"indexer_rope_interleave": True}, "indexer_rope_interleave=True is not supported for DeepSeek-V3.2"),
    ("glm_moe_dsa", {"indexer_types": ["full", "shared"]}, "indexer_types=['full', 'shared'] is not supported for GLM-5"),
    ("glm_moe_dsa", {"index_topk_freq": 4}, "index_topk_freq=4 is not supported for GLM-5"),
    ("deepseek_v32", {"index_topk": 0}, "index_topk=0 is not a positive integer"),
    ("deepseek_v32", {"layer_types": ["full_attention"] * 2}, "layer_types are not all 'indexed_attention', one for each layer"),
    (
        "deepseek_v32",
        {"mlp_layer_types": ["sparse"] * 2},
        "mlp_layer_types=['sparse', 'sparse'] are not first_k_dense_replace=1 times 'dense', then 'sparse'",
    ),
    ("nemotron_h", {"moe_latent_size": 64}, "moe_latent_size=64 is not supported for Nemotron-H"),
    ("nemotron_h", {"time_step_limit": [0.0, 0.1]}, "time_step_limit=[0.0, 0.1] is not supported for Nemotron-H"),
    ("nemotron_h", {"n_shared_experts": 2}, "n_shared_experts=2 is not supported for Nemotron-H"),
    ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act='silu' is not supported for Nemotron-H"),
    ("nemotron_h", {"n_groups": 3}, "n_groups=3 does not divide mamba_num_heads=16"),
    ("nemotron_h", {"num_hidden_layers": 3}, "hybrid_override_pattern=None and num_hidden_layers=3 differ"),
    ("nemotron_h", {"hybrid_override_pattern": "M*"}, "hybrid_override_pattern='M*' and num_hidden_layers=None differ"),
    ("nemotron_h", {"layers_block_type": ["moe", "rwkv"]}, "kinds of layers are ['moe', 'rwkv'], expected linear_attention, mamba"),
    ("nemotron_h", {"layers_block_type": None}, "lacks layers_block_type or hybrid_override_pattern"),
    ("glm4_moe", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "with partial_rotary_factor=0.5 is not"),
]


@pytest.mark.parametrize(("family", "changes", "message"), REFUSED)
def test_what_no_rank_could_build_is_refused_in_one_line(
    tiny: dict[str, Path], tmp_path: Path, family: str, changes: dict[str, Any], message: str
) -> None:
    if family == "glm4_moe":
        changes = {**changes, "partial_rotary_factor": 0.5}
    with pytest.raises(ConfigError) as refused:
        check_checkpoint(copied(tiny[family], tmp_path / "changed", **changes))
    said = str(refused.value)
    assert said.startswith("model.path: ") and message in said and "\n" not in said


UNEVEN = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")


@pytest.mark.parametrize(
    ("layout", "megatron", "message"),
    [
        (Layout(ranks=16, pp=16), {}, "layout.pp=16: model has 61 layers, not divisible by 16"),
        (
            Layout(ranks=16, pp=16),
            {UNEVEN[1]: 2},
            "model.megatron.num_layers_in_last_pipeline_stage=2: of 61 layers 59 are left for the 15 oth",
        ),
        (Layout(ranks=16, pp=16), {UNEVEN[1]: 0}, "num_layers_in_last_pipeline_stage=0: expected positive integers"),
        (Layout(ranks=2, pp=2), {UNEVEN[0]: 30, UNEVEN[1]: 30}, "of 61 layers 1 are left for the 0 other stages of layout.pp=2"),
        (Layout(ranks=2, pp=2), {UNEVEN[0]: 61}, "of 61 layers 0 are left for the 1 other stages of layout.pp=2"),
        (Layout(), {UNEVEN[0]: 30, UNEVEN[1]: 31}, "layout.pp=1 has fewer stages"),
        (Layout(ranks=16, pp=16, vpp=2), {UNEVEN[1]: 1}, "num_layers_in_last_pipeline_stage=1: not divisible by layout.vpp=2"),
        (Layout(ranks=16, pp=16), LAST, ""),
        (Layout(ranks=2, pp=2, vpp=2), {UNEVEN[0]: 31}, "not divisible by layout.vpp=2"),
        (Layout(ranks=2, pp=2), {UNEVEN[0]: 31}, ""),
    ],
)
def test_stages_of_different_size_are_checked(layout: Layout, megatron: dict[str, int], message: str) -> None:
    if not message:
        check_layout(ModelDescription.of(DEEPSEEK_V3), layout, megatron)
        return
    with pytest.raises(ConfigError) as refused:
        check_layout(ModelDescription.of(DEEPSEEK_V3), layout, megatron)
    assert message in str(refused.value)


def test_kimi_k2_is_a_deepseek_v3_of_a_trillion_parameters() -> None:
    model = ModelDescription.of(KIMI_K2)
    assert model.family is family_of(DEEPSEEK_V3) and not model.family.predictors(model.config)
    assert 1.02e12 < sum(math.prod(shape) for shape in model.expected().values()) < 1.03e12
    fields = fixed_fields(model, "bfloat16", Layout())
    assert (fields["moe_router_topk_scaling_factor"], fields["rotary_base"], fields["beta_fast"]) == (2.827, 50000.0, 1.0)
    assert fields["moe_router_num_groups"] is None and fields["moe_layer_freq"] == [0] + [1] * 60
    check_layout(model, Layout(ranks=16, pp=16), LAST)


@pytest.mark.parametrize(("topk", "refused"), [(8, False), (6, True)])
def test_fused_routers_score_groups_by_the_model_s_rule_or_are_refused(topk: int, refused: bool) -> None:
    fixed = fixed_fields(ModelDescription.of({**DEEPSEEK_V3, "num_experts_per_tok": topk}), "bfloat16", Layout())
    expected = r"^model\.megatron\.moe_router_fusion=True: Transformer Engine scores a group by .*=6//4 best experts, and the model by 2$"
    with pytest.raises(ConfigError, match=expected) if refused else nullcontext():
        check_fields({"moe_router_fusion": True}, fixed, "none")


def test_shared_experts_must_divide() -> None:
    model = ModelDescription.of({**DEEPSEEK_V3, "num_attention_heads": 96, "num_key_value_heads": 96, "first_k_dense_replace": 0})
    with pytest.raises(ConfigError, match="layout.tp=3: model has 2048 units in its shared experts, not divisible by 3"):
        check_layout(model, Layout(ranks=3, tp=3))


@pytest.mark.parametrize("family", TINY)
def test_fixed_fields_are_megatron_s_and_refused_before_a_process_starts(tiny: dict[str, Path], family: str) -> None:
    fixed = fixed_fields(ModelDescription.read(tiny[family]), "bfloat16", Layout(ranks=2, tp=2))
    latent = {
        "q_lora_rank",
        "kv_lora_rank",
        "qk_head_dim",
        "qk_pos_emb_head_dim",
        "v_head_dim",
        "rope_type",
        "rotary_base",
        "rotary_percent",
    }
    latent |= {"rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
    assert fixed.keys() - megatron_fields().keys() <= (latent if fixed["multi_latent_attention"] else set())
    with pytest.raises(ConfigError, match=r"^model\.megatron\.hidden_size: set by model\.path, .* \(to 128\)$"):
        check_fields({"hidden_size": 64}, fixed, "none")
    for name, value in {"window_size": [4, 0], "mtp_num_layers": 1, "moe_router_topk_scaling_factor": 3.0, "num_moe_experts": 4}.items():
        with pytest.raises(ConfigError, match=rf"^model\.megatron\.{name}: set by model\.path"):  # another model of the same weights
            check_fields({name: value}, fixed, "none")
    aux = {"moe_aux_loss_coeff": 0.1}
    with pytest.raises(ConfigError, match="has no effect: the model has no experts$") if not fixed["num_moe_experts"] else nullcontext():
        check_fields(aux, fixed, "none")
    topk = fixed.get("dsa_indexer_topk")
    known = "has no effect: sparse attention is" if topk is None else rf"set by model\.path, .* \(to {topk}\)$"
    with pytest.raises(ConfigError, match=rf"^model\.megatron\.dsa_indexer_topk: {known}"):
        check_fields({"dsa_indexer_topk": 64}, fixed, "none")


# What megarl uses nothing of: Megatron's inference, data sets, FSDP, other models and kinds of layers, its own attention and norms.
UNUSED = (
    *("inference/", "datasets/", "ssm/mamba", "post_training/", "export/", "resharding/", "distributed/fsdp/", "rl/"),
    *("models/bert", "models/hybrid", "models/huggingface", "models/mamba", "models/mimo", "models/multimodal", "models/vision"),
    *("transformer/experimental_attention_variant/", "models/gpt/experimental_attention_variant", "transformer/multi_token_prediction.py"),
    *("transformer/dot_product_attention.py", "transformer/torch_norm.py", "fusions/fused_layer_norm.py"),
    *("transformer/transformer_config.py", "model_parallel_config.py"),
)
# Read otherwise: former names of other fields, which TransformerConfig itself copies, a switch of torch's that it sets, and one by getattr.
ELSEWHERE = {
    *("moe_enable_deepep", "moe_deepep_num_sms", "moe_hybridep_num_sms", "moe_router_padding_for_fp8"),
    *("enable_cuda_graph", "external_cuda_graph", "cuda_graph_scope", "disable_bf16_reduced_precision_matmul", "config_logger_dir"),
}


def test_every_other_field_is_read_by_what_megarl_uses_of_megatron(tiny: dict[str, Path]) -> None:
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None and spec.origin is not None
    root, found = Path(spec.origin).parent, set(ELSEWHERE)
    for source in root.rglob("*.py"):
        if not str(source.relative_to(root)).startswith(UNUSED):
            found |= {node.attr for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.Attribute)}
    for family in ("qwen3", "deepseek_v3", "deepseek_v32", "qwen3_next"):
        fixed = fixed_fields(ModelDescription.read(tiny[family]), "bfloat16", Layout())
        allowed = megatron_fields().keys() - fixed.keys() - unread(fixed, "full").keys()
        assert "recompute_num_layers" in allowed and ("moe_z_loss_coeff" in allowed) == (family != "qwen3")
        assert allowed - found == set()


def test_details_of_recomputation_need_it(tiny: dict[str, Path]) -> None:
    fixed = fixed_fields(ModelDescription.read(tiny["qwen3"]), "bfloat16", Layout())
    check_fields({"recompute_modules": ["mlp"]}, fixed, "selective")
    check_fields({"recompute_num_layers": 2}, fixed, "full")
    for given, recompute in (({"recompute_modules": ["mlp"]}, "full"), ({"recompute_num_layers": 2}, "none")):
        with pytest.raises(ConfigError, match=rf"^model\.megatron\.{min(given)}: has no effect: model\.recompute is {recompute}, not "):
            check_fields(given, fixed, recompute)


@pytest.mark.parametrize(
    ("built", "name"),
    [
        ("decoder.layers.0.self_attention.linear_q_up_proj.layer_norm_weight", "decoder.layers.4.self_attention.q_layernorm.weight"),
        ("decoder.layers.0.self_attention.linear_kv_up_proj.layer_norm_weight", "decoder.layers.4.self_attention.kv_layernorm.weight"),
        ("decoder.layers.0.mlp.shared_experts.linear_fc1.weight", "decoder.layers.4.mlp.shared_experts.linear_fc1.weight"),
        ("decoder.layers.0.mlp.router.expert_bias", "decoder.layers.4.mlp.router.expert_bias"),
        ("decoder.layers.0.self_attention.linear_qkv.bias", "decoder.layers.4.self_attention.linear_qkv.bias"),
    ],
)
def test_names_of_transformer_engine_s_layers_become_canonical(built: str, name: str) -> None:
    assert canonical(built, layers=[4], first_expert=8) == name


def test_names_of_transformer_engine_s_layers_lead_back() -> None:
    names = [weight.name for weight in family_of(DEEPSEEK_V3).weights(DEEPSEEK_V3) if weight.layer in (None, 0, 3)]
    renamed = to_te(names)
    assert [from_te(name) for name in renamed.values()] == names
    own = "decoder.layers.{}.pre_mlp_layernorm.weight"
    assert renamed[own.format(0)] == "decoder.layers.0.mlp.linear_fc1.layer_norm_weight"
    assert renamed[own.format(3)] == own.format(3)  # before a mixture of experts


def test_architectures_are_transformers_names_where_it_has_them() -> None:
    import transformers

    unknown = {name for name in FAMILIES if not hasattr(transformers, name)}
    assert unknown == {head.architecture for family in FAMILIES.values() for head in family.heads.values() if not head.known}
    assert not unknown & {family.heads["lm"].architecture for family in FAMILIES.values()}


def test_an_update_brings_an_engine_every_tensor_in_its_dtype_and_float32_where_that_is_the_model_s() -> None:
    family = family_of(DEEPSEEK_V3)
    brought = family.update(DEEPSEEK_V3, "bfloat16")
    assert {name: tuple(shape) for name, (shape, _) in brought.items()} == family.expected(DEEPSEEK_V3)
    assert {name for name, (_, dtype) in brought.items() if dtype != "bfloat16"} == {
        name for name in brought if name.endswith("e_score_correction_bias")
    }


@pytest.mark.parametrize("family", TINY)
def test_fp8_engines_quantise_projections_and_experts_and_nothing_else(tmp_path: Path, family: str) -> None:
    """As published FP8 checkpoints do (DeepSeek-V3's config.json quantises every linear layer but the head and the routers).
    Gated delta nets and Mamba mixers stay as they are."""
    build(tmp_path, layers=2, hidden=128, experts=4, expert_hidden=64, seed=1, family=family)
    hf = read_config(tmp_path)
    known, plain = family_of(hf), family_of(hf).update(hf, "bfloat16")
    update = known.update(hf, "bfloat16", "fp8")
    experts = r"experts\.\d+\.(w[123]\.weight|gate_up_proj|down_proj)$|put_linear\.\d+\.weight$"
    projection = rf"_proj(_with_mqa)?\.weight$|{experts}|indexer\.w(q_b|k)\.weight$"
    left = r"\.linear_attn\.|\.mixer\.(in|out)_proj\.|\.indexer\.weights_proj\."
    matrices = {name for name in plain if re.search(projection, name) and not re.search(left, name)}
    assert {name for name, (_, dtype) in update.items() if dtype == "float8_e4m3fn"} == matrices
    assert update.keys() - plain.keys() == {f"{name}_scale_inv" for name in matrices}
    for name, (shape, dtype) in plain.items():
        if name in matrices:
            assert update[f"{name}_scale_inv"] == ([-(-size // 128) for size in shape], "float32") and update[name][0] == shape
        else:
            assert update[name] == (shape, dtype)
    kept = r"(\.gate|\.router(\.layer)?|_gate|\.(linear_attn|mixer)\.(in|out)_proj\w*|\.indexer\.weights_proj)\.weight$"
    assert {f"{name}.weight" for name in known.unquantized(hf)} == {name for name in plain if re.search(kept, name)}

"""Every family is transformers' model on every layout, and each of its tensors has its place in that.

Axes: T tokens fed, V vocabulary.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.config import Layout, ModelSettings
from megarl.models import families
from megarl.models.description import ModelDescription
from megarl.models.families import check_checkpoint, check_layout
from megarl.models.hf import read_config
from tests.distributed.tiny_families import VARIANTS, Make, layouts
from tests.rank_pool import Pool
from tests.rows import rows
from tools import check_logits
from tools.check_logits import joined, megatron_part, sequences, transformers_logits, transformers_model
from tools.make_tiny_model import FAMILIES, KNOWN_AS

BOUND = 2e-5  # of a logit; where their standard deviation is below 1, of that


def megatron_logits(pool: Pool, path: Path, layout: Layout, batch: Any) -> Tensor:
    """Of sequences of different lengths, packed into one micro-batch: [T, V]."""
    model = check_checkpoint(path)
    check_layout(model, layout)
    return joined(pool.run(megatron_part, layout, ModelSettings(path=path, dtype="float32"), batch), batch, model.vocab)


def bound(logits_TV: Tensor) -> float:
    """The largest difference that counts as none."""
    return BOUND * min(1.0, float(logits_TV.std()))


def assert_transformers(pool: Pool, path: Path, *several: Layout) -> None:
    batch = sequences(4, 40, read_config(path)["vocab_size"], seed=3)
    theirs_TV = transformers_logits(path, batch, "float32")
    assert 0 < theirs_TV.std() < 5
    for layout in several:
        torch.testing.assert_close(megatron_logits(pool, path, layout, batch), theirs_TV, rtol=0, atol=bound(theirs_TV))


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_those_of_transformers_on_every_layout(pool: Pool, make: Make, variant: str, long: bool) -> None:
    assert_transformers(pool, make(variant), *(layout for layout in layouts(variant).values() if long or layout.ranks > 1))


PARTED = ["qwen2", "deepseek_v3", "ministral", "gpt_oss", "minimax_m2", "qwen3_next"]


@pytest.mark.parametrize(
    "family",
    rows(
        [*PARTED, "moonlight", "deepseek_v2", "glm4_moe_lite", "qwen3_5_moe", "granitemoe", "nemotron_h", "deepseek_v32", "glm_moe_dsa"],
        PARTED,
    ),
)
def test_logits_equal_those_of_transformers_under_context_parallelism(pool: Pool, make: Make, family: str) -> None:
    assert_transformers(pool, make(family), Layout(ranks=2, cp=2), Layout(ranks=4, cp=2, tp=2))


KINDS = [
    "qwen3_moe",
    "qwen2",
    "llama",
    "phi3",
    "mixtral",
    "deepseek_v3",
    "deepseek_v2",
    "glm4_moe",
    "gpt_oss",
    "minimax_m2",
    "qwen2_moe",
    "qwen3_next",
    "qwen3_5_moe",
    "nemotron_h",
]  # all kinds of tensors


@pytest.mark.parametrize("variant", rows(VARIANTS, KINDS))
def test_no_tensor_is_ignored_or_misplaced(pool: Pool, make: Make, variant: str) -> None:
    """Logits of transformers' model with one tensor shifted by an element, of each kind in turn, are far from Megatron's: so with equal
    logits every kind of tensor, biases, norms and the experts' bias too, is used, and in its order."""
    path = make(variant)
    batch = sequences(2, 40, read_config(path)["vocab_size"], seed=3)
    ours_TV = megatron_logits(pool, path, Layout(), batch)
    model = transformers_model(path).eval()
    tensors = {**dict(model.named_parameters()), **{name: buffer for name, buffer in model.named_buffers() if "inv_freq" not in name}}
    # The last of each kind; texts do not reach a vision tower, whose tensors are those of test_images.py.
    kinds = {re.sub(r"\d+", "#", name): tensor for name, tensor in tensors.items() if ".visual." not in name}
    close = {}
    with torch.no_grad():
        for kind, tensor in kinds.items():
            kept = tensor.clone()
            tensor.copy_(tensor.flatten().roll(1).view_as(tensor))
            theirs_TV = torch.cat([model(batch.input_T[None, batch.seq_T == n]).logits[0] for n in range(len(batch.length_N))])
            tensor.copy_(kept)
            close[kind] = float((ours_TV - theirs_TV).abs().max())
    assert {kind: gap for kind, gap in close.items() if gap < 100 * bound(ours_TV)} == {}


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16}
ROPES: dict[str, tuple[str, dict[str, Any]]] = {
    "linear": ("llama", {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}),
    "yarn": ("qwen2", YARN),
    "yarn_with_attention_factor": ("qwen3", {**YARN, "attention_factor": 1.5, "truncate": False}),
    "yarn_with_mscale": ("qwen3_moe", {**YARN, "mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 8.0, "beta_slow": 2.0}),
    "latent_yarn_with_mscale": ("deepseek_v3", {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}),
    "latent_yarn": ("deepseek_v3", YARN),
    "latent_yarn_with_mscales_below_one": ("deepseek_v2_lite", {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}),
}


@pytest.mark.parametrize("name", ROPES)
def test_scaled_rope_is_that_of_transformers(pool: Pool, make: Make, name: str) -> None:
    family, parameters = ROPES[name]
    path = make(family, layers=2, rope_parameters=parameters)
    if not ModelDescription.read(path).latent:
        assert_frequencies(path)
    assert_transformers(pool, path, Layout())


OLD = {"rope_theta": 50000.0, "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}}
# Name -> variant, keys that config.json lacks, and keys that it has otherwise.
SPARSE: dict[str, tuple[str, set[str], dict[str, Any]]] = {
    "llama_2": ("llama", {"rope_parameters", "head_dim", "rms_norm_eps", "tie_word_embeddings", "hidden_act"}, {}),
    "older_spelling": ("qwen2", {"rope_parameters", "use_sliding_window", "layer_types"}, OLD),
    "mixtral": ("mixtral", {"rope_parameters", "num_experts_per_tok", "rms_norm_eps"}, {}),
    "phi3": ("phi3", {"rope_parameters", "rms_norm_eps"}, {"partial_rotary_factor": 0.5}),
    "not_normalised": ("qwen3_moe", {"norm_topk_prob", "rope_parameters", "decoder_sparse_step", "mlp_only_layers"}, {}),
    "latent": ("deepseek_v3", {"routed_scaling_factor", "norm_topk_prob", "rope_interleave", "scoring_func", "topk_method"}, {}),
    "latent_softmax": ("deepseek_v2", {"norm_topk_prob", "scoring_func", "rope_parameters", "moe_layer_freq"}, {}),
    "latent_greedy": ("deepseek_v2_lite", {"topk_method", "routed_scaling_factor", "n_group", "topk_group"}, {}),
    "hybrid": (
        "qwen3_next",
        {"layer_types", "norm_topk_prob", "partial_rotary_factor", "rope_parameters", "mlp_only_layers"},
        {"full_attention_interval": 2},
    ),
    "glm": ("glm4_moe", {"rope_parameters", "partial_rotary_factor", "n_group", "topk_group", "routed_scaling_factor"}, {}),
}
SPARSE["hybrid_in_parts"] = (
    "qwen3_5_moe",
    {"layer_types", "rope_parameters", "partial_rotary_factor", "attention_bias"},
    {"full_attention_interval": 2},
)
SPARSE["minimax"] = ("minimax_m2", {"rope_parameters", "partial_rotary_factor", "use_routing_bias"}, {"rope_theta": 1e6, "rotary_dim": 24})
SPARSE["qwen2_moe"] = (
    "qwen2_moe",
    {"rope_parameters", "norm_topk_prob", "qkv_bias", "layer_types"},
    {"rope_theta": 1e6},
)
SPARSE["ernie"] = ("ernie4_5_moe", {"rope_parameters", "moe_layer_start_index", "moe_layer_end_index", "use_bias", "moe_norm_min"}, {})
FACTORS = {"attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"}
SPARSE |= {family: (family, {*FACTORS, "rope_parameters", "head_dim", "rms_norm_eps"}, {}) for family in ("granite", "granitemoe")}
SPARSE["olmoe"] = ("olmoe", {"rope_parameters", "clip_qkv", "norm_topk_prob", "rms_norm_eps", "head_dim"}, {"rope_theta": 5e5})


SPARSE["blocks"] = (  # as published
    "nemotron_h",
    {"layers_block_type", "n_group", "topk_group", "norm_topk_prob", "time_step_limit", "use_conv_bias", "conv_kernel", "mlp_hidden_act"},
    # transformers' cache takes no model without attention.
    {"hybrid_override_pattern": "ME", "num_hidden_layers": 2, "use_cache": False},
)


@pytest.mark.parametrize("name", SPARSE)
def test_missing_keys_mean_what_they_mean_to_transformers(pool: Pool, make: Make, tmp_path: Path, name: str) -> None:
    variant, missing, given = SPARSE[name]
    source, path = make(variant, layers=2), tmp_path / "sparse"
    shutil.copytree(source, path)
    config = json.loads((source / "config.json").read_text())
    assert config.keys() & missing
    (path / "config.json").write_text(json.dumps({key: value for key, value in config.items() if key not in missing} | given))
    assert_transformers(pool, path, Layout())


def assert_frequencies(path: Path) -> None:
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = AutoConfig.from_pretrained(path)
    theirs, factor = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]](config)
    model = ModelDescription.read(path)
    ours = model.rope
    assert ours.attention_factor == pytest.approx(factor, rel=1e-12)
    torch.testing.assert_close(ours.frequencies(config.head_dim), theirs, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dense", [0, 2, 3])
def test_dense_layers_may_fill_whole_pipeline_stages(pool: Pool, make: Make, dense: int) -> None:
    path = make("glm4_moe", first_k_dense_replace=dense)
    assert_transformers(pool, path, Layout(ranks=2, pp=2), Layout(ranks=4, pp=2, ep=2))


@pytest.mark.long
def test_blocks_need_no_experts(pool: Pool, make: Make) -> None:
    """The older Nemotron-H."""
    path = make("nemotron_h", layers_block_type=["linear_attention", "mlp", "full_attention", "mlp"])
    assert_transformers(pool, path, Layout(), Layout(ranks=2, pp=2))


def test_the_tool_says_whether_it_is_the_same_model(
    make: Make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make("mixtral", layers=2)
    asked = [str(path), "--tp", "2", "--ep", "2", "--sequences", "2", "--tokens", "12"]
    run_ranks, parts = check_logits.run_ranks, list[Any]()

    def once(*given: Any) -> list[Any]:
        """The ranks of the first comparison serve the second, which differs in its bound."""
        if not parts:
            parts.extend(run_ranks(*given))
        return parts

    monkeypatch.setattr(check_logits, "run_ranks", once)
    assert check_logits.main(asked) == 0
    assert "the same model: max |difference|" in capsys.readouterr().out
    assert check_logits.main([*asked, "--bound", "1e-12"]) == 1
    assert "NOT the same model" in capsys.readouterr().out
    assert check_logits.main([str(path), "--tp", "3"]) == 2
    assert capsys.readouterr().err == "check_logits: layout.tp=3: model has 4 attention heads, not divisible by 3\n"


def test_every_family_of_the_product_is_tested() -> None:
    from transformers.models.auto import modeling_auto as auto

    classes = {**auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    built = {classes[KNOWN_AS.get(kind, kind)] for kind, _ in FAMILIES.values()}
    assert built == {family.heads["lm"].architecture for family in families.FAMILIES.values()}

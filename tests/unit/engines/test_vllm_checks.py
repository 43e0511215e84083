"""What is known of vLLM before it starts still is what its source says."""

import ast
import importlib.util
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.config import ConfigError, RolloutSettings
from megarl.engines.engine import Setup
from megarl.engines.vllm.checks import HEAD_SIZES, cache_mb, check, native_architectures
from megarl.engines.vllm.launch import engine_arguments, vllm_names
from megarl.models.description import ModelDescription
from megarl.models.families import FAMILIES
from megarl.models.hf import read_config
from tests.published_models import MODELS, QWEN3_VL_30B_A3B, config_of, description_of


def test_the_head_sizes_are_those_of_vllm() -> None:
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / "v1/attention/backends/cpu_attn.py").read_text())
    [sizes] = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "get_supported_head_sizes"]
    assert isinstance(sizes.body[-1], ast.Return) and sizes.body[-1].value is not None
    assert tuple(ast.literal_eval(sizes.body[-1].value)) == HEAD_SIZES


def test_a_head_that_no_cpu_engine_takes_is_refused(tiny_model: Path) -> None:
    model, settings = ModelDescription.read(tiny_model), RolloutSettings(kv_cache_mb=64)
    check(model, "float32", settings, gpu=False)
    narrow = ModelDescription.of({**model.config, "head_dim": 16})
    with pytest.raises(ConfigError, match=r"^model\.path: config\.json's head_dim=16: vLLM's CPU engines take 32, 64, "):
        check(narrow, "float32", settings, gpu=False)
    check(narrow, "float32", RolloutSettings(), gpu=True)


def test_a_gpu_engine_refuses_the_size_of_a_cache_that_it_would_not_use(tiny_model: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"^rollout\.kv_cache_mb=64: .* rollout\.gpu_memory_fraction=0\.6 leaves of the GPU's memory; set it to null$"
    ):
        check(ModelDescription.read(tiny_model), "bfloat16", RolloutSettings(kv_cache_mb=64), gpu=True)
    check(ModelDescription.read(tiny_model), "bfloat16", RolloutSettings(), gpu=True)


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("architecture", ["SmolLM3ForCausalLM", "Olmo2ForCausalLM", "NobodysForCausalLM"])
def test_an_architecture_that_vllm_has_no_code_of_its_own_for_is_refused(tiny_model: Path, architecture: str, gpu: bool) -> None:
    """The first two it would run through its transformers backend."""
    model = ModelDescription.read(tiny_model)
    other = replace(model, config={**model.config, "architectures": [architecture]})
    with pytest.raises(
        ConfigError, match=rf"^model\.path: vLLM 0\.30\.0 has no native implementation of {architecture}, and [^\n]*backend$"
    ):
        check(other, "float32", RolloutSettings(kv_cache_mb=64), gpu=gpu)


def test_vllm_has_code_of_its_own_for_every_family() -> None:
    policies = {family.heads["lm"].architecture for family in FAMILIES.values()}
    assert set(vllm_names(policies)) <= native_architectures()


NEMOTRON = MODELS["Nemotron-3-Nano-30B-A3B"]


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({}, {"tp": 16}, r"rollout\.tp=16: does not divide the model's 8 groups in its Mamba layers$"),
        ({}, {"quantization": "fp8"}, r"rollout\.quantization=fp8: not supported for Nemotron-H$"),
        ({"moe_shared_expert_intermediate_size": 3708}, {"tp": 8}, r"rollout\.tp=8: does not divide the 3708 units of the model's shared"),
        (
            {"hybrid_override_pattern": "MEM-", "num_hidden_layers": 4},
            {},
            r"model\.path: NemotronHForCausalLM without a layer of attention",
        ),
    ],
)
def test_what_engines_cannot_do_with_mamba_mixers_is_refused(changes: dict[str, Any], settings: dict[str, Any], message: str) -> None:
    check(description_of(NEMOTRON), "bfloat16", RolloutSettings(tp=8), gpu=True)
    other = ModelDescription.of({**config_of(NEMOTRON), **changes})
    with pytest.raises(ConfigError, match=f"^{message}"):
        check(other, "bfloat16", RolloutSettings(**settings), gpu=True)


def test_only_layers_of_attention_keep_keys_and_values() -> None:
    attention = ModelDescription.of({**config_of(NEMOTRON), "hybrid_override_pattern": "*E*E", "num_hidden_layers": 4})
    more = ModelDescription.of({**config_of(NEMOTRON), "hybrid_override_pattern": "*E*E-EEE", "num_hidden_layers": 8})
    settings = RolloutSettings(kv_cache_mb=1)
    assert cache_mb(attention, "float32", settings, sequences=8) == cache_mb(more, "float32", settings, sequences=8) > 0


@pytest.mark.parametrize(
    ("settings", "refusal"),
    [
        ({"quantization": "fp8"}, r"^rollout\.quantization=fp8: not supported for models that see images$"),
        ({"dp": 2, "expert_parallel": True}, r"^rollout\.dp=2: an engine of a model that sees images has one member"),
        ({"tp": 32}, r"^rollout\.tp=32: does not divide the vision tower's 16 heads and intermediate_size=4304$"),
    ],
)
def test_what_no_engine_that_sees_images_does_is_refused(settings: dict[str, Any], refusal: str) -> None:
    model = ModelDescription.of(QWEN3_VL_30B_A3B)
    check(model, "bfloat16", RolloutSettings(tp=2), gpu=True)
    with pytest.raises(ConfigError, match=refusal):
        check(model, "bfloat16", RolloutSettings(**settings), gpu=True)


def test_the_architectures_are_read_without_importing_vllm() -> None:
    code = "import sys; from megarl.engines.vllm.checks import native_architectures as known; assert known() and 'vllm' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("changes", "tp", "message"),
    [
        ({}, 4, "with rollout.tp=4 a worker holds 64 rows of model.layers.0.self_attn.k_proj.weight, not a multiple of 128"),
        ({"num_key_value_heads": 2}, 1, "a worker holds 64 rows of model.layers.0.self_attn.k_proj.weight"),
        (
            {"moe_intermediate_size": 192},
            1,
            "rollout.tp=1, rollout.expert_parallel=false a worker holds 192 rows of model.layers.0.mlp.experts.0",
        ),
        (
            {"moe_intermediate_size": 384},
            2,
            "rollout.tp=2, rollout.expert_parallel=false a worker holds 192 rows of model.layers.0.mlp.experts.0",
        ),
        ({"hidden_size": 576}, 1, "a worker holds 576 columns of model.layers.0.self_attn.q_proj.weight"),
    ],
)
def test_blocks_that_an_fp8_engine_would_have_to_cut_are_refused(tiny_model: Path, changes: dict[str, int], tp: int, message: str) -> None:
    sizes = {"hidden_size": 512, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 32, "moe_intermediate_size": 256}
    config = {**read_config(tiny_model), **sizes}
    settings = RolloutSettings(kv_cache_mb=64, quantization="fp8", tp=tp)
    with pytest.raises(ConfigError, match=rf"^rollout\.quantization=fp8: .*{re.escape(message.removeprefix('with '))}"):
        check(ModelDescription.of({**config, **changes}), "float32", settings, gpu=False)
    for fitting in (1, 2):
        check(ModelDescription.of(config), "float32", settings.model_copy(update={"tp": fitting}), gpu=False)
    spread = settings.model_copy(update={"tp": 2, "expert_parallel": True})
    check(ModelDescription.of({**config, "moe_intermediate_size": 128}), "float32", spread, gpu=False)  # a worker holds whole experts


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({"rms_norm_eps": 1e-6}, {}, r"model\.path: config\.json's rms_norm_eps=1e-06: vLLM's gpt-oss has 1e-05 in any case"),
        ({"swiglu_limit": 5.0}, {}, r"model\.path: config\.json's swiglu_limit=5\.0: vLLM's gpt-oss has 7\.0 in any case"),
        ({"layer_types": ["full_attention"] * 24}, {}, r"model\.path: config\.json's layer_types=\['full_attention', [^\n]* in any case"),
        ({"rope_scaling": {"rope_type": "default"}}, {}, r"model\.path: RoPE of type 'default' with attention_factor=1: [^\n]* YaRN"),
        ({}, {"quantization": "fp8"}, r"rollout\.quantization=fp8: not supported for gpt-oss"),
        (
            {},
            {"dp": 7, "expert_parallel": True},
            r"rollout\.dp\*rollout\.tp=7: does not divide the model's intermediate_size=2880, as vLLM's gpt-oss requires",
        ),
        ({}, {"tp": 4}, r"rollout\.dp\*rollout\.tp=4: a CPU worker holds 720 units of each expert, not a multiple of 32"),
        ({}, {"tp": 2}, None),
        ({}, {"tp": 4, "expert_parallel": True}, None),
        ({"layer_types": None}, {}, None),
    ],
)
def test_what_the_gpt_oss_of_vllm_cannot_compute_is_refused(changes: dict[str, Any], settings: dict[str, Any], message: str | None) -> None:
    published = MODELS["gpt-oss-20b"]
    model = description_of(replace(published, config={**published.config, **changes}))
    given = RolloutSettings(kv_cache_mb=4096, max_prompt_tokens=64, max_response_tokens=64, **settings)
    if message is None:
        check(model, "float32", given, gpu=False)
        return
    with pytest.raises(ConfigError, match=f"^{message}$"):
        check(model, "float32", given, gpu=False)


def test_a_replicated_matrix_may_end_in_a_part_of_a_block() -> None:
    """DeepSeek-V3's down-projection to the latents has 576 rows, its published FP8 weights too; a query's projection is split."""
    model = description_of(MODELS["DeepSeek-V3"])
    check(model, "bfloat16", RolloutSettings(quantization="fp8", tp=8, dp=4, expert_parallel=True), gpu=True)
    check(model, "bfloat16", RolloutSettings(quantization="fp8", tp=8, dp=2), gpu=True)
    with pytest.raises(
        ConfigError,
        match=r"^rollout\.quantization=fp8: with rollout\.dp=4, rollout\.tp=8, rollout\.expert_parallel=false a worker holds 64 rows",
    ):
        check(model, "bfloat16", RolloutSettings(quantization="fp8", tp=8, dp=4), gpu=True)


@pytest.mark.parametrize("name", ["DeepSeek-V3.2", "GLM-5"])
def test_sparse_attention_runs_on_cpu_engines_in_full_precision(name: str) -> None:
    model, settings = description_of(MODELS[name]), RolloutSettings(kv_cache_mb=1 << 20)
    check(model, "bfloat16", settings, gpu=False)
    for gpu, changes in ((True, {"kv_cache_mb": None}), (False, {"quantization": "fp8"})):
        with pytest.raises(
            ConfigError, match=r"^model\.path: config\.json's index_topk=2048: engines with sparse attention run on CPUs alone"
        ):
            check(model, "bfloat16", settings.model_copy(update=changes), gpu=gpu)


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("Qwen3-Next-80B-A3B", {}, "the model has recurrent layers, of which engines keep no prefix cache"),
        ("Qwen3-30B-A3B", {"enable_prefix_caching": False}, r"rollout\.engine\.args\.enable_prefix_caching=false leaves no prefix cache"),
    ],
)
def test_affinity_without_a_prefix_cache_is_refused(name: str, args: dict[str, Any], message: str) -> None:
    model, settings = description_of(MODELS[name]), RolloutSettings.model_validate({"engine": {"args": args}})
    check(model, "bfloat16", settings, gpu=True)
    with pytest.raises(ConfigError, match=rf"^rollout\.request_routing=affinity: {message}$"):
        check(model, "bfloat16", settings.model_copy(update={"request_routing": "affinity"}), gpu=True)


def test_a_key_value_head_of_several_workers_is_whole_in_each(tiny_model: Path) -> None:
    sizes = {"hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "moe_intermediate_size": 512}
    model = ModelDescription.of({**read_config(tiny_model), **sizes})
    check(model, "float32", RolloutSettings(kv_cache_mb=64, quantization="fp8", tp=4), gpu=False)


def test_fp8_engines_on_gpus_compute_in_bfloat16(tiny_model: Path) -> None:
    sizes = {"hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4, "moe_intermediate_size": 128}
    model = ModelDescription.of({**read_config(tiny_model), **sizes})
    settings = RolloutSettings(quantization="fp8")
    with pytest.raises(ConfigError, match=r"^rollout\.quantization=fp8: on GPUs it computes in bfloat16, and rollout\.dtype is float32$"):
        check(model, "float32", settings, gpu=True)
    check(model, "bfloat16", settings, gpu=True)


def test_a_check_is_quick_enough_for_a_plan_of_thousands_of_layouts() -> None:
    settings = {"quantization": "fp8", "tp": 8, "dp": 4, "expert_parallel": True, "engine": {"args": {"max_num_batched_tokens": 4096}}}
    model, rollout, start = description_of(MODELS["DeepSeek-V3"]), RolloutSettings.model_validate(settings), time.process_time()
    for _ in range(100):
        check(model, "bfloat16", rollout, gpu=True)
    assert time.process_time() - start < 3, "once for each of 45,000 experts' matrices it was 10 s and more"


def test_a_plan_is_made_where_vllm_is_not_installed() -> None:
    """Also if it sets an argument of vLLM's."""
    code = (
        "import importlib.util as util; find = util.find_spec;"
        "util.find_spec = lambda name, *more: None if name == 'vllm' else find(name, *more);"
        "from megarl.config import RolloutSettings; from megarl.engines.vllm.checks import check; from tests.published_models import *;"
        "settings = RolloutSettings.model_validate({'dp': 4, 'tp': 4, 'engine': {'args': {'max_num_batched_tokens': 4096}}});"
        "check(description_of(MODELS['Qwen3-235B-A22B']), 'bfloat16', settings, gpu=True)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])


@pytest.mark.parametrize("gpu", [False, True])
def test_vllm_is_told_the_format_of_fp8_weights_and_which_modules_have_none(tiny_model: Path, gpu: bool) -> None:
    model, given = ModelDescription.read(tiny_model), RolloutSettings(quantization="fp8", fp32_head=True)
    arguments = engine_arguments(Setup(tiny_model, "bfloat16", given, 1, gpu=gpu), model)
    told = arguments["hf_overrides"]["quantization_config"]
    assert told["quant_method"] == "fp8" and told["weight_block_size"] == [128, 128] and told["activation_scheme"] == "dynamic"
    assert told["modules_to_not_convert"] == [f"model.layers.{layer}.mlp.gate" for layer in range(model.sizes.layers)]
    assert arguments["hf_overrides"]["head_dtype"] == "float32"
    assert arguments.get("moe_backend") == ("triton" if gpu else None)
    plain = engine_arguments(Setup(tiny_model, "bfloat16", RolloutSettings(), 1, gpu=gpu), model)
    assert plain["hf_overrides"] == {} and "moe_backend" not in plain


def test_an_engine_reads_a_directory_as_the_trainer_does(tiny_model: Path) -> None:
    """vLLM would take the published fp8 for the engine's own, and a DeepSeek-V3 that does not say so for one with a softmax router."""
    config = config_of(MODELS["DeepSeek-V3"])
    assert config["quantization_config"]["quant_method"] == "fp8"
    sparse = {key: value for key, value in config.items() if key not in ("scoring_func", "topk_method")}
    for given in (config, sparse):
        arguments = engine_arguments(Setup(tiny_model, "bfloat16", RolloutSettings(), 1, gpu=True), ModelDescription.of(given))
        router = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3}
        assert arguments["hf_overrides"] == {**router, "quantization_config": None}
        assert arguments["load_format"] == "dummy" and "moe_backend" not in arguments


def test_an_engine_of_several_data_parallel_ranks_takes_fewer_prompt_tokens_in_each(tiny_model: Path) -> None:
    def tokens(**given: Any) -> int | None:
        settings = RolloutSettings.model_validate(given)
        arguments = engine_arguments(Setup(tiny_model, "bfloat16", settings, 1, gpu=True), ModelDescription.read(tiny_model))
        told: int | None = arguments.get("max_num_batched_tokens")
        return told

    assert tokens(dp=1) is None and tokens(dp=4) == 4_096
    assert tokens(dp=4, engine={"args": {"max_num_batched_tokens": 512}}) == 512

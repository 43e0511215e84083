"""A config.json means what transformers says it means, or is refused: every key that a family reads, missing, null, or spelt otherwise."""

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from megarl.config import ConfigError
from megarl.models.arithmetic import arithmetic, differences
from megarl.models.description import ModelDescription
from megarl.models.registry import FAMILIES, MODEL_TYPES, completed
from tools.make_tiny_model import FAMILIES as TINY
from tools.make_tiny_model import configuration

PLAIN = [family.heads["lm"].architecture for family in FAMILIES.values() if not family.nested]  # the others: test_vision.py
KINDS = {architecture: MODEL_TYPES[architecture][0] for architecture in PLAIN}
# What transformers has no key for: it knows only these values.
FIXED = {"scoring_func", "topk_method", "use_routing_bias"}
BLOCKS = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
WINDOWS = {"sliding_window", "use_sliding_window", "max_window_layers"}
UNREAD = {  # what some classes have no key for, read for RoPE alone, or replace by what it means
    "deepseek_v32": {"num_nextn_predict_layers", "rope_interleave"},
    "glm_moe_dsa": {"num_nextn_predict_layers", "rope_interleave"},
    "glm4_moe_lite": {"num_nextn_predict_layers", "first_k_dense_replace"},
    "ernie4_5_moe": {"num_nextn_predict_layers", "attention_dropout", "moe_layer_end_index"},
    "minimax_m2": {"num_nextn_predict_layers", "rotary_dim"},
    "nemotron_h": {"num_hidden_layers", "hybrid_override_pattern", "time_step_limit"},
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), {"mtp_num_hidden_layers"}),
}
# Compared by what they come to: frequencies, layers.
BESIDE = {"partial_rotary_factor", "rope_theta", "layer_types", "full_attention_interval", "mlp_only_layers"}
SCALED: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 8.0,
        "beta_slow": 2.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "attention_factor": 1.2,
        "truncate": False,
    },
}


def unread(architecture: str) -> set[str]:
    """The keys that transformers' class of the architecture does not read."""
    return FIXED | UNREAD.get(KINDS[architecture], set())


def tiny(architecture: str) -> dict[str, Any]:
    """A config.json as transformers writes it."""
    name = next(name for name, (kind, _) in TINY.items() if kind == KINDS[architecture])
    made = configuration(name, layers=2, hidden=128, experts=8, expert_hidden=32).to_dict()
    layers = ("layer_types", "mlp_layer_types", "indexer_types")
    return {key: value for key, value in made.items() if key not in layers} | {"architectures": [architecture]}


def theirs(config: dict[str, Any]) -> PreTrainedConfig:
    """What transformers makes of it. Raises one of several kinds of errors if it refuses it."""
    kept = {key: dict(value) if isinstance(value, dict) else value for key, value in config.items() if key != "model_type"}
    return CONFIG_MAPPING[KINDS[config["architectures"][0]]](**kept)


def rotation(config: PreTrainedConfig) -> tuple[torch.Tensor, float]:
    """The frequencies and the factor of transformers' rotary embedding."""
    module = importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))
    [name] = {name for name in dir(module) if name.endswith("RotaryEmbedding") and "Vision" not in name}
    rotary = getattr(module, name)(config)
    return rotary.inv_freq, rotary.attention_scaling


def windows(ours: dict[str, Any], other: PreTrainedConfig | None, layers: int) -> list[int | None]:
    """How many tokens each layer sees, by our arithmetic or by transformers' configuration; None: all."""
    size = ours["sliding_window"] if other is None else getattr(other, "sliding_window", None)
    types = ours["layer_types"] if other is None else getattr(other, "layer_types", None)
    return [size if kind == "sliding_attention" else None for kind in types or ["sliding_attention"] * layers]


def same(config: dict[str, Any]) -> bool:
    """Whether the family takes it; then transformers must mean the same by it."""
    try:
        model = ModelDescription.of(config)
        ours = arithmetic(model)
        assert model.fields
    except ConfigError as error:
        assert str(error).startswith("model.path: ") and "\n" not in str(error)
        return False
    other = theirs(config)
    latent = "qk_rope_head_dim" in model.config
    derived = {
        "num_key_value_heads": other.num_key_value_heads,
        "head_dim": getattr(other, "head_dim", None) or other.hidden_size // other.num_attention_heads,
    }
    for key in model.family.defaults.keys() - unread(model.architecture) - WINDOWS - BESIDE:
        assert ours.get(key, model.config[key]) == (derived[key] if key in derived else getattr(other, key)), key
    assert windows(ours, other, other.num_hidden_layers) == windows(ours, None, other.num_hidden_layers)
    assert (getattr(other, "mlp_only_layers", None) or []) == (model.config.get("mlp_only_layers") or [])
    if hasattr(other, "mlp_layer_types"):
        assert other.mlp_layer_types == ["dense"] * model.sizes.dense + ["sparse"] * (model.sizes.layers - model.sizes.dense)
    linear = model.fields.get("linear_attention_freq") or [False] * model.sizes.layers
    kinds = getattr(other, "layer_types", None) or ["full_attention"] * model.sizes.layers
    if model.sizes.blocks:
        assert kinds == [BLOCKS[kind] for kind in model.sizes.blocks]
        return True  # without a rotary embedding
    assert [kind == "linear_attention" for kind in kinds] == [bool(one) for one in linear]
    frequencies, factor = rotation(other)
    torch.testing.assert_close(
        model.rope.frequencies(model.config["qk_rope_head_dim"] if latent else ours["head_dim"]), frequencies, rtol=1e-6, atol=0
    )
    assert model.rope.attention_factor == pytest.approx(factor, rel=1e-12)
    return True


@pytest.mark.parametrize("architecture", KINDS)
def test_a_missing_or_null_key_has_transformers_default_or_is_refused(architecture: str) -> None:
    config, family = tiny(architecture), FAMILIES[architecture]
    assert same(config)
    spellings = {**{key: {key} for key in family.defaults}}
    for other, key in family.spellings.items():
        spellings[key].add(other)
    taken = set()
    for key, names in spellings.items():
        rest = {name: value for name, value in config.items() if name not in names}
        if same(rest):
            taken.add(key)
        for name in names:
            assert same({**rest, name: None}) <= (family.defaults[key] is None or key in family.nullable), "a null that says nothing"
    sizes = {"hidden_size", "num_attention_heads", "head_dim", "num_key_value_heads", "sliding_window"}  # others do not go with the rest
    sizes |= {"n_group", "topk_group", "num_experts_per_tok", "first_k_dense_replace", "qk_rope_head_dim", "linear_num_key_heads"}
    sizes |= {"layers_block_type", "n_groups"}  # a missing pattern would be that of a model of four layers
    sizes |= {"num_hidden_layers"} if "moe_layer_end_index" in family.defaults else set()
    assert family.defaults.keys() - taken <= sizes, "the default of every other key is taken"


@pytest.mark.parametrize("architecture", KINDS)
def test_the_tables_are_those_of_transformers_classes(architecture: str) -> None:
    """Each default by itself, whether or not the rest of a tiny configuration goes with it."""
    family, other = FAMILIES[architecture], CONFIG_MAPPING[KINDS[architecture]]()
    derived = {"head_dim": getattr(other, "head_dim", None), "num_key_value_heads": other.num_attention_heads, "mlp_only_layers": []}
    found = {**getattr(other, "rope_parameters", {}), **{key: getattr(other, key) for key in family.defaults if hasattr(other, key)}}
    found["sliding_window"] = getattr(type(other), "sliding_window", None)  # an instance has none where use_sliding_window is false
    for key in family.defaults.keys() - unread(architecture) - {"layer_types", "full_attention_interval", "layers_block_type"}:
        expected = derived.get(key) if family.defaults[key] is None else family.defaults[key]
        assert found.get(key) == expected, key


class Read(dict[str, Any]):
    """A config.json that remembers which keys were read."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.keys_read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.keys_read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_read.add(key)
        return super().get(key, default)


@pytest.mark.parametrize("architecture", KINDS)
def test_every_key_that_a_family_reads_has_a_default(architecture: str) -> None:
    """Or it changes nothing unless it is given: then only one value is supported, or it is a part of RoPE."""
    config, family = Read(completed(tiny(architecture))), FAMILIES[architecture]
    family.fields(config)
    family.weights(config)
    family.optional(config)
    family.predictors(config)
    given = {"rope_scaling", "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings"}
    refused = {
        "attention_bias",
        "mlp_bias",
        "sliding_window",
        "use_sliding_window",
        "layer_types",
        "mlp_layer_types",
        "moe_layer_freq",
        "head_dim",
    }
    refused |= {"rope_interleave", *FIXED}
    refused |= {"indexer_rope_interleave", "indexer_types", "index_topk_freq", "index_topk_pattern"}
    refused |= {
        "attn_type_list",
        "shared_intermediate_size",
        "qk_norm_type",
        "use_qk_norm",
        "dual_chunk_attention_config",
        "layer_rope_theta",
        "attention_sinks",
    }
    general = {"architectures", "per_layer_config", "quantization_config"}
    assert config.keys_read - family.defaults.keys() <= given | refused | general


def ropes(architecture: str) -> Iterator[dict[str, Any]]:
    """Every kind of RoPE in both spellings; with each of its keys missing or null; and both spellings side by side."""
    plain = {key: value for key, value in tiny(architecture).items() if key not in ("rope_parameters", "partial_rotary_factor")}
    yield plain
    for top in ({}, {"rope_theta": 5e5}, {"rope_theta": None}, {"partial_rotary_factor": 0.5}, {"partial_rotary_factor": None}):
        for scaled in (None, *SCALED.values()):
            yield {**plain, **top, "rope_scaling": scaled}
            yield {**plain, **top, "rope_parameters": scaled}
            yield {**plain, **top, "rope_parameters": {**(scaled or {}), "rope_theta": 3e4}}
            yield {**plain, **top, "rope_parameters": {"rope_type": "default", "rope_theta": 3e4}, "rope_scaling": scaled}
            yield {**plain, **top, "rope_parameters": {**(scaled or {}), "rope_theta": 5e5}, "rope_scaling": scaled}
            yield {**plain, **top, "rope_parameters": {**(scaled or {}), "partial_rotary_factor": 0.25}}
            yield {**plain, **top, "rope_parameters": {**(scaled or {}), "partial_rotary_factor": None}}
    for scaled in SCALED.values():
        for key in scaled:
            rest = {name: value for name, value in scaled.items() if name != key}
            for changed in (rest, {**rest, key: None}):
                yield {**plain, "rope_theta": 5e5, "rope_scaling": changed}
                yield {**plain, "rope_parameters": {**changed, "rope_theta": 5e5}}
                yield {**plain, "rope_parameters": {**changed, "rope_theta": 5e5}, "original_max_position_embeddings": 128}


@pytest.mark.parametrize("architecture", [name for name in KINDS if KINDS[name] != "nemotron_h"])  # which has none
def test_rope_is_transformers_in_every_spelling_or_refused(architecture: str) -> None:
    taken = sum(map(same, ropes(architecture)))
    assert taken > (10 if architecture == "Phi3ForCausalLM" else 20)


def test_both_spellings_of_rope_are_the_one_that_transformers_uses_or_are_refused() -> None:
    """The older one beside the newer was ignored."""
    config, yarn = tiny("Qwen2ForCausalLM"), {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    config |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "rope_scaling": yarn}
    with pytest.raises(ConfigError, match=r"rope_scaling and rope_parameters, which differ: rope_type is 'yarn' and 'default'"):
        arithmetic(ModelDescription.of(config))
    config["rope_parameters"] = {**yarn, "rope_type": "yarn", "rope_theta": 1e4}
    assert same(config) and arithmetic(ModelDescription.of(config))["rope_type"] == "yarn"


def test_another_spelling_is_no_other_arithmetic_and_another_number_is() -> None:
    config, of = tiny("LlamaForCausalLM"), ModelDescription.of
    old = {key: value for key, value in config.items() if key != "rope_parameters"}
    scaled = dict(config["rope_parameters"])
    old |= {"rope_theta": scaled.pop("rope_theta"), "rope_scaling": scaled, "max_position_embeddings": 4096, "torch_dtype": "bfloat16"}
    assert differences(of(config), of(old)) == {}
    for key, value in {"rms_norm_eps": 1e-5, "rope_theta": 1e4}.items():
        assert differences(of(old), of({**old, key: value})) == {key: (old[key], value)}
    moe = tiny("Qwen3MoeForCausalLM")
    assert differences(of(moe), of({**moe, "num_experts_per_tok": 3})) == {"num_experts_per_tok": (2, 3)}

"""The model families that megarl supports, by architecture, and what config.json means where it leaves keys out."""

from __future__ import annotations

from typing import Any

from megarl.config import ConfigError
from megarl.models import (
    deepseek_v2,
    deepseek_v3,
    deepseek_v32,
    ernie4_5_moe,
    glm4_moe,
    glm4_moe_lite,
    glm_moe_dsa,
    gpt_oss,
    granitemoe,
    llama,
    minimax_m2,
    ministral,
    mistral,
    mixtral,
    olmoe,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5_moe_text,
    qwen3_5_text,
    qwen3_moe,
    qwen3_next,
)
from megarl.models.config_json import ConfigJson
from megarl.models.weight_map import Family

_MODULES = (
    *(qwen3_moe, qwen3_next, qwen3_5_moe_text, qwen3_5_text, qwen3, qwen2, qwen2_moe, llama, mistral, ministral, phi3, mixtral, olmoe),
    *(deepseek_v3, deepseek_v32, deepseek_v2, glm4_moe, glm4_moe_lite, glm_moe_dsa, gpt_oss, minimax_m2, ernie4_5_moe, granitemoe),
)
FAMILIES = {head.architecture: module.FAMILY for module in _MODULES for head in module.FAMILY.heads.values()}
# config.json's model_type, by which transformers and vLLM choose their code, is the name of the family's file, or another name of it.
MODEL_TYPES = {
    head.architecture: (module.__name__.rpartition(".")[2], *module.FAMILY.names)
    for module in _MODULES
    for head in module.FAMILY.heads.values()
}
# Architectures of text and images -> that of their language model.
_IMAGES = {own.architecture: module.FAMILY.heads["lm"].architecture for module in _MODULES if (own := module.FAMILY.images) is not None}
_SHARED = ("architectures", "dtype", "torch_dtype", "tie_word_embeddings", "eos_token_id", "quantization_config")  # of the whole model


def family_of(config: ConfigJson) -> Family:
    """Return the family of a config.json. Raise ConfigError for an architecture that megarl does not support."""
    family = find_family(config)
    if family is None:
        raise ConfigError(
            f"model.path: architecture {_architecture(config)!r} is not supported (supported: {', '.join([*FAMILIES, *_IMAGES])})"
        )
    return family


def find_family(config: ConfigJson) -> Family | None:
    """Return the family of a config.json; None for an architecture that megarl does not support."""
    architecture = _architecture(config)
    return FAMILIES.get(_IMAGES.get(architecture, architecture))


def sees_images(config: ConfigJson) -> bool:
    """Whether a config.json is that of a model of text and images, whose language model alone megarl reads."""
    return str(_architecture(config)) in _IMAGES


def language_model(given: ConfigJson) -> dict[str, Any]:
    """Return the config.json of a model's language model: that of a model of text and images has it as `text_config`, others are their own.

    Raises ConfigError if there is no `text_config`.
    """
    if not sees_images(given):
        return dict(given)
    own = given.get("text_config")
    if not isinstance(own, dict):
        raise ConfigError(f"model.path: config.json of {_architecture(given)} has no text_config, which describes its language model")
    architecture = _IMAGES[_architecture(given)]
    shared = {key: given[key] for key in _SHARED if key in given}
    return {"model_type": MODEL_TYPES[architecture][0], **shared, **own, "architectures": [architecture]}


def _architecture(config: ConfigJson) -> Any:
    architectures = config.get("architectures")
    return architectures[0] if isinstance(architectures, list) and architectures else None


def completed(given: ConfigJson) -> dict[str, Any]:
    """Return a config.json with every key that the family reads: other spellings resolved, missing keys with transformers' defaults.

    A config.json of an unknown architecture is returned as it is: `family_of` refuses it.

    Raises:
        ConfigError: a key is null that transformers takes no null for.
    """
    config, family = language_model(given), find_family(given)
    if family is None:
        return config
    for other, key in family.spellings.items():
        if other in config:
            config.setdefault(key, config[other])
    for key, default in family.defaults.items():
        if key not in config:
            config[key] = default
        elif config[key] is None and default is not None and key not in family.nullable:
            raise ConfigError(f"model.path: config.json's {key} is null, which says nothing: without the key it is {default!r}")
    return config

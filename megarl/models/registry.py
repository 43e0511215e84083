"""The model families that megarl supports, by architecture, and what config.json means where it leaves keys out."""

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
    granite,
    granitemoe,
    llama,
    minimax_m2,
    ministral,
    mistral,
    mixtral,
    nemotron_h,
    olmoe,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_5_moe,
    qwen3_5_moe_text,
    qwen3_5_text,
    qwen3_moe,
    qwen3_next,
    qwen3_vl,
    qwen3_vl_moe,
)
from megarl.models.config_json import ConfigJson
from megarl.models.family import Family

_MODULES = (
    *(qwen3_moe, qwen3_next, qwen3_5_moe_text, qwen3_5_text, qwen3, qwen2, qwen2_moe, llama, mistral, ministral, phi3, mixtral, olmoe),
    *(
        deepseek_v3,
        deepseek_v32,
        deepseek_v2,
        glm4_moe,
        glm4_moe_lite,
        glm_moe_dsa,
        gpt_oss,
        minimax_m2,
        ernie4_5_moe,
        granitemoe,
        granite,
        qwen3_vl,
        qwen3_vl_moe,
        qwen3_5,
        qwen3_5_moe,
    ),
    nemotron_h,
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
        raise ConfigError(f"model.path: architecture {_architecture(config)!r} is not supported (supported: {', '.join(FAMILIES)})")
    return family


def find_family(config: ConfigJson, *, drop_images: bool = False) -> Family | None:
    """Return the family of a config.json; None for an architecture that megarl does not support.

    `drop_images`: of a model of text and images, that of its language model, if it has a family of its own.
    """
    architecture = _architecture(config)
    if not isinstance(architecture, str):
        return None
    return FAMILIES.get(_IMAGES.get(architecture, architecture) if drop_images else architecture)


def has_text_family(config: ConfigJson) -> bool:
    """Whether a config.json is that of a model of text and images whose language model has a family of its own."""
    return str(_architecture(config)) in _IMAGES


def language_model(given: ConfigJson, *, drop_images: bool = False) -> dict[str, Any]:
    """Return the config.json of a model's language model: that of a model of text and images has it as `text_config`, others are their own.

    `drop_images`: as of `find_family`; what is returned is then that of a model of text. Raises ConfigError if there is no `text_config`.
    """
    family = find_family(given, drop_images=drop_images)
    if family is not None and family.nested:
        return _flat(given)
    if not drop_images or not has_text_family(given):
        return dict(given)
    own = given.get("text_config")
    if not isinstance(own, dict):
        raise ConfigError(f"model.path: config.json of {_architecture(given)} has no text_config, which describes its language model")
    architecture = _IMAGES[_architecture(given)]
    shared = {key: given[key] for key in _SHARED if key in given}
    return {"model_type": MODEL_TYPES[architecture][0], **shared, **own, "architectures": [architecture]}


def _flat(given: ConfigJson) -> dict[str, Any]:
    """Return a nested config.json with the keys of its language model among those of the whole model; one that is flat as it is.

    Raises ConfigError if there is no `text_config`, or it ties the output layer and the whole model does not.
    """
    if "text_config" not in given and "hidden_size" in given:
        return dict(given)
    own = given.get("text_config")
    if not isinstance(own, dict):
        raise ConfigError(f"model.path: config.json of {_architecture(given)} has no text_config, which describes its language model")
    tied, inner = (given.get("tie_word_embeddings") or False, own.get("tie_word_embeddings"))
    if inner is not None and inner != tied:
        raise ConfigError(
            f"model.path: config.json's tie_word_embeddings={tied} is not that of its text_config, {inner}: transformers reads the first"
        )
    whole = {key: value for key, value in given.items() if key != "text_config"}
    return {**own, **whole, "tie_word_embeddings": tied}


def described_as(given: ConfigJson, *, drop_images: bool = False) -> dict[str, Any]:
    """Return the config.json of what is written of a model: its own, or that of its language model (`drop_images`)."""
    return language_model(given, drop_images=True) if drop_images and has_text_family(given) else dict(given)


def _architecture(config: ConfigJson) -> Any:
    architectures = config.get("architectures")
    return architectures[0] if isinstance(architectures, list) and architectures else None


def completed(given: ConfigJson, *, drop_images: bool = False) -> dict[str, Any]:
    """Return a config.json with every key that the family reads: other spellings resolved, missing keys with transformers' defaults.

    A config.json of an unknown architecture is returned as it is: `family_of` refuses it. `drop_images`: as of `language_model`.

    Raises:
        ConfigError: a key is null that transformers takes no null for.
    """
    config, family = language_model(given, drop_images=drop_images), find_family(given, drop_images=drop_images)
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

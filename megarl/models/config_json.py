"""The values in config.json and generation_config.json, and their types. Which keys a family requires is defined in the family's file."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError

from megarl.errors import ConfigError

ConfigJson = Mapping[str, Any]  # a model's config.json, with transformers' defaults (`registry.completed`)
TokenIds = Annotated[
    list[NonNegativeInt], BeforeValidator(lambda given: given if isinstance(given, list) else [] if given is None else [given])
]
MAX = (1 << 31) - 1  # of any number: Megatron and CUDA count with 32 bits
Ratio = Annotated[float, Field(gt=0, le=1)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


class _Rope(_Section):
    rope_type: str | None = None
    type: str | None = None
    rope_theta: PositiveFloat | None = None
    partial_rotary_factor: Ratio | None = None
    factor: PositiveFloat | None = None
    low_freq_factor: PositiveFloat | None = None
    high_freq_factor: PositiveFloat | None = None
    original_max_position_embeddings: PositiveInt | None = None
    attention_factor: PositiveFloat | None = None
    beta_fast: PositiveFloat | None = None
    beta_slow: PositiveFloat | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


class _Config(_Section):
    architectures: list[str] | None = None
    model_type: str | None = None
    max_position_embeddings: PositiveInt | None = None
    rms_norm_eps: PositiveFloat | None = None
    rope_theta: PositiveFloat | None = None
    partial_rotary_factor: Ratio | None = None
    rotary_dim: PositiveInt | None = None
    original_max_position_embeddings: PositiveInt | None = None
    rope_parameters: _Rope | None = None
    rope_scaling: _Rope | None = None
    tie_word_embeddings: bool | None = None
    attention_bias: bool | None = None
    use_qk_norm: bool | None = None
    norm_topk_prob: bool | None = None
    layer_types: list[str] | None = None
    use_sliding_window: bool | None = None
    max_window_layers: NonNegativeInt | None = None
    num_experts_per_tok: PositiveInt | None = None
    n_group: NonNegativeInt | None = None
    topk_group: NonNegativeInt | None = None
    routed_scaling_factor: PositiveFloat | None = None
    num_nextn_predict_layers: NonNegativeInt | None = None
    num_mtp_layers: NonNegativeInt | None = None
    num_mtp_modules: NonNegativeInt | None = None
    mtp_num_hidden_layers: NonNegativeInt | None = None
    attn_output_gate: bool | None = None
    dtype: str | None = None
    torch_dtype: str | None = None
    eos_token_id: TokenIds = []
    bos_token_id: int | None = None
    pad_token_id: int | None = None


def check_kinds(config: dict[str, Any], name: str) -> None:
    """Raise ConfigError, naming the file `name`, for the first value of the wrong type, such as a string, true or NaN for a number."""
    try:
        _Config.model_validate(config)
    except ValidationError as error:
        fault = error.errors()[0]
        first = fault["loc"][0]
        key = ".".join(map(str, fault["loc"])) if isinstance(config[str(first)], dict | list) else first
        raise ConfigError(f"model.path: {name}'s {key}={fault['input']!r:.200}: {fault['msg']}") from None


def number(config: ConfigJson, key: str) -> int:
    """Return a positive integer from config.json. Raise ConfigError if it is missing, not a positive integer or too large."""
    if key not in config:
        raise ConfigError(f"model.path: config.json lacks {key}")
    if type(config[key]) is not int or config[key] < 1:
        raise ConfigError(f"model.path: config.json's {key}={config[key]!r:.200} is not a positive integer")
    if config[key] > MAX:
        raise ConfigError(f"model.path: config.json's {key}={config[key]!r:.200} is more than {MAX}")
    return config[key]

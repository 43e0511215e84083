"""The engine arguments of vLLM that `rollout.engine.args` may set."""

import importlib.util
from collections.abc import Mapping
from functools import cache
from typing import Any

from megarl.models.upstream_fields import check_values, fields_of

_ONE = "an engine is one model on rollout.dp x rollout.tp devices; rollout.replicas makes more of them"
_WEIGHTS = "the weights are the trainer's, tensor by tensor, and their fingerprints are compared"
_SAMPLES = "megarl asks for what it trains on: tokens, log-probs, experts"
_CODE = "it would load code that the configuration names"
_SOCKETS = "an engine's sockets are megarl's"
_PREFIXES = {
    "data_parallel": "set by rollout.dp",
    "prefill_context_parallel": _ONE,
    "decode_context_parallel": _ONE,
    "elastic_ep": _ONE,
    "enable_elastic": _ONE,
    "spec": _SAMPLES,
    "tokenizer": _SAMPLES,
    "quantization": _WEIGHTS,
    "allow_deprecated_quantization": _WEIGHTS,
    "numa": _ONE,
    "ec_": _CODE,
    "_api": _SOCKETS,
    "lora": _WEIGHTS,
}
_NAMES: dict[str, tuple[str, ...]] = {
    "set by model.path, model.dtype and rollout.dtype": ("model", "dtype", "model_weights", "hf_config_path", "revision", "code_revision"),
    "set by seed": ("seed",),
    "set by rollout.tp": ("tensor_parallel_size",),
    "set by rollout.expert_parallel": ("enable_expert_parallel",),
    "set by rollout.max_prompt_tokens and max_response_tokens": ("max_model_len",),
    "set by rollout.max_num_seqs": ("max_num_seqs",),
    "set by rollout.gpu_memory_fraction": ("gpu_memory_utilization",),
    "set by rollout.kv_cache_mb": ("kv_cache_memory_bytes",),
    "set by placement.engines": ("enable_sleep_mode", "enable_cumem_allocator"),
    "set by routing": ("enable_return_routed_experts",),
    "set by rollout.fp32_head and rollout.quantization": ("hf_overrides",),
    "code in a model directory is never run": ("trust_remote_code",),
    _ONE: ("pipeline_parallel_size", "nnodes", "node_rank", "device_ids", "enable_eplb", "enable_dbo"),
    _WEIGHTS: ("load_format", "model_loader_extra_config", "enable_lora", "default_mm_loras", "weight_transfer_config", "offload_params"),
    _SAMPLES: (
        "logprobs_mode",
        "max_logprobs",
        "return_sampling_mask",
        "runner",
        "convert",
        "skip_tokenizer_init",
        "generation_config",
        "override_generation_config",
        "reasoning_parser",
        "structured_outputs_config",
        "tokens_only",
        "disable_log_stats",
        "enable_log_requests",
    ),
    _CODE: (
        "logits_processors",
        "worker_cls",
        "worker_extension_cls",
        "scheduler_cls",
        "io_processor_plugin",
        "reasoning_parser_plugin",
        "model_class_overrides",
        "model_impl",
        "kv_transfer_config",
        "kv_events_config",
        "distributed_executor_backend",
        "additional_config",
        "hf_token",
        "download_dir",
    ),
    _SOCKETS: ("master_addr", "master_port", "otlp_traces_endpoint", "allowed_local_media_path", "allowed_media_domains"),
}
OWNED = {name: reason for reason, names in _NAMES.items() for name in names}
ON_CPU = dict.fromkeys(
    ("enable_chunked_prefill", "max_num_batched_tokens", "max_num_scheduled_tokens", "compilation_config", "enforce_eager"),
    "a CPU engine computes prompts whole, and compiles nothing",
)


@cache
def argument_fields() -> dict[str, Any]:
    """Return the fields of vLLM's AsyncEngineArgs, parsed once: `megarl plan` checks hundreds of configurations."""
    return fields_of("vllm", {"engine/arg_utils.py": ("EngineArgs", "AsyncEngineArgs")})


def check_arguments(given: Mapping[str, Any], *, gpu: bool) -> None:
    """Raise ConfigError for an argument of `rollout.engine.args` that vLLM does not have, or that the user may not set.

    Where vLLM is not installed, as where a plan is made, nothing is known of its arguments.
    """
    if not given or importlib.util.find_spec("vllm") is None:
        return
    fields = argument_fields()
    owned = {name: reason for name in fields for prefix, reason in _PREFIXES.items() if name.startswith(prefix)}
    check_values("rollout.engine.args", given, fields, owned | OWNED | ({} if gpu else ON_CPU), "vLLM's AsyncEngineArgs")

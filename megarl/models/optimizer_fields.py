"""The fields of Megatron's OptimizerConfig and DistributedDataParallelConfig that `optimizer.megatron` and `optimizer.ddp` may set."""

from collections.abc import Mapping
from typing import Any

from megarl.config import ConfigError, OptimizerSettings
from megarl.models.upstream_fields import check_values, fields_of

_ADAMW = "the optimizer is AdamW, distributed over the ranks, with optimizer.muon for matrices"
_PRECISION = "set by model.dtype"
_NARROW = "checkpoints store main weights and moments in float32 only"
_FSDP = "weights are complete on every replica; layout splits them"


def _because(reason: str, *names: str) -> dict[str, str]:
    return dict.fromkeys(names, reason)


OPTIMIZER = {
    **_because("set by optimizer.lr, warmup_steps, decay and min_lr_fraction", "lr", "min_lr", "decoupled_lr", "decoupled_min_lr"),
    **{
        name: f"set by optimizer.{key}"
        for name, key in (
            ("weight_decay", "weight_decay"),
            ("adam_beta1", "betas"),
            ("adam_beta2", "betas"),
            ("adam_eps", "eps"),
            ("clip_grad", "clip_grad"),
            ("overlap_param_gather", "ddp.overlap_param_gather"),
            ("muon_momentum", "muon.momentum"),
            ("muon_nesterov", "muon.nesterov"),
            ("muon_num_ns_steps", "muon.ns_steps"),
            ("muon_scale_mode", "muon.adjust_lr"),
            ("muon_extra_scale_factor", "muon.adjust_lr"),
        )
    },
    **_because(_ADAMW, "optimizer", "use_distributed_optimizer", "use_layer_wise_distributed_optimizer"),
    **_because(_ADAMW, "decoupled_weight_decay", "sgd_momentum"),
    **_because("a gradient that is not finite already changes nothing, and clipping bounds the others", "grad_norm_skip_threshold"),
    **{
        f"{kind}_{name}": _ADAMW
        for kind, names in {
            "muon": "split_qkv fp32_matmul_prec tp_mode coefficient_type scalar_optimizer",
            "adaptive_muon": "moment2_method beta2 eps",
            "lion": "beta1 beta2",
            "soap": "shampoo_beta precondition_frequency use_kl_shampoo",
        }.items()
        for name in names.split()
    },
    **_because(_PRECISION, "fp16", "bf16", "params_dtype", "fp8_recipe", "reuse_grad_buf_for_mxfp8_param_ag"),
    **_because(
        "float32 and bfloat16 need no loss scale", "loss_scale", "initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis"
    ),
    **_because(
        _NARROW,
        "use_precision_aware_optimizer",
        "store_param_remainders",
        "main_grads_dtype",
        "main_params_dtype",
        "exp_avg_dtype",
        "exp_avg_sq_dtype",
    ),
    **_because("the weights of all chunks are gathered in the same way", "overlap_param_gather_with_optimizer_step"),
    **_because("megarl measures and logs", "timers", "barrier_with_L1_time", "log_num_zeros_in_grad"),
    **_because("no tensor is given by the configuration", "config_logger_dir"),
}
DDP = {
    **_because(
        "gradients are summed in float32 over the distributed optimizer's ranks",
        "grad_reduce_in_fp32",
        "use_distributed_optimizer",
        "param_name_patterns_for_fp32_local_accumulation",
    ),
    **_because(_PRECISION, "fp8_param_gather", "fp4_param_gather", "keep_fp8_transpose_cache", "reuse_grad_buf_for_mxfp8_param_ag"),
    **_because(
        "a gradient that is not finite already changes nothing, and the step is named", "check_for_nan_in_grad", "check_for_large_grads"
    ),
    **_because(
        _FSDP,
        "use_megatron_fsdp",
        "use_custom_fsdp",
        "data_parallel_sharding_strategy",
        "outer_dp_sharding_strategy",
        "suggested_communication_unit_size",
        "fsdp_double_buffer",
        "fsdp_manual_registration",
        "fsdp_db_use_persist_buf_on_alloc_fail",
        "fsdp_all_gather_in_start_param_sync",
        "megatron_fsdp_main_params_dtype",
        "megatron_fsdp_main_grads_dtype",
        "megatron_fsdp_grad_comm_dtype",
        "megatron_fsdp_use_decoupled_grad",
        "megatron_fsdp_cuda_graph_mode",
        "megatron_fsdp_enable_fine_grained_param_gather",
        "megatron_fsdp_max_pool_double_buffer",
        "num_distributed_optimizer_instances",
        "nccl_ub",
        "disable_symmetric_registration",
    ),
    **_because("the schedule's scaling of the loss counts on plain sums", "average_in_collective", "gradient_reduce_div_fusion"),
    **_because("belongs to a schedule that is not used", "delay_wgrad_compute"),
}


def optimizer_fields() -> dict[str, Any]:
    """Return the fields of OptimizerConfig, with their types."""
    return fields_of("megatron.core", {"optimizer/optimizer_config.py": ("OptimizerConfig",)})


def ddp_fields() -> dict[str, Any]:
    """Return the fields of DistributedDataParallelConfig, with their types."""
    return fields_of("megatron.core", {"distributed/distributed_data_parallel_config.py": ("DistributedDataParallelConfig",)})


def check_optimizer(key: str, settings: OptimizerSettings) -> None:
    """Raise ConfigError for anything that the mappings of an optimizer (whose section is `key`) may not set."""
    mappings: list[tuple[str, Mapping[str, Any], Any, dict[str, str], str]] = [
        ("megatron", settings.megatron, optimizer_fields, OPTIMIZER, "Megatron's OptimizerConfig"),
        ("ddp", settings.ddp, ddp_fields, DDP, "Megatron's DistributedDataParallelConfig"),
    ]
    for name, given, fields, owned, what in mappings:
        if given:
            check_values(f"{key}.{name}", given, fields(), owned, what)
    if settings.megatron.get("optimizer_cpu_offload") and settings.muon is not None:
        raise ConfigError(f"{key}.megatron.optimizer_cpu_offload=True: not with {key}.muon, which updates matrices on their ranks")
    if settings.megatron.get("optimizer_cpu_offload") and not settings.offloaded:
        raise ConfigError(
            f"{key}.megatron.optimizer_cpu_offload=True: optimizer_offload_fraction=0, Megatron's default, offloads nothing; 1.0 all"
        )

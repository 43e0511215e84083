"""Check, before any process starts, whether vLLM could run a model with the given settings."""

import ast
import importlib.util
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from megarl.config import ConfigError, RolloutSettings, TrainRolloutSettings
from megarl.engines.vllm.arguments import check_arguments
from megarl.engines.vllm.launch import DRAFTS, VLLM_VERSION, vllm_names
from megarl.models import decoder
from megarl.models.delta_nets import delta_nets
from megarl.models.description import ModelDescription
from megarl.models.rope import mscale
from megarl.models.sizes import ATTENTION
from megarl.models.vision import VisionSizes
from megarl.models.weight_map import FP8_BLOCK
from megarl.models.weight_ops import QKV, Fused

HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # supported by vLLM 0.30.0 on CPU (v1/attention/backends/cpu_attn.py:64)
_NATIVE = (
    "_TEXT_GENERATION_MODELS",
    "_MULTIMODAL_MODELS",
)  # in vllm/model_executor/models/registry.py:72, :345; others are not native
_BLOCK, _LATENT_BLOCK = 128, 16  # tokens per KV cache block of vLLM on CPU (vllm/platforms/cpu.py:256, :269)

_UNQUANTIZED = {"GraniteMoeForCausalLM": "Granite-MoE", "NemotronHForCausalLM": "Nemotron-H"}
_CPU_UNITS = 32  # vLLM's CPU experts have a multiple of as many hidden units


def check(model: ModelDescription, dtype: str, settings: RolloutSettings, *, gpu: bool) -> None:
    """Implement `Engine.check`.

    A CPU engine needs `kv_cache_mb`, with room for one longest sequence. A GPU engine takes none.
    """
    check_arguments(settings.engine.args, gpu=gpu)
    if model.sizes.indexer is not None and (gpu or settings.quantization is not None):  # see `cpu/sparse_attention.py`
        raise ConfigError(
            f"model.path: config.json's index_topk={model.sizes.indexer.topk}: engines with sparse attention run on CPUs alone, without "
            "rollout.quantization: on GPUs their indexers compute in fp8, and choose other keys than the ranks'"
        )
    if model.sizes.vision is not None:
        _check_vision(model.sizes.vision, settings)
    if model.sizes.blocks and ATTENTION not in model.sizes.blocks:  # vllm/model_executor/layers/fused_moe/routed_experts_capturer.py:312
        raise ConfigError(f"model.path: {model.architecture} without a layer of attention is not run by megarl's engines")
    if isinstance(settings, TrainRolloutSettings) and settings.speculative is not None:
        _check_drafts(model, dtype, settings, settings.speculative, gpu=gpu)
    _check_architectures(vllm_names(model.config["architectures"]))
    if model.architecture == "Qwen2ForCausalLM" and model.fields.get("window_attn_skip_freq"):  # vllm/model_executor/models/qwen2.py:350
        raise ConfigError("model.path: config.json has sliding windows in some layers only, which vLLM's Qwen2 does not support")
    if model.architecture == "GptOssForCausalLM":
        _check_gpt_oss(model, settings, gpu=gpu)
    if settings.quantization is not None and model.architecture in _UNQUANTIZED:
        raise ConfigError(f"rollout.quantization={settings.quantization}: not supported for {_UNQUANTIZED[model.architecture]}")
    heads, kv_heads = model.sizes.heads, model.sizes.groups
    if heads % settings.tp or (kv_heads % settings.tp and settings.tp % kv_heads):
        raise ConfigError(f"rollout.tp={settings.tp}: does not divide the model's {heads} attention heads and {kv_heads} KV heads")
    if model.sizes.linear_heads % settings.tp:
        count, what = model.sizes.linear_heads, model.sizes.linear_parts
        raise ConfigError(f"rollout.tp={settings.tp}: does not divide the model's {count} {what}")
    _check_experts(model, settings)
    if settings.request_routing == "affinity":
        if model.sizes.linear_heads:
            raise ConfigError("rollout.request_routing=affinity: the model has recurrent layers, of which engines keep no prefix cache")
        if settings.engine.args.get("enable_prefix_caching") is False:
            raise ConfigError("rollout.request_routing=affinity: rollout.engine.args.enable_prefix_caching=false leaves no prefix cache")
        if isinstance(settings, TrainRolloutSettings) and settings.speculative is not None:
            raise ConfigError(f"rollout.request_routing=affinity: rollout.speculative={settings.speculative} leaves no prefix cache")
    if settings.quantization is not None:
        _check_blocks(model, settings)
        if gpu and dtype != "bfloat16":
            raise ConfigError(f"rollout.quantization=fp8: on GPUs it computes in bfloat16, and rollout.dtype is {dtype}")
    if gpu:
        if settings.kv_cache_mb is not None:
            raise ConfigError(
                f"rollout.kv_cache_mb={settings.kv_cache_mb}: a GPU engine's cache is what rollout.gpu_memory_fraction="
                f"{settings.gpu_memory_fraction:g} leaves of the GPU's memory; set it to null"
            )
        return
    if settings.kv_cache_mb is None:
        raise ConfigError("rollout.kv_cache_mb: a CPU engine needs it")
    if (size := model.sizes.head_dim) not in HEAD_SIZES and not model.latent:  # see `cpu/mla.py`
        raise ConfigError(f"model.path: config.json's head_dim={size}: vLLM's CPU engines take {', '.join(map(str, HEAD_SIZES))}")
    needed = cache_mb(model, dtype, settings, sequences=1)
    if needed > settings.kv_cache_mb:
        longest = settings.max_prompt_tokens + settings.max_response_tokens
        raise ConfigError(
            f"rollout.kv_cache_mb={settings.kv_cache_mb}: one sequence of max_prompt_tokens+max_response_tokens={longest} tokens "
            f"needs {needed}"
        )


def _check_vision(vision: VisionSizes, settings: RolloutSettings) -> None:
    """Raise ConfigError for settings with which no engine takes images."""
    if settings.quantization is not None:
        raise ConfigError(f"rollout.quantization={settings.quantization}: not supported for models that see images")
    if settings.dp > 1:
        raise ConfigError(
            f"rollout.dp={settings.dp}: an engine of a model that sees images has one member; rollout.replicas makes more engines"
        )
    if vision.heads % settings.tp or vision.ffn % settings.tp:
        raise ConfigError(
            f"rollout.tp={settings.tp}: does not divide the vision tower's {vision.heads} heads and intermediate_size={vision.ffn}"
        )


def _check_drafts(model: ModelDescription, dtype: str, settings: TrainRolloutSettings, tokens: int, *, gpu: bool) -> None:
    """Raise ConfigError where it has not been shown that an engine that drafts samples as one that does not."""
    key = f"rollout.speculative={tokens}"
    if not model.predicts:
        raise ConfigError(f"{key}: engines draft with the layer of multi-token prediction that model.mtp=train trains")
    if model.architecture not in DRAFTS:
        raise ConfigError(f"{key}: not shown for {model.architecture}, only for {' and '.join(DRAFTS)}")
    if gpu:
        raise ConfigError(f"{key}: has not been shown on GPUs (cluster.gpus=true)")
    if dtype != "float32":
        raise ConfigError(f"{key}: has been shown in float32, and rollout.dtype is {dtype}")
    if tokens > 1:
        raise ConfigError(f"{key}: has been shown with 1 token at a time")
    others: dict[str, Any] = {"devices": 1, "quantization": None, "mode": "sync", "cut": None}
    for name, shown in others.items():
        if (given := getattr(settings, name)) != shown:
            what = {"devices": "rollout.dp*rollout.tp=", "cut": ""}.get(name, f"rollout.{name}=")
            raise ConfigError(f"{key}: has not been shown with {what}{given}")


def _check_gpt_oss(model: ModelDescription, settings: RolloutSettings, *, gpu: bool) -> None:
    """Raise ConfigError for what vLLM's gpt-oss has whatever config.json says, and for experts that its workers could not share.

    The former are in models/gpt_oss.py:102, :172 and :448, and in activation.py:475, the latter in models/gpt_oss.py:386 and, for CPUs, in
    fused_moe/experts/cpu_moe.py:105.
    """
    config, rope = model.config, model.rope
    layers = [decoder.FULL if layer % 2 else decoder.SLIDING for layer in range(model.sizes.layers)]
    for key, value in {"rms_norm_eps": 1e-5, "swiglu_limit": 7.0, "layer_types": layers}.items():
        if config[key] not in (value, None):
            raise ConfigError(f"model.path: config.json's {key}={config[key]!r:.200}: vLLM's gpt-oss has {value!r:.200} in any case")
    if rope.kind != "yarn" or rope.attention_factor != mscale(rope.numbers["factor"], 1.0):
        raise ConfigError(
            f"model.path: RoPE of type {rope.kind!r} with attention_factor={rope.attention_factor:g}: vLLM's gpt-oss has that of YaRN"
        )
    if settings.quantization is not None:
        raise ConfigError(f"rollout.quantization={settings.quantization}: not supported for gpt-oss")
    size, ranks = model.sizes.expert_ffn, settings.devices
    if size % ranks:
        raise ConfigError(
            f"rollout.dp*rollout.tp={ranks}: does not divide the model's intermediate_size={size}, as vLLM's gpt-oss requires"
        )
    units = size if settings.expert_parallel else size // ranks
    if not gpu and units % _CPU_UNITS:
        raise ConfigError(f"rollout.dp*rollout.tp={ranks}: a CPU worker holds {units} units of each expert, not a multiple of {_CPU_UNITS}")


def _check_blocks(model: ModelDescription, settings: RolloutSettings) -> None:
    """Raise ConfigError unless every worker of an engine holds whole blocks of every quantised matrix.

    vLLM requires it of matrices that are split or merged (vllm/model_executor/layers/quantization/utils/fp8_utils.py:1209, :1260), and of
    all columns, whose inputs are quantised 128 at a time (:583). Only the rows of replicated matrices may end in a part of a block.
    """
    for weight in model.trunk.mappings("lm"):  # of one layer and expert for all, since `megarl plan` checks thousands of layouts
        if not weight.linear:
            continue
        if "{expert}" not in weight.megatron:
            tp, key = settings.tp, f"rollout.tp={settings.tp}"
        else:
            tp = 1 if settings.expert_parallel else settings.devices
            key = f"rollout.dp={settings.dp}, rollout.tp={settings.tp}, rollout.expert_parallel={str(settings.expert_parallel).lower()}"
        parts = weight.op.parts if isinstance(weight.op, Fused) else weight.op
        first = {"layer": min(weight.layers) if weight.layers else 0, "expert": 0}
        names = [name.format(**first) for name in weight.hf] * (len(parts.shapes) // len(weight.hf))
        for index, (name, shape) in enumerate(zip(names, parts.shapes, strict=True)):
            sizes = [size // tp if axis == parts.dim else size for axis, size in enumerate(shape)]
            if isinstance(parts, QKV) and index:  # a key-value head that has to serve several workers is held by each
                sizes[0] = max(sizes[0], parts.head_dim)
            for axis, what in enumerate(("rows", "columns")):
                if sizes[axis] % FP8_BLOCK and (what == "columns" or parts.dim == axis):
                    raise ConfigError(
                        f"rollout.quantization=fp8: with {key} a worker holds {sizes[axis]} {what} of {name}, not a multiple of {FP8_BLOCK}"
                    )


def _check_experts(model: ModelDescription, settings: RolloutSettings) -> None:
    """Raise ConfigError unless the GPUs of an engine can share the model's MLPs and experts.

    `expert_parallel` on one GPU passes: that one then has every whole expert. Experts that do not divide pass, too: the first GPUs have one
    more (vllm/model_executor/layers/fused_moe/expert_map_manager.py:67).
    """
    n, tp, dp, ranks = model.sizes, settings.tp, settings.dp, settings.devices
    if not n.experts and dp > 1:
        raise ConfigError(f"rollout.dp={dp}: the model has no experts; rollout.replicas makes more engines")
    if not n.experts and settings.expert_parallel:
        raise ConfigError("rollout.expert_parallel=true: the model has no experts")
    if settings.expert_parallel and n.experts < ranks:
        raise ConfigError(f"rollout.expert_parallel=true: {n.experts} experts for rollout.dp*rollout.tp={dp}*{tp}={ranks} GPUs")
    if n.shared_ffn % tp:
        raise ConfigError(f"rollout.tp={tp}: does not divide the {n.shared_ffn} units of the model's shared experts")
    # Mixtral calls the size of its experts as others call that of their dense layers.
    whole = "intermediate_size" if n.experts and not model.config.get("moe_intermediate_size") else "moe_intermediate_size"
    for key in ("intermediate_size", "moe_intermediate_size"):
        if key == whole and settings.expert_parallel and not n.shared_ffn:
            continue
        size, over = int(model.config.get(key) or 0), ranks if key == whole and not settings.expert_parallel else tp
        if size % tp:
            raise ConfigError(f"rollout.tp={tp}: does not divide the model's {key}={size}")
        if size % over:
            raise ConfigError(
                f"rollout.dp*rollout.tp={dp}*{tp}={ranks}: does not divide the model's {key}={size}; rollout.expert_parallel=true "
                "gives each GPU whole experts"
            )


def _check_architectures(names: Sequence[str]) -> None:
    known = native_architectures()
    for architecture in names:
        if known and architecture not in known:
            raise ConfigError(
                f"model.path: vLLM {VLLM_VERSION} has no native implementation of {architecture}, and megarl's engines do not use its "
                "transformers backend"
            )


@cache
def native_architectures() -> frozenset[str]:
    """Return the language models that vLLM implements natively, read from its registry's source; empty if vLLM is not installed."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return frozenset()
    tree = ast.parse((Path(spec.origin).parent / "model_executor/models/registry.py").read_text())
    tables = [node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in _NATIVE]
    return frozenset(name for table in tables for name in ast.literal_eval(table))


def with_cache(model: ModelDescription, dtype: str, settings: RolloutSettings, most_mb: int) -> RolloutSettings:
    """Implement `Engine.with_cache`."""
    all_mb, one_mb = (cache_mb(model, dtype, settings, sequences) for sequences in (settings.max_num_seqs, 1))
    return settings.model_copy(update={"kv_cache_mb": max(min(all_mb, most_mb), one_mb)})


def cache_mb(model: ModelDescription, dtype: str, settings: RolloutSettings, sequences: int) -> int:
    """Return the size of the KV cache that a CPU engine needs, in MiB, rounded up.

    Args:
        model: the model.
        dtype: the dtype of its weights and activations.
        settings: the engine's settings, which have the lengths.
        sequences: the number of concurrent sequences, all of the greatest length.
    """
    n, block = model.sizes, _LATENT_BLOCK if model.latent else _BLOCK
    width = 2 * max(1, n.groups // settings.tp) * n.head_dim
    if model.latent:  # which every worker has whole
        width = model.fields["kv_lora_rank"] + model.fields["qk_pos_emb_head_dim"] + (n.indexer.head_dim if n.indexer is not None else 0)
    item = 4 if dtype == "float32" else 2
    longest = settings.max_prompt_tokens + settings.max_response_tokens
    if n.linear_heads:
        return _hybrid_cache_bytes(model, settings.tp, width * item, item, longest, sequences) + (1 << 20) - 1 >> 20
    blocks = sequences * -(-longest // block) + 1  # vLLM keeps one block empty
    return -(-_attention_layers(model) * width * item * block * blocks >> 20)


def _attention_layers(model: ModelDescription) -> int:
    """Return the number of layers that keep keys and values."""
    nets = delta_nets(model.fields, model.config, model.sizes.blocks)
    return model.sizes.blocks.count(ATTENTION) or model.sizes.layers - (len(nets.layers) if nets is not None else 0)


def _hybrid_cache_bytes(model: ModelDescription, tp: int, token: int, item: int, longest: int, sequences: int) -> int:
    """Return the bytes of `cache_mb` for a model with gated delta nets or Mamba mixers, given those of a token in a layer of attention.

    A block holds either tokens or a sequence's state, of as many layers as there are of the rarer kind (v1/core/kv_cache_utils.py).
    """
    nets = delta_nets(model.fields, model.config, model.sizes.blocks)
    assert nets is not None
    linear, attention = len(nets.layers), _attention_layers(model)
    together = max(1, min(linear, attention))
    block = _BLOCK * -(-nets.state_bytes(item) // tp // (token * _BLOCK))
    each = -(-longest // block) * -(-attention // together) + -(-linear // together)
    return int(token * block * together * (sequences * each + 1))

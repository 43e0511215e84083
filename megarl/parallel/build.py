"""Builds Megatron's configuration and model chunks from a Hugging Face config.json and our settings."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.activations import squared_relu
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from megarl.config import ConfigError, Layout, ModelSettings
from megarl.models.description import ModelDescription
from megarl.models.family import HeadKind
from megarl.models.image_processor import ImageProcessor
from megarl.models.megatron_fields import check_fields, fixed_fields
from megarl.models.mla import LATENT_EPSILON
from megarl.models.weight_map import is_frozen
from megarl.parallel.backend import Backend
from megarl.parallel.predictor import put_predictor
from megarl.parallel.spec import scale_residuals
from megarl.parallel.value_head import ValueHead
from megarl.parallel.vision import ImageLayer, ImageModel
from megarl.text.display import one_line

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Fields whose values are torch objects or Megatron enum members, by the names that YAML and `fixed_fields` use for them.
_NAMED: dict[str, Mapping[str, Any]] = {
    "activation_func": {"silu": F.silu, "quick_gelu": quick_gelu, "squared_relu": squared_relu},
    "params_dtype": DTYPES,
    "pipeline_dtype": DTYPES,
    "attention_backend": AttnBackend.__members__,
}


def padded_vocabulary(vocabulary: int, tp: int) -> int:
    """The vocabulary size rounded up to a multiple of `tp`, so that every tensor-parallel rank holds equally many rows."""
    return -(-vocabulary // tp) * tp


def transformer_config(model: ModelDescription, settings: ModelSettings, layout: Layout, backend: Backend) -> TransformerConfig:
    """Megatron's configuration of a model.

    Args:
        model: the model.
        settings: their `megatron` may set any field of TransformerConfig but those fixed by weights, layout or the gradient scaling.
        layout: the layout of the ranks.
        backend: supplies the fields that follow from the hardware.

    Returns:
        A TransformerConfig, or an MLATransformerConfig for multi-latent attention.

    Raises:
        ConfigError: `model.megatron` sets an unknown or fixed field, or the model has an unsupported feature.
    """
    fixed = fixed_fields(model, settings.dtype, layout)
    check_fields(settings.megatron, fixed, settings.recompute)
    free: dict[str, Any] = {
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "aux_loss" if settings.megatron.get("moe_aux_loss_coeff") else "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
        "moe_router_bias_update_rate": 0.0,  # an expert bias stays as it is in the checkpoint unless the user says otherwise
        **backend.transformer_overrides,
        **_recompute(settings.recompute),
    }
    given = {**free, **settings.megatron, **fixed}
    if given["gradient_accumulation_fusion"] and not backend.fused:
        raise ConfigError("model.megatron.gradient_accumulation_fusion=True: only Transformer Engine's layers can, and none are used here")
    wish = given.get("attention_backend", "auto")
    if backend.torch_attention and wish != "auto":
        raise ConfigError(f"model.megatron.attention_backend={wish}: chooses among Transformer Engine's, and attention is torch's here")
    named = {field: known[given[field]] for field, known in _NAMED.items() if field in given}
    kind = MLATransformerConfig if fixed.get("multi_latent_attention") else TransformerConfig
    try:
        return kind(**{**given, **named})
    except (ValueError, AssertionError, TypeError) as error:
        raise ConfigError(f"model.megatron: refused by Megatron: {one_line(str(error)) or type(error).__name__}") from error


def build_chunks(
    config: TransformerConfig,
    model: ModelDescription,
    backend: Backend,
    *,
    grad: bool,
    head: HeadKind = "lm",
    fp32_head: bool = False,
    adapted: bool = False,
    images: ImageProcessor | None = None,
    tower: bool = False,
) -> list[MegatronModule]:
    """Build this rank's model chunks on the device, with weights not yet loaded. Requires the grid.

    Args:
        config: see `transformer_config`.
        model: the model.
        backend: the hardware.
        grad: False builds a frozen model (reference, reward model).
        head: "value" replaces the output layer with a scalar head (critic, reward model): the last stage then gives values [1, R, 1] in
            float32 instead of logits [1, R, V], whole on every tensor-parallel rank. Only that head's weights are initialised.
        fp32_head: compute logits in float32, whatever the model's dtype.
        adapted: its linear layers are to have adapters (`lora.put_adapters`).
        images: cuts images for a model that sees them; None: it is given none.
        tower: with `grad`, its vision tower is trained, too.

    Returns:
        One chunk, or one per virtual stage.
    """
    stages: list[int | None] = list(range(config.virtual_pipeline_model_parallel_size or 0)) or [None]
    chunks = [_chunk(config, model, backend, stage, head, adapted, images) for stage in stages]
    for chunk in chunks:
        if fp32_head and head == "lm" and chunk.post_process:
            chunk.output_layer.register_forward_pre_hook(_in_float32, with_kwargs=True)
        for name, parameter in chunk.named_parameters():
            parameter.requires_grad_(grad and not is_frozen(name, tower))
            # Upstream marks expert weights for the expert data-parallel group where that is another one (layers.py:961,1379). Marking them
            # always gives the optimizer the same two parts (dense, experts) in every layout, which resharding its state needs.
            # Their biases are not summed over the sequence's shards, as layers.py:1413 asks for, since experts see whole tokens of all.
            if ".experts." in name:
                parameter.allreduce = parameter.sequence_parallel = False
            assert parameter.dtype == config.params_dtype, f"{name} is {parameter.dtype}, expected {config.params_dtype}"
    return chunks


def _chunk(
    config: TransformerConfig,
    model: ModelDescription,
    backend: Backend,
    stage: int | None,
    head: HeadKind,
    adapted: bool,
    images: ImageProcessor | None,
) -> GPTModel:
    rope, scale, spec = model.rope, model.multipliers, _layer_spec(config, model, backend, stage, adapted)
    with _no_fusion(config):
        chunk = (GPTModel if model.sizes.vision is None else ImageModel)(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=padded_vocabulary(model.vocab, config.tensor_model_parallel_size),
            max_sequence_length=model.room,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            parallel_output=True,
            share_embeddings_and_output_weights=head == "lm" and model.tied,
            position_embedding_type="rope",
            rotary_base=rope.theta,
            rotary_percent=rope.fraction,
            vp_stage=stage,
        )
        if model.predicts and head == "lm" and chunk.post_process:
            put_predictor(chunk, model, backend, stage)
    if config.multi_latent_attention:  # it computes its frequencies itself, from the fields of its own configuration
        _normalise_latents(chunk)
    else:
        own = chunk.rotary_pos_emb.inv_freq
        chunk.rotary_pos_emb.inv_freq = rope.frequencies(config.kv_channels).to(own.device)
        assert chunk.rotary_pos_emb.inv_freq.shape == own.shape
    if chunk.pre_process and scale.embedding != 1.0:
        chunk.embedding.register_forward_hook(_scaled(scale.embedding))
    if model.sizes.vision is not None:
        chunk.add_vision(model.sizes.vision, images)
    chunk.head = head  # read by `weights`, on every stage
    chunk.predicts = model.predicts and head == "lm"  # read by `optimizer`, on every stage
    if head == "value" and chunk.post_process:
        chunk.output_layer = ValueHead(config, chunk.pg_collection.tp)  # upstream always creates its own first
    elif chunk.post_process and scale.logits != 1.0:
        chunk.output_layer.register_forward_hook(_scaled(scale.logits))
    return chunk.to(backend.device)


def _layer_spec(config: TransformerConfig, model: ModelDescription, backend: Backend, stage: int | None, adapted: bool) -> Any:
    """The hardware's layers, with what is the model's own."""
    spec = backend.layer_spec(config, stage, adapted=adapted)
    for layer in spec.layer_specs:
        model.family.layer_spec(layer, backend)
        scale_residuals(layer, model.multipliers.residual)
        if model.sizes.indexer is not None:
            backend.put_sparse_attention(layer, model.sizes.indexer, model.rope)
        if model.sizes.vision is not None:
            layer.module = ImageLayer
    if model.sizes.blocks:
        first = get_transformer_layer_offset(config, vp_stage=stage)
        backend.keep_blocks(spec, model.sizes.blocks[first : first + len(spec.layer_specs)])
    return spec


def _scaled(factor: float) -> Callable[[Any, Any, Any], Any]:
    """A forward hook that multiplies a module's output, or the first of its outputs, by a factor."""

    def hook(module: Any, inputs: Any, output: Any) -> Any:
        return (output[0] * factor, *output[1:]) if isinstance(output, tuple) else output * factor

    return hook


def _normalise_latents(chunk: GPTModel) -> None:
    """Give the norms of latents their own epsilon: Megatron's have that of all others (multi_latent_attention.py:608, :614). Transformer
    Engine's are parts of the projections that follow them."""
    for attention in (part for part in chunk.modules() if isinstance(part, MLASelfAttention)):
        for norm in (part for part in attention.children() if hasattr(part, "eps")):
            norm.eps = LATENT_EPSILON


@contextmanager
def _no_fusion(config: TransformerConfig) -> Iterator[None]:
    """Create modules that do not add weight gradients up in the buffers: for Transformer Engine's, `sum_in_buffers` turns that on later.

    Megatron's own never may: without apex's CUDA extension their constructor raises (layers.py:1070), and the output layer's weight may be
    a copy in float32, which has no buffer.
    """
    fusion, config.gradient_accumulation_fusion = config.gradient_accumulation_fusion, False
    try:
        yield
    finally:
        config.gradient_accumulation_fusion = fusion


def sum_in_buffers(chunks: Iterable[MegatronModule], fusion: bool) -> None:
    """Let Transformer Engine's layers add their weight gradients up in the chunks' gradient buffers, or not.

    Otherwise they return them to autograd in the model's dtype, as other layers do, and Megatron's hook adds them to the buffers
    (distributed_data_parallel.py:493). With it they return a dummy, which the hook ignores (module/linear.py:1289 of 2.18).

    Args:
        chunks: model chunks that have gradient buffers.
        fusion: the field `gradient_accumulation_fusion` of their configuration.
    """
    for module in (module for chunk in chunks for module in chunk.modules()):
        if hasattr(module, "fuse_wgrad_accumulation"):  # each pass reads it anew (module/linear.py:1979)
            trained = all(parameter.requires_grad for parameter in module.parameters(recurse=False))  # others have no buffer
            vars(module)["fuse_wgrad_accumulation"] = fusion and trained


def _in_float32(layer: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The output layer's arguments, cast to float32. Megatron passes a weight if it is shared with the embedding, else None."""
    [hidden] = inputs
    weight = layer.weight if named["weight"] is None else named["weight"]
    return (hidden.float(),), {**named, "weight": weight.float()}


def _recompute(recompute: str) -> dict[str, Any]:
    if recompute == "full":
        return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return {"recompute_granularity": None if recompute == "none" else "selective"}

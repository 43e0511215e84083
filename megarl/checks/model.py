"""The checks of the model that is trained or plays, in every verb: its directory, its layout, its weights, its lengths."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.checkpoints.steps import HF, trusted
from megarl.checks.machine import check_cluster
from megarl.cluster.process_kinds import demand
from megarl.config import ConfigError, LoraSettings, ModelSettings, RolloutSettings, RunSettings
from megarl.errors import Absent
from megarl.host.unchecked import where_present
from megarl.models.adapters import PEFT_CONFIG, PEFT_WEIGHTS, adapted, check_peft_config
from megarl.models.arithmetic import differences
from megarl.models.description import ModelDescription
from megarl.models.families import check_checkpoint, check_layout, check_room
from megarl.models.family import HeadKind
from megarl.models.hf import CONFIG, json_object
from megarl.models.megatron_fields import check_fields, fixed_fields
from megarl.models.optimizer_fields import check_optimizer
from megarl.observe import writers

_NO_GRADIENT = "the layers' own weights, whose gradients it delays, have none"
_PREDICTS = ("train", "sft")  # verbs that train a layer of multi-token prediction
_NOT_WITH_LORA = {
    "moe_shared_expert_overlap": "adapters of shared experts are proven on layers that gather their tokens themselves",
    "delay_wgrad_compute": _NO_GRADIENT,
    "overlap_dispatch_backward_with_experts_wgrad": _NO_GRADIENT,
}


def check_model(config: RunSettings, head: HeadKind = "lm") -> ModelDescription:
    """Check the run's directory, the checkpoint and what is set for it, and this machine, in this order; return the model.

    Raises:
        ConfigError: the first fault.
    """
    settings, gpus = config.model, config.cluster.gpus
    with where_present("the run's directory"):
        check_directory(config.run_dir, config.directory)
    if settings.mtp in ("keep", "train") and head == "value":
        raise ConfigError(
            f"model.mtp={settings.mtp}: a model with a scalar head has no multi-token prediction layers (drop leaves them out)"
        )
    if settings.mtp == "train":
        check_predictor(config)
    model = check_checkpoint(settings.path, head, mtp=settings.mtp, drop_images=settings.drop_images)
    check_sight(settings, model)
    check_layout(model, config.layout, settings.megatron)
    check_fields(settings.megatron, fixed_fields(model, settings.dtype, config.layout), settings.recompute)
    if settings.lora is not None:
        check_lora(config, settings.lora, model, head)
    check_hardware("model.megatron.gradient_accumulation_fusion", settings.megatron, settings.dtype, gpus=gpus)
    for key, optimizer in config.optimizers.items():
        check_optimizer(key, optimizer)
        # hybrid_optimizer.py copies only the float32 main weights of a bfloat16 model, and only if they are on GPUs.
        check_hardware(f"{key}.megatron.optimizer_cpu_offload", optimizer.megatron, settings.dtype, gpus=gpus)
    with where_present("the weights"):
        check_weights(settings, model, head)
    with where_present("the trackers"):
        writers.check(config.log)
    check_cluster(config.cluster, demand(config))
    return model


def check_sight(settings: ModelSettings, model: ModelDescription) -> None:
    """Check what is set for images. Raise ConfigError for what does not apply to the model."""
    limits = {key: value for key in ("min_pixels", "max_pixels") if (value := getattr(settings, key)) is not None}
    if limits and model.sizes.vision is None:
        [key, *_] = limits
        raise ConfigError(f"model.{key}={limits[key]}: {model.architecture} sees no images")
    if settings.vision == "train" and model.sizes.vision is None:
        raise ConfigError(f"model.vision=train: {model.architecture} sees no images")
    if settings.vision == "train" and settings.lora is not None:
        raise ConfigError("model.vision=train: model.lora trains adapters of the language model alone")
    if settings.drop_images and model.sizes.vision is not None:
        raise ConfigError(f"model.drop_images=true: {model.architecture} is read whole, and what sees images is kept as it is")


def check_predictor(config: RunSettings) -> None:
    """Raise ConfigError if the run cannot train a multi-token prediction layer."""
    kept = "(keep has the layers unchanged in what is saved)"
    if config.verb not in _PREDICTS or not config.optimizers:
        raise ConfigError(f"model.mtp=train: `megarl {config.verb}` does not train it {kept}")
    if config.model.lora is not None:
        raise ConfigError(f"model.mtp=train: model.lora trains adapters alone {kept}")


def check_lora(config: RunSettings, settings: LoraSettings, model: ModelDescription, head: HeadKind) -> None:
    """Check that the run can train adapters.

    Args:
        config: the run's configuration.
        settings: its section `model.lora`.
        model: the model.
        head: the head of the model that is trained.

    Raises:
        ConfigError: it cannot, or `model.lora.init` is no PEFT directory that the adapters could begin from.
    """
    if not config.optimizers:
        raise ConfigError(f"model.lora: `megarl {config.verb}` trains nothing; the directory that a run exports has its adapters merged")
    for field, reason in _NOT_WITH_LORA.items():
        if config.model.megatron.get(field):
            raise ConfigError(f"model.megatron.{field}=True: not with model.lora: {reason}")
    for key in (key for key, optimizer in config.optimizers.items() if optimizer.muon is not None):
        raise ConfigError(f"{key}.muon: not with model.lora, whose factors are no matrices to be orthogonalised")
    if rate := config.model.megatron.get("moe_router_bias_update_rate"):
        raise ConfigError(
            f"model.megatron.moe_router_bias_update_rate={rate}: model.lora trains adapters alone, and no checkpoint has the biases"
        )
    adapted(model, settings, head)
    if settings.init is not None:
        for name in (PEFT_CONFIG, PEFT_WEIGHTS):
            if not (settings.init / name).is_file():
                raise Absent(f"model.lora.init: {settings.init} has no {name}")
        check_peft_config(json_object(settings.init / PEFT_CONFIG), settings, str(settings.init))


def check_hardware(key: str, fields: Mapping[str, Any], dtype: str, *, gpus: bool) -> None:
    """Check a field of Megatron's that only a bfloat16 model on GPUs may switch on.

    Args:
        key: its dotted key, which ends with its name.
        fields: the fields that are set.
        dtype: `model.dtype`.
        gpus: `cluster.gpus`.

    Raises:
        ConfigError: it is on without them.
    """
    if fields.get(key.rpartition(".")[2]) and (dtype == "float32" or not gpus):
        raise ConfigError(f"{key}=True: needs cluster.gpus=true and model.dtype=bfloat16")


def check_directory(run_dir: Path, directory: Path) -> None:
    """ConfigError if the run's directory, which is inside `run_dir`, could not be created or written to."""
    existing = next(path for path in (directory, *directory.absolute().parents) if os.path.lexists(path))
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        key = "name" if run_dir.is_dir() else "run_dir"
        raise (Absent if existing.is_dir() else ConfigError)(f"{key}: {directory}: {existing} is not a writable directory")


def check_weights(settings: ModelSettings, model: ModelDescription, head: HeadKind) -> None:
    """Check `model.weights`, if it is given.

    Args:
        settings: the section `model`.
        model: the model of `model.path`.
        head: the head of the model that is trained.

    Raises:
        ConfigError: files of the checkpoint are missing or have other sizes, it holds no policy, or its policy does not fit the model that
            is trained.
    """
    if settings.weights is None:
        return
    if head != "lm":
        raise ConfigError(f"model.weights={settings.weights}: weights of a language model, and a model with a scalar head is trained here")
    if not settings.weights.is_dir():
        raise Absent(f"model.weights: no such directory: {settings.weights}")
    try:
        saved_models = trusted(settings.weights).manifest.models
    except ConfigError as error:
        raise ConfigError(f"model.weights: {error}") from None
    if "policy" not in saved_models:
        raise ConfigError(f"model.weights: {settings.weights} has no policy (it has {', '.join(sorted(saved_models))})")
    if saved_models["policy"].get("lora") is not None:
        raise ConfigError(f"model.weights: {settings.weights} holds adapters alone (model.lora), not a model's weights")
    if settings.mtp in ("keep", "train") and (settings.mtp == "train") != bool(saved_models["policy"].get("mtp")):
        layer = "no trained layer" if settings.mtp == "train" else "a trained layer"
        raise ConfigError(f"model.weights: {settings.weights} holds {layer} of multi-token prediction (model.mtp={settings.mtp})")
    differing = {key: (saved, given) for key, given in model.identity.items() if (saved := saved_models["policy"][key]) != given}
    exported = settings.weights / "policy" / HF
    if not differing and (exported / CONFIG).is_file():
        differing = differences(ModelDescription.read(exported), model)
    for key, (saved, given) in differing.items():
        raise ConfigError(f"model.weights: {settings.weights}: {key} is {saved!r}, and model.path's is {given!r}")


def check_length(model: ModelDescription, rollout: RolloutSettings) -> None:
    """ConfigError if prompt and response together may exceed the model's context length."""
    prompt, response = rollout.max_prompt_tokens, rollout.max_response_tokens
    check_room(model, prompt + response, f"rollout.max_response_tokens={response} with max_prompt_tokens={prompt}")


def check_stops(model: ModelDescription, rollout: RolloutSettings) -> None:
    """ConfigError if a token that should end responses is not in the model's vocabulary."""
    for token in rollout.stop_token_ids:
        if token >= model.vocab:
            raise ConfigError(f"rollout.stop_token_ids: {token} is not one of the model's {model.vocab} tokens")

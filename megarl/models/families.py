"""The model families that megarl supports, and the checks of checkpoints and layouts that need no worker processes."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megarl.config import ConfigError, Layout, Mtp
from megarl.errors import Absent
from megarl.host.unchecked import where_present
from megarl.models import hf as directory
from megarl.models.config_json import ConfigJson, number
from megarl.models.description import ModelDescription
from megarl.models.family import HeadKind
from megarl.models.quantized import FLOAT8, QUANTIZATION, quantization
from megarl.models.registry import FAMILIES, MODEL_TYPES, family_of
from megarl.models.weight_ops import Shape

__all__ = ["FAMILIES", "check_checkpoint", "check_layout", "check_room", "family_of"]
_UNEVEN = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")  # fields of Megatron's TransformerConfig
_STORED = {"F32", "BF16", "F16"}
OUTPUT = "lm_head.weight"
_ROWS = 4096  # rows compared at a time


def check_checkpoint(
    path: Path, head: HeadKind = "lm", key: str = "model.path", *, mtp: Mtp | None = None, drop_images: bool = False
) -> ModelDescription:
    """Check that a checkpoint holds exactly the tensors of its architecture, with the right shapes, and can initialise a model.

    Args:
        path: the Hugging Face directory.
        head: the head of the model to initialise. A scalar head ("value": critic, reward model) may also start from a language model.
        key: the setting that gave the path, for messages.
        mtp: the checkpoint may contain multi-token prediction layers ("drop"), or must ("keep", "train").
        drop_images: of a model of text and images it is the language model, if that has a family of its own; the rest is left out.

    Returns:
        What its config.json says of the model.

    Raises:
        ConfigError: one line: a missing directory, a broken file, a different head, a RoPE or router that Megatron does not have, a tensor
            that is missing, of the wrong shape, quantised in an unsupported way or unknown, or an output layer that differs from the
            embedding to which config.json ties it.
        Absent: a directory without weights; where this machine need not have them, `unchecked` names them and config.json is enough.
    """
    with _naming(key, path):
        model = ModelDescription.read(path, mtp=mtp or "drop", drop_images=drop_images)
        _check_head(model, head)
        check_trainable_predictor(model)
        _ = model.fields  # a ConfigError if Megatron cannot compute it
        _check_identity(model)
    with where_present("the weights"), _naming(key, path):
        _check_tensors(model, allowed=mtp is not None)
    return model


@contextmanager
def _naming(key: str, path: Path) -> Iterator[None]:
    """Name the setting that gave the path in the errors of a block."""
    try:
        yield
    except ConfigError as error:
        kind = Absent if isinstance(error, Absent) else ConfigError
        raise kind(str(error).replace("model.path", key, 1)) from None
    except OSError as error:
        raise ConfigError(f"{key}: {error.filename or path}: {error.strerror}") from None


def check_trainable_predictor(model: ModelDescription) -> None:
    """Raise ConfigError for a multi-token prediction layer that is to be trained and cannot be."""
    if model.predicts and model.family.predictor(model.config) is None:
        raise ConfigError(f"model.mtp=train: not for {model.architecture} (keep has the layers unchanged in what is saved)")


def _check_tensors(model: ModelDescription, *, allowed: bool) -> None:
    """Check the tensors of a checkpoint; see `check_checkpoint`. `allowed`: it may contain multi-token prediction layers."""
    path, expected = model.directory, model.expected()
    tensors = directory.inventory(path, predictors=model.predicts, drop_images=model.drop_images)
    predictors = model.family.predictors(model.config)
    further = sorted(name for name in tensors if name.startswith(predictors))
    if model.mtp != "drop" and not further:
        raise ConfigError(f"model.path: {path} holds no multi-token prediction layers (model.mtp={model.mtp})")
    missing = [name for name in expected if name not in tensors]
    if missing:
        raise ConfigError(f"model.path: {path} lacks the tensor {missing[0]} ({len(missing)} of {len(expected)} are missing)")
    for name, shape in expected.items():
        _check_tensor(path, model.config, name, tensors[name], shape)
    if quantization(model.config) is not None and all(info.read_dtype == info.dtype for info in tensors.values()):
        raise ConfigError(f"model.path: {path}: config.json has a {QUANTIZATION}, but no tensor is stored with scales")
    if further and not allowed:
        raise ConfigError(
            f"model.path: {path} holds {further[0]} and {len(further) - 1} more multi-token prediction tensors "
            "(model.mtp=keep has them unchanged in what is saved, model.mtp=drop leaves them out, model.mtp=train trains them)"
        )
    tower = () if model.family.images is None else (model.family.images.tower,)
    sights = sorted(name for name in tensors if name.startswith(tower))
    if sights and not model.drop_images:
        raise ConfigError(
            f"model.path: {path} holds {sights[0]} and {len(sights) - 1} more tensors that see images, which {model.architecture} does not "
            "have (model.drop_images=true leaves them out of the model and of what is saved)"
        )
    copies = model.copies
    optional = {*model.family.optional(model.config), *sights, *directory.scales_of_activations(tensors)}
    optional |= copies.keys() if model.predicts else set(further)
    unknown = sorted(tensors.keys() - expected.keys() - optional)
    if unknown:
        raise ConfigError(
            f"model.path: {path} holds the tensor {unknown[0]}, which {model.architecture} does not have ({len(unknown)} such tensors)"
        )
    if model.tied and OUTPUT in tensors:
        _check_tied(path, next(weight.hf[0] for weight in model.weights("lm") if weight.alias))
    for copy, name in copies.items():
        if copy in tensors and (largest := _difference(path, name, copy)) != 0:
            raise ConfigError(
                f"model.path: {path}: {copy} differs from {name} by up to {largest:.3g}: model.mtp=train takes a layer that shares the "
                "model's embedding and output layer"
            )


def _check_tensor(path: Path, config: ConfigJson, name: str, info: directory.TensorInfo, shape: Shape) -> None:
    """Raise ConfigError unless a tensor has its shape, and numbers that can be read."""
    if info.shape != shape:
        raise ConfigError(f"model.path: {path}: {name} has shape {list(info.shape)}, expected {list(shape)} by config.json")
    if info.read_dtype in _STORED:
        return
    stored = quantization(config)
    if info.dtype == FLOAT8 and stored is not None:
        names = " or ".join(name + suffix for suffix in stored.suffixes)
        sizes = "" if stored.block is None else f" for blocks of {stored.block[0]} x {stored.block[1]}"
        raise ConfigError(f"model.path: {path}: {name} is stored as {FLOAT8}, and its scales{sizes}, {names}, are missing or do not fit")
    raise ConfigError(f"model.path: {path}: {name} is stored as {info.dtype}, expected one of {', '.join(sorted(_STORED))}")


def _check_tied(path: Path, embedding: str) -> None:
    """Raise ConfigError if a stored output layer is not the embedding to which config.json ties it: transformers would not tie them."""
    largest = _difference(path, embedding, OUTPUT)
    if largest != 0:  # NaN is not 0 either
        raise ConfigError(
            f"model.path: {path}: config.json ties {OUTPUT} to {embedding}, but their values differ by up to {largest:.3g}, and "
            'transformers would not tie them: write "tie_word_embeddings": false into config.json to keep both, or remove the tensor'
        )


def _difference(path: Path, *names: str) -> float:
    """Return the largest difference of two tensors of a directory; infinity if their shapes differ."""
    with directory.Checkpoint(path) as checkpoint:
        [shape, other] = (checkpoint.tensors[name].shape for name in names)
        if shape != other:
            return float("inf")

        def difference(start: int) -> float:
            one, two = (checkpoint.read(name, 0, start, start + _ROWS).float() for name in names)
            return float((one - two).abs().max())

        return max(map(difference, range(0, shape[0], _ROWS)))


def _check_head(model: ModelDescription, head: HeadKind) -> None:
    if model.head == "value":
        named = model.config.get("id2label")
        labels = len(named) if isinstance(named, dict) else model.config.get("num_labels", 2)  # transformers counts them in this way
        if head != model.head:
            raise ConfigError(
                f"model.path: {model.path} is a {model.architecture}: a critic or reward model, where a language model "
                f"({model.family.heads[head].architecture}) is needed"
            )
        if labels != 1:
            raise ConfigError(f"model.path: {model.path} classifies into {labels} labels; a critic or reward model must have exactly 1")


def _check_identity(model: ModelDescription) -> None:
    """Raise ConfigError if other programs would take the model for a different one, or wait for an end token that does not exist."""
    given, own, vocab = model.config.get("model_type"), MODEL_TYPES[model.architecture], model.sizes.vocab
    if given not in own:
        names = " or ".join(map(repr, own))
        raise ConfigError(f"model.path: {model.path}: config.json's model_type={given!r:.200} is not {model.architecture}'s, {names}")
    number(model.config, "max_position_embeddings")
    ends = model.config.get("eos_token_id")
    for token in ends if isinstance(ends, list) else [] if ends is None else [ends]:
        if token >= vocab:
            raise ConfigError(f"model.path: {model.path}: config.json's eos_token_id={token} is not a token of vocab_size={vocab}")


def check_room(model: ModelDescription, tokens: int, key: str) -> None:
    """Check that the model supports sequences of this many tokens.

    Args:
        model: the model.
        tokens: the length of prompt and response together.
        key: the setting that requires this length, for the message.

    Raises:
        ConfigError: the model supports fewer tokens; the message starts with `key`.
    """
    if tokens > model.room:
        raise ConfigError(f"{key}: {tokens} tokens, and the model supports at most {model.room}")


def check_layout(model: ModelDescription, layout: Layout, megatron: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Check that a layout divides a model evenly.

    Args:
        model: the model.
        layout: the layout of the ranks that hold the model.
        megatron: `model.megatron`, which may give the first and the last pipeline stage a different number of layers
            (num_layers_in_first_pipeline_stage, num_layers_in_last_pipeline_stage): no usual number of stages divides 94 or 61 layers.

    Raises:
        ConfigError: the layout does not divide the model; the message has the dotted key and both numbers.
    """
    sizes = model.sizes
    uneven = {key: megatron[key] for key in _UNEVEN if megatron.get(key) is not None}
    if uneven:
        _check_stages(sizes.layers, layout, uneven)
    even = 0 if uneven else sizes.layers
    chunks = layout.pp * (layout.vpp or 1)
    divisions = [
        (f"layout.tp={layout.tp}", layout.tp, sizes.heads, "attention heads", "tp"),
        (f"layout.tp={layout.tp}", layout.tp, sizes.groups, "key-value heads", "tp"),
        (f"layout.tp={layout.tp}", layout.tp, sizes.ffn or 0, "units in its MLPs", "tp"),
        (f"layout.tp={layout.tp}", layout.tp, sizes.shared_ffn, "units in its shared experts", "tp"),
        (f"layout.tp={layout.tp}", layout.tp * layout.cp, sizes.linear_heads, sizes.linear_parts, _product(layout)),
        (f"layout.ep={layout.ep}", layout.ep, sizes.experts, "experts", "ep"),
        (f"layout.etp={layout.etp}", layout.etp, sizes.expert_ffn, "units in an expert", "etp"),
        (f"layout.pp={layout.pp}", layout.pp, even, "layers", "pp"),
        (f"layout.vpp={layout.vpp}", chunks, even, "layers", f"pp*vpp={layout.pp}*{layout.vpp}={chunks}"),
    ]
    for key, parts, count, what, by in divisions:
        if count % parts:
            raise ConfigError(f"{key}: model has {count} {what}, not divisible by {by if '=' in by else parts}")
    if sizes.vision is not None:
        first = (uneven.get(_UNEVEN[0]) or (sizes.layers - sum(uneven.values())) // (layout.pp - len(uneven))) // (layout.vpp or 1)
        if first < len(sizes.vision.deepstack):  # features go no further than the ranks that compute them
            raise ConfigError(
                f"layout.pp={layout.pp}: the first chunk has {first} layers, and {len(sizes.vision.deepstack)} take features of images "
                "(deepstack_visual_indexes), which do not travel between stages so far"
            )
    if sizes.experts and layout.etp > 1 and model.fields["add_bias_linear"]:  # transformer_config.py:2280: each rank would add the bias
        raise ConfigError(f"layout.etp={layout.etp}: the experts of {model.architecture} have biases, which takes etp=1")
    if not sizes.experts and (layout.ep > 1 or layout.etp > 1):
        raise ConfigError(f"layout.ep={layout.ep}, layout.etp={layout.etp}: model has 0 experts")


def _product(layout: Layout) -> str:
    return f"tp*cp={layout.tp}*{layout.cp}={layout.tp * layout.cp}"


def _check_stages(layers: int, layout: Layout, uneven: dict[str, Any]) -> None:
    """Raise ConfigError if the layers of the first and last pipeline stage, or those left for the other stages, are impossible."""
    given = ", ".join(f"model.megatron.{key}={value}" for key, value in uneven.items())
    if any(type(value) is not int or value < 1 for value in uneven.values()):
        raise ConfigError(f"{given}: expected positive integers")
    between, rest, each = layout.pp - len(uneven), layers - sum(uneven.values()), layout.vpp or 1
    if any(value % each for value in uneven.values()):
        raise ConfigError(f"{given}: not divisible by layout.vpp={each}")
    if between < 0:
        raise ConfigError(f"{given}: layout.pp={layout.pp} has fewer stages")
    if rest < between * each or (rest % (between * each) if between else rest):
        what = f"{between} other stages" + (f" of {each} chunks" if each > 1 else "")
        raise ConfigError(f"{given}: of {layers} layers {rest} are left for the {what} of layout.pp={layout.pp}")

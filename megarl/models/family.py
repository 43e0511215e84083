"""A model family: what megarl knows of the models with one `model_type`, as functions of config.json."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from megarl.models.config_json import ConfigJson
from megarl.models.rope import Rope, rope
from megarl.models.sizes import Sizes
from megarl.models.weight_map import BLOCK, FP8, FP8_BLOCK, LAYER, OUTPUT, PREDICTOR, SCALES, Weight, WeightMapping
from megarl.models.weight_ops import Plain, Shape

HeadKind = Literal["lm", "value"]  # logits over the vocabulary, or one number per token (critic, reward model)


@dataclass(frozen=True)
class Head:
    """A head on a family's backbone, on the last pipeline stage."""

    architecture: str  # config.json's architectures[0]
    mapping: Callable[[ConfigJson], WeightMapping]  # the mapping of the parameter OUTPUT
    labels: dict[str, Any]  # the head's other entries in config.json
    known: bool = True  # transformers has a class for it; otherwise only megarl can load a saved model


def scalar_head(architecture: str, sizes: Callable[[ConfigJson], Sizes], *, known: bool = True) -> Head:
    """Return a head with one number per token, stored like that of transformers' sequence classification with one label.

    Args:
        architecture: its name in config.json's architectures[0].
        sizes: as in `Family`; only the hidden size is used.
        known: whether transformers has this class.
    """

    def mapping(config: ConfigJson) -> WeightMapping:
        return WeightMapping(OUTPUT, ("score.weight",), Plain((1, sizes(config).hidden)))

    return Head(architecture, mapping, {"num_labels": 1, "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}, known)


@dataclass(frozen=True)
class Multipliers:
    """Numbers by which a model scales its embeddings, what each of a layer's two parts adds to the residual stream, and its logits."""

    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0


@dataclass(frozen=True)
class Images:
    """Models of text and images whose language model is of the family: config.json has its own as `text_config`."""

    architecture: str  # config.json's architectures[0]
    text: str  # what the names of the language model's tensors begin with, in the place of `model.`
    tower: str  # what those of the images' begin with


@dataclass(frozen=True)
class PredictorNames:
    """Hugging Face's names of a multi-token prediction layer, which is one of the model's layers with a projection before it.

    The projection's input is the normalised embedding of the next token, then the normalised state of the model at this one.
    """

    layer: str  # prefix of what any layer has
    embedding_norm: str
    state_norm: str
    projection: str
    norm: str  # after the layer
    copies: tuple[str, ...] = ()  # tensors that checkpoints may hold and that are the model's embedding and its output layer once more


def no_tensors(config: ConfigJson) -> tuple[str, ...]:
    """Return no name."""
    return ()


def unused(config: ConfigJson) -> tuple[str, ...]:
    """Return the names of unused tensors that checkpoints may store: a tied output layer, and in some RoPE's frequencies.

    The frequencies are computed from config.json instead.
    """
    stored = tuple(f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(config["num_hidden_layers"]))
    return (*(("lm_head.weight",) if config["tie_word_embeddings"] else ()), *stored)


def no_predictor(config: ConfigJson) -> PredictorNames | None:
    """Return None."""
    return None


def _unscaled(config: ConfigJson) -> Multipliers:
    return Multipliers()


def _as_it_is(layer: Any, backend: Any) -> None: ...


@dataclass(frozen=True)
class Family:
    """One model family: a backbone, and the heads that it can have."""

    heads: dict[HeadKind, Head]
    sizes: Callable[[ConfigJson], Sizes]  # raises ConfigError if config.json needs what the family's weight map does not support
    weight_map: Callable[[ConfigJson], list[WeightMapping]]  # the mappings of the backbone
    fields: Callable[[ConfigJson], dict[str, Any]]  # fields of Megatron's (MLA)TransformerConfig; raises ConfigError as `rope` does
    rope: Callable[[ConfigJson], Rope] = rope  # raises ConfigError for a RoPE that cannot be built
    multipliers: Callable[[ConfigJson], Multipliers] = _unscaled
    optional: Callable[[ConfigJson], tuple[str, ...]] = unused  # names of Hugging Face tensors that may exist but are not used
    predictors: Callable[[ConfigJson], tuple[str, ...]] = no_tensors  # name prefixes of multi-token prediction tensors
    # The layer of multi-token prediction that can be trained; None: none can. Raises ConfigError if config.json has several.
    predictor: Callable[[ConfigJson], PredictorNames | None] = no_predictor
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of every key of config.json that the functions above read
    nullable: tuple[str, ...] = ()  # keys whose null has a meaning of its own, though it is not their default
    spellings: Mapping[str, str] = field(default_factory=dict)  # other names of these keys -> theirs
    names: tuple[str, ...] = ()  # further values of config.json's model_type
    stacked: bool = False  # checkpoints stack each tensor of a layer's experts along a first axis; see `hf.Stack`
    # Of stacks that may be stored transposed, too: which axis of an expert's tensor is `hidden_size` where it is not.
    hidden_axes: Mapping[str, int] = field(default_factory=dict)
    nested: bool = False  # config.json has the language model as `text_config`, and the tower as `vision_config`
    # Stacks that checkpoints may hold in the place of experts' tensors, and what an expert has in each, one after the other on its rows.
    stacks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    images: Images | None = None  # of which models the language model is one of the family
    layer_spec: Callable[[Any, Any], None] = _as_it_is  # edits a layer's ModuleSpec; see `Backend.replicated_linear`

    def head_of(self, config: ConfigJson) -> HeadKind:
        """Return the kind of head that a config.json of this family names."""
        [kind] = [kind for kind, head in self.heads.items() if head.architecture == config["architectures"][0]]
        return kind

    def labels(self, config: ConfigJson, head: HeadKind, *, mtp: bool = False) -> dict[str, Any]:
        """Return the entries of config.json for a head on a backbone.

        Args:
            config: config.json of the backbone.
            head: the head.
            mtp: the model keeps the multi-token prediction layers of `config`.
        """
        keys = ("num_nextn_predict_layers", "num_mtp_layers", "num_mtp_modules", "mtp_num_hidden_layers")
        none = {key: 0 for key in keys if config.get(key) and not mtp}
        return {"architectures": [self.heads[head].architecture], **self.heads[head].labels, **none}

    def mappings(self, config: ConfigJson, head: HeadKind, *, predicts: bool = False) -> list[WeightMapping]:
        """Return the mappings of the backbone of `config` and of `head`, whichever head `config` names.

        Args:
            config: config.json.
            head: the head.
            predicts: the model's multi-token prediction layer is trained, and its mappings come last.
        """
        return [
            *self.weight_map(config),
            self.heads[head].mapping(config),
            *(self.predictor_mappings(config) if predicts and head == "lm" else []),
        ]

    def predictor_mappings(self, config: ConfigJson) -> list[WeightMapping]:
        """Return the mappings of the multi-token prediction layer: those of the model's last layer with attention, and its own."""
        names, sizes = self.predictor(config), self.sizes(config)
        assert names is not None, "no multi-token prediction layer can be trained"
        layers = [one for one in self.weight_map(config) if one.megatron.startswith(LAYER)]
        attention = next(one for one in layers if one.megatron == f"{LAYER}self_attention.linear_proj.weight")
        last = sizes.layers - 1 if attention.layers is None else max(attention.layers)
        within = [
            replace(
                one,
                megatron=f"{PREDICTOR}transformer_layer.{one.megatron.removeprefix(LAYER)}",
                hf=tuple(names.layer + name.removeprefix(BLOCK) for name in one.hf),
                layers=None,
            )
            for one in layers
            if one.layers is None or last in one.layers
        ]
        width = sizes.hidden
        return [
            WeightMapping(f"{PREDICTOR}enorm.weight", (names.embedding_norm,), Plain((width,))),
            WeightMapping(f"{PREDICTOR}hnorm.weight", (names.state_norm,), Plain((width,))),
            WeightMapping(f"{PREDICTOR}eh_proj.weight", (names.projection,), Plain((width, 2 * width), 0)),
            *within,
            WeightMapping(f"{PREDICTOR}final_layernorm.weight", (names.norm,), Plain((width,))),
        ]

    def weights(self, config: ConfigJson, head: HeadKind = "lm", *, predicts: bool = False) -> list[Weight]:
        """Return every Megatron parameter of the backbone of `config` with `head`, whichever head `config` names.

        Parameters outside the layers come first, then those of each layer. `predicts`: see `mappings`.
        """
        sizes, mappings = self.sizes(config), self.mappings(config, head, predicts=predicts)
        weights = [weight for one in mappings if "{layer}" not in one.megatron for weight in _expand(one, None, sizes.experts)]
        inner = [one for one in mappings if "{layer}" in one.megatron]
        for layer in range(sizes.layers):
            for one in inner:
                if one.layers is None or layer in one.layers:
                    weights += _expand(one, layer, sizes.experts)
        return weights

    def expected(self, config: ConfigJson, *, predicts: bool = False) -> dict[str, Shape]:
        """Return the name and shape of every tensor that a checkpoint with this config.json must hold; `predicts`: see `mappings`."""
        weights = self.weights(config, self.head_of(config), predicts=predicts)
        return {name: shape for weight in weights for name, shape in zip(weight.hf, weight.op.shapes, strict=True)}

    def update(
        self, config: ConfigJson, dtype: str, quantization: str | None = None, *, predicts: bool = False
    ) -> dict[str, tuple[list[int], str]]:
        """Return the shape and dtype of every tensor in a weight update of an engine, by Hugging Face name.

        Args:
            config: config.json.
            dtype: the dtype of the engine's weights that are not quantised.
            quantization: `rollout.quantization`; with "fp8", the matrices of linear layers and experts come in FP8, each with its scales.
            predicts: see `mappings`.
        """
        expected = dict[str, tuple[list[int], str]]()
        for weight in self.weights(config, predicts=predicts):
            quantized = quantization == "fp8" and weight.linear
            for name, shape in zip(weight.hf, weight.op.shapes, strict=True):
                expected[name] = list(shape), FP8 if quantized else "float32" if weight.float32 else dtype
                if quantized:
                    expected[name + SCALES] = [-(-size // FP8_BLOCK) for size in shape], "float32"
        return expected

    def unquantized(self, config: ConfigJson) -> list[str]:
        """Return the Hugging Face names of the modules in the layers that multiply by a matrix which an fp8 engine does not quantise.

        These are the routers. Some of vLLM's models would quantise theirs.
        """
        kept = (weight for weight in self.weights(config) if weight.layer is not None and not weight.linear and not weight.float32)
        return [name.removesuffix(".weight") for weight in kept for name in weight.hf if len(weight.op.shapes[0]) == 2]


def _expand(mapping: WeightMapping, layer: int | None, experts: int) -> Iterator[Weight]:
    for expert in range(experts) if "{expert}" in mapping.megatron else [None]:
        numbers = {"layer": layer, "expert": expert}
        name, tensors = mapping.megatron.format(**numbers), tuple(name.format(**numbers) for name in mapping.hf)
        yield Weight(name, tensors, mapping.op, layer, expert, mapping.alias, mapping.float32)

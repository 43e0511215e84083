"""What config.json says of a model, read once and handed on to whatever plans, builds, loads or runs the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from megarl.config import Mtp
from megarl.models.config_json import ConfigJson
from megarl.models.family import Family, HeadKind, Multipliers
from megarl.models.hf import CONFIG, json_object, read_config
from megarl.models.predictors import Predictors
from megarl.models.registry import completed, family_of, has_text_family
from megarl.models.rope import Rope
from megarl.models.sizes import Sizes
from megarl.models.weight_map import OUTPUT, Weight, WeightMapping
from megarl.models.weight_ops import Shape


@dataclass(frozen=True)
class ModelDescription:
    """A model of a known family. What is derived from config.json raises ConfigError if the family does not support it."""

    config: ConfigJson
    family: Family
    path: Path | None = None  # the directory that it was read from; None: made in memory
    mtp: Mtp = "drop"  # what becomes of the directory's multi-token prediction layers; "train": one is a part of it
    drop_images: bool = False  # of a directory of text and images it is the language model, if that has a family of its own

    @classmethod
    def read(cls, path: Path, *, mtp: Mtp = "drop", drop_images: bool = False) -> ModelDescription:
        """Read a directory's config.json. Raises ConfigError if it is missing or broken, or of an architecture that is not supported."""
        config = read_config(path, drop_images=drop_images)
        return cls(config, family_of(config), path, mtp, drop_images)

    @classmethod
    def of(cls, config: ConfigJson, path: Path | None = None, mtp: Mtp = "drop", drop_images: bool = False) -> ModelDescription:
        """Describe the model of a config.json, which may leave out what has a default. Raises ConfigError as `read` does."""
        whole = completed(config, drop_images=drop_images)
        return cls(whole, family_of(whole), path, mtp, drop_images)

    def __reduce__(self) -> tuple[Any, ...]:
        """Send only config.json to other processes: a family consists of functions, and they have it."""
        return ModelDescription.of, (self.config, self.path, self.mtp, self.drop_images)

    @property
    def directory(self) -> Path:
        """The directory that it was read from."""
        assert self.path is not None, "a model that was made in memory has no directory"
        return self.path

    @property
    def identity(self) -> dict[str, Any]:
        """What a step directory says of it, by config.json's keys; all else shows in the shapes of its tensors."""
        return {key: self.config.get(key) for key in ("model_type", "vocab_size")}

    @property
    def architecture(self) -> str:
        """The name of its class in transformers."""
        return str(self.config["architectures"][0])

    @property
    def head(self) -> HeadKind:
        """The head that config.json names."""
        return self.family.head_of(self.config)

    @property
    def vocab(self) -> int:
        """The number of its tokens."""
        return int(self.config["vocab_size"])

    @property
    def of_images(self) -> bool:
        """Whether its directory is that of a model of text and images, whose language model alone it is."""
        return self.drop_images and self.path is not None and has_text_family(json_object(self.path / CONFIG))

    @property
    def room(self) -> int:
        """The number of tokens of the longest sequence that it supports."""
        return int(self.config["max_position_embeddings"])

    @property
    def tied(self) -> bool:
        """Whether the output layer is the embedding."""
        return bool(self.config.get("tie_word_embeddings"))

    @cached_property
    def sizes(self) -> Sizes:
        """Its sizes."""
        return self.family.sizes(self.config)

    @cached_property
    def rope(self) -> Rope:
        """Its rotary embedding."""
        return self.family.rope(self.config)

    @cached_property
    def fields(self) -> Mapping[str, Any]:
        """Its fields of Megatron's TransformerConfig."""
        return self.family.fields(self.config)

    @cached_property
    def multipliers(self) -> Multipliers:
        """By what it scales embeddings, residual stream and logits."""
        return self.family.multipliers(self.config)

    @property
    def window(self) -> int | None:
        """The tokens that a query sees in layers with a sliding window, its own among them; None: no layer has one."""
        size = self.fields.get("window_size")
        return None if size is None else size[0] + 1

    @property
    def latent(self) -> bool:
        """Whether its attention keeps a latent of keys and values (MLA)."""
        return bool(self.fields.get("multi_latent_attention"))

    @property
    def predicts(self) -> bool:
        """Whether a layer of multi-token prediction is a part of it."""
        return self.mtp == "train"

    @property
    def copies(self) -> dict[str, str]:
        """Tensors that a checkpoint of a model with multi-token prediction may hold once more: the copy's name -> the tensor's."""
        names = self.family.predictor(self.config) if self.predicts else None
        if names is None:
            return {}
        own = {weight.name: weight.hf[0] for weight in self.trunk.weights("lm") if weight.layer is None}
        return dict(zip(names.copies, (own["embedding.word_embeddings.weight"], own[OUTPUT]), strict=False))

    @property
    def trunk(self) -> ModelDescription:
        """The model without multi-token prediction, as engines have it."""
        return replace(self, mtp="drop")

    def mappings(self, head: HeadKind) -> list[WeightMapping]:
        """Return the mappings of the backbone and of `head`, whichever head config.json names."""
        return self.family.mappings(self.config, head, predicts=self.predicts)

    def weights(self, head: HeadKind) -> list[Weight]:
        """Return every Megatron parameter of the backbone with `head`; see `Family.weights`."""
        return self.family.weights(self.config, head, predicts=self.predicts)

    def labels(self, head: HeadKind) -> dict[str, Any]:
        """Return the entries of config.json for `head` on the backbone; see `Family.labels`."""
        return self.family.labels(self.config, head, mtp=self.mtp != "drop")

    @property
    def predictors(self) -> Predictors | None:
        """The multi-token prediction layers that belong, as they are, into what is saved of it; None: there are none."""
        return Predictors(self.directory, self.family.predictors(self.config)) if self.mtp == "keep" else None

    def expected(self) -> dict[str, Shape]:
        """Return the name and shape of every tensor that a checkpoint must hold, with the head that config.json names."""
        return self.family.expected(self.config, predicts=self.predicts)

    def update(self, dtype: str, quantization: str | None = None) -> dict[str, tuple[list[int], str]]:
        """Return the shape and dtype of every tensor in a weight update of an engine; see `Family.update`."""
        return self.family.update(self.config, dtype, quantization, predicts=self.predicts)

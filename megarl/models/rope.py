"""Rotary position embeddings as specified by config.json: frequencies and scale, with the formulas of transformers.

Supported: "default", "linear" (position interpolation), "llama3" (by wavelength, Llama 3.1) and "yarn" (https://arxiv.org/abs/2309.00071).
Kinds whose frequencies depend on the length of the sequence ("dynamic", "longrope") are refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.config import ConfigError
from megarl.lazy_torch import Tensor, torch
from megarl.models.config_json import ConfigJson

_ORIGINAL = "original_max_position_embeddings"
_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": ("factor", _ORIGINAL),
}


@dataclass(frozen=True)
class Rope:
    """The rotary embedding of one model: which part of a head is rotated, how fast, and by how much cosine and sine are scaled."""

    kind: str
    theta: float
    fraction: float  # share of a head's dimensions, counted from the first, that are rotated
    numbers: Mapping[str, Any]  # the kind's other parameters, under config.json's names

    def frequencies(self, head_dim: int) -> Tensor:
        """Return each pair of dimensions' rotation in radians per token, float32 [int(head_dim * fraction) / 2]."""
        dim = int(head_dim * self.fraction)
        plain = 1.0 / (self.theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))
        if self.kind == "linear":
            return plain / self.numbers["factor"]
        if self.kind == "llama3":
            return self._by_wavelength(plain)
        if self.kind == "yarn":
            return self._yarn(plain, dim)
        return plain

    @property
    def meaning(self) -> dict[str, Any]:
        """The parameters that the rotation depends on, each with its default, by config.json's names."""
        used = {key: float(self.numbers[key]) for key in _NEEDS[self.kind]}
        if self.kind == "yarn":
            used |= {"beta_fast": float(self.numbers.get("beta_fast") or 32), "beta_slow": float(self.numbers.get("beta_slow") or 1)}
            used |= {"truncate": self.numbers.get("truncate", True), "attention_factor": self.attention_factor}
            used |= {key: self.numbers.get(key) or 0.0 for key in ("mscale", "mscale_all_dim")}  # by which MLA scales the scores, too
        return {"rope_type": self.kind, "rope_theta": self.theta, "partial_rotary_factor": self.fraction, **used}

    @property
    def attention_factor(self) -> float:
        """The factor of cosine and sine: for YaRN its temperature, 0.1 ln(factor) + 1 unless config.json says otherwise; else 1."""
        if self.kind != "yarn":
            return 1.0
        given, factor = self.numbers.get("attention_factor"), self.numbers["factor"]
        if given is not None:
            return float(given)
        one, two = self.numbers.get("mscale"), self.numbers.get("mscale_all_dim")
        return mscale(factor, one) / mscale(factor, two) if one and two else mscale(factor, 1.0)

    def _by_wavelength(self, plain: Tensor) -> Tensor:
        """Return frequencies scaled by wavelength: long waves are slowed by `factor`, short ones kept, those in between blended."""
        factor, low, high = (self.numbers[key] for key in ("factor", "low_freq_factor", "high_freq_factor"))
        turns = self.numbers["original_max_position_embeddings"] * plain / (2 * math.pi)  # over the original context
        blend = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - blend) * plain / factor + blend * plain

    def _yarn(self, plain: Tensor, dim: int) -> Tensor:
        """Return YaRN's frequencies, which depend on a dimension's number of turns over the original context.

        Those with more than beta_fast turns are kept, those with fewer than beta_slow are slowed, and those in between are blended.
        """
        original = self.numbers["original_max_position_embeddings"]

        def dimension(turns: float) -> float:
            return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = dimension(self.numbers.get("beta_fast") or 32), dimension(self.numbers.get("beta_slow") or 1)
        if self.numbers.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        slowed = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low if high != low else 0.001)).clamp(0, 1)
        return plain / self.numbers["factor"] * slowed + plain * (1 - slowed)


def mscale(factor: float, weight: float) -> float:
    """Return YaRN's 0.1 * weight * ln(factor) + 1, or 1 if the context is not extended."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def rope(config: ConfigJson, *, partial: bool = False) -> Rope:
    """Return the Rope of a completed config.json: of transformers 5's `rope_parameters`, or the older `rope_scaling`, `rope_theta` and
    `partial_rotary_factor`.

    Args:
        config: config.json, from `registry.completed`.
        partial: the family can rotate a part of each head; transformers ignores partial_rotary_factor in the others.

    Raises:
        ConfigError: an unknown kind, a missing number, or two descriptions that differ.
    """
    old, new = config.get("rope_scaling"), config.get("rope_parameters")
    turned = _described(config, old or new or {}, partial)
    other = _described(config, new, partial).meaning if old and new else turned.meaning
    for key, one in turned.meaning.items():
        if one == other.get(key):
            continue
        raise ConfigError(
            f"model.path: config.json has rope_scaling and rope_parameters, which differ: {key} is {one!r} and {other.get(key)!r}; "
            "transformers uses rope_scaling alone: remove one of them"
        )
    return turned


def _described(config: ConfigJson, numbers: Any, partial: bool) -> Rope:
    """Return the Rope that one of the two descriptions gives."""
    if not isinstance(numbers, Mapping) or any(isinstance(value, Mapping) for value in numbers.values()):
        raise ConfigError("model.path: config.json has a RoPE for each kind of layer, which is not supported")
    kind = numbers.get("rope_type", numbers.get("type", "default"))
    if kind not in _NEEDS:
        raise ConfigError(f"model.path: config.json asks for RoPE of type {kind!r}; supported: {', '.join(map(repr, _NEEDS))}")
    theta = numbers.get("rope_theta", config["rope_theta"])
    if theta is None:
        raise ConfigError(
            f"model.path: config.json's rope_theta is null, which says nothing: without the key it is {config['rope_theta']:g}"
        )
    known = {_ORIGINAL: config["max_position_embeddings"], **numbers}
    above = {_ORIGINAL: config[_ORIGINAL]} if _ORIGINAL in config else {}  # transformers prefers it
    for key in _NEEDS[kind]:
        for value in (known.get(key), above.get(key, 1)):
            if not isinstance(value, int | float) or value <= 0:
                raise ConfigError(f"model.path: config.json's RoPE of type {kind!r} has {key}={value!r}, expected a positive number")
    known |= above
    share = numbers.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0) or 1.0)
    if share is None:
        raise ConfigError("model.path: config.json's RoPE has a partial_rotary_factor that is null, which says nothing")
    if not partial and share != 1:
        raise ConfigError(f"model.path: config.json's partial_rotary_factor={share:g}: {config['architectures'][0]} rotates whole heads")
    return Rope(kind, float(theta), float(share), known)

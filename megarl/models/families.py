"""The model families that megarl knows, and the checks of a checkpoint and of a layout that need no process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megarl.config import ConfigError, Layout
from megarl.models import hf as directory
from megarl.models import qwen3_moe
from megarl.models.rows import Family

FAMILIES = {family.architecture: family for family in (qwen3_moe.FAMILY,)}
_STORED = {"F32", "BF16", "F16"}


def family_of(hf: dict[str, Any]) -> Family:
    """The family of a config.json. Raises ConfigError for an architecture that megarl does not know."""
    architectures = hf.get("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else None
    if name not in FAMILIES:
        raise ConfigError(f"model.path: architecture {name!r} is not supported (supported: {', '.join(FAMILIES)})")
    return FAMILIES[name]


def check_checkpoint(path: Path) -> dict[str, Any]:
    """The config.json of a checkpoint that holds exactly the tensors of its family, in their shapes.

    Raises ConfigError in one line: missing directory, broken file, a tensor missing, of the wrong shape, quantized or unknown.
    """
    config = directory.read_config(path)
    family = family_of(config)
    expected, held = family.expected(config), directory.inventory(path)
    missing = [name for name in expected if name not in held]
    if missing:
        raise ConfigError(f"model.path: {path} lacks the tensor {missing[0]} ({len(missing)} of {len(expected)} are missing)")
    for name, shape in expected.items():
        if held[name].shape != shape:
            raise ConfigError(f"model.path: {path}: {name} has shape {list(held[name].shape)}, expected {list(shape)} by config.json")
        if held[name].dtype not in _STORED:
            raise ConfigError(f"model.path: {path}: {name} is stored as {held[name].dtype}, expected one of {', '.join(sorted(_STORED))}")
    unknown = sorted(held.keys() - expected.keys() - set(family.optional(config)))
    if unknown:
        raise ConfigError(f"model.path: {path} holds the tensor {unknown[0]}, which {family.architecture} has not ({len(unknown)} such)")
    return config


def check_layout(hf: dict[str, Any], layout: Layout) -> None:
    """Raises ConfigError with the dotted key and both numbers where the layout does not divide the model."""
    sizes = family_of(hf).sizes(hf)
    chunks = layout.pp * (layout.vpp or 1)
    divisions = [
        (f"layout.tp={layout.tp}", layout.tp, sizes.heads, "attention heads", "tp"),
        (f"layout.tp={layout.tp}", layout.tp, sizes.groups, "key-value heads", "tp"),
        (f"layout.tp={layout.tp}", layout.tp, sizes.ffn or 0, "units in its MLPs", "tp"),
        (f"layout.ep={layout.ep}", layout.ep, sizes.experts, "experts", "ep"),
        (f"layout.etp={layout.etp}", layout.etp, sizes.expert_ffn, "units in an expert", "etp"),
        (f"layout.pp={layout.pp}", layout.pp, sizes.layers, "layers", "pp"),
        (f"layout.vpp={layout.vpp}", chunks, sizes.layers, "layers", f"pp*vpp={layout.pp}*{layout.vpp}={chunks}"),
    ]
    for key, parts, count, what, by in divisions:
        if count % parts:
            raise ConfigError(f"{key}: model has {count} {what}, not divisible by {by if '=' in by else parts}")
    if not sizes.experts and (layout.ep > 1 or layout.etp > 1):
        raise ConfigError(f"layout.ep={layout.ep}, layout.etp={layout.etp}: model has 0 experts")

"""The names of Megatron's TransformerConfig fields, read from its source: a check that must not cost the import of Megatron."""

from __future__ import annotations

import ast
import difflib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.config import ConfigError

_SOURCES = ("transformer/transformer_config.py", "model_parallel_config.py")


def megatron_fields() -> set[str]:
    """Every field of TransformerConfig and of what it inherits."""
    spec = importlib.util.find_spec("megatron.core")
    assert spec is not None and spec.origin is not None, "megatron-core is not installed"
    fields = set()
    for source in _SOURCES:
        tree = ast.parse((Path(spec.origin).parent / source).read_text())
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name in ("TransformerConfig", "ModelParallelConfig"):
                fields |= {part.target.id for part in node.body if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)}
    return fields


def check_fields(overrides: Mapping[str, Any]) -> None:
    """ConfigError for a key of `model.megatron` that is no field, with the nearest name."""
    if not overrides:
        return
    known = megatron_fields()
    for name in overrides:
        if name not in known:
            guess = difflib.get_close_matches(name, sorted(known), n=1)
            hint = f" (did you mean {guess[0]!r}?)" if guess else ""
            raise ConfigError(f"model.megatron.{name}: no such field of Megatron's TransformerConfig{hint}")

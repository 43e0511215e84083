"""Mappings that are handed to a class of Megatron's or vLLM's: checked against its fields, which are read from its source, not imported."""

from __future__ import annotations

import ast
import importlib.util
import json
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from megarl.config import ConfigError
from megarl.errors import hint

_KINDS: dict[str, Any] = {name: getattr(typing, name) for name in ("Optional", "Union", "List", "Tuple", "Literal")}
_KINDS |= {kind.__name__: kind for kind in (bool, int, float, str, list, tuple)}


def fields_of(package: str, sources: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """The annotated fields of classes, each with its type; Any where that is no kind of value that YAML has.

    Args:
        package: that is installed, as it is imported.
        sources: path inside the package -> names of classes there.
    """
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None, f"{package} is not installed"
    fields = dict[str, Any]()
    for source, classes in sources.items():
        tree = ast.parse((Path(spec.origin).parent / source).read_text())
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name in classes:
                for part in node.body:
                    if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                        fields[part.target.id] = _kind(part.annotation)
    return fields


def check_values(key: str, given: Mapping[str, Any], fields: Mapping[str, Any], owned: Mapping[str, str], what: str) -> None:
    """Checks a mapping of the configuration.

    Args:
        key: its own, dotted.
        given: the mapping.
        fields: of `fields_of`.
        owned: fields that are not the user's, with the reason.
        what: the class, in words.

    Raises:
        ConfigError: a name is no field (with the nearest one) or owned, or its value is of another type than the field's.
    """
    for name, value in given.items():
        if name in owned:
            raise ConfigError(f"{key}.{name}: {owned[name]}")
        if name not in fields:
            raise ConfigError(f"{key}.{name}: no such field of {what}{hint(name, fields)}")
        try:
            TypeAdapter(fields[name], config=ConfigDict(strict=True)).validate_json(json.dumps(value))
        except ValidationError as error:
            raise ConfigError(f"{key}.{name}: {error.errors()[0]['msg']} (got {value!r:.200})") from None


def _kind(annotation: ast.expr) -> Any:
    names = {name.id for name in ast.walk(annotation) if isinstance(name, ast.Name)}
    return eval(ast.unparse(annotation), dict(_KINDS)) if names <= _KINDS.keys() else Any

"""Checks of mappings passed to a class of Megatron or vLLM against the class's fields, which are read from its source without an import."""

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
    """Return the annotated fields of classes, each with its type; Any if YAML has no such type.

    Args:
        package: import name of an installed package.
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
    """Check the names and values of a mapping of the configuration.

    Args:
        key: the mapping's dotted key.
        given: the mapping.
        fields: the result of `fields_of`.
        owned: fields that users may not set, with the reason.
        what: the class's name, for the message.

    Raises:
        ConfigError: a name is no field (the message has the nearest one) or is owned, or its value has the wrong type.
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

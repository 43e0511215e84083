"""From a YAML file and overrides to a validated tree, and back. Every refusal is one line that starts with the dotted key."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from megarl.config.run import RunSettings
from megarl.errors import ConfigError, hint

Root = TypeVar("Root", bound=RunSettings)


def load(path: Path, overrides: list[str], root: type[Root]) -> Root:
    """The validated tree of a YAML file with overrides.

    A file may name another one, relative to itself, in the key `base`: the file is then laid over that one, key by key; a mapping that
    says its `type` takes the place of the base's as a whole.

    Args:
        path: the file.
        overrides: each `a.b=c`, whose value is YAML.
        root: the tree's class, that of the verb.

    Raises:
        ConfigError: with one line per fault: the dotted key, what was given, what was expected.
    """
    tree = _read(path)
    for override in overrides:
        _apply(tree, override)
    try:
        return root.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_line(fault, root) for fault in error.errors())) from None


def dump(config: RunSettings) -> str:
    """The resolved tree as YAML, defaults included."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _read(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The tree of a file laid over that of its `base`. `above`: the files that led here."""
    if not path.is_file():
        raise ConfigError(f"base: no such file: {path} (named in {above[-1]})" if above else f"config: no such file: {path}")
    if path.resolve() in [file.resolve() for file in above]:
        raise ConfigError(f"base: {path} leads back to itself")
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)
    except UnicodeDecodeError as error:
        raise ConfigError(f"config: {path} is not UTF-8: byte {error.start}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"config: {path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"config: {path} must hold a mapping, not {type(tree).__name__}")
    base = tree.pop("base", None)
    return tree if base is None else _laid_over(_read(path.parent / str(base), (*above, path)), tree)


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that is given twice, of which YAML keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"the key {key.value!r} is given twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _laid_over(base: Any, tree: Any) -> Any:
    if not isinstance(base, dict) or not isinstance(tree, dict) or "type" in tree:
        return tree
    return base | {key: _laid_over(base.get(key), value) for key, value in tree.items()}


def _apply(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {override!r}: expected key.subkey=value")
    *parents, last = key.split(".")
    node = tree
    for parent in parents:
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(f"{key}: {parent} is a value ({child!r}), not a section")
        node = child
    try:
        node[last] = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"{key}: {text!r} is not a YAML value") from None


def _line(fault: Any, root: type[BaseModel]) -> str:
    location, kinds = _place([str(part) for part in fault["loc"]], root)
    key = ".".join(location)
    if fault["type"] == "extra_forbidden":
        return f"{key}: unknown key{hint(location[-1], _keys(root) - {location[-1]})}"
    if fault["type"] == "missing":
        return f"{key}: required, and missing"
    if fault["type"] in ("union_tag_not_found", "union_tag_invalid"):
        given = fault["input"].get("type") if isinstance(fault["input"], dict) else None
        known = ", ".join(repr(tag) for kind in kinds for tag in _tags(kind))
        return f"{key}.type: {'required, and missing' if given is None else f'unknown: {given!r}'} (one of {known})"
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "value_error":
        return message if message.startswith(f"{key}.") or not key else f"{key}: {message}"  # a section's own check names its keys
    return f"{key}: {message} (got {fault['input']!r})"


def _place(location: list[str], root: type[BaseModel]) -> tuple[list[str], list[type[BaseModel]]]:
    """The keys that lead to a fault, and the sections that may be there; a tag that chooses one of several is no key of the file."""
    keys, kinds, chosen = list[str](), [root], True
    for part in location:
        if not chosen:
            kinds, chosen = [kind for kind in kinds if part in _tags(kind)], True
            continue
        keys.append(part)
        if not part.isdigit():  # an item of a list is of the list's kinds
            fields = [kind.model_fields[part] for kind in kinds if part in kind.model_fields]
            kinds = [section for field in fields for section in sections(field.annotation)]
        chosen = len(kinds) < 2
    return keys, kinds


def sections(annotation: Any) -> list[type[BaseModel]]:
    """Every BaseModel class inside an annotation (unions, Annotated, containers)."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for part in get_args(annotation) for section in sections(part)]


def _walk(root: type[BaseModel]) -> set[type[BaseModel]]:
    seen: set[type[BaseModel]] = set()
    queue = [root]
    while queue:
        section = queue.pop()
        if section not in seen:
            seen.add(section)
            queue += [inner for field in section.model_fields.values() for inner in sections(field.annotation)]
    return seen


def _keys(root: type[BaseModel]) -> set[str]:
    return {name for section in _walk(root) for name in section.model_fields}


def _tags(section: type[BaseModel]) -> list[str]:
    return [str(tag) for tag in get_args(section.model_fields["type"].annotation)]

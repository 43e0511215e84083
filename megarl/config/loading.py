"""Load a YAML file and overrides as a validated tree, and dump it back. Every refusal is one line that starts with the dotted key."""

import json
import re
from collections.abc import Iterator
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError

from megarl.algorithms.peers import expand
from megarl.config import yaml_text
from megarl.config.hints import hint_key
from megarl.config.run import RunSettings
from megarl.errors import ConfigError

Root = TypeVar("Root", bound=RunSettings)
MAX_BASES, MAX_FAULTS, MAX_SHOWN = 16, 20, 200  # files in a chain of `base`; errors reported; characters shown of a given value
MAX_TYPES = 4  # named of the types that have a key
MAX_FLOAT = 3.4028235e38  # the largest float32


def load(path: Path, overrides: list[str], root: type[Root]) -> Root:
    """Return the validated tree of a YAML file with overrides.

    A file may name another one, relative to itself, in the key `base`: the file is then merged over that one, key by key, except that a
    mapping with a `type` replaces the base's mapping as a whole. Relative paths in the tree become absolute, relative to this process's
    working directory. The settings of the system that `algorithm.as` names are added below the keys that are given.

    Args:
        path: the file.
        overrides: each of the form `a.b=c`, where the value is YAML.
        root: the tree's class, which is that of the verb.

    Raises:
        ConfigError: with one line per fault: the dotted key, what was given, what was expected.
    """
    tree = tree_of(path, overrides)
    try:
        tree = expand(tree)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    try:
        # As JSON: pydantic's strict mode then refuses a number for a boolean and a string for a number, but accepts a string for a path.
        config = root.model_validate_json(json.dumps(tree), strict=True)
    except ValidationError as error:
        lines = [line for fault in error.errors()[:MAX_FAULTS] for line in _line(fault, root).splitlines()]
        lines += _between(tree, error, root)
        if error.error_count() > MAX_FAULTS:
            lines.append(f"config: {error.error_count() - MAX_FAULTS:,} further errors")
        raise ConfigError("\n".join(lines)) from None
    _check_numbers(tree, "")
    return absolute(config)


def tree_of(path: Path, overrides: list[str]) -> dict[str, Any]:
    """Return the tree of a YAML file with overrides, not validated. Raise ConfigError as `load` does."""
    tree = _read(path)
    for override in overrides:
        _apply(tree, override)
    return tree


def absolute(config: Root) -> Root:
    """Return the tree with every path made absolute from this process's working directory, since ranks and engines run in others."""
    resolved: Root = _absolute(config)
    return resolved


def _absolute(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_copy(update={name: _absolute(getattr(value, name)) for name in type(value).model_fields})
    if isinstance(value, list):
        return [_absolute(one) for one in value]
    if isinstance(value, dict):
        return {key: _absolute(one) for key, one in value.items()}
    return value.absolute() if isinstance(value, Path) else value


def dump(config: RunSettings) -> str:
    """Return the resolved tree as YAML, including defaults."""
    return yaml_text.write(config.model_dump(mode="json"))


def _read(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return the tree of a file merged over that of its `base`. `above`: the files whose chain of `base` led here."""
    kind, named = ("base", f" (named in {above[-1]})") if above else ("config", "")
    key = f"{kind}: {path}{named}"
    if len(above) > MAX_BASES:
        raise ConfigError(f"base: {above[0]} extends more than {MAX_BASES} files")
    try:
        if not path.is_file():
            raise ConfigError(f"{kind}: no such file: {path}{named}")
        if path.resolve() in [file.resolve() for file in above]:
            raise ConfigError(f"base: {path} leads back to itself")
        if (size := path.stat().st_size) > yaml_text.MAX_BYTES:
            raise ConfigError(f"{key} has {size:,} bytes, more than {yaml_text.MAX_BYTES:,}")
        text = path.read_text(encoding="utf-8")
    except OSError as error:  # for example, a name of 300 characters
        raise ConfigError(f"{key}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{key} is not UTF-8: byte {error.start}") from None
    try:
        tree = yaml_text.read(text)
    except ConfigError as error:
        raise ConfigError(f"{key} is not accepted as YAML: {error}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{key} must hold a mapping, not {type(tree).__name__}")
    base = tree.pop("base", None)
    if not isinstance(base, str | None):
        raise ConfigError(f"{key}: base must be a file name, not {base!r:.{MAX_SHOWN}}")
    return tree if base is None else _laid_over(_read(path.parent / base, (*above, path)), tree)


def _laid_over(base: Any, tree: Any) -> Any:
    if not isinstance(base, dict) or not isinstance(tree, dict) or "type" in tree:
        return tree
    return base | {key: _laid_over(base.get(key), value) for key, value in tree.items()}


def _apply(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {override!r:.{MAX_SHOWN}}: expected key.subkey=value")
    *parents, last = key.split(".")
    if len(parents) >= yaml_text.MAX_LEVELS:
        raise ConfigError(f"override {override!r:.{MAX_SHOWN}}: more than {yaml_text.MAX_LEVELS} levels")
    node = tree
    for parent in parents:
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(f"{key}: {parent} is a value ({child!r:.{MAX_SHOWN}}), not a section")
        node = child
    try:
        node[last] = yaml_text.read(text)
    except ConfigError as error:
        raise ConfigError(f"{key}: {text!r:.{MAX_SHOWN}} is not accepted as a YAML value: {error}") from None


def _check_numbers(value: Any, key: str) -> None:
    """Raise ConfigError for any number in the tree that exceeds float32 or a 64-bit integer."""
    if isinstance(value, dict | list):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            _check_numbers(inner, f"{key}.{name}" if key else str(name))
    elif isinstance(value, float) and not abs(value) <= MAX_FLOAT:
        raise ConfigError(f"{key}: {value:g} is not finite in float32")
    elif isinstance(value, int) and abs(value) >= 1 << 63:
        raise ConfigError(f"{key}: an integer of {value.bit_length()} bits, more than 63")


def _line(fault: Any, root: type[BaseModel]) -> str:
    location, kinds = _place([str(part) for part in fault["loc"]], root)
    key = ".".join(location)
    if fault["type"] == "extra_forbidden":
        above = [str(part) for part in fault["loc"][:-1]]
        if others := _other_types(above, location[-1], root):
            return f"{key}: unknown key (a key of {others}; this is {above[-1]})"
        inside = {field.alias or name for section in _place(above, root)[1] for name, field in section.model_fields.items()}
        return f"{key}: unknown key{hint_key(location, sorted(inside), _dotted(root), fault['input'])}"
    if fault["type"] == "missing":
        return f"{key}: required, but missing"
    if fault["type"] in ("union_tag_not_found", "union_tag_invalid"):
        given = fault["input"].get("type") if isinstance(fault["input"], dict) else None
        known = ", ".join(repr(tag) for kind in kinds for tag in _tags(kind))
        return f"{key}.type: {'required, but missing' if given is None else f'unknown: {given!r}'} (one of {known})"
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "value_error":
        return message if message.startswith(f"{key}.") or not key else f"{key}: {message}"  # a section's own check names its keys
    return f"{key}: {message} (got {fault['input']!r:.{MAX_SHOWN}})"


def _between(tree: dict[str, Any], error: ValidationError, root: type[BaseModel]) -> list[str]:
    """Return the lines for contradictions between values, which pydantic does not look for while single values are invalid.

    The tree is validated again with the invalid values at their defaults. Lines that mention one of these are dropped, since its default
    may contradict what its own value would not.
    """
    rest, faulty = json.loads(json.dumps(tree)), set[str]()
    for fault in error.errors():
        keys, _ = _place([str(part) for part in fault["loc"]], root)
        keys = list(takewhile(lambda key: not key.isdigit(), keys))  # for an item of a list, remove the whole list
        if not keys:
            return []
        faulty.add(keys[-1])
        *parents, last = keys
        node: Any = rest
        for parent in parents:
            node = node.get(parent) if isinstance(node, dict) else None
        if isinstance(node, dict):
            node.pop(last, None)
    try:
        root.model_validate_json(json.dumps(rest), strict=True)
    except ValidationError as further:
        lines = [line for fault in further.errors() if fault["type"] == "value_error" for line in _line(fault, root).splitlines()]
        return [line for line in lines if not faulty.intersection(re.findall(r"\w+", line))]
    return []


def _place(location: list[str], root: type[BaseModel]) -> tuple[list[str], list[type[BaseModel]]]:
    """Return the keys that lead to a fault, and the section classes possible there. A union's tag in `location` is no key of the file."""
    keys, kinds, chosen = list[str](), [root], True
    for part in location:
        if not chosen:
            kinds, chosen = [kind for kind in kinds if part in _tags(kind)], True
            continue
        keys.append(part)
        if not part.isdigit():  # an item of a list has the same possible classes as the list
            fields = [kind.model_fields[part] for kind in kinds if part in kind.model_fields]
            kinds = [section for field in fields for section in sections(field.annotation)]
        chosen = len(kinds) < 2
    return keys, kinds


def _other_types(above: list[str], name: str, root: type[BaseModel]) -> str:
    """Return text that names the types which do have a key given in a section of another type; empty if none has it.

    Args:
        above: pydantic's location of the section, which ends with its type if it may be one of several.
        name: the key's name.
        root: the tree's class.
    """
    keys, kinds = _place(above[:-1], root)
    if not above or keys != _place(above, root)[0]:
        return ""
    types = [tag for kind in kinds if name in kind.model_fields for tag in _tags(kind)]
    more = f" and {len(types) - MAX_TYPES} more" if len(types) > MAX_TYPES else ""
    return f"type{'s' if len(types) > 1 else ''} {', '.join(types[:MAX_TYPES])}{more}" if types else ""


def sections(annotation: Any) -> list[type[BaseModel]]:
    """Return every BaseModel class inside an annotation (unions, Annotated, containers)."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for part in get_args(annotation) for section in sections(part)]


@cache
def _dotted(root: type[BaseModel]) -> tuple[str, ...]:
    """Return every dotted key, including those of all variants of a section, but not those inside a list."""

    def below(section: type[BaseModel], above: str, inside: tuple[type[BaseModel], ...]) -> Iterator[str]:
        for name, field in section.model_fields.items():
            yield above + (field.alias or name)
            for inner in [] if get_origin(field.annotation) is list else sections(field.annotation):
                if inner not in inside:  # sections can be recursive: a source's `exclude` is another source
                    yield from below(inner, f"{above}{name}.", (*inside, inner))

    return tuple(dict.fromkeys(below(root, "", (root,))))


def _tags(section: type[BaseModel]) -> list[str]:
    return [str(tag) for tag in get_args(section.model_fields["type"].annotation)]

"""`megarl config VERB [KEY]`: the keys of a verb's configuration, with their accepted values, defaults and meaning."""

import argparse
import ast
import inspect
import json
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from megarl.config import RunSettings
from megarl.errors import ConfigError, hint
from megarl.imports import find
from megarl.text.stdout import say
from megarl.verbs import VERBS

Schema = Mapping[str, Any]
"""A JSON schema, or a part of one."""

BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
WORDS = {"integer": "integer", "number": "number", "string": "text", "boolean": "true | false", "object": "mapping", "null": "null"}


@dataclass(frozen=True)
class Key:
    """A key of a configuration file."""

    name: str  # dotted
    takes: str  # accepted values, in words
    default: str | None  # as in YAML; None if the key is required
    meaning: str


def schema(root: type[RunSettings]) -> dict[str, Any]:
    """The JSON schema of a configuration file, for editors. No key is required, since a file may inherit any of them from its `base`."""
    tree = _partial(root.model_json_schema(schema_generator=_WithMeanings))
    base = {"type": "string", "description": "Another file, relative to this one, that this one extends."}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **tree, "properties": {"base": base, **tree["properties"]}}


class _WithMeanings(GenerateJsonSchema):
    """Describes each key with the docstring below it in the source. Pydantic could, but would then read the source at every import."""

    def model_schema(self, schema: Any) -> JsonSchemaValue:
        """The schema of one section."""
        section = super().model_schema(schema)
        sections = [one for one in schema["cls"].__mro__ if issubclass(one, BaseModel)]
        for name, given in section["properties"].items():
            meanings = [_meanings(one.__module__)[one.__name__].get(name) for one in sections]
            if meaning := next(filter(None, meanings), None):
                given.setdefault("description", meaning)
        return section


@cache
def _meanings(module: str) -> dict[str, dict[str, str]]:
    """The docstrings below the attributes in a module's source, by class and attribute."""
    classes = [node for node in ast.parse(inspect.getsource(sys.modules[module])).body if isinstance(node, ast.ClassDef)]
    return {
        one.name: {
            field.target.id: inspect.cleandoc(text.value.value)
            for field, text in pairwise(one.body)
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
            if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
        }
        for one in classes
    }


def _partial(part: Any) -> Any:
    """Turn a schema into one for partial files: no key is required, and without its `type`, a section may match any of several schemas."""
    if isinstance(part, list):
        return [_partial(one) for one in part]
    if not isinstance(part, dict):
        return part
    return {
        "anyOf" if name == "oneOf" else name: _partial(value) for name, value in part.items() if name not in ("required", "discriminator")
    }


def keys(root: type[RunSettings]) -> list[tuple[Key, str]]:
    """Every key in the order of the file, each with the section types that have it ("" if all do)."""
    whole = schema(root)
    return list(_keys(whole, whole.get("$defs", {}), "", ()))


def _keys(section: Schema, named: Schema, above: str, inside: tuple[str, ...]) -> Iterator[tuple[Key, str]]:
    for name, given in section["properties"].items():
        # A section may be nested in itself once: a source may leave out the questions of another source.
        below = [part for part in _sections(given, named) if inside.count(part["title"]) < 2]
        meaning = given.get("description") or (_first_line(below[0]) if below else _first_line(section) if name == "type" else "")
        yield Key(above + name, _takes(given, named), _default(given, bool(below)), meaning), ""
        place = f"{above}{name}."
        if len(below) == 1:
            yield from _keys(below[0], named, place, (*inside, below[0]["title"]))
        elif below:
            yield from _of_types({_tag(part): part for part in below}, named, place, inside)


def _of_types(parts: Mapping[str, Schema], named: Schema, place: str, inside: tuple[str, ...]) -> Iterator[tuple[Key, str]]:
    """Yield the keys of a section whose `type` selects one of several schemas: the types first, then every key once."""
    owners: dict[tuple[Key, str], list[str]] = {}
    for tag, part in parts.items():
        yield Key(f"{place}type", tag, None, _first_line(part)), ""
        for entry in _keys(part, named, place, (*inside, part["title"])):
            if entry[0].name != f"{place}type":
                owners.setdefault(entry, []).append(tag)
    for (key, deeper), tags in owners.items():
        others = [tag for tag in parts if tag not in tags]
        few = f"type: {', '.join(tags)}" if len(tags) <= len(others) else f"type: all but {', '.join(others)}"
        yield key, " ".join(filter(None, [few if others else "", deeper]))


def _default(given: Schema, section: bool) -> str | None:
    if "default" not in given:
        return None
    return "its own defaults" if section and given["default"] not in (None, []) else _yaml(given["default"])


def _sections(given: Schema, named: Schema) -> list[Schema]:
    """The schemas of the sections that a key may hold, directly, in a list, or by name."""
    resolved = _resolved(given, named)
    if "properties" in resolved:
        return [resolved]
    if isinstance(inner := resolved.get("additionalProperties"), dict):
        return _sections(inner, named)
    parts = [resolved["items"]] if resolved.get("type") == "array" and "items" in resolved else resolved.get("anyOf", [])
    return [section for part in parts for section in _sections(part, named)]


def _resolved(given: Schema, named: Schema) -> Schema:
    place = given.get("$ref")
    return given if place is None else named[place.rpartition("/")[2]]


def _tag(section: Schema) -> str:
    """The value of `type` that selects the section."""
    kind = section["properties"]["type"]
    return str(kind["const"] if "const" in kind else "|".join(kind["enum"]))


def _takes(given: Schema, named: Schema) -> str:
    """The accepted values, in words."""
    if "properties" in _resolved(given, named):
        return "section"
    if "anyOf" in given:
        return " | ".join(dict.fromkeys(_takes(one, named) for one in given["anyOf"]))
    if "const" in given or "enum" in given:
        return " | ".join(_yaml(one) for one in given.get("enum", [given.get("const")]))
    if given.get("type") == "array":
        inner = given.get("prefixItems", [given.get("items", {})])
        return f"[{', '.join(_takes(one, named) for one in inner)}]"
    bounds = [f"{sign} {given[bound]}" for bound, sign in BOUNDS.items() if bound in given]
    return " ".join([WORDS[given["type"]], *bounds])


def _yaml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if not isinstance(value, str) or not value else value


def _first_line(section: Schema) -> str:
    return str(section.get("description", "")).partition("\n")[0]


def show(listing: Sequence[tuple[Key, str]], width: int = 120) -> Iterator[str]:
    """The lines of a listing."""
    for key, types in listing:
        yield f"{key.name}: {key.takes}{f' = {key.default}' if key.default is not None else ''}{f'  [{types}]' if types else ''}"
        yield from textwrap.wrap(" ".join(key.meaning.split()), width, initial_indent="    ", subsequent_indent="    ")


def main(arguments: Sequence[str]) -> int:
    """Prints the keys of a verb's configuration, those at and below one key, or all as a JSON schema."""
    parser = argparse.ArgumentParser(prog="megarl config", description=main.__doc__)
    parser.add_argument("verb", choices=VERBS, metavar="VERB", help=", ".join(VERBS))
    parser.add_argument("key", nargs="?", metavar="KEY", help="a dotted key, such as rollout or train.steps")
    parser.add_argument("--schema", action="store_true", help="a JSON schema instead, which editors complete and check files with")
    given = parser.parse_intermixed_args(list(arguments))
    if given.schema and given.key is not None:
        parser.error("--schema covers the whole file: leave KEY out")
    root: Any = find(VERBS[given.verb].config)
    text = json.dumps(schema(root), indent=2) if given.schema else "\n".join(show(_below(keys(root), given.key, given.verb)))
    say(text)
    return 0


def _below(listing: list[tuple[Key, str]], name: str | None, verb: str) -> list[tuple[Key, str]]:
    """Return the key `name` and those below it, or all keys if it is None. ConfigError if there is no such key."""
    if name is None:
        return listing
    wanted = [(key, types) for key, types in listing if f"{key.name}.".startswith(f"{name}.")]
    if not wanted:
        raise ConfigError(f"{name}: megarl {verb} has no such key{hint(name, {key.name for key, _ in listing})}")
    return wanted

"""JSON schemas of tools for chat templates, from a function's signature and docstring. Imported only in the sandbox."""

import inspect
import re
from collections.abc import Callable
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

NAMES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
ARGUMENT = re.compile(r" +(\w+)(?: \(.*?\))?: *(.*)")


def schema_of(function: Callable[..., Any], name: str) -> dict[str, Any]:
    """Return the schema of a tool. Parameters without a default are required.

    Args:
        function: the function; its docstring describes it and, below `Args:`, its parameters.
        name: the name of the tool.

    Raises:
        ValueError: the function has no docstring, an annotation that cannot be resolved, or a parameter that a call cannot name.
    """
    docstring = inspect.getdoc(function)
    if not docstring:
        raise ValueError("has no docstring, which would tell the model what it does")
    try:
        hints = get_type_hints(function)
    except (NameError, TypeError) as error:
        raise ValueError(f"its types are not known: {error}") from None
    meaning, _, rest = docstring.partition("Args:\n")
    described = _arguments(rest)
    properties, required = dict[str, Any](), list[str]()
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise ValueError(f"a call cannot name its parameter {parameter.name!r}")
        what = {"description": described[parameter.name]} if parameter.name in described else {}
        properties[parameter.name] = _json(hints.get(parameter.name, Any)) | what
        required += [parameter.name] if parameter.default is parameter.empty else []
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": " ".join(meaning.split()), "parameters": parameters}}


def _arguments(rest: str) -> dict[str, str]:
    """Return the parameters' descriptions from the text below `Args:`, up to the next line that is not indented."""
    descriptions, name = dict[str, str](), ""
    for line in rest.splitlines():
        if line and not line.startswith(" "):
            break
        if match := ARGUMENT.fullmatch(line):
            name, descriptions[match[1]] = match[1], match[2]
        elif name and line.strip():
            descriptions[name] += f" {line.strip()}"
    return descriptions


def _json(hint: Any) -> dict[str, Any]:
    """Return the JSON schema of an annotation; empty for a type without a counterpart in JSON."""
    origin, inside = get_origin(hint) or hint, get_args(hint)
    if origin in (Union, UnionType):
        kinds = [one for one in inside if one is not NoneType]
        return _json(kinds[0]) if len(kinds) == 1 else {}
    if origin is Literal:
        return {"type": NAMES[type(inside[0])], "enum": list(inside)}
    items = {"items": _json(inside[0])} if origin is list and inside else {}
    return {"type": NAMES[origin], **items} if origin in NAMES else {}

"""The YAML of configurations: YAML 1.2's core schema, restricted to values that JSON has, unique keys, and bounded size.

PyYAML implements YAML 1.1, in which `010` is 8, `1:30` is 90, `no` is false, and `1e-6` a string. Here only what JSON reads as a number or
boolean is one (plus .inf, .nan, True and the like); anything else is a string, which a numeric key refuses.
"""

import re
from typing import Any

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode

from megarl.errors import ConfigError
from megarl.text.display import one_line

MAX_BYTES, MAX_VALUES, MAX_LEVELS = 1 << 20, 10_000, 32  # limits of a file or an override; an alias counts as what it refers to
_CORE = {
    "null": (r"~|null|Null|NULL|", "~nN"),
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?(0|[1-9][0-9]*)", "-+0123456789"),
    "float": (
        r"[-+]?((0|[1-9][0-9]*)?\.[0-9]+|(0|[1-9][0-9]*)\.?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
}


class _Reader(yaml.SafeLoader):
    """A loader that refuses what is no tree of JSON values: duplicate or non-string keys, tags, an alias inside its own anchor."""

    yaml_implicit_resolvers: dict[Any, Any] = {}

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._values, self._level = 0, 0
        self._sizes: dict[int, int] = {}  # values in a node, by its id

    def compose_node(self, parent: Node | None, index: Any) -> Node | None:
        """Count levels and values while the text is parsed, before any object is constructed."""
        before, event, alias = self._values, self.peek_event(), self.check_event(yaml.AliasEvent)
        self._level += 1
        if self._level > MAX_LEVELS:
            raise _fault(f"more than {MAX_LEVELS} levels", event.start_mark)
        if getattr(event, "tag", None) is not None:
            raise _fault(f"the tag {event.tag!r}, and tags are not supported", event.start_mark)
        node = super().compose_node(parent, index)
        self._level -= 1
        if alias and id(node) not in self._sizes:
            raise _fault("an alias inside its own anchor", event.start_mark)
        self._values += self._sizes[id(node)] if alias else 1
        if self._values > MAX_VALUES:
            raise _fault(f"more than {MAX_VALUES:,} values", event.start_mark)
        if not alias:
            self._sizes[id(node)] = self._values - before
        return node

    def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:str":
                raise _fault("a key is not a string", key.start_mark)
            if key.value in seen:
                raise _fault(f"the key {key.value!r} is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)

    def text(self, node: ScalarNode) -> str:
        """Return a string that can be used as a file name, an argument or JSON."""
        if re.search("[\0\ud800-\udfff]", node.value):
            raise _fault("a NUL or half a surrogate pair in a text", node.start_mark)
        return str(node.value)

    def integer(self, node: ScalarNode) -> int:
        """Return an integer, without YAML 1.1's octals, sexagesimals and underscores."""
        return int(node.value)


class _Writer(yaml.SafeDumper):
    """A dumper that quotes every string that either version of YAML would read as something else."""


_Reader.add_constructor("tag:yaml.org,2002:str", _Reader.text)
_Reader.add_constructor("tag:yaml.org,2002:int", _Reader.integer)
for _name, (_pattern, _first) in _CORE.items():
    for _class in (_Reader, _Writer):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(rf"^(?:{_pattern})$"), [*_first, *([""] * (_name == "null"))])


def read(text: str) -> Any:
    """Return the value of a YAML text. Raise ConfigError with one line that says what is wrong and where, without a key."""
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{len(text):,} characters, more than {MAX_BYTES:,}")
    try:
        return _Reader(text).get_single_data()
    except yaml.MarkedYAMLError as error:
        place = "" if error.problem_mark is None else f" (line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1})"
        raise ConfigError(f"{error.problem}{place}") from None
    except (yaml.YAMLError, ValueError) as error:  # int() refuses numbers of more than 4,300 digits
        raise ConfigError(one_line(str(error))) from None


def _fault(problem: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=mark)


def write(tree: Any) -> str:
    """Return the YAML text of a tree of JSON values."""
    return yaml.dump(tree, Dumper=_Writer, sort_keys=False)

"""How a chat template writes the assistant's calls of tools, learned from what it renders of a call, and how they are read.

Three forms are read: a JSON object with the name and the arguments between two marks (Qwen3, Qwen2.5; Llama 3.1 without marks), a name
and its arguments as JSON (DeepSeek, Kimi-K2), and a name with each argument between marks of its own (Qwen3.5, Qwen3-Coder, GLM-4.5,
MiniMax-M2, Nemotron-3).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from megarl.data.chat import PROBE

NAME = r"([\w.$/-]+)"
KEY = r"([^\s<>\"=]+)"
NAMES, KEYS, VALUES = ([f"{PROBE}{word}{number}" for number in (1, 2)] for word in ("name", "key", "value"))
SAID, IDS = f"{PROBE}said", "functions."
WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}  # of JSON, and of Jinja's `string`

Schemas = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class WrittenCall:
    """A call as it stands in a turn."""

    body: str  # what is between its marks
    closed: bool  # whether its second mark is there


@dataclass(frozen=True)
class CallFormat:
    """A form of calls. Texts of a template are compared with any white space in the place of theirs.

    Attributes:
        marks: what begins and what ends a call. Without the second, it goes to the next one; without both, a call is a whole turn.
        head: in the body, what is before the name, and between the name and the arguments; None: the body is a JSON object.
        tail: what is in the body after the arguments.
        argument: of one argument, what is before its name, between name and value, and after the value; None: the arguments are JSON.
        keys: of the JSON object, the keys of the name and of the arguments.
        around: what begins and what ends all calls of a turn.
        ids: a call has its id, "functions.NAME:NUMBER", in the place of its name (Kimi-K2).
    """

    marks: tuple[str, str] = ("<tool_call>", "</tool_call>")
    head: tuple[str, str] | None = None
    tail: str = ""
    argument: tuple[str, str, str] | None = None
    keys: tuple[str, str] = ("name", "arguments")
    around: tuple[str, str] = ("", "")
    ids: bool = False

    @property
    def example(self) -> str:
        """How a call is written, for the model."""
        if self.head is None:
            return f'JSON: {{"{self.keys[0]}": ..., "{self.keys[1]}": {{...}}}}'
        middle = "{...}" if self.argument is None else "{}NAME{}VALUE{}".format(*self.argument)
        return f"{self.marks[0]}{self.head[0]}TOOL{self.head[1]}{middle}{self.tail}{self.marks[1]}"

    def calls(self, text: str) -> list[WrittenCall]:
        """Return the calls of a turn, sound or not, in order."""
        if not any(self.marks):
            return [WrittenCall(text.strip(), True)] if _is_object(text) else []
        return [WrittenCall(match[1], not self.marks[1] or bool(match[2])) for match in self._pattern().finditer(text)]

    def without(self, text: str) -> str:
        """Return a turn's text without its calls."""
        if not any(self.marks):
            return "" if _is_object(text) else text
        rest, count = self._pattern().subn("", text)
        for mark in self.around[::-1] if count else ():
            rest = rest.rstrip().removesuffix(mark)
        return rest

    def _pattern(self) -> re.Pattern[str]:
        before, after = map(_loose, self.marks)
        body, end = rf"(?:(?!{before}).)*", rf"{after}\s*|\Z"
        return re.compile(rf"{before}({body}?)({end})" if after else rf"{before}({body})", re.DOTALL)

    def read(self, body: str, tools: Schemas | None = None) -> tuple[str, dict[str, Any]]:
        """Return the name and the arguments of a call.

        Args:
            body: the call's body.
            tools: schemas of the tools; an argument that is no JSON stays a text unless its schema has another type.

        Raises:
            ValueError: it is malformed; with a message for the model.
        """
        if self.head is None:
            return self._read_object(body)
        head = self._head(body)
        if head is None:
            raise ValueError(f"a call is {self.example}")
        if self.argument is None:
            arguments, end = _decoded(body, head.end())
        else:
            texts, end = self._arguments(body, head.end())
            types = _types(head[1], tools or ())
            arguments = {key: _value(text, types.get(key)) for key, text in texts.items()}
        if not isinstance(arguments, dict) or not re.fullmatch(rf"\s*{_loose(self.tail.strip())}\s*", body[end:]):
            raise ValueError(f"a call is {self.example}")
        return head[1], arguments

    def id_of(self, body: str) -> str | None:
        """Return the id that a call gives itself; None if its form has none."""
        head = self._head(body) if self.ids else None
        number = None if head is None else re.match(r":(\d+)", body[head.end(1) :])
        return None if head is None or number is None else f"{IDS}{head[1]}:{number[1]}"

    def _head(self, body: str) -> re.Match[str] | None:
        assert self.head is not None
        return re.match(rf"\s*{_loose(self.head[0].lstrip())}{NAME}{_loose(self.head[1])}", body)

    def _read_object(self, body: str) -> tuple[str, dict[str, Any]]:
        try:
            call = json.loads(body)
        except (ValueError, RecursionError):
            raise ValueError(f"a call is {self.example}") from None
        name, arguments = (call.get(key) for key in self.keys) if isinstance(call, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise ValueError(f'a call has a text "{self.keys[0]}" and an object "{self.keys[1]}"')
        return name, arguments

    def _arguments(self, body: str, start: int) -> tuple[dict[str, str], int]:
        """Return the texts of the arguments by name, and where they end."""
        assert self.argument is not None
        before, between, after = self.argument
        opening = re.compile(rf"\s*{_loose(before.lstrip())}{KEY}{_edge(between, last=True)}")
        closing = re.compile(_edge(after, last=False))
        texts = dict[str, str]()
        while (opened := opening.match(body, start)) and (closed := closing.search(body, opened.end())):
            texts[opened[1]] = body[opened.end() : closed.start()]
            start = closed.end()
        return texts, start


JSON_CALLS = CallFormat()


@dataclass(frozen=True)
class Calls:
    """What a run's model can call, and how it writes that."""

    format: CallFormat = JSON_CALLS
    tools: Schemas = ()


JSON = Calls()


def learned(
    render: Callable[[list[dict[str, Any]], str | None], str | None], opening: str, end: str, silent: CallFormat | None
) -> CallFormat | None:
    """Learn how a template writes calls.

    Args:
        render: renders a turn of the assistant with calls and a content, from where the user's message ends; None: the template refuses.
        opening: what it writes there before the assistant speaks.
        end: the token that ends the assistant's message.
        silent: the form of a template that writes no calls.

    Returns:
        The form; None for one that is not read.
    """
    one, two, said = render(_probes(1), None), render(_probes(2), None), render(_probes(1), SAID)
    if one is None or NAMES[0] not in one:
        return silent
    spot = _spot(one, 0)
    if spot is None:
        return None
    before, after = one[: spot.start], one[spot.end :].partition(end)[0]
    spots = [] if two is None else [_spot(two, number) for number in (0, 1)]
    if two is None or None in spots:
        bare = spot.keys is not None and not before.removeprefix(opening).strip() and not after.strip()
        return CallFormat(("", ""), keys=spot.keys) if bare and spot.keys is not None else None
    first, second = filter(None, spots)
    between = two[first.end : second.start]
    closing = _shared(between, after)
    start = _shared(between[len(closing) :], before, backwards=True)
    self_closing = spot.keys is None and spot.argument is None  # JSON shows where it ends
    if not start.split() or not closing.split() and not self_closing:
        return None
    lead = "" if said is None else said.partition(SAID)[2].partition(NAMES[0])[0]
    begun = lead.rpartition(start.strip())[0] if start.strip() in lead else ""
    marks = start.split()[0], (closing.split() or [""])[-1]
    around = begun.strip(), after[len(closing) :].strip()
    if spot.keys is not None:
        return CallFormat(marks, keys=spot.keys, around=around)
    inner, tail = start.lstrip().removeprefix(marks[0]), closing.rstrip().removesuffix(marks[1])
    return CallFormat(marks, (inner, spot.middle), tail, spot.argument, around=around, ids=f"{IDS}{NAMES[0]}:0" in one)


@dataclass(frozen=True)
class _Spot:
    """Where a probe stands in a rendering: the JSON object, or from the name to the end of the arguments."""

    start: int
    end: int
    middle: str = ""  # between name and arguments
    argument: tuple[str, str, str] | None = None
    keys: tuple[str, str] | None = None  # of the JSON object


def _probes(count: int) -> list[dict[str, Any]]:
    arguments = dict(zip(KEYS, VALUES, strict=True))
    return [
        {"type": "function", "id": f"{IDS}{name}:{number}", "function": {"name": name, "arguments": arguments}}
        for number, name in enumerate(NAMES[:count])
    ]


def _spot(text: str, number: int) -> _Spot | None:
    """Return where a call stands in a text; None if it is not there, or in no form that is read."""
    name, arguments = NAMES[number], dict(zip(KEYS, VALUES, strict=True))
    if text.count(name) != 1:
        return None
    at = text.index(name)
    start = text.rfind("{", 0, at)
    if start >= 0:
        call, end = _decoded(text, start)
        if isinstance(call, dict) and name in call.values() and arguments in call.values():
            keys = tuple(next(key for key, value in call.items() if value == wanted) for wanted in (name, arguments))
            return _Spot(start, end, keys=(keys[0], keys[1]))
    rest = text[at + len(name) :]
    if "{" in rest:
        value, end = _decoded(rest, rest.index("{"))
        if value == arguments:
            return _Spot(at, at + len(name) + end, rest[: rest.index("{")])
    pieces, tail = list[str](), rest
    for word in (KEYS[0], VALUES[0], KEYS[1], VALUES[1]):
        piece, word_there, tail = tail.partition(word)
        pieces.append(piece if word_there else "")
    first, between, next_, between_again = pieces
    before = _shared(next_, first, backwards=True)
    after = next_[: len(next_) - len(before)]
    if not between or between != between_again or not before.strip() or not after.strip() or not tail.startswith(after):
        return None
    return _Spot(at, len(text) - len(tail) + len(after), first[: len(first) - len(before)], (before, between, after))


def _shared(one: str, other: str, *, backwards: bool = False) -> str:
    """Return what both texts begin with (or end with), in whole tags."""
    tags = [re.findall(r"<[^<>]*>|.", text, re.DOTALL) for text in (one, other)]
    pairs = zip(*(tag[::-1] for tag in tags), strict=False) if backwards else zip(*tags, strict=False)
    shared = [pair[0] for pair in takewhile(lambda pair: pair[0] == pair[1], pairs)]
    return "".join(shared[::-1] if backwards else shared)


def _decoded(text: str, start: int) -> tuple[Any, int]:
    """Return the JSON value that begins at a place, after white space, and where it ends; None if there is none."""
    while start < len(text) and text[start].isspace():
        start += 1
    try:
        return json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return None, start


def _is_object(text: str) -> bool:
    value, end = _decoded(text, 0)
    return isinstance(value, dict) and not text[end:].strip()


def _loose(text: str) -> str:
    """A pattern of a text, with any white space in the place of its own, and any number in the place of one."""
    return r"\s*".join(re.sub(r"[0-9]+", r"\\d+", re.escape(piece)) for piece in re.split(r"\s+", text))


def _edge(text: str, *, last: bool) -> str:
    """`_loose`, but white space at the end (or at the beginning), beside a value, may only be there or not."""
    bare = text.rstrip() if last else text.lstrip()
    space = re.escape(text[len(bare) :] if last else text[: len(text) - len(bare)])
    optional = f"(?:{space})?" if space else ""
    return _loose(bare) + optional if last else optional + _loose(bare)


def _types(name: str, tools: Schemas) -> dict[str, Any]:
    """The types of a tool's arguments, by name."""
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            parameters = function.get("parameters") or {}
            return {key: schema for key, schema in (parameters.get("properties") or {}).items() if isinstance(schema, dict)}
    return {}


def _value(text: str, schema: Mapping[str, Any] | None) -> Any:
    """Return an argument: a text, unless its schema allows something else, and it is that."""
    if schema is None or schema.get("type") == "string":
        return text
    if text.strip() in WORDS:
        return WORDS[text.strip()]
    value, end = _decoded(text, 0)
    return text if text[end:].strip() or not text.strip() or value is None else value

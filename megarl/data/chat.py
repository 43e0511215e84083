"""A chat as a template renders it, and marks in place of its texts, which show what a template leaves out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from megarl.data.messages import CALL_KEYS, SPOKEN, Message

STRUCTURE = {"role", "name", "id", "tool_call_id", "type", "weight"}  # keys of a message that `probed` leaves as they are
UNNAMED = (STRUCTURE - {"name"}) | {"content", "tool_calls"}  # keys of a message that `reduced` keeps
PROBE = "f7Zq0"  # a text that no template contains
PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": f"{PROBE}tool", "description": "Q", "parameters": {"type": "object", "properties": {}}},
}


@dataclass(frozen=True, slots=True)
class Chat:
    """What a chat template renders."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None  # schemas of the tools that the assistant may call
    arguments: Mapping[str, Any] = field(default_factory=dict)  # further arguments of the template, by name
    inserted: int = 0  # messages at the beginning that are not the row's

    def until(self, number: int) -> Chat:
        """The chat before a message."""
        return replace(self, messages=self.messages[:number])

    def named(self, number: int) -> str:
        """The name of a message in errors, which counts as the row does."""
        return f"message {number - self.inserted}" if number >= self.inserted else "the message of data.system"


class Omission(NamedTuple):
    """What a template leaves out of chats of one shape."""

    number: int | None  # the first message of which something is left out; -1: the tools
    what: str  # what that is


NOTHING = Omission(None, "")


def calling(arguments: Any, silence: Mapping[str, Any]) -> list[list[Message]]:
    """Return a chat that ends with a call, and the same with the tool's answer."""
    call = {"type": "function", "id": "f7Zq00000", "function": {"name": "f", "arguments": arguments}}
    chat: list[Message] = [{"role": "user", "content": "Q"}, {"role": "assistant", "tool_calls": [call], **silence}]
    return [chat, [*chat, {"role": "tool", "tool_call_id": call["id"], "name": "f", "content": "Q"}]]


def shape(chat: Chat) -> Any:
    """Return what determines how a template treats a chat, besides its texts."""
    arguments = json.dumps(dict(chat.arguments), sort_keys=True, default=str) if chat.arguments else ""
    return arguments, chat.tools is None, tuple(map(_message_shape, chat.messages))


def _message_shape(message: Message) -> Any:
    values = [*message.items(), *(("", call.get("function", call).get("arguments")) for call in message.get("tool_calls", ()))]
    return message["role"], *((key, type(value).__name__, bool(value)) for key, value in values), *sorted(_others(message))


def probed(chat: Chat) -> tuple[Chat, list[tuple[int, str, str]]]:
    """Return the chat with a mark in place of each text, and (number of the message, key, mark) of each."""
    messages, marks = list[Message](), list[tuple[int, str, str]]()

    def mark(number: int, key: str) -> str:
        marks.append((number, key, f"{PROBE}{len(marks)}{PROBE}"))
        return marks[-1][2]

    for number, message in enumerate(chat.messages):
        texts = [key for key, value in message.items() if key not in STRUCTURE and isinstance(value, str) and value.strip()]
        probe = {**message, **{key: mark(number, key) for key in texts}}
        if "tool_calls" in message:
            probe["tool_calls"] = calls = []
            for call in message["tool_calls"]:
                function = call.get("function", call)
                changed = {**function, "name": mark(number, "tool_calls")}
                if arguments := function.get("arguments"):
                    value = mark(number, "tool_calls")
                    changed["arguments"] = {"a": value} if isinstance(arguments, dict) else f'{{"a": "{value}"}}'
                calls.append({**call, "function": changed} if "function" in call else changed)
        messages.append(probe)
    return replace(chat, messages=messages, tools=None if chat.tools is None else [PROBE_TOOL]), marks


def reduced(chat: Chat) -> Iterator[tuple[str, Chat]]:
    """Yield (key, the chat without it in the messages of one role) for each key of messages and calls that `probed` leaves as it is."""
    for role, key in dict.fromkeys((message["role"], key) for message in chat.messages for key in sorted(_others(message))):
        changed = [_without(message, key) if message["role"] == role else message for message in chat.messages]
        yield key, replace(chat, messages=changed)


def _others(message: Message) -> set[str]:
    """Return the keys of a message that say something and are no text, its name, and further keys of its calls as "tool_calls.key"."""
    keys = {key for key, value in message.items() if key not in UNNAMED and (key == "name" or not isinstance(value, str)) and value != []}
    parts = [part for call in message.get("tool_calls", ()) for part in (call, call.get("function", {}))]
    return {key for key in keys if message[key] != {}} | {f"tool_calls.{key}" for part in parts for key in part.keys() - CALL_KEYS}


def _without(message: Message, key: str) -> Message:
    of_call = key.removeprefix("tool_calls.")
    if of_call == key:
        return _dropped(message, key)
    if "tool_calls" not in message:
        return message
    calls = [_dropped(call, of_call) for call in message["tool_calls"]]
    calls = [{**call, "function": _dropped(call["function"], of_call)} if "function" in call else call for call in calls]
    return {**message, "tool_calls": calls}


def _dropped(value: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: inner for name, inner in value.items() if name != key}


class Unused(NamedTuple):
    """What a template leaves out and only needs to be named."""

    keys: set[str]  # of messages
    thoughts: dict[str, int]  # keys of earlier reasoning, with the first message of each: the template may write it of a last message


def omission(chat: Chat, marks: Sequence[tuple[int, str, str]], text: str | Exception) -> tuple[Omission, Unused]:
    """Return what a template leaves out of a chat of marks.

    Args:
        chat: the chat.
        marks: its marks, as `probed` returns them.
        text: its rendering; if the template refuses it, nothing is missing.

    Returns:
        The first thing that is missing, and the other keys of messages that are.
    """
    last, unused = len(chat.messages) - 1, Unused(set(), {})
    if isinstance(text, Exception):
        return NOTHING, unused
    if chat.tools is not None and PROBE_TOOL["function"]["name"] not in text:
        return Omission(-1, "the schemas"), unused
    for number, key, mark in marks:
        if mark not in text:
            if key == "content":
                return Omission(number, f"what the role {chat.messages[number]['role']!r} says"), unused
            if key == "tool_calls" or (key in SPOKEN and number == last):
                return Omission(number, f"its {key}"), unused
            if key in SPOKEN and chat.messages[number]["role"] == "assistant":
                unused.thoughts.setdefault(key, number)
            else:
                unused.keys.add(key)
    return NOTHING, unused

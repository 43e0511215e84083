"""Chat messages as data files have them: checked, and without what a file format fills in."""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from megarl.errors import ConfigError
from megarl.text.display import one_line
from megarl.text.strict_json import parse_json

Message = dict[str, Any]  # one message of a chat: role, content, and what else it has

TOOLS, ARGUMENTS = "tools", "chat_template_kwargs"  # columns of a row: schemas of tools, arguments of the chat template
SPOKEN = ("content", "reasoning_content", "reasoning", "thinking")  # keys of a message with what it says, besides `tool_calls`
MEDIA = {"image", "images", "image_url", "audio", "audios", "input_audio", "video", "videos"}  # keys of a message with more than texts
WRITTEN_CHAT = re.compile(r"\s*\[\s*\{\s*([\"'])(?:role|content)\1\s*:.*\}\s*\]\s*", re.DOTALL)
CALL_KEYS = {"id", "type", "index", "name", "function", "arguments"}  # keys of a call


def checked(prompt: Any, place: str, filled: bool = False) -> str | list[Message]:
    """Return a prompt or a conversation without the keys of messages that are null.

    Args:
        prompt: a text, or a list of chat messages.
        place: the start of an error's message.
        filled: it comes from Arrow, which fills in every key that any message of the file has: nulls are left out at every depth.

    Raises:
        ConfigError: it is empty or malformed.
    """
    if isinstance(prompt, str):
        if not prompt.strip():
            raise ConfigError(f"{place}: the prompt is empty")
        check_text(prompt, f"{place}: the prompt")
        return prompt
    if not isinstance(prompt, list):
        raise ConfigError(f"{place}: the prompt must be a text or a list of chat messages, not {type(prompt).__name__}")
    messages = checked_chat(prompt, place, filled)
    if not messages:
        raise ConfigError(f"{place}: there are no messages")
    if not says_something(messages[-1]) and messages[-1]["role"] != "tool":
        raise ConfigError(f"{place}: message {len(messages) - 1}, the last, is empty")
    return messages


def check_text(text: str, place: str) -> None:
    """Raise ConfigError, starting with `place`, for chat messages in JSON or in Python's form: as a text they would be one message."""
    if WRITTEN_CHAT.fullmatch(text):
        raise ConfigError(f"{place} is a text that holds chat messages, {text.strip()!r:.60}; write it as a list of messages")


def checked_chat(messages: list[Any], place: str, filled: bool) -> list[Message]:
    """`checked`, of messages that may all be empty."""
    return [_checked(message, f"{place}: message {number}", filled) for number, message in enumerate(messages)]


def _checked(message: Any, place: str, filled: bool) -> Message:
    if isinstance(message, dict):
        message = without_nulls(message) if filled else {key: value for key, value in message.items() if value is not None}
        message = {key: value for key, value in message.items() if key != "tool_calls" or value != []}
        if media := [key for key in message if key in MEDIA and message[key] not in ("", [], {})]:
            raise ConfigError(f"{place}: {media[0]} is not taken: only texts are read and learned")
    if why := _malformed(message):
        raise ConfigError(f"{place} {why}")
    for key in SPOKEN:
        if message["role"] == "assistant" and not isinstance(message.get(key, ""), str):
            raise ConfigError(f"{place}: {key} must be a text, not {type(message[key]).__name__}")
    if "tool_calls" in message:
        message = {**message, "tool_calls": _checked_calls(message["tool_calls"], f"{place}: tool_calls")}
    weight = message.get("weight", 1)
    if weight not in (0, 1) or ("weight" in message and weight and message["role"] != "assistant"):
        raise ConfigError(f"{place}: weight={weight!r:.40}: only 0 and 1 are taken, and 1 only of the assistant's messages")
    return message


def _malformed(message: Any) -> str | None:
    """Return why it is no message with a role and what that says; None if it is one."""
    if not isinstance(message, dict):
        return f"must be an object with a role and a content, not {type(message).__name__}"
    keys = one_line(", ".join(message), 100) or "nothing"
    if not isinstance(message.get("role"), str):
        other = "; ShareGPT's from and value are role and content here, human is user, gpt assistant" if "from" in message else ""
        return f"needs a text 'role', and has {keys}{other}"
    if "function_call" in message:
        return "has function_call, which is not taken; write it as one of tool_calls"
    content = message.get("content")
    if isinstance(content, str) or (content is None and message["role"] == "assistant" and says_something(message)):
        return None
    if content is None:
        return f"needs a text 'content', and has {keys}"
    kind = type(content).__name__
    remedy = {"list": "join the texts of its parts", "dict": "write it as JSON"}.get(kind, "write it as a text")
    return f"has a content that is no text but a {kind}; {remedy}"


def _checked_calls(calls: Any, place: str) -> list[dict[str, Any]]:
    """Return the calls of a message; the arguments of one without any are an empty object, however that is written."""
    checked_calls = list[dict[str, Any]]()
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(calls, list) or not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ConfigError(f"{place} must be a list of calls, each with a text 'name'")
        changed = {**function, "arguments": _checked_arguments(function, place)}
        checked_calls.append({**call, "function": changed} if "function" in call else changed)
    return checked_calls


def _checked_arguments(function: dict[str, Any], place: str) -> dict[str, Any] | str:
    arguments, name = function.get("arguments"), f"{function['name']!r:.80}"
    if arguments is None and (others := sorted(function.keys() - CALL_KEYS)):
        raise ConfigError(f"{place}: the call of {name} has {', '.join(others)} and no arguments")
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    wrong = f"{place}: the arguments of {name} must be an object, or one as JSON"
    try:
        value = parse_json(arguments.encode()) if isinstance(arguments, str) else arguments
        json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{wrong}, and {arguments!r:.80} is not: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{wrong}, not {arguments!r:.80}")
    return arguments if isinstance(arguments, str) else value


def says_something(message: Message) -> bool:
    """Whether a message has a text that is not blank, or calls."""
    return bool(message.get("tool_calls")) or any(isinstance(message.get(key), str) and message[key].strip() for key in SPOKEN)


def without_nulls(value: Any) -> Any:
    """Return the value without the keys of dictionaries, at any depth, whose values are null."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def instructed(chat: list[Message], system: str | None) -> list[Message]:
    """Return the chat with the system message before it, unless it begins with one of its own."""
    return chat if system is None or chat[0]["role"] == "system" else [{"role": "system", "content": system}, *chat]


def tools_of(row: Mapping[str, Any], place: str, filled: bool = False) -> list[dict[str, Any]] | None:
    """Return the schemas of a row's column `tools`, which is a list, or one as JSON; None if there are none.

    Args:
        row: the row's columns.
        place: the start of an error's message.
        filled: as of `checked`.

    Raises:
        ConfigError: it is neither.
    """
    value = _from_json(row.get(TOOLS), f"{place}: {TOOLS}")
    tools = [_from_json(tool, f"{place}: {TOOLS}") for tool in value] if isinstance(value, list) else value
    if tools is not None and (not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools)):
        raise ConfigError(f"{place}: {TOOLS} must be a list of schemas, or one as JSON, not {value!r:.80}")
    return (without_nulls(tools) if filled else tools) or None


def arguments_of(row: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Return the arguments for the chat template in a row's column `chat_template_kwargs`. Raise ConfigError if it is no mapping."""
    return mapping(row.get(ARGUMENTS), f"{place}: {ARGUMENTS}")


def mapping(value: Any, place: str) -> dict[str, Any]:
    """Return a mapping, or one as JSON, without what is null in it. Raise ConfigError, starting with `place`, if it is neither."""
    items = _from_json(value, place)
    if not isinstance(items, dict | None):
        raise ConfigError(f"{place}: must be a mapping, or one as JSON, not {items!r:.80}")
    return {name: item for name, item in (items or {}).items() if item is not None}


def _from_json(value: Any, place: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value.encode()) if value.strip() else None
    except ValueError as error:
        raise ConfigError(f"{place}: {value!r:.80} is not JSON: {error}") from None


def spoken(message: Message) -> Iterator[tuple[str, str]]:
    """Yield (key, text) of everything that a message says: its texts, and of its calls the names and arguments."""
    yield from ((key, message[key]) for key in SPOKEN if isinstance(message.get(key), str))
    for call in message.get("tool_calls", ()):
        function = call.get("function", call)
        yield "tool_calls", function["name"]
        arguments = function.get("arguments", "")
        yield from (("tool_calls", text) for text in ([arguments] if isinstance(arguments, str) else _leaves(arguments)))


def _leaves(value: Any) -> Iterator[str]:
    """Yield the names, texts and numbers of a JSON value."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield name
            yield from _leaves(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner)
    elif isinstance(value, str):
        yield value
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield repr(value)

"""A sandboxed process with a user's own tools: `python -m megarl.environments.tool_worker CHANNEL`, started only by own_tools.py.

It answers one call at a time. Messages sent, in JSON: ["ready"], ["refused", text], ["tools", schemas], [text, whether the call succeeded].
"""

import inspect
import json
import pickle
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy  # imported here, so that _call can seed it even if only the tools use it

from megarl.environments.adapters import named
from megarl.environments.protocol import waited
from megarl.environments.signatures import schema_of
from megarl.sandbox.bounded import MAX_TEXT, Answer, Late, imported, in_time, serve
from megarl.sandbox.channel import ANSWER_BYTES, Channel

ROOM = ANSWER_BYTES - 64  # maximum size of an answer's text in JSON, in bytes
Tools = dict[str, tuple[Callable[..., Any], dict[str, Any]]]
"""The function and the schema of each tool, by its name."""


def load(paths: Sequence[str]) -> Tools:
    """Return the tools at these paths. Raises ValueError, starting with the key within `environment.source`, if one is not a valid tool."""
    tools_by_name: Tools = {}
    for path in paths:
        try:
            function, name = named(path), path.partition(":")[2]
            tools_by_name[name] = function, schema_of(function, name)
        except ValueError as error:
            raise ValueError(f"tools: {path}: {str(error).removeprefix('path: ')}") from None
    return tools_by_name


def work(channel: Channel, answer: Answer) -> None:
    """Import the tools, send their schemas, and answer calls."""
    paths, seconds, most = pickle.loads(channel.receive())
    tools = imported(lambda: load(paths), answer)
    if tools is None:
        return
    answer("tools", [schema for _, schema in tools.values()])
    while True:
        name, arguments_text = pickle.loads(channel.receive())
        output, worked = _call(tools[name][0], name, arguments_text, seconds)
        answer(_cut(output, most), worked)


def _call(function: Callable[..., Any], name: str, arguments_text: str, seconds: float) -> tuple[str, bool]:
    """Call a function with arguments in JSON. The same call draws the same random numbers.

    Returns:
        The answer (a text as it is, anything else as JSON) or an error message, and whether the call succeeded.
    """
    random.seed(f"{name} {arguments_text}")
    numpy.random.seed(random.getrandbits(32))
    try:
        arguments = json.loads(arguments_text)
        inspect.signature(function).bind(**arguments)
    except (TypeError, RecursionError) as error:
        return f"error: {name}: {error}"[:MAX_TEXT], False
    try:
        with in_time(seconds):
            returned = waited(function(**arguments))
            output = returned if isinstance(returned, str) else json.dumps(returned, ensure_ascii=False, default=str)
    except Late:
        return f"error: not done after {seconds:g} s", False
    except BaseException as error:  # including SystemExit: one call must not end the process
        return f"error: {type(error).__name__}: {error}"[:MAX_TEXT], False
    return output, True


def _cut(output: str, most: int) -> str:
    """Cut a text to `most` characters and to the size of one message, and mark it if anything is cut off."""
    beginning = output[:most]
    while (size := len(json.dumps(beginning))) > ROOM:
        beginning = beginning[: len(beginning) * ROOM // size]
    return beginning if len(beginning) == len(output) else f"{beginning}... (cut off)"


if __name__ == "__main__":
    serve(work)

"""A process of a user's own tools, in the sandbox: `python -m megarl.environments.tool_worker CHANNEL`, started by own_tools.py alone.

It answers one call after the other. Messages out, in JSON: ["ready"], ["refused", text], ["tools", schemas], [text, whether it has worked].
"""

from __future__ import annotations

import inspect
import json
import pickle
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy  # here, so that a tool that imports it first draws from a state of its own, too

from megarl.environments.adapters import named
from megarl.environments.protocol import waited
from megarl.environments.signatures import schema_of
from megarl.sandbox.bounded import LONGEST_TEXT, Answer, Late, imported, in_time, serve
from megarl.sandbox.channel import ANSWER_BYTES, Channel

ROOM = ANSWER_BYTES - 64  # bytes of an answer's text in JSON
Tools = dict[str, tuple[Callable[..., Any], dict[str, Any]]]
"""Function and schema of each, by its name."""


def load(paths: Sequence[str]) -> Tools:
    """The functions at these places. ValueError, starting with the key below `environment.source`, for one that is no tool."""
    found: Tools = {}
    for path in paths:
        try:
            function, name = named(path), path.partition(":")[2]
            found[name] = function, schema_of(function, name)
        except ValueError as error:
            raise ValueError(f"tools: {path}: {str(error).removeprefix('path: ')}") from None
    return found


def work(channel: Channel, answer: Answer) -> None:
    """Imports the tools, tells of them, and answers calls."""
    paths, seconds, most = pickle.loads(channel.receive())
    tools = imported(lambda: load(paths), answer)
    if tools is None:
        return
    answer("tools", [schema for _, schema in tools.values()])
    while True:
        name, given = pickle.loads(channel.receive())
        said, worked = _call(tools[name][0], name, given, seconds)
        answer(_cut(said, most), worked)


def _call(function: Callable[..., Any], name: str, given: str, seconds: float) -> tuple[str, bool]:
    """What a function makes of arguments in JSON: a text, or else JSON of it; or how it failed. The same call draws the same numbers."""
    random.seed(f"{name} {given}")
    numpy.random.seed(random.getrandbits(32))
    try:
        arguments = json.loads(given)
        inspect.signature(function).bind(**arguments)
    except (TypeError, RecursionError) as error:
        return f"error: {name}: {error}"[:LONGEST_TEXT], False
    try:
        with in_time(seconds):
            returned = waited(function(**arguments))
            said = returned if isinstance(returned, str) else json.dumps(returned, ensure_ascii=False, default=str)
    except Late:
        return f"error: not done after {seconds:g} s", False
    except BaseException as error:  # SystemExit and the like too: one call must not end the process
        return f"error: {type(error).__name__}: {error}"[:LONGEST_TEXT], False
    return said, True


def _cut(said: str, most: int) -> str:
    """At most so many characters, and what one message holds."""
    kept = said[:most]
    while (size := len(json.dumps(kept))) > ROOM:
        kept = kept[: len(kept) * ROOM // size]
    return kept if len(kept) == len(said) else f"{kept}... (cut off)"


if __name__ == "__main__":
    serve(work)

"""Tools that the model calls in the form of its chat template (`megarl.data.calls`).

Each call is answered by a message with the role `tool`; for a malformed call, it says what is wrong. A turn without a call is the answer,
and ends the episode. Each Python program runs in a new sandbox, which is removed afterwards, so that no program affects another. The user's
functions stay imported (own_tools.py).
"""

from __future__ import annotations

import asyncio
import json
import pickle
import select
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from megarl.config import EnvironmentSettings, SandboxSettings, ToolsEnvironment
from megarl.data.calls import JSON, CallFormat, Calls
from megarl.environments.calculator import calculate
from megarl.environments.own_tools import OwnTools
from megarl.environments.protocol import Message, Turn
from megarl.sandbox.channel import BadMessage
from megarl.sandbox.process import SandboxedProcess
from megarl.text.display import printable

MAX_CALLS = 8  # in one turn
START_S, GRACE_S = 60.0, 1.0  # time limit for the process to start; additional time for its answer to arrive


def _schema(name: str, meaning: str, argument: str, what: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {argument: {"type": "string", "description": what}}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": meaning, "parameters": parameters}}


ARGUMENTS = {"calculator": "expression", "python": "code"}
SCHEMAS = {
    "calculator": _schema("calculator", "Evaluates arithmetic: + - * / // % ** and brackets.", "expression", "such as (3 + 4) * 12"),
    "python": _schema("python", "Runs a Python program and returns what it prints. Nothing is kept between calls.", "code", "the program"),
}


class ToolsHost:
    """Runs the calls of all episodes, at most `settings.workers` programs or functions at a time."""

    def __init__(self, settings: EnvironmentSettings, calls: Calls = JSON) -> None:
        assert isinstance(source := settings.source, ToolsEnvironment)
        self.calls, self._settings, self._output_chars = calls, settings, source.output_chars
        self._names = [tool.rpartition(":")[2] for tool in source.tools]
        self._own = OwnTools(source.own, settings, source.output_chars)
        self._threads = ThreadPoolExecutor(settings.workers, thread_name_prefix="tools")

    def open(self) -> ToolsEpisode:
        """Return a new episode."""
        return ToolsEpisode(self)

    async def call(self, body: str) -> tuple[str, bool]:
        """Run a call. Return the answer, and whether the call succeeded."""
        try:
            name, arguments = read_call(self.calls, body, self._names)
            if name == "calculator":
                return calculate(arguments["expression"]), True
        except ValueError as fault:
            return f"error: {fault}", False
        if name == "python":
            settings = self._settings
            work = partial(run_python, arguments["code"], settings.step_s, self._output_chars, settings.sandbox)
        else:
            work = partial(self._own.call, name, arguments)
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        """Cancel queued calls, without waiting for those in progress, which have time limits. Can be called twice."""
        self._own.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


class AnsweredCalls:
    """Answers the calls of an episode's turns, and counts them and those that failed.

    Args:
        form: how the model writes calls.
        call: runs a call, of which it gets the body; returns the answer, and whether the call succeeded.
    """

    def __init__(self, form: CallFormat, call: Callable[[str], Awaitable[tuple[str, bool]]]) -> None:
        self._form, self._call, self._calls, self._errors = form, call, 0, 0

    @property
    def info(self) -> dict[str, float]:
        """The counts, for the metrics."""
        return {"tool_calls": float(self._calls), "tool_errors": float(self._errors)}

    async def answer(self, text: str, finished: bool) -> list[Message]:
        """Return the answers to a turn's calls, in order; none if a limit has cut it off."""
        calls = self._form.calls(text) if finished else []
        answers: list[Message] = []
        for number, call in enumerate(calls[: MAX_CALLS + 1]):
            if number == MAX_CALLS:
                output, worked = f"error: {len(calls)} calls in one turn, more than {MAX_CALLS}", False
            else:
                output, worked = await self._call(call.body)
            self._calls, self._errors = self._calls + 1, self._errors + (not worked)
            answers.append({"role": "tool", "content": output or "(nothing was printed)"})
        return answers


class ToolsEpisode:
    """One episode; see `hosts.Episode`. It counts the calls, and those that failed."""

    def __init__(self, host: ToolsHost) -> None:
        self._calls = AnsweredCalls(host.calls.format, host.call)

    async def reset(self, seed: int, task: dict[str, Any] | None) -> Turn:
        """Keep the data's prompt as it is; the chat template has described the tools in it."""
        return Turn(None)

    async def step(self, text: str, tokens: Sequence[int], finished: bool) -> Turn:
        """Answer all calls of a turn. A turn without any ends the episode."""
        answers = await self._calls.answer(text, finished)
        return Turn(answers or None, 0.0, not answers, self._calls.info)

    async def close(self) -> None:
        """Do nothing: an episode holds no resources."""


def read_call(calls: Calls, body: str, tools: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Return a call's tool and arguments.

    Args:
        calls: how the model calls its tools.
        body: the call's body.
        tools: the names of the tools.

    Raises:
        ValueError: the call is malformed; with a message for the model.
    """
    name, arguments = calls.format.read(body, calls.tools)
    if name not in tools:
        raise ValueError(f"there is no tool {name!r:.80} (there are: {', '.join(tools)})")
    argument = ARGUMENTS.get(name)  # the arguments of a user's function are checked in its process
    if argument is not None and (list(arguments) != [argument] or not isinstance(arguments[argument], str)):
        raise ValueError(f"{name} takes one argument, the text {argument!r}")
    return name, arguments


def run_python(code: str, seconds: float, most: int, sandbox: SandboxSettings) -> tuple[str, bool]:
    """Run a Python program in a new sandbox. Return its output, and whether it ended by itself in time.

    Args:
        code: the program.
        seconds: time limit of the program.
        most: maximum length of the output, in characters; the rest is cut off.
        sandbox: what the program may do.
    """
    process = SandboxedProcess("megarl.environments.python_tool", sandbox)
    channel, deadline, ready = process.channel, time.monotonic() + START_S, False
    poll = select.poll()
    poll.register(channel.fileno(), select.POLLIN)
    try:
        channel.send(pickle.dumps((code, seconds, most)), seconds)
        while True:
            for message in channel.arrived(1):
                match json.loads(message):
                    case [str()] if not ready:
                        ready, deadline = True, time.monotonic() + seconds + GRACE_S
                    case [str(output)]:
                        return (output if len(output) <= most else output[:most] + "... (cut off)"), True
                    case _:
                        raise BadMessage("no text")
            if not poll.poll(1000 * max(0.0, deadline - time.monotonic())):
                return f"error: not done after {seconds:g} s", False
    except (EOFError, ConnectionError, TimeoutError):
        return f"error: the program ended the interpreter ({printable(process.ended(seconds) or 'it closed its channel')})", False
    except (BadMessage, ValueError, RecursionError):
        return "error: the program has written on the interpreter's own channel", False
    finally:
        process.kill()

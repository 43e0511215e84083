"""Tools of a user's own: functions of a module, called in processes in the sandbox."""

from __future__ import annotations

import json
import queue
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from megarl.config import ConfigError, EnvironmentSettings, SandboxSettings
from megarl.environments.processes import GRACE_S, NO_ANSWER, AskedProcess, Gone


class OwnTools:
    """`settings.workers` processes at most, each of which is started when it is needed and holds all tools.

    Args:
        paths: of the functions, as module:function.
        settings: of the environment.
        most: characters of an answer; the rest is cut off.
    """

    def __init__(self, paths: Sequence[str], settings: EnvironmentSettings, most: int) -> None:
        self._paths, self._settings, self._most = paths, settings, most
        self._idle: queue.SimpleQueue[_ToolProcess | None] = queue.SimpleQueue()
        for _ in range(settings.workers):
            self._idle.put(None)

    def call(self, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        """What a tool answers, and whether it has worked. One that hangs or ends its process fails alone."""
        try:
            given = json.dumps(arguments)
        except RecursionError:
            return f"error: {name}: the arguments are nested too deeply", False
        process = self._idle.get()
        try:
            if process is None:
                process = _ToolProcess(self._paths, self._settings.step_s, self._most, self._settings.sandbox)
                process.schemas()
            return process.call(name, given)
        except Gone as gone:
            assert process is not None
            process.kill()
            process = None
            late = f"not done after {self._settings.step_s:g} s"
            return f"error: {late if str(gone) == 'timeout' else gone}", False
        finally:
            self._idle.put(process)

    def close(self) -> None:
        """Ends the processes that are idle; the others end with their call. Can be called twice."""
        for _ in range(self._idle.qsize()):
            if (process := self._idle.get()) is not None:
                process.kill()
            self._idle.put(None)


@lru_cache(maxsize=8)
def schemas(paths: tuple[str, ...], step_s: float, sandbox: str) -> list[dict[str, Any]]:
    """What a chat template is to tell of these tools, which a process in the sandbox imports.

    Args:
        paths: of the functions.
        step_s: longest time of a call.
        sandbox: its settings, as JSON.

    Raises:
        ConfigError: one of them is no tool.
    """
    process = _ToolProcess(paths, step_s, 0, SandboxSettings.model_validate_json(sandbox))
    try:
        return process.schemas()
    except Gone as gone:
        raise ConfigError(f"environment.source.tools: importing {', '.join(paths)} ended the process ({gone})") from None
    finally:
        process.kill()


class _ToolProcess(AskedProcess):
    def __init__(self, paths: Sequence[str], step_s: float, most: int, sandbox: SandboxSettings) -> None:
        code = [path.partition(":")[0] for path in paths]
        super().__init__("megarl.environments.tool_worker", (list(paths), step_s, most), step_s, sandbox, code)

    def schemas(self) -> list[dict[str, Any]]:
        """Comes first: waits until the tools are imported."""
        self.wait_ready()
        match self.receive(self.step_s + GRACE_S):
            case ["tools", list(found)]:
                return found
        raise Gone(NO_ANSWER)

    def call(self, name: str, given: str) -> tuple[str, bool]:
        """The answer of one tool to arguments in JSON. Gone where the process is done with."""
        match self.asked((name, given)):
            case [str(said), bool(worked)]:
                return said, worked
        raise Gone(NO_ANSWER)

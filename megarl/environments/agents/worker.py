"""A sandboxed process that starts agents: `python -m megarl.environments.agents.worker CHANNEL`, started only by host.py.

It opens the port at which agents ask for the policy, imports the agent, and forks a process for each episode. The port belongs to the
sandbox's own network, if it has one; the run accepts its connections.

Sent at first: the port's descriptor, then ["ready"] or ["refused", text]. Requests are pickled: ("start", episode, seed, task, key) is
answered ["send"], then a descriptor for the outcome arrives, then ["started"] is sent; ("end", episode) is answered ["ended", how]. The
outcome is one line of JSON: ["returned", value] or ["failed", text].
"""

import json
import os
import pickle
import random
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

from megarl.environments.adapters import named
from megarl.environments.protocol import waited
from megarl.sandbox.bounded import MAX_TEXT, Answer, imported, serve
from megarl.sandbox.channel import ANSWER_BYTES, Channel

BACKLOG = 1024
LINE = 1 << 14  # characters of a command's last line

Agent = Callable[[dict[str, Any]], Any]
"""Plays an episode: takes the task, returns the reward."""


def load(source: dict[str, Any]) -> Agent:
    """Return the agent of a configuration. Raises ValueError, starting with the key within `environment.source`, if there is none."""
    if source["function"] is not None:
        try:
            return named(source["function"])
        except ValueError as error:
            raise ValueError(f"function: {str(error).removeprefix('path: ')}") from None
    program = source["command"][0]
    if shutil.which(program) is None:
        raise ValueError(f"command: {program}: no such program in the sandbox (environment.sandbox.readable makes files visible)")
    return partial(_run, source["command"])


def _run(command: list[str], task: dict[str, Any]) -> Any:
    """Run a program; return what is JSON in the last line that it prints, None if that is none."""
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    with suppress(BrokenPipeError), process.stdin:
        process.stdin.write(json.dumps(task).encode())
    last = b""
    while part := process.stdout.readline(LINE):
        last = part if part.strip() else last
    if process.wait():
        raise RuntimeError(f"the command ended with {_how(process.returncode)}")
    try:
        return json.loads(last)
    except (ValueError, RecursionError):
        return None


def _how(code: int) -> str:
    return signal.Signals(-code).name if -code in list(signal.Signals) else f"exit status {code}"


def work(channel: Channel, answer: Answer) -> None:
    """Open the port, import the agent, and start and end agents."""
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    source = pickle.loads(channel.receive())
    listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
    channel.send_descriptor(listener.fileno())
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    agent = imported(lambda: load(source), answer)
    if agent is None:
        return
    pids: dict[int, int] = {}
    while True:
        match pickle.loads(channel.receive()):
            case "start", episode, seed, task, key:
                answer("send")
                with socket.socket(fileno=channel.receive_descriptor()) as outcome:
                    pids[episode] = os.fork()
                    if pids[episode] == 0:
                        channel.close()
                        listener.close()
                        _play(agent, outcome, {**(task or {}), "seed": seed}, _variables(url, key, source["model"]))
                answer("started")
            case "end", episode:
                answer("ended", _end(pids.pop(episode)) if episode in pids else "before it began")


def _variables(url: str, key: str, model: str) -> dict[str, str]:
    """Return the environment variables that clients and agents read."""
    openai = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": key, "OPENAI_MODEL": model}
    return {**openai, "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": key, "ANTHROPIC_MODEL": model}


def _play(agent: Agent, outcome: socket.socket, task: dict[str, Any], variables: dict[str, str]) -> NoReturn:
    """Play an episode in this process, the agent's own, and end it."""
    try:
        os.setsid()
        os.environ.update(variables)
        random.seed(task["seed"])
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(task["seed"] % (1 << 32))
        try:
            line = json.dumps(["returned", waited(agent(task))])
        except BaseException as error:  # including SystemExit
            line = json.dumps(["failed", f"{type(error).__name__}: {error}"[:MAX_TEXT]])
        if len(line) >= ANSWER_BYTES:
            line = json.dumps(["failed", f"bad return: {len(line)} bytes, more than {ANSWER_BYTES}"])
        outcome.sendall(line.encode() + b"\n")
    finally:
        os._exit(0)


def _end(pid: int) -> str:
    """End an agent and the processes that it has started; return how it ended if that was before."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    with suppress(ProcessLookupError):  # which may not have had the time to form its group
        os.kill(pid, signal.SIGKILL)
    return _how(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


if __name__ == "__main__":
    serve(work)

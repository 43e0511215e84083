"""Adapters to the hubs of others. Their packages have Pythons of their own: what is here plays against a server of the tests."""

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from megarl.config import ConfigError, EnvironmentSettings
from megarl.environments.hosts import open_host
from megarl.environments.protocol import Turn
from tests.unit.environments.test_tools import call, said

HUBS = Path(__file__).parents[3] / "megarl" / "environments" / "hubs"


class Sessions(BaseHTTPRequestHandler):
    """A resources server of NeMo Gym with one tool, which counts; and a gymnasium server, which counts turns. A cookie names a session."""

    counts: dict[str, int] = {}
    bodies: list[tuple[str, Any]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name = (self.headers.get("Cookie") or f"session={len(self.counts)}").partition("=")[2]
        self.bodies.append((self.path, body))
        status, answer = 200, self.answered(name, self.path, body)
        if answer is None:
            status, answer = 422 if self.path == "/add" else 404, {"detail": "no"}
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Set-Cookie", f"session={name}")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def answered(self, name: str, path: str, body: Any) -> Any:
        match path:
            case "/seed_session" | "/reset":
                self.counts[name] = body.get("start", 0)
                return {"observation": "count with me"}
            case "/add" if isinstance(body.get("n"), int):
                self.counts[name] += body["n"]
                return {"count": self.counts[name]}
            case "/verify":
                [*_, last] = body["response"]["output"]
                return {"reward": float(last["content"][0]["text"] == str(self.counts[name]) == str(body["expected"]))}
            case "/step":
                self.counts[name] += 1
                over = self.counts[name] == 2
                seen = None if over else f"turn {self.counts[name]}"
                return {"observation": seen, "reward": 0.5, "terminated": over, "truncated": False}
        return None

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def server() -> Iterator[str]:
    serving = ThreadingHTTPServer(("127.0.0.1", 0), Sessions)
    threading.Thread(target=serving.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{serving.server_port}"
    finally:
        serving.shutdown()
        serving.server_close()


def played(turns: Sequence[str], source: dict[str, Any], task: dict[str, Any] | None) -> list[Turn]:
    async def body() -> list[Turn]:
        tree = {"source": source, "step_s": 30, "workers": 1, "sandbox": {"network": True, "memory_gb": 4}}
        host = open_host(EnvironmentSettings.model_validate(tree))
        episode = host.open()
        try:
            return [await episode.reset(3, task), *[await episode.step(text, [], True) for text in turns]]
        finally:
            await episode.close()
            host.close()

    return asyncio.run(body())


def nemo(url: str, **params: Any) -> dict[str, Any]:
    return {"type": "function", "path": "megarl.environments.hubs.nemo_gym:NemoGym", "params": {"url": url, **params}}


def test_tools_of_a_nemo_gym_server_keep_its_session_and_its_verdict_is_the_reward() -> None:
    task = {"prompt": [{"role": "user", "content": "add 2"}], "answer": None, "meta": {"start": 3, "expected": 5}}
    with server() as url:
        turns = played([call("add", n=2) + call("add", n="x"), call("none") + call("verify", reward=1), "5"], nemo(url), task)
        wrong = played([call("add", n=1), "5"], nemo(url), task)
    assert turns[0] == Turn(None) and [text[:40] for text in said(turns[1])] == [
        '{"count": 5}',
        'error: /add: status 422: {"detail": "no"'[:40],
    ]
    assert said(turns[2]) == ['error: /none: status 404: {"detail": "no"}', "error: there is no tool verify"]
    assert (turns[3].reward, turns[3].done, wrong[-1].reward) == (1.0, True, 0.0)
    verified = next(body for path, body in Sessions.bodies if path == "/verify")
    kinds = [item["type"] for item in verified["response"]["output"]]
    assert kinds == ["function_call", "function_call_output", "message"], "a call that the server refused is none"
    assert verified["responses_create_params"]["input"] == task["prompt"] and verified["start"] == 3


def test_a_gymnasium_server_of_nemo_gym_writes_after_the_prompt() -> None:
    with server() as url:
        turns = played(["one", "two"], nemo(url, gymnasium=True), {"prompt": "begin", "answer": None, "meta": {}})
    assert turns[0].messages == [{"role": "user", "content": "begin"}, {"role": "user", "content": "count with me"}]
    assert turns[1] == Turn([{"role": "user", "content": "turn 1"}], 0.5) and turns[2] == Turn(None, 0.5, True)


@pytest.mark.skipif(find_spec("openenv") is not None, reason="it is here")
def test_a_package_that_is_missing_is_named_in_one_line() -> None:
    with pytest.raises(
        ConfigError, match=r"^environment.source.path: .*OpenEnv's package is missing: .* \(pip install openenv==0.10.0\).*$"
    ):
        played([], {"type": "function", "path": "megarl.environments.hubs.openenv:OpenEnv"}, None)
    with pytest.raises(ConfigError, match=r"^environment.source.path: cannot import module 'no_gem': .*No module named 'no_gem'.*$"):
        played([], {"type": "gymnasium", "path": "no_gem:make"}, None)
    bare = [sys.executable, "-S", "-E", str(HUBS / "verifiers_agent.py"), "any"]
    ran = subprocess.run(bare, capture_output=True, text=True, env={"PATH": os.environ["PATH"]}, input="{}")
    assert ran.returncode == 1 and len(ran.stderr.splitlines()) == 1
    assert ran.stderr.startswith("verifiers is missing for ") and ran.stderr.endswith("(pip install verifiers==0.1.14)\n")


def test_an_adapter_is_short() -> None:
    for path in HUBS.glob("*.py"):
        assert len(path.read_text().splitlines()) < 100, path.name


@pytest.mark.skipif(find_spec("gem") is None, reason="pip install --no-deps gem-llm==0.1.0")
def test_a_game_of_gem_is_played_by_its_own_rules() -> None:
    source = {"type": "gymnasium", "path": "gem:make", "params": {"env_id": "game:GuessTheNumber-v0-easy"}}
    turns = played([f"\\boxed{{{guess}}}" for guess in (5, 2, 3, 4)], source, None)
    assert (
        turns[0].messages is not None and "between 1 and 10" in turns[0].messages[0]["content"] and all(not turn.done for turn in turns[:3])
    )

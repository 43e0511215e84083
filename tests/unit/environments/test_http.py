"""Environments over HTTP: the reference server, and servers that talk nonsense."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from megarl.cli import command as cli
from megarl.config import ConfigError, EnvironmentSettings, HttpEnvironment
from megarl.environments import http as http_module
from megarl.environments import server as server_module
from megarl.environments.hosts import open_host
from megarl.environments.http import HttpHost, check
from megarl.environments.protocol import EnvironmentFailed, Turn
from megarl.environments.server import EnvironmentServer
from tests.unit.bad_input.cases import Room, given
from tests.unit.bad_input.environments import EPISODES
from tests.unit.environments.worlds import Counting


@contextmanager
def serving(server: HTTPServer) -> Iterator[str]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def episode(host: HttpHost, seed: int, texts: list[str]) -> list[Turn]:
    one = host.open()
    turns = [await one.reset(seed, None), *[await one.step(text, [1], True) for text in texts]]
    await one.close()
    return turns


def test_episodes_on_the_reference_server_are_those_of_the_class() -> None:
    async def body(url: str) -> list[list[Turn]]:
        host = HttpHost(HttpEnvironment(url=url), 20.0)
        try:
            return await asyncio.gather(*[episode(host, seed, ["a", "stop"]) for seed in (1, 2, 1)])
        finally:
            host.close()

    server = EnvironmentServer(("127.0.0.1", 0), Counting)
    with serving(server) as url:
        first, second, again = asyncio.run(body(url))
    assert first == again != second and not server._episodes
    assert first[1].messages[0]["content"].startswith("turn 1 ")  # type: ignore[index]
    assert (first[2].messages, first[2].reward, first[2].done, first[2].info) == (None, 0.25, True, {"turn": 2.0})


def test_the_reference_server_is_reached_by_all_episodes_of_a_step_at_once() -> None:
    """Before it has taken the first of them."""
    server = EnvironmentServer(("127.0.0.1", 0), Counting)
    with ExitStack() as stack:
        stack.callback(server.server_close)
        for _ in range(128):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=0.5))


class Crowded(Counting):
    """Counts the objects that have begun and are not closed."""

    now = most = 0

    async def reset(self, seed: int) -> str:
        Crowded.now += 1
        Crowded.most = max(Crowded.most, Crowded.now)
        return await super().reset(seed)

    async def step(self, text: str, tokens: Sequence[int], finished: bool) -> tuple[str, float, bool, dict[str, float]]:
        if text == "fail":
            raise ValueError(text)
        return await super().step(text, tokens, finished)

    async def close(self) -> None:
        Crowded.now -= 1


def test_episodes_of_lost_clients_expire(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """One whose step is under way does not."""
    with EnvironmentServer(("127.0.0.1", 0), Counting) as server:
        gone, waiting, asked = (server.answer("reset", {"seed": seed})["episode"] for seed in (1, 2, 3))
        assert set(server._episodes) == {gone, waiting, asked}
        monkeypatch.setattr(server_module, "IDLE_S", 0.2)
        time.sleep(0.3)
        server.answer("step", {"episode": asked, "text": "a", "tokens": [1], "finished": True})
        with server._episodes[waiting].lock:
            new = server.answer("reset", {"seed": 4})["episode"]
        assert set(server._episodes) == {waiting, asked, new}
    assert capsys.readouterr().err == f"episode {gone}, of a client that is gone: ValueError: nobody minds\n"


def test_no_step_reaches_an_environment_that_is_closing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Watched(Counting):
        """Says at its end whether a step would have to wait."""

        lock: threading.Lock

        async def close(self) -> None:
            alone.append(self.lock.locked())

    alone = list[bool]()
    with EnvironmentServer(("127.0.0.1", 0), Watched) as server, ThreadPoolExecutor(2) as threads:
        closed, idle = (server.answer("reset", {"seed": seed})["episode"] for seed in (1, 2))
        for episode in server._episodes.values():
            episode.environment.lock = episode.lock
        with server._episodes[closed].lock:  # as a step that is under way holds it
            step = threads.submit(server.answer, "step", {"episode": closed, "text": "a", "tokens": [1], "finished": True})
            time.sleep(0.2)
            close = threads.submit(server.answer, "close", {"episode": closed})
            while closed in server._episodes:
                time.sleep(0.01)
        with pytest.raises(KeyError, match=closed):
            step.result()
        assert close.result() == {}
        monkeypatch.setattr(server_module, "IDLE_S", 0.0)
        server.answer("reset", {"seed": 3})
        assert idle not in server._episodes and alone == [True, True]


def test_max_concurrent_limits_the_open_episodes() -> None:
    """Whatever becomes of them: some fail, one is called off while it waits."""

    async def body(url: str) -> list[bool]:
        host = open_host(EnvironmentSettings(source=HttpEnvironment(url=url), step_s=20.0, max_concurrent=3))

        async def played(seed: int) -> bool:
            one = host.open()
            try:
                await one.reset(seed, None)
                return (await one.step("fail" if seed % 4 == 0 else "stop", [1], True)).done
            except EnvironmentFailed:
                return False
            finally:
                await one.close()

        try:
            begun = [host.open() for _ in range(4)]
            for one in begun[:3]:
                await one.reset(1, None)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(begun[3].reset(1, None), 0.2)
            assert Crowded.now == Crowded.most == 3
            for one in begun:
                await one.close()
                await one.close()  # twice makes no more room
            return await asyncio.gather(*map(played, range(12)))
        finally:
            host.close()

    with serving(EnvironmentServer(("127.0.0.1", 0), Crowded)) as url:
        assert asyncio.run(body(url)) == [seed % 4 > 0 for seed in range(12)]
    assert (Crowded.now, Crowded.most) == (0, 3)


def test_an_environment_that_fails_to_reset_is_closed_and_the_client_gets_the_reason() -> None:
    class Refusing(Counting):
        closed = 0

        async def reset(self, seed: int) -> str:
            raise ValueError(f"no seed {seed}")

        async def close(self) -> None:
            Refusing.closed += 1
            await super().close()  # which raises

    with EnvironmentServer(("127.0.0.1", 0), Refusing) as server, pytest.raises(ValueError, match="^no seed 1$"):
        server.answer("reset", {"seed": 1})
    assert Refusing.closed == 1 and not server._episodes


ANSWERS: dict[int, tuple[Any, str]] = {
    0: (b"no json", "bad return: /reset answered b'no json', not a JSON object"),
    1: ({"observation": "x"}, "bad return: /reset answered without 'episode'"),
    2: ({"episode": "a", "observation": ""}, "bad return: reset returned no text"),
    3: ({"episode": "a", "observation": 5}, "bad return: reset returned 5 (int)"),
    4: (b"x" * (2 << 20), "bad return: /reset answered more than 1048576 bytes"),
    5: (503, "status 503: "),
    6: (307, "status 307: "),
    7: ("late", "timeout"),
    8: ("slow", "timeout"),
}
STEP_S = 0.5


class Nonsense(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        answer, _ = ANSWERS[json.loads(self.rfile.read(int(self.headers["Content-Length"])))["seed"]]
        if answer == "late":
            time.sleep(1.0)
            return
        if answer == "slow":  # a byte now and then is never late by itself
            with suppress(OSError):
                for line in [b"HTTP/1.0 200 OK\r\n", *[b"X: y\r\n"] * 19]:
                    self.wfile.write(line)
                    time.sleep(STEP_S / 2)
            return
        self.send_response(answer if isinstance(answer, int) else 200)
        if answer == 307:
            self.send_header("Location", "http://127.0.0.1:1/")
        self.end_headers()
        self.wfile.write(answer if isinstance(answer, bytes) else b"" if isinstance(answer, int) else json.dumps(answer).encode())

    def log_message(self, *_: Any) -> None:
        pass


def test_a_malformed_answer_of_a_server_ends_that_episode() -> None:
    async def body(url: str) -> list[str]:
        host, said = HttpHost(HttpEnvironment(url=url), STEP_S), []
        for seed in ANSWERS:
            begun = time.monotonic()
            with pytest.raises(EnvironmentFailed) as failed:
                await host.open().reset(seed, None)
            said.append(str(failed.value))
            assert ANSWERS[seed][0] != "slow" or time.monotonic() - begun < 10 * STEP_S / 2
        host.close()
        nobody = HttpHost(HttpEnvironment(url="http://127.0.0.1:1"), 5.0)
        with pytest.raises(EnvironmentFailed, match="^no answer: "):
            await nobody.open().reset(1, None)
        nobody.close()
        return said

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Nonsense)) as url:
        said = asyncio.run(body(url))
    for (_, expected), found in zip(ANSWERS.values(), said, strict=True):
        assert found.startswith(expected) or found == "timeout", (expected, found)


class DeafToClose(BaseHTTPRequestHandler):
    """Never answers a /close while `held` is set; `closes` counts them."""

    held, closes = threading.Event(), list[str]()

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/close":
            self.closes.append(asked["episode"])
            if self.held.is_set():
                self.rfile.read()  # until the client hangs up
                return
        data = json.dumps({"episode": str(asked.get("seed")), "observation": "hello"}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


def test_slow_closes_of_a_server_delay_no_episode_and_are_reported_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here one after another would take 12 s. All are sent in the end, unless the host is closed first."""
    monkeypatch.setattr(http_module, "CLOSE_S", 1.0)

    async def body(url: str) -> float:
        host = HttpHost(HttpEnvironment(url=url, connections=1), 20.0)
        episodes = [host.open() for _ in range(12)]
        for seed, one in enumerate(episodes):
            await one.reset(seed, None)
        begun = time.monotonic()
        await asyncio.gather(*(one.close() for one in episodes))
        seconds = time.monotonic() - begun
        DeafToClose.held.clear()
        while len(DeafToClose.closes) < len(episodes):
            await asyncio.sleep(0.05)
        host.close()
        return seconds

    DeafToClose.held.set()
    with serving(ThreadingHTTPServer(("127.0.0.1", 0), DeafToClose)) as url:
        assert asyncio.run(asyncio.wait_for(body(url), 60)) < 6
    assert capsys.readouterr().err == f"megarl: warning: environment.source.url={url}: /close: timeout\n"


def test_the_reference_server_answers_a_close_though_a_step_hangs_and_ends_the_episode_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hanging(Counting):
        async def step(self, text: str, tokens: Sequence[int], finished: bool) -> tuple[str, float, bool, dict[str, float]]:
            begun.set()
            assert goes_on.wait(60)
            return await super().step(text, tokens, finished)

        async def close(self) -> None:
            ended.append(goes_on.is_set())

    begun, goes_on, ended = threading.Event(), threading.Event(), list[bool]()
    monkeypatch.setattr(server_module, "BUSY_S", 0.2)
    with EnvironmentServer(("127.0.0.1", 0), Hanging) as server, ThreadPoolExecutor(1) as threads:
        episode = server.answer("reset", {"seed": 1})["episode"]
        step = {"episode": episode, "text": "a", "tokens": [1], "finished": True}
        hangs = threads.submit(server.answer, "step", step)
        assert begun.wait(20)
        with pytest.raises(TimeoutError, match=r"^the step before has not returned in 0\.2 s$"):
            server.answer("step", step)
        assert server.answer("close", {"episode": episode}) == {} and ended == []
        goes_on.set()
        assert hangs.result(20)["observation"] and ended == [True]


def test_a_missing_token_variable_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^environment\.source\.token_env: the environment variable MEGARL_NO_TOKEN is not set$"):
        check(HttpEnvironment(url="http://127.0.0.1:1", token_env="MEGARL_NO_TOKEN"))


def test_a_missing_environment_server_is_a_warning_in_a_check_and_refused_at_the_start(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As one of rewards: where the checks run it may not be reached, or not be up yet."""
    arguments = given("environment={source: {type: http, url: 'http://127.0.0.1:1'}}", *EPISODES)(Room(tmp_path, tiny_model, "train"))
    for more, status, kind in ((["--check"], 0, "warning: from here"), ([], 2, "error")):
        assert cli.main(["train", *arguments, *more]) == status
        line = capsys.readouterr().err.splitlines()[0]
        assert line.startswith(f"megarl: {kind}: environment.source: reset(seed=1): no answer: ConnectionRefusedError")

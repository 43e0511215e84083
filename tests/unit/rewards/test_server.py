"""The HTTP side of `megarl serve`, with a model that needs no ranks: scores, scores together, many clients, the end."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest

from megarl.config import HttpReward
from megarl.host import http_server
from megarl.rewards import server as module
from megarl.rewards.http import HttpScorer
from megarl.rewards.score import RewardUnavailable, Score, ScoreRequest
from tests.unit.rewards.scoring_server import HEAD, TOKEN, Lengths, ask, asking, assert_alive, eventually, raw, serving, until_waiting


@pytest.fixture
def model() -> Lengths:
    return Lengths()


def test_requests_that_wait_are_scored_together_and_each_gets_its_own(model: Lengths) -> None:
    model.free.clear()
    with serving(model) as server, ThreadPoolExecutor(8) as pool:
        first = pool.submit(ask, server.port, asking("a"))
        eventually(lambda: model.calls == [["a"]])
        others = {}
        for n in range(4):  # one after another, so that their order is known
            others[n] = pool.submit(ask, server.port, asking(*["x" * n] * n, "y"))
            until_waiting(server, n + 1)
        malformed = pool.submit(ask, server.port, asking("x", 7))
        assert malformed.result() == (400, {"error": "sample 1: 7 is no text"}), "its own error, and at once"
        assert ask(server.port, asking()) == (200, {"scores": []}), "a health check waits for nobody"
        model.free.set()
        assert first.result() == (200, {"scores": [1.0]})
        for n, other in others.items():
            assert other.result() == (200, {"scores": [float(n)] * n + [1.0]})
    assert len(model.calls) == 2 and len(model.calls[1]) == 0 + 1 + 2 + 3 + 4


def test_samples_scored_in_one_batch_are_bounded(model: Lengths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TOGETHER", 4)
    model.free.clear()
    with serving(model) as server, ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(ask, server.port, asking("a"))]
        eventually(lambda: len(model.calls) == 1)
        answers += [pool.submit(ask, server.port, asking("b", "c", "d")) for _ in range(5)]
        until_waiting(server, 5)
        model.free.set()
        assert [answer.result()[0] for answer in answers] == [200] * 6
    assert [len(call) for call in model.calls] == [1, 6, 6, 3]


def test_a_disconnected_client_is_not_scored(model: Lengths) -> None:
    model.free.clear()
    with serving(model) as server, ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, server.port, asking("a"))
        eventually(lambda: model.calls == [["a"]])
        body = asking("gone")
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            until_waiting(server, 1)
        until_waiting(server, 0)
        model.free.set()
        assert first.result()[0] == 200
        assert_alive(server.port)
    assert model.calls == [["a"], ["abc"]]


def test_a_model_failure_reaches_every_client_and_the_caller(model: Lengths) -> None:
    model.free.clear()
    model.failure = RuntimeError("rank 1 is gone")
    with serving(model) as server, ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(ask, server.port, asking("a")) for _ in range(3)]
        eventually(lambda: len(model.calls) == 1 and len(server._scoring + server._waiting) == 3)
        model.free.set()
        with pytest.raises(RuntimeError, match="rank 1 is gone"):
            server.wait()
        assert [answer.result() for answer in answers] == [(500, {"error": "RuntimeError: rank 1 is gone"})] * 3


def test_an_idle_server_notices_the_death_of_its_ranks(model: Lengths) -> None:
    """So that what has happened to its ranks is seen before a client comes."""

    def look() -> None:
        looks.append(time.monotonic())
        if len(looks) == 3:
            raise RuntimeError("rank 1 is gone")

    looks = list[float]()
    with serving(model) as server, pytest.raises(RuntimeError, match="rank 1 is gone"):
        server.wait(look)
    assert looks[-1] - looks[0] < 20


def test_hundreds_of_clients_at_a_time_are_answered(model: Lengths) -> None:
    async def client(port: int, number: int) -> tuple[bytes, list[float]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await connected.wait()
        body = asking("x" * number)
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        head, _, answer = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
        return head.partition(b"\r\n")[0], json.loads(answer)["scores"]

    async def all_of_them(port: int) -> list[tuple[bytes, list[float]]]:
        clients = [asyncio.create_task(client(port, number)) for number in range(400)]
        await asyncio.sleep(0.2)
        connected.set()
        return await asyncio.gather(*clients)

    connected = asyncio.Event()
    with serving(model) as server:
        answers = asyncio.run(asyncio.wait_for(all_of_them(server.port), 60))
    assert answers == [(b"HTTP/1.1 200 OK", [float(number)]) for number in range(400)]
    assert len(model.calls) < 400, "some of them waited, and were scored together"


def test_connections_beyond_the_limit_wait(model: Lengths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "CONNECTIONS", 3)
    monkeypatch.setattr(http_server, "HEADERS_S", 0.5)
    with serving(model) as server, ExitStack() as stack:
        before = time.monotonic()
        for _ in range(5):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port))).sendall(b"POST /")
        assert_alive(server.port)
        assert time.monotonic() - before > 0.4, "until those that say nothing were left"


def test_a_100_continue_is_sent_only_after_the_token(model: Lengths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "LINGER_S", 0.1)
    body = asking("abc")
    head = HEAD + b"Expect: 100-continue\r\nContent-Length: %d\r\n" % len(body)
    with serving(model, TOKEN) as server:
        assert raw(server.port, head + b"\r\n").startswith(b"HTTP/1.1 401 ")
        found = raw(server.port, head + f"Authorization: Bearer {TOKEN}\r\n\r\n".encode(), body)
        assert found.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n") and found.endswith(b'{"scores": [3.0]}')


def test_our_client_and_our_server_understand_each_other(model: Lengths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", TOKEN)
    monkeypatch.setattr(http_server, "LINGER_S", 20.0)
    requests = [ScoreRequest("question", "x" * n, "", {}, True) for n in range(200)]
    model.read = lambda samples: [sample["response"] for sample in samples]  # type: ignore[method-assign]
    with serving(model, TOKEN) as server:
        source = HttpReward(url=f"http://127.0.0.1:{server.port}/score", token_env="MY_TOKEN", batch_size=7, backoff_s=0.01)
        assert HttpScorer(source, 16, True).score(requests) == [Score(float(n)) for n in range(200)]
        monkeypatch.setenv("MY_TOKEN", "other")
        large = [ScoreRequest("question", "x" * (30 << 20), "", {}, True)]
        with pytest.raises(RewardUnavailable, match=r"status 401 Unauthorized: .*another token is asked for.* \(1 attempt,"):
            HttpScorer(source, 1, True).score(large)


ALONE = """
import os, resource, signal, sys, time
from megarl.host import termination
from megarl.rewards.server import RewardServer
class Model:
    def read(self, samples):
        if "slow" in samples: print("slow", flush=True)
        return samples
    def scores(self, read):
        if "slow" in read: time.sleep(60)
        if read == ["take"]:
            try:
                while True: taken.append(os.open("/dev/null", os.O_RDONLY))
            except OSError: pass
        return [float(len(one)) for one in read]
taken = []
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
termination.install()
signal.signal(signal.SIGUSR1, lambda *_: [os.close(taken.pop()) for _ in list(taken)])
try:
    with RewardServer(Model(), "127.0.0.1", 0, "/score", None) as server:
        print(server.port, flush=True)
        server.wait()
except KeyboardInterrupt:
    sys.exit(130)
"""


@contextmanager
def alone() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server in a process of its own, which may have 64 files open."""
    process = subprocess.Popen(
        [sys.executable, "-c", ALONE],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def test_a_server_out_of_descriptors_answers_once_it_has_some() -> None:
    with alone() as (process, port), ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(20)]
        with ThreadPoolExecutor(100) as pool:
            answers = [pool.submit(ask, port, asking("x" * n)) for n in range(1, 101)]
            assert [answer.result() for answer in answers] == [(200, {"scores": [float(n)]}) for n in range(1, 101)]
        for client in idle:
            client.close()
        assert ask(port, asking("take")) == (200, {"scores": [4.0]})
        with socket.create_connection(("127.0.0.1", port)), ThreadPoolExecutor(1) as pool:  # the descriptor that the answer gave back
            answer = pool.submit(ask, port, asking("abc"))
            time.sleep(0.3)
            assert not answer.done(), "there is none left"
            process.send_signal(signal.SIGUSR1)
            assert answer.result() == (200, {"scores": [3.0]})
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=20) == ("", "") and process.returncode == 143


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_server_and_waiting_clients_get_503(number: signal.Signals, status: int) -> None:
    with alone() as (process, port), ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(ask, port, asking("slow")) for _ in range(2)]
        assert process.stdout is not None
        assert [process.stdout.readline() for _ in waiting] == ["slow\n"] * 2
        with socket.create_connection(("127.0.0.1", port)):
            begun = time.monotonic()
            process.send_signal(number)
            assert [answer.result() for answer in waiting] == [(503, {"error": "the server has been stopped"})] * 2
            assert process.communicate(timeout=20) == ("", "") and process.returncode == status
        assert time.monotonic() - begun < 5


def test_a_signal_that_another_thread_took_is_not_lost(model: Lengths) -> None:
    begun = time.monotonic()

    def interrupt() -> None:
        time.sleep(0.5)  # the main thread waits by now
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt), serving(model) as server:
        threading.Thread(target=interrupt, daemon=True).start()
        server.wait()
    assert time.monotonic() - begun < 10

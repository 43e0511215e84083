"""The HTTP side of `megarl serve`, with a model that needs no ranks: clients that are many, slow, uninvited, greedy, or gone."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import psutil
import pytest

from megarl.config import HttpReward
from megarl.rewards import server as module
from megarl.rewards.http import HttpScorer
from megarl.rewards.score import Request, RewardUnavailable, Score
from megarl.rewards.server import Server

TOKEN = "s3cret-of-the-test"
HEAD = b"POST /score HTTP/1.1\r\nHost: test\r\n"


class Lengths:
    """Scores the length of a response, while `free` is set; `calls` are the responses that it was asked for together."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.free = threading.Event()
        self.free.set()
        self.failure: Exception | None = None

    def read(self, samples: Sequence[Any]) -> list[str]:
        for number, sample in enumerate(samples):
            if not isinstance(sample, str):
                raise ValueError(f"sample {number}: {sample} is no text")
        return list(samples)

    def scores(self, read: Sequence[str]) -> list[float]:
        self.calls.append(list(read))
        assert self.free.wait(20)
        if self.failure is not None:
            raise self.failure
        return [float(len(response)) for response in read]


@contextmanager
def serving(model: Lengths, token: str | None = None) -> Iterator[Server]:
    with Server(model, "127.0.0.1", 0, "/score", token) as server:
        yield server


@pytest.fixture
def model() -> Lengths:
    return Lengths()


def ask(port: int, body: bytes | Iterator[bytes], **headers: str) -> tuple[int, Any]:
    """An iterator is sent in chunks, without a Content-Length."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("POST", "/score", body, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def asking(*samples: Any) -> bytes:
    return json.dumps({"samples": samples}).encode()


def raw(port: int, *parts: bytes, pause_s: float = 0.0) -> bytes:
    """All that comes back for these bytes until the server hangs up."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        try:
            for part in parts:
                client.sendall(part)
                time.sleep(pause_s)
        except OSError:
            pass  # it has hung up: what has it said?
        found = b""
        try:
            while part := client.recv(1 << 16):
                found += part
        except ConnectionResetError:
            pass
        return found


def eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def assert_alive(port: int, **headers: str) -> None:
    assert ask(port, asking("abc"), **headers) == (200, {"scores": [3.0]})


def test_requests_that_wait_are_scored_together_and_each_gets_its_own(model: Lengths) -> None:
    model.free.clear()
    with serving(model) as server, ThreadPoolExecutor(8) as pool:
        first = pool.submit(ask, server.port, asking("a"))
        eventually(lambda: model.calls == [["a"]])
        others = {}
        for n in range(4):  # one after another, so that their order is known
            others[n] = pool.submit(ask, server.port, asking(*["x" * n] * n, "y"))
            eventually(lambda n=n: server._waiting.qsize() == n + 1)
        malformed = pool.submit(ask, server.port, asking("x", 7))
        assert malformed.result() == (400, {"error": "sample 1: 7 is no text"}), "its own error, and at once"
        assert ask(server.port, asking()) == (200, {"scores": []}), "a health check waits for nobody"
        model.free.set()
        assert first.result() == (200, {"scores": [1.0]})
        for n, other in others.items():
            assert other.result() == (200, {"scores": [float(n)] * n + [1.0]})
    assert len(model.calls) == 2 and len(model.calls[1]) == 0 + 1 + 2 + 3 + 4


def test_a_bounded_number_of_samples_is_scored_together(model: Lengths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TOGETHER", 4)
    model.free.clear()
    with serving(model) as server, ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(ask, server.port, asking("a"))]
        eventually(lambda: len(model.calls) == 1)
        answers += [pool.submit(ask, server.port, asking("b", "c", "d")) for _ in range(5)]
        eventually(lambda: server._waiting.qsize() == 5)
        model.free.set()
        assert [answer.result()[0] for answer in answers] == [200] * 6
    assert [len(call) for call in model.calls] == [1, 6, 6, 3]


def test_a_client_that_has_gone_is_not_scored(model: Lengths) -> None:
    model.free.clear()
    with serving(model) as server, ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, server.port, asking("a"))
        eventually(lambda: model.calls == [["a"]])
        body = asking("gone")
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            eventually(lambda: server._waiting.qsize() == 1)
        eventually(lambda: len(server._unanswered) == 1)
        model.free.set()
        assert first.result()[0] == 200
        assert_alive(server.port)
    assert model.calls == [["a"], ["abc"]]


def test_where_the_model_fails_every_client_is_told_and_the_caller_too(model: Lengths) -> None:
    model.free.clear()
    model.failure = RuntimeError("rank 1 is gone")
    with serving(model) as server, ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(ask, server.port, asking("a")) for _ in range(3)]
        eventually(lambda: len(server._unanswered) == 3)
        model.free.set()
        with pytest.raises(RuntimeError, match="rank 1 is gone"):
            server.wait()
        assert [answer.result() for answer in answers] == [(500, {"error": "RuntimeError: rank 1 is gone"})] * 3


def test_hundreds_of_clients_at_a_time_are_answered(model: Lengths) -> None:
    async def client(port: int, number: int) -> tuple[bytes, list[float]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await connected.wait()
        body = asking("x" * number)
        writer.write(HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
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


def test_no_more_connections_than_the_bound_are_taken_and_the_others_wait(model: Lengths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CONNECTIONS", 3)
    monkeypatch.setattr(module, "HEADERS_S", 0.5)
    with serving(model) as server, ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port))).sendall(b"POST /")
        before = time.monotonic()
        assert_alive(server.port)
        assert time.monotonic() - before > 0.4, "until those that say nothing were left"


def test_slow_bytes_are_not_awaited(model: Lengths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HEADERS_S", 0.4)
    monkeypatch.setattr(module, "BODY_S", 0.4)
    with serving(model) as server, ThreadPoolExecutor(8) as pool:
        drip = [b"x"] * 100
        silent = pool.submit(raw, server.port)
        header = pool.submit(raw, server.port, HEAD, *drip, pause_s=0.05)
        body = pool.submit(raw, server.port, HEAD + b"Content-Length: 1000\r\n\r\n", *drip[:20], pause_s=0.05)
        chunks = pool.submit(raw, server.port, HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *[b"1\r\nx\r\n"] * 20, pause_s=0.05)
        begun = time.monotonic()
        assert silent.result() == b"" and header.result() == b""
        for slow in (body, chunks):
            assert slow.result().startswith(b"HTTP/1.1 408 ") and b"the request was not complete within 0.4 s" in slow.result()
        assert time.monotonic() - begun < 15
        assert_alive(server.port)


@pytest.mark.parametrize("given", [{}, {"Authorization": "Bearer other"}, {"Authorization": f"Basic {TOKEN}"}])
def test_without_the_token_no_body_is_kept(model: Lengths, given: dict[str, str]) -> None:
    size = 32 << 20

    def body() -> Iterator[bytes]:
        for _ in range(size >> 20):
            yield piece

    piece = bytes(1 << 20)
    with serving(model, TOKEN) as server, ThreadPoolExecutor(8) as pool:
        before = psutil.Process().memory_info().rss
        peak = 0
        answers = [pool.submit(ask, server.port, body(), **given, **{"Content-Length": str(size)}) for _ in range(8)]
        while not all(answer.done() for answer in answers):
            peak = max(peak, psutil.Process().memory_info().rss)
            time.sleep(0.005)
        assert [answer.result() for answer in answers] == [(401, {"error": "another token is asked for"})] * 8
        assert peak - before < 64 << 20, "of 256 MB"
        assert_alive(server.port, Authorization=f"Bearer {TOKEN}")


def test_a_token_of_strange_letters_is_another_token(model: Lengths) -> None:
    with serving(model, TOKEN) as server:
        found = raw(server.port, HEAD + b"Connection: close\r\nAuthorization: Bearer \xff\xc3\r\nContent-Length: 0\r\n\r\n")
        assert found.startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize(
    ("length", "status"), [(b"9" * 5000, 400), (b"9" * 30, 400), (b"%d" % (1 << 62), 413), (b"-1", 400), (b"+5", 400), (b"x", 400)]
)
def test_a_length_that_is_none_is_refused(model: Lengths, length: bytes, status: int, capfd: pytest.CaptureFixture[str]) -> None:
    with serving(model) as server:
        found = raw(server.port, HEAD + b"Connection: close\r\nContent-Length: " + length + b"\r\n\r\n")
        head, _, body = found.partition(b"\r\n\r\n")
        assert head[8:].startswith(b" %d " % status) and list(json.loads(body)) == ["error"]
        assert_alive(server.port)
    assert capfd.readouterr() == ("", "")


def test_chunks_are_taken_within_the_same_bound(model: Lengths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGEST", 1 << 20)
    with serving(model) as server:
        assert ask(server.port, iter([b'{"samples": ["a', b'bc", ""]}'])) == (200, {"scores": [3.0, 0.0]})
        too_large = (413, {"error": "a request has at most 1048576 bytes"})
        assert ask(server.port, iter([bytes(1 << 16)] * 64)) == too_large
        assert ask(server.port, bytes((1 << 20) + 1)) == too_large
        found = raw(server.port, HEAD + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n\r\n")
        assert found.startswith(b"HTTP/1.0 400 ")
        assert_alive(server.port)


def test_a_short_body_stays_a_short_one(model: Lengths) -> None:
    bomb = gzip.compress(bytes(50 << 20), 1)
    with serving(model) as server:
        before = psutil.Process().memory_info().rss
        assert ask(server.port, bomb, **{"Content-Encoding": "gzip"})[0] == 400
        assert psutil.Process().memory_info().rss - before < 20 << 20
        assert_alive(server.port)


def test_all_bodies_together_are_bounded(model: Lengths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGEST_ALL", 1000)
    model.free.clear()
    with serving(model) as server, ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, server.port, asking("x" * 800))
        eventually(lambda: len(model.calls) == 1)
        assert ask(server.port, asking("x" * 800)) == (503, {"error": "all requests together have at most 1000 bytes"})
        model.free.set()
        assert first.result() == (200, {"scores": [800.0]})
        assert ask(server.port, asking("x" * 800))[0] == 200, "its bytes are given back"


MALFORMED = {
    "nothing": b"",
    "cut": b'{"samples": ["a"',
    "no text": b"\xff\xfe\xff",
    "a list": b"[]",
    "no list": b'{"samples": 1}',
    "deep": b"[" * 100_000,
    "long number": b'{"samples": [' + b"9" * 5000 + b"]}",
    "lone surrogate": b'{"samples": [{"\\ud800": 1}]}',
    "no sample": b'{"samples": [null]}',
    "control characters": b'{"samples": [["\\u001b[31m\\u202e", "\\u0007"]]}',
    "long": b'{"samples": [["' + b"x" * 100_000 + b'"]]}',
}


@pytest.mark.parametrize("body", MALFORMED.values(), ids=MALFORMED)
def test_what_is_malformed_is_refused_in_one_printable_line(model: Lengths, body: bytes) -> None:
    with serving(model) as server:
        status, answer = ask(server.port, body)
        assert status == 400 and answer["error"].isprintable() and 0 < len(answer["error"]) <= 500
        assert_alive(server.port)
    assert model.calls == [["abc"]]


@pytest.mark.parametrize("sent", [b"SSH-2.0-OpenSSH_9.2\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"POST\r\n\r\n"])
def test_what_is_no_http_leaves_no_line_on_the_console(model: Lengths, sent: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    with serving(model) as server:
        assert raw(server.port, sent).startswith(b"HTTP/1.0 400 ")
        assert_alive(server.port)
    assert capfd.readouterr() == ("", "")


def test_another_address_or_method_is_refused(model: Lengths) -> None:
    with serving(model) as server:
        for line, status in ((b"POST /other", 404), (b"POST /score?x=1", 404), (b"GET /score", 405), (b"DELETE /score", 405)):
            found = raw(server.port, line + b" HTTP/1.1\r\nHost: test\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
            assert found.startswith(b"HTTP/1.1 %d " % status), line


def test_a_client_that_waits_for_leave_to_send_gets_it_after_its_token(model: Lengths) -> None:
    body = asking("abc")
    head = HEAD + b"Connection: close\r\nExpect: 100-continue\r\nContent-Length: %d\r\n" % len(body)
    with serving(model, TOKEN) as server:
        assert raw(server.port, head + b"\r\n").startswith(b"HTTP/1.1 401 ")
        found = raw(server.port, head + f"Authorization: Bearer {TOKEN}\r\n\r\n".encode(), body)
        assert found.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n") and found.endswith(b'{"scores": [3.0]}')


def test_our_client_and_our_server_understand_each_other(model: Lengths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", TOKEN)
    requests = [Request("question", "x" * n, "", {}, True) for n in range(200)]
    model.read = lambda samples: [sample["response"] for sample in samples]  # type: ignore[method-assign]
    with serving(model, TOKEN) as server:
        source = HttpReward(url=f"http://127.0.0.1:{server.port}/score", token_env="MY_TOKEN", batch_size=7, backoff_s=0.01)
        assert HttpScorer(source, 16, True).score(requests) == [Score(float(n)) for n in range(200)]
        monkeypatch.setenv("MY_TOKEN", "other")
        large = [Request("question", "x" * (30 << 20), "", {}, True)]
        with pytest.raises(RewardUnavailable, match=r"status 401 Unauthorized: .*another token is asked for.* \(1 attempt,"):
            HttpScorer(source, 1, True).score(large)


ALONE = """
import os, resource, sys, time
from megarl import termination
from megarl.rewards.server import Server
class Model:
    def read(self, samples): return samples
    def scores(self, read):
        if "slow" in read: time.sleep(60)
        if read == ["take"]:
            try:
                while True: taken.append(os.open("/dev/null", os.O_RDONLY))
            except OSError: pass
            timer = __import__("threading").Timer(0.5, lambda: [os.close(one) for one in taken])
            timer.daemon = True
            timer.start()
        return [float(len(one)) for one in read]
taken = []
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
termination.install()
try:
    with Server(Model(), "127.0.0.1", 0, "/score", None) as server:
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
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # a suite in the background hands down a deaf one
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
    finally:
        process.kill()
        process.communicate()


def test_a_server_without_descriptors_answers_when_it_has_some_and_says_nothing() -> None:
    with alone() as (process, port), ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(20)]
        with ThreadPoolExecutor(100) as pool:
            answers = [pool.submit(ask, port, asking("x" * n)) for n in range(1, 101)]
            assert [answer.result() for answer in answers] == [(200, {"scores": [float(n)]}) for n in range(1, 101)]
        for client in idle:
            client.close()
        assert ask(port, asking("take")) == (200, {"scores": [4.0]})
        begun = time.monotonic()
        with socket.create_connection(("127.0.0.1", port)):  # has the descriptor that the answer before gave back
            assert_alive(port)
        assert time.monotonic() - begun > 0.2, "there was none in between"
        process.send_signal(signal.SIGTERM)
        assert process.communicate(timeout=20) == ("", "") and process.returncode == 143


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_at_once_and_who_waits_is_told(number: signal.Signals, status: int) -> None:
    with alone() as (process, port), ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(ask, port, asking("slow")) for _ in range(2)]
        time.sleep(0.3)
        with socket.create_connection(("127.0.0.1", port)):
            begun = time.monotonic()
            process.send_signal(number)
            assert [answer.result() for answer in waiting] == [(503, {"error": "the server has been stopped"})] * 2
            assert process.communicate(timeout=20) == ("", "") and process.returncode == status
        assert time.monotonic() - begun < 5

"""Clients of `megarl serve` that are slow, uninvited, greedy, malformed, or no clients at all."""

import gzip
import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from megarl.host import http_server
from megarl.rewards import server as module
from tests.unit.rewards.scoring_server import HEAD, TOKEN, Lengths, ask, asking, assert_alive, eventually, raw, serving


@pytest.fixture
def model() -> Lengths:
    return Lengths()


def test_slow_headers_and_bodies_run_into_their_time_limits(model: Lengths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "HEADERS_S", 0.4)
    monkeypatch.setattr(http_server, "BODY_S", 0.4)
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


def test_a_client_that_does_not_read_its_answer_is_disconnected(model: Lengths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "UNREAD_S", 0.3)
    body = asking(*[""] * 1_000_000)
    with serving(model) as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        client.connect(("127.0.0.1", server.port))
        client.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        eventually(lambda: len(model.calls) == 1)
        mine = client.getsockname()
        eventually(lambda: not any(one.raddr == mine for one in psutil.Process().net_connections("tcp")))
        assert_alive(server.port)


def test_a_connection_serves_one_request(model: Lengths) -> None:
    with serving(model) as server:
        found = raw(server.port, (HEAD + b"Content-Length: 0\r\n\r\n") * 1000)
        assert found.count(b"HTTP/1.1 400 ") == 1 and b"Connection: close" in found


@pytest.mark.parametrize("given", [{}, {"Authorization": "Bearer other"}, {"Authorization": f"Basic {TOKEN}"}])
def test_bodies_without_the_token_are_not_read(model: Lengths, given: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "LINGER_S", 20.0)
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


def test_a_token_of_invalid_bytes_gets_401(model: Lengths) -> None:
    with serving(model, TOKEN) as server:
        found = raw(server.port, HEAD + b"Authorization: Bearer \xff\xc3\r\nContent-Length: 0\r\n\r\n")
        assert found.startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize(
    ("length", "status"), [(b"9" * 5000, 400), (b"9" * 30, 400), (b"%d" % (1 << 62), 413), (b"-1", 400), (b"+5", 400), (b"x", 400)]
)
def test_an_invalid_content_length_is_refused(
    model: Lengths, length: bytes, status: int, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "LINGER_S", 0.1)
    with serving(model) as server:
        found = raw(server.port, HEAD + b"Content-Length: " + length + b"\r\n\r\n")
        head, _, body = found.partition(b"\r\n\r\n")
        assert head[8:].startswith(b" %d " % status) and list(json.loads(body)) == ["error"]
        assert_alive(server.port)
    assert capfd.readouterr() == ("", "")


def test_chunked_bodies_have_the_same_size_limit(model: Lengths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGEST", 1 << 20)
    with serving(model) as server:
        assert ask(server.port, iter([b'{"samples": ["a', b'bc", ""]}'])) == (200, {"scores": [3.0, 0.0]})
        too_large = (413, {"error": "a request has at most 1048576 bytes"})
        assert ask(server.port, iter([bytes(1 << 16)] * 64)) == too_large
        assert ask(server.port, bytes((1 << 20) + 1)) == too_large
        found = raw(server.port, HEAD + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n\r\n")
        assert found.startswith(b"HTTP/1.0 400 ")
        assert_alive(server.port)


def test_a_compressed_body_is_not_inflated(model: Lengths) -> None:
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
def test_malformed_requests_get_400_with_one_printable_line(model: Lengths, body: bytes) -> None:
    with serving(model) as server:
        status, answer = ask(server.port, body)
        assert status == 400 and answer["error"].isprintable() and 0 < len(answer["error"]) <= 500
        assert_alive(server.port)
    assert model.calls == [["abc"]]


@pytest.mark.parametrize("sent", [b"SSH-2.0-OpenSSH_9.2\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", b"POST\r\n\r\n"])
def test_bytes_that_are_not_http_print_nothing(model: Lengths, sent: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    with serving(model) as server:
        assert raw(server.port, sent).startswith(b"HTTP/1.0 400 ")
        assert_alive(server.port)
    assert capfd.readouterr() == ("", "")


def test_another_address_or_method_is_refused(model: Lengths) -> None:
    with serving(model) as server:
        for line, status in ((b"POST /other", 404), (b"POST /score?x=1", 404), (b"GET /score", 405), (b"DELETE /score", 405)):
            found = raw(server.port, line + b" HTTP/1.1\r\nHost: test\r\nContent-Length: 0\r\n\r\n")
            assert found.startswith(b"HTTP/1.1 %d " % status), line

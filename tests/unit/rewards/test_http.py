"""Rewards over HTTP, against a real server that answers, lies, dawdles, fails and dies."""

import itertools
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from megarl.cli import command as cli
from megarl.config import ConfigError, HttpReward, RewardSettings
from megarl.host.http_client import elsewhere
from megarl.rewards.score import RewardUnavailable, Score, ScoreRequest
from megarl.rewards.sources import check, open_scorer
from tests.e2e.job import RL

Answer = Callable[[BaseHTTPRequestHandler, dict[str, Any]], None]
TOKEN = "s3cret-of-the-test"


def reply(handler: BaseHTTPRequestHandler, body: bytes, status: int = 200, promised: int | None = None) -> None:
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body) if promised is None else promised))
    handler.end_headers()
    handler.wfile.write(body)


def length_of(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    """The length of the response, and whether it equals the answer, as parts do."""
    scores = [{"score": len(ask["response"]), "right": ask["response"] == ask["answer"], "note": "x"} for ask in body["samples"]]
    reply(handler, json.dumps({"scores": scores}).encode())


class Server:
    """A server on a port of its own (0) or a given one; `bodies` and `headers` are what it was sent."""

    def __init__(self, answer: Answer, port: int = 0) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.bodies.append(body)
                server.headers.append(dict(self.headers))
                answer(self, body)

            def log_message(self, *_: Any) -> None:
                pass

        class Quiet(ThreadingHTTPServer):
            def handle_error(self, *_: Any) -> None:
                """A client that has hung up is what these tests are about."""

        self.http = Quiet(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/score?set=1"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        self.http.shutdown()
        self.http.server_close()


@contextmanager
def serving(answer: Answer, port: int = 0) -> Iterator[Server]:
    server = Server(answer, port)
    try:
        yield server
    finally:
        server.stop()


def settings(url: str, workers: int = 1, require_finished: bool = True, **more: Any) -> RewardSettings:
    source = HttpReward(url=url, **{"timeout_s": 0.3, "attempts": 3, "backoff_s": 0.02, "deadline_s": 20.0, **more})
    return RewardSettings(source=source, workers=workers, require_finished=require_finished)


def ask(response: str, answer: str = "", *, finished: bool = True) -> ScoreRequest:
    return ScoreRequest("question", response, answer, {"index": 3}, finished)


def score(given: RewardSettings, *responses: str) -> list[Score]:
    with open_scorer(given) as scorer:
        return scorer.score([ask(response) for response in responses])


def test_scores_come_in_the_order_of_the_responses_with_their_parts() -> None:
    with serving(length_of) as server:
        given = settings(server.url, workers=3, batch_size=4)
        check(given)
        assert server.bodies == [{"samples": []}], "the question whether it is there"
        with open_scorer(given) as scorer:
            assert scorer.score([]) == []
            scores = scorer.score([ask("x" * (n % 7), "xxx") for n in range(41)])
        assert scores == [Score(n % 7, {"right": float(n % 7 == 3)}) for n in range(41)]
        assert max(len(body["samples"]) for body in server.bodies) == 4 and len(server.bodies) == 1 + 11
        sample = {"prompt": "question", "response": "x", "answer": "xxx", "meta": {"index": 3}, "finished": True}
        assert any(sample in body["samples"] for body in server.bodies)


def test_truncated_responses_reach_the_function_only_if_they_may_score() -> None:
    with serving(length_of) as server:
        requests = [ask("abc"), ask("abcd", finished=False)]
        for required, expected in ((True, [(3.0, True), (0.0, False)]), (False, [(3.0, True), (4.0, True)])):
            with open_scorer(settings(server.url, require_finished=required)) as scorer:
                assert [(found.value, found.scored) for found in scorer.score(requests)] == expected
        assert [[sample["finished"] for sample in body["samples"]] for body in server.bodies] == [[True], [True, False]]


def test_a_response_that_the_server_cannot_score_fails_alone() -> None:
    body = b'{"scores": [1, null, {"score": null, "note": 2}, {"score": 0.5, "note": 2}]}'
    with serving(lambda handler, _: reply(handler, body)) as server:
        missing = Score(None, error="abstained")
        assert score(settings(server.url), "a", "b", "c", "d") == [Score(1.0), missing, missing, Score(0.5, {"note": 2.0})]


LIES = {
    "not JSON": (b"<html>hello</html>", "the answer is not JSON: b'<html>hello</html>'"),
    "no scores": (b'{"score": [1, 1]}', "the answer has no list `scores`"),
    "a list": (b"[1, 1]", "the answer has no list `scores`"),
    "one too few": (b'{"scores": [1]}', "1 scores for 2 samples"),
    "one too many": (b'{"scores": [1, 1, 1]}', "3 scores for 2 samples"),
    "nan": (b'{"scores": [1, NaN]}', r"score 1 of 2: nan \(float\), not a finite number"),
    "infinite": (b'{"scores": [-Infinity, 1]}', r"score 0 of 2: -inf \(float\), not a finite number"),
    "huge": (b'{"scores": [1' + b"0" * 400 + b", 1]}", r"score 0 of 2: a number beyond the limit of 1e\+09"),
    "text": (b'{"scores": ["1", 1]}', r"score 0 of 2: '1' \(str\), not a finite number"),
    "no score": (b'{"scores": [{"value": 1}, 1]}', r"score 0 of 2: a dict without 'score' \(keys: value\)"),
    "beyond": (b'{"scores": [{"score": 1e308}, 1]}', r"score 0 of 2: score 1e\+308, beyond the limit of 1e\+09"),
    "deep": (b"[" * 100_000, "the answer is not JSON"),
    "endless": (b"1" * (1 << 18), "the answer is longer than 196608 bytes for 2 samples"),
}


@pytest.mark.parametrize("lie", LIES)
def test_malformed_server_answers_are_refused_at_once(lie: str) -> None:
    body, message = LIES[lie]
    with serving(lambda handler, _: reply(handler, body)) as server:
        with pytest.raises(RewardUnavailable, match=rf"^reward\.source\.url: http://127\.\S+ {message}.* \(1 attempt, 0\.\d s\)$"):
            score(settings(server.url), "a", "b")
        assert len(server.bodies) == 1
        with pytest.raises(ConfigError, match=r"^reward\.source\.url: http://127"):
            check(settings(server.url))


@pytest.mark.parametrize(("status", "asked"), [(404, 1), (401, 1), (302, 1), (204, 1), (500, 3), (503, 3), (429, 3), (408, 3)])
def test_temporary_http_statuses_are_retried(status: int, asked: int) -> None:
    with serving(lambda handler, _: reply(handler, b"the reason\n" if status != 204 else b"", status)) as server:
        attempts = f"{asked} attempt{'s' if asked > 1 else ''}"
        said, last = "No Content" if status == 204 else ".*: the reason", r"; reward\.source\.attempts=3" if asked > 1 else ""
        with pytest.raises(RewardUnavailable, match=rf"status {status} {said} \({attempts}, \d+\.\d s{last}\)$"):
            score(settings(server.url), "a")
        assert len(server.bodies) == asked


CONTROL = "\x1b[31mred\x07\u202e"


def strange_reason(handler: BaseHTTPRequestHandler, _: Any) -> None:
    handler.send_response(404, "\x1b[31mred" + "!" * 10_000)
    handler.end_headers()


def strange_language(handler: BaseHTTPRequestHandler, _: Any) -> None:
    handler.wfile.write(b"\x1b[31mred" + b"!" * 10_000 + b"\r\n\r\n")


def strange_body(handler: BaseHTTPRequestHandler, _: Any) -> None:
    reply(handler, (CONTROL * 10_000).encode(), 403)


def strange_keys(handler: BaseHTTPRequestHandler, _: Any) -> None:
    reply(handler, json.dumps({"scores": [{f"{CONTROL}{n}": 1 for n in range(1000)}]}).encode())


def strange_score(handler: BaseHTTPRequestHandler, _: Any) -> None:
    reply(handler, json.dumps({"scores": [CONTROL]}).encode())


@pytest.mark.parametrize("fault", [strange_reason, strange_language, strange_body, strange_keys, strange_score])
def test_a_servers_message_is_printed_escaped_and_shortened(fault: Answer) -> None:
    with serving(fault) as server:
        with pytest.raises(RewardUnavailable, match="red") as refused:
            score(settings(server.url), "a")
        assert str(refused.value).isprintable() and len(str(refused.value)) < 600
        with pytest.raises(ConfigError) as refused_at_start:
            check(settings(server.url))
        assert str(refused_at_start.value).isprintable() and len(str(refused_at_start.value)) < 600


def test_parts_of_a_score_have_printable_names_and_those_that_are_no_numbers_are_left_out() -> None:
    parts = {"score": 1, f"a{CONTROL}\n": 2, "b" * 100: 3, "c": None, "d": float("nan")}
    with serving(lambda handler, _: reply(handler, json.dumps({"scores": [parts]}).encode())) as server:
        [found] = score(settings(server.url), "a")
    assert list(found.parts.values()) == [2.0, 3.0] and all(name.isprintable() and len(name) <= 60 for name in found.parts)


def vanish(handler: BaseHTTPRequestHandler, _: Any) -> None:
    handler.connection.shutdown(socket.SHUT_RDWR)


def break_off(handler: BaseHTTPRequestHandler, _: Any) -> None:
    reply(handler, b'{"scores": [1]', promised=100)


def other_language(handler: BaseHTTPRequestHandler, _: Any) -> None:
    handler.wfile.write(b"SSH-2.0-OpenSSH_9.2\r\n")


def silent(handler: BaseHTTPRequestHandler, _: Any) -> None:
    time.sleep(1.5)


def drip(handler: BaseHTTPRequestHandler, _: Any) -> None:
    """A byte at a time, each well within the time limit."""
    handler.send_response(200)
    handler.send_header("Content-Length", "100")
    handler.end_headers()
    try:
        for _ in range(100):
            handler.wfile.write(b" ")
            time.sleep(0.05)
    except OSError:
        pass


@pytest.mark.parametrize("fault", [vanish, break_off, other_language, silent, drip])
def test_transient_faults_are_retried_and_lasting_ones_end_the_call(fault: Answer) -> None:
    count = 0

    def twice(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        nonlocal count
        count += 1
        (fault if count <= 2 else length_of)(handler, body)

    with serving(twice) as server:
        assert score(settings(server.url), "abc") == [Score(3.0, {"right": 0.0})] and count == 3
        count = -10
        begun = time.monotonic()
        with pytest.raises(RewardUnavailable, match=r"\(3 attempts, \d+\.\d s; reward\.source\.attempts=3\)$"):
            score(settings(server.url), "abc")
        assert time.monotonic() - begun < 20, "three times 0.3 s and the pauses"


def test_the_silence_of_the_last_attempt_does_not_hide_what_the_server_said_before() -> None:
    count = itertools.count()

    def busy_then_silent(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        if next(count) < 2:
            reply(handler, b"out of memory", 503)
        else:
            silent(handler, body)

    with serving(busy_then_silent) as server:
        said = r"status 503 Service Unavailable: out of memory \(2 times\); then silent for 0\.3 s \(reward\.source\.timeout_s=0\.3\)"
        with pytest.raises(RewardUnavailable, match=rf": {said} \(3 attempts, \d\.\d s; reward\.source\.attempts=3\)$"):
            score(settings(server.url), "a")


@pytest.mark.parametrize(("status", "attempts"), [(503, "3 attempts"), (401, "1 attempt")])
def test_a_status_is_reported_even_if_its_body_does_not_arrive(status: int, attempts: str) -> None:
    """And one that no further attempt would change is not asked for again."""

    def without_body(handler: BaseHTTPRequestHandler, _: Any) -> None:
        reply(handler, b"", status, promised=10)
        time.sleep(1.5)

    with serving(without_body) as server:
        said = rf"status {status} \w+.*: an answer that has not ended after 0\.3 s \(reward\.source\.timeout_s=0\.3\)"
        with pytest.raises(RewardUnavailable, match=rf": {said} \({attempts}, "):
            score(settings(server.url), "a")


def test_an_expired_deadline_names_its_key_and_the_servers_answers() -> None:
    """Whether it comes in a pause, in an attempt that it cuts short, or before a request has been sent at all."""

    def refuse(handler: BaseHTTPRequestHandler, _: Any) -> None:
        reply(handler, b"busy", 503)

    def first_only(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        (length_of if body["samples"][0]["response"] == "first" else silent)(handler, body)

    def slow(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        time.sleep(0.2)
        length_of(handler, body)

    last = r"; reward\.source\.deadline_s=0\.5, within which {} of {} requests were answered\)$"
    cases: list[tuple[Answer, dict[str, Any], str]] = [
        (refuse, {"backoff_s": 5.0}, r"Unavailable: busy \(1 attempt, 0\.\d s" + last.format(0, 2)),
        (
            first_only,
            {"timeout_s": 9.0},
            r"silent for 0\.\d s \(reward\.source\.deadline_s=0\.5\) \(1 attempt, 0\.\d s" + last.format(1, 2),
        ),
    ]
    for answer, more, said in cases:
        with serving(answer) as server, pytest.raises(RewardUnavailable, match=said):
            score(settings(server.url, batch_size=1, attempts=9, deadline_s=0.5, **more), "first", "other")
    with (
        serving(slow) as server,
        pytest.raises(RewardUnavailable, match=r"(take too long \(0 attempts|silent for 0\.\d s .*)" + last.format(r"\d", 12)),
    ):
        score(settings(server.url, batch_size=1, deadline_s=0.5), *"abcdefghijkl")


def test_the_server_of_evaluations_is_named_by_its_own_key() -> None:
    with serving(length_of) as server:
        given = settings(server.url)
    with (
        open_scorer(given, key="reward.eval") as scorer,
        pytest.raises(RewardUnavailable, match=r"^reward\.eval\.url: .*reward\.eval\.attempts=3\)$"),
    ):
        scorer.score([ask("a")])


def test_a_lost_rank_is_detected_while_a_reward_server_is_silent() -> None:
    """As by the session's watch: what it raises ends the scoring at once, and the server's sockets."""
    hung_up = threading.Event()

    def until_hung_up(handler: BaseHTTPRequestHandler, _: Any) -> None:
        handler.rfile.read()
        hung_up.set()

    def look() -> None:
        if time.monotonic() - begun > 0.5:
            raise RuntimeError("rank 1 has been stopped")

    with serving(until_hung_up) as server:
        begun = time.monotonic()
        with open_scorer(settings(server.url, timeout_s=20.0), look=look) as scorer, pytest.raises(RuntimeError, match="rank 1"):
            scorer.score([ask("a")])
        assert time.monotonic() - begun < 10 and hung_up.wait(10)


def test_a_server_that_is_down_is_refused_before_work_starts_and_in_the_run() -> None:
    with serving(length_of) as server:
        given = settings(server.url)
        check(given)
    with pytest.raises(
        ConfigError, match=r"^reward\.source\.url: http://127\.0\.0\.1:\d+/score\?set=1: ConnectionRefusedError: .*refused$"
    ):
        check(given)
    with pytest.raises(RewardUnavailable, match=r"ConnectionRefusedError.* \(3 attempts, \d+\.\d s; reward\.source\.attempts=3\)$"):
        score(given, "a")


@pytest.mark.parametrize("key", ["reward.source", "reward.eval"])
def test_a_server_that_is_down_is_a_warning_before_the_run_and_refused_at_its_start(
    key: str, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--check` and `megarl slurm` run elsewhere, perhaps before the server does."""
    with serving(length_of) as server:
        pass
    (tmp_path / "job.yaml").write_text(RL.format(runs=tmp_path / "out", model=tiny_model))
    run = [str(tmp_path / "job.yaml"), f"{key}={{type: http, url: '{server.url}'}}"]
    for command, status, kind in (
        (["train", *run, "--check"], 0, "warning: from here"),
        (["slurm", *run, "--nodes", "1", "--dry-run"], 0, "warning: from here"),
        (["train", *run], 2, "error"),
    ):
        assert cli.main(command) == status
        [line] = [line for line in capsys.readouterr().err.splitlines() if "ConnectionRefused" in line]
        assert line.startswith(f"megarl: {kind}: {key}.url: {server.url}: ConnectionRefusedError: ") and not (tmp_path / "out").exists()


def test_an_address_is_read_from_a_file_when_the_run_starts(tmp_path: Path) -> None:
    (file := tmp_path / "address").write_text("")
    given = RewardSettings(source=HttpReward(url_file=file, attempts=1, timeout_s=5.0))
    with serving(length_of) as first:
        file.write_text(f"{first.url}\n")
        check(given)
        with open_scorer(given) as scorer:
            with serving(length_of) as second:
                file.write_text(second.url)
                assert scorer.score([ask("abc")])[0].value == 3, "that of the start"
                assert score(given, "ab")[0].value == 2 and len(second.bodies) == 1, "a run that starts again finds the new one"
            with pytest.raises(RewardUnavailable, match=rf"^reward\.source\.url_file: {file}: {second.url[:-6]}.*Refused"):
                score(given, "a")
    for text, fault in (("", "'' is not an http"), ("ftp://a", "'ftp://a' is not an http"), (None, "No such file or directory")):
        file.unlink() if text is None else file.write_text(text)
        with pytest.raises(ConfigError, match=rf"^reward\.source\.url_file: {file}: {fault}"):
            check(given)
        with elsewhere():
            check(given)
    for url, place in ((None, None), ("http://a", file)):
        with pytest.raises(ValueError, match="either url or url_file says where the server is"):
            HttpReward(url=url, url_file=place)


def test_a_server_that_dies_in_the_middle_leaves_no_score_at_all() -> None:
    answered = itertools.count(1)  # each thread gets a number of its own

    def mortal(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        length_of(handler, body)
        if next(answered) == 5:
            threading.Thread(target=server.stop).start()

    server = Server(mortal)
    with open_scorer(settings(server.url, batch_size=1)) as scorer:
        assert [found.value for found in scorer.score([ask("a"), ask("ab")])] == [1, 2]
        with pytest.raises(RewardUnavailable, match="3 attempts"):
            scorer.score([ask("a")] * 10_000)
    assert len(server.bodies) >= 5


def test_the_first_failed_batch_is_reported_not_those_it_stopped() -> None:
    both = threading.Barrier(2)

    def refused_while_another_waits(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        both.wait(20)
        if body["samples"][0]["response"] == "first":
            assert handler.rfile.read() == b"", "until the client hangs up"
        else:
            reply(handler, b"too long", 400)

    with serving(refused_while_another_waits) as server:
        begun = time.monotonic()
        with pytest.raises(RewardUnavailable, match=r"status 400 Bad Request: too long \(1 attempt, \d+\.\d s\)$"):
            score(settings(server.url, workers=2, batch_size=1, timeout_s=20.0), "first", "second")
        assert time.monotonic() - begun < 10, "the other is not waited for"


def test_a_handshake_that_drips_does_not_outlast_the_limit() -> None:
    """The beginning of a TLS record of 16 KiB, then a byte at a time."""

    def drip(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, suppress(OSError):
                    connection.sendall(b"\x16\x03\x03\x40\x00\x02\x00\x3f\xfc")
                    for _ in range(100):
                        connection.sendall(b"x")
                        time.sleep(0.05)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=drip, args=(listener,), daemon=True).start()
        begun = time.monotonic()
        with pytest.raises(RewardUnavailable, match=r"no connection within 0\.3 s \(reward\.source\.timeout_s=0\.3\) \(1 attempt,"):
            score(settings(f"https://127.0.0.1:{listener.getsockname()[1]}/", attempts=1), "a")
        assert time.monotonic() - begun < 4, "of 5 s"
        listener.shutdown(socket.SHUT_RDWR)


def test_a_token_reaches_the_server_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("MY_REWARD_TOKEN", TOKEN)
    with serving(lambda handler, _: reply(handler, b"", 401)) as server:
        given = settings(server.url, token_env="MY_REWARD_TOKEN")
        with pytest.raises(RewardUnavailable) as refused:
            score(given, "a")
        assert server.headers[0]["Authorization"] == f"Bearer {TOKEN}"
    assert TOKEN not in str(refused.value) + caplog.text + given.model_dump_json()
    for value, fault in ((None, "is not set"), ("", "is not set"), ("a\nHost: b", "holds no token")):
        if value is None:
            monkeypatch.delenv("MY_REWARD_TOKEN")
        else:
            monkeypatch.setenv("MY_REWARD_TOKEN", value)
        with pytest.raises(ConfigError, match=rf"^reward\.source\.token_env: the environment variable MY_REWARD_TOKEN {fault}"):
            check(given)

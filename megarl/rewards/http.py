"""Score responses through a user's server: any program that speaks this protocol.

    POST <url>    Content-Type: application/json    Authorization: Bearer <token>, where token_env names one
    {"samples": [{"prompt": "2+2=", "response": "4", "answer": "4", "meta": {...}, "finished": true}, ...]}

    200    {"scores": [1.0, {"score": 0.5, "format": 1.0}, null, ...]}

One score per sample, in order: a finite number, or an object with a finite number under `score` and parts of the score under other keys
(entries that are not finite numbers are left out). null, alone or under `score`, is no score: the response takes no part. `meta` is the
prompt source's metadata of the prompt. An empty list of samples is a health check, answered with an empty list of scores. A request may be
repeated with the same samples, so scoring must have no side effects.

Failed connections, late answers and the statuses 408, 429 and 5xx are retried, after pauses that double; any other status, and any answer
not as above, is a permanent fault. Either way the outcome is RewardUnavailable, and never a score of 0. It says what the server did in all
attempts, not in the last one alone, and which setting ended them.
"""

from __future__ import annotations

import http.client
import json
import queue
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import urlsplit

from megarl.config import ConfigError, HttpReward
from megarl.config.section import web_address
from megarl.host.http_client import connected, shut, target, token_of, unanswered
from megarl.rewards.score import LOOK_S, Look, RewardUnavailable, Score, ScoreRequest, no_look
from megarl.rewards.verifiers import Abstained, BadReturn, read_return
from megarl.text.display import one_line

MAX_PAUSE_S = 30.0
LARGEST_SCORE = 1 << 16  # bytes of the answer per sample
MAX_URL = 4096  # characters
SHOWN = 200  # bytes shown of an error status' body
MAX_FAULT, MAX_PART = 400, 60  # characters of a message, and of the name of a part of a score
PASSING = (408, 429)  # statuses that may be transient, as may all from 500 on
KINDS = 3  # of faults that an error lists, the latest


class _Fault(Exception):
    """The reason an attempt failed, made safe for a console, since a server may send any text."""

    def __init__(self, text: str) -> None:
        super().__init__(one_line(text, MAX_FAULT))


class _TransientFault(_Fault):
    """A fault that another attempt may not meet."""


class _PermanentFault(_Fault):
    """A fault that every further attempt would meet."""


class _Faults:
    """The faults of several attempts, equal ones counted together; only the latest `KINDS` are kept."""

    def __init__(self) -> None:
        self.total, self._lock = 0, threading.Lock()
        self._counts: dict[str, int] = {}  # in the order in which they were last met

    def add(self, fault: _Fault) -> None:
        with self._lock:
            self.total += 1
            self._counts[str(fault)] = self._counts.pop(str(fault), 0) + 1
            if len(self._counts) > KINDS:
                del self._counts[next(iter(self._counts))]

    def __str__(self) -> str:
        """Return all of them in one line, the latest last."""
        with self._lock:
            counts, total = dict(self._counts), self.total
        earlier = total - sum(counts.values())
        parts = [f"{fault} ({count} times)" if count > 1 and total > count else fault for fault, count in counts.items()]
        return "; then ".join(([f"{earlier} other faults"] if earlier else []) + parts)


def check(source: HttpReward, key: str = "reward.source") -> None:
    """Raise ConfigError if the token is missing or the server does not answer a request without samples, which is sent once.

    Args:
        source: the settings of the server.
        key: the dotted key of these settings in the configuration.
    """
    token = token_of(source.token_env, f"{key}.token_env")
    try:
        url, place = address(source, key)
    except ConfigError as error:
        unanswered(str(error))
        return
    try:
        _exchange(url, token, [], source.timeout_s, f"{key}.timeout_s={source.timeout_s:g}", _ScoreCall(time.monotonic()))
    except (_TransientFault, _PermanentFault) as error:
        unanswered(f"{place}: {error}")


def address(source: HttpReward, key: str) -> tuple[str, str]:
    """Return a server's address, and its description for messages. Raises ConfigError if `url_file` holds no address."""
    if source.url is not None:
        return source.url, f"{key}.url: {source.url}"
    assert source.url_file is not None, "as the configuration has checked"
    place = f"{key}.url_file: {source.url_file}"
    try:
        with source.url_file.open(encoding="utf-8") as file:
            url = web_address(file.read(MAX_URL).strip())
    except OSError as error:
        raise ConfigError(f"{place}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{place}: {error}") from None
    return url, f"{place}: {url}"


class HttpScorer:
    """The client of a reward server.

    Args:
        source: the settings of the server.
        connections: the number of batches, of `source.batch_size` responses each, that may be in flight at a time.
        require_finished: score responses cut by the length limit 0, without sending them.
        key: the dotted key of these settings in the configuration.
        look: see `Look`.
    """

    guarantee = None

    def __init__(
        self, source: HttpReward, connections: int, require_finished: bool, key: str = "reward.source", look: Look = no_look
    ) -> None:
        self._source, self._connections, self._require_finished, self._key, self._look = source, connections, require_finished, key, look
        self._url, self._place = address(source, key)
        self._token = token_of(source.token_env, f"{key}.token_env")

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Return one score per request, in order. With `require_finished`, responses cut by the length limit score 0 without being sent.

        Raises RewardUnavailable after a permanent fault, `source.attempts` attempts of one batch, or `source.deadline_s` seconds.
        """
        numbers = [n for n, request in enumerate(requests) if request.finished or not self._require_finished]
        size = self._source.batch_size
        batches = [numbers[first : first + size] for first in range(0, len(numbers), size)]
        scores = [Score(0.0, scored=False)] * len(requests)
        call = _ScoreCall(time.monotonic(), len(batches))
        pool = ThreadPoolExecutor(self._connections)
        finished = queue.SimpleQueue[Future[list[Score]]]()  # in the order in which they end
        try:
            answers = {pool.submit(self._batch, [requests[n] for n in batch], call): batch for batch in batches}
            for answer in answers:
                answer.add_done_callback(finished.put)
            while call.answered < call.batches:
                self._look()
                try:
                    answer = finished.get(timeout=LOOK_S)
                except queue.Empty:
                    continue
                # The first that fails is the cause: only then are the others stopped.
                for n, score in zip(answers[answer], answer.result(), strict=True):
                    scores[n] = score
                call.answered += 1
        finally:
            call.end()
            pool.shutdown(wait=False, cancel_futures=True)
        return scores

    def _batch(self, requests: list[ScoreRequest], call: _ScoreCall) -> list[Score]:
        """Return the scores of one batch, after as many attempts as it needs and the settings allow."""
        source, pause, end = self._source, self._source.backoff_s, call.begun + self._source.deadline_s
        deadline, faults, last = f"{self._key}.deadline_s={source.deadline_s:g}", _Faults(), list[str]()
        while faults.total < source.attempts and (remaining_s := end - time.monotonic()) > 0:
            within_s, limit = min((source.timeout_s, f"{self._key}.timeout_s={source.timeout_s:g}"), (remaining_s, deadline))
            try:
                return _exchange(self._url, self._token, requests, within_s, limit, call)
            except _PermanentFault as error:
                faults.add(error)
                break
            except _TransientFault as error:
                faults.add(error)
                call.faults.add(error)
            if faults.total < source.attempts and call.ended.wait(min(pause, MAX_PAUSE_S, max(end - time.monotonic(), 0.0))):
                break
            pause *= 2
        else:
            last = [f"{self._key}.attempts={source.attempts}"] if faults.total == source.attempts else []
            if time.monotonic() >= end:
                last.append(f"{deadline}, within which {call.answered} of {call.batches} requests were answered")
        tried = f"{faults.total} attempt{'' if faults.total == 1 else 's'}, {time.monotonic() - call.begun:.1f} s"
        reason = str(faults if faults.total else call.faults) or "its answers take too long"
        raise RewardUnavailable(f"{self._place}: {reason} ({'; '.join([tried, *last])})")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        return None


@dataclass
class _ScoreCall:
    """The shared state of one call of `score`: once a batch has failed for good, or the caller is gone, the other batches stop."""

    begun: float
    batches: int = 1
    answered: int = 0  # batches
    faults: _Faults = field(default_factory=lambda: _Faults())  # of all batches
    ended: threading.Event = field(default_factory=threading.Event)
    sockets: set[socket.socket] = field(default_factory=set)  # open sockets, on which threads may be waiting

    def end(self) -> None:
        self.ended.set()
        for open_socket in list(self.sockets):
            shut(open_socket)


def _exchange(url: str, token: str | None, requests: Sequence[ScoreRequest], within_s: float, limit: str, call: _ScoreCall) -> list[Score]:
    """Send one request and return the scores in its answer, within `within_s` seconds, however slowly the bytes arrive.

    Args:
        url: the server's address.
        token: the bearer token; None: none.
        requests: the responses to score.
        within_s: the time limit.
        limit: the setting that it comes from, and its value.
        call: the call that this is a part of.

    Raises:
        _TransientFault: there was no whole answer, or one with a status that may pass.
        _PermanentFault: the server does not follow the protocol.
    """
    samples = [
        {"prompt": ask.prompt, "response": ask.response, "answer": ask.answer, "meta": ask.meta, "finished": ask.finished}
        for ask in requests
    ]
    body = json.dumps({"samples": samples}, default=str).encode()
    headers = {"Content-Type": "application/json", **({} if token is None else {"Authorization": f"Bearer {token}"})}
    place, most, fault = urlsplit(url), LARGEST_SCORE * (len(samples) + 1), ""
    reached, answer, text, more = False, None, b"", b""
    try:
        with connected(place, within_s, call.sockets) as connection:
            reached = True
            if call.ended.is_set():  # before this socket was among those that `end` shuts down
                raise _TransientFault("another request has failed")
            connection.request("POST", target(place), body, headers)
            answer = connection.getresponse()
            text = answer.read(most)
            more = answer.read(1)
    except (OSError, http.client.HTTPException) as error:
        fault = f"{type(error).__name__}: {error}"
        if isinstance(error, TimeoutError) and error.errno is None:  # the time limit, not the kernel's
            late = "no connection within" if not reached else "silent for" if answer is None else "an answer that has not ended after"
            fault = f"{late} {within_s:.1f} s ({limit})"
    if answer is not None and answer.status != 200:  # whatever became of its body
        detail = fault or text[:SHOWN].decode(errors="replace").strip()
        kind = _TransientFault if answer.status in PASSING or answer.status >= 500 else _PermanentFault
        raise kind(f"status {answer.status} {answer.reason}" + (f": {detail}" if detail else ""))
    if answer is None or fault:
        raise _TransientFault(fault)
    if more:
        raise _PermanentFault(f"the answer is longer than {most} bytes for {len(samples)} samples")
    if answer.length:  # bytes announced by the header that did not arrive
        raise _TransientFault(f"the answer broke off, {answer.length} bytes before its end")
    return _read(text, len(samples))


def _read(text: bytes, samples: int) -> list[Score]:
    """Return the scores in an answer. Raises _PermanentFault if it does not follow the protocol."""
    try:
        reply = json.loads(text)
    except (ValueError, RecursionError):
        raise _PermanentFault(f"the answer is not JSON: {text[:60]!r}") from None
    scores = reply.get("scores") if isinstance(reply, dict) else None
    if not isinstance(scores, list):
        raise _PermanentFault(f"the answer has no list `scores`: {text[:60]!r}")
    if len(scores) != samples:
        raise _PermanentFault(f"{len(scores)} scores for {samples} samples")
    results = []
    for n, score in enumerate(scores):
        try:
            value, parts = read_return(score, f"score {n} of {samples}:")
        except Abstained:
            results.append(Score(None, error="abstained"))
            continue
        except BadReturn as error:
            raise _PermanentFault(str(error)) from None
        results.append(Score(value, {one_line(name, MAX_PART): part for name, part in parts.items()}))
    return results

"""Score responses through a user's server: any program that speaks this protocol.

    POST <url>    Content-Type: application/json    Authorization: Bearer <token>, where token_env names one
    {"samples": [{"prompt": "2+2=", "response": "4", "answer": "4", "meta": {...}, "finished": true}, ...]}

    200    {"scores": [1.0, {"score": 0.5, "format": 1.0}, ...]}

One score per sample, in order: a finite number, or an object with a finite number under `score` and parts of the score under other keys
(entries that are not finite numbers are left out). `meta` is the prompt source's metadata of the prompt. An empty list of samples is a
health check, answered with an empty list of scores. A request may be repeated with the same samples, so scoring must have no side effects.

Failed connections, late answers and the statuses 408, 429 and 5xx are retried, after pauses that double; any other status, and any answer
not as above, is a permanent fault. Either way the outcome is RewardUnavailable, and never a score of 0.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import urlsplit

from megarl.config import ConfigError, HttpReward
from megarl.config.section import web_address
from megarl.http_client import connected, shut, target, token_of, unanswered
from megarl.rewards.score import RewardUnavailable, Score, ScoreRequest
from megarl.rewards.verifiers import BadReturn, read_return
from megarl.text import one_line

LONGEST_PAUSE_S = 30.0
LARGEST_SCORE = 1 << 16  # bytes of the answer per sample
LONGEST_URL = 4096  # characters
SHOWN = 200  # bytes shown of an error status' body
LONGEST_FAULT, LONGEST_PART = 400, 60  # characters of a message, and of the name of a part of a score
PASSING = (408, 429)  # statuses that may be transient, as may all from 500 on


class _Fault(Exception):
    """The reason an attempt failed, made safe for a console, since a server may send any text."""

    def __init__(self, text: str) -> None:
        super().__init__(one_line(text, LONGEST_FAULT))


class _TransientFault(_Fault):
    """A fault that another attempt may not meet."""


class _PermanentFault(_Fault):
    """A fault that every further attempt would meet."""


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
        _exchange(url, token, [], source.timeout_s, _ScoreCall(time.monotonic()))
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
            url = web_address(file.read(LONGEST_URL).strip())
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
    """

    guarantee = None

    def __init__(self, source: HttpReward, connections: int, require_finished: bool, key: str = "reward.source") -> None:
        self._source, self._connections, self._require_finished = source, connections, require_finished
        self._url, self._place = address(source, key)
        self._token = token_of(source.token_env, f"{key}.token_env")

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Return one score per request, in order. With `require_finished`, responses cut by the length limit score 0 without being sent.

        Raises RewardUnavailable after a permanent fault, `source.attempts` attempts of one batch, or `source.deadline_s` seconds.
        """
        asked = [n for n, request in enumerate(requests) if request.finished or not self._require_finished]
        size = self._source.batch_size
        batches = [asked[first : first + size] for first in range(0, len(asked), size)]
        scores = [Score(0.0, scored=False)] * len(requests)
        call = _ScoreCall(time.monotonic())
        pool = ThreadPoolExecutor(self._connections)
        try:
            answers = {pool.submit(self._batch, [requests[n] for n in batch], call): batch for batch in batches}
            for answer in as_completed(answers):  # the first that fails is the cause: only then are the others stopped
                for n, score in zip(answers[answer], answer.result(), strict=True):
                    scores[n] = score
        finally:
            call.end()
            pool.shutdown(wait=False, cancel_futures=True)
        return scores

    def _batch(self, requests: list[ScoreRequest], call: _ScoreCall) -> list[Score]:
        """Return the scores of one batch, after as many attempts as it needs and the settings allow."""
        source, pause = self._source, self._source.backoff_s
        end = call.begun + source.deadline_s
        fault: _Fault = _PermanentFault(f"not all scores within deadline_s={source.deadline_s:g}")
        attempt = 0
        while attempt < source.attempts and (left := end - time.monotonic()) > 0:
            attempt += 1
            try:
                return _exchange(self._url, self._token, requests, min(source.timeout_s, left), call)
            except _PermanentFault as error:
                fault = error
                break
            except _TransientFault as error:
                fault = error
            if attempt < source.attempts and call.ended.wait(min(pause, LONGEST_PAUSE_S, max(end - time.monotonic(), 0.0))):
                break
            pause *= 2
        tried = f"{attempt} attempt{'' if attempt == 1 else 's'}, {time.monotonic() - call.begun:.1f} s"
        raise RewardUnavailable(f"{self._place}: {fault} ({tried})")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        return None


@dataclass
class _ScoreCall:
    """The shared state of one call of `score`: once a batch has failed for good, or the caller is gone, the other batches stop."""

    begun: float
    ended: threading.Event = field(default_factory=threading.Event)
    sockets: set[socket.socket] = field(default_factory=set)  # open sockets, on which threads may be waiting

    def end(self) -> None:
        self.ended.set()
        for open_socket in list(self.sockets):
            shut(open_socket)


def _exchange(url: str, token: str | None, requests: Sequence[ScoreRequest], within_s: float, call: _ScoreCall) -> list[Score]:
    """Send one request and return the scores in its answer, within `within_s` seconds, however slowly the bytes arrive."""
    samples = [
        {"prompt": ask.prompt, "response": ask.response, "answer": ask.answer, "meta": ask.meta, "finished": ask.finished}
        for ask in requests
    ]
    body = json.dumps({"samples": samples}, default=str).encode()
    headers = {"Content-Type": "application/json", **({} if token is None else {"Authorization": f"Bearer {token}"})}
    place, limit = urlsplit(url), LARGEST_SCORE * (len(samples) + 1)
    try:
        with connected(place, within_s, call.sockets) as connection:
            connection.request("POST", target(place), body, headers)
            answer = connection.getresponse()
            text = answer.read(limit)
            more = answer.read(1)
    except TimeoutError:
        raise _TransientFault(f"no answer within {within_s:.1f} s") from None
    except (OSError, http.client.HTTPException) as error:
        raise _TransientFault(f"{type(error).__name__}: {error}") from None
    if answer.status != 200:
        said = text[:SHOWN].decode(errors="replace").strip()
        kind = _TransientFault if answer.status in PASSING or answer.status >= 500 else _PermanentFault
        raise kind(f"status {answer.status} {answer.reason}" + (f": {said}" if said else ""))
    if more:
        raise _PermanentFault(f"the answer is longer than {limit} bytes for {len(samples)} samples")
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
    found = []
    for n, score in enumerate(scores):
        try:
            value, parts = read_return(score, f"score {n} of {samples}:")
        except BadReturn as error:
            raise _PermanentFault(str(error)) from None
        found.append(Score(value, {one_line(name, LONGEST_PART): part for name, part in parts.items()}))
    return found

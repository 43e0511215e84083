"""Many requests to one of the user's servers at a time, each repeated until it has an answer, within one deadline for all of them.

Failed connections, late answers and the statuses 408, 429 and 5xx are retried, after pauses that double; any other status, and any answer
that the caller cannot read, is a permanent fault. The error says what the server did in all attempts, not in the last one alone, and which
setting ended them.
"""

import http.client
import queue
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar
from urllib.parse import urlsplit

from megarl.host.http_client import connected, shut, target
from megarl.text.display import one_line

MAX_PAUSE_S = 30.0
SHOWN = 200  # bytes shown of an error status' body
MAX_FAULT = 400  # characters of a message
PASSING = (408, 429)  # statuses that may be transient, as may all from 500 on
KINDS = 3  # of faults that an error lists, the latest

Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)


class Fault(Exception):
    """The reason an attempt failed, made safe for a console, since a server may send any text."""

    def __init__(self, text: str) -> None:
        super().__init__(one_line(text, MAX_FAULT))


class TransientFault(Fault):
    """A fault that another attempt may not meet."""


class PermanentFault(Fault):
    """A fault that every further attempt would meet."""


class Unanswered(Exception):
    """A request has no answer; the message is one line with the settings key, the server, the attempts and the seconds they took."""


class HttpLimits(Protocol):
    """The settings that bound the requests to a server."""

    @property
    def timeout_s(self) -> float: ...
    @property
    def attempts(self) -> int: ...
    @property
    def backoff_s(self) -> float: ...
    @property
    def deadline_s(self) -> float: ...


@dataclass(frozen=True)
class Server:
    """Where requests go."""

    url: str
    place: str  # its description for messages
    token: str | None  # the bearer token; None: none


@dataclass(frozen=True)
class HttpQuestion(Generic[Result_co]):
    """One request."""

    body: bytes | None  # JSON; None: it is a GET
    most: int  # the largest number of bytes of its answer
    what: str  # what it asks about, for messages
    read: Callable[[bytes], Result_co]  # reads the answer; PermanentFault if it does not follow the protocol


class _Faults:
    """The faults of several attempts, equal ones counted together; only the latest `KINDS` are kept."""

    def __init__(self) -> None:
        self.total, self._lock = 0, threading.Lock()
        self._counts: dict[str, int] = {}  # in the order in which they were last met

    def add(self, fault: Fault) -> None:
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


@dataclass
class Round:
    """The shared state of requests that are made together: once one has failed for good, or the caller is gone, the others stop."""

    begun: float = field(default_factory=time.monotonic)
    questions: int = 1
    answered: int = 0
    faults: _Faults = field(default_factory=lambda: _Faults())  # of all requests
    ended: threading.Event = field(default_factory=threading.Event)
    sockets: set[socket.socket] = field(default_factory=set)  # open sockets, on which threads may be waiting

    def end(self) -> None:
        self.ended.set()
        for open_socket in list(self.sockets):
            shut(open_socket)


def ask_all(
    server: Server,
    limits: HttpLimits,
    key: str,
    count: int,
    question: Callable[[int], HttpQuestion[Result]],
    connections: int,
    look: Callable[[], object],
    look_s: float,
) -> list[Result]:
    """Return what the server answers to each of `count` questions.

    Args:
        server: the server.
        limits: its settings.
        key: their dotted key in the configuration.
        count: the number of questions.
        question: makes one of them, when its turn comes.
        connections: how many may be in flight at a time.
        look: called every `look_s` seconds of the wait; what it raises ends the requests.
        look_s: see `look`.

    Raises:
        Unanswered: after a permanent fault, `limits.attempts` attempts of one question, or `limits.deadline_s` seconds.
    """
    results, together = dict[int, Result](), Round(questions=count)
    pool, finished = ThreadPoolExecutor(connections), queue.SimpleQueue[Future[Result]]()  # in the order in which they end
    try:
        answers = {pool.submit(_answered, server, limits, key, question, n, together): n for n in range(count)}
        for answer in answers:
            answer.add_done_callback(finished.put)
        while together.answered < count:
            look()
            try:
                answer = finished.get(timeout=look_s)
            except queue.Empty:
                continue
            # The first that fails is the cause: only then are the others stopped.
            results[answers[answer]] = answer.result()
            together.answered += 1
    finally:
        together.end()
        pool.shutdown(wait=False, cancel_futures=True)
    return [results[n] for n in range(count)]


def _answered(
    server: Server, limits: HttpLimits, key: str, question: Callable[[int], HttpQuestion[Result]], number: int, call: Round
) -> Result:
    """Return the answer to one question, after as many attempts as it needs and the settings allow."""
    request, pause, end = question(number), limits.backoff_s, call.begun + limits.deadline_s
    deadline, faults, last = f"{key}.deadline_s={limits.deadline_s:g}", _Faults(), list[str]()
    while faults.total < limits.attempts and (remaining_s := end - time.monotonic()) > 0:
        within_s, limit = min((limits.timeout_s, f"{key}.timeout_s={limits.timeout_s:g}"), (remaining_s, deadline))
        try:
            return exchange(server, request, within_s, limit, call)
        except PermanentFault as error:
            faults.add(error)
            break
        except TransientFault as error:
            faults.add(error)
            call.faults.add(error)
        if faults.total < limits.attempts and call.ended.wait(min(pause, MAX_PAUSE_S, max(end - time.monotonic(), 0.0))):
            break
        pause *= 2
    else:
        last = [f"{key}.attempts={limits.attempts}"] if faults.total == limits.attempts else []
        if time.monotonic() >= end:
            last.append(f"{deadline}, within which {call.answered} of {call.questions} requests were answered")
    tried = f"{faults.total} attempt{'' if faults.total == 1 else 's'}, {time.monotonic() - call.begun:.1f} s"
    reason = str(faults if faults.total else call.faults) or "its answers take too long"
    raise Unanswered(f"{server.place}: {reason} ({'; '.join([tried, *last])})")


def exchange(server: Server, question: HttpQuestion[Result], within_s: float, limit: str, call: Round) -> Result:
    """Send one request and return what its answer says, within `within_s` seconds, however slowly the bytes arrive.

    Args:
        server: the server.
        question: the request.
        within_s: the time limit.
        limit: the setting that it comes from, and its value.
        call: the requests that this is one of.

    Raises:
        TransientFault: there was no whole answer, or one with a status that may pass.
        PermanentFault: the server does not follow the protocol.
    """
    headers = {"Content-Type": "application/json", **({} if server.token is None else {"Authorization": f"Bearer {server.token}"})}
    place, most, fault = urlsplit(server.url), question.most, ""
    reached, answer, text, more = False, None, b"", b""
    try:
        with connected(place, within_s, call.sockets) as connection:
            reached = True
            if call.ended.is_set():  # before this socket was among those that `end` shuts down
                raise TransientFault("another request has failed")
            connection.request("GET" if question.body is None else "POST", target(place), question.body, headers)
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
        kind = TransientFault if answer.status in PASSING or answer.status >= 500 else PermanentFault
        raise kind(f"status {answer.status} {answer.reason}" + (f": {detail}" if detail else ""))
    if answer is None or fault:
        raise TransientFault(fault)
    if more:
        raise PermanentFault(f"the answer is longer than {most} bytes for {question.what}")
    if answer.length:  # bytes announced by the header that did not arrive
        raise TransientFault(f"the answer broke off, {answer.length} bytes before its end")
    return question.read(text)

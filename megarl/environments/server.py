"""A reference server for environments that run outside megarl's processes (protocol: megarl.environments.http):

    python -m megarl.environments.server MODULE:CLASS [--port 8000] [--host 127.0.0.1]

Each episode has its own instance of the class. Requests are served concurrently, except that those of one episode run one at a time. An
episode without a request for an hour is closed at the next reset, since its client has timed out or gone. The server trusts its clients and
runs the class in its own process, without a sandbox: run it only where that is acceptable.
"""

import argparse
import json
import os
import sys
import threading
import time
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from megarl.environments.protocol import begin, end, read_step, waited
from megarl.imports import find

MAX_BYTES = 16 << 20
BUSY_S = 60.0  # how long a request waits for the one before it
IDLE_S = 3600.0  # twice the default time limit of an engine for a turn (rollout.timeout_s)


@dataclass
class _Episode:
    environment: Any
    lock: threading.Lock = field(default_factory=threading.Lock)
    used: float = field(default_factory=time.monotonic)  # time of its last request
    closed: bool = False


class EnvironmentServer(ThreadingHTTPServer):
    """Holds the environments of all open episodes."""

    daemon_threads = True
    request_queue_size = 4096  # connections waiting to be accepted: all episodes of a step may connect at once; the kernel resets the rest

    def __init__(self, address: tuple[str, int], make: Any) -> None:
        super().__init__(address, _Handler)
        self._make = make
        self._episodes: dict[str, _Episode] = {}

    def answer(self, what: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request to /`what`. Any exception becomes an answer with status 500."""
        if what == "reset":
            self._end_idle()
            environment, name = self._make(), uuid.uuid4().hex
            try:
                turn = begin(environment, body["seed"], body.get("task"))
            except Exception:
                with suppress(Exception):  # why it did not begin is what the client is told
                    end(environment)
                raise
            self._episodes[name] = _Episode(environment)
            return {"episode": name, "observation": turn.messages}
        if what == "step":
            episode = self._episodes[body["episode"]]
            if not episode.lock.acquire(timeout=BUSY_S):
                raise TimeoutError(f"the step before has not returned in {BUSY_S:g} s")
            try:
                episode = self._episodes[body["episode"]]  # which may have ended while this waited
                turn = read_step(waited(episode.environment.step(body["text"], body["tokens"], body["finished"])))
                episode.used = time.monotonic()
            finally:
                episode.lock.release()
                self._end_closed(episode)
            return {"observation": turn.messages, "reward": turn.reward, "done": turn.done, "info": dict(turn.info)}
        if what == "close":
            episode = self._episodes.pop(body["episode"], _Episode(None))
            episode.closed = True
            if episode.lock.acquire(timeout=BUSY_S):  # a step that exceeded the client's time limit may still be running
                episode.lock.release()
            self._end_closed(episode)
            return {}
        raise KeyError(f"/{what}: there are /reset, /step and /close")

    def _end_closed(self, episode: _Episode) -> None:
        """End an episode that is closed, unless a step of it is under way, after which this is called again."""
        if episode.closed and episode.lock.acquire(blocking=False):
            try:
                environment, episode.environment = episode.environment, None
                if environment is not None:
                    end(environment)
            finally:
                episode.lock.release()

    def _end_idle(self) -> None:
        """Close episodes that have had no request for IDLE_S, which their clients will not close."""
        now = time.monotonic()
        for name, episode in list(self._episodes.items()):
            if not episode.lock.acquire(blocking=False):  # a step is under way
                continue
            try:
                idle = now - episode.used > IDLE_S
                if idle and self._episodes.pop(name, None) is not None:  # no other request has closed it meanwhile
                    end(episode.environment)
            except Exception as error:
                print(f"episode {name}, of a client that is gone: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            finally:
                episode.lock.release()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"
    timeout = 60
    server: EnvironmentServer

    def do_POST(self) -> None:
        """Answer one request."""
        try:
            length = int(self.headers.get("Content-Length", "0"))
            if not 0 <= length <= MAX_BYTES:
                raise ValueError(f"a body of {length} bytes, and {MAX_BYTES} are the most")
            status, answer = 200, self.server.answer(self.path.strip("/"), json.loads(self.rfile.read(length)))
        except Exception as error:
            status, answer = 500, {"error": f"{type(error).__name__}: {error}"}
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Do nothing: requests are not logged."""


def main() -> None:
    """Run the server until it is interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environment", metavar="MODULE:CLASS")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    sys.path.insert(0, os.getcwd())
    server = EnvironmentServer((options.host, options.port), find(options.environment))
    print(f"{options.environment} on http://{options.host}:{server.server_address[1]}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()

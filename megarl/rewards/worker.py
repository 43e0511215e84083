"""A scoring process: `python -m megarl.rewards.worker CHANNEL PARENT`, started by rewards/processes.py and by nothing else.

It reads chunks of samples from its end of a socket pair and answers after each sample, so that its parent knows which one is late.
Messages out: ("ready", None), ("refused", text), (number, (value, parts, error)).
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any

from megarl.rewards.verifiers import BadReturn, Verifier, load

PR_SET_PDEATHSIG = 1
Outcome = tuple[float, dict[str, float], str | None]


class Late(BaseException):
    """The sample's time is over. No Exception, so that a verifier's own `except Exception` lets it through."""


def main() -> None:
    channel, parent = int(sys.argv[1]), int(sys.argv[2])
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before we asked
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    os.dup2(2, 1)  # what a reward function prints goes where errors go
    with Connection(channel) as connection:
        try:
            _serve(connection)
        except (EOFError, ConnectionError):  # the parent has closed its end
            return


def _serve(connection: Connection) -> None:
    source, timeout_s = connection.recv()
    try:
        verifier = load(source)
    except Exception as error:  # an import may raise anything
        connection.send(("refused", str(error) if isinstance(error, ValueError) else f"type: {type(error).__name__}: {error}"))
        return
    connection.send(("ready", None))
    while True:
        for number, sample in connection.recv():
            connection.send((number, _score(verifier, sample, timeout_s)))


def _ring(signum: int, frame: FrameType | None) -> None:
    raise Late


def _score(verifier: Verifier, sample: tuple[str, str, str, dict[str, Any]], timeout_s: float) -> Outcome:
    """One sample. The alarm ends most late ones without the price of a new process; the parent kills where it does not."""
    start = time.monotonic()
    try:
        signal.signal(signal.SIGALRM, _ring)  # again for each sample: a verifier may use the alarm itself
        signal.setitimer(signal.ITIMER_REAL, timeout_s)
        try:
            value, parts = verifier(*sample)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except Late:
        return 0.0, {}, "timeout"
    except BadReturn as error:
        return 0.0, {}, f"bad return: {error}"
    except BaseException as error:  # SystemExit and the like too: one sample must not end the process
        return 0.0, {}, f"{type(error).__name__}: {error}"[:500]
    # A bare `except:` swallows our alarm, and what comes after it is no verdict.
    return (0.0, {}, "timeout") if time.monotonic() - start >= timeout_s else (value, parts, None)


if __name__ == "__main__":
    main()

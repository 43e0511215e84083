"""The inside of a process that works on one request after the other: how it begins, and how a request is kept in time.

Imported in the sandbox: it imports nothing of megarl but its neighbours.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from megarl.sandbox.channel import Channel
from megarl.sandbox.inside import enter

Answer = Callable[..., None]
Loaded = TypeVar("Loaded")
LONGEST_TEXT = 500  # of a message that a fault becomes


class Late(BaseException):
    """The request's time is over. No Exception, so that code's own `except Exception` lets it through."""


def serve(work: Callable[[Channel, Answer], None]) -> None:
    """The main of such a process, whose first argument is its end of the channel: `work` reads from it, and sends JSON by the answer."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the run's business
    channel = enter(int(sys.argv[1]))
    own = os.getpid()

    def answer(*message: Any) -> None:
        if os.getpid() != own:  # what was called forked, and both came back: one of them speaks
            os._exit(0)
        channel.send(json.dumps(message).encode())

    try:
        work(channel, answer)
    except (EOFError, ConnectionError):  # the run has closed its end
        return


def imported(load: Callable[[], Loaded], answer: Answer) -> Loaded | None:
    """What `load` returns, once the run has been told that the process is ready; None where it was told why it is refused."""
    try:
        loaded = load()
    except Exception as error:  # an import may raise anything
        text = str(error) if isinstance(error, ValueError) else f"type: {type(error).__name__}: {error}"
        answer("refused", text[:LONGEST_TEXT])
        return None
    answer("ready")
    return loaded


@contextmanager
def in_time(seconds: float) -> Iterator[None]:
    """Raises Late where the block takes longer. The alarm ends most without the price of a new process; the run kills where it does not.

    A bare `except:` swallows the alarm: a block that ends by itself is late all the same where its time is over.
    """
    begun = time.monotonic()

    def ring(signum: int, frame: FrameType | None) -> None:
        raise Late

    signal.signal(signal.SIGALRM, ring)  # again for each request: what is called may use the alarm itself
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if time.monotonic() - begun >= seconds:
        raise Late

"""The inside of a sandboxed process that handles one request at a time: its main function, and the time limit of a request.

This module is imported in the sandbox, so of megarl it imports only this package.
"""

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
MAX_TEXT = 500  # maximum length of an error message


class Late(BaseException):
    """A request exceeded its time limit. Not an Exception, so that an `except Exception` in the called code does not catch it."""


def serve(work: Callable[[Channel, Answer], None]) -> None:
    """Run the main function of such a process, whose first command-line argument is the descriptor of its end of the channel.

    `work(channel, answer)` reads requests from the channel, and calls answer(*message) to send a message as JSON.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the run
    channel = enter(int(sys.argv[1]))
    own = os.getpid()

    def answer(*message: Any) -> None:
        if os.getpid() != own:  # the called code forked, and both processes returned: only the original one answers
            os._exit(0)
        channel.send(json.dumps(message).encode())

    try:
        work(channel, answer)
    except (EOFError, ConnectionError):  # the run closed its end
        return


def imported(load: Callable[[], Loaded], answer: Answer) -> Loaded | None:
    """Call `load`, tell the run that the process is ready, and return the result. If `load` fails, tell the run why, and return None."""
    try:
        loaded = load()
    except Exception as error:  # an import may raise anything
        text = str(error) if isinstance(error, ValueError) else f"type: {type(error).__name__}: {error}"
        answer("refused", text[:MAX_TEXT])
        return None
    answer("ready")
    return loaded


@contextmanager
def in_time(seconds: float) -> Iterator[None]:
    """Raise Late if the block takes longer than `seconds`.

    An alarm interrupts most code, which saves starting a new process; if it does not, the run kills this one. If the block swallows the
    alarm with a bare `except:` and ends after the limit, Late is raised at its end.
    """
    start = time.monotonic()

    def ring(signum: int, frame: FrameType | None) -> None:
        raise Late

    signal.signal(signal.SIGALRM, ring)  # for each request anew, since the called code may use the alarm itself
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if time.monotonic() - start >= seconds:
        raise Late

"""Calls into Ray's server, each with a time limit.

A server that is stopped never answers, and one that has ended blocks its callers for a minute, after which Ray ends this process without a
word. So each call is made in a thread of its own. Whoever waits for it goes on when the time is over, when the session turns out to be
lost, and when a signal arrives.
"""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from megarl.errors import Stopped
from megarl.host import termination

T = TypeVar("T")
ANSWER_S, POLL_S = 60.0, 0.2


class ProcessStalled(Stopped):
    """A process of the run is stopped, or a machine does not answer.

    Args:
        message: names the process or machine.
        session: whether it is one of Ray's own processes, so that nothing can be restarted.
        seconds: how long it has been seen to stand still.
    """

    def __init__(self, message: str, *, session: bool = False, seconds: float = 0.0) -> None:
        super().__init__(message)
        self.session, self.seconds = session, seconds


_loss: str | None = None


def lose(why: str | None) -> None:
    """Declare the session lost, for this reason, unless it already is; None: a new one begins."""
    global _loss
    _loss = None if why is None else _loss or why


def is_loss(error: BaseException) -> bool:
    """Return whether an error says that the session is lost. What it came up in says nothing then about ranks or nodes."""
    return isinstance(error, ProcessStalled) and error.session


def loss() -> str | None:
    """Why the session is lost; None while it is not. Then nothing but its end may be asked of Ray, and that within a time limit."""
    return _loss


def ask(doing: str, call: Callable[[], T], timeout_s: float = ANSWER_S) -> T:
    """Make a call into Ray's server, and return its result or raise its error.

    Args:
        doing: names the work in an error.
        call: the call.
        timeout_s: how long to wait for an answer.

    Raises:
        ProcessStalled: the session is lost, or there is no answer in time.
        Terminated: a signal asks the run to end, and it may end here.
    """
    if _loss is not None:
        raise ProcessStalled(f"{doing}: {_loss}", session=True)
    answer, over = list[tuple[T | None, BaseException | None]](), threading.Event()

    def make() -> None:
        try:
            answer.append((call(), None))
        except BaseException as error:
            answer.append((None, error))
        over.set()

    threading.Thread(target=make, name=f"ask: {doing}", daemon=True).start()
    deadline = time.monotonic() + timeout_s
    while not over.wait(POLL_S):
        if _loss is not None:
            raise ProcessStalled(f"{doing}: {_loss}", session=True)
        termination.poll()
        if time.monotonic() > deadline:
            raise ProcessStalled(f"{doing}: Ray's server has not answered within {timeout_s:g} s", session=True, seconds=timeout_s)
    result, error = answer[0]
    if error is not None:
        raise error
    return result  # type: ignore[return-value]  # T where there is no error

"""A scoring process, in the sandbox: `python -m megarl.rewards.worker CHANNEL`, started by rewards/processes.py and by nothing else.

It takes pickled chunks of samples and answers in JSON after each sample, so that the run knows which one is late. Messages out:
["ready"], ["refused", text], [number, value, parts, error].
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import time
from types import FrameType
from typing import Any

from megarl.rewards.verifiers import BadReturn, Verifier, load
from megarl.sandbox.channel import Channel
from megarl.sandbox.inside import enter

MOST_PARTS, LONGEST_NAME, LONGEST_TEXT = 64, 100, 500
Outcome = tuple[float, dict[str, float], str | None]


class Late(BaseException):
    """The sample's time is over. No Exception, so that a verifier's own `except Exception` lets it through."""


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the run's business
    channel = enter(int(sys.argv[1]))
    try:
        _serve(channel)
    except (EOFError, ConnectionError):  # the run has closed its end
        return


def _serve(channel: Channel) -> None:
    def answer(*message: Any) -> None:
        if os.getpid() != own:  # a verifier forked, and both came back: one of them speaks
            os._exit(0)
        channel.send(json.dumps(message).encode())

    own = os.getpid()
    source, timeout_s = pickle.loads(channel.receive())
    try:
        verifier = load(source)
    except Exception as error:  # an import may raise anything
        text = str(error) if isinstance(error, ValueError) else f"type: {type(error).__name__}: {error}"
        answer("refused", text[:LONGEST_TEXT])
        return
    answer("ready")
    while True:
        for number, sample in pickle.loads(channel.receive()):
            answer(number, *_score(verifier, sample, timeout_s))


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
        return 0.0, {}, f"bad return: {error}"[:LONGEST_TEXT]
    except BaseException as error:  # SystemExit and the like too: one sample must not end the process
        return 0.0, {}, f"{type(error).__name__}: {error}"[:LONGEST_TEXT]
    if len(parts) > MOST_PARTS:
        return 0.0, {}, f"bad return: {len(parts)} parts, and {MOST_PARTS} are the most"
    parts = {name[:LONGEST_NAME]: part for name, part in parts.items()}
    # A bare `except:` swallows our alarm, and what comes after it is no verdict.
    return (0.0, {}, "timeout") if time.monotonic() - start >= timeout_s else (value, parts, None)


if __name__ == "__main__":
    main()

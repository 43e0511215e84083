"""A scoring process in the sandbox: `python -m megarl.rewards.worker CHANNEL`, started only by rewards/processes.py.

It receives pickled chunks of samples and answers in JSON after each sample, so that the run knows which one is late. Messages sent:
["ready"], ["refused", text], [number, value, parts, error].
"""

from __future__ import annotations

import pickle
from typing import Any

from megarl.rewards.verifiers import BadReturn, Verifier, load
from megarl.sandbox.bounded import LONGEST_TEXT, Answer, Late, imported, in_time, serve
from megarl.sandbox.channel import Channel

MOST_PARTS, LONGEST_NAME = 64, 100
Outcome = tuple[float, dict[str, float], str | None]


def work(channel: Channel, answer: Answer) -> None:
    """Load the verifier, then score samples as they arrive."""
    source, timeout_s = pickle.loads(channel.receive())
    verifier = imported(lambda: load(source), answer)
    if verifier is None:
        return
    while True:
        for number, sample in pickle.loads(channel.receive()):
            answer(number, *_score(verifier, sample, timeout_s))


def _score(verifier: Verifier, sample: tuple[str, str, str, dict[str, Any]], timeout_s: float) -> Outcome:
    """Score one sample; return its value, parts and error."""
    try:
        with in_time(timeout_s):
            value, parts = verifier(*sample)
    except Late:
        return 0.0, {}, "timeout"
    except BadReturn as error:
        return 0.0, {}, f"bad return: {error}"[:LONGEST_TEXT]
    except BaseException as error:  # SystemExit and the like too: one sample must not end the process
        return 0.0, {}, f"{type(error).__name__}: {error}"[:LONGEST_TEXT]
    if len(parts) > MOST_PARTS:
        return 0.0, {}, f"bad return: {len(parts)} parts, more than {MOST_PARTS}"
    parts = {name[:LONGEST_NAME]: part for name, part in parts.items()}
    return value, parts, None


if __name__ == "__main__":
    serve(work)

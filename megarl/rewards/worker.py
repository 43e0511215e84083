"""A scoring process in the sandbox: `python -m megarl.rewards.worker CHANNEL`, started only by rewards/processes.py.

It receives pickled chunks of samples and answers in JSON after each sample, so that the run knows which one is late. Messages sent:
["ready"], ["refused", text], [number, value, parts, null], [number, null, {}, error].
"""

import pickle
from typing import Any

from megarl.rewards.verifiers import MAX_FEEDBACK, Abstained, BadReturn, Parts, Verifier, load, load_gold_check
from megarl.sandbox.bounded import MAX_TEXT, Answer, Late, imported, in_time, serve
from megarl.sandbox.channel import Channel
from megarl.sandbox.inside import terminations

MAX_PARTS, MAX_NAME = 64, 100
Outcome = tuple[float | None, Parts, str | None]


def work(channel: Channel, answer: Answer) -> None:
    """Load the verifier, or its check of reference answers, then score samples as they arrive."""
    source, timeout_s, golds = pickle.loads(channel.receive())
    verifier = imported(lambda: load_gold_check(source) if golds else load(source), answer)
    if verifier is None:
        return
    while True:
        for number, sample in pickle.loads(channel.receive()):
            before, outcome = terminations(), _score(verifier, sample, timeout_s)
            if terminations() != before:  # a program that it runs may have died of the signal
                outcome = _score(verifier, sample, timeout_s)
            answer(number, *outcome)


def _score(verifier: Verifier, sample: tuple[str, str, Any, dict[str, Any]], timeout_s: float) -> Outcome:
    """Score one sample; return its value and parts, or the reason why there are none."""
    try:
        with in_time(timeout_s):
            value, parts = verifier(*sample)
    except Late:
        return None, {}, "timeout"
    except Abstained:
        return None, {}, "abstained"
    except BadReturn as error:
        return None, {}, f"bad return: {error}"[:MAX_TEXT]
    except BaseException as error:  # SystemExit and the like too: one sample must not end the process
        return None, {}, f"{type(error).__name__}: {error}"[:MAX_TEXT]
    if len(parts) > MAX_PARTS:
        return None, {}, f"bad return: {len(parts)} parts, more than {MAX_PARTS}"
    room, cut = MAX_FEEDBACK, Parts()
    for name, part in parts.items():
        cut[name[:MAX_NAME]] = part[:room] if isinstance(part, str) else part
        room -= len(part[:room]) if isinstance(part, str) else 0
    return value, cut, None


if __name__ == "__main__":
    serve(work)

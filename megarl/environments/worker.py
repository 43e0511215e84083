"""A process of environments, in the sandbox: `python -m megarl.environments.worker CHANNEL`, started by processes.py and by nothing else.

It holds the environments of many episodes, and works on one request at a time. Requests are pickled: ("reset", episode, seed, task),
("step", episode, text, tokens, finished), ("close", episode). Messages out, in JSON: ["ready"], ["refused", text], ["turn", messages,
reward, done, info], ["failed", text].
"""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy  # here, so that an episode that imports it first draws from a state of its own, too

from megarl.environments.adapters import load
from megarl.environments.protocol import ProtocolFault, Turn, begin, end, read_step, waited
from megarl.sandbox.bounded import LONGEST_TEXT, Answer, Late, imported, in_time, serve
from megarl.sandbox.channel import ANSWER_BYTES, Channel


def work(channel: Channel, answer: Answer) -> None:
    """Imports the environment, and plays what comes."""
    source, step_s = pickle.loads(channel.receive())
    make = imported(lambda: load(source), answer)
    if make is None:
        return
    episodes: dict[int, Any] = {}
    draws = _Draws()
    while True:
        request = pickle.loads(channel.receive())
        try:
            with in_time(step_s), draws.of(*request[:3]):
                turn = _play(make, episodes, *request)
        except Late:
            answer("failed", "timeout")
        except ProtocolFault as fault:
            answer("failed", f"bad return: {fault}"[:LONGEST_TEXT])
        except BaseException as error:  # SystemExit and the like too: one episode must not end the process
            answer("failed", f"{type(error).__name__}: {error}"[:LONGEST_TEXT])
        else:
            said = ["turn", turn.messages, turn.reward, turn.done, dict(turn.info)]
            size = len(json.dumps(said))
            answer(*said) if size <= ANSWER_BYTES else answer("failed", f"bad return: {size} bytes, more than {ANSWER_BYTES}")


class _Draws:
    """Gives each episode Python's and NumPy's common random numbers as if it were alone, seeded by its own seed."""

    def __init__(self) -> None:
        self._states: dict[int, tuple[Any, Any]] = {}

    @contextmanager
    def of(self, what: str, number: int, seed: Any = None) -> Iterator[None]:
        """For one request."""
        if what == "reset":
            random.seed(seed)
            numpy.random.seed(seed % (1 << 32))
        elif number in self._states:
            python, others = self._states[number]
            random.setstate(python)
            numpy.random.set_state(others)
        try:
            yield
        finally:
            if what == "close":
                self._states.pop(number, None)
            else:
                self._states[number] = random.getstate(), numpy.random.get_state()


def _play(make: Callable[[], Any], episodes: dict[int, Any], what: str, number: int, *given: Any) -> Turn:
    if what == "reset":
        episodes[number] = environment = make()
        return begin(environment, *given)
    if what == "step":
        return read_step(waited(episodes[number].step(*given)))
    environment = episodes.pop(number, None)
    with suppress(Exception):  # the episode is over: what its end goes wrong with is nobody's loss
        end(environment)
    return Turn(None)


if __name__ == "__main__":
    serve(work)

"""A sandboxed process with environments: `python -m megarl.environments.worker CHANNEL`, started only by processes.py.

It holds the environments of many episodes, and handles one request at a time. Requests are pickled: ("reset", episode, seed, task),
("step", episode, text, tokens, finished), ("close", episode). Messages sent, in JSON: ["ready"], ["refused", text], ["turn", messages,
reward, done, info], ["failed", text].
"""

import json
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy  # imported here, so that _Draws can seed it even if only the environments use it

from megarl.environments.adapters import load
from megarl.environments.protocol import ProtocolFault, Turn, begin, end, has_images, read_step, waited
from megarl.sandbox.bounded import MAX_TEXT, Answer, Late, imported, in_time, serve
from megarl.sandbox.channel import ANSWER_BYTES, IMAGE_BYTES, Channel


def work(channel: Channel, answer: Answer) -> None:
    """Import the environment, and answer requests."""
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
            answer("failed", f"bad return: {fault}"[:MAX_TEXT])
        except BaseException as error:  # including SystemExit: one episode must not end the process
            answer("failed", f"{type(error).__name__}: {error}"[:MAX_TEXT])
        else:
            fields = ["turn", turn.messages, turn.reward, turn.done, dict(turn.info)]
            size, most = len(json.dumps(fields)), IMAGE_BYTES if has_images(turn.messages or ()) else ANSWER_BYTES
            answer(*fields) if size <= most else answer("failed", f"bad return: {size} bytes, more than {most}")


class _Draws:
    """Gives each episode its own state of Python's and NumPy's global random generators, seeded with the episode's seed."""

    def __init__(self) -> None:
        self._states: dict[int, tuple[Any, Any]] = {}

    @contextmanager
    def of(self, what: str, number: int, seed: Any = None) -> Iterator[None]:
        """Set the episode's state for the block that handles a request, and save it afterwards.

        Args:
            what: the request: "reset", "step" or "close".
            number: the episode.
            seed: for "reset", the episode's seed; ignored for other requests.
        """
        if what == "reset":
            random.seed(seed)
            numpy.random.seed(seed % (1 << 32))
        elif number in self._states:
            python, numpy_state = self._states[number]
            random.setstate(python)
            numpy.random.set_state(numpy_state)
        try:
            yield
        finally:
            if what == "close":
                self._states.pop(number, None)
            else:
                self._states[number] = random.getstate(), numpy.random.get_state()


def _play(make: Callable[[], Any], episodes: dict[int, Any], what: str, number: int, *arguments: Any) -> Turn:
    if what == "reset":
        episodes[number] = environment = make()
        return begin(environment, *arguments)
    if what == "step":
        return read_step(waited(episodes[number].step(*arguments)))
    environment = episodes.pop(number, None)
    with suppress(Exception):  # the episode is over, so an error affects nothing
        end(environment)
    return Turn(None)


if __name__ == "__main__":
    serve(work)

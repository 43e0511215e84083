"""Score responses in sandboxed processes, so that no reward function can hang, crash or slow down the run, and no response can harm it.

If a function raises, returns no number, kills its process, writes to its channel or exceeds its time, that one sample has no score, and the
reason is in `Score.error`; every other sample keeps its score.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import sys
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any

from megarl.config import ConfigError, FunctionReward, RewardSettings, alone
from megarl.rewards.score import LOOK_S, Look, Score, ScoreRequest, no_look
from megarl.rewards.verifiers import FEEDBACK
from megarl.sandbox.channel import BadMessage
from megarl.sandbox.process import SandboxedProcess
from megarl.text.display import printable

CHUNK = 32  # most samples in one message
START_S = 120.0  # longest time for a process to import its verifier
GRACE_S = 1.0  # after a sample's time limit, for the process to report the timeout itself


def check(settings: RewardSettings) -> None:
    """Import the verifier in a scoring process. Raises ConfigError: `reward.source.path: cannot import module 'x': ...`."""
    process = _ScoringProcess(settings)
    try:
        process.wait_ready()
    finally:
        process.kill()


class ProcessScorer:
    """A pool of `settings.workers` scoring processes, which start at once and import their verifier while the caller continues.

    Use it as a context manager, or call `close`. The processes die with this one, however it ends.
    """

    def __init__(self, settings: RewardSettings, log: Path | None = None, look: Look = no_look, golds: bool = False) -> None:
        """
        Args:
            settings: the section `reward`.
            log: the file to which the processes' output is appended; None: stderr.
            look: see `Look`.
            golds: instead of responses, check whether the verifier can score by their reference answers.
        """
        self.settings, self.log, self._look, self._closed, self._golds = settings, log, look, False, golds
        self._processes = [self._started() for _ in range(settings.workers)]

    def _started(self) -> _ScoringProcess:
        return _ScoringProcess(self.settings, self.log, self._golds)

    @property
    def guarantee(self) -> str:
        """Describe for the console what the sandbox keeps a scoring process from, and what not."""
        return self._processes[0].sandboxed.guarantee

    def score(self, requests: Sequence[ScoreRequest]) -> list[Score]:
        """Return one score per request, in order. With `require_finished`, responses cut by the length limit score 0.

        Raises ConfigError if the verifier cannot be loaded, RuntimeError if a scoring process does not start.
        """
        scores: dict[int, Score] = {}
        waiting: deque[int] = deque()
        for number, request in enumerate(requests):
            if request.finished or not self.settings.require_finished:
                waiting.append(number)
            else:
                scores[number] = Score(0.0, scored=False)
        for place, process in enumerate(self._processes):
            if self._closed or process.lost_idle:
                process.kill()
                self._processes[place] = self._started()
        self._closed = False
        chunk = max(1, min(CHUNK, len(waiting) // (4 * len(self._processes))))
        try:
            while len(scores) < len(requests):
                for process in self._processes:
                    if process.idle and waiting:
                        process.give([(n, requests[n]) for n in (waiting.popleft() for _ in range(min(chunk, len(waiting))))])
                self._look()
                self._collect(scores, waiting)
        except BaseException:
            self.close()  # busy processes would send their answers into the next call
            raise
        return [scores[number] for number in range(len(requests))]

    def _collect(self, scores: dict[int, Score], waiting: deque[int]) -> None:
        """Wait for answers until the next deadline or look; replace processes that are late or dead."""
        deadline = min(time.monotonic() + LOOK_S, *(process.deadline for process in self._processes))
        answered = wait([process.channel.fileno() for process in self._processes], max(0.0, deadline - time.monotonic()))
        for place, process in enumerate(self._processes):
            error = process.read(scores) if process.channel.fileno() in answered else process.late()
            if error is None:
                continue
            process.kill()
            if not process.ready:
                printed = "" if self.log is None else f"; what it printed is in {self.log}"
                raise RuntimeError(f"reward: a scoring process did not start: {error}{printed}")
            if process.pending:
                scores[process.pending.popleft()] = Score(None, error=error)
                waiting.extendleft(reversed(process.pending))
            self._processes[place] = self._started()

    def close(self) -> None:
        """End the scoring processes. Can be called twice; another `score` would start new ones."""
        self._closed = True
        for process in self._processes:
            process.kill()

    def __enter__(self) -> ProcessScorer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class _ScoringProcess:
    """One scoring process and its pending samples."""

    def __init__(self, settings: RewardSettings, log: Path | None = None, golds: bool = False) -> None:
        self.timeout_s = settings.timeout_s
        self.ready = False
        self.pending: deque[int] = deque()  # in the order in which they will be answered
        self.deadline = time.monotonic() + START_S
        source = settings.source
        code = [one.path.partition(":")[0] for one in alone(source).values() if isinstance(one, FunctionReward)]
        self.sandboxed = SandboxedProcess("megarl.rewards.worker", settings.sandbox, code, log)
        self.channel = self.sandboxed.channel
        self._send((source.model_dump(), settings.timeout_s, golds))

    @property
    def pid(self) -> int:
        return self.sandboxed.pid

    @property
    def idle(self) -> bool:
        return self.ready and not self.pending

    @property
    def lost_idle(self) -> bool:
        """Return whether it has ended or was stopped while idle; no sample may be charged for that."""
        return self.idle and (self.sandboxed.ended() is not None or self.sandboxed.stopped())

    def give(self, work: list[tuple[int, ScoreRequest]]) -> None:
        self.pending.extend(number for number, _ in work)
        self.deadline = time.monotonic() + self.timeout_s + GRACE_S
        self._send([(number, (ask.prompt, ask.response, ask.answer, ask.meta)) for number, ask in work])

    def _send(self, message: Any) -> None:
        with contextlib.suppress(ConnectionError, TimeoutError):  # if it is dead or stopped, `read` or `late` reports it
            self.channel.send(pickle.dumps(message), self.timeout_s + GRACE_S)

    def late(self) -> str | None:
        return "timeout" if time.monotonic() > self.deadline else None

    def read(self, scores: dict[int, Score]) -> str | None:
        """Process the messages that have arrived; return what killed the process, if it is dead. ConfigError if it refused its verifier."""
        try:
            for message in self.channel.arrived():
                self._take(message, scores)
                self.deadline = time.monotonic() + self.timeout_s + GRACE_S if self.pending else float("inf")
        except (EOFError, ConnectionError):
            return self.sandboxed.death()
        except BadMessage:
            return "worker died: it wrote an invalid answer"
        return None

    def _take(self, message: bytes, scores: dict[int, Score]) -> None:
        """Process one message, which may hold anything. Raises BadMessage if it is not an expected one."""
        try:
            reply = json.loads(message)
        except (ValueError, RecursionError):
            raise BadMessage("not JSON") from None
        match reply:
            case ["ready"] if not self.ready:
                self.ready = True
            case ["refused", str(text)] if not self.ready:
                raise ConfigError(f"reward.source.{text}")
            case [int(number), int() | float() as value, dict(parts), None] if self.pending and number == self.pending[0]:
                numbers = [value, *(part for name, part in parts.items() if not (isinstance(part, str) and _is_feedback(name)))]
                if not all(isinstance(each, int | float) and abs(each) <= sys.float_info.max for each in numbers):  # math.isfinite raises
                    raise BadMessage("a score that is not a finite number")
                scores[self.pending.popleft()] = Score.of(float(value), {printable(name): part for name, part in parts.items()})
            case [int(number), None, dict(), str(error)] if self.pending and number == self.pending[0]:
                scores[self.pending.popleft()] = Score(None, error=printable(error))
            case _:
                raise BadMessage("not what was expected")

    def wait_ready(self) -> None:
        """Wait until the verifier is imported. Raises ConfigError if it cannot be."""
        while not self.ready:
            if not wait([self.channel.fileno()], max(0.0, self.deadline - time.monotonic())):
                raise ConfigError(f"reward.source: not imported after {START_S:.0f} s")
            error = self.read({})
            if error is not None:
                raise ConfigError(f"reward.source: importing it ended the process ({error})")

    def kill(self) -> None:
        self.sandboxed.kill()


def _is_feedback(name: str) -> bool:
    """Whether a part may be a text: it is named so, or so is that of a part of a sum."""
    return name.rpartition("/")[2] == FEEDBACK

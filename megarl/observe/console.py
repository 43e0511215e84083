"""Progress for a person: one live line on a terminal, plain lines elsewhere (logs, CI, Slurm)."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType

from rich.console import Console as RichConsole
from rich.live import Live
from rich.text import Text

from megarl.observe.estimates import SetResult
from megarl.observe.phases import OTHER

# What a line shows of the last step: the metric, its label, its format.
SHOWN = (
    ("perf/tokens_per_second", "tok/s", "{:,.0f}"),
    ("reward/mean", "reward", "{:.3f}"),
    ("sft/loss", "loss", "{:.4f}"),
    ("rm/loss", "loss", "{:.4f}"),
    ("rm/accuracy", "accuracy", "{:.3f}"),
    ("dpo/loss", "loss", "{:.4f}"),
    ("dpo/accuracy", "accuracy", "{:.3f}"),
    ("dpo/margin", "margin", "{:.3f}"),
    ("distillation/reverse_kl", "KL to teacher", "{:.3f}"),
    ("actor/entropy", "entropy", "{:.3f}"),
    ("response_length/mean", "length", "{:.1f}"),
    ("actor/grad_norm", "grad", "{:.3g}"),
    ("rm/grad_norm", "grad", "{:.3g}"),
    ("training/logprob_gap_mean", "gap", "{:.1e}"),
)


SECONDS_BETWEEN_LINES = 1.0  # a log of fast steps stays readable


class Screen(RichConsole):
    """A rich console that survives a broken pipe: the run continues although nobody reads its output (rich would end it)."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


class Console:
    """Shows step i of N, the current phase, and the last step's numbers."""

    def __init__(self, name: str, steps: int, now: Callable[[], tuple[str, float]], rich: RichConsole | None = None) -> None:
        self._name, self._steps, self._now = name, steps, now
        self._rich = rich or Screen(file=sys.stderr, highlight=False)
        self._plain = not self._rich.is_terminal or self._rich.is_dumb_terminal  # a dumb terminal cannot rewrite a line
        self._step = 0
        self._doing = ""  # the last phase that was announced
        self._numbers = ""
        self._rate = ""
        self._printed = -math.inf
        self._live = Live(get_renderable=self._line, console=self._rich, refresh_per_second=4, transient=True)

    def __enter__(self) -> Console:
        if not self._plain:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._live.stop()

    def phase(self, name: str) -> None:
        """Announce a phase. It gets a plain line only before the first step is done, when there is nothing else to see for a while."""
        if self._plain and self._step == 0 and name != self._doing:  # responses are scored in many short turns
            self._print(f"{name} ...")
        self._doing = name

    def step(self, step: int, values: Mapping[str, float], phases: Mapping[str, float]) -> None:
        """A step is done. In plain text the first, the last and one a second of the others is shown.

        Args:
            step: its number.
            values: its metrics by name.
            phases: seconds of its phases.
        """
        first, self._step = self._step == 0, step
        self._numbers = " ".join(f"{label} {form.format(values[name])}" for name, label, form in SHOWN if name in values)
        if self._due(anyway=first or step == self._steps):
            times = " ".join(f"{name} {seconds:.1f}s" for name, seconds in phases.items() if seconds >= 0.05)
            self._print("  ".join(part for part in (f"step {step}/{self._steps}", self._numbers, f"({times})") if part))

    def progress(self, name: str, done: int, of: int) -> None:
        """Show the progress of work that has no steps. Plain text gets at most one line a second, and always the last one.

        Args:
            name: name of the work.
            done: number of parts that are done.
            of: number of all parts.
        """
        self._numbers = f"{name} {done}/{of}"
        if self._due(anyway=done == of):
            self._print(self._numbers)

    def _due(self, anyway: bool) -> bool:
        """Whether a plain-text log gets a line now: always with `anyway`, else if the last one is a second old."""
        now = time.monotonic()
        if not self._plain or not (anyway or now - self._printed >= SECONDS_BETWEEN_LINES):
            return False
        self._printed = now
        return True

    def rate(self, weights: str, result: SetResult) -> None:
        """Print an evaluation's numbers for one set; they stay on the screen."""
        self._rate = " ".join(f"{name} {one.value:.3f}" for name, one in result.estimates.items())
        numbers = "  ".join(f"{name} {one.value:.3f} [{one.low:.3f}, {one.high:.3f}]" for name, one in result.estimates.items())
        self._print(f"{result.kind} of {result.set}, {weights}: {numbers or 'no response has a score'}")

    def result(self, name: str, values: Mapping[str, float]) -> None:
        """Print the numbers of a measurement; they stay on the screen."""
        self._print(f"{name}: " + "  ".join(f"{metric} {value:.4g}" for metric, value in values.items()))

    def note(self, message: str) -> None:
        """Print a message that stays on the screen."""
        self._print(message)

    def warn(self, message: str) -> None:
        """Print a warning that the user must see; it stays on the screen."""
        self._print(f"warning: {message}")

    def _print(self, message: str) -> None:
        self._rich.print(Text(f"{self._name}: {message}"), soft_wrap=True)

    def _line(self) -> Text:
        phase, seconds = self._now()
        label = self._doing if self._doing.partition(":")[0] == phase else phase  # "start: Ray" rather than just "start"
        progress = f"{self._name}  step {self._step}/{self._steps}" if self._steps else self._name
        parts = [progress, "" if phase == OTHER else f"{label} {seconds:.1f}s", self._numbers, self._rate]
        return Text(" | ".join(part for part in parts if part), overflow="ellipsis", no_wrap=True)

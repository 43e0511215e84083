"""A run as its training loop sees it: phases, numbers, pass rates. Everything shown or kept of a run passes through here."""

from __future__ import annotations

import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, astuple
from pathlib import Path
from types import TracebackType
from typing import Any

from megarl.algorithms import peers
from megarl.checkpoints.steps import CHECKPOINTS
from megarl.config import (
    ConfigError,
    DpoConfig,
    RunSettings,
    SftConfig,
    TrainConfig,
    TrainingSettings,
    dump,
)
from megarl.errors import Stopped
from megarl.observe import card, page, report, run_record, samples, summary
from megarl.observe.alarms import Alarms
from megarl.observe.console import Console, Screen
from megarl.observe.estimates import SetResult
from megarl.observe.metrics import Last, Max, Mean, Metric, Sum, merge, scalars
from megarl.observe.output import LOGS
from megarl.observe.phases import Phases
from megarl.observe.processes import PeakMemory
from megarl.observe.restarts import RESTART, Restart
from megarl.observe.run_directory import claim, set_aside
from megarl.observe.trackers.base import TrackedRun
from megarl.observe.writers import Writers, open_writers, read_json_lines
from megarl.rewards.score import RewardUnavailable, Score
from megarl.text.display import one_line

BEST = "best"  # folder of the best model so far
# The files and folders that a run writes.
KEPT = (
    "config.yaml",
    run_record.RECORD,
    "metrics.jsonl",
    "summary.json",
    "report.png",
    "report.html",
    "tensorboard",
    "wandb",
    samples.FOLDER,
    LOGS,
    "model",
    "critic",
    BEST,
    "eval.json",
    CHECKPOINTS,
    f"{CHECKPOINTS}-critic",
)
RESULTS = ("summary.json", "report.png", "report.html", "model", "critic")  # those of KEPT that a run writes at its end
UNFINISHED = ".*.partial-*"  # models that a killed run was still writing (models/hf_writer.py)
SHOWN = ("report.html", "summary.json", samples.FOLDER, "model", "critic", "eval.json")  # listed for the user at the end
WORTH_SAVING = 50  # steps from which on a run without checkpoints gets a notice
METRICS = "metrics.jsonl"
USELESS = 3  # the run ends after this many calls in a row in which the reward function fails on every response
GAPS = ("training/logprob_gap_mean", "training/logprob_gap_max")  # also reduced over the whole run
REDUCTIONS: dict[str, Callable[..., Metric]] = {"Mean": Mean, "Max": Max}  # the reductions of GAPS


class Run:
    """`with Run(config) as run: ...` writes config.yaml, metrics.jsonl, tensorboard/, summary.json and report.png to the run's directory.

    summary.json and the reports are written at the end, and only by a run that finishes. The files of an earlier run of the same name are
    moved to earlier-<n>/; if this run resumes from that run's `state`, only those that it wrote at its end. ConfigError on entry if another
    run is using the directory, or nothing can be written there.
    """

    def __init__(self, config: RunSettings, resumed: Mapping[str, Any] | None = None) -> None:
        self._config, self._resumed = config, resumed
        self.directory: Path = config.directory
        self._phases = Phases()
        self._memory = PeakMemory()
        self._alarms = self._new_alarms()
        self.evaluations: dict[str, summary.Evaluation] = {}
        self._results: dict[str, Mapping[str, float]] = {}
        self._whole: dict[str, Metric] = {}
        self._failed: dict[str, str] = {}  # by kind of failure of the reward function: the first message
        self._judged = self._useless = 0  # responses that could be scored; calls in a row that scored none
        self._warnings: dict[str, str] = {}
        self._aside: Path | None = None  # where an earlier run's files were moved
        self._restarts: list[dict[str, Any]] = []
        self.alarm: str | None = None  # the first alarm of this process, not of the run that it resumes
        self.ended_by: str | None = None  # the alarm that ends this run
        self.engine_gpus: int | None = 1  # for an engine with the final model; None: it fits on no node
        self._events: dict[str, float] = {}  # for the next row of the metrics
        self.model_step: int | None = None  # after which the final model was saved; None: the last one
        self._step = self._learned = 0  # the last step, and the number of steps that trained a policy
        self._console = Console(config.name, config.total_steps, self._phases.current)
        self._commit = summary.commit()  # before anybody edits the files that this process has loaded

    def __enter__(self) -> Run:
        self._lock = claim(self.directory, patient=self._config.cluster.allocation is not None)
        try:
            for unfinished in self.directory.glob(UNFINISHED):
                shutil.rmtree(unfinished)
            if self._resumed is None:
                self._aside = set_aside(self.directory, (*KEPT, *self._config.leaves), self._config.model.path)
            else:
                self._go_on(self._resumed)
                set_aside(self.directory, RESULTS, self._config.model.path)
            (self.directory / LOGS).mkdir(exist_ok=True)
            self._record = run_record.begin(self._config, self._commit, resumes=self._resumed is not None)
            run_record.write(self.directory, self._record)
            (self.directory / "config.yaml").write_text(dump(self._config))
            self._writers = self._open_writers(None if self._resumed is None else self._step + 1)
        except BaseException as error:
            os.close(self._lock)
            if isinstance(error, OSError):  # the disk is read-only or full
                raise ConfigError(f"run_dir: cannot write to {error.filename or self.directory}: {error.strerror}") from None
            raise
        self._console.__enter__()
        self._begin()
        return self

    def _begin(self) -> None:
        """Tell the user what happened to an earlier run's files, and whether checkpoints will be saved."""
        if self._resumed is not None:
            self._console.note(f"resuming from the checkpoint of step {self._step}")
            if len(self._record.starts) == 1:
                self._console.note(f"{run_record.RECORD} is missing or damaged: the seconds of earlier starts are not counted")
        elif self._aside is not None:
            self._console.note(f"files of an earlier run with this name were moved to {self._aside}")
        config, steps = self._config, self._config.total_steps
        if isinstance(config, TrainConfig) and config.algorithm.as_ is not None:
            self._console.note(peers.shown(config.algorithm.as_, config.algorithm.model_dump()))
        if not isinstance(config, TrainingSettings):
            return
        count, target = (self._learned, config.train.steps) if isinstance(config, TrainConfig) else (self._step, steps)
        if (key := config.steps_key) is not None and count > target:
            self._console.note(f"{key}={target}: {count} steps are done already, and none is added")
        if not config.save.every and not config.save.minutes and steps >= WORTH_SAVING:
            off = "save.every=0 and save.every_minutes=0"
            self._console.note(f"{off}: none of the {steps} steps is saved as a checkpoint; a killed run starts over")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._console.__exit__(kind, error, trace)
        self._writers.close(failed=kind is not None)
        with suppress(OSError):  # for which the metrics, on the same disk, have raised
            self._record_spent()
        if kind is KeyboardInterrupt and isinstance(self._config, TrainingSettings):
            self._console.note(f"interrupted after step {self._step}; {self._saved()}")
        elif isinstance(error, Exception) and not isinstance(error, ConfigError | Stopped) and any((self.directory / LOGS).iterdir()):
            self._console.note(f"the output of its processes is in {self.directory / LOGS}")
        try:
            if kind is None:
                self._finish()
        finally:
            os.close(self._lock)

    def starts_on(self, gpus: int) -> None:
        """Record how many GPUs this start of the run has."""
        self._record = self._record.on(gpus)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Charge the time of the block to the phase `name`."""
        self._console.phase(name)
        with self._phases(name):
            try:
                yield
            finally:
                self._memory.sample()

    @contextmanager
    def starting(self, what: str) -> Iterator[None]:
        """Run one part of the start in the phase `start`, and report when it is ready, with the seconds it took."""
        start = time.monotonic()
        self._console.phase(f"start: {what}")
        with self._phases("start"):
            yield
        self._console.note(f"{what}: ready after {time.monotonic() - start:.1f} s")

    def log(self, step: int, metrics: Mapping[str, Metric]) -> None:
        """Log the metrics of a finished step, with the time since the last report."""
        phases = self._phases.take()
        seconds = sum(phases.values())
        values = scalars(merge([metrics, _timing(phases), {"perf/time_per_step": Last(seconds)}]))
        if "perf/tokens" in values:
            values["perf/tokens_per_second"] = values["perf/tokens"] / seconds
        self._whole = merge([self._whole, {name: metrics[name] for name in GAPS if name in metrics}])
        self._step, self._learned = max(self._step, step), self._learned + ("actor/grad_norm" in metrics)
        self._write(step, values)
        self._console.step(step, values, phases)

    def progress(self, name: str, done: int, of: int) -> None:
        """Show the progress of long work that has no steps.

        Args:
            name: name of the work.
            done: number of parts that are done.
            of: number of all parts.
        """
        self._console.progress(name, done, of)

    def note(self, message: str) -> None:
        """Show the user a message."""
        self._console.note(message)

    def failures(self, scores: Iterable[Score]) -> None:
        """Show the first reason of each kind why a response has no score, once per run.

        RewardUnavailable if it has failed on every response of USELESS calls in a row.
        """
        scores = list(scores)
        if not scores:
            return
        errors = [score.error for score in scores if score.error is not None]
        self._judged += len(scores) - len(errors)
        self._useless = self._useless + 1 if len(errors) == len(scores) else 0
        if self._useless >= USELESS:
            raise RewardUnavailable(f"the reward function has failed on every response, {USELESS} times in a row: {one_line(errors[-1])}")
        for score in scores:
            kind = None if score.error is None else score.error.partition(":")[0]
            if kind is not None and kind not in self._failed:
                self._failed.setdefault(kind, one_line(score.error or ""))
                self._console.warn(f"a response has no score, and takes no part: {score.error}")

    def evaluated(self, when: str, results: Sequence[SetResult], metrics: Mapping[str, Metric], step: int = 0) -> dict[str, float]:
        """Record an evaluation of one set of weights; the last one of each `when` counts.

        Args:
            when: base (whose metrics have names of their own), start, end or eval.
            results: the result of each set of prompts.
            metrics: further numbers.
            step: the step of the metrics' row.

        Returns:
            The row's numbers, except the timings.
        """
        self.evaluations[when] = summary.Evaluation(step, results)
        of = "_base" if when == "base" else ""
        values = {f"eval/{result.set}{of}/{name}": one.value for result in results for name, one in result.estimates.items()}
        values |= scalars(metrics)
        self._write(step, values | scalars(_timing(self._phases.take())))
        for result in results:
            self._console.rate(summary.weights(when, step), result)
        return values

    def held_out(self, name: str, metrics: Mapping[str, Metric], step: int = 0) -> None:
        """Record the numbers of a held-out set.

        Args:
            name: their name in the summary ("held-out after"); the last ones of each name count.
            metrics: the set's metrics.
            step: the step after which they were measured.
        """
        values = self._results[name] = scalars(metrics)
        self._write(step, {f"eval/heldout/{metric}": value for metric, value in values.items()} | scalars(_timing(self._phases.take())))
        self._console.result(f"held-out, step {step}", values)

    @property
    def results(self) -> Mapping[str, Mapping[str, float]]:
        """The numbers of held-out sets so far, by their name in the summary."""
        return self._results

    def keep(self, step: int, records: Sequence[samples.SampleRecord], evaluation: str | None = None) -> None:
        """Keep responses for reading.

        Args:
            step: the step that they belong to.
            records: the responses.
            evaluation: the evaluated set, if they are from an evaluation; its best and its worst response are also shown.
        """
        if not self._config.log.samples:
            return
        samples.write(self.directory, step, records, evaluation)
        if evaluation is not None:
            scored = [(record.reward, record) for record in records if record.reward is not None]
            ordered = sorted(scored, key=lambda pair: pair[0])
            for _, record in ordered[:: max(1, len(ordered) - 1)][:2]:
                self._console.note(samples.line(record))

    def event(self, name: str, message: str) -> None:
        """Record a fault that does not end the run: it is shown, added to the next row of the metrics, and kept for the summary."""
        self._events[f"events/{name}"] = 1.0
        self._warnings[name] = message
        self._console.warn(message)

    def restarted(self, restart: Restart) -> None:
        """Record that the run resumes after a failure: it is shown, added to the next row of the metrics, and kept for the summary."""
        self._restarts.append({"step": self._step, **asdict(restart)})
        self._add_events(restart.metrics())
        repeats = f"; {restart.lost_steps} steps are repeated" if restart.lost_steps else ""
        self._console.note(f"resumed after step {self._step}: {restart.kind} replaced in {restart.recovery_s:.1f} s{repeats}")

    def rewind(self, state: Mapping[str, Any] | None) -> int:
        """Go back to where `state` was taken, or to the beginning. Returns how many finished steps must be repeated."""
        before = self._step
        for result in ("model", "critic"):
            if (self.directory / result).exists():
                shutil.rmtree(self.directory / result)
        self._writers.close()
        self._alarms, self._warnings, self._step, self._learned = self._new_alarms(), {}, 0, 0
        self.evaluations, self._results, self._whole = {}, {}, {}
        size = 0 if state is None else int(state["metrics_bytes"])
        for row in self._rows(size):
            self._add_events({name: value for name, value in row.items() if name.startswith(RESTART)})  # of repeated steps
        if state is None:
            os.truncate(self.directory / METRICS, 0)
            samples.forget_after(self.directory, -1)
        else:
            self._go_on(state)
        self._phases.take()
        self._writers = self._open_writers(self._step + 1)
        return before - self._step

    def state(self) -> dict[str, Any]:
        """Return what a run that resumes from here must know, as plain values for JSON."""
        return {
            "step": self._step,
            "learned": self._learned,
            "metrics_bytes": (self.directory / METRICS).stat().st_size,
            "evaluations": {when: evaluation.plain() for when, evaluation in self.evaluations.items()},
            "results": self._results,
            "whole": {name: [type(metric).__name__, *astuple(metric)] for name, metric in self._whole.items()},
            "warnings": self._warnings,
            "ended_by": self.ended_by,
            "restarts": self._restarts,
        }

    def _go_on(self, state: Mapping[str, Any]) -> None:
        """Restore `state`, and truncate the metrics to match. ConfigError if they are missing, or an alarm had ended the run."""
        alarm = state["ended_by"]
        if alarm is not None and isinstance(self._config, TrainConfig) and self._config.train.on_alarm == "stop":
            raise ConfigError(f"train.on_alarm=stop: an alarm has ended this run ({alarm}); with continue it resumes")
        path, size = self.directory / METRICS, state["metrics_bytes"]
        if not path.is_file() or path.stat().st_size < size:
            raise ConfigError(
                f"save.resume: {path} does not have the {size} bytes that step {state['step']} left; restore it, or start over"
            )
        os.truncate(path, size)
        self._restarts = self._restarts or list(state["restarts"])  # this process's own are newer, if it has rewound
        samples.forget_after(self.directory, state["step"])
        for row in self._rows():
            self._alarms.check(int(row["step"]), {name: value for name, value in row.items() if name != "step"})
        self._step, self._learned, self._warnings = state["step"], state["learned"], dict(state["warnings"])
        self.evaluations = {when: summary.Evaluation.read(plain) for when, plain in state["evaluations"].items()}
        self._results = dict(state["results"])
        self._whole = {name: REDUCTIONS[kind](*values) for name, (kind, *values) in state["whole"].items()}

    def _rows(self, skipped: int = 0) -> list[dict[str, float]]:
        """The rows of the metrics after the first `skipped` bytes. ConfigError if a run did not write them."""
        try:
            return read_json_lines(self.directory / METRICS, skipped)
        except ConfigError as error:
            raise ConfigError(f"save.resume: {error}; restore it, or start over") from None

    def _saved(self) -> str:
        """Describe where another start of the run would resume."""
        latest = self.directory / CHECKPOINTS / "latest"
        resumable = latest.is_file()
        return f"another start resumes from {latest.read_text().strip()}" if resumable else "another start begins from scratch (save.every)"

    def _new_alarms(self) -> Alarms:
        if not isinstance(self._config, TrainConfig):
            return Alarms()
        return Alarms(self._config.routing, ahead=self._config.rollout.mode != "sync")

    def _open_writers(self, purge: int | None) -> Writers:
        config = self._config
        tracked = TrackedRun(self._record.id, config.name, self.directory, config.model_dump(mode="json"), config.log)
        return open_writers(tracked, purge, lambda message: self.event("tracker_failed", message))

    def _add_events(self, events: Mapping[str, float]) -> None:
        for name, value in events.items():
            self._events[name] = self._events.get(name, 0.0) + value

    def _write(self, step: int, values: dict[str, float]) -> None:
        values |= self._events
        self._events = {}
        for event, message in self._alarms.check(step, values).items():
            values[f"events/{event}"] = 1.0
            self._warnings[event] = message
            self.alarm = self.alarm or message
            self._console.warn(message)
        self._writers.write(step, values)
        self._record_spent()

    def _record_spent(self) -> None:
        self._record = self._record.spent(self._phases.total(), self._step)
        run_record.write(self.directory, self._record)

    def _finish(self) -> None:
        self._memory.sample()
        for event, message in self._alarms.at_the_end().items():
            self._warnings[event] = message
            self._console.warn(message)
        whole, record = scalars(self._whole), self._record.spent(self._phases.total(), self._step)
        result = summary.Summary(
            model=str(self._config.model.path),
            evaluations=self.evaluations,
            results=self._results,
            rl_steps=self._learned if isinstance(self._config, TrainConfig) else 0,
            starts=len(record.starts),
            wall_s=record.wall_s,
            gpu_s=record.gpu_s,
            logprob_gap_mean=whole.get(GAPS[0]),
            logprob_gap_max=whole.get(GAPS[1]),
            peak_rss_mb=self._memory.mb(),
            versions=summary.versions(),
            commit=self._commit,
            alarms=self._warnings,
            restarts=self._restarts,
        )
        if self._step:
            report.draw(self.directory / METRICS, self.directory / "report.png")
        summary.write(self.directory / "summary.json", result)
        page.write(self.directory)
        for model in ("model", "critic"):
            if (self.directory / model / "config.json").is_file():
                step = self.model_step if model == "model" else None
                card.write(self.directory, self.directory / model, self._step if step is None else step)
        summary.show(result, Screen())
        self._console.note(f"results are in {self.directory}: {', '.join(name for name in SHOWN if (self.directory / name).exists())}")
        if samples.files(self.directory):
            worst = "" if self._failed and not self._judged else " --worst"  # which needs a score
            self._console.note(f"next: megarl samples {shlex.quote(str(self.directory))}{worst}")
        elif isinstance(self._config, SftConfig | DpoConfig) and (self.directory / "model").is_dir() and self.engine_gpus is not None:
            gpus = f" --tp {self.engine_gpus}" if self.engine_gpus > 1 else ""
            self._console.note(f'next: megarl generate {shlex.quote(str(self.directory / "model"))}{gpus} "a prompt"')
        if self._failed and not self._judged:
            raise RewardUnavailable(f"the reward function has failed on every response of this run: {next(iter(self._failed.values()))}")


def _timing(phases: Mapping[str, float]) -> dict[str, Metric]:
    return {f"timing_s/{name}": Sum(seconds) for name, seconds in phases.items()}

"""A long run does not grow: memory, threads, descriptors and shared memory of each of its processes, seen from outside."""

import json
import os
import re
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.e2e.job import Job, read
from tests.e2e.kill_at import parent_of, title
from tools.make_tiny_model import build

STEPS, EVERY = 2000, 25  # of the run, and between two samples
# Bounds on the growth over the last half, per step. A long run has 40,000 steps: 0.01 MB of each would be 400 MB at its end.
MEMORY_MB = 0.01
SCRATCH_KB, SCRATCH_FILES = 0.5, 0.01
RUN_KB, RUN_FILES = 16, 1.1  # a step's row, its scalars for TensorBoard, and its file of responses; evaluations have files of their own
CPU, CPU_MS = 1.5, 5.0  # the last quarter's CPU time over that of the quarter before it, where it is more than so much a step
# Ray's own processes look around once in a while, so more often in a step that takes longer: they may take more CPU time by as much.
BY_CLOCK = ("gcs_server", "log_monitor.py", "raylet")
LIMIT_S = 3600.0

# Steps that are as short as they can be: two prompts, two responses each, of four tokens. Saves and evaluations are among them.
SHORT = (
    *(f"train.steps={STEPS}", "train.prompts_per_step=2", "train.mini_batches=1", "optimizer.lr=1.0e-5", "log.tensorboard=true"),
    *("rollout.samples_per_prompt=2", "rollout.max_response_tokens=4", "rollout.max_num_seqs=4"),
    *(f"train.eval_every={STEPS // 4}", f"save.every={STEPS // 4}"),
)


@dataclass(frozen=True)
class Use:
    """What a process has taken, at one moment."""

    mb: float  # of memory of its own: what it shares is counted by `shared`
    threads: int
    files: int  # descriptors
    cpu_s: float


@dataclass(frozen=True)
class Sample:
    """What a run has taken, at one step."""

    step: int
    clock_s: float
    processes: dict[int, Use]
    shared_mb: float  # of memory that its processes share
    scratch: tuple[float, int]  # kB and files of its temporary directory, where Ray logs
    run: tuple[float, int]  # of its directory


def name(pid: int) -> str:
    """A process by its actor, its program or its module."""
    words = title(pid).split("\0")
    if actor := re.match(r"ray::\w+", words[0]):
        return "engine core" if title(parent_of(pid)).startswith(actor[0]) else actor[0]  # a fork
    module = words[words.index("-m") + 1] if "-m" in words else next((word for word in words if word.endswith(".py")), words[0])
    return os.path.basename(module)


def use(pid: int) -> Use:
    process = psutil.Process(pid)
    with process.oneshot():
        cpu = process.cpu_times()
        own = int(re.findall(rb"\nRssAnon:\s+(\d+) kB", read(f"/proc/{pid}/status"))[0]) / 1024
        return Use(own, process.num_threads(), process.num_fds(), cpu.user + cpu.system)


def shared_mb(pids: Sequence[int]) -> float:
    """The memory in /dev/shm that the processes have mapped, or hold open."""
    areas = dict[str, int]()
    for pid in pids:
        for line in read(f"/proc/{pid}/maps").decode(errors="replace").splitlines():
            span, _, _, _, inode, *path = line.split(maxsplit=5)
            if path and path[0].startswith("/dev/shm/"):
                begin, end = (int(edge, 16) for edge in span.split("-"))
                areas[inode] = max(areas.get(inode, 0), end - begin)
    return sum(areas.values()) / (1 << 20)


def size(folder: Path) -> tuple[float, int]:
    """The kB and the number of the files below a directory, some of which come and go meanwhile."""
    sizes = list[int]()
    for place, _, files in os.walk(folder):
        for file in files:
            with suppress(FileNotFoundError):
                sizes.append(os.lstat(os.path.join(place, file)).st_size)
    return sum(sizes) / 1024, len(sizes)


def step_of(job: Job) -> int:
    record = read(str(job.runs / "job" / "run.json"))
    return int(json.loads(record)["step"]) if record else 0


def sample(job: Job) -> Sample:
    scoring = [child.pid for child in psutil.Process(job.process.pid).children(recursive=True)]  # in a sandbox, without the job's mark
    pids, processes = sorted({*job.pids(), *scoring}), dict[int, Use]()
    for pid in pids:
        try:
            processes[pid] = use(pid)
        except (psutil.Error, IndexError):  # it has ended
            continue
    return Sample(step_of(job), time.monotonic(), processes, shared_mb(pids), size(Path(job.scratch)), size(job.runs / "job"))


def slope(steps: Sequence[int], values: Sequence[float]) -> float:
    return statistics.linear_regression(steps, values).slope


def quarter(samples: Sequence[Sample], number: int) -> list[Sample]:
    return [one for one in samples if STEPS * (number - 1) / 4 < one.step <= STEPS * number / 4]


def cpu_ms(samples: Sequence[Sample], pid: int) -> float:
    """A process's CPU time for each step."""
    first, last = samples[0], samples[-1]
    return 1000 * (last.processes[pid].cpu_s - first.processes[pid].cpu_s) / (last.step - first.step)


def pace_s(samples: Sequence[Sample]) -> float:
    """The seconds of a step."""
    return (samples[-1].clock_s - samples[0].clock_s) / (samples[-1].step - samples[0].step)


def rises(samples: Sequence[Sample], values: Sequence[float]) -> bool:
    """Whether the least of the last quarter is more than that of the quarter before: what comes and goes does not count."""
    of = dict(zip((one.step for one in samples), values, strict=True))
    third, last = (min(of[one.step] for one in quarter(samples, number)) for number in (3, 4))
    return last > third


def table(samples: Sequence[Sample], names: dict[int, str]) -> tuple[list[str], list[str]]:
    """The rows of a table, and what has grown."""
    late = quarter(samples, 3) + quarter(samples, 4)
    steps, rows, grown = [one.step for one in late], list[str](), list[str]()
    for pid in sorted(set.intersection(*(set(one.processes) for one in late)), key=lambda pid: names[pid]):
        history, uses = [one.processes.get(pid) for one in samples], [one.processes[pid] for one in late]
        at = [history[max(0, round(len(history) * share) - 1)] for share in (0.25, 0.5, 1.0)]
        gain = slope(steps, [use.mb for use in uses])
        third, last = (cpu_ms(part, pid) for part in (quarter(samples, 3), quarter(samples, 4)))
        memory = " | ".join("-" if use is None else f"{use.mb:.1f}" for use in at)
        rows.append(f"| {names[pid]} | {memory} | {1000 * gain:.2f} | {uses[-1].threads} | {uses[-1].files} | {last:.1f} |")
        if gain > MEMORY_MB:
            grown.append(f"{names[pid]}: {gain:.4f} MB a step")
        slowdown = pace_s(quarter(samples, 4)) / pace_s(quarter(samples, 3)) if names[pid] in BY_CLOCK else 1.0
        if last > max(CPU * third * max(slowdown, 1.0), CPU_MS):
            grown.append(f"{names[pid]}: {third:.1f} ms of CPU a step in the third quarter, {last:.1f} in the last")
        for what, counts in (("threads", [use.threads for use in uses]), ("descriptors", [use.files for use in uses])):
            if rises(late, counts):
                grown.append(f"{names[pid]}: {what} from {counts[0]} to {counts[-1]}")
    if rises(late, [len(one.processes) for one in late]):
        grown.append(f"processes: from {len(late[0].processes)} to {len(late[-1].processes)}")
    if rises(late, [one.shared_mb for one in late]):
        grown.append(f"shared memory: from {late[0].shared_mb:.1f} to {late[-1].shared_mb:.1f} MB")
    for where, folders, kb_most, files_most in (
        ("temporary directory", [one.scratch for one in late], SCRATCH_KB, SCRATCH_FILES),
        ("run's directory", [one.run for one in late], RUN_KB, RUN_FILES),
    ):
        kb, files = (slope(steps, [folder[part] for folder in folders]) for part in (0, 1))
        rows.append(f"{where}: {folders[-1][0] / 1024:.1f} MB in {folders[-1][1]} files, {kb:.2f} kB and {files:.2f} files a step")
        if kb > kb_most or files > files_most:
            grown.append(rows[-1])
    return rows, grown


@pytest.mark.long
def test_no_process_of_a_long_run_grows(tmp_path: Path) -> None:
    build(tmp_path / "model", layers=1, hidden=64, experts=2, expert_hidden=64, seed=1)
    job, samples, names = Job(tmp_path, tmp_path / "model", SHORT), list[Sample](), dict[int, str]()
    job.start()
    try:
        for step in range(EVERY, STEPS, EVERY):
            job.wait_for(f"step {step}", lambda: step_of(job) >= step)  # noqa: B023
            samples.append(sample(job))
            names.update({pid: name(pid) for pid in samples[-1].processes if pid not in names})
        assert job.finish(LIMIT_S) == 0, job.text()[-4000:]
    finally:
        job.kill()
    rows, grown = table(samples, names)
    print("\n| process | MB at a quarter | half | end | kB a step | threads | descriptors | ms of CPU a step |", *rows, sep="\n")
    assert not grown, "; ".join(grown)


def fictitious(**growth: float) -> list[Sample]:
    """The samples of a run that takes so much more with each step, after a first half that does not count."""

    def at(step: int) -> Sample:
        late = max(0, step - STEPS // 2)
        clock_s = step + growth.get("clock_s", 0.0) * late**2
        more = {what: growth.get(what, 0.0) * late for what in ("mb", "threads", "files", "cpu_s", "shared_mb", "logs_kb")}
        threads, files, cpu_s = int(30 + more["threads"] + step % 3), int(40 + more["files"]), step / 50 + late * more["cpu_s"]
        own = Use(100 + more["mb"] + step % 2, threads, files, cpu_s)
        before = Use(min(step, STEPS // 2), 5, 5, step / 50)
        return Sample(step, clock_s, {1: own, 2: before}, 200 + more["shared_mb"], (50 + more["logs_kb"], 9), (7.0 * step, step))

    return [at(step) for step in range(EVERY, STEPS, EVERY)]


@pytest.mark.parametrize(
    ("growth", "sentence"),
    [
        ({}, None),
        ({"mb": 0.02}, "rank: 0.0200 MB a step"),
        ({"threads": 0.01}, "rank: threads from 32 to 40"),
        ({"files": 0.002}, "rank: descriptors from 40 to 41"),
        ({"cpu_s": 1e-4}, "rank: 72.5 ms of CPU a step in the third quarter, 170.0 in the last"),
        ({"shared_mb": 0.01}, "shared memory: from 200.2 to 209.8 MB"),
        ({"logs_kb": 1}, "temporary directory: 1.0 MB in 9 files, 1.00 kB and 0.00 files a step"),
    ],
    ids=str,
)
def test_growing_processes_are_named(growth: dict[str, float], sentence: str | None) -> None:
    assert table(fictitious(**growth), {1: "rank", 2: "core"})[1] == ([] if sentence is None else [sentence])


@pytest.mark.parametrize(("name", "grown"), [("raylet", False), ("rank", True)])
def test_a_process_that_looks_at_the_clock_may_take_more_cpu_a_step_when_steps_are_slower(name: str, grown: bool) -> None:
    samples = fictitious(cpu_s=1e-4, clock_s=5e-3)  # 170 for 72.5 ms of CPU a step, and 8.5 for 3.6 s
    assert bool(table(samples, {1: name, 2: "core"})[1]) == grown

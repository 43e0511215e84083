"""Starts `megarl` as a user does, in a process of its own, and finds every process that it has started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megarl.host.reaper import members

ROOT = Path(__file__).parents[2]
MARK = "MEGARL_TEST_JOB"
RESTARTED = "events/restart"  # metrics of what failed and was replaced
STARVED = ("ranks_starved", "engines_starved")  # alarms that measure the clock
# Metrics that measure the clock, or the memory.
TIMED = (
    *("timing_s/", "perf/tokens_per_second", "perf/time_per_step", "perf/tflops_per_gpu", "perf/memory_", "perf/idle_", "time"),
    *(f"events/{alarm}" for alarm in STARVED),
)

# What a launcher or another system may have left in the environment; every test here shows that a run does not depend on it.
FOREIGN = {
    **{"RAY_ADDRESS": "192.0.2.1:6379", "RAY_AUTH_TOKEN_PATH": "/nowhere", "RAY_RUNTIME_ENV_HOOK": "no.such.hook"},
    **{"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1"},
    "CUDA_VISIBLE_DEVICES": "7",
}

LIMIT_S = 900.0  # ends what hangs; no measure of speed

HEAD = """
name: job
run_dir: {runs}
model: {{path: {model}, dtype: float32}}
cluster: {{gpus: false, start_timeout_s: 600, phase_timeout_s: 600}}
optimizer: {{lr: 1.0e-3, warmup_steps: 2}}
"""  # of every stage that trains
RL = (
    HEAD
    + """algorithm: {{type: gspo}}
data:
  train: {{type: reasoning_gym, dataset: spell_backward, params: {{min_word_len: 3, max_word_len: 5}}, seed: 7, items: 64}}
  eval: {{type: reasoning_gym, dataset: spell_backward, params: {{min_word_len: 3, max_word_len: 5}}, seed: 1000000000, items: 8}}
reward: {{source: {{type: function, path: "tests.e2e.rewards:share_of_letters"}}, require_finished: false}}
rollout: {{samples_per_prompt: 4, max_prompt_tokens: 16, max_response_tokens: 12, max_num_seqs: 64, kv_cache_mb: 16, timeout_s: 600}}
sync: {{transport: shm}}
log: {{tensorboard: false}}
train: {{steps: 3, prompts_per_step: 8, mini_batches: 2, micro_batch_tokens: 512, eval_at_start: false}}
"""
)

SFT = (
    HEAD
    + """data:
  train: {{type: reasoning_gym, dataset: spell_backward, params: {{min_word_len: 3, max_word_len: 5}}, seed: 7, items: 40}}
  eval: {{type: reasoning_gym, dataset: spell_backward, params: {{min_word_len: 3, max_word_len: 5}}, seed: 1000000000, items: 8}}
sft: {{steps: 20, batch_size: 16, micro_batch_tokens: 256, max_tokens: 48, eval_every: 5}}
save: {{every: 3}}
"""
)


STEPS = 9  # of the run below; one of them pretrains the critic
# A critic that is pretrained, a reference with an adaptive coefficient, normalised rewards, dynamic sampling, evaluations on the way.
EVERYTHING = (
    "algorithm={type: ppo, kl_coef: 0.05, kl_target: 0.1}",
    "critic={optimizer: {lr: 0.001}, pretrain_steps: 1}",
    f"train.steps={STEPS - 1}",
    "train.dynamic_sampling_rounds=2",
    "reward.normalise={prompts: 32, clip: 3.0}",
    "train.eval_every=4",
    "save.every=1",
)


@dataclass
class Job:
    """One run of the command line."""

    runs: Path
    model: Path
    overrides: tuple[str, ...] = ()
    verb: str = "train"
    template: str = RL
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    environment: dict[str, str] = field(default_factory=dict)  # besides what every job has
    foreign: dict[str, str] = field(default_factory=lambda: FOREIGN)

    @property
    def saves(self) -> Path:
        return self.runs / "job" / "checkpoints"

    def write(self) -> Path:
        """Its configuration."""
        self.runs.mkdir(parents=True, exist_ok=True)
        config = self.runs / "job.yaml"
        config.write_text(self.template.format(runs=self.runs, model=self.model))
        return config

    def start(self) -> Job:
        config = self.write()
        self.log = self.runs / "log.txt"
        self.scratch = tempfile.mkdtemp(prefix="mj-")  # short: Ray's sockets live below it
        inherited = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_TOKEN"}  # of a lab's session
        own = {MARK: self.mark, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": self.scratch}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "megarl.cli", self.verb, str(config), *self.overrides],
            cwd=ROOT,
            env={**inherited, **self.foreign, **own, **self.environment},
            stdin=subprocess.DEVNULL,
            stdout=self.log.open("wb"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_hears,
        )
        return self

    def finish(self, timeout_s: float = LIMIT_S) -> int:
        """The exit status."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"not done after {timeout_s} s:\n{self.text()[-4000:]}") from None

    def run(self) -> Job:
        """To the end, which must be a good one."""
        status = self.start().finish()
        assert status == 0, self.text()[-4000:]
        return self

    def kill(self) -> None:
        """Ends every process of the job."""
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)

    def pids(self) -> list[int]:
        """Every living process that was started by this job.

        The mark is in its environment, or, where it has written its title over that, it has a file of the job's scratch directory open.
        """
        marked = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if self.mark.encode() in read(f"/proc/{pid}/environ")]
        return sorted({*marked, *members(self.scratch)} - {os.getpid()})

    def gone(self, within_s: float = 120) -> bool:
        """Whether every process of the job has ended, at the latest `within_s` seconds from now."""
        deadline = time.monotonic() + within_s
        while self.pids() and time.monotonic() < deadline:
            time.sleep(0.1)
        return not self.pids()

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def rows(self) -> list[dict[str, Any]]:
        """metrics.jsonl so far, without a line that is being written."""
        path = self.runs / "job" / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.is_file() else []

    def updates(self) -> list[dict[str, Any]]:
        """The metrics of the steps of policy or critic, without those that measure the clock, and what was replaced."""
        rows = [row for row in self.rows() if "actor/grad_norm" in row or "critic/grad_norm" in row]
        return [{name: value for name, value in row.items() if not name.startswith((*TIMED, RESTARTED))} for row in rows]

    def steps(self) -> list[dict[str, Any]]:
        """Of these, the steps of the policy."""
        return [row for row in self.updates() if "actor/grad_norm" in row]

    def wait_for(self, what: str, condition: Callable[[], bool], pause_s: float = 0.2) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert self.process.poll() is None, f"ended with {self.process.returncode} before {what}:\n{self.text()[-4000:]}"
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"no {what} within {LIMIT_S} s:\n{self.text()[-4000:]}")
            time.sleep(pause_s)


def _hears() -> None:
    """Of the signals that a shell has its background jobs ignore."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def assert_same_step(job: Job, one: Job) -> None:
    """Two steps of a job on any layout: the first is that of one rank."""
    assert len(job.steps()) == 2
    assert_same_first_step(job, one)


def assert_same_first_step(job: Job, one: Job) -> None:
    mine, first = job.steps()[0], one.steps()[0]
    # The responses of the first step come from the same weights; what follows may differ by routers' near ties.
    for name in ("reward/mean", "response_length/mean", "perf/tokens"):
        assert mine[name] == first[name], name
    for name in ("actor/entropy", "actor/grad_norm"):
        assert mine[name] == pytest.approx(first[name], rel=5e-3), name
    assert mine["training/logprob_gap_mean"] <= 1e-5 and mine["training/logprob_gap_max"] <= 1e-3


def read(path: str) -> bytes:
    """A file of /proc; nothing where its process has ended."""
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def listeners(pids: list[int]) -> list[str]:
    """The hexadecimal local addresses on which the processes listen over TCP, without the port."""
    inodes = set()
    for pid in pids:
        try:
            targets = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
        except OSError:
            continue
        inodes |= {target[8:-1] for target in targets if target.startswith("socket:[")}
    lines = [line.split() for name in ("tcp", "tcp6") for line in read(f"/proc/net/{name}").decode().splitlines()[1:]]
    return [fields[1].rpartition(":")[0] for fields in lines if fields[3] == "0A" and fields[9] in inodes]

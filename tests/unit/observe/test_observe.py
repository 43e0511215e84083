"""What is measured and kept of a run: phases, writers, memory, summary."""

import errno
import fcntl
import io
import json
import math
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from rich.console import Console as RichConsole

from megarl.config import ConfigError, TrainConfig, load
from megarl.errors import Stopped
from megarl.observe import processes, run_directory, summary
from megarl.observe.alarms import Alarms
from megarl.observe.console import Console
from megarl.observe.estimates import estimated
from megarl.observe.metrics import Max, Mean, Metric, Sum
from megarl.observe.phases import OTHER, Phases
from megarl.observe.processes import PeakMemory
from megarl.observe.report import draw
from megarl.observe.run import Run
from megarl.observe.run_directory import claim
from megarl.observe.writers import JsonLines, TensorBoard, read_json_lines
from megarl.rewards.score import RewardUnavailable, Score

CONFIG = """
name: watched
model: {path: nowhere}
algorithm: {type: gspo}
data:
  train: {type: reasoning_gym, dataset: spell_backward, seed: 1, items: 8}
  eval: {type: reasoning_gym, dataset: spell_backward, seed: 2, items: 8}
reward: {source: {type: reasoning_gym}}
train: {steps: 3, prompts_per_step: 8}
"""


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    (tmp_path / "config.yaml").write_text(CONFIG)
    return load(tmp_path / "config.yaml", [f"run_dir={tmp_path / 'runs'}"], TrainConfig)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_phases_add_up_to_the_wall_time_however_they_nest() -> None:
    clock = Clock()
    phases = Phases(clock)
    clock.now = 1.0
    with phases("update"):
        clock.now = 3.0
        with phases("eval"):
            clock.now = 6.0
            assert phases.current() == ("eval", 3.0)
        clock.now = 7.0
    assert phases.take() == {"other": 1.0, "update": 3.0, "eval": 3.0}
    with pytest.raises(ValueError, match="inside"), phases("eval"):
        clock.now = 9.0
        raise ValueError("inside")
    assert phases.take() == {"eval": 2.0}
    clock.now = 10.0
    assert phases.total() == {"other": 2.0, "update": 3.0, "eval": 5.0}


def test_json_lines_keep_every_digit_and_non_finite_numbers(tmp_path: Path) -> None:
    writer = JsonLines(tmp_path / "metrics.jsonl")
    values = {"a": 0.1 + 0.2, "tiny": 5e-324, "nan": math.nan, "inf": -math.inf}
    writer.write(7, values)
    [line] = (tmp_path / "metrics.jsonl").read_text().splitlines()  # flushed: there before close
    assert json.loads(line) == {"step": 7, "a": 0.1 + 0.2, "tiny": 5e-324, "nan": "nan", "inf": "-inf"}
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "a": 0.')  # a crash
    [row] = read_json_lines(tmp_path / "metrics.jsonl")
    assert math.isnan(row.pop("nan"))
    assert row == {"step": 7, "a": 0.1 + 0.2, "tiny": 5e-324, "inf": -math.inf}
    writer.close()


def test_tensorboard_reads_what_was_written_and_needs_no_tensorflow(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = TensorBoard(tmp_path)
    for step in (1, 2):
        writer.write(step, {"reward/mean": step / 4})
    writer.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(1, 0.25), (2, 0.5)]
    assert "tensorflow" not in sys.modules


def test_peak_memory_is_that_of_the_largest_process_of_a_kind() -> None:
    code = "data = bytearray(300 << 20); data[::4096] = b'x' * len(data[::4096]); del data; print('ready', flush=True); input()"
    memory = PeakMemory()
    command = [sys.executable, "-c", code, "megarl.rewards.worker"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        memory.sample()
        child.communicate("\n")
    memory.sample()  # the child has ended: what it took is kept
    peak = memory.mb()
    assert 300 < peak["reward"] < 400
    assert peak["driver"] >= psutil.Process().memory_info().rss / 2**20 - 1


def test_peak_memory_tells_the_processes_of_a_ray_session_apart() -> None:
    import ray

    from megarl.cluster.session import ray_session
    from megarl.config import ClusterSettings

    class ModelWorker:
        def ready(self) -> int:
            return 1

    class RolloutWorker(ModelWorker):
        def ready(self) -> int:
            self.child = subprocess.Popen([sys.executable, "-c", "print(1, flush=True); input()"], stdin=subprocess.PIPE)
            return 2

    memory = PeakMemory()
    with ray_session(ClusterSettings(), actors=2):
        actors = [ray.remote(kind).options(num_cpus=1).remote() for kind in (ModelWorker, RolloutWorker)]
        assert ray.get([actor.ready.remote() for actor in actors], timeout=600) == [1, 2]
        memory.sample()
    assert set(memory.mb()) >= {"driver", "model_worker", "rollout", "engine_core", "ray"}
    assert "reward" not in memory.mb()


@pytest.mark.parametrize(
    ("command", "parent", "kind"),
    [
        ("ray::RolloutWorker.respond", "ray", "rollout"),
        ("ray::RolloutWorker.respond", "rollout", "engine_core"),
        ("VLLM::EngineCore", "rollout", "engine_core"),
        ("python -P -m megarl.environments.worker 7", "rollout", "environment"),
        ("python -P -m megarl.environments.python_tool 9", "environment", "environment"),
        ("a game of the user's", "environment", "environment"),
        ("python -P -m megarl.rewards.worker 7", "driver", "reward"),
    ],
)
def test_peak_memory_counts_an_engines_children_as_engine_or_environment(command: str, parent: str, kind: str) -> None:
    assert processes._kind(command.split(), parent) == kind


def test_a_summary_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    summary.write_json(path, {"a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        summary.write_json(path, {"a": 2, "b": math.nan})
    assert json.loads(path.read_text()) == {"a": 1}


def run_steps(config: TrainConfig) -> Path:
    with Run(config) as run:
        with run.phase("sync"):
            run.log(0, {"training/logprob_gap_mean": Mean(3e-6, 1.0), "training/logprob_gap_max": Max(4e-6)})
        run.evaluated("start", [estimated("heldout", [[0], [0], [0], [1]], [0, 0, 1, 1])], {})
        for step in (1, 2, 3):
            with run.phase("rollout"):
                gap = Mean(1e-6, 1.0)
            learned: dict[str, Metric] = {"actor/grad_norm": Mean(1.0, 1.0), "perf/tokens": Sum(100.0), "training/logprob_gap_mean": gap}
            run.log(step, {"reward/mean": Mean(step, 4.0), **learned})
        sets = [estimated("heldout", [[0], [1], [0], [1]], [0, 1, 1, 1]), estimated("own", [[0.5, 0.5], [2.5, 0.5]])]
        run.evaluated("end", sets, {"eval/heldout/raw/mean": Mean(1.0, 4.0)}, step=3)
        run.held_out("held-out after", {"rm/accuracy": Mean(3.0, 4.0)}, step=3)
    return run.directory


def test_a_run_leaves_its_numbers_and_a_summary(config: TrainConfig, capsys: pytest.CaptureFixture[str]) -> None:
    directory = run_steps(config)
    result = json.loads((directory / "summary.json").read_text())
    assert list(result) == [
        *("pass_rate_start", "pass_rate_end", "model", "evaluations", "results", "rl_steps", "starts", "wall_s", "gpu_s"),
        *("logprob_gap_mean", "logprob_gap_max", "peak_rss_mb", "versions", "commit", "alarms", "restarts"),
    ]
    assert result["pass_rate_start"] == {"sampled": 0.25, "greedy": 0.5}
    assert result["pass_rate_end"] == {"sampled": 0.5, "greedy": 0.75}
    assert result["results"] == {"held-out after": {"rm/accuracy": 0.75}}
    assert result["rl_steps"] == 3
    assert result["logprob_gap_mean"] == pytest.approx(6e-6 / 4)  # over all tokens of the run, not over its steps
    assert result["logprob_gap_max"] == 4e-6
    assert result["peak_rss_mb"]["driver"] > 50
    assert result["versions"]["megatron-core"] == "0.19.2"
    rows = read_json_lines(directory / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 0, 1, 2, 3, 3, 3]
    assert rows[-1]["eval/heldout/rm/accuracy"] == 0.75
    assert [row["reward/mean"] for row in rows if "reward/mean" in row] == [0.25, 0.5, 0.75]
    phases = sum(value for row in rows for name, value in row.items() if name.startswith("timing_s/"))
    assert phases <= sum(result["wall_s"].values()) + 0.0005 * len(result["wall_s"])  # the summary rounds each to milliseconds
    assert (directory / "report.png").read_bytes().startswith(b"\x89PNG")
    assert load(directory / "config.yaml", [], TrainConfig) == config
    shown = capsys.readouterr()
    assert "score of own, step 3: avg@2 1.000 [0.307, 1.693]" in shown.err
    assert "step 0" in shown.out and "pass rate avg@1" in shown.out and "score avg@2" in shown.out


def test_commit_names_the_checkout_and_whether_it_was_edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "megarl" / "observe" / "summary.py"
    module.parent.mkdir(parents=True)
    module.write_text("")
    monkeypatch.setattr(summary, "__file__", str(module))
    assert summary.commit() is None  # no checkout
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e", "-c", "init.defaultBranch=main"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"], ["tag", "v1"]):
        subprocess.run([*git, *arguments], check=True)
    clean = summary.commit()
    assert clean is not None and re.fullmatch("[0-9a-f]{8}", clean)
    module.write_text("# edited")
    assert summary.commit() == f"{clean}+"


def test_an_earlier_run_of_the_same_name_is_set_aside(config: TrainConfig) -> None:
    directory = run_steps(config)
    first = (directory / "metrics.jsonl").read_bytes()
    with pytest.raises(RuntimeError, match="broken"), Run(config):
        raise RuntimeError("broken")
    assert (directory / "earlier-1" / "metrics.jsonl").read_bytes() == first
    assert not (directory / "summary.json").exists()  # a run that failed leaves none
    run_steps(config)
    assert (directory / "earlier-2" / "config.yaml").exists()
    assert (directory / "summary.json").exists()


def test_two_runs_do_not_share_a_directory(config: TrainConfig) -> None:
    with Run(config), pytest.raises(ConfigError, match="name: .*watched is in use by another run"), Run(config):
        pass


def test_a_run_waits_for_its_directorys_lock_unless_the_file_system_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    held, usual = claim(tmp_path, patient=False), fcntl.flock
    assert os.path.samestat(os.fstat(held), (tmp_path / ".lock").stat()), "a file's, which NFS locks for all machines"
    monkeypatch.setattr(run_directory, "POLL_S", 0.01)
    monkeypatch.setattr(run_directory, "LOCK_S", 0.05)
    with pytest.raises(Stopped, match="is in use by another run"):  # no fault of the configuration, which would end a chain of jobs
        claim(tmp_path, patient=True)

    def busy(lock: int, how: int) -> None:
        os.close(held)
        monkeypatch.setattr(fcntl, "flock", usual)
        raise BlockingIOError

    def missing(lock: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", busy)
    os.close(claim(tmp_path, patient=True))
    monkeypatch.setattr(fcntl, "flock", missing)
    os.close(claim(tmp_path, patient=False))
    assert capsys.readouterr().err == f"megarl: {tmp_path}: no lock keeps another run out (No locks available)\n"


def test_a_run_directory_that_cannot_be_written_to_is_named(config: TrainConfig) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # writes fail, as on a full disk
    try:
        with pytest.raises(ConfigError) as refused, Run(config):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(refused.value) == f"run_dir: cannot write to {config.directory}: File too large"
    if os.geteuid():
        config.directory.chmod(0o500)
        with pytest.raises(ConfigError, match=r"^run_dir: cannot write to .*/earlier-1: Permission denied$"), Run(config):
            pass


@pytest.mark.parametrize("dumb", [False, True])
def test_the_console_is_plain_where_there_is_no_terminal_or_a_dumb_one(dumb: bool) -> None:
    screen = io.StringIO()
    rich = RichConsole(file=screen, width=200, force_terminal=dumb, _environ={"TERM": "dumb"})
    with Console("r", 3, lambda: ("rollout", 1.0), rich) as console:
        console.phase("start")
        console.phase("reward")
        console.phase("reward")  # a phase of many short turns
        console.progress("copy, MB", 5, 5)
        console.step(1, {"reward/mean": 0.5, "perf/tokens_per_second": 12345.6}, {"rollout": 1.25, "sync": 0.001})
        console.phase("rollout")
        console.rate("step 3", estimated("heldout", [[0], [1]], [1, 1]))
    assert screen.getvalue().splitlines() == [
        "r: start ...",
        "r: reward ...",
        "r: copy, MB 5/5",
        "r: step 1/3  tok/s 12,346 reward 0.500  (rollout 1.2s)",
        "r: pass rate of heldout, step 3: avg@1 0.500 [0.095, 0.905]  greedy 1.000 [0.342, 1.000]",
    ]


def test_the_console_shows_one_live_line_on_a_terminal() -> None:
    screen = io.StringIO()
    with Console("r", 3, lambda: ("rollout", 1.0), RichConsole(file=screen, width=120, force_terminal=True)) as console:
        console.step(2, {"reward/mean": 0.5}, {})
        console.rate("step 2", estimated("heldout", [[0], [1]]))
    assert "r  step 2/3 | rollout 1.0s | reward 0.500 | avg@1 0.500" in screen.getvalue()


def test_the_live_line_names_the_part_of_a_start_and_no_phase_between_two() -> None:
    now = ["start"]
    console = Console("e", 0, lambda: (now[0], 2.0), RichConsole(file=io.StringIO(), force_terminal=True))
    console.phase("start: Ray")
    assert console._line().plain == "e | start: Ray 2.0s"
    now[0] = "eval"
    assert console._line().plain == "e | eval 2.0s"
    now[0] = OTHER
    console.rate("model.path", estimated("heldout", [[0], [1]]))
    assert console._line().plain == "e | avg@1 0.500"


def test_a_collapse_and_a_nan_raise_a_named_warning_once() -> None:
    alarms = Alarms()
    assert alarms.check(1, {"reward/mean": 0.1, "actor/entropy": 1.0, "response_length/mean": 50.0}) == {}
    found = alarms.check(2, {"reward/mean": 0.1, "actor/entropy": 0.005, "response_length/mean": 4.0, "actor/grad_norm": math.nan})
    assert set(found) == {"entropy_collapse", "length_collapse", "non_finite/actor/grad_norm"}
    assert "actor/entropy is 0.005, down from 1 at first" in found["entropy_collapse"]
    assert alarms.check(3, {"reward/mean": 0.1, "actor/entropy": 0.005}) == {}


def test_an_alarm_is_in_the_metrics_on_the_screen_and_in_the_summary(config: TrainConfig, capsys: pytest.CaptureFixture[str]) -> None:
    with Run(config) as run:
        for step in (1, 2):
            run.log(step, {"reward/mean": Mean(1.0, 4.0), "actor/entropy": Mean(1.0 if step == 1 else 0.001, 1.0)})
    assert [row.get("events/entropy_collapse") for row in read_json_lines(run.directory / "metrics.jsonl")] == [None, 1.0]
    message = "step 2: entropy collapse: actor/entropy is 0.001, down from 1 at first"
    assert json.loads((run.directory / "summary.json").read_text())["alarms"] == {"entropy_collapse": message}
    screen = capsys.readouterr()
    assert f"warning: {message}" in screen.err and "alarm entropy_collapse" in screen.out


def test_the_picture_shows_the_critic_by_position(tmp_path: Path) -> None:
    rows = [{"reward/mean": 0.5, "perf/time_per_step": 1.0, "timing_s/update": 1.0} for _ in range(2)]
    profile = {f"critic_by_position/{name}_from_{start}": 0.5 for name in ("value", "return", "advantage") for start in (1, 2, 4, 16)}
    heights = []
    for step, more in enumerate(({}, {**profile, "critic/position_bias": 0.2})):
        writer = JsonLines(tmp_path / f"{step}.jsonl")
        for number, row in enumerate(rows):
            writer.write(number + 1, row | more)
        writer.close()
        draw(tmp_path / f"{step}.jsonl", tmp_path / f"{step}.png")
        heights.append(int.from_bytes((tmp_path / f"{step}.png").read_bytes()[20:24]))
    assert heights[1] > heights[0], "three panels more: a second row"


def test_supervised_training_may_lower_the_entropy() -> None:
    alarms = Alarms()
    assert [alarms.check(step, {"actor/entropy": entropy}) for step, entropy in ((1, 4.6), (2, 0.01))] == [{}, {}]


def test_a_reward_that_fails_on_every_response_ends_the_run(config: TrainConfig) -> None:
    broken, good = Score(None, error="KeyError: 'x\x1b[2J'"), Score(0.0)
    message = "the reward function has failed on every response"
    with pytest.raises(RewardUnavailable, match=rf"^{message} of this run: KeyError: 'x.\[2J'$"), Run(config) as run:
        run.failures([broken])
        run.failures([broken])
    with pytest.raises(RewardUnavailable, match=f"^{message}, 3 times in a row: KeyError"), Run(config) as run:
        for scores in ([broken], [broken], [broken, good], [broken], [], [broken], [], [broken]):  # nothing scored says nothing
            run.failures(scores)
    with Run(config) as run:
        run.failures([broken, good])


def test_a_metrics_line_lost_to_a_full_disk_is_reported_with_the_file() -> None:
    lines = JsonLines(Path("/dev/full"))
    with pytest.raises(OSError, match=r"No space left on device: '/dev/full'$"):
        lines.write(1, {"reward/mean": 0.5})
    lines.close()

"""A run that has ended early goes on from its newest whole checkpoint as if nothing had been, or says why not. Kills: test_kills.py."""

import json
import os
import re
import resource
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import ray

from megarl.checkpoints.verify import main as verify
from megarl.cluster.actor_group import ActorGroup
from megarl.driver.dispatch import Dispatcher
from megarl.errors import SaveError
from megarl.host import termination
from megarl.observe.samples import files
from megarl.rewards.score import RewardUnavailable
from tests.e2e.comparing import assert_same, cut_after
from tests.e2e.job import EVERYTHING, RL, SFT, Job
from tests.e2e.kill_at import done
from tests.e2e.lab import Lab, command
from tests.e2e.rewards import share_of_letters
from tests.e2e.test_pairs import STAGE as PAIRS
from tests.e2e.test_pairs import write_pairs
from tests.rows import rows
from tests.signals import taken
from tests.unit.rewards.test_http import reply, serving


def prefix(job: Job, straight: Job, but: Sequence[str] = ()) -> None:
    """Every step of the job is that of the straight run, and no step is missing."""
    mine, theirs = job.updates(), straight.updates()
    mine = [{name: value for name, value in row.items() if name not in but} for row in mine]
    assert [row["step"] for row in mine] == list(range(1, len(mine) + 1))
    for one, other in zip(mine, theirs, strict=False):
        assert one == other


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_damaged_and_incomplete_checkpoints_are_named_and_passed_over_and_another_run_is_refused(
    lab: Lab, straight: Job, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The critic has a rank of its own, and so a folder: of three steps one has a flipped bit and one has lost its critic."""
    apart = (*EVERYTHING, "placement.critic={ranks: 1}")
    lab.run(Job(tmp_path, tiny_model, (*apart, "train.steps=2")))
    saves = Job(tmp_path, tiny_model).saves
    [oldest, middle, newest] = sorted(path for path in saves.glob("step_??????"))
    shutil.rmtree(saves.with_name("checkpoints-critic") / middle.name)
    flip(next((newest / "policy").glob("*.distcp")))

    may_not = ("optimizer.lr=0.5", "data.train.seed=8", "data.train.items=65", "algorithm.gae_lambda=0.5")
    other = Job(tmp_path, tiny_model, (*apart, *may_not, "layout={ranks: 2, tp: 2}", "log.tensorboard=true"))
    capsys.readouterr()
    assert command(other) == 2
    said = "".join(capsys.readouterr())
    refusals = [line.removeprefix("megarl: error: ") for line in said.splitlines() if line.startswith("megarl: error: ")]
    changed = {"optimizer.lr": (0.001, 0.5), "data.train.seed": (7, 8), "data.train.items": (64, 65), "algorithm.gae_lambda": (0.95, 0.5)}
    for key, (old, new) in changed.items():
        assert f"{key}: {old!r} in the checkpoint and {new!r} now: a resumed run cannot change it" in refusals
    assert "data.train: 64 items in the checkpoint and 65 now: a resumed run cannot change it" in refusals
    assert len(refusals) == len(changed) + 2 and str(newest) in refusals[-1], refusals
    assert "..." not in said, "no process was started"
    assert command(replace(other, overrides=(*other.overrides, "--check"))) == 2 and "".join(capsys.readouterr()) == said

    job = lab.run(Job(tmp_path, tiny_model, (*apart, "train.steps=3", "log.tensorboard=true")))
    said = "".join(capsys.readouterr())
    told = [line for line in said.splitlines() if "is skipped: " in line and ".partial" not in line]
    assert len(told) == 2 and str(newest) in told[0] and "flipped" in told[0] and str(middle) in told[1] and "missing" in told[1]
    assert f"step {int(oldest.name[-6:]) + 1}/" in said
    assert len(job.updates()) == 4
    prefix(job, straight)


def test_a_run_may_begin_with_the_weights_of_a_checkpoint(lab: Lab, straight: Job, tmp_path: Path, tiny_model: Path) -> None:
    """As it does with the Hugging Face directory that the same step has left."""
    last = max(straight.saves.glob("step_??????"))
    directory = lab.run(Job(tmp_path / "directory", straight.runs / "job" / "model", ("train.steps=1",)))
    checkpoint = lab.run(Job(tmp_path / "checkpoint", tiny_model, ("train.steps=1", f"model.weights={last}")))
    assert_same(checkpoint, directory, "model")


MUON = "{lr: 0.002, routers: true}"
STEPS = "steps: 3, batch_size: 16, micro_batch_tokens: 256, max_tokens: 48"
# Verb -> its settings; the critic of RL and of value pretraining has an optimizer of its own.
STAGES = {
    "train": ("algorithm={type: ppo}", f"critic={{optimizer: {{lr: 0.001, muon: {MUON}}}}}", f"optimizer.muon={MUON}"),
    "value": ("algorithm={type: vapo}", f"critic={{optimizer: {{lr: 0.001, muon: {MUON}}}, pretrain_steps: 3}}"),
    **{verb: (f"optimizer.muon={MUON}", f"{verb}={{{STEPS}}}") for verb in ("sft", "rm", "dpo")},
}


@pytest.mark.parametrize("verb", rows(STAGES, ["rm"]))
def test_every_stage_goes_on_with_muon(lab: Lab, tmp_path: Path, tiny_model: Path, verb: str) -> None:
    """From its first step's checkpoint, which says that it is Muon's, to the bit."""
    settings, template = [*STAGES[verb], "save={every: 1, keep_last: 3}"], {"train": RL, "value": RL, "sft": SFT}.get(verb, PAIRS)
    if template is PAIRS:
        for number, name in enumerate(("train", "eval")):
            write_pairs(path := tmp_path / f"{name}.jsonl", number, 48)
            settings.append(f"data.{name}.path={path}")
    straight = Job(tmp_path / "straight", tiny_model, tuple(settings), verb, template)
    run = lab.run if template is RL else lab.learn
    run(straight)
    cut = replace(straight, runs=cut_after(1, straight, tmp_path / "cut"))
    [saved] = cut.saves.glob("step_*")
    models = json.loads((saved / "manifest.json").read_text())["content"]["models"]
    trained = {"train": ["policy", "critic"], "value": ["critic"]}.get(verb, ["model"])
    assert [name for name in trained if models[name]["optimizer"].get("muon")] == trained
    assert_same(run(cut), straight, *(name.replace("policy", "model") for name in trained))


def letters(handler: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
    """What the straight run's reward function says."""
    scores = [share_of_letters(prompt="", response=ask["response"], answer="", meta={}) for ask in body["samples"]]
    reply(handler, json.dumps({"scores": scores}).encode())


def test_a_reward_server_that_dies_stops_the_run_with_a_checkpoint(
    lab: Lab, straight: Job, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(letters) as server:
        source = f"{{type: http, url: '{server.url}', attempts: 2, backoff_s: 0.1, timeout_s: 5}}"
        job = Job(tmp_path, tiny_model, (*EVERYTHING, f"reward.source={source}", "save.every=0", "train.steps=4"))
        refused = rf"^reward\.source\.url: {re.escape(server.url)}: ConnectionRefusedError"
        with when(lambda: done(job) >= 2, server.stop), pytest.raises(RewardUnavailable, match=refused):
            lab.run(job)
    [saved] = job.saves.glob("step_*")
    assert saved.name == f"step_{(stopped := done(job)):06d}" and stopped < 5
    with serving(letters, server.http.server_port):
        capsys.readouterr()
        lab.run(job)
    said = "".join(capsys.readouterr())
    assert f"step {stopped + 1}/" in said and f"step {stopped}/" not in said
    assert len(job.updates()) == 5
    prefix(job, straight)


@contextmanager
def when(condition: Callable[[], bool], act: Callable[[], object]) -> Iterator[None]:
    """While the block goes on, waits for a condition in another thread and then acts. The block may not end before."""
    ended = threading.Event()

    def watch() -> bool:
        while not ended.wait(0.02):
            if condition():
                act()
                return True
        return False

    with ThreadPoolExecutor(1) as pool:
        acted = pool.submit(watch)
        try:
            yield
        finally:
            ended.set()
    assert acted.result()


@pytest.mark.parametrize("phase", rows(["generate", "update"], ["update"]))
def test_a_signal_stops_the_run_with_a_checkpoint_and_it_goes_on(
    phase: str,
    lab: Lab,
    straight: Job,
    tmp_path: Path,
    tiny_model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is generated is abandoned; an update is finished, since the models are another step's from its beginning on."""
    job = Job(tmp_path, tiny_model, (*EVERYTHING, "save.every=0", "train.steps=3"))
    wait, finished = ActorGroup.wait, Dispatcher.finished

    def signalled(doing: str) -> None:
        if doing == phase and done(job) == 2 and termination.asked() is None:
            threading.Timer(0.03, os.kill, (os.getpid(), signal.SIGTERM)).start()

    def waiting(group: ActorGroup, references: Sequence[Any], doing: str, timeout_s: float, *helpers: Any) -> list[Any]:
        signalled(doing)
        try:
            return wait(group, references, doing, timeout_s, *helpers)
        finally:
            ray.wait(references, num_returns=len(references))

    def finishing(work: Dispatcher) -> dict[Any, Any]:
        signalled("generate")
        return finished(work)

    with taken(), monkeypatch.context() as patch, pytest.raises(termination.Terminated) as stop:
        patch.setattr(ActorGroup, "wait", waiting)
        patch.setattr(Dispatcher, "finished", finishing)
        lab.run(job)
    told = "the run is saved after this step" in capsys.readouterr().err
    step = 2 if phase == "generate" else 3
    assert stop.value.code == 143 and stop.value.message == f"SIGTERM: saved at step {step}; started again, the run resumes"
    assert done(job) == step and told == (phase == "update")
    lab.run(job)
    assert len(job.updates()) == 4
    prefix(job, straight)
    kept, expected = ({file.path.name: file.path.read_bytes() for file in files(one.runs / "job")} for one in (job, straight))
    assert {name for name in kept if "eval" not in name} == {f"step_{step}.jsonl" for step in range(1, done(job) + 1)}
    assert all(expected[name] == text for name, text in kept.items() if "eval" not in name), "each step once, as if nothing had happened"


def fill_the_disk(ranks: Sequence[int], full: bool) -> None:
    """A rank's files may not grow beyond 200 kB, which the checkpoint's do and nothing else does with weights sent over gloo."""
    hard = resource.RLIM_INFINITY
    for rank in ranks:
        resource.prlimit(rank, resource.RLIMIT_FSIZE, (200_000 if full else hard, hard))


def test_a_save_that_fails_stops_the_run_or_is_told_and_leaves_the_last_one(
    lab: Lab, straight: Job, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = (*EVERYTHING, "sync.transport=gloo", "train.steps=6")
    job = Job(tmp_path / "told", tiny_model, (*place, "save.on_failure=continue"))
    fails = when(lambda: done(job) >= 2, lambda: fill_the_disk(lab.playing, full=True))
    told = when(lambda: any("events/save_failed" in row for row in job.rows()), lambda: fill_the_disk(lab.playing, full=False))
    with fails, told:
        lab.run(job)
    assert "warning: checkpoint: step " in capsys.readouterr().err
    saved = job.runs / "job"
    assert "File too large: " in json.loads((saved / "summary.json").read_text())["alarms"]["save_failed"]
    prefix(job, straight, but=("events/save_failed",))
    assert (saved / "checkpoints" / "latest").read_text() == "step_000007\n"

    job = Job(tmp_path / "stopped", tiny_model, (*place, "save.on_failure=stop"))
    failed = pytest.raises(SaveError, match=r"^checkpoint: step \d+ was not saved: .*File too large: ")
    with when(lambda: done(job) >= 2, lambda: fill_the_disk(lab.playing, full=True)), failed:
        lab.run(job)
    fill_the_disk(lab.playing, full=False)  # these ranks are used again
    assert list(job.saves.glob("step_??????")) and verify([str(job.runs / "job")]) == 0


@pytest.fixture(scope="module")
def supervised(lab: Lab, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Job:
    """A supervised run that nothing happens to."""
    return lab.learn(Job(tmp_path_factory.mktemp("supervised"), tiny_model, verb="sft", template=SFT))


@pytest.mark.long
def test_supervised_training_whose_driver_is_killed_leaves_no_process_and_goes_on(
    lab: Lab, supervised: Job, tmp_path: Path, tiny_model: Path
) -> None:
    """Past an epoch's end; the numbers of the held-out set before the first step are kept."""
    job = Job(tmp_path, tiny_model, verb="sft", template=SFT).start()
    try:
        job.wait_for("sixth step", lambda: done(job) >= 6, 0.02)
        job.process.kill()
        assert job.finish() == -9 and job.gone()
    finally:
        job.kill()
    assert 6 <= done(job) < 20
    assert_same(lab.learn(job), supervised, "model")


def test_supervised_training_whose_rank_is_killed_goes_on_from_the_copy_in_memory(
    lab: Lab, supervised: Job, tmp_path: Path, tiny_model: Path
) -> None:
    job = Job(tmp_path / "mended", tiny_model, ("save.every=0", "save.rolling=local"), verb="sft", template=SFT)
    with when(lambda: done(job) >= 6, lambda: os.kill(lab.playing[0], signal.SIGKILL)):
        lab.learn(job)
    assert_same(job, supervised, "model")
    [restart] = json.loads((job.runs / "job" / "summary.json").read_text())["restarts"]
    assert restart["kind"] == "rank" and restart["lost_steps"] <= 1 and restart["step"] >= 5
    assert any("timing_s/rolling" in row for row in job.rows())

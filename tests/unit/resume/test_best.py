"""Which evaluation of a run is its best, and what is left of it."""

import json
from contextlib import nullcontext
from math import nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.config import TrainConfig, load
from megarl.data.prompts import Prompt
from megarl.loops import train as trainer
from megarl.resume.best import Best
from megarl.step.state import TrainState
from tests.e2e.job import RL

PROMPTS = [Prompt(0, "text", (1,), "", {})]
AVG, OTHER = "train.best=eval/heldout/avg@1", "train.best=eval/heldout/greedy"


def test_numbers_that_are_none_are_never_the_best_for_long(tmp_path: Path) -> None:
    best = Best(tmp_path, None)
    assert best.improves(1, nan, -1.0) and best.improves(2, 0.5, -1.0)
    assert not best.improves(3, nan, -0.5) and not best.improves(4, 0.9, nan) and not best.improves(5, 0.5, -1.0)
    assert (best.step, best.waited) == (2, 3)
    assert best.improves(6, 0.5, -0.9) and (best.step, best.waited) == (6, 0)


def configured(here: Path, *overrides: str) -> TrainConfig:
    (here / "job.yaml").write_text(RL.format(runs=here, model=here))
    return load(here / "job.yaml", ["train.eval_every=1", *overrides], TrainConfig)


def state_at(config: TrainConfig, learned: int = 3) -> TrainState:
    state = TrainState(config, PROMPTS)
    state.step = state.learned = state.evaluated = learned
    return state


def save(directory: Path) -> None:
    directory.mkdir(parents=True)
    (directory / "weights").write_text(directory.name)


@pytest.mark.parametrize(
    ("overrides", "same"),
    [
        ((AVG,), True),
        ((AVG, "train.steps=9", "eval=[{name: more, source: {type: file, path: more.jsonl}}]"), True),
        ((OTHER,), False),
        ((AVG, "data.eval.seed=2000000000"), False),
        ((AVG, "reward.eval={type: reasoning_gym}"), False),
        ((), False),
    ],
)
def test_numbers_of_another_metric_or_other_prompts_do_not_compare(overrides: tuple[str, ...], same: bool, tmp_path: Path) -> None:
    before = state_at(configured(tmp_path, AVG))
    assert before.best.improves(2, 0.9)
    before.best.keep(save)
    again = TrainState(configured(tmp_path, *overrides), PROMPTS)
    again.restore(json.loads(json.dumps(before.state())))
    assert again.best.kept == same and again.best.improves(4, 0.5) != same


def test_prompts_that_have_moved_are_the_same(tmp_path: Path) -> None:
    def stated(name: str, rows: str) -> TrainState:
        (tmp_path / name).write_text(rows)
        return state_at(configured(tmp_path, AVG, f"data.eval={{type: file, path: {tmp_path / name}}}"))

    before = stated("a.jsonl", "1")
    assert before.best.improves(2, 0.9)
    before.best.keep(save)
    for name, rows, same in (("b.jsonl", "1", True), ("c.jsonl", "2", False)):
        again = stated(name, rows)
        again.restore(json.loads(json.dumps(before.state())))
        assert again.best.kept == same


def test_a_run_of_which_nothing_was_compared_leaves_the_policy_that_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`train.best` is given when it goes on, and its last step was evaluated before."""
    state = state_at(configured(tmp_path))
    monkeypatch.setattr(trainer.Checkpoints, "load", lambda self, resume, own: own.restore(resume))
    models: Any = SimpleNamespace(stages=(), sync=lambda *_: {}, save=lambda role, directory: save(directory), wait_for_save=lambda: None)
    run: Any = SimpleNamespace(directory=tmp_path / "left", phase=lambda _: nullcontext())
    engines: Any = SimpleNamespace(busy_s=0.0)
    ctx: Any = SimpleNamespace(config=configured(tmp_path, AVG), run=run, models=models, engines=engines, eval_reward=None)
    resume: Any = json.loads(json.dumps(state.state()))
    trainer.learn(ctx, SimpleNamespace(train=PROMPTS, sets=[]), resume)  # type: ignore[arg-type]
    assert (tmp_path / "left" / "model" / "weights").read_text() == "model"

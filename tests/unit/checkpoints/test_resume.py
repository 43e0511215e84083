"""What a resumed run may change in its configuration, and what it may not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megarl.checkpoints.resume import MAY_DIFFER, compare
from megarl.config import TrainConfig, dump, load, yaml_text
from megarl.describe import keys

EXAMPLE = Path(__file__).parents[3] / "examples" / "quickstart" / "rl.yaml"


def tree(*overrides: str) -> dict[str, Any]:
    """The resolved configuration of a training run."""
    return load(EXAMPLE, list(overrides), TrainConfig).model_dump(mode="json")


def test_the_same_run_may_be_resumed() -> None:
    """From the configuration as its checkpoint has it."""
    config = load(EXAMPLE, [], TrainConfig)
    assert compare(yaml_text.read(dump(config)), config.model_dump(mode="json")) == []


def test_relative_paths_are_those_of_where_the_command_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, here = load(EXAMPLE, ["model.path=models/m", "run_dir=runs"], TrainConfig), Path.cwd()
    assert (config.model.path, config.run_dir, config.model.weights) == (here / "models/m", here / "runs", None)
    assert config.directory == here / "runs" / config.name
    monkeypatch.chdir(tmp_path)
    assert load(EXAMPLE, ["model.path=models/m"], TrainConfig).model.path == tmp_path / "models/m"


@pytest.mark.parametrize(
    "override",
    [
        "layout={ranks: 4, tp: 2, ep: 2}",
        "train.steps=77",
        "train.eval_every=3",
        "train.micro_batch_tokens=99999",
        "log.tensorboard=false",
        "cluster.phase_timeout_s=11",
        "name=elsewhere",
        "rollout.replicas=3",
        "model.recompute=full",
        "sync.bucket_mb=7",
        "data.eval.seed=12345",
    ],
)
def test_where_and_how_long_a_run_goes_on_may_differ(override: str) -> None:
    assert tree(override) != tree()
    assert compare(tree(), tree(override)) == []


@pytest.mark.parametrize(
    ("override", "key", "now"),
    [
        ("seed=99", "seed", 99),
        ("optimizer.lr=0.5", "optimizer.lr", 0.5),
        ("train.prompts_per_step=1024", "train.prompts_per_step", 1024),
        ("rollout.temperature=0.25", "rollout.temperature", 0.25),
        ("data.train.seed=12345", "data.train.seed", 12345),
        ("model.dtype=bfloat16", "model.dtype", "bfloat16"),
        ("reward.require_finished=false", "reward.require_finished", False),
        ("data.chat=false", "data.chat", False),
    ],
)
def test_what_would_make_it_another_run_is_refused_with_both_values(override: str, key: str, now: object) -> None:
    before: Any = tree()
    for part in key.split("."):
        before = before[part]
    assert before != now
    assert compare(tree(), tree(override)) == [f"{key}: {before!r} in the checkpoint and {now!r} now: a resumed run cannot change it"]


def test_another_algorithm_is_one_refusal() -> None:
    [line] = compare(tree(), tree("algorithm={type: reinforce}"))
    assert line.startswith("algorithm.type: ") and "'reinforce' now" in line


def test_a_key_that_one_side_lacks_is_refused() -> None:
    saved = tree()
    del saved["seed"]
    assert compare(saved, tree()) == ["seed: '(absent)' in the checkpoint and 1 now: a resumed run cannot change it"]
    assert compare(tree(), saved) == ["seed: 1 in the checkpoint and '(absent)' now: a resumed run cannot change it"]


def test_every_key_that_may_differ_is_one_of_the_configuration() -> None:
    """A renamed key would silently be refused."""
    known = {key.name for key, _ in keys(TrainConfig)}
    lost = [key for key in MAY_DIFFER if not any(one == key or key[:2] == "*." and one.endswith(key[1:]) for one in known)]
    assert lost == []

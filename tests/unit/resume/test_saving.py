"""A run resumes from a checkpoint of the same model, and says which number of its config.json is another."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megarl.checkpoints.files import write_file
from megarl.checkpoints.may_differ import held_by
from megarl.checkpoints.steps import MANIFEST, encode, read_manifest
from megarl.checks.model import check_weights
from megarl.cli import main
from megarl.config import ConfigError, TrainConfig, dump, load
from megarl.resume.point import TRAINER, check_resume, resume_point
from tests.e2e.job import RL
from tools.make_tiny_model import build

RUN = {
    "step": 0,
    "learned": 0,
    "metrics_bytes": 0,
    "evaluations": {},
    "results": {},
    "whole": {},
    "warnings": {},
    "ended_by": None,
    "restarts": [],
}


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    """Of a run with a checkpoint: the converted model, and the run's own state."""
    build(model := tmp_path / "model", layers=2, hidden=128, experts=4, expert_hidden=32, seed=1)
    (tmp_path / "job.yaml").write_text(RL.format(runs=tmp_path / "runs", model=model))
    config = load(tmp_path / "job.yaml", [], TrainConfig)
    assert main(["convert", "hf-to-megatron", str(model), str(config.directory / "checkpoints")]) == 0
    step = config.directory / "checkpoints" / "step_000000"
    progress = {"step": 0, "sampler": {"count": 3}}
    trainer = {"verb": "train", "progress": progress, "run": RUN, "where": {"policy": "checkpoints"}, "config": dump(config)}
    record = write_file(step / TRAINER, json.dumps({**trainer, "held": held_by(config.model_dump())}).encode())
    manifest = read_manifest(step)
    (step / MANIFEST).unlink()
    write_file(step / MANIFEST, encode(replace(manifest, files={**manifest.files, TRAINER: record})))
    return config


def edit(config: TrainConfig, **changes: Any) -> None:
    file = config.model.path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_another_number_of_the_same_shapes_is_refused_by_name(config: TrainConfig) -> None:
    check_resume(config, "train", 3)
    edit(config, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    with pytest.raises(ConfigError) as refused:
        check_resume(config, "train", 3)
    line, end = str(refused.value).splitlines()
    both = "rms_norm_eps is 1e-05, and 1e-06 in the checkpoint; rope_theta is 500000.0, and 10000.0 in the checkpoint"
    assert line == f"model.path: {config.model.path / 'config.json'}: {both}: a resumed run cannot change it"
    assert end.endswith("false starts over")
    found = resume_point(config, "train", 3, own=True)  # by a run that recovers and has read its model before
    assert found is not None and found.progress["step"] == 0


def test_a_template_that_was_edited_is_refused_by_its_file(config: TrainConfig) -> None:
    (config.model.path / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(
        ConfigError, match=r"^model\.path: .* is not what it was when the checkpoint was saved \(chat_template\.jinja\): a "
    ):
        check_resume(config, "train", 3)


def test_weights_of_another_arithmetic_are_refused_by_name(config: TrainConfig) -> None:
    from megarl.models.description import ModelDescription

    settings = config.model.model_copy(update={"weights": config.directory / "checkpoints" / "step_000000"})
    check_weights(settings, ModelDescription.read(config.model.path), "lm")
    for changes, message in (
        ({"num_experts_per_tok": 3}, "num_experts_per_tok is 2, and model.path's is 3"),
        ({"num_experts_per_tok": 2, "norm_topk_prob": False}, "norm_topk_prob is True, and model.path's is False"),
    ):
        edit(config, **changes)
        with pytest.raises(ConfigError, match=message):
            check_weights(settings, ModelDescription.read(config.model.path), "lm")

"""`megarl slurm --dry-run` and `megarl plan` where configurations are written: no Slurm, no GPU, torch's CPU build, config.json alone."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megarl.cli import main
from tests.e2e.job import RL
from tests.published_models import MODELS
from tests.unit.examples.test_configurations import EXAMPLES

Printed = Callable[[], tuple[str, list[str]]]
PARTITION = "PartitionName=main Default=YES TotalNodes=2 State=UP"
NOT_CHECKED = "megarl: not checked: "
BIG = {  # example: verb, nodes
    "qwen3_30b_a3b/gspo": ("train", 4),
    "qwen3_30b_a3b/agent": ("train", 4),
    "qwen3_30b_a3b/one_node_80gb": ("train", 1),
    "qwen3_30b_a3b/dpo": ("dpo", 2),
    "qwen3_30b_a3b/rm": ("rm", 2),
    "qwen3_235b_a22b/gspo": ("train", 16),
    "deepseek_v3/gspo": ("train", 16),
    "deepseek_v3/gspo_fp8": ("train", 16),
    "gpt_oss_120b/gspo": ("train", 8),
    "kimi_k2/gspo": ("train", 32),
}


@pytest.fixture
def laptop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with models' config.json, on a machine without GPUs and Slurm."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("megarl.slurm.checks.version", lambda package: {"torch": "2.13.0+cpu"}[package])  # also where torch is a CUDA build
    monkeypatch.chdir(tmp_path)
    for name, model in MODELS.items():
        (folder := tmp_path / "models" / name).mkdir(parents=True)
        stored = {} if model.quantization is None else {"quantization_config": model.quantization}
        config = {"architectures": [model.architecture], "model_type": model.kind, **model.config, **stored}
        (folder / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str]) -> Printed:
    """Returns what was printed: on stdout, and the things on stderr that are not checked."""

    def read() -> tuple[str, list[str]]:
        out, err = capsys.readouterr()
        assert all(line.startswith(NOT_CHECKED) for line in err.splitlines()), err
        return out, [line.removeprefix(NOT_CHECKED) for line in err.splitlines()]

    return read


@pytest.mark.parametrize("name", BIG)
def test_a_dry_run_of_a_large_example_needs_config_json_alone(name: str, laptop: Path, printed: Printed) -> None:
    verb, nodes = BIG[name]
    config = str(EXAMPLES / f"{name}.yaml")
    assert main(["slurm", config, "--verb", verb, "--nodes", str(nodes), "--gpus-per-node", "8", "--dry-run"]) == 0
    script, lines = printed()
    assert f"#SBATCH --nodes={nodes}\n" in script
    assert len(set(lines)) == len(lines)
    data = ["data.train: ", "data.eval: "] if verb == "train" else ["the data: "]
    for thing in (
        "partition, nodes",
        "the nodes' Python: ",
        "the weights: ",
        "the nodes: ",
        "cluster.gpu_memory_gb=",
        "the nodes' GPUs: ",
        *data,
    ):
        assert sum(line.startswith(thing) for line in lines) == 1, (thing, lines)
    assert any(line.startswith("cluster.interface=eth0: ") for line in lines) == (nodes > 1)
    assert any(line.startswith("the environment's turns: ") for line in lines) == name.endswith("agent")


def test_a_plan_needs_config_json_alone(laptop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("qwen3_30b_a3b/dpo", "qwen3_30b_a3b/gspo"):
        assert main(["plan", str(EXAMPLES / f"{name}.yaml"), "--verb", BIG[name][0]]) == 0
        out, err = capsys.readouterr()
        assert out.endswith("fits\n") and not err


def bare(model: Path) -> None:
    (model / "model.safetensors").unlink()


def indexed(model: Path) -> None:
    """As after `hf download --include '*.json'`."""
    bare(model)
    (model / "model.safetensors.index.json").write_text('{"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}')


def without_tokenizer(model: Path) -> None:
    for file in model.glob("tokenizer.*"):
        file.unlink()


def whole(model: Path) -> None:
    pass


HTTP = "reward.source={type: http, url: 'http://127.0.0.1:9', token_env: NO_SUCH_TOKEN}"
FILE = "data.train={type: file, path: /nowhere/prompts.parquet}"
LACKING = {  # what is lacking: what happens to the model, the arguments, the line
    "weights": (bare, [], "the weights: model.path: .* has neither model.safetensors nor"),
    "weights that an index names": (
        indexed,
        [],
        "the weights: model.path: .*/model.safetensors.index.json names 'model-00001-of-00002.safetensors', which is not a file",
    ),
    "a tokenizer": (without_tokenizer, [], "data.train: model.path: no tokenizer in "),
    "data": (whole, [FILE], "data.train: data.train.path: no such file: /nowhere/prompts.parquet"),
    "a checkpoint": (whole, ["model.weights=/nowhere/step_000001"], "the weights: model.weights: no such directory: /nowhere/"),
    "a token": (whole, [HTTP], "the reward: reward.source.token_env: the environment variable NO_SUCH_TOKEN is not set"),
    "a file of the reward": (whole, ["reward.sandbox.readable=[/nowhere]"], "the reward: reward.sandbox.readable: /nowhere: "),
    "an image": (whole, ["--container", "/nowhere.sqsh"], "the container: slurm: --container: no such file: /nowhere.sqsh"),
    "a mount": (whole, ["--container", "docker://a", "--mount", "/nowhere:/x"], "the container: slurm: --mount: no such file: /nowhere"),
}


@pytest.mark.parametrize("name", LACKING)
def test_a_dry_run_names_what_is_missing_and_a_submission_refuses_it(
    name: str, laptop: Path, tiny_model: Path, printed: Printed, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lose, arguments, line = LACKING[name]
    shutil.copytree(tiny_model, laptop / "model")
    lose(laptop / "model")
    (laptop / "job.yaml").write_text(RL.format(runs=laptop / "runs", model=laptop / "model"))
    command = ["slurm", "job.yaml", "cluster.interface=eth0", "--nodes", "2", "--dry-run", *arguments]
    assert main(command) == 0
    script, lines = printed()
    assert script.startswith("#!") and sum(re.match(line, one) is not None for one in lines) == 1, lines
    for program, answer in (("scontrol", PARTITION), ("sinfo", "1|(null)\n1|(null)")):
        (laptop / program).write_text(f"#!/bin/sh\nprintf '%s\\n' '{answer}'\n")
        (laptop / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{laptop}:/usr/bin:/bin")
    assert main(command) == 2
    [refused] = capsys.readouterr().err.splitlines()
    assert re.match(f"megarl: error: {line.partition(': ')[2]}", refused)
    assert not (laptop / "runs").exists()


def test_checks_refuse_bad_input_without_slurm_or_gpus(laptop: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(tiny_model, laptop / "model")
    bare(laptop / "model")
    (laptop / "job.yaml").write_text(RL.format(runs=laptop / "runs", model=laptop / "model"))
    for change, line in (
        ("layout={ranks: 2, tp: 2, pp: 1}", None),
        ("layout={ranks: 7, tp: 7}", "layout.tp=7: model has "),
        ("train.prompts_per_step=65", "train.prompts_per_step=65: data.train holds 64 prompts"),
        ("model.path=/nowhere", "model.path: no such directory: /nowhere"),
    ):
        status = main(["slurm", "job.yaml", "cluster.interface=eth0", "--nodes", "2", "--dry-run", change])
        errors = [one for one in capsys.readouterr().err.splitlines() if one.startswith("megarl: error: ")]
        assert (status, len(errors)) == ((0, 0) if line is None else (2, 1)), (change, errors)
        assert line is None or errors[0].startswith(f"megarl: error: {line}")

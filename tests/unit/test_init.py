"""`megarl init`: what it writes passes every check of its verb, and holds what the data have."""

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.checks.memory import check_fits
from megarl.cli import main
from megarl.cluster.process_kinds import demand
from megarl.config import DpoConfig, RunSettings, SftConfig, TrainConfig, load
from tests.rows import rows as suite_rows
from tests.unit.data.written import written
from tests.unit.examples.test_configurations import QWEN3_30B_A3B, write_headers
from tools.make_tiny_model import build

SUMS = [{"question": f"{n} + 17?", "solution": str(n + 17), "level": n} for n in range(40)]
DAPO = [{"prompt": [{"role": "user", "content": row["question"]}], "reward_model": {"ground_truth": row["solution"]}} for row in SUMS]
TALKS = [{"messages": [{"role": "user", "content": "a" * n}, {"role": "assistant", "content": "b"}]} for n in range(1, 20)]
WORDS = [{**row, "solution": "an answer in words, which no mathematics compares"} for row in SUMS]
PAIRS = [{"prompt": f"{n}?", "chosen": "yes", "rejected": "no"} for n in range(8)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def wrote(folder: Path, rows: list[dict[str, Any]], model: Path, *options: str) -> list[str]:
    """What the command says of a file of these rows."""
    written(folder / "own.jsonl", *rows)
    return ["init", str(model), "own.jsonl", *options]


def following(printed: str) -> str:
    """The command after "next:"."""
    [line] = [line for line in printed.splitlines() if line.startswith("next:")]
    return line.removeprefix("next:").strip()


@pytest.mark.parametrize(
    ("rows", "verb"), [(SUMS, "train"), (DAPO, "train"), (TALKS, "sft"), (PAIRS, "dpo")], ids=["sums", "dapo", "talks", "pairs"]
)
def test_what_it_writes_passes_every_check(
    folder: Path, tiny_model: Path, rows: list[dict[str, Any]], verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(wrote(folder, rows, tiny_model, "--cpu")) == 0
    assert capsys.readouterr().out.splitlines() == ["megarl: wrote own.yaml", f"next:   megarl {verb} own.yaml --check"]
    assert main([verb, "own.yaml", "--check"]) == 0
    assert capsys.readouterr().out == "megarl: own.yaml passes every check\n"
    assert main(wrote(folder, rows, tiny_model, "--cpu")) == 2
    assert capsys.readouterr().err == "megarl: error: init: own.yaml already exists; name another file with --out\n"


def test_a_reward_to_be_rewritten_is_written_once_and_passes_the_check(
    folder: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(folder))
    assert main(wrote(folder, WORDS, tiny_model, "--cpu")) == 0
    assert capsys.readouterr().out.splitlines() == [
        "megarl: wrote own.yaml",
        "megarl: wrote my_reward.py, which compares response and answer: replace that with your reward",
        "next:   megarl train own.yaml --check",
    ]
    assert main(["train", "own.yaml", "--check"]) == 0
    (folder / "my_reward.py").write_text("mine\n")
    capsys.readouterr()
    assert main(wrote(folder, WORDS, tiny_model, "--cpu", "--out", "other.yaml")) == 0
    assert "megarl: my_reward.py already exists and is used as the reward" in capsys.readouterr().out.splitlines()
    assert (folder / "my_reward.py").read_text() == "mine\n"


def test_layers_for_further_tokens_are_left_out(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build(folder / "glm", layers=2, hidden=128, experts=8, expert_hidden=32, seed=1, family="glm4_moe")
    config = json.loads((folder / "glm" / "config.json").read_text())
    (folder / "glm" / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    tensors = load_file(folder / "glm" / "model.safetensors") | {"model.layers.2.eh_proj.weight": torch.zeros(2)}
    save_file(tensors, folder / "glm" / "model.safetensors")
    assert main(wrote(folder, SUMS, folder / "glm", "--cpu")) == 0 and main(["train", "own.yaml", "--check"]) == 0
    assert load(folder / "own.yaml", [], TrainConfig).model.mtp == "keep" and "multi-token" in (folder / "own.yaml").read_text()
    assert main(["generate", str(folder / "glm"), "x", "--cpu", "--n", "0"]) == 2
    assert capsys.readouterr().err == "megarl: error: --n: Input should be greater than 0 (got 0)\n", "and it can be asked"


def test_columns_lengths_and_held_out_rows_are_those_of_the_data(folder: Path, tiny_model: Path) -> None:
    assert main(wrote(folder, SUMS, tiny_model, "--gpus", "8", "--gpu-gb", "80")) == 0
    config = load(folder / "own.yaml", [], TrainConfig)
    train, held_out = config.data.train, config.data.eval
    assert train.type == "file" and held_out is not None and held_out.type == "file"
    assert (train.prompt_key, train.answer_key, train.skip, held_out.rows) == ("question", "solution", 4, 4)
    assert config.reward.source.type == "math_verify" and config.rollout.max_prompt_tokens % 16 == 0
    longest = int(re.findall(r"the longest prompt has (\d+) tokens", (folder / "own.yaml").read_text())[0])
    assert int(1.25 * longest) <= config.rollout.max_prompt_tokens < 1.25 * longest + 16
    assert config.layout.ranks + config.rollout.replicas * config.rollout.tp == 8 and config.sync.transport == "nccl"
    assert main(wrote(folder, WORDS, tiny_model, "--cpu", "--out", "words.yaml")) == 0
    assert load(folder / "words.yaml", [], TrainConfig).reward.source.type == "function"
    assert all(
        "cut off by rollout.max_response_tokens scores 0 unread" in (folder / name).read_text() for name in ("own.yaml", "words.yaml")
    )


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Path:
    """Headers of Qwen3-30B-A3B, whose weights are holes, and a tiny model's tokenizer."""
    model = tmp_path_factory.mktemp("large")
    write_headers(model, QWEN3_30B_A3B)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tiny_model / name, model / name)
    return model


@pytest.mark.parametrize(
    ("rows", "root", "gpus", "gb"),
    [
        (SUMS, TrainConfig, 8, 80),
        (SUMS, TrainConfig, 8, 64),
        (SUMS, TrainConfig, 16, 80),
        (SUMS, TrainConfig, 8, 141),
        (TALKS, SftConfig, 16, 80),
        (PAIRS, DpoConfig, 16, 80),
    ],
    ids=["8 x 80 GB", "8 x 64 GB", "16 x 80 GB", "8 x 141 GB", "talks", "pairs"],
)
def test_of_30_b_it_writes_what_fits(
    folder: Path, large: Path, rows: list[dict[str, Any]], root: type[RunSettings], gpus: int, gb: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(wrote(folder, rows, large, "--gpus", str(gpus), "--gpu-gb", str(gb))) == 0
    verb = {TrainConfig: "train", SftConfig: "sft", DpoConfig: "dpo"}[root]
    of_a_job = f"slurm own.yaml{'' if verb == 'train' else ' --verb ' + verb} --nodes {gpus // 8} --gpus-per-node 8 --dry-run"
    assert following(capsys.readouterr().out) == f"megarl {of_a_job}", "this machine has no GPUs"
    config = load(folder / "own.yaml", [], root)
    check_fits(config)
    assert sum(kind.gpus * kind.processes for kind in demand(config)) == gpus and config.layout.ranks > 1
    assert (config.cluster.gpu_memory_gb, config.model.recompute) == (gb, "full")
    if isinstance(config, TrainConfig):
        together = config.placement.engines == "shared"
        assert config.sync.transport == ("cuda_ipc" if together else "nccl") and together == (gpus == 8)
        assert (config.optimizers["optimizer"].offloaded == 1) == (gpus * gb < 550), "so many weights, gradients and Adam take"
    [note] = re.findall(r"^layout:  # of megarl plan, for (.*)$", (folder / "own.yaml").read_text(), re.MULTILINE)
    assert re.match(rf"{gpus} GPUs of {gb} GB: the fullest rank needs \d+\.\d GB", note)


@pytest.fixture
def laptop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without GPUs and Slurm."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("PATH", "/nowhere")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory, large: Path) -> Path:
    """`large` without its weights."""
    model = tmp_path_factory.mktemp("bare") / "model"
    shutil.copytree(large, model, ignore=shutil.ignore_patterns("*.safetensors"))
    return model


SIZES = {"the cpu": ("--cpu",), **{f"{n} GPUs": ("--gpus", str(n), "--gpu-gb", "141") for n in (8, 12, 16)}}
SIZES |= {"8 GB200": ("--gpus", "8", "--device", "GB200"), "12 GPUs of nodes of 4": ("--gpus", "12", "--gpu-gb=141", "--gpus-per-node=4")}


KINDS: dict[str, list[dict[str, Any]]] = {"sums": SUMS, "words": WORDS, "talks": TALKS, "pairs": PAIRS}
OWN = [(kind, size) for kind in KINDS for size in SIZES]


@pytest.mark.parametrize(("kind", "size"), suite_rows(OWN, [*OWN[::5], ("words", "8 GPUs")]))
def test_the_next_command_runs_where_configurations_are_written(
    folder: Path, bare: Path, laptop: None, kind: str, size: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(wrote(folder, KINDS[kind], bare, *SIZES[size], "--out", "my own.yaml")) == 0
    written = capsys.readouterr()
    assert written.err.splitlines() == [
        f"megarl: not checked: the weights: model.path: {bare} has neither model.safetensors nor model.safetensors.index.json"
    ]
    program, verb, *arguments = shlex.split(following(written.out))
    assert (program, verb) == ("megarl", "plan" if size == "the cpu" else "slurm")
    assert main([verb, *arguments]) == 0
    assert "error" not in capsys.readouterr().err
    of_nodes = "interface: " in (folder / "my own.yaml").read_text()
    assert of_nodes == ("cluster.interface=eth0 is a guess" in written.out) == (size not in ("the cpu", "8 GPUs"))
    if size in ("8 GB200", "12 GPUs of nodes of 4"):
        assert arguments[arguments.index("--gpus-per-node") + 1] == "4"


def test_a_machine_with_the_gpus_checks_the_run_itself(
    folder: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = []
    for here, name in ((8, "-own.yaml"), (7, "a.yaml")):
        monkeypatch.setattr("megarl.cli.init.gpus_here", lambda here=here: here)
        assert main(wrote(folder, SUMS, tiny_model, f"--out={name}")) == 0
        commands.append(following(capsys.readouterr().out))
    assert commands == ["megarl train ./-own.yaml --check", "megarl slurm a.yaml --nodes 1 --gpus-per-node 8 --dry-run"]


def test_pairs_of_long_responses_fit_into_a_micro_batch(folder: Path, large: Path) -> None:
    rows = [{"prompt": "?", "chosen": "yes " * 2100, "rejected": "no " * 2100}] * 4
    assert main(wrote(folder, rows, large, "--gpus", "16")) == 0
    config = load(folder / "own.yaml", [], DpoConfig)
    assert 2 * 8192 < 2 * config.dpo.max_tokens <= config.dpo.micro_batch_tokens, "both sides of a pair"
    assert config.layout.dp <= config.dpo.batch_size == len(rows)


def test_of_30_b_it_refuses_gpus_that_are_too_few(folder: Path, large: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(wrote(folder, SUMS, large, "--gpus", "2")) == 2
    [said] = capsys.readouterr().err.splitlines()
    assert re.fullmatch(
        rf"megarl: error: init: {large} does not fit 2 GPUs of 80 GB; the nearest layout, .* needs \d+\.\d GB of a GPU", said
    )
    assert not (folder / "own.yaml").exists()


def test_what_cannot_be_used_is_refused_and_leaves_no_file(folder: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "text.jsonl").write_text('{"text": "a"}\n')
    (folder / "verdicts.jsonl").write_text('{"prompt": "a", "completion": "b", "label": true}\n')
    shutil.copytree(tiny_model, folder / "endless")
    config = json.loads((tiny_model / "config.json").read_text())
    (folder / "endless" / "config.json").write_text(json.dumps({key: config[key] for key in config if key != "model_type"}))
    for arguments, line in (
        (
            ["init", str(tiny_model), "text.jsonl"],
            "megarl: error: init: text.jsonl: no known columns in text: a prompt (prompt, question, ",
        ),
        (
            ["init", str(tiny_model), "verdicts.jsonl"],
            "megarl: error: init: verdicts.jsonl: no known columns in prompt, completion, label: a prompt (",
        ),
        (["init", str(tiny_model), "none.jsonl"], "megarl: error: init: DATA.path: no such file: "),
        (
            wrote(folder, SUMS, Path("Qwen/Qwen3-0.6B")),
            f"megarl: error: model.path: no such directory: {folder}/Qwen/Qwen3-0.6B (a name of the Hugging Face Hub? "
            "hf download Qwen/Qwen3-0.6B --local-dir models/Qwen3-0.6B)",
        ),
        (
            wrote(folder, SUMS, Path("models/Qwen3-30B-A3B")),
            f"megarl: error: model.path: no such directory: {folder}/models/Qwen3-30B-A3B (of the Hugging Face Hub? "
            "hf download ORGANISATION/Qwen3-30B-A3B --local-dir models/Qwen3-30B-A3B)",
        ),
        (
            wrote(folder, SUMS, folder / "endless"),
            f"megarl: error: model.path: {folder}/endless: config.json's model_type=None is not Qwen3MoeForCausalLM's",
        ),
        (
            wrote(folder, SUMS, tiny_model, "--out", "none/own.yaml"),
            "megarl: error: init: --out none/own.yaml: its directory does not exist",
        ),
    ):
        assert main(arguments) == 2
        [said] = capsys.readouterr().err.splitlines()
        assert said.startswith(line)
        assert not (folder / "own.yaml").exists()

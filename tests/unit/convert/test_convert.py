"""Conversion without ranks: bytes, audit, faults named, death and resume, processes that share the work, memory."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.cli import main
from megarl.convert import engine, plan
from megarl.models.families import family_of
from megarl.models.hf import Checkpoint, read_config
from tests.distributed.test_real_shapes import MODELS, config_of
from tests.rows import rows
from tools.make_tiny_model import FAMILIES, build

ROOT = Path(__file__).resolve().parents[3]
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of every family."""
    root = tmp_path_factory.mktemp("families")
    for family in FAMILIES:
        build(root / family, layers=2, hidden=128, experts=8, expert_hidden=32, seed=1, family=family, vocab_size=129)
    return {family: root / family for family in FAMILIES}


@pytest.fixture
def source(models: dict[str, Path], tmp_path: Path) -> Path:
    """A Qwen3-MoE to be damaged."""
    return shutil.copytree(models["qwen3_moe"], tmp_path / "source")


def convert(*arguments: Any) -> None:
    assert main(["convert", *map(str, arguments)]) == 0


def refused(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    """What a conversion says that is refused: one line."""
    capsys.readouterr()
    assert main(["convert", *map(str, arguments)]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("megarl: ")]
    return line


def stored(path: Path) -> dict[str, tuple[torch.dtype, bytes]]:
    """Every tensor of a Hugging Face directory: its dtype and bytes."""
    with Checkpoint(path) as checkpoint:
        found = {name: checkpoint.read(name) for name in checkpoint.tensors}
        return {name: (tensor.dtype, tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()) for name, tensor in found.items()}


def change(path: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Edits the tensors of a directory of one file."""
    tensors = load_file(path / WEIGHTS)
    edit(tensors)
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})


# --- bytes ---


@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_is_the_same_directory(
    models: dict[str, Path], family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "_LEAST", 1 << 19)
    convert("hf-to-megatron", models[family], tmp_path / "steps", "--tp", 2, "--workers", 2)
    assert main(["verify", str(tmp_path / "steps")]) == 0
    convert("megatron-to-hf", tmp_path / "steps", tmp_path / "back", "--shard-gb", "0.001", "--workers", 2)
    assert stored(tmp_path / "back") == stored(models[family])
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "back" / name).read_bytes() == (models[family] / name).read_bytes()
    assert len(list((tmp_path / "back").glob("model-*-of-*.safetensors"))) > 1
    report = json.loads((tmp_path / "back" / "conversion.json").read_text())
    assert report["compared_with_the_original"] == report["written"]["tensors"] == len(stored(models[family]))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["back", "steps"]
    assert sorted(entry.name for entry in (tmp_path / "steps").iterdir()) == ["latest", "step_000000"]


def test_every_tensor_keeps_its_own_dtype_and_a_cast_leaves_float32_buffers(models: dict[str, Path], tmp_path: Path) -> None:
    convert("hf-to-megatron", models["deepseek_v3"], tmp_path / "cast", "--dtype", "bfloat16")
    convert("megatron-to-hf", tmp_path / "cast", tmp_path / "mixed")
    original, mixed = load_file(models["deepseek_v3"] / WEIGHTS), load_file(tmp_path / "mixed" / WEIGHTS)
    kept = {name for name, tensor in mixed.items() if tensor.dtype == torch.float32}
    assert kept == {"model.layers.1.mlp.gate.e_score_correction_bias"}
    assert all(torch.equal(tensor, original[name].to(tensor.dtype)) for name, tensor in mixed.items())
    assert read_config(tmp_path / "mixed")["dtype"] == "bfloat16"
    convert("hf-to-megatron", tmp_path / "mixed", tmp_path / "steps")
    convert("megatron-to-hf", tmp_path / "steps", tmp_path / "back")
    assert stored(tmp_path / "back") == stored(tmp_path / "mixed")


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_tied", "deepseek_v3"])
def test_transformers_loads_what_was_converted(models: dict[str, Path], family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    convert("hf-to-megatron", models[family], tmp_path / "steps")
    convert("megatron-to-hf", tmp_path / "steps", tmp_path / "back")
    tokens = AutoTokenizer.from_pretrained(tmp_path / "back")("abc", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        one, two = (AutoModelForCausalLM.from_pretrained(path)(tokens).logits for path in (models[family], tmp_path / "back"))
    assert torch.equal(one, two)


def test_a_critic_takes_the_backbone_of_a_language_model_and_a_fresh_head(models: dict[str, Path], tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    convert("hf-to-megatron", models["qwen3_moe"], tmp_path / "steps", "--head", "value")
    convert("megatron-to-hf", tmp_path / "steps", tmp_path / "critic", "--model", "critic")
    ours, theirs = stored(tmp_path / "critic"), stored(models["qwen3_moe"])
    assert ours.keys() - theirs.keys() == {"score.weight"} and theirs.keys() - ours.keys() == {"lm_head.weight"}
    assert all(ours[name] == theirs[name] for name in ours if name != "score.weight")
    report = json.loads((tmp_path / "steps" / "step_000000" / "critic" / "conversion.json").read_text())
    assert report["fresh"] == ["score.weight"] and report["left_out"] == {"lm_head.weight": "another head"}
    model, info = AutoModelForSequenceClassification.from_pretrained(tmp_path / "critic", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and model.config.num_labels == 1
    convert("hf-to-megatron", tmp_path / "critic", tmp_path / "again")
    convert("megatron-to-hf", tmp_path / "again", tmp_path / "back")
    assert stored(tmp_path / "back") == ours


def test_what_is_no_part_of_the_model_is_left_out_and_written_down(models: dict[str, Path], tmp_path: Path) -> None:
    source = shutil.copytree(models["qwen2_tied"], tmp_path / "source")
    change(source, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}))
    convert("hf-to-megatron", source, tmp_path / "steps")
    report = json.loads((tmp_path / "steps" / "step_000000" / "policy" / "conversion.json").read_text())
    assert report["left_out"] == {"lm_head.weight": "the embedding once more"}
    convert("megatron-to-hf", tmp_path / "steps", tmp_path / "back")
    assert stored(tmp_path / "back") == stored(models["qwen2_tied"])


def test_layers_of_multi_token_prediction_are_left_out_where_that_is_asked_for(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = shutil.copytree(models["deepseek_v3"], tmp_path / "source")
    further = "model.layers.2.eh_proj.weight"
    change(source, lambda tensors: tensors.update({further: torch.ones(2, 2)}))
    config = {**json.loads((source / "config.json").read_text()), "num_nextn_predict_layers": 1}
    (source / "config.json").write_text(json.dumps(config))
    assert "(--drop-mtp leaves them out" in refused(capsys, "hf-to-megatron", source, tmp_path / "steps")
    convert("hf-to-megatron", source, tmp_path / "steps", "--drop-mtp")
    convert("megatron-to-hf", tmp_path / "steps", tmp_path / "back")
    assert stored(tmp_path / "back") == stored(models["deepseek_v3"])
    assert read_config(tmp_path / "back")["num_nextn_predict_layers"] == 0
    report = json.loads((tmp_path / "steps" / "step_000000" / "policy" / "conversion.json").read_text())
    assert report["left_out"] == {further: "multi-token prediction"}


# --- what is refused ---


def test_tensors_that_do_not_fit_are_named(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = (source / WEIGHTS).read_bytes()

    def says(edit: Callable[[dict[str, torch.Tensor]], Any]) -> str:
        (source / WEIGHTS).write_bytes(whole)
        change(source, edit)
        return refused(capsys, "hf-to-megatron", source, tmp_path / "steps")

    norm = "model.norm.weight"
    assert "holds the tensor model.more.weight" in says(lambda tensors: tensors.update({"model.more.weight": torch.zeros(2)}))
    assert f"lacks the tensor {norm} (1 of" in says(lambda tensors: tensors.pop(norm))
    assert f"{norm} has shape [64], expected [128]" in says(lambda tensors: tensors.update({norm: torch.zeros(64)}))
    assert f"{norm} is stored as I32" in says(lambda tensors: tensors.update({norm: torch.zeros(128, dtype=torch.int32)}))
    query = "model.layers.0.self_attn.q_proj.weight"
    assert "are stored as BF16 and F32" in says(lambda tensors: tensors.update({query: tensors[query].bfloat16()}))
    assert not (tmp_path / "steps").exists()


def test_files_that_are_not_whole_are_named(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = (source / WEIGHTS).read_bytes()
    length = struct.unpack("<Q", whole[:8])[0]

    def says(data: bytes) -> str:
        (source / WEIGHTS).write_bytes(data)
        return refused(capsys, "hf-to-megatron", source, tmp_path / "steps")

    assert "which cannot be" in says(whole[:-1])
    assert "its tensors end at" in says(whole + b"more")
    header = json.loads(whole[8 : 8 + length])
    text = json.dumps(header)[:-1] + ', "model.norm.weight": ' + json.dumps(header["model.norm.weight"]) + "}"
    assert "its header is no JSON object: 'model.norm.weight' is there twice" in says(
        struct.pack("<Q", len(text)) + text.encode() + whole[8 + length :]
    )
    (source / WEIGHTS).rename(source / "pytorch_model.bin")
    assert "only pickled weights" in refused(capsys, "hf-to-megatron", source, tmp_path / "steps")


def test_a_tensor_in_two_files_and_one_that_the_index_does_not_name_are_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = load_file(source / WEIGHTS)
    (source / WEIGHTS).unlink()
    norm, rest = "model.norm.weight", {name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"}
    placed = {**dict.fromkeys(rest, "one.safetensors"), norm: "two.safetensors"}
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    save_file(tensors, source / "one.safetensors")
    save_file({norm: tensors[norm]}, source / "two.safetensors")
    assert "both hold the tensor model.norm.weight" in refused(capsys, "hf-to-megatron", source, tmp_path / "steps")
    save_file(rest, source / "one.safetensors")
    save_file({norm: tensors[norm], "hidden": torch.zeros(1)}, source / "two.safetensors")
    assert "holds the tensor hidden, which" in refused(capsys, "hf-to-megatron", source, tmp_path / "steps")


def test_an_output_layer_that_is_not_the_embedding_it_is_tied_to_is_refused(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = shutil.copytree(models["qwen2_tied"], tmp_path / "source")
    change(source, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}))
    assert "lm_head.weight is not model.embed_tokens.weight" in refused(capsys, "hf-to-megatron", source, tmp_path / "steps")


def test_a_damaged_step_is_named_and_nothing_is_made_of_it(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert("hf-to-megatron", models["qwen3_moe"], tmp_path / "whole")

    def says(damage: Callable[[Path], Any]) -> str:
        shutil.rmtree(tmp_path / "steps", ignore_errors=True)
        shutil.copytree(tmp_path / "whole", tmp_path / "steps")
        damage(tmp_path / "steps" / "step_000000")
        line = refused(capsys, "megatron-to-hf", tmp_path / "steps", tmp_path / "out")
        assert not (tmp_path / "out").exists()
        shutil.rmtree(tmp_path / ".out.partial", ignore_errors=True)
        shutil.rmtree(tmp_path / ".out.journal", ignore_errors=True)
        return line

    shard = Path("policy", "__0_0.distcp")

    def flip(step: Path) -> None:
        data = bytearray((step / shard).read_bytes())
        data[len(data) // 2] ^= 1
        (step / shard).write_bytes(data)

    assert f"{shard}: flipped" in says(flip)
    assert f"{shard}: missing" in says(lambda step: (step / shard).unlink())
    assert f"{shard}: truncated" in says(lambda step: os.truncate(step / shard, 1000))
    assert "more.safetensors: extra" in says(lambda step: (step / "policy" / "more.safetensors").write_bytes(b"x"))
    assert "policy/code.pkl: extra: not in the manifest, a pickle" in says(
        lambda step: (step / "policy" / "code.pkl").write_bytes(b"\x80\x04.")
    )


def test_a_step_of_another_model_than_its_configuration_is_refused(
    models: dict[str, Path], source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert("hf-to-megatron", source, tmp_path / "steps")

    def says(like: Path, *more: str) -> str:
        return refused(capsys, "megatron-to-hf", tmp_path / "steps", tmp_path / "out", "--like", like, *more)

    assert "model_type is 'qwen3_moe'" in says(models["llama"])
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    assert "input" in (line := says(source)) or "shape" in line
    (source / "config.json").write_text(json.dumps({**config, "moe_intermediate_size": 16}))
    assert "decoder.layers.mlp.experts.experts.linear_fc1.weight has shape [2, 8, 64, 128], expected [2, 8, 32, 128]" in says(source)
    assert "has no model 'critic' (--model): it has policy" in says(source, "--model", "critic")


def test_nothing_is_overwritten_and_bad_options_are_named(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert("hf-to-megatron", models["qwen3_moe"], tmp_path / "steps")
    assert "already exists: not overwritten" in refused(capsys, "hf-to-megatron", models["qwen3_moe"], tmp_path / "steps")
    assert "already exists: not overwritten" in refused(capsys, "megatron-to-hf", tmp_path / "steps", models["qwen3_moe"])
    assert "--tp 3" in refused(capsys, "hf-to-megatron", models["qwen3_moe"], tmp_path / "other", "--tp", 3)
    assert "--workers 0" in refused(capsys, "hf-to-megatron", models["qwen3_moe"], tmp_path / "other", "--workers", 0)
    assert "no step directories" in refused(capsys, "megatron-to-hf", models["qwen3_moe"], tmp_path / "other")


@pytest.mark.parametrize("direction", ["hf-to-megatron", "megatron-to-hf"])
def test_a_full_disk_is_one_line_and_the_same_command_goes_on(
    models: dict[str, Path], direction: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "_LEAST", 1 << 19)
    source = models["qwen3_moe"]
    if direction == "megatron-to-hf":
        convert("hf-to-megatron", source, tmp_path / "steps")
        source = tmp_path / "steps"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))  # writes beyond it fail, as on a full disk
    try:
        line = refused(capsys, direction, source, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "File too large; the same command goes on from here" in line
    convert(direction, source, tmp_path / "out")


# --- death, and several processes ---


def begun(before: Callable[[], None], direction: str, source: Path, out: Path) -> BaseProcess:
    """A conversion in many small units, in a process of its own; `before` runs there first."""

    def work() -> None:
        plan._LEAST = plan._MOST = 1 << 19
        before()
        os._exit(main(["convert", direction, str(source), str(out), "--workers", "1"]))

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    return process


def dying() -> None:
    """Dies by SIGKILL at its thirtieth parameter, with some units done."""
    take, taken = engine.Control.parameter, list[Any]()

    def parameter(self: Any, item: plan.PlannedParameter) -> Any:
        taken.append(item)
        if len(taken) == 30:
            os.kill(os.getpid(), signal.SIGKILL)
        return take(self, item)

    engine.Control.parameter = parameter  # type: ignore[method-assign]


def slow(meeting: Path) -> None:
    """Begins when two of its kind are there, takes its time, and says which parameters it took."""
    take, deadline = engine.Control.parameter, time.monotonic() + 90
    (meeting / f"{os.getpid()}.ready").touch()
    while len(list(meeting.glob("*.ready"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)

    def parameter(self: Any, item: plan.PlannedParameter) -> Any:
        time.sleep(0.03)
        with (meeting / f"{os.getpid()}.took").open("a") as file:
            print(item.weight.name, file=file)
        return take(self, item)

    engine.Control.parameter = parameter  # type: ignore[method-assign]


@pytest.mark.parametrize("direction", ["hf-to-megatron", "megatron-to-hf"])
def test_a_killed_conversion_goes_on_where_it_was(
    models: dict[str, Path], direction: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = models["qwen3_moe"], tmp_path / "out"
    if direction == "megatron-to-hf":
        convert("hf-to-megatron", source, tmp_path / "steps")
        source = tmp_path / "steps"
    killed = begun(dying, direction, source, out)
    killed.join(600)
    assert killed.exitcode == -signal.SIGKILL
    journal = next(path for path in [tmp_path / ".out.journal", out / ".step_000000.journal"] if path.exists())
    done = sorted(path.stem for path in journal.glob("0*.json"))
    assert done and not (out / "step_000000").exists()
    monkeypatch.setattr(plan, "_LEAST", 1 << 19)
    monkeypatch.setattr(plan, "_MOST", 1 << 19)
    assert "begun otherwise (options" in refused(capsys, direction, source, out, "--dtype", "bfloat16")
    damaged = (
        tmp_path / ".out.partial" / WEIGHTS if direction == "megatron-to-hf" else out / "step_000000.partial" / "policy" / "__0_0.distcp"
    )
    with damaged.open("r+b") as file:  # a unit that was done
        file.seek(damaged.stat().st_size // 3)
        file.write(b"?")
    from megarl.convert.to_hf import ToHF
    from megarl.convert.to_megatron import ToMegatron

    redone: list[int] = []
    kind: Any = ToHF if direction == "megatron-to-hf" else ToMegatron
    work = kind.convert

    def watched(self: Any, unit: plan.Unit, control: Any) -> Any:
        redone.append(unit.index)
        return work(self, unit, control)

    monkeypatch.setattr(kind, "convert", watched)
    convert(direction, source, out)
    assert len({int(name) for name in done} & set(redone)) == 1, "of what was done, the damaged unit alone"
    if direction == "hf-to-megatron":
        monkeypatch.undo()
        convert("megatron-to-hf", out, tmp_path / "back")
    assert stored(tmp_path / "back" if direction == "hf-to-megatron" else out) == stored(models["qwen3_moe"])


def test_processes_share_one_conversion(models: dict[str, Path], tmp_path: Path) -> None:
    children = [begun(partial(slow, tmp_path), "hf-to-megatron", models["qwen3_moe"], tmp_path / "out") for _ in range(2)]
    for child in children:
        child.join(600)
    assert sorted([child.exitcode for child in children], key=str) in ([0, 0], [0, 1])
    shares = [file.read_text().splitlines() for file in tmp_path.glob("*.took")]
    items, _ = plan.planned(models["qwen3_moe"], None, None, 1, 1)
    assert len(shares) == 2 and sorted(shares[0] + shares[1]) == sorted(item.weight.name for item in items)
    convert("megatron-to-hf", tmp_path / "out", tmp_path / "back")
    assert stored(tmp_path / "back") == stored(models["qwen3_moe"])


# --- memory, and plans ---


# Converts there and back, and prints how much memory each took at most.
MEASURE = """
import json, sys
from pathlib import Path
import megarl.convert.to_hf, megarl.convert.to_megatron
from megarl.cli import main

def held():
    return [int(line.split()[1]) << 10 for line in Path("/proc/self/status").open() if line.startswith("VmHWM:")][0]

peaks = []
for direction, source, out in (("hf-to-megatron", "source", "steps"), ("megatron-to-hf", "steps", "back")):
    Path("/proc/self/clear_refs").write_text("5")
    before = held()
    assert main(["convert", direction, f"{sys.argv[1]}/{source}", f"{sys.argv[1]}/{out}", "--workers", "4"]) == 0
    peaks.append(held() - before)
print(json.dumps(peaks))
"""


def test_memory_is_twice_the_largest_layer_whatever_the_model(tmp_path: Path) -> None:
    hf = {**config_of(MODELS["Qwen3-30B-A3B"]), "hidden_size": 512, "num_hidden_layers": 8, "vocab_size": 4096, "num_experts": 8}
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(hf))
    tensors = {name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in family_of(hf).expected(hf).items()}
    save_file(tensors, source / WEIGHTS)
    items, _ = plan.planned(source, None, None, 1, 1)
    size, layer = sum(item.size for item in items), plan.largest_layer(items).size
    assert size > 7 * layer > 140 << 20
    del tensors
    # Nothing that is freed is kept: arenas of idle threads come and go with the machine's load, and the way back would use what is left.
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "131072"}
    ran = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    peaks = json.loads(ran.stdout.splitlines()[-1])
    for peak in peaks:
        assert layer // 4 < peak < 2 * layer + (32 << 20), (peaks, layer)  # and what Python and torch take on first use


@pytest.mark.parametrize("name", rows(("Qwen3-30B-A3B", "Qwen3-235B-A22B", "DeepSeek-V3"), ("Qwen3-30B-A3B", "DeepSeek-V3")))
def test_a_real_model_is_planned_from_its_configuration_in_seconds(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = MODELS[name]
    (tmp_path / "config.json").write_text(json.dumps(config_of(model)))
    begun = time.monotonic()
    convert("hf-to-megatron", "--plan", tmp_path, "--tp", model.layout.tp, "--etp", 2)
    assert time.monotonic() - begun < 120
    said = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert said["parameters"].startswith(f"{model.parameters:,} ")

"""What conversion refuses, in one line, with nothing written."""

import errno
import json
import os
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.checkpoints.files import StoredFile
from tests.unit.convert.converting import WEIGHTS, change, convert, refused


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
    assert "its header is not a JSON object: 'model.norm.weight' is there twice" in says(
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
    said = refused(capsys, "hf-to-megatron", source, tmp_path / "steps")
    assert "config.json ties lm_head.weight to model.embed_tokens.weight, but their values differ by up to 1, and transformers" in said
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))  # as the message says
    convert("hf-to-megatron", source, tmp_path / "steps")


def test_a_damaged_step_is_named_and_nothing_is_made_of_it(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    convert("hf-to-megatron", models["qwen3_moe"], tmp_path / "whole")
    read_part = StoredFile.read_part

    def unreadable(self: StoredFile, start: int, target: memoryview) -> int:
        if self.path.suffix == ".distcp":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(self.path))
        return read_part(self, start, target)

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

    assert re.search(rf"{shard}: \S+: flipped: ", says(flip))  # names the tensor
    with monkeypatch.context() as patch:
        patch.setattr(StoredFile, "read_part", unreadable)
        assert f"{shard}: unreadable: Input/output error" in says(lambda step: None)
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
    rope = config["rope_parameters"]
    for changed, key, then, now in (
        ({"rope_parameters": {**rope, "rope_theta": 5e5}}, "rope_theta", 10000.0, 500000.0),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps", 1e-6, 1e-5),
        ({"num_experts_per_tok": 3}, "num_experts_per_tok", 2, 3),
        ({"norm_topk_prob": False}, "norm_topk_prob", True, False),
    ):  # of the same shapes
        (source / "config.json").write_text(json.dumps({**config, **changed}))
        assert f"{key} is {then!r}, and {now!r} in {source / 'config.json'} (--like)" in says(source)
    old = {key: value for key, value in config.items() if key != "rope_parameters"}
    (source / "config.json").write_text(json.dumps({**old, "rope_theta": rope["rope_theta"], "max_position_embeddings": 64}))
    convert("megatron-to-hf", tmp_path / "steps", tmp_path / "out", "--like", source)


def test_nothing_is_overwritten_and_bad_options_are_named(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convert("hf-to-megatron", models["qwen3_moe"], tmp_path / "steps")
    assert "already exists: not overwritten" in refused(capsys, "hf-to-megatron", models["qwen3_moe"], tmp_path / "steps")
    assert "already exists: not overwritten" in refused(capsys, "megatron-to-hf", tmp_path / "steps", models["qwen3_moe"])
    assert "--tp 3" in refused(capsys, "hf-to-megatron", models["qwen3_moe"], tmp_path / "other", "--tp", 3)
    assert "--workers 0" in refused(capsys, "hf-to-megatron", models["qwen3_moe"], tmp_path / "other", "--workers", 0)
    assert "no step directories" in refused(capsys, "megatron-to-hf", models["qwen3_moe"], tmp_path / "other")

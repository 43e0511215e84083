"""Hugging Face directories: broken ones are refused by file name, written ones appear whole and mean the same to transformers."""

import json
import struct
from pathlib import Path

import pytest
import torch

from megarl.config import ConfigError
from megarl.models import hf_writer
from megarl.models.hf import Checkpoint, inventory
from megarl.models.hf_writer import CheckpointWriter
from tests.distributed.tiny_training import make_checkpoint

ENTRY = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "model", num_hidden_layers=2, num_experts=8)


def file_of(header: bytes, data: bytes, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes, header of -1"),
        (b"\0" * 7, "7 bytes, header of -1"),
        (file_of(b"{}", b"", length=3), "10 bytes, header of 3"),
        (file_of(b"{}", b"", length=2**64 - 1), "header of 18446744073709551615"),
        (file_of(b"{]", b""), "its header is not a JSON object"),
        (file_of(b"\xff\xfe", b""), "its header is not a JSON object"),
        (file_of(b"[]", b""), "its header is not a JSON object"),
        (file_of(json.dumps({"w": 1}).encode(), b""), "the header's entry of w is broken"),
        (file_of(json.dumps({"w": ENTRY}).encode(), b"\0" * 23), "bytes 0 to 24 of 23, which cannot be"),
        (file_of(json.dumps({"w": {**ENTRY, "shape": [2, 4]}}).encode(), b"\0" * 24), r"F32 \[2, 4\] at bytes 0 to 24"),
        (file_of(json.dumps({"w": {**ENTRY, "shape": [-2, -3]}}).encode(), b"\0" * 24), r"\[-2, -3\]"),
        (file_of(json.dumps({"w": {**ENTRY, "dtype": "F31"}}).encode(), b"\0" * 24), "declared as F31"),
        (file_of(json.dumps({"w": {**ENTRY, "data_offsets": [24, 0]}}).encode(), b"\0" * 24), "at bytes 24 to 0"),
    ],
)
def test_broken_header_is_refused_in_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=message) as refused:
        inventory(tmp_path)
    assert str(tmp_path / "model.safetensors") in str(refused.value) and "\n" not in str(refused.value)


def test_pickled_weights_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"holds only pickled weights \(pytorch_model\.bin\)"):
        inventory(tmp_path)


@pytest.mark.parametrize(
    ("file", "message"), [("../model.safetensors", "names '../model.safetensors'"), ("gone.safetensors", "names 'gone.safetensors'")]
)
def test_index_that_points_elsewhere_is_refused(path: Path, file: str, message: str) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": file}}))
    with pytest.raises(ConfigError, match=message):
        inventory(path)


def test_index_that_misplaces_a_tensor_is_refused(path: Path) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "model.safetensors"}}))
    with pytest.raises(ConfigError, match=r"puts w into model\.safetensors, which lacks it"):
        inventory(path)


def test_slices_are_read_as_asked(path: Path) -> None:
    with Checkpoint(path) as checkpoint:
        name = "model.layers.1.self_attn.o_proj.weight"
        whole = checkpoint.read(name)
        assert torch.equal(checkpoint.read(name, 0, 3, 9), whole[3:9])
        assert torch.equal(checkpoint.read(name, 1, 3, 9), whole[:, 3:9])


def copy(path: Path, target: Path) -> dict[str, torch.Tensor]:
    with Checkpoint(path) as checkpoint, CheckpointWriter(target, path, "float32") as writer:
        tensors = {name: checkpoint.read(name) for name in checkpoint.tensors}
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    return tensors


def test_written_directory_gives_transformers_the_same_logits(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    (path / "tokenizer.json").write_text("{}")
    (path / "modeling_evil.py").write_text("raise SystemExit")
    monkeypatch.setattr(hf_writer, "SHARD_BYTES", 1 << 20)
    tensors = copy(path, tmp_path / "out")
    files = {file.name for file in (tmp_path / "out").iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors.index.json", "model-00001-of-00003.safetensors"} <= files
    assert "modeling_evil.py" not in files and len(files) == 6
    assert {name: info.shape for name, info in inventory(tmp_path / "out").items()} == {name: t.shape for name, t in tensors.items()}
    tokens = torch.arange(20)[None]
    with torch.no_grad():
        one, two = [AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32)(tokens).logits for place in (path, tmp_path / "out")]
    assert torch.equal(one, two)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == torch.float32


def test_small_model_is_one_file(path: Path, tmp_path: Path) -> None:
    copy(path, tmp_path / "deep" / "out")
    assert sorted(file.name for file in (tmp_path / "deep" / "out").iterdir()) == ["config.json", "model.safetensors"]
    assert [file.name for file in (tmp_path / "deep").iterdir()] == ["out"]


def test_failed_write_leaves_nothing(path: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="half way"), CheckpointWriter(tmp_path / "out", path, "float32") as writer:
        writer.add("w", torch.zeros(3))
        raise RuntimeError("half way")
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


def test_existing_directory_is_not_overwritten(path: Path) -> None:
    with pytest.raises(ConfigError, match="already exists: not overwritten"):
        CheckpointWriter(path, path, "float32")

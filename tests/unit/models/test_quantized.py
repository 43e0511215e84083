"""Quantised checkpoints are read as exactly the numbers that they stand for; what cannot be read is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.config import ConfigError
from megarl.models.families import check_checkpoint
from megarl.models.hf import Checkpoint
from megarl.models.quantized import dequantized, from_mxfp4, quantization
from tests.quantized_models import BLOCKS, SCHEMES, quantized
from tools.make_tiny_model import build


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DeepSeek-V3 with matrices that end within a block."""
    path = tmp_path_factory.mktemp("models") / "deepseek_v3"
    build(path, layers=2, hidden=192, experts=4, expert_hidden=96, seed=1, family="deepseek_v3")
    return path


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_published_way_is_read_exactly_and_by_slices(plain: Path, tmp_path: Path, scheme: str) -> None:
    meant = quantized(plain, path := tmp_path / "fp8", scheme)
    check_checkpoint(path)
    with Checkpoint(path) as checkpoint:
        scaled = {name for name, info in checkpoint.tensors.items() if info.scales is not None}
        assert len(scaled) > 20 and "model.layers.1.mlp.experts.3.down_proj.weight" in scaled
        for name, tensor in meant.items():
            found = checkpoint.read(name)
            assert found.dtype == tensor.dtype and torch.equal(found, tensor), name
            for dim in range(tensor.ndim):
                size = tensor.shape[dim]
                for start, stop in ((0, size // 2), (size // 3, size - 1), (size - 1, size)):
                    assert torch.equal(checkpoint.read(name, dim, start, stop), tensor.narrow(dim, start, stop - start)), name


def test_transformers_makes_the_same_numbers_of_a_matrix() -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    values = torch.randn(256, 384, generator=torch.Generator().manual_seed(1)).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3, generator=torch.Generator().manual_seed(2))
    theirs = Fp8Dequantize(None)._dequantize_one(values, scales, torch.bfloat16)
    assert torch.equal(dequantized(values, scales, (128, 128)), theirs.to(torch.bfloat16))


def test_a_value_is_multiplied_by_the_scale_of_its_own_block() -> None:
    values, scales = torch.ones(5, 7).to(torch.float8_e4m3fn), torch.arange(1.0, 10).view(3, 3)
    found = dequantized(values, scales, (2, 3))
    assert found.tolist() == [[1, 1, 1, 2, 2, 2, 3]] * 2 + [[4, 4, 4, 5, 5, 5, 6]] * 2 + [[7, 7, 7, 8, 8, 8, 9]]
    assert dequantized(values[1:4, 2:4], scales, (2, 3), (1, 2)).tolist() == [[1, 2], [4, 5], [4, 5]]
    thirds = torch.full((1, 1), 1 / 3)
    assert dequantized(torch.tensor([[3.25]]).to(torch.float8_e4m3fn), thirds, (1, 1)).item() == torch.tensor(3.25 / 3).bfloat16().item()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "{'quant_method': 'gptq', 'format': None"),
        ({"quant_method": "awq"}, "'quant_method': 'awq'"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "'quant_method': 'bitsandbytes'"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {}}, "'format': 'pack-quantized'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "'weight_block_size': [128]"),
        ({}, "'quant_method': None"),
        ("fp8", "is not supported: 'fp8'"),
    ],
)
def test_other_ways_are_refused_by_name(config: Any, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        quantization({"quantization_config": config})
    assert message in str(refused.value) and "fp8, fbgemm_fp8 and compressed-tensors" in str(refused.value)


def test_scales_that_are_missing_or_do_not_fit_are_named(plain: Path, tmp_path: Path) -> None:
    quantized(plain, path := tmp_path / "fp8")
    stored, name = load_file(path / "model.safetensors"), "model.layers.0.mlp.gate_proj.weight"

    def says(change: dict[str, torch.Tensor | None], **config: Any) -> str:
        kept = {name: tensor for name, tensor in {**stored, **change}.items() if tensor is not None}
        save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
        given = json.loads((plain / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**given, "quantization_config": BLOCKS, **config}))
        with pytest.raises(ConfigError) as refused:
            check_checkpoint(path)
        return str(refused.value)

    without = f"{name} is stored as F8_E4M3, and its scales for blocks of 128 x 128, {name}_scale_inv, are missing or do not fit"
    assert without in says({f"{name}_scale_inv": None})
    assert without in says({f"{name}_scale_inv": torch.ones(1, 1)})
    assert without in says({f"{name}_scale_inv": torch.ones(3, 2, dtype=torch.int32)})
    assert "holds the tensor model.norm.weight_scale_inv, which" in says({"model.norm.weight_scale_inv": torch.ones(1)})
    assert "is stored as F8_E4M3, expected one of BF16, F16, F32" in says({}, quantization_config=None)


def test_mxfp4_is_what_transformers_makes_of_it() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (2, 6, 3, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(110, 140, (2, 6, 3), generator=generator, dtype=torch.uint8)
    ours = from_mxfp4(blocks, scales)
    assert ours.shape == (2, 6, 96) and ours.dtype == torch.bfloat16
    assert torch.equal(ours.transpose(1, 2), convert_moe_packed_tensors(blocks, scales))


def test_a_byte_of_mxfp4_has_the_first_number_in_its_lower_bits() -> None:
    blocks = torch.zeros(1, 1, 16, dtype=torch.uint8)
    blocks[0, 0, :3] = torch.tensor([0x21, 0xF7, 0x80])  # codes 1, 2; 7, 15; 0, 8
    found = from_mxfp4(blocks, torch.tensor([[128]], dtype=torch.uint8))
    assert found[0, :6].tolist() == [1.0, 2.0, 12.0, -12.0, 0.0, 0.0] and torch.signbit(found[0, 5])


def test_mxfp4_experts_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    """Whole and in slices along either axis; what the rest of the checkpoint holds stays as it is."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    build(tmp_path / "model", layers=1, hidden=64, experts=2, expert_hidden=32, seed=1, family="gpt_oss")
    tensors, generator, meant = load_file(tmp_path / "model" / "model.safetensors"), torch.Generator().manual_seed(1), {}
    for name in ("model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"):
        experts, columns, rows = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(110, 130, (experts, rows, columns // 32), generator=generator, dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        meant[name] = convert_moe_packed_tensors(blocks.clone(), scales.clone(), dtype=torch.bfloat16)
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    config = json.loads((tmp_path / "model" / "config.json").read_text()) | {"quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    check_checkpoint(tmp_path / "model")
    with Checkpoint(tmp_path / "model") as checkpoint:
        for name, stack in meant.items():
            for expert, whole in enumerate(stack):
                part = name.replace(".experts.", f".experts.{expert}.")
                assert torch.equal(checkpoint.read(part), whole)
                assert torch.equal(checkpoint.read(part, 0, 5, 30), whole[5:30])
                assert torch.equal(checkpoint.read(part, 1, 3, 9), whole[:, 3:9])

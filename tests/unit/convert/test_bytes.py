"""Conversion there and back gives every byte, and what is left out is written down."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megarl.cli import main
from megarl.convert import plan
from megarl.models.hf import read_config
from tests.unit.convert.converting import WEIGHTS, change, convert, refused, stored
from tools.make_tiny_model import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back_is_the_same_directory(
    models: dict[str, Path], family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "_MIN", 1 << 19)
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
    assert "--drop-mtp leaves them out" in refused(capsys, "hf-to-megatron", source, tmp_path / "steps")
    convert("hf-to-megatron", source, tmp_path / "steps", "--drop-mtp")
    convert("megatron-to-hf", tmp_path / "steps", tmp_path / "back")
    assert stored(tmp_path / "back") == stored(models["deepseek_v3"])
    assert read_config(tmp_path / "back")["num_nextn_predict_layers"] == 0
    report = json.loads((tmp_path / "steps" / "step_000000" / "policy" / "conversion.json").read_text())
    assert report["left_out"] == {further: "multi-token prediction"}


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "qwen3_next"])
def test_layers_of_multi_token_prediction_that_are_kept_come_back_byte_for_byte(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str
) -> None:
    """Of any dtype, through a step directory, from which they can still be left out."""
    source = shutil.copytree(models[family], tmp_path / "source")
    prefix = "mtp." if family == "qwen3_next" else "model.layers.2."
    further = {"eh_proj.weight": torch.randn(4, 8).bfloat16(), "enorm.weight": torch.randn(4), "bias": torch.tensor(0.5)}
    change(source, lambda tensors: tensors.update({prefix + name: tensor for name, tensor in further.items()}))
    count = "mtp_num_hidden_layers" if family == "qwen3_next" else "num_nextn_predict_layers"
    (source / "config.json").write_text(json.dumps({**json.loads((source / "config.json").read_text()), count: 1}))
    convert("hf-to-megatron", source, tmp_path / "steps", "--keep-mtp")
    assert main(["verify", str(tmp_path / "steps")]) == 0
    convert("megatron-to-hf", tmp_path / "steps", tmp_path / "back")
    assert stored(tmp_path / "back") == stored(source)
    assert (tmp_path / "back" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert json.loads((tmp_path / "back" / "conversion.json").read_text())["kept"] == sorted(prefix + name for name in further)
    convert("megatron-to-hf", tmp_path / "steps", tmp_path / "without", "--drop-mtp")
    assert stored(tmp_path / "without") == stored(models[family]) and read_config(tmp_path / "without")[count] == 0
    file = tmp_path / "steps" / "step_000000" / "policy" / "hf" / "mtp.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert "mtp.safetensors" in refused(capsys, "megatron-to-hf", tmp_path / "steps", tmp_path / "damaged")


def test_what_cannot_keep_layers_of_multi_token_prediction_says_so(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for options, said in (
        (("--keep-mtp",), "holds no multi-token prediction layers (--keep-mtp)"),
        (("--keep-mtp", "--drop-mtp"), "--keep-mtp and --drop-mtp"),
        (("--keep-mtp", "--head", "value"), "--keep-mtp: a model with a scalar head has no multi-token prediction layers"),
    ):
        assert said in refused(capsys, "hf-to-megatron", models["deepseek_v3"], tmp_path / "steps", *options)

"""What lies beside the weights comes along, and nothing that names what is not there; quantised sources come back as bfloat16."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megarl.cli import main
from megarl.models.families import check_checkpoint
from megarl.models.hf_writer import described
from tests.quantized_models import SCHEMES, quantized
from tests.unit.convert.converting import WEIGHTS, convert

CODE = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}


def rewrite(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_quantised_directory_becomes_bfloat16_and_stays_so(models: dict[str, Path], tmp_path: Path, scheme: str) -> None:
    meant = quantized(models["deepseek_v3"], source := tmp_path / "fp8", scheme)
    assert main(["convert", "hf-to-megatron", str(source), "--plan"]) == 0
    convert("hf-to-megatron", source, tmp_path / "steps", "--tp", 2)
    convert("megatron-to-hf", tmp_path / "steps", tmp_path / "back")
    back = load_file(tmp_path / "back" / WEIGHTS)
    assert back.keys() == meant.keys()
    assert {name for name, tensor in back.items() if tensor.dtype != meant[name].dtype or not torch.equal(tensor, meant[name])} == set()
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    check_checkpoint(tmp_path / "back")
    there, again = (
        json.loads(path.read_text()) for path in (tmp_path / "steps/step_000000/policy/conversion.json", tmp_path / "back/conversion.json")
    )
    assert again["compared_with_the_original"] == len(meant)
    assert there["read"]["tensors"] == len(load_file(source / WEIGHTS)) - len(there["left_out"])
    assert set(there["left_out"].values()) == ({"scales of quantised activations"} if scheme == "whole" else set())


def test_kimi_k2_is_deepseek_v3_by_another_name(models: dict[str, Path], tmp_path: Path) -> None:
    """With its published config.json's keys, its fp8 weights and its own code, which comes along."""
    quantized(models["deepseek_v3"], source := tmp_path / "kimi")
    rewrite(source / "config.json", model_type="kimi_k2", auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, seq_aux=True)
    (source / "configuration_deepseek.py").write_text("raise SystemExit")
    assert check_checkpoint(source).config["model_type"] == "kimi_k2"
    convert("hf-to-megatron", source, tmp_path / "steps")
    convert("megatron-to-hf", tmp_path / "steps", tmp_path / "back")
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["model_type"] == "kimi_k2" and "auto_map" in config
    assert (tmp_path / "back" / "configuration_deepseek.py").read_text() == "raise SystemExit"


def test_every_chat_template_and_every_file_of_the_tokenizer_comes_along(source: Path, tmp_path: Path) -> None:
    kept = ["additional_chat_templates/tools.jinja", "chat_templates/rag.jinja", "generation_config.json", "merges.txt", "own.model"]
    for name in (*kept, "pytorch_model.bin.index.json", "hf_quant_config.json", "README.md", "additional_chat_templates/notes.md"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("{}")
    convert("hf-to-megatron", source, tmp_path / "steps")
    assert main(["verify", str(tmp_path / "steps")]) == 0
    convert("megatron-to-hf", tmp_path / "steps", tmp_path / "back")
    for name in (*kept, "chat_template.jinja", "tokenizer.json", "tokenizer_config.json", "config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (source / name).read_bytes(), name
    made = {str(file.relative_to(tmp_path / "back")) for file in (tmp_path / "back").rglob("*") if file.is_file()}
    assert not made & {"pytorch_model.bin.index.json", "hf_quant_config.json", "README.md", "additional_chat_templates/notes.md"}


def test_an_auto_map_comes_along_only_with_its_code(source: Path) -> None:
    rewrite(source / "config.json", auto_map=CODE)
    rewrite(source / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]})
    (source / "configuration_own.py").write_text("from .helper import x")
    files = described(source, None)
    assert not any(name.endswith(".py") for name in files)
    for name in ("config.json", "tokenizer_config.json"):
        given = json.loads((source / name).read_text())
        assert json.loads(files[name]) == {key: value for key, value in given.items() if key != "auto_map"}
    (source / "modeling_own.py").write_text("")
    (source / "helper.py").write_text("x = 1")
    files = described(source, None)
    assert files["config.json"] == (source / "config.json").read_bytes() and "auto_map" not in json.loads(files["tokenizer_config.json"])
    assert {name for name in files if name.endswith(".py")} == {"configuration_own.py", "modeling_own.py", "helper.py"}
    rewrite(source / "config.json", auto_map={"AutoConfig": "someone/repository--configuration_own.OwnConfig"})
    assert "auto_map" not in json.loads(described(source, None)["config.json"])


def test_a_single_file_leaves_no_index_behind(source: Path, tmp_path: Path) -> None:
    names = load_file(source / WEIGHTS)
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, WEIGHTS)}))
    convert("hf-to-megatron", source, tmp_path / "steps")
    assert not list((tmp_path / "steps").rglob("*.index.json"))
    convert("megatron-to-hf", tmp_path / "steps", tmp_path / "back")
    assert not list((tmp_path / "back").rglob("*.index.json"))

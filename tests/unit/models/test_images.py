"""Of a model of text and images its language model alone is read, checked, converted and described; what it leaves out is named."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megarl.config import ConfigError
from megarl.models.families import check_checkpoint
from megarl.models.hf import Checkpoint, json_object, read_config
from megarl.models.hf_writer import described
from megarl.models.registry import completed
from tests.published_form import PREDICTOR, SIGHT, published
from tests.unit.convert.converting import WEIGHTS, convert
from tools.make_tiny_model import build

FAMILIES = ("qwen3_5_moe", "qwen3_5")


@pytest.fixture(scope="module", params=FAMILIES)
def forms(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A text model, and one of text and images with the same language model."""
    root = tmp_path_factory.mktemp(request.param)
    build(root / "text", layers=4, hidden=64, experts=4, expert_hidden=32, seed=1, family=request.param)
    published(root / "text", root / "whole")
    return root / "text", root / "whole"


def test_what_is_left_out_is_named_and_asked_for(forms: tuple[Path, Path]) -> None:
    text, whole = forms
    with pytest.raises(ConfigError, match="config.json's vision_config: hidden_size=32 does not divide into num_heads=16"):
        check_checkpoint(whole, mtp="drop")  # it is read whole
    with pytest.raises(ConfigError, match=f"holds {PREDICTOR} and 1 more multi-token prediction tensors"):
        check_checkpoint(whole, drop_images=True)
    one, two = check_checkpoint(text), check_checkpoint(whole, mtp="drop", drop_images=True)
    assert not one.of_images and two.of_images
    assert (one.architecture, one.sizes, one.fields, one.expected()) == (two.architecture, two.sizes, two.fields, two.expected())


def test_every_tensor_is_read_whole_and_by_slices(forms: tuple[Path, Path]) -> None:
    text, whole = forms
    with Checkpoint(whole, drop_images=True) as checkpoint:
        for name, tensor in load_file(text / WEIGHTS).items():
            assert torch.equal(checkpoint.read(name), tensor), name
            for dim in range(tensor.ndim):
                size = tensor.shape[dim]
                for start, stop in ((0, size // 2), (size // 3, size - 1), (size - 1, size)):
                    assert torch.equal(checkpoint.read(name, dim, start, stop), tensor.narrow(dim, start, stop - start)), name


def test_its_language_model_is_what_is_converted_and_saved(forms: tuple[Path, Path], tmp_path: Path) -> None:
    text, whole = forms
    convert("hf-to-megatron", whole, tmp_path / "steps", "--drop-mtp", "--drop-images")
    report = json.loads((tmp_path / "steps" / "step_000000" / "policy" / "conversion.json").read_text())
    assert report["left_out"] | {SIGHT: "of images", PREDICTOR: "multi-token prediction"} == report["left_out"]
    assert len(report["left_out"]) == 3
    convert("megatron-to-hf", tmp_path / "steps", tmp_path / "back")
    original, back = load_file(text / WEIGHTS), load_file(tmp_path / "back" / WEIGHTS)
    assert original.keys() == back.keys() and all(torch.equal(tensor, original[name]) for name, tensor in back.items())
    given = json_object(tmp_path / "back" / "config.json")
    assert given["architectures"] == json_object(text / "config.json")["architectures"] and given["mtp_num_hidden_layers"] == 0
    assert "text_config" not in given and not (tmp_path / "back" / "preprocessor_config.json").exists()
    check_checkpoint(tmp_path / "back")


def test_transformers_reads_the_same_language_model(forms: tuple[Path, Path]) -> None:
    """In the published form, and as it is described when it is saved."""
    from transformers import AutoConfig, AutoModelForCausalLM

    text, whole = forms
    tokens = torch.arange(4, 20)[None]
    with torch.no_grad():
        one, two = (AutoModelForCausalLM.from_pretrained(path)(tokens).logits for path in forms)
    assert torch.equal(one, two)
    written = json.loads(described(whole, None, drop_images=True)["config.json"])
    ours, theirs = AutoConfig.for_model(**written).to_dict(), AutoConfig.from_pretrained(text).to_dict()
    for key in theirs.keys() - {"architectures", "transformers_version", "_name_or_path"}:
        assert ours[key] == theirs[key], key


def test_a_description_of_the_language_model_that_is_missing_or_malformed_is_refused(tmp_path: Path) -> None:
    whole: dict[str, Any] = {"architectures": ["Qwen3_5ForConditionalGeneration"]}
    with pytest.raises(ConfigError, match="has no text_config"):
        completed(whole, drop_images=True)
    (tmp_path / "config.json").write_text(json.dumps({**whole, "text_config": {"rms_norm_eps": "1e-6"}}))
    with pytest.raises(ConfigError, match="config.json's rms_norm_eps='1e-6'"):
        read_config(tmp_path, drop_images=True)

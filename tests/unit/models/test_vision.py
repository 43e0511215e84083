"""Models of text and images that are read whole: config.json, tensors in both forms, and what is refused."""

import copy
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING

from megarl.checks.model import check_sight
from megarl.config import ConfigError, ModelSettings
from megarl.models.description import ModelDescription
from megarl.models.families import check_checkpoint
from megarl.models.hf import Checkpoint, read_config
from megarl.models.hf_writer import described, write_files
from megarl.models.image_processor import ImageProcessor
from megarl.models.registry import FAMILIES, MODEL_TYPES, completed
from megarl.models.vision import DEEPSTACK, DEFAULTS
from megarl.plan.parameters import model_elements
from tests.published_models import MODELS, QWEN3_5_35B_A3B, QWEN3_VL_30B_A3B, description_of
from tests.unit.convert.converting import WEIGHTS, convert, stored
from tools.make_tiny_model import SEEING, build


@pytest.fixture(scope="module", params=SEEING)
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp(request.param) / "model"
    build(out, layers=2, hidden=64, experts=4, expert_hidden=32, seed=1, family=request.param)
    return out


def nested(published: dict[str, Any] = QWEN3_VL_30B_A3B, /, **changes: Any) -> dict[str, Any]:
    """A published config.json with other values, by `part.key` or `key`; None: without the key."""
    config = copy.deepcopy(published)
    for name, value in changes.items():
        part, _, key = name.rpartition("__")
        place = config[part] if part else config
        place |= {key: value}
        if value is None:
            del place[key]
    return config


def test_the_published_model_has_its_parameters_with_those_of_its_tower() -> None:
    for config, name, tower, sections, theta in (
        (QWEN3_VL_30B_A3B, "Qwen3-30B-A3B", 538_631_408, (24, 20, 20), 5e6),
        (QWEN3_5_35B_A3B, "Qwen3.5-35B-A3B", 446_571_248, (11, 11, 10), 1e7),
    ):
        model = ModelDescription.of(config)
        assert model_elements(model) == MODELS[name].parameters + tower
        assert model.sizes.vision is not None and model.sizes.vision.sections == sections
        assert model.fields == ModelDescription.of(model.config).fields, "a flat one is the same"
        assert model.rope.theta == theta and not model.tied


@pytest.mark.parametrize("architecture", [name for name, family in FAMILIES.items() if family.nested and "Conditional" in name])
def test_defaults_are_those_of_transformers_classes(architecture: str) -> None:
    family, other = FAMILIES[architecture], CONFIG_MAPPING[MODEL_TYPES[architecture][0]]()
    for key, value in DEFAULTS.items():
        assert getattr(other.vision_config, key) == value, key
    assert tuple(getattr(other.vision_config, "deepstack_visual_indexes", DEEPSTACK)) == DEEPSTACK
    text = {**other.text_config.rope_parameters, **{key: getattr(other.text_config, key) for key in dir(other.text_config)}}
    beside = {"image_token_id": other.image_token_id, "tie_word_embeddings": other.tie_word_embeddings, "use_sliding_window": False}
    beside |= {"layer_types": None, "norm_topk_prob": True, "mlp_only_layers": None}
    beside |= {"full_attention_interval": 4, "mtp_num_hidden_layers": 0}  # for which transformers has no key
    for key, value in family.defaults.items():
        theirs = beside[key] if key in beside else text[key]
        assert theirs == value or value is None and key == "head_dim", key


def test_what_is_written_is_the_same_nested_config_json(path: Path) -> None:
    assert described(path, "float32")["config.json"] == (path / "config.json").read_bytes()
    cast = json.loads(described(path, "bfloat16")["config.json"])
    assert [cast["dtype"], cast["text_config"]["dtype"], cast["vision_config"]["dtype"]] == ["bfloat16"] * 3
    assert described(path, None)["preprocessor_config.json"] == (path / "preprocessor_config.json").read_bytes()


def test_what_is_written_says_how_many_pixels_an_image_had(path: Path, tmp_path: Path) -> None:
    """In the form of published models and in that of transformers 5, so that its processor cuts as the run's did."""
    limits = ImageProcessor(path, 500, 3000).cut
    shutil.copytree(path, tmp_path / "new")
    cutting = json.loads((tmp_path / "new" / "preprocessor_config.json").read_text())
    (tmp_path / "new" / "preprocessor_config.json").unlink()
    whole = {"processor_class": "Qwen3VLProcessor", "image_processor": cutting}
    (tmp_path / "new" / "processor_config.json").write_text(json.dumps(whole))
    for source in (path, tmp_path / "new"):
        assert ImageProcessor(source).cut != limits
        write_files(tmp_path / "out" / source.name, described(source, None, pixels=(500, 3000)))
        assert ImageProcessor(tmp_path / "out" / source.name).cut == limits
    (tmp_path / "new" / "preprocessor_config.json").write_text(json.dumps(cutting))
    (tmp_path / "new" / "processor_config.json").write_text('{"processor_class": "Qwen3VLProcessor"}')
    files = described(tmp_path / "new", None, pixels=(500, 3000))
    assert files["processor_config.json"] == b'{"processor_class": "Qwen3VLProcessor"}'


def test_what_transformers_5_saves_is_read_as_the_published_form(path: Path, tmp_path: Path) -> None:
    """Where experts are stacked, their matrices the other way round, or each by itself; what is written is the published form, byte for
    byte."""
    shutil.copytree(path, tmp_path / "saved")
    tensors = load_file(path / WEIGHTS)
    parts = ModelDescription.read(path).family.stacks
    saved = dict(pair for name, tensor in tensors.items() for pair in as_saved(name, tensor, parts))
    save_file(saved, tmp_path / "saved" / WEIGHTS, metadata={"format": "pt"})
    check_checkpoint(tmp_path / "saved")
    with Checkpoint(path) as one, Checkpoint(tmp_path / "saved") as two:
        assert one.tensors.keys() == two.tensors.keys()
        for name, info in one.tensors.items():
            whole = one.read(name)
            assert torch.equal(whole, two.read(name)), name
            for dim in range(len(info.shape)):
                cut = dim, info.shape[dim] // 3, info.shape[dim] - 1
                assert torch.equal(one.read(name, *cut), two.read(name, *cut)), name
    convert("hf-to-megatron", tmp_path / "saved", tmp_path / "steps")
    convert("megatron-to-hf", tmp_path / "steps", tmp_path / "back")
    assert stored(tmp_path / "back") == stored(path)
    assert load_file(tmp_path / "back" / WEIGHTS).keys() == tensors.keys()


def as_saved(name: str, tensor: torch.Tensor, parts: Mapping[str, tuple[str, ...]]) -> list[tuple[str, torch.Tensor]]:
    """A tensor of the published form as transformers 5 saves it: of Qwen3.5 the `parts` of each expert, of Qwen3-VL the transposes."""
    prefix, _, stack = name.partition(".experts.")
    if not stack:
        return [(name, tensor)]
    if not parts:
        return [(name, tensor.mT.contiguous())]
    leaves = parts[stack]
    return [
        (f"{prefix}.experts.{expert}.{leaf}", part.clone())
        for expert, own in enumerate(tensor)
        for leaf, part in zip(leaves, own.chunk(len(leaves)), strict=True)
    ]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"vision_config": None}, "has no vision_config"),
    ({"text_config": None}, "has no text_config"),
    ({"text_config__tie_word_embeddings": True}, "tie_word_embeddings=False is not that of its text_config, True"),
    ({"image_token_id": 200000}, "image_token_id=200000 is not a token of vocab_size=151936"),
    ({"text_config__norm_topk_prob": False}, "norm_topk_prob=False is not supported for Qwen3-VL-MoE"),
    ({"text_config__moe_intermediate_size": 1024}, "give square stacks of experts"),
    ({"vision_config__hidden_act": "silu"}, "vision_config: hidden_act='silu' is not supported"),
    ({"vision_config__num_position_embeddings": 2300}, "num_position_embeddings=2300 is no square"),
    ({"vision_config__num_heads": 7}, "hidden_size=1152 does not divide into num_heads=7"),
    ({"vision_config__out_hidden_size": 4096}, "out_hidden_size=4096 is not text_config's hidden_size=2048"),
    ({"vision_config__deepstack_visual_indexes": [8, 27]}, r"deepstack_visual_indexes=\[8, 27\] are not ascending blocks of depth=27"),
    ({"vision_config__deepstack_visual_indexes": "8"}, "deepstack_visual_indexes='8' are not ascending"),
    ({"vision_config__deepstack_visual_indexes": 8}, "deepstack_visual_indexes=8 are not ascending"),
    ({"vision_config__rope_parameters": {"rope_theta": 5e5}}, r"rope_parameters\.rope_theta=500000.0 is not 10000"),
    ({"vision_config__patch_size": 0}, "patch_size=0 is not a positive integer"),
    ({"text_config__rope_scaling": {"mrope_section": [24, 20, 20]}}, "must have mrope_interleaved=true"),
    ({"text_config__rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20]}}, r"mrope_section=\[24, 20\] are not three"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_a_model_of_another_kind_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^model\.path: config\.json[^\n]*{message}"):
        _ = ModelDescription.of(nested(**changes)).fields


def test_a_qwen3_5_of_another_kind_is_refused_by_name() -> None:
    rope = QWEN3_5_35B_A3B["text_config"]["rope_parameters"]
    several: list[tuple[dict[str, Any], str]] = [
        ({"vision_config__deepstack_visual_indexes": [8]}, r"deepstack_visual_indexes=\[8\] is not supported for Qwen3_5Moe"),
        ({"text_config__rope_parameters": {**rope, "mrope_section": [24, 20, 20]}}, "are not three numbers with the sum 32"),
        ({"text_config__rope_parameters": {**rope, "mrope_interleaved": False}}, "must have mrope_interleaved=true"),
        ({"text_config__attn_output_gate": False}, "attn_output_gate=False is not supported for Qwen3.5"),
    ]
    for changes, message in several:
        with pytest.raises(ConfigError, match=rf"^model\.path: config\.json[^\n]*{message}"):
            _ = ModelDescription.of(nested(QWEN3_5_35B_A3B, **changes)).fields


@pytest.mark.parametrize(
    ("given", "sees", "message"),
    [
        ({"max_pixels": 4096}, False, r"model\.max_pixels=4096: Qwen3MoeForCausalLM sees no images"),
        ({"vision": "train"}, False, r"model\.vision=train: Qwen3MoeForCausalLM sees no images"),
        ({"drop_images": True}, True, r"model\.drop_images=true: Qwen3VLMoeForConditionalGeneration is read whole"),
    ],
)
def test_what_is_set_for_images_and_does_not_apply_is_refused(given: dict[str, Any], sees: bool, message: str) -> None:
    model = ModelDescription.of(QWEN3_VL_30B_A3B) if sees else description_of(MODELS["Qwen3-30B-A3B"])
    check_sight(ModelSettings(path=Path("model")), model)
    with pytest.raises(ConfigError, match=f"^{message}"):
        check_sight(ModelSettings(path=Path("model"), **given), model)


def test_the_description_in_the_directory_is_checked(path: Path, tmp_path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    config["text_config"]["rms_norm_eps"] = "1e-6"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="config.json's rms_norm_eps='1e-6'"):
        read_config(tmp_path)
    assert completed(json.loads((path / "config.json").read_text()))["architectures"] == config["architectures"]

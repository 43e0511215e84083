"""Every family's weights come back as the bytes that were read, from any layout, under either head."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from megarl.batch import Batch
from megarl.config import Layout
from megarl.models.description import ModelDescription
from megarl.models.families import check_checkpoint, family_of
from megarl.models.hf import Checkpoint, read_config, stack_of
from megarl.models.hf_writer import stacked
from megarl.parallel import schedule
from megarl.parallel.grid import Grid
from tests.distributed.test_export import stored
from tests.distributed.tiny_families import VARIANTS, Make, exported, layouts, load, saved
from tests.quantized_models import quantized
from tests.rank_pool import Pool
from tests.rows import rows
from tools.check_logits import sequences, transformers_model

LAYERWISE = Layout(ranks=2, pp=2, vpp=2)


def same_bytes(one: Path, two: Path) -> bool:
    """Whether both directories hold tensors of the same names, dtypes, shapes and bytes."""
    with Checkpoint(one) as ours, Checkpoint(two) as theirs:
        described = [{name: (info.dtype, info.shape) for name, info in checkpoint.tensors.items()} for checkpoint in (ours, theirs)]
        return described[0] == described[1] and all(
            torch.equal(ours.read(name).view(torch.uint8), theirs.read(name).view(torch.uint8)) for name in ours.tensors
        )


@pytest.mark.parametrize(
    "variant", rows(VARIANTS, ["qwen2_tied", "phi3", "qwen3_moe_unnormalized", "deepseek_v3", "glm4_moe", "gpt_oss", "qwen3_next"])
)
def test_weights_come_back_bit_for_bit(pool: Pool, make: Make, variant: str) -> None:
    path, known = make(variant), layouts(variant)
    expected = stored(path)
    wide = Layout(ranks=4, tp=2, pp=2, ep=known["tp2"].ep)
    for layout in (*known.values(), wide, LAYERWISE):
        first, *others = pool.run(exported, layout, path, "float32")
        assert first.keys() == expected.keys() and not any(others)
        assert [name for name, tensor in expected.items() if not torch.equal(first[name], tensor)] == []


def in_bfloat16(path: Path, target: Path) -> Path:
    """The same model stored as large ones are: bfloat16, a router's expert bias in float32."""
    tensors = {name: tensor if name.endswith("e_score_correction_bias") else tensor.bfloat16() for name, tensor in stored(path).items()}
    target.mkdir()
    config = read_config(path)
    parts = {key: {**config[key], "dtype": "bfloat16"} for key in ("vision_config",) if key in config}
    (target / "config.json").write_text(json.dumps({**config, **parts, "dtype": "bfloat16"}))
    save_file(dict(each_stored(tensors, path)), target / "model.safetensors", metadata={"format": "pt"})
    return target


def each_stored(tensors: dict[str, Tensor], path: Path) -> Any:
    """The tensors as the model's checkpoints hold them: experts in stacks, if these do."""
    model = ModelDescription.read(path)
    named = (([name], tensor[None]) if stack_of(model.family, name)[1] >= 0 else (name, tensor) for name, tensor in tensors.items())
    return stacked(named, model) if model.family.stacked else tensors.items()


@pytest.mark.parametrize(("variant", "scheme"), [("qwen3_moe", "bfloat16_scales"), ("phi3", "blocks"), ("deepseek_v3", "rows")])
def test_a_rank_reads_its_slices_of_quantised_weights(pool: Pool, make: Make, tmp_path: Path, variant: str, scheme: str) -> None:
    """Of each block that its slice begins or ends in, too; what is saved is not quantised."""
    meant = quantized(make(variant), path := tmp_path / "fp8", scheme)
    first, *_ = pool.run(exported, layouts(variant)["tp2"], path, "bfloat16")
    assert [name for name, tensor in meant.items() if not torch.equal(first[name], tensor)] == []
    pool.run(saved, layouts(variant)["pp2"], path, "bfloat16", "lm", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config and config["dtype"] == "bfloat16"
    with Checkpoint(path) as quantised, Checkpoint(tmp_path / "out") as out:
        assert all(torch.equal(quantised.read(name), out.read(name)) for name in meant)
    check_checkpoint(tmp_path / "out")


SAVED = [(variant, layout) for variant in VARIANTS for layout in ("tp2", "pp2")]


@pytest.mark.parametrize(("variant", "layout"), rows(SAVED, [*SAVED[0::4], *SAVED[3::4]]))
def test_saved_directory_holds_the_bytes_that_were_loaded(pool: Pool, make: Make, tmp_path: Path, variant: str, layout: str) -> None:
    """The pipeline in bfloat16: a router's expert bias stays float32 in it."""
    path = make(variant)
    if layout == "pp2":
        path = in_bfloat16(path, tmp_path / "source")
    pool.run(saved, layouts(variant)[layout], path, "float32" if layout == "tp2" else "bfloat16", "lm", tmp_path / "out")
    assert same_bytes(path, tmp_path / "out")
    assert check_checkpoint(tmp_path / "out").config == check_checkpoint(path).config


def classifier(path: Path, target: Path) -> Path:
    """A classifier with one label on the backbone of a language model."""
    hf = read_config(path)
    head = family_of(hf).heads["value"]
    tensors = {name: tensor for name, tensor in stored(path).items() if name != "lm_head.weight"}
    tensors["score.weight"] = 0.3 * torch.randn(1, hf["hidden_size"], generator=torch.Generator().manual_seed(7))
    target.mkdir()
    given = json.loads((path / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**given, "architectures": [head.architecture], **head.labels}))
    save_file(dict(each_stored(tensors, path)), target / "model.safetensors", metadata={"format": "pt"})
    return target


def values(grid: Grid, path: Path, batch: Batch) -> dict[int, float]:
    """Entry -> value, on every rank of the last stage."""
    chunks, _ = load(grid, path, "float32", "value")

    def loss_fn(value_R1: Tensor, row_T: Tensor, batch: Batch) -> tuple[Tensor, dict[int, float]]:
        found = zip(batch.extra_T["entry"].tolist(), value_R1[row_T, 0].tolist(), strict=True)
        return torch.zeros(()), dict(found)

    return dict(item for found in schedule.run(chunks, [batch], loss_fn, grid, forward_only=True) for item in found.items())


@pytest.mark.parametrize("variant", rows(VARIANTS, ["qwen3", "llama", "mixtral", "moonlight", "glm4_moe_air", "gpt_oss", "qwen3_next"]))
def test_critic_is_transformers_classifier(pool: Pool, make: Make, tmp_path: Path, variant: str) -> None:
    path = classifier(make(variant), tmp_path / "critic")
    tp2, pp2 = layouts(variant)["tp2"], layouts(variant)["pp2"]
    pool.run(saved, tp2, path, "float32", "value", tmp_path / "out")
    assert same_bytes(path, tmp_path / "out") and check_checkpoint(tmp_path / "out", "value").config == read_config(path)
    batch = sequences(3, 30, read_config(path)["vocab_size"], seed=3)
    batch = batch.with_extra(entry=torch.arange(len(batch)))
    one, *others = [found for layout in (tp2, pp2) for found in pool.run(values, layout, tmp_path / "out", batch) if found]
    assert one.keys() == set(range(len(batch))) and torch.tensor(list(one.values())).std() > 0.1
    assert all(other == pytest.approx(one, abs=2e-5) for other in others) and len(others) == 2
    assert_transformers(tmp_path / "out", batch, one)


def assert_transformers(path: Path, batch: Batch, ours: dict[int, float]) -> None:
    from transformers import AutoModelForSequenceClassification

    hf = read_config(path)
    if not family_of(hf).heads["value"].known:
        with pytest.raises(ValueError, match="Unrecognized configuration class"):
            AutoModelForSequenceClassification.from_pretrained(path)
        return
    model, loading = transformers_model(path, auto="AutoModelForSequenceClassification", output_loading_info=True)
    assert not any(loading.values()), "no tensor is missing, unexpected or of another shape"
    for n in range(len(batch.length_N)):
        last = int((batch.seq_T == n).nonzero()[-1])
        with torch.no_grad():
            assert float(model.eval()(batch.input_T[None, batch.seq_T == n]).logits) == pytest.approx(ours[last], abs=2e-5)


def test_critic_may_start_from_a_language_model(pool: Pool, make: Make, tmp_path: Path) -> None:
    for variant in ("qwen2_tied", "deepseek_v3"):
        path, out = make(variant), tmp_path / variant
        pool.run(saved, layouts(variant)["pp2"], path, "float32", "value", out)
        body, critic = stored(path), stored(out)
        body.pop("lm_head.weight", None)
        assert critic.pop("score.weight").shape == (1, 128)
        assert critic.keys() == body.keys() and all(torch.equal(critic[name], tensor) for name, tensor in body.items())


def test_critic_that_transformers_cannot_load_is_announced(make: Make, tmp_path: Path, pool: Pool) -> None:
    [[said]] = pool.run(announced, Layout(), make("glm4_moe", layers=2), tmp_path / "out")
    assert said == f"{tmp_path / 'out'}: transformers has no class Glm4MoeForSequenceClassification: only megarl can load what is saved"


def announced(grid: Grid, path: Path, target: Path) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megarl.parallel.export").addHandler(handler)
    saved(grid, path, "float32", "value", target)
    return said

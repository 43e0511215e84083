"""Checkpoints that Megatron's own `dist_checkpointing.save` wrote become the Hugging Face directory that they were loaded from."""

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.config import Layout
from tests.distributed.megatron_saves import save_dist
from tests.distributed.test_convert import convert, stored
from tests.distributed.tiny_families import Make
from tests.rank_pool import Pool
from tests.rows import rows
from tools.make_tiny_model import has_experts

NAMES: dict[str, dict[str, Any]] = {
    "stacked": {},
    "layers numbered": {"non_homogeneous_layers": True},
    "all numbered, gate and up apart": {"singleton_local_shards": True},
}
ROWS = [(family, names) for family in ("qwen3_moe", "qwen3", "qwen2_tied", "glm4_moe", "deepseek_v3", "qwen3_next") for names in NAMES]
SUITE = [
    ("qwen3_moe", "all numbered, gate and up apart"),
    ("qwen3", "layers numbered"),
    ("qwen3_next", "stacked"),
]
# Layout -> its ranks, and whether experts are saved as --moe-grouped-gemm does.
LAYOUTS = {
    "one grouped": (Layout(), True),
    "pp2": (Layout(ranks=2, pp=2), False),
    "interleaved": (Layout(ranks=2, pp=2, vpp=2), False),
    "tp2 pp2 ep2": (Layout(ranks=4, tp=2, pp=2, ep=2), False),
    "ep4": (Layout(ranks=4, ep=4), False),
    "ep4 grouped": (Layout(ranks=4, ep=4), True),
    "tp2 ep2 etp2 dp2 grouped": (Layout(ranks=4, tp=2, ep=2, etp=2), True),
    "interleaved grouped": (Layout(ranks=4, pp=2, vpp=2, ep=2), True),
}
PLACES = [(family, layout) for family in ("qwen3_moe", "deepseek_v3") for layout in LAYOUTS]


@pytest.mark.parametrize(("family", "names"), rows(ROWS, SUITE))
def test_a_checkpoint_of_megatron_becomes_the_directory_it_was_loaded_from(
    pool: Pool, make: Make, family: str, names: str, tmp_path: Path
) -> None:
    model, ep = make(family), 2 if has_experts(family) else 1
    pool.run(save_dist, Layout(ranks=2, tp=2, ep=ep), model, tmp_path / "save" / "iter_0000010", NAMES[names])
    (tmp_path / "save" / "latest_checkpointed_iteration.txt").write_text("10")
    convert("megatron-to-hf", tmp_path / "save", tmp_path / "hf", "--like", model)
    assert stored(tmp_path / "hf") == stored(model)
    left_out = json.loads((tmp_path / "hf" / "conversion.json").read_text())["left_out"]
    assert left_out["optimizer.state.exp_avg.decoder.final_layernorm.weight"] == "optimizer"
    convert("megatron-to-step", tmp_path / "save", tmp_path / "steps", "--like", model)
    convert("megatron-to-hf", tmp_path / "steps", tmp_path / "back")
    assert stored(tmp_path / "back") == stored(model)


@pytest.mark.parametrize("names", ["stacked", "all numbered, gate and up apart"])
@pytest.mark.parametrize(("family", "layout"), rows(PLACES, [("qwen3_moe", "one grouped")]))
def test_it_may_have_been_saved_by_any_layout(pool: Pool, make: Make, family: str, layout: str, names: str, tmp_path: Path) -> None:
    model, (ranks, grouped) = make(family), LAYOUTS[layout]
    pool.run(save_dist, ranks, model, tmp_path / "iter_0000010", NAMES[names], "lm", "float32", grouped)
    convert("megatron-to-hf", tmp_path / "iter_0000010", tmp_path / "hf", "--like", model)
    assert stored(tmp_path / "hf") == stored(model)
    left_out = json.loads((tmp_path / "hf" / "conversion.json").read_text())["left_out"]
    assert any(".experts." in name and "_extra_state" in name for name in left_out), "what only its own program reads"

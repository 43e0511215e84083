"""Converted checkpoints beside real Megatron ranks: what they save is converted, what is converted they load, and Megatron itself does."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from megarl.config import CheckpointSettings, Layout, ModelSettings
from megarl.models.description import ModelDescription
from megarl.models.hf import read_config
from megarl.models.hf_writer import described
from megarl.parallel.backend import choose
from megarl.parallel.build import build_chunks, transformer_config
from megarl.parallel.checkpoint.load import load
from megarl.parallel.checkpoint.save import Saver
from megarl.parallel.checkpoint.state import ModelState
from megarl.parallel.grid import Grid
from megarl.parallel.weights import load_hf, local_parameters
from tests.distributed.checkpoint_work import build_part, verified
from tests.distributed.tiny_families import Make
from tests.rank_pool import Pool
from tests.rows import rows
from tests.unit.convert.converting import convert, stored
from tools.make_tiny_model import FAMILIES, has_experts

SUITE = ("qwen3_moe", "qwen2_tied", "deepseek_v3", "gpt_oss", "qwen3_next")
TP_EP, PP_VPP, ETP = Layout(ranks=2, tp=2, ep=2), Layout(ranks=2, pp=2, vpp=2), Layout(ranks=4, tp=2, ep=2, etp=2)


@pytest.fixture(scope="module")
def models(make: Make, long: bool) -> dict[str, Path]:
    """A model of every family, in the suite of some, whose vocabulary tensor parallelism must pad."""
    return {family: make(family) for family in (FAMILIES if long else SUITE)}


def chunks_of(grid: Grid, path: Path, head: Literal["lm", "value"] = "lm") -> tuple[Any, ModelDescription]:
    model = ModelDescription.read(path)
    config = transformer_config(model, ModelSettings(path=path, dtype="float32"), grid.layout, choose())
    return build_chunks(config, model, choose(), grad=False, head=head), model


def save_steps(grid: Grid, paths: dict[str, Path], root: Path) -> None:
    """Saves every model as Megatron ranks hold it."""
    settings = CheckpointSettings.model_validate({"asynchronous": False})
    for family, path in paths.items():
        chunks, model = chunks_of(grid, path)
        load_hf(chunks, model, grid)
        files = described(path, "float32", model.labels("lm")) if grid.rank == 0 else {}
        Saver(root / family, grid, settings).save(1, {"policy": ModelState(chunks, model, None, files)}, {})


def differing(grid: Grid, paths: dict[str, Path], root: Path) -> list[str]:
    """The parameters of this rank that a converted checkpoint fills otherwise than the Hugging Face directory does."""
    found = []
    for family, path in paths.items():
        expected, model = chunks_of(grid, path)
        load_hf(expected, model, grid)
        part = build_part(grid, path, trained=False)
        load(verified(root / family / "step_000000"), {"policy": part}, grid)
        ours, theirs = (local_parameters(chunks, grid.ep_rank) for chunks in (part.chunks, expected))
        found += [f"{family}: {name}" for name in theirs if not torch.equal(ours[name], theirs[name])]
    return found


def megatron_loads(grid: Grid, path: Path, step: Path) -> list[str]:
    """The same by Megatron's own `dist_checkpointing.load`, strict, into the tensors that the model describes."""
    from megatron.core import dist_checkpointing

    from megarl.parallel.checkpoint.sharded import model_state

    expected, model = chunks_of(grid, path)
    load_hf(expected, model, grid)
    chunks = build_part(grid, path, trained=False).chunks
    state = model_state(chunks, grid)
    loaded = dist_checkpointing.load(state, str(step / "policy"), strict="raise_all")
    for number, chunk in enumerate(chunks):
        chunk.load_state_dict(loaded[f"model{number}"], strict=False)
    ours, theirs = (local_parameters(chunks, grid.ep_rank) for chunks in (chunks, expected))
    return [name for name in theirs if not torch.equal(ours[name], theirs[name])]


def fits(family: str, layout: Layout) -> bool:
    """Megatron splits no experts with biases (transformer_config.py:2280)."""
    return family != "gpt_oss" or layout.etp == 1


def groups(models: dict[str, Path], layout: Layout) -> Iterator[tuple[Layout, dict[str, Path]]]:
    """The models with experts on a layout, and the others on what is left of it."""
    yield layout, {family: path for family, path in models.items() if has_experts(family) and fits(family, layout)}
    without = Layout(ranks=layout.tp * layout.pp, tp=layout.tp, pp=layout.pp, vpp=layout.vpp)
    yield without, {family: path for family, path in models.items() if not has_experts(family)}


@pytest.mark.parametrize("layout", rows([TP_EP, PP_VPP], [TP_EP]), ids=["tp2 ep2", "pp2 vpp2"])
def test_a_model_saved_by_ranks_becomes_the_directory_it_was_loaded_from(
    pool: Pool, models: dict[str, Path], layout: Layout, tmp_path: Path
) -> None:
    for fitting, paths in groups(models, layout):
        pool.run(save_steps, fitting, paths, tmp_path)
    for family, path in models.items():
        convert("megatron-to-hf", tmp_path / family, tmp_path / f"{family}.hf")
        assert stored(tmp_path / f"{family}.hf") == stored(path), family
        assert read_config(tmp_path / f"{family}.hf") == read_config(path)


@pytest.fixture(scope="module")
def converted(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every model as `convert` makes it for ranks."""
    root = tmp_path_factory.mktemp("converted")
    for family, path in models.items():
        convert("hf-to-megatron", path, root / family, "--tp", 2, *(["--etp", 2] if has_experts(family) else []))
    return root


LAYOUTS = {"tp2 ep2": TP_EP, "pp2 vpp2": PP_VPP, "tp2 ep2 etp2": ETP}


@pytest.mark.parametrize("name", rows(LAYOUTS, ["pp2 vpp2"]))
def test_ranks_of_any_layout_load_what_was_converted(pool: Pool, models: dict[str, Path], converted: Path, name: str) -> None:
    for fitting, paths in groups(models, LAYOUTS[name]):
        assert pool.run(differing, fitting, paths, converted) == [[]] * fitting.ranks


def critic_from(grid: Grid, path: Path, step: Path) -> list[str]:
    """The parameters that a critic takes from a converted language model otherwise than from its Hugging Face directory."""
    expected, model = chunks_of(grid, path, "value")
    load_hf(expected, model, grid)
    part = build_part(grid, path, "value", trained=False)
    load(verified(step), {"critic": part}, grid)
    ours, theirs = (local_parameters(chunks, grid.ep_rank) for chunks in (part.chunks, expected))
    return [name for name in theirs if not torch.equal(ours[name], theirs[name])]


def test_a_critic_takes_the_backbone_that_was_converted(pool: Pool, models: dict[str, Path], tmp_path: Path) -> None:
    convert("hf-to-megatron", models["qwen3_moe"], tmp_path / "out", "--head", "value")
    first, last = pool.run(critic_from, Layout(ranks=2, pp=2), models["qwen3_moe"], tmp_path / "out" / "step_000000")
    assert (first, last) == ([], ["output_layer.weight"]), "the head alone is drawn anew"


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_tied"])
def test_megatron_itself_loads_what_was_converted(pool: Pool, models: dict[str, Path], family: str, tmp_path: Path) -> None:
    convert("hf-to-megatron", models[family], tmp_path / "out")
    for layout in (TP_EP, PP_VPP):
        [fitting] = [fitting for fitting, paths in groups(models, layout) if family in paths]
        assert pool.run(megatron_loads, fitting, models[family], tmp_path / "out" / "step_000000") == [[]] * fitting.ranks

"""Checkpoints as Megatron-LM, slime and verl write them: models on ranks, saved by Megatron's own `dist_checkpointing.save`."""

import multiprocessing
from pathlib import Path
from typing import Any

import torch

from megarl.config import ModelSettings
from megarl.models.description import ModelDescription
from megarl.models.family import HeadKind
from megarl.parallel.backend import choose
from megarl.parallel.build import build_chunks, transformer_config
from megarl.parallel.grid import Grid
from megarl.parallel.weights import load_hf
from tests.distributed.grouped_experts import group_experts


def save_dist(
    grid: Grid, path: Path, folder: Path, metadata: dict[str, Any], head: HeadKind = "lm", dtype: str = "float32", grouped: bool = False
) -> None:
    """Save a model and beside it what Megatron-LM saves: an optimizer's state, random states, and its arguments.

    Args:
        grid: this rank's grid.
        path: the model's Hugging Face directory.
        folder: the folder to write.
        metadata: of `sharded_state_dict`: it decides how layers and experts are named.
        head: the head of the model.
        dtype: of its weights.
        grouped: save the experts as `--moe-grouped-gemm` does.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    model, settings = ModelDescription.read(path), ModelSettings(path=path, dtype=dtype)  # type: ignore[arg-type]
    chunks = build_chunks(transformer_config(model, settings, grid.layout, choose()), model, choose(), grad=False, head=head)
    load_hf(chunks, model, grid)
    state: dict[str, Any] = {"args": {"num_layers": model.sizes.layers}, "iteration": 10}
    replaced = 0
    for number, chunk in enumerate(chunks):
        bare = getattr(chunk, "module", chunk)
        replaced += group_experts(bare) if grouped else 0
        state[f"model{number}"] = bare.sharded_state_dict(metadata={"dp_cp_group": grid.groups.dp_cp, **metadata})
    assert not grouped or replaced, "no expert is grouped"  # a chunk of dense layers alone has none
    moment = "optimizer.state.exp_avg.decoder.final_layernorm.weight"
    state["optimizer"] = {"exp_avg": ShardedTensor.from_rank_offsets(moment, torch.zeros(4), (0, grid.rank, grid.world))}
    state["rng_state"] = ShardedObject("rng_state", [torch.get_rng_state()], (grid.world,), (grid.rank,))
    if grid.rank == 0:
        folder.mkdir(parents=True)
    torch.distributed.barrier(group=grid.groups.control)
    dist_checkpointing.save(state, str(folder))
    for child in multiprocessing.active_children():  # Megatron's manager, which would outlive this rank
        child.terminate()

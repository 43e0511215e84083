"""Tiny models of every family, by transformers, and what the ranks of the pool do with them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megarl.config import Layout, ModelSettings
from megarl.models.description import ModelDescription
from megarl.models.family import HeadKind
from megarl.parallel.backend import choose
from megarl.parallel.build import build_chunks, transformer_config
from megarl.parallel.export import save_hf
from megarl.parallel.grid import Grid
from megarl.parallel.weights import load_hf, local_parameters
from tests.distributed.exported import tensors_of
from tools.make_tiny_model import FAMILIES, has_experts

VOCABULARY = 129  # two ranks do not divide it
# Name -> family of tools/make_tiny_model.py, and what its config.json has otherwise.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILIES},
    "qwen3_moe_unnormalized": ("qwen3_moe", {"norm_topk_prob": False}),
    "deepseek_v3_groups": ("deepseek_v3", {"num_experts_per_tok": 3}),  # not twice the number of groups
    "glm4_moe_air": ("glm4_moe", {"use_qk_norm": False}),
    "mistral_window": ("mistral", {"sliding_window": 12}),
    "phi3_window": ("phi3", {"sliding_window": 12}),
    "qwen2_window": ("qwen2", {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 2}),
}

Make = Callable[..., Path]  # (variant, layers=4, **changes of config.json) -> directory


def layouts(variant: str) -> dict[str, Layout]:
    """One rank, tensor (and expert) parallel, pipeline."""
    ep = 2 if has_experts(VARIANTS[variant][0]) else 1
    return {"one": Layout(), "tp2": Layout(ranks=2, tp=2, ep=ep), "pp2": Layout(ranks=2, pp=2)}


def load(grid: Grid, path: Path, dtype: str, head: HeadKind = "lm") -> tuple[list[Any], ModelDescription]:
    """This rank's chunks; every weight (but a fresh head's) was NaN before it was loaded."""
    model, settings = ModelDescription.read(path), ModelSettings(path=path, dtype=dtype)  # type: ignore[arg-type]
    chunks = build_chunks(transformer_config(model, settings, grid.layout, choose()), model, choose(), grad=True, head=head)
    for name, tensor in local_parameters(chunks, grid.ep_rank).items():
        if head == "lm" or not name.startswith("output_layer."):
            tensor.data.fill_(torch.nan)
    load_hf(chunks, model, grid)
    return chunks, model


def exported(grid: Grid, path: Path, dtype: str) -> dict[str, Tensor]:
    """What rank 0 is given of the loaded model."""
    chunks, model = load(grid, path, dtype)
    return tensors_of(chunks, model, grid, getattr(torch, dtype))


def saved(grid: Grid, path: Path, dtype: str, head: HeadKind, target: Path) -> None:
    """The loaded model as a directory."""
    chunks, model = load(grid, path, dtype, head)
    save_hf(chunks, model, grid, target)

"""Tiny models with a layer of multi-token prediction, which transformers' classes do not have."""

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl.models.description import ModelDescription
from tests.distributed.tiny_families import Make

# Family -> config.json's number of such layers, and what sends every token to every expert: no near-ties for a layout to break differently.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": ("num_nextn_predict_layers", {"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1}),
    "glm4_moe": ("num_nextn_predict_layers", {"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1}),
    "qwen3_next": ("mtp_num_hidden_layers", {"num_experts_per_tok": 8}),
    "qwen3_5_moe": ("mtp_num_hidden_layers", {"num_experts_per_tok": 8}),
    "qwen3_5": ("mtp_num_hidden_layers", {}),
}


def with_predictor(make: Make, out: Path, family: str, **changes: Any) -> Path:
    """Write a tiny model with a random layer of multi-token prediction, and copies of embedding and output layer as published models have.

    Args:
        make: the fixture.
        out: the directory to write.
        family: one of `FAMILIES`.
        **changes: of config.json.
    """
    key, every_expert = FAMILIES[family]
    shutil.copytree(make(family, vocab_size=128, **{key: 1, **every_expert, **changes}), out)
    model, stored = ModelDescription.read(out, mtp="train"), load_file(out / "model.safetensors")
    copies = {copy: stored[name].clone() for copy, name in model.copies.items()}
    save_file({**stored, **drawn(model), **copies}, out / "model.safetensors", metadata={"format": "pt"})
    return out


def drawn(model: ModelDescription) -> dict[str, Tensor]:
    """Random weights of the layer; those of its norms are around what does nothing."""
    generator, own = torch.Generator().manual_seed(5), model.trunk.expected()
    centred = model.fields.get("layernorm_zero_centered_gamma", False)
    tensors = {name: 0.1 * torch.randn(*shape, generator=generator) for name, shape in model.expected().items() if name not in own}
    return {name: tensor + 1 if "norm" in name and not centred else tensor for name, tensor in tensors.items()}

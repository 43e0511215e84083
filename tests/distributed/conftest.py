"""Fixtures of the distributed tests."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.distributed.tiny_families import VARIANTS, VOCABULARY, Make
from tools.make_tiny_model import build


@pytest.fixture(scope="session")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """The directory of a tiny model by transformers, made once."""
    known: dict[str, Path] = {}

    def path(variant: str, layers: int = 4, **changes: Any) -> Path:
        key = f"{variant} {layers} {changes}"
        if key not in known:
            known[key] = tmp_path_factory.mktemp("families") / variant
            family, own = VARIANTS[variant]
            sizes = {"hidden": 128, "experts": 8, "expert_hidden": 32}
            build(known[key], layers=layers, seed=1, family=family, **sizes, **{"vocab_size": VOCABULARY, **own, **changes})
            if family == "qwen3_moe":  # the tool stirs the others' itself
                stir_norms(known[key])
        return known[key]

    return path


def stir_norms(path: Path) -> None:
    """Norms that transformers makes all ones get weights that a test can tell apart."""
    generator = torch.Generator().manual_seed(7)
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.ndim == 1:
            tensors[name] = tensor + 0.1 * torch.randn(tensor.shape, generator=generator)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})

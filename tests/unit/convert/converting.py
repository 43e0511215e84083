"""What the tests of conversion share."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megarl.cli import main
from megarl.models.hf import Checkpoint

WEIGHTS = "model.safetensors"


def convert(*arguments: Any) -> None:
    assert main(["convert", *map(str, arguments)]) == 0


def refused(capsys: pytest.CaptureFixture[str], *arguments: Any) -> str:
    """What a conversion says that is refused: one line."""
    capsys.readouterr()
    assert main(["convert", *map(str, arguments)]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("megarl: ")]
    return line


def stored(path: Path) -> dict[str, tuple[torch.dtype, bytes]]:
    """Every tensor of a Hugging Face directory: its dtype and bytes."""
    with Checkpoint(path) as checkpoint:
        found = {name: checkpoint.read(name) for name in checkpoint.tensors}
        return {name: (tensor.dtype, tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()) for name, tensor in found.items()}


def change(path: Path, edit: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Edits the tensors of a directory of one file."""
    tensors = load_file(path / WEIGHTS)
    edit(tensors)
    save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})

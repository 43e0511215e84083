"""A model as one rank has it in the end."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from megarl.models.description import ModelDescription
from megarl.parallel.export import export_stacks
from megarl.parallel.grid import Grid
from megarl.sync.wire import each


def tensors_of(chunks: Iterable[Any], model: ModelDescription, grid: Grid, dtype: torch.dtype) -> dict[str, Tensor]:
    """On rank 0 a copy of every Hugging Face tensor, by name; elsewhere nothing. Collective.

    Args:
        chunks: of the model on this rank.
        model: the model.
        grid: this rank's.
        dtype: of the tensors.
    """
    stacks = export_stacks(chunks, model, grid, dtype)
    return {name: tensor.clone() for names, stack in stacks for name, tensor in each(names, stack)}

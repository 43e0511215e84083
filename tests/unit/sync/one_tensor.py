"""Fingerprints of single tensors."""

import torch

from megarl.sync.fingerprint import fingerprints


def fingerprint(tensor: torch.Tensor, row: int = 0, column: int = 0) -> torch.Tensor:
    """That of one tensor: [n] counts as one row, and more axes than two as further columns. `row`, `column`: where it lies in the whole."""
    matrix = tensor.reshape(1, -1) if tensor.ndim < 2 else tensor.reshape(tensor.shape[0], -1)
    return fingerprints(matrix[None], row, column)[0]

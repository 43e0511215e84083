"""Quantised weights of published checkpoints: how config.json says they are stored, and the bfloat16 numbers that they stand for.

8-bit floats with a factor for each block of a matrix (DeepSeek-V3, Kimi-K2, Qwen3-FP8), each row (GLM-4.5-FP8), or the whole of it; and
MXFP4 (gpt-oss).

Axes: R rows, C columns, I and J blocks along rows and columns, S rows of a strip, K codes of 8 bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.errors import ConfigError
from megarl.lazy_torch import Tensor, torch
from megarl.models.config_json import ConfigJson

FLOAT8 = "F8_E4M3"  # safetensors' name of the dtype
MXFP4 = "MXFP4"  # our name of the dtype of values that are stored as blocks and scales
QUANTIZATION = "quantization_config"  # the key of config.json
_AT_ONCE = 1 << 18  # elements converted together: their float32 copies stay in a CPU's cache
_FLOATS = {"float-quantized", "naive-quantized"}  # formats of compressed-tensors that store a tensor of 8-bit floats
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)  # 4-bit floats, by their code


@dataclass(frozen=True)
class Quantization:
    """How matrices of 8-bit floats are stored: which tensor has their scales, by which their values are multiplied."""

    suffixes: tuple[str, ...]  # what the name of a matrix's scales adds to its own, one of these
    block: tuple[int, int] | None  # rows and columns that share a scale; None: each row has its own, or all share one

    def block_of(self, shape: Sequence[int], scales: Sequence[int]) -> tuple[int, int] | None:
        """Return the rows and columns that share a scale, given the shapes of a matrix and of its scales; None if these do not fit."""
        rows, columns = shape
        if self.block is not None:
            return self.block if tuple(scales) == (-(-rows // self.block[0]), -(-columns // self.block[1])) else None
        if math.prod(scales) == 1:
            return rows, columns
        return (1, columns) if tuple(scales) in ((rows,), (rows, 1)) else None


def quantization(config: ConfigJson) -> Quantization | None:
    """Return how the weights of a config.json are quantised; None if they are not. Raise ConfigError for an unsupported way, by name."""
    given = config.get(QUANTIZATION)
    match given:
        case None:
            return None
        case {"quant_method": "fp8", "weight_block_size": [int(rows), int(columns)]} if rows > 0 and columns > 0:
            return Quantization(("_scale_inv",), (rows, columns))
        case {"quant_method": "fp8"} if given.get("weight_block_size") is None:
            return Quantization(("_scale_inv", "_scale"), None)
        case {"quant_method": "mxfp4"}:  # each tensor of experts as `_blocks` and `_scales` (`hf.Stack`)
            return Quantization((), None)
        case {"quant_method": "fbgemm_fp8"}:
            return Quantization(("_scale",), None)
        case {"quant_method": "compressed-tensors", "format": str(form), "config_groups": {**groups}} if form in _FLOATS:
            if (scheme := _compressed(groups.values())) is not None:
                return scheme
    parts = {key: given.get(key) for key in ("quant_method", "format", "weight_block_size")} if isinstance(given, Mapping) else given
    raise ConfigError(
        f"model.path: config.json's {QUANTIZATION} is not supported: {parts!r:.300}; fp8, fbgemm_fp8 and compressed-tensors of 8-bit "
        "floats are, and gpt-oss's mxfp4"
    )


def _compressed(groups: Iterable[Any]) -> Quantization | None:
    """Return what compressed-tensors' groups of layers say, if it is supported and the same for all of them."""
    blocks = set[tuple[int, int] | None]()
    for group in groups:
        match group:
            case {"weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [int(rows), int(columns)]}}:
                blocks.add((rows, columns))
            case {"weights": {"num_bits": 8, "type": "float", "strategy": "tensor" | "channel"}}:
                blocks.add(None)
            case _:
                return None
    return Quantization(("_scale",), blocks.pop()) if len(blocks) == 1 else None


def dequantized(value_RC: Tensor, scales: Tensor, block: tuple[int, int], first: tuple[int, int] = (0, 0)) -> Tensor:
    """Return a matrix, or a part of one, in bfloat16: the float32 products of values and scales, rounded once.

    Args:
        value_RC: float8 values.
        scales: the whole matrix's scales: [I, J], [I], or a single one.
        block: rows and columns that share a scale.
        first: row and column of the matrix at which the part begins.
    """
    scale_IJ = scales.float().reshape(len(scales) if scales.ndim else 1, -1)
    rows, columns = value_RC.shape
    scale_IC = scale_IJ[:, (torch.arange(columns) + first[1]) // block[1]] if scale_IJ.shape[1] > 1 else scale_IJ
    number_K = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()  # of every code: six times faster than torch's cast
    code_RC, found_RC = value_RC.view(torch.uint8), torch.empty(value_RC.shape, dtype=torch.bfloat16)
    strip = max(1, _AT_ONCE // max(1, columns))
    for start in range(0, rows, strip):
        code_SC = code_RC[start : start + strip]
        i_S = (torch.arange(start, start + len(code_SC)) + first[0]) // block[0]
        number_SC = number_K.index_select(0, code_SC.flatten().int()).view(code_SC.shape)
        found_RC[start : start + strip] = number_SC.mul_(scale_IC.index_select(0, i_S))
    return found_RC


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the bfloat16 values of MXFP4 (OCP Microscaling Formats 1.0): 32 4-bit floats that share a power of two.

        value = e2m1(code) * 2 ** (scale - 127)

    Args:
        blocks: uint8 [..., groups, 16]; each byte has two codes, the lower four bits first.
        scales: uint8 [..., groups].

    Returns:
        [..., groups * 32], which is exact. gpt-oss multiplies by the transpose of its last two axes.
    """
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2).long()
    values = torch.tensor(_E2M1, dtype=torch.float32)[codes]
    return torch.ldexp(values, scales.int()[..., None] - 127).flatten(-2).to(torch.bfloat16)

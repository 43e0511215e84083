"""Quantises weights for fp8 engines: float8 e4m3 values in blocks of 128 x 128 elements with one float32 scale each.

This is the format of DeepSeek-V3's published weights (https://arxiv.org/abs/2412.19437, section 3.3.2), which vLLM calls block-wise fp8: a
matrix `NAME.weight` comes with its scales, `NAME.weight_scale_inv`, by which the values are multiplied.

Both sides import this file. Axes: B matrices, R rows, C columns, I and J blocks along rows and columns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from megarl.lazy_torch import Tensor, torch
from megarl.models.weight_map import FP8, FP8_BLOCK, SCALES

if TYPE_CHECKING:
    from megarl.sync.wire import TensorName

LARGEST = 448.0  # largest finite number of e4m3
_SMALLEST = 2.0**-126  # least scale: float32's smallest normal number, since matrix units may take subnormal numbers for 0
# Elements quantised together, for which it needs about 12 bytes each: on a CPU they stay in its cache (4 times the speed).
_AT_ONCE = {"cpu": 1 << 18, "cuda": 1 << 24}


def quantize(stack_BRC: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise matrices, block by block.

    For a block X of 128 x 128 elements (less at the lower and right edge):

        scale = max(max|X| / 448, 2^-126),    values = e4m3(X / scale)

    where e4m3 rounds to nearest, ties to even, so that the block's largest element becomes 448 (DeepSeek-V3, section 3.3.2; its
    inference/kernel.py, `act_quant_kernel`, divides likewise). A block of zeros has the least scale. Elements of at least 2^-6 in units of
    the scale keep a relative error of at most 2^-4, smaller ones an absolute error of at most 2^-10 scales.

    Args:
        stack_BRC: [B, R, C] or a single matrix [R, C], floating.

    Returns:
        The values in float8_e4m3fn, of the stack's shape, and the scales, float32 [B, I, J] or [I, J]. A block with NaN or infinity has a
        scale that is not finite.
    """
    if stack_BRC.ndim == 2:
        value_BRC, scale_BIJ = quantize(stack_BRC[None])
        return value_BRC[0], scale_BIJ[0]
    count, rows, columns = stack_BRC.shape
    value_BRC = torch.empty(stack_BRC.shape, dtype=torch.float8_e4m3fn, device=stack_BRC.device)
    scale_BIJ = torch.empty(count, *blocks((rows, columns)), dtype=torch.float32, device=stack_BRC.device)
    elements = _AT_ONCE[stack_BRC.device.type]
    together = max(1, elements // max(1, rows * columns))
    strip = max(1, elements // max(1, columns) // FP8_BLOCK)  # rows of blocks, where one matrix is too large
    for first in range(0, count, together):
        for start in range(0, scale_BIJ.shape[1], strip):
            part = slice(first, first + together), slice(start * FP8_BLOCK, (start + strip) * FP8_BLOCK)
            value, scale = _quantized(stack_BRC[part])
            value_BRC[part] = value
            scale_BIJ[first : first + together, start : start + strip] = scale
    return value_BRC, scale_BIJ


def dequantize(value_BRC: Tensor, scale_BIJ: Tensor) -> Tensor:
    """Return values * scales in float32: [B, R, C] of [B, R, C] and [B, I, J], or [R, C] of [R, C] and [I, J]."""
    return value_BRC.float().mul_(_spread(scale_BIJ, value_BRC.shape))


def as_expected(
    stream: Iterable[tuple[TensorName, Tensor]], expected: Mapping[str, tuple[Sequence[int], str]]
) -> Iterator[tuple[TensorName, Tensor]]:
    """Bring the tensors of a weight stream into the dtypes that an engine expects.

    Args:
        stream: (Hugging Face name, tensor), or (names, stack).
        expected: (shape, dtype) by name, as `Family.update` lists them: a tensor expected in float8_e4m3fn is quantised.

    Yields:
        The same, each quantised tensor followed by its scales. A name that is not expected passes; the engine refuses it.
    """
    for name, tensor in stream:
        first = name if isinstance(name, str) else name[0]
        dtype = expected[first][1] if first in expected else None
        if dtype == FP8:
            values, scales = quantize(tensor.detach())
            yield name, values
            yield (name + SCALES if isinstance(name, str) else [one + SCALES for one in name]), scales
        else:
            yield name, tensor if dtype is None else tensor.to(getattr(torch, dtype))


def blocks(shape: Sequence[int]) -> list[int]:
    """Return the shape of the scales of a tensor of this shape."""
    *count, rows, columns = shape
    return [*count, -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK)]


def _quantized(stack_BRC: Tensor) -> tuple[Tensor, Tensor]:
    count, rows, columns = stack_BRC.shape
    down, across = blocks((rows, columns))
    padded = torch.nn.functional.pad(stack_BRC.float(), (0, across * FP8_BLOCK - columns, 0, down * FP8_BLOCK - rows))
    block_BIRJC = padded.view(count, down, FP8_BLOCK, across, FP8_BLOCK)
    low, high = block_BIRJC.amin((2, 4)), block_BIRJC.amax((2, 4))  # less memory than the absolute values
    scale_BIJ = (torch.maximum(-low, high) / LARGEST).clamp_(min=_SMALLEST)
    value = (block_BIRJC / scale_BIJ[:, :, None, :, None]).view(padded.shape)[:, :rows, :columns]
    return value.to(torch.float8_e4m3fn), scale_BIJ


def _spread(scale_BIJ: Tensor, shape: Sequence[int]) -> Tensor:
    rows, columns = shape[-2:]
    return scale_BIJ.repeat_interleave(FP8_BLOCK, -2)[..., :rows, :].repeat_interleave(FP8_BLOCK, -1)[..., :columns]

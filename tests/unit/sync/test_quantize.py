"""Block-wise quantisation: each element becomes the nearest number of the format in units of its block's scale."""

import math

import pytest
import torch

from megarl.sync import quantize as module
from megarl.sync.quantize import as_expected, blocks, dequantize, quantize
from megarl.sync.wire import TensorName

EVERY = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)  # every number of the format, with its two NaN


def _matrix(rows: int, columns: int, dtype: torch.dtype = torch.float32, seed: int = 5) -> torch.Tensor:
    """Elements of many sizes."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, columns, generator=generator) * torch.randn(rows, columns, generator=generator).exp()).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (200, 300), (1, 5), (129, 128)])
def test_every_element_becomes_the_nearest_number_of_the_format(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """And so keeps a relative error of 2^-4, or, below the least normal number 2^-6, an absolute one of half a step of 2^-9."""
    weight_RC = _matrix(*shape, dtype)
    value_RC, scale_IJ = quantize(weight_RC)
    assert value_RC.dtype == torch.float8_e4m3fn and list(scale_IJ.shape) == blocks(shape)
    numbers = EVERY.double()[~EVERY.double().isnan()].sort().values
    for down in range(scale_IJ.shape[0]):
        for across in range(scale_IJ.shape[1]):
            place = slice(128 * down, 128 * down + 128), slice(128 * across, 128 * across + 128)
            block, values, scale = weight_RC[place].double(), value_RC[place].double(), float(scale_IJ[down, across])
            assert scale == pytest.approx(float(block.abs().max()) / 448, rel=2**-22)
            wanted, error = block / scale, (values - block / scale).abs()
            above = torch.searchsorted(numbers, wanted.contiguous()).clamp(1, len(numbers) - 1)
            nearest = torch.minimum((wanted - numbers[above - 1]).abs(), (wanted - numbers[above]).abs())
            assert bool((error <= nearest * (1 + 1e-6) + 1e-6).all()), "float32 rounds the quotient"
            assert float(values.abs().max()) == 448
            normal = wanted.abs() >= 2**-6
            assert float((error / wanted.abs())[normal].max()) <= 2**-4 + 1e-6
            assert not (~normal).any() or float(error[~normal].max()) <= 2**-10 + 1e-6
    assert torch.equal(
        dequantize(value_RC, scale_IJ),
        torch.tensor([[float(value_RC[r, c]) * scale_IJ[r // 128, c // 128] for c in range(shape[1])] for r in range(shape[0])]),
    )


def test_quantised_values_do_not_depend_on_stacking_or_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    stack_BRC = torch.stack([_matrix(300, 200, seed=seed) for seed in range(3)])
    value_BRC, scale_BIJ = quantize(stack_BRC)
    for one, value_RC, scale_IJ in zip(stack_BRC, value_BRC, scale_BIJ, strict=True):
        alone = quantize(one)
        assert torch.equal(alone[0].view(torch.uint8), value_RC.view(torch.uint8)) and torch.equal(alone[1], scale_IJ)
    assert torch.equal(dequantize(value_BRC, scale_BIJ)[1], dequantize(value_BRC[1], scale_BIJ[1]))
    for at_once in (1, 200 * 128, 200 * 300, 2 * 200 * 300):
        monkeypatch.setitem(module._AT_ONCE, "cpu", at_once)
        values, scales = quantize(stack_BRC)
        assert torch.equal(values.view(torch.uint8), value_BRC.view(torch.uint8)) and torch.equal(scales, scale_BIJ)


@pytest.mark.parametrize("tiny", [0.0, 1e-41, 2.0**-140])
def test_a_block_of_tiny_values_quantises_to_tiny_values(tiny: float) -> None:
    weight_RC = torch.ones(128, 256)
    weight_RC[:, :128] = tiny
    value_RC, scale_IJ = quantize(weight_RC)
    assert scale_IJ.isfinite().all() and scale_IJ[0, 0] == 2.0**-126 and scale_IJ[0, 1] == torch.tensor(1.0) / 448
    assert float(dequantize(value_RC, scale_IJ)[:, :128].abs().max()) <= tiny * (1 + 2**-4) + 2.0**-136


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_makes_its_scale_not_finite(value: float) -> None:
    weight_RC = torch.ones(128, 256)
    weight_RC[3, 200] = value
    assert quantize(weight_RC)[1].isfinite().tolist() == [[True, False]]


def test_a_stream_is_converted_to_the_dtypes_of_the_engine() -> None:
    stack = torch.stack([_matrix(128, 256, seed=seed) for seed in (1, 2)])
    stream: list[tuple[TensorName, torch.Tensor]] = [
        ("norm", torch.ones(4)),
        (["a", "b"], stack),
        ("proj", stack[0]),
        ("bias", torch.ones(3)),
        ("unknown", torch.ones(2)),
    ]
    fp8 = ([128, 256], "float8_e4m3fn")
    expected = {"norm": ([4], "bfloat16"), "a": fp8, "b": fp8, "proj": fp8, "bias": ([3], "float32")}
    found = [(name, tensor.dtype, list(tensor.shape)) for name, tensor in as_expected(stream, expected)]
    assert found == [
        ("norm", torch.bfloat16, [4]),
        (["a", "b"], torch.float8_e4m3fn, [2, 128, 256]),
        (["a_scale_inv", "b_scale_inv"], torch.float32, [2, 1, 2]),
        ("proj", torch.float8_e4m3fn, [128, 256]),
        ("proj_scale_inv", torch.float32, [1, 2]),
        ("bias", torch.float32, [3]),
        ("unknown", torch.float32, [2]),
    ]

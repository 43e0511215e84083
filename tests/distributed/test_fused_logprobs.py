"""The GPU's kernels of log-prob and entropy against the plain formula in float64: in Triton's interpreter, and on a GPU where there is one.

The cases and the tolerances are those of the CPU's kernels (`test_logprobs`).
"""

import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from multiprocessing import get_context
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.config import Layout
from megarl.parallel import backend, logprobs_chunked
from megarl.parallel.grid import Grid
from megarl.parallel.logprobs import logprob_entropy
from tests.distributed.test_logprobs import ROWS, WIDTH, Case, case, close, each, ours, plain
from tests.gpu import triton_here
from tests.rank_pool import Pool

Run = Callable[..., Any]
BLOCKS = (16, 4096)  # columns of a block: a row has several, the last of which may be cut, or is part of one
DTYPES, PLACES = (torch.float32, torch.bfloat16, torch.float16), ("all", "gaps", "shuffled")
HOW = ((4096, 1.0, WIDTH, 0.0, False), (16, 0.7, WIDTH, 0.5, True), (16, 0.7, 50, 0.0, False), (4096, 1.3, 50, 0.5, True))
"""Columns of a block, temperature, vocabulary, weight of the entropy, whether the gradient overwrites the logits."""


def _kinds() -> list[Any]:
    """Every dtype with all rows and in every way; with `--long` all three together."""
    kinds = [(n, dtype, rows, how) for n, (dtype, rows, how) in enumerate(product(DTYPES, PLACES, HOW))]
    short = {n for n in range(36) if (n // 12 + n // 4 % 3 + n % 4) % 3 == 0}
    return [pytest.param(*kind, marks=() if n in short else pytest.mark.long) for n, *kind in kinds]


@pytest.fixture(scope="module", autouse=True)
def triton() -> None:
    if not triton_here.present():
        missing = "Triton is not installed here: bash tests/run.sh does it"
        if os.environ.get("CI") == "true":
            pytest.fail(missing)
        pytest.skip(missing)


def _alone(begin: Callable[..., None], *arguments: Any) -> Iterator[Run]:
    """Calls of functions in a process of its own: in this one neither vLLM nor Megatron is to find Triton."""
    with ProcessPoolExecutor(1, get_context("spawn"), begin, arguments) as process:
        yield lambda function, *given: process.submit(function, *given).result()


def _begin(device: str) -> None:
    if device == "cpu":
        _use_fused()
    else:
        torch.set_default_device(device)


def _use_fused() -> None:
    backend.Cpu.logprob_kernels = triton_here.fused_kernels()  # type: ignore[method-assign]


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def there(request: pytest.FixtureRequest) -> Iterator[Run]:
    yield from _alone(_begin, request.param)


def fused(block: int, args: Case, *how: Any) -> list[Tensor]:
    """`ours` with these kernels."""
    from megarl.parallel import logprobs_fused

    logprobs_fused.BLOCK = block
    device = torch.get_default_device()
    return [tensor.cpu() for tensor in ours(None, tuple(tensor.to(device) for tensor in args), *how)]  # type: ignore[arg-type]


@pytest.mark.parametrize(("dtype", "rows", "how"), _kinds())
def test_one_rank_equals_the_formula_and_the_cpus_kernels(
    monkeypatch: pytest.MonkeyPatch, there: Run, dtype: torch.dtype, rows: str, how: tuple[Any, ...]
) -> None:
    block, temperature, vocabulary, entropy_weight, overwrite = how
    args = case(dtype, rows, vocabulary)
    got = there(fused, block, args, temperature, vocabulary, entropy_weight, overwrite)
    tolerance = torch.float32 if dtype == torch.float32 else torch.bfloat16
    close(got, plain(args, temperature, vocabulary, entropy_weight), tolerance)
    monkeypatch.setattr(type(backend.choose()), "logprob_kernels", logprobs_chunked)
    lp_T, entropy_T, grad_RV = ours(None, args, temperature, vocabulary, entropy_weight, overwrite)
    close(got, (lp_T.double(), entropy_T.double(), grad_RV.double()), tolerance)
    left_out = torch.ones(ROWS, dtype=torch.bool)
    left_out[args[1]] = False
    assert bool((got[2][left_out] == 0).all()) and bool((got[2][:, vocabulary:] == 0).all())


def _split(grid: Grid, several: list[tuple[Any, ...]]) -> list[list[Tensor]]:
    _use_fused()
    return each(grid, several)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the ranks of the pool are on GPUs, which have these kernels anyway")
def test_a_split_vocabulary_equals_the_formula(pool: Pool) -> None:
    kinds = [(torch.float32, "shuffled", 0.5), (torch.bfloat16, "gaps", 0.0)]
    cases = [(*kind, vocabulary) for vocabulary in (50, 16) for kind in kinds]  # 16 leaves the last rank padding alone
    several = [(case(dtype, rows, vocabulary), 0.9, vocabulary, weight) for dtype, rows, weight, vocabulary in cases]
    ranks = pool.run(_split, Layout(ranks=2, tp=2), [(*arguments, True) for arguments in several])
    for (dtype, *_), arguments, results in zip(cases, several, zip(*ranks, strict=True), strict=True):
        assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
        close([*results[0][:2], torch.cat([result[2] for result in results], dim=1)], plain(*arguments), dtype)


@pytest.mark.parametrize("block", BLOCKS)
def test_confident_and_hopeless_tokens_stay_exact(there: Run, block: int) -> None:
    args = case(torch.float32, "all", WIDTH, sharpness=2000.0)
    got = there(fused, block, args, 1.0, WIDTH, 0.5, False)
    assert all(bool(tensor.isfinite().all()) for tensor in got)
    assert float(got[0][1]) == 0 and float(got[0].min()) < -1000
    close(got, plain(args, 1.0, WIDTH, 0.5), torch.float32)


def test_gradients_are_rounded_once_to_the_nearest(there: Run) -> None:
    """The target's is 1 - p, here 7e-4: not 1 less a p that bf16 has rounded to 1."""
    args = (torch.tensor([[8.0, 0.0, 0.0]]).bfloat16(), torch.tensor([0]), torch.tensor([0]), torch.ones(1), torch.zeros(1))
    grad = there(fused, 16, args, 1.0, 3, 0.0, False)[2].double()
    torch.testing.assert_close(grad, plain(args, 1.0, 3, 0.0)[2], rtol=2**-8, atol=0)


def _unlike(logits_RV: Tensor) -> tuple[list[float], list[float]]:
    row_T = torch.arange(len(logits_RV))
    lp_T, entropy_T = logprob_entropy(logits_RV.to(row_T.device), row_T, row_T, vocabulary=50)
    return lp_T.tolist(), entropy_T.tolist()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_no_number_does_not_disappear(there: Run, bad: float) -> None:
    logits_RV = torch.zeros(3, WIDTH)
    logits_RV[0, 20], logits_RV[1, 60] = bad, bad  # a column of the vocabulary, and one of the padding
    for values in there(_unlike, logits_RV):
        assert values[0] != values[0] and values[1] == values[1] == values[2]


def _no_row() -> list[Tensor]:
    logits_RV, none_T = torch.randn(3, WIDTH).requires_grad_(), torch.empty(0, dtype=torch.int64)
    lp_T, entropy_T = logprob_entropy(logits_RV, none_T, none_T)
    (lp_T.sum() + entropy_T.sum()).backward()
    assert logits_RV.grad is not None
    return [lp_T.detach().cpu(), logits_RV.grad.cpu()]


def test_no_row_to_score_gives_zero_gradient(there: Run) -> None:
    lp_T, grad_RV = there(_no_row)
    assert len(lp_T) == 0 and grad_RV.shape == (3, WIDTH) and not grad_RV.any()


def _kernels(kernels: Any, logits_RV: Tensor, real: int, step: int, grad_step: int | None) -> list[Tensor]:
    """Called with rows that lie `step` elements apart, and their gradient `grad_step`, or in their place."""
    rows, width = logits_RV.shape
    apart_RV = torch.empty((rows - 1) * step + width, dtype=logits_RV.dtype).as_strided((rows, width), (step, 1)).copy_(logits_RV)
    row_T, number_T = torch.tensor([rows - 1, 0]), torch.tensor([3.0, 4.0])
    results = [*kernels.local_sums(apart_RV, row_T, real, 0.7), kernels.local_top(apart_RV, row_T, real)]
    grad_RV, outside = apart_RV, torch.tensor(0)
    if grad_step is not None:
        outside = torch.full(((rows - 1) * grad_step + width + 9,), 7.0, dtype=logits_RV.dtype)
        grad_RV = outside.as_strided((rows, width), (grad_step, 1), 4)
    kernels.write_gradient(grad_RV, apart_RV, row_T, real, 0.7, *number_T.repeat(3, 1))
    return [tensor.cpu() for tensor in (*results, grad_RV.contiguous(), (outside == 7.0).count_nonzero())]


def _fused_kernels(*how: Any) -> list[Tensor]:
    from megarl.parallel import logprobs_fused

    return _kernels(logprobs_fused, *how)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("real", "step", "grad_step"),
    [
        (WIDTH - 3, WIDTH, WIDTH),
        (WIDTH - 3, WIDTH + 5, WIDTH + 2),
        (WIDTH - 3, WIDTH + 5, None),
        pytest.param(WIDTH - 3, 1 << 30, None, id="beyond 2^31 elements"),
        pytest.param(0, WIDTH, WIDTH, id="padding alone"),
    ],
)
def test_rows_lie_anywhere(there: Run, dtype: torch.dtype, real: int, step: int, grad_step: int | None) -> None:
    """Only they are read and written, also where their places take more than 31 bits (4 or 8 GB are reserved, and hardly any used)."""
    logits_RV = case(dtype, "all", WIDTH)[0][:3]
    logits_RV[0] = -20 - logits_RV[0].abs()  # the maximum is negative
    logits_RV[1] = torch.inf  # not scored
    *got, kept = there(_fused_kernels, logits_RV, real, step, grad_step)
    *expected, kept_by_cpu = _kernels(logprobs_chunked, logits_RV, real, WIDTH, grad_step)
    assert torch.equal(kept, kept_by_cpu)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2**-7 if one.dtype == torch.bfloat16 else 1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    cache = tmp_path_factory.mktemp("kernels")
    for run in _alone(triton_here.use_compiler, cache):
        yield partial(run, triton_here.compiled)


@pytest.mark.parametrize(("dtype", "entropy"), [("bfloat16", False), ("bfloat16", True), ("float16", True), ("float32", True)])
@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_kernels_compile_for_gpus_and_read_16_bytes_at_once(compiled: Run, architecture: int, dtype: str, entropy: bool) -> None:
    found = compiled(architecture, dtype, entropy)
    assert found.keys() == {"_sums", "_gradient"}
    for ptx, said in found.values():
        assert f".target sm_{architecture}" in ptx and "0 bytes spill stores, 0 bytes spill loads" in said
        registers = int(re.findall(r"Used (\d+) registers", said)[0])
        assert registers <= 64, "of 65,536: four programs of 256 threads at a time"
        # Beside whole reads of logits there are only those of one number a row.
        wide, scalar = len(re.findall(r"ld\.global\.v4\.b32", ptx)), len(re.findall(r"ld\.global\.b(?:32|64)", ptx))
        assert wide in (2, 4, 8) and scalar <= 4 and not re.search(r"(ld|st)\.global\.(v\d\.)?b(8|16)\b", ptx)
    assert "max.NaN.f32" in found["_sums"][0], "the interpreter's maximum keeps a NaN anyway"
    gradient = found["_gradient"][0]
    assert len(re.findall(r"st\.global\.v4\.b32", gradient)) == len(re.findall(r"ld\.global\.v4\.b32", gradient))
    if dtype == "bfloat16":
        assert "cvt.rn.bf16" in gradient

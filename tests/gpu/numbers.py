"""Part numbers: the losses, the fingerprints and the log-probs, on the device and on the CPU."""

from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megarl.parallel import logprobs_chunked
from tests.gpu.process import Run
from tests.gpu.report import Report, largest
from tests.gpu.timing import memory_over, timed

ROWS, VOCABULARY = 16_384, 151_936  # a micro-batch, and Qwen3's vocabulary
SMALL = (48, 1_003)
CHUNK_ELEMENTS = 1 << 23  # of a GPU: two chunks are 64 MB, large enough for few launches
WAYS = ("as built", "chunk by chunk", "plain torch")  # of the last only the speed is of interest
LOSSES = 1e-10  # float64, relative
LOGPROBS = 2e-5  # nats, of float32 sums over a vocabulary against float64
GRADIENT = 2**-8  # relative: it is rounded to bfloat16


def losses(grid: Any) -> dict[str, list[Tensor]]:
    """Of every algorithm without a correction: the loss in float64, and its slopes in log-probs and entropies."""
    from megarl.parallel.backend import choose
    from tests.unit.algorithms.cases import ALGORITHMS, LENGTHS, ragged, same, weighted

    device, found = choose().device, {}
    for name, algorithm in ALGORITHMS.items():
        if algorithm.correction is not None:
            continue
        batch, *numbers = ragged(12, LENGTHS[:20])
        batch = weighted(algorithm, batch).to(device)
        logp_T, entropy_T = (value_T.to(device).requires_grad_() for value_T in numbers)
        loss = algorithm.loss(logp_T, entropy_T, batch, same, algorithm.kl_coef)
        total = (loss.loss_T * batch.extra_T["weight"]).sum()
        total = total if loss.weighted is None else total + loss.weighted
        total.backward()
        found[name] = [value.cpu() for value in (total.detach(), logp_T.grad, entropy_T.grad) if value is not None]
    return found


def prints(grid: Any) -> dict[str, int]:
    """Fingerprints of matrices in three dtypes: random bits, so also subnormal numbers, infinities and NaN."""
    from megarl.parallel.backend import choose
    from tests.unit.sync.one_tensor import fingerprint

    generator = torch.Generator().manual_seed(3)
    found = {}
    for dtype, integer in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16), (torch.float16, torch.int16)):
        limits = torch.iinfo(integer)
        for shape in ((7,), (129, 515), (3, 64, 33)):
            bits = torch.randint(limits.min, limits.max, shape, generator=generator, dtype=integer)
            found[f"{dtype} {shape}"] = int(fingerprint(bits.to(choose().device).view(dtype), 5, 3))
    return found


def logprobs(grid: Any, way: str, rows: int, vocabulary: int) -> dict[str, float]:
    """Log-prob and entropy of bfloat16 logits, forward and backward, in one of the `WAYS`.

    Returns:
        Seconds and memory, also of forward alone; and the largest errors against float64, except of what is there for comparison.
    """
    from megarl.parallel.backend import choose
    from megarl.parallel.logprobs import logprob_entropy

    backend = choose()
    if way == "plain torch":
        rows //= 4  # it keeps several float32 copies of the logits
    torch.manual_seed(5)
    kept_RV = torch.randn(rows, vocabulary, dtype=torch.bfloat16, device=backend.device).mul_(4)
    logits_RV, row_T = kept_RV.clone(), torch.arange(rows, device=backend.device)
    target_T = torch.randint(vocabulary, (rows,), device=backend.device)
    result = list[Tensor]()

    def forward(leaf_RV: Tensor) -> tuple[Tensor, Tensor]:
        if way != "plain torch":
            return logprob_entropy(leaf_RV, row_T, target_T, overwrite=True)
        log_p_RV = leaf_RV.float().log_softmax(-1)
        return log_p_RV.gather(1, target_T[:, None])[:, 0], -(log_p_RV.exp() * log_p_RV).sum(-1)

    def both() -> None:
        leaf_RV = logits_RV.detach().requires_grad_()
        lp_T, entropy_T = forward(leaf_RV)
        [grad_RV] = torch.autograd.grad((lp_T + 0.1 * entropy_T).sum(), [leaf_RV])  # `backward` would copy it
        result[:] = [lp_T.detach(), entropy_T.detach(), grad_RV.detach()]

    with ExitStack() as changed:
        if way == "chunk by chunk":
            changed.enter_context(patch.object(type(backend), "logprob_kernels", logprobs_chunked))
            changed.enter_context(patch.object(logprobs_chunked, "CHUNK_ELEMENTS", CHUNK_ELEMENTS))
        training = timed(both, lambda: logits_RV.copy_(kept_RV))
        in_place = result[2].untyped_storage().data_ptr() == logits_RV.untyped_storage().data_ptr()
        errors = {} if way == "plain torch" else _errors(kept_RV, target_T, *result)
        logits_RV.copy_(kept_RV)
        with torch.no_grad():
            scoring = timed(lambda: forward(logits_RV))
    size = kept_RV.nbytes
    figures = {
        "rows": rows,
        "seconds": training.seconds,
        "GB/s of 6 bytes a logit": 3 * size / training.seconds / 1e9,
        **memory_over(training),
    }
    figures |= {"seconds, forward": scoring.seconds, "GB/s of 2 bytes a logit": size / scoring.seconds / 1e9}
    return {**figures, **errors, "gradient in place of the logits": in_place}


def _errors(logits_RV: Tensor, target_T: Tensor, lp_T: Tensor, entropy_T: Tensor, grad_RV: Tensor) -> dict[str, float]:
    """The largest against float64, the gradient's relative to its element."""
    worst = {"log-prob": 0.0, "entropy": 0.0, "gradient": 0.0}
    for start in range(0, len(logits_RV), 256):
        part = slice(start, start + 256)
        log_p = logits_RV[part].double().log_softmax(-1)
        p, target = log_p.exp(), target_T[part, None]
        entropy = -(p * log_p).sum(-1)
        expected = 0.1 * -p * (log_p + entropy[:, None]) - p
        expected.scatter_add_(1, target, torch.ones_like(target, dtype=torch.float64))
        apart = {
            "log-prob": (lp_T[part] - log_p.gather(1, target)[:, 0]).abs().max(),
            "entropy": (entropy_T[part] - entropy).abs().max(),
            "gradient": ((grad_RV[part] - expected).abs() / expected.abs().clamp(min=1e-6)).max(),
        }
        worst = {name: largest((worst[name], float(value))) for name, value in apart.items()}
    return worst


def check(there: Run, cpu: Run, report: Report, *, small: bool = False) -> None:
    """Compares the device with the CPU, and its log-probs with float64.

    Args:
        there: runs on the device,
        cpu: on the CPU.
        report: of this part.
        small: a few log-probs, for a CPU.
    """
    with report.section("fingerprints"):
        expected = cpu(prints)
        report.figures["fingerprints"] = len(set(expected.values()))
        report.check(there(prints) == expected and len(set(expected.values())) == 9, "fingerprints differ")
    with report.section("losses"):
        ours, theirs = there(losses), cpu(losses)
        report.figures["losses"] = len(theirs)
        report.check(ours.keys() == theirs.keys() and len(theirs) > 20, f"the losses are those of {list(ours)}")
        for name, values in theirs.items():
            for one, other in zip(ours[name], values, strict=True):
                same = torch.allclose(one, other, rtol=LOSSES, atol=1e-14, equal_nan=True)
                report.check(same, f"{name}: the loss or a slope differs")
    rows, vocabulary = SMALL if small else (ROWS, VOCABULARY)
    for way in WAYS:
        with report.section(way):
            figures = there(logprobs, way, rows, vocabulary)
            report.figures[f"{way}, [{figures.pop('rows')}, {vocabulary}]"] = figures
            if way != "plain torch":
                report.check(figures["gradient in place of the logits"], f"{way}: the gradient takes memory of its own")
                errors = largest((figures["log-prob"], figures["entropy"])), figures["gradient"]
                report.check(errors[0] < LOGPROBS and errors[1] < GRADIENT, f"{way}: {errors}; {LOGPROBS}, {GRADIENT} are allowed")

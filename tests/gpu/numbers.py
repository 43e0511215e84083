"""Part 1: the losses, the fingerprints and the log-probs, on the device and on the CPU."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from tests.gpu.process import Run

ROWS, VOCABULARY = 16_384, 75_968  # a micro-batch, and half of Qwen3's vocabulary
SMALL = (48, 1_003)
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


def logprobs(grid: Any, rows: int, vocabulary: int) -> dict[str, float]:
    """Log-prob and entropy of bfloat16 logits, forward and backward, against float64: largest errors, seconds, memory over the logits."""
    from megarl.parallel.backend import choose
    from megarl.parallel.logprobs import logprob_entropy

    backend = choose()
    torch.manual_seed(5)
    logits_RV = torch.randn(rows, vocabulary, dtype=torch.bfloat16, device=backend.device).mul_(4)
    kept_RV, row_T = logits_RV.clone(), torch.arange(rows, device=backend.device)
    target_T = torch.randint(vocabulary, (rows,), device=backend.device)
    seconds = []
    for _ in range(3):
        leaf_RV = logits_RV.copy_(kept_RV).detach().requires_grad_()
        backend.synchronize()
        begun, before = time.perf_counter(), _held(backend.device)
        lp_T, entropy_T = logprob_entropy(leaf_RV, row_T, target_T, overwrite=True)
        (lp_T + 0.1 * entropy_T).sum().backward()
        backend.synchronize()
        seconds.append(time.perf_counter() - begun)
        over = _peak(backend.device) - before
    worst = {"log-prob": 0.0, "entropy": 0.0, "gradient": 0.0}
    for start in range(0, rows, 256):
        part = slice(start, start + 256)
        log_p = kept_RV[part].double().log_softmax(-1)
        p, target = log_p.exp(), target_T[part, None]
        entropy = -(p * log_p).sum(-1)
        expected = 0.1 * -p * (log_p + entropy[:, None]) - p
        expected.scatter_add_(1, target, torch.ones_like(target, dtype=torch.float64))
        assert leaf_RV.grad is not None
        apart = {
            "log-prob": (lp_T[part] - log_p.gather(1, target)[:, 0]).abs().max(),
            "entropy": (entropy_T[part] - entropy).abs().max(),
            "gradient": ((leaf_RV.grad[part] - expected).abs() / expected.abs().clamp(min=1e-6)).max(),
        }
        worst = {name: max(worst[name], float(value)) for name, value in apart.items()}
    return {**worst, "seconds": min(seconds), "GB over the logits": over / 1e9}


def _held(device: torch.device) -> int:
    """Bytes of a GPU that are held now; a new peak begins."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated() if device.type == "cuda" else 0


def check(there: Run, cpu: Run, *, small: bool = False) -> dict[str, Any]:
    """Compares the device with the CPU, and its log-probs with float64.

    Args:
        there: runs on the device,
        cpu: on the CPU.
        small: a few log-probs, for a CPU.

    Returns:
        Figures. AssertionError where they are apart.
    """
    printed = cpu(prints)
    assert there(prints) == printed and len(set(printed.values())) == 9
    ours, expected = there(losses), cpu(losses)
    assert ours.keys() == expected.keys() and len(expected) > 20
    for name, values in expected.items():
        for mine, its in zip(ours[name], values, strict=True):
            torch.testing.assert_close(mine, its, rtol=LOSSES, atol=1e-14, equal_nan=True, msg=f"{name}: the loss or a slope differs")
    rows, vocabulary = SMALL if small else (ROWS, VOCABULARY)
    figures = there(logprobs, rows, vocabulary)
    assert max(figures["log-prob"], figures["entropy"]) < LOGPROBS and figures["gradient"] < GRADIENT, figures
    return {f"log-prob and entropy, [{rows}, {vocabulary}]": figures, "losses": len(expected), "fingerprints": len(printed)}

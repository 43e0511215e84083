"""Measure speed and memory of the losses side by side with what they must beat: `python tools/bench_losses.py [--peers]`.

Every measurement runs in a fresh process. Times are medians of runs that alternate between the two sides, on one thread, so
that a busy machine slows both; memory is the high-water mark of the process's resident memory over one run, after all freed memory was
returned to the system. `--peers` installs TRL into a throw-away environment (over this one's torch) and measures it too.
Axes: T entries, N sequences, R rows of logits, V vocabulary.
"""

import argparse
import ctypes
import functools
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megarl.batch import Batch
from tools.peak_memory import PeakMemory

ROOT = Path(__file__).resolve().parent.parent
PEER = "trl==1.16.0"
ALGORITHMS = ("ppo", "dapo", "vapo", "gspo", "gmpo", "cispo", "rloo")
MEMORY = "memory-"  # prefix of measurements of memory only, where every array is a mapping of its own that goes when it is freed (slow)
TOKENS, ROWS, VOCABULARY = 1 << 20, 8192, 32000
Run = Callable[[], Any]


class Row(NamedTuple):
    """One line of the table: a figure, what it is compared with, and its bound."""

    what: str
    ours: str
    against: str
    figure: float
    bound: float | None  # None: for information
    at_least: bool = False  # the figure must reach the bound instead of staying within it
    unit: str = "x"

    @property
    def holds(self) -> bool | None:
        if self.bound is None:
            return None
        return self.figure >= self.bound if self.at_least else self.figure <= self.bound


def side_by_side(runs: Mapping[str, Run], repeats: int) -> dict[str, float]:
    """Return the median seconds of each run, made alternately, after one warm-up of each."""
    for run in runs.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            begun = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - begun)
    return {name: statistics.median(values) for name, values in seconds.items()}


def peak_extra(run: Run) -> int:
    """Return the most bytes by which resident memory rises while `run` runs."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    peak = PeakMemory()
    run()
    return peak.extra()


def sequences(count: int, length: int, prompt: int = 0) -> Batch:
    """Return `count` whole sequences of `length` entries, the first `prompt` of each without loss."""
    seq_T, position_T = torch.arange(count).repeat_interleave(length), torch.arange(length).repeat(count)
    length_N, count_N, start_N = (torch.full((count,), number) for number in (length, length - prompt, prompt))
    return Batch(position_T, position_T, position_T >= prompt, seq_T, position_T, length_N, count_N, start_N, in_order=True)


# --- GAE


def measure_gae() -> list[Row]:
    """Measure 64 sequences of 32,768 tokens against the loop over t on [64, 32768]."""
    from megarl.algorithms.gae import gae, length_adaptive_lambda

    batch = sequences(64, 32768)
    reward_T, value_T = torch.randn(2, len(batch))
    reward_NT, value_NT, mask_NT = reward_T.view(64, -1), value_T.view(64, -1), torch.ones(64, 32768)
    lam_N = length_adaptive_lambda(batch.count_N, 0.05)
    median = side_by_side(
        {
            "ours": lambda: gae(reward_T, value_T, batch, 0.99, 0.95),
            "adaptive": lambda: gae(reward_T, value_T, batch, 1.0, lam_N),
            "loop": lambda: loop_over_time(reward_NT, value_NT, mask_NT, 0.99, 0.95),
            "bare": lambda: loop_without_masks(reward_NT, value_NT, 0.99, 0.95),
        },
        repeats=3,
    )
    rows = []
    for name, title in (("ours", "GAE"), ("adaptive", "GAE, a lambda a sequence")):
        for other, label, bound in (("loop", "loop over t", 50.0), ("bare", "loop over t without masks", None)):
            rows.append(Row(title, _ms(median[name]), f"{label}: {_ms(median[other])}", median[other] / median[name], bound, True))
    return rows


def loop_over_time(reward_NT: Tensor, value_NT: Tensor, mask_NT: Tensor, gamma: float, lam: float) -> Tensor:
    """GAE as public systems write it, skipping masked tokens."""
    value = advantage = torch.zeros(len(reward_NT))
    out = []
    for t in reversed(range(reward_NT.shape[1])):
        delta = reward_NT[:, t] + gamma * value - value_NT[:, t]
        here, mask = delta + gamma * lam * advantage, mask_NT[:, t]
        value = value_NT[:, t] * mask + (1 - mask) * value
        advantage = here * mask + (1 - mask) * advantage
        out.append(advantage)
    return torch.stack(out[::-1], dim=1)


def loop_without_masks(reward_NT: Tensor, value_NT: Tensor, gamma: float, lam: float) -> Tensor:
    """GAE by the least work that a loop can do; wrong if any token is masked."""
    value = advantage = torch.zeros(len(reward_NT))
    out = []
    for t in reversed(range(reward_NT.shape[1])):
        advantage = reward_NT[:, t] + gamma * value - value_NT[:, t] + gamma * lam * advantage
        value = value_NT[:, t]
        out.append(advantage)
    return torch.stack(out[::-1], dim=1)


# --- policy losses


def measure_policy(name: str) -> list[Row]:
    """Measure forward and backward of one algorithm's loss over a million packed tokens, against the bare arithmetic."""
    batch, logp_T = policy_batch(TOKENS)
    run = policy_run(name, batch, logp_T)
    median = side_by_side({"ours": run, "bare": functools.partial(bare_arithmetic, name, batch, logp_T)}, repeats=21)
    what = f"{name} loss, 1M tokens"
    rows = [Row(what, _ms(median["ours"]), f"bare arithmetic: {_ms(median['bare'])}", median["ours"] / median["bare"], 2.0)]
    if name == "ppo":
        rows.append(Row(what, _ms(median["ours"]), "26 to 33 ms measured for a peer", 1e3 * median["ours"], 17.0, unit=" ms"))
    return rows


def measure_policy_memory(name: str) -> list[Row]:
    """Measure the memory that the same takes beyond its inputs, gradient included."""
    policy_run(name, *policy_batch(4096))()  # does what happens only in a first run
    extra = peak_extra(policy_run(name, *policy_batch(TOKENS)))
    return [Row(f"{name} loss, 1M tokens", _mb(extra), "peak extra memory, float32 arrays", extra / (4 * TOKENS), 6.0, unit="")]


def policy_batch(tokens: int) -> tuple[Batch, Tensor]:
    """Return sequences of up to 4,096 entries, an eighth of each being prompt, and their log-probs."""
    length = min(tokens, 4096)
    batch = sequences(tokens // length, length, prompt=length // 8)
    logp_T = -3 * torch.rand(tokens)
    advantage_T = batch.spread(torch.randn(len(batch.length_N)))
    weight_T = batch.mask_T / batch.mask_T.sum()
    return batch.with_extra(
        old_logp=logp_T + 0.1 * torch.randn(tokens), advantage=advantage_T, weight=weight_T, positive_weight=weight_T
    ), logp_T


def policy_run(name: str, batch: Batch, logp_T: Tensor) -> Run:
    """Return a forward and backward pass as a rank does it."""
    from pydantic import TypeAdapter

    from megarl.algorithms import Algorithm, PolicyAlgorithm

    algorithm: PolicyAlgorithm = TypeAdapter(Algorithm).validate_python({"type": name})
    leaf, entropy_T = logp_T.clone().requires_grad_(), torch.ones_like(logp_T)

    def run() -> None:
        leaf.grad = None
        loss = algorithm.loss(leaf, entropy_T, batch, lambda value: value, 0.0)
        total = (loss.loss_T * batch.extra_T["weight"]).sum()
        if loss.weighted is not None:
            total = total + loss.weighted
        total.backward()

    return run


def bare_arithmetic(name: str, batch: Batch, logp_T: Tensor) -> tuple[Tensor, Tensor]:
    """Return weighted loss and gradient computed by hand, without autograd or metrics, ignoring masked entries: the least work."""
    advantage, weight, masked = batch.extra_T["advantage"], batch.extra_T["weight"], ~batch.mask_T
    d = (logp_T - batch.extra_T["old_logp"]).masked_fill_(masked, 0.0)
    if name in ("gspo", "gmpo"):
        if name == "gmpo":
            d = torch.where(advantage > 0, d.clamp(max=0.4), d.clamp(min=-0.4))
        mean = torch.zeros(len(batch.length_N)).index_add(0, batch.seq_T, d) / batch.count_N
        ratio = mean.exp().index_select(0, batch.seq_T)
    else:
        ratio = d.exp()
    if name in ("rloo", "cispo"):
        grad = -(ratio.clamp(0, 5) if name == "cispo" else ratio) * advantage
        loss = grad * logp_T
    else:
        free, bound = -ratio * advantage, -ratio.clamp(0.8, 1.2) * advantage
        loss, grad = torch.maximum(free, bound), torch.where(bound > free, 0.0, free)
    total, grad = (loss.masked_fill_(masked, 0.0) * weight).sum(), grad.masked_fill_(masked, 0.0) * weight
    if name == "vapo":
        positive = batch.extra_T["positive_weight"].masked_fill(masked, 0.0)
        return total - (logp_T.masked_fill(masked, 0.0) * positive).sum(), grad - positive
    return total, grad


# --- log-probs and entropy


def measure_logprobs(dtype: str, peers: bool) -> list[Row]:
    """Measure forward and backward of [8192, 32000] logits: our memory beyond the gradient, and both sides' times."""
    target_R, weight_R = torch.randint(0, VOCABULARY, (ROWS,)), torch.randn(ROWS)
    what = f"log-prob and entropy, {dtype}"
    logits = some_logits(dtype).requires_grad_()
    gradient, copy = logits.numel() * logits.element_size(), logits.numel() * 4
    runs: dict[str, Run] = {"ours": functools.partial(logprob_run, logits, target_R, weight_R, False)}
    if peers:
        runs["peer"] = functools.partial(peer_run, logits, target_R, weight_R)
    median = side_by_side(runs, repeats=3)
    ours = peak_extra(runs["ours"])
    rows = [
        Row(what, _s(median["ours"]), "", median["ours"], None, unit=" s"),
        Row(what, _mb(ours - gradient), f"copies of {_mb(copy)}, beyond the gradient", (ours - gradient) / copy, 0.1),
    ]
    if not peers:
        return rows
    theirs = peak_extra(runs["peer"])
    product = logits * 1.0  # the result of an operation, as a model's logits are
    overwriting = peak_extra(functools.partial(logprob_run, product, target_R, weight_R, True))
    bounds = (0.5, 0.2) if dtype == "float32" else (1.0, None)
    peak = f"{PEER}: {_mb(theirs)}"
    return [
        *rows,
        Row(what, _s(median["ours"]), f"{PEER}: {_s(median['peer'])}", median["ours"] / median["peer"], bounds[0]),
        Row(what, _mb(ours - gradient), f"{peak}, both less the gradient", (ours - gradient) / (theirs - gradient), bounds[1]),
        Row(what, _mb(overwriting), f"{peak}, gradient over the logits", overwriting / theirs, bounds[1]),
        Row(what, _mb(ours), f"{peak}, gradient included", ours / theirs, None),
    ]


def some_logits(dtype: str) -> Tensor:
    return torch.randn(ROWS, VOCABULARY).mul_(2).to(getattr(torch, dtype))


def logprob_run(logits: Tensor, target_R: Tensor, weight_R: Tensor, overwrite: bool) -> None:
    from megarl.parallel.logprobs import logprob_entropy

    lp_R, entropy_R = logprob_entropy(logits, torch.arange(len(target_R)), target_R, overwrite=overwrite)
    _backward(lp_R, entropy_R, weight_R, logits)


def peer_run(logits: Tensor, target_R: Tensor, weight_R: Tensor) -> None:
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    _backward(selective_log_softmax(logits, target_R), entropy_from_logits(logits), weight_R, logits)


def _backward(lp_R: Tensor, entropy_R: Tensor, weight_R: Tensor, logits: Tensor) -> None:
    torch.autograd.grad(((lp_R + 0.01 * entropy_R) * weight_R).sum(), logits)


# --- balancing


def measure_balance() -> list[Row]:
    """Measure splitting 8,192 sequences of up to 32,768 tokens into 64 micro-batches, and packing them."""
    from megarl.batch import Sample, balance, bins_needed, pack

    random = np.random.default_rng(0)
    kinds = {
        "uniform": random.integers(1, 32769, 8192).tolist(),
        "heavy-tailed": np.minimum(32768, random.pareto(1.2, 8192) * 400 + 16).astype(int).tolist(),
    }
    rows = []
    for kind, lengths in kinds.items():
        bins = balance(lengths, 64)
        loads = [sum(lengths[n] for n in members) for members in bins]
        seconds = side_by_side({"balance": lambda n=lengths: balance(n, 64), "bins": lambda n=lengths: bins_needed(n, 40_000)}, 11)  # type: ignore[misc]
        rows += [
            Row(f"balance, {kind}", _ms(seconds["balance"]), "64 bins of 8,192 sequences", 1e3 * seconds["balance"], 10.0, unit=" ms"),
            Row(f"balance, {kind}", "", "max / mean", max(loads) * 64 / sum(loads), 1.0002, unit=""),
            Row(f"bins_needed, {kind}", _ms(seconds["bins"]), "capacity 40,000", 1e3 * seconds["bins"], None, unit=" ms"),
        ]
    tokens = [np.zeros(length + 1, np.int32) for length in kinds["heavy-tailed"]]
    samples = [Sample(one, 1, np.zeros(len(one) - 1, np.float32), "stop") for one in tokens]
    seconds = side_by_side({"pack": lambda: pack(samples)}, 5)
    total = sum(map(len, tokens))
    return [
        *rows,
        Row(
            "pack", _ms(seconds["pack"]), f"8,192 samples, {total / 1e6:.1f}M tokens", 1e9 * seconds["pack"] / total, None, unit=" ns/token"
        ),
    ]


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"


def _s(seconds: float) -> str:
    return f"{seconds:.2f} s"


def _mb(size: float) -> str:
    return f"{size / 2**20:.0f} MB"


# --- the whole run


def measurements(peers: bool) -> dict[str, Callable[[], list[Row]]]:
    return {
        "gae": measure_gae,
        **{f"policy-{name}": functools.partial(measure_policy, name) for name in ALGORITHMS},
        **{f"{MEMORY}{name}": functools.partial(measure_policy_memory, name) for name in ALGORITHMS},
        **{f"logprobs-{dtype}": functools.partial(measure_logprobs, dtype, peers) for dtype in ("float32", "bfloat16")},
        "balance": measure_balance,
    }


def install_peers(directory: str) -> str:
    """Create a virtual environment that also sees this one's packages, install the peer, and return the environment's Python."""
    subprocess.run([sys.executable, "-m", "venv", directory], check=True)
    [site] = Path(directory).glob("lib/python*/site-packages")
    (site / "below.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    python = str(Path(directory) / "bin/python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", PEER], check=True, stderr=subprocess.DEVNULL)
    return python


def in_fresh_process(python: str, name: str, peers: bool) -> list[Row]:
    command = [python, __file__, "--measure", name, *(["--peers"] if peers else [])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if name.startswith(MEMORY):
        environment["MALLOC_MMAP_THRESHOLD_"] = "65536"
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return [Row(*row) for row in json.loads(done.stdout.splitlines()[-1])]


def show(rows: list[Row]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("measured", "ours", "against", "figure", "bound", "", title="medians, side by side, one thread")
    mark = {True: "[green]holds", False: "[red]MISSED", None: ""}
    for row in rows:
        bound = "" if row.bound is None else f"{'≥' if row.at_least else '≤'} {row.bound:g}{row.unit}"
        table.add_row(
            row.what,
            row.ours,
            row.against,
            f"{row.figure:.4g}{row.unit}" if row.bound != 1.0002 else f"{row.figure:.5f}",
            bound,
            mark[row.holds],
        )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", action="store_true", help=f"install {PEER} into a throw-away environment and measure it too")
    parser.add_argument("--only", nargs="*", help="measurements to make", choices=list(measurements(False)))
    parser.add_argument("--measure", help=argparse.SUPPRESS)  # this process makes one measurement and prints it
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.measure:
        torch.manual_seed(0)
        print(json.dumps(measurements(args.peers)[args.measure]()))
        return
    with tempfile.TemporaryDirectory() as directory:
        peers = install_peers(directory) if args.peers else sys.executable
        rows = []
        for name in args.only or measurements(False):
            python = peers if name.startswith("logprobs") else sys.executable
            rows += in_fresh_process(python, name, args.peers and name.startswith("logprobs"))
    show(rows)


if __name__ == "__main__":
    main()

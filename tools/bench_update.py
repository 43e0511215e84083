"""Compare an update of a mixture of experts with transformers': `python -m tools.bench_update [--rounds 5]`.

A Qwen3-MoE of 60 million parameters in float32, eight sequences of 512 random tokens, the mean of their negative log-probs: forward,
backward, and a clipped AdamW step. Each side has a process of its own with two threads; they take turns, one step each. The table shows
medians of the rounds in tokens per second. Exit status: 1 if megarl is less than 1.3 times as fast, with or without the optimizer.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]
SEQUENCES, LENGTH = 8, 512
THREADS = 2
LR, WEIGHT_DECAY, CLIP = 1e-5, 0.01, 1.0
WANTED = 1.3  # least speed-up over transformers
Step = Callable[[], tuple[float, float]]  # makes one step; returns seconds of forward and backward, and of the optimizer


def megarl(path: Path) -> Step:
    """Return a step of one rank's model, as a policy makes it."""
    from megarl.config import OptimizerSettings
    from tools.lone_policy import lone_policy, responses

    policy, _, loss = lone_policy(path, OptimizerSettings(lr=LR, weight_decay=WEIGHT_DECAY, clip_grad=CLIP))
    batches = [responses(SEQUENCES, LENGTH, policy.description.vocab)]
    trainable, spent = policy._trainable, [0.0]
    assert trainable is not None
    plain = trainable.step

    def timed() -> object:
        begun = time.perf_counter()
        info = plain()
        spent[0] = time.perf_counter() - begun
        return info

    trainable.step = timed

    def step() -> tuple[float, float]:
        begun = time.perf_counter()
        policy.step(batches, loss)
        return time.perf_counter() - begun - spent[0], spent[0]

    return step


def transformers(path: Path) -> Step:
    """Return a step of AutoModelForCausalLM with torch's fused AdamW."""
    import torch
    from transformers import AutoModelForCausalLM

    from tools.lone_policy import responses

    policy = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True)
    batch = responses(SEQUENCES, LENGTH, policy.config.vocab_size)
    input_NL, target_NL = batch.input_T.view(SEQUENCES, LENGTH), batch.target_T.view(SEQUENCES, LENGTH)

    def step() -> tuple[float, float]:
        begun = time.perf_counter()
        optimizer.zero_grad()
        logits_NLV = policy(input_NL).logits
        torch.nn.functional.cross_entropy(logits_NLV.flatten(0, 1), target_NL.flatten()).backward()
        learned = time.perf_counter()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), CLIP)
        optimizer.step()
        return learned - begun, time.perf_counter() - learned

    return step


SIDES: dict[str, Callable[[Path], Step]] = {"megarl": megarl, "transformers": transformers}


def serve(side: str, path: Path) -> None:
    """Make a step for each line of standard input, and print its seconds as a line of standard output."""
    import torch

    torch.set_num_threads(THREADS)
    step = SIDES[side](path)
    for _ in sys.stdin:
        print("step", *step(), flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--side", nargs=2, help=argparse.SUPPRESS)  # this process is one side
    given = parser.parse_args()
    if given.side:
        serve(given.side[0], Path(given.side[1]))
        return 0

    from tools.make_tiny_model import build

    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "model"
        parameters = build(path, layers=4, hidden=512, experts=16, expert_hidden=576, seed=1)
        command = [sys.executable, "-m", "tools.bench_update", "--side"]
        variables = {**os.environ, "OMP_NUM_THREADS": str(THREADS)}
        processes = {}
        for side in SIDES:
            with (path.parent / side).open("w") as log:
                processes[side] = subprocess.Popen(
                    [*command, side, str(path)],
                    cwd=ROOT,
                    env=variables,
                    text=True,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                )

        def ask(side: str) -> tuple[float, float]:
            process = processes[side]
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            for line in process.stdout:
                if line.startswith("step "):
                    learned, stepped = map(float, line.split()[1:])
                    return learned, stepped
            raise RuntimeError(f"{side}: {(path.parent / side).read_text()[-3000:]}")

        try:
            for side in [*SIDES, *SIDES]:
                ask(side)  # warm-up: the first steps allocate
            results = [{side: ask(side) for side in (list(SIDES) if turn % 2 else list(SIDES)[::-1])} for turn in range(given.rounds)]
        finally:
            for process in processes.values():
                process.kill()
                process.wait()
    tokens, missed = SEQUENCES * LENGTH, False
    print(f"{parameters:,} parameters, {tokens} tokens, {THREADS} threads; medians of {given.rounds} rounds, tokens a second\n")
    print("| | megarl | transformers | times as fast (spread) |\n|---|---|---|---|")
    for label, seconds in (("forward and backward", lambda pair: pair[0]), ("with the optimizer's step", sum)):
        ours, theirs = ([seconds(one[side]) for one in results] for side in SIDES)
        ratios = [their / our for our, their in zip(ours, theirs, strict=True)]
        ratio = statistics.median(ratios)
        missed |= ratio < WANTED
        rates = " | ".join(f"{tokens / statistics.median(side):.0f}" for side in (ours, theirs))
        print(f"| {label} | {rates} | {ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |")
    print(f"\nat least {WANTED:g} is wanted: {'MISSED' if missed else 'kept'}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())

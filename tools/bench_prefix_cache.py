"""Measure what an engine saves whose conversations stay at their cache: `python -m tools.bench_prefix_cache [--starts 8]`.

Two data-parallel ranks, as two engines and as one, play the same episodes of 20 turns on a tiny mixture of experts in float32 on CPUs. A
tool answers each turn after a seeded, log-normal delay. Each row is a `rollout.request_routing`, the first without a prefix cache. The
tokens of all rows must be the same, their log-probs equal to 1e-5. Exit status: 1 if they are not, or if affinity saves less than 70 % of
the prompt tokens' computation.
"""

import argparse
import asyncio
import json
import os
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from megarl.batch import Sample
from megarl.config import RolloutSettings
from megarl.data.tokenizer import decode, load_tokenizer
from megarl.data.turns import TurnTokens
from megarl.engines.engine import Engine, Setup
from megarl.engines.episodes import Limits, Played, Start, play
from megarl.engines.generate import Sampling
from megarl.engines.responder import Responder
from megarl.engines.vllm.launch import environment
from megarl.environments.protocol import Turn
from tests.engines.gathered import GatheredEngine
from tools.make_tiny_model import build

TIMEOUT_S = 400.0
BOUND = 0.70  # least share of the prompt tokens that affinity takes from the cache
CLOSE = 1e-5  # largest difference of log-probs
TURNS, TURN_TOKENS, OBSERVED = 20, 16, 48  # of an episode; of a turn of the policy; characters of a tool's answer, a token each
MEDIAN_S, SPREAD = 0.05, 1.0  # of a tool's log-normal delay
SAMPLES = 2  # episodes of each start


class Tool:
    """An episode whose environment answers each turn after a delay that its seed says."""

    async def reset(self, seed: int, task: dict[str, Any] | None) -> Turn:
        self._random = random.Random(seed)
        return Turn([{"role": "user", "content": f"begin {seed}"}])

    async def step(self, text: str, tokens: Sequence[int], finished: bool) -> Turn:
        await asyncio.sleep(MEDIAN_S * self._random.lognormvariate(0, SPREAD))
        return Turn([{"role": "user", "content": "".join(self._random.choices("abcdefghij ", k=OBSERVED))}])

    async def close(self) -> None:
        """Nothing to end."""


class Tools:
    """A host of such episodes in this process."""

    def open(self) -> Tool:
        return Tool()

    def close(self) -> None:
        """Nothing to end."""


class Trace(NamedTuple):
    """What the engines have played."""

    played: list[Played]
    seconds: float

    @property
    def hits(self) -> float:
        """The share of all prompts' tokens that were cached."""
        return sum(one.prefill.cached for one in self.played) / sum(one.prefill.tokens for one in self.played)

    @property
    def recomputed(self) -> float:
        """The tokens that were computed again, a turn."""
        return sum(one.prefill.again for one in self.played) / sum(one.turns for one in self.played)


def settings(turns: int, dp: int = 1, *, cached: bool = True) -> RolloutSettings:
    """Return the settings of an engine for episodes of so many turns."""
    return RolloutSettings.model_validate(
        {
            "max_prompt_tokens": 32,
            "max_response_tokens": turns * (TURN_TOKENS + OBSERVED + 8),
            "kv_cache_mb": 256,
            "timeout_s": TIMEOUT_S,
            "dp": dp,
            "expert_parallel": dp > 1,
            "engine": {"args": {"block_size": 32, **({} if cached else {"enable_prefix_caching": False})}},
        }
    )


async def episodes(engine: Engine, model: Path, starts: Sequence[Start], turns: int) -> list[list[Played]]:
    """Play the episodes of so many turns on an engine that has `settings`."""
    tokenizer, longest = load_tokenizer(model), settings(turns).max_response_tokens

    def text_of(turn: Sample) -> str:
        return decode(tokenizer, turn.tokens[turn.prompt_length :].tolist(), finished=turn.finish_reason == "stop")

    limits, sampling = Limits(32, longest, turns, TURN_TOKENS), Sampling(n=SAMPLES, temperature=1.0, max_tokens=longest, seed=3)
    return await play(Responder(engine, TIMEOUT_S), Tools(), TurnTokens(tokenizer), text_of, starts, sampling, limits, TIMEOUT_S)


async def trace(model: Path, starts: int, *, engines: int, dp: int, affinity: bool, cached: bool = True) -> Trace:
    """Play the episodes of so many starts, spread over so many engines, each of `dp` data-parallel ranks."""
    running, given = list[GatheredEngine](), [Start(number, [], seed=100 + number) for number in range(starts)]
    setup = Setup(model, "float32", settings(TURNS, dp, cached=cached), 1, gpu=False, report_experts=True, affinity=affinity)
    try:
        for number in range(engines):
            engine = GatheredEngine(f"engine {number}")
            await engine.start(setup)
            running.append(engine)
        begun = time.monotonic()
        played = await asyncio.gather(*(episodes(engine, model, given[number::engines], TURNS) for number, engine in enumerate(running)))
        seconds = time.monotonic() - begun
    finally:
        for engine in running:
            await engine.close()
    of_start = {start.seed: group for number in range(engines) for start, group in zip(given[number::engines], played[number], strict=True)}
    return Trace([one for start in given for one in of_start[start.seed]], seconds)


def long_model(path: Path) -> None:
    """Build a tiny mixture of experts for texts of 4,096 tokens."""
    build(path, layers=2, hidden=128, experts=8, expert_hidden=64, seed=1)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))


def gap(trace: Trace, other: Trace) -> float:
    """Return the largest difference of log-probs; infinite if tokens or routed experts differ."""
    largest = 0.0
    for one, same in zip(trace.played, other.played, strict=True):
        for name in ("tokens", "loss_mask", "routed_experts"):
            if not np.array_equal(getattr(one.sample, name), getattr(same.sample, name)):
                return float("inf")
        largest = max(largest, float(np.abs(one.sample.rollout_logp - same.sample.rollout_logp).max()))
    return largest


def main() -> int:
    options = argparse.ArgumentParser(prog="bench_prefix_cache", description=__doc__)
    options.add_argument("--starts", type=int, default=8)
    starts, missed = options.parse_args().starts, False
    torch.set_num_threads(1)  # an engine is forked, which does not copy threads
    os.environ.update(environment(gpu=False))
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        model = Path(folder) / "model"
        long_model(model)
        uncached = runner.run(trace(model, starts, engines=2, dp=1, affinity=False, cached=False))
        tokens = sum(one.prefill.tokens for one in uncached.played)
        print(f"{len(uncached.played)} episodes of {TURNS} turns, {tokens:,} prompt tokens; without a cache {uncached.seconds:.1f} s")
        titles = ("engines", "request_routing", "from the cache", "computed again, a turn", "largest log-prob gap", "seconds")
        print(f"| {' | '.join(titles)} |\n{'|---' * len(titles)}|")
        for engines, dp in ((2, 1), (1, 2)):
            for affinity in (False, True):
                result = runner.run(trace(model, starts, engines=engines, dp=dp, affinity=affinity))
                apart = gap(result, uncached)
                missed |= apart > CLOSE or (affinity and result.hits < BOUND)
                name = "affinity" if affinity else "deterministic"
                print(
                    f"| {engines} of dp={dp} | {name} | {result.hits:.1%} | {result.recomputed:.1f} | {apart:.1e} | {result.seconds:.1f} |",
                    flush=True,
                )
    print(f"bounds: {BOUND:.0%} with affinity, log-probs within {CLOSE:g}: {'MISSED' if missed else 'kept'}")
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(main())

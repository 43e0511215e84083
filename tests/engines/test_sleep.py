"""An engine that leaves the device to others: its memory is free, and what it says afterwards is what it would have said, bit for bit."""

from pathlib import Path
from typing import Any

import psutil
import pytest

from megarl.config import RolloutSettings
from megarl.engines.engine import RolloutError, Setup
from megarl.engines.generate import Generated, Sampling
from megarl.sync.fingerprint import compare
from tests.engines.engine_host import Host
from tests.engines.gathered import GatheredEngine
from tests.engines.test_updates import _check_update
from tests.engines.transformers_reference import PROMPTS, TIMEOUT_S, Trainer, checkpoint, generate, other_weights
from tests.rows import rows
from tools.make_tiny_model import build

CACHE_MB = 256
SAMPLING = Sampling(n=4, temperature=1.0, max_tokens=24, seed=3)


def bits(generated: list[Generated]) -> list[bytes]:
    return [sample.tokens.tobytes() + sample.rollout_logp.tobytes() for answer in generated for sample in answer.samples]


def memory_mb(pids: list[int]) -> float:
    """What processes hold that no file backs."""
    return sum(psutil.Process(pid).memory_info().rss - psutil.Process(pid).memory_info().shared for pid in pids) / 2**20


async def _sleeps(model: Path, weights_mb: float, dp: int) -> None:
    sizes: dict[str, Any] = {"max_prompt_tokens": 32, "max_response_tokens": 24, "kv_cache_mb": CACHE_MB // dp}
    settings = RolloutSettings(**sizes, timeout_s=TIMEOUT_S, dp=dp, expert_parallel=dp > 1)
    engine = GatheredEngine("engine 0")
    pids = await engine.start(Setup(model, "float32", settings, 1, gpu=False, sleeps=True))
    trainer = Trainer(engine, "shm", dp)
    try:
        first, held = bits(await generate(engine, PROMPTS, SAMPLING)), await engine.fingerprints(TIMEOUT_S)
        for keep_weights in (True, False, False):
            awake_mb = memory_mb(pids)
            await engine.sleep(TIMEOUT_S, keep_weights=keep_weights)
            assert awake_mb - memory_mb(pids) >= CACHE_MB + 0.8 * weights_mb
            with pytest.raises(RolloutError, match=r"^engine 0: asleep \(kv_cache, weights\): it takes no requests$"):
                await generate(engine, PROMPTS, SAMPLING)
            with pytest.raises(RolloutError, match="^engine 0: asleep: new weights come into an engine whose weights are awake$"):
                await engine.start_update(TIMEOUT_S)
            await engine.wake("weights", TIMEOUT_S)
            if keep_weights:
                assert await engine.fingerprints(TIMEOUT_S) == held
            else:
                other = other_weights(model, 5)
                assert compare(await trainer.update(checkpoint(other)), await engine.fingerprints(TIMEOUT_S)) == []
            with pytest.raises(RolloutError, match=r"^engine 0: asleep \(kv_cache\)"):
                await generate(engine, PROMPTS, SAMPLING)
            await engine.wake("kv_cache", TIMEOUT_S)
            if keep_weights:
                assert bits(await generate(engine, PROMPTS, SAMPLING)) == first
            else:
                await _check_update(engine, trainer, other)
        await trainer.begin(checkpoint(other)[: len(checkpoint(other)) // 2])  # and the ranks fail
        await engine.sleep(TIMEOUT_S, keep_weights=False)
        await engine.wake("weights", TIMEOUT_S)
        await engine.wake("kv_cache", TIMEOUT_S)
        await _check_update(engine, trainer, other_weights(model, 6))
        await engine.sleep(TIMEOUT_S, keep_weights=False)
        await engine.wake("weights", TIMEOUT_S)
        await engine.wake("kv_cache", TIMEOUT_S)
        with pytest.raises(RolloutError, match="^engine 0: has no weights before the next update$"):
            await generate(engine, PROMPTS, SAMPLING)
    finally:
        await engine.close()


@pytest.mark.parametrize("dp", rows([1, 2], []))
def test_memory_is_free_while_it_sleeps_and_nothing_else_changes(host: Host, tmp_path: Path, dp: int) -> None:
    build(tmp_path, layers=2, hidden=256, experts=8, expert_hidden=512, seed=1)
    host.run(_sleeps, tmp_path, (tmp_path / "model.safetensors").stat().st_size / 2**20, dp)

"""New weights for an engine at work: each token is wholly of the weights that its sample says, with its log-prob and its experts."""

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megarl.batch import Sample, VersionSpan
from megarl.config import TrainRolloutSettings
from megarl.engines.engine import Request, Setup
from megarl.engines.responder import Responder
from tests.engines.engine_host import Host
from tests.engines.gathered import GatheredEngine
from tests.engines.test_families import DEEP, HYBRID, stored
from tests.engines.test_families import SIZES as FAMILY
from tests.engines.transformers_reference import TIMEOUT_S, Trainer, checkpoint, logp, other_weights
from tests.rows import rows
from tools.check_logits import transformers_model
from tools.make_tiny_model import build

Tensors = list[tuple[str, Tensor]]
SIZES: dict[str, Any] = {"max_prompt_tokens": 32, "max_response_tokens": 160, "max_num_seqs": 8, "kv_cache_mb": 64, "timeout_s": TIMEOUT_S}
SETTINGS = TrainRolloutSettings(mode="free", max_lag=1, **SIZES)


async def _until(there: Callable[[], bool]) -> None:
    async with asyncio.timeout(TIMEOUT_S):
        while not there():
            await asyncio.sleep(0)


def _drawn(tiny: Path, version: int) -> Tensors:
    return checkpoint(other_weights(tiny, version))


def _saved(path: Path, version: int) -> Tensors:
    return stored(path / str(version))


async def _updated(tiny: Path, dp: int, weights: Callable[[int], Tensors]) -> list[Sample]:
    """24 responses, of which 8 at most are under way when the second weights come, and 4 that are asked for when the update is about to
    begin."""
    engine = GatheredEngine("engine 0")
    settings = SETTINGS.model_copy(update={"dp": dp, "max_num_seqs": SETTINGS.max_num_seqs // dp, "expert_parallel": dp > 1})
    await engine.start(Setup(tiny, "float32", settings, 1, gpu=False, report_experts=True))
    trainer, responder = Trainer(engine, "shm", dp), Responder(engine, TIMEOUT_S)

    def requests(numbers: range) -> list[Request]:
        return [Request(number, [5 + number % 8, 40, 77], 160, 0.9, 1000 + number) for number in numbers]

    try:
        await trainer.update(weights(1))
        first = asyncio.create_task(responder.all(requests(range(24)), TIMEOUT_S))
        counts = list[int]()
        while sum(count >= 12 for count in counts) < 8:
            counts = [count for core in await engine._on_cores("megarl_counts") for count in core.values()]
        async with engine._lock:  # for which both wait, the update first
            update = asyncio.create_task(trainer.update(weights(2)))
            await _until(lambda: len(engine._lock._waiters or ()) == 1)
            late = asyncio.create_task(responder.all(requests(range(24, 28)), TIMEOUT_S))
            await _until(lambda: len(engine._lock._waiters or ()) == 2)
        _, between, before = await asyncio.gather(update, late, first)
        return [*before, *between]
    finally:
        trainer.close()
        await engine.close()


@pytest.mark.parametrize("dp", rows([1, 2], [1]))
def test_tokens_before_and_after_an_update_are_those_of_their_own_weights(host: Host, tiny: Path, dp: int) -> None:
    samples: list[Sample] = host.run(_updated, tiny, dp, partial(_drawn, tiny))
    models = {version: other_weights(tiny, version) for version in (1, 2)}
    logits: list[torch.Tensor] = []
    for model in models.values():
        for layer in model.model.layers:
            layer.mlp.gate.register_forward_hook(lambda gate, given, _: logits.append(given[0] @ gate.weight.T))
    mixed = 0
    for sample in samples:
        ends = [*(span.start for span in sample.weight_versions[1:]), sample.response_length]
        for span, end in zip(sample.weight_versions, ends, strict=True):
            logits.clear()
            expected = logp(models[span.version], sample.tokens.tolist(), sample.prompt_length, 0.9).numpy()
            assert np.abs(sample.rollout_logp - expected)[span.start : end].max() < 1e-5
            chosen = torch.stack([layer.reshape(-1, 8)[:-1].topk(2).indices for layer in logits], 1).numpy()
            rows = slice(0 if span.start == 0 else sample.prompt_length + span.start - 1, sample.prompt_length + end - 1)
            assert sample.routed_experts is not None
            assert np.array_equal(np.sort(chosen[rows]), np.sort(sample.routed_experts[rows])), span
        mixed += len(sample.weight_versions) == 2 and sample.weight_versions[1].start >= 8
    assert mixed >= 4 and {sample.weight_versions for sample in samples[-4:]} == {(VersionSpan(0, 2),)}
    assert sum(sample.weight_versions == (VersionSpan(0, 2),) for sample in samples[:24]) >= 8, "those that had not begun"


@pytest.mark.parametrize("family", rows(HYBRID, ()))
def test_states_before_an_update_are_computed_anew(host: Host, tmp_path: Path, family: str) -> None:
    """Of gated delta nets and Mamba mixers, as keys and values."""
    for version in (0, 1, 2):
        build(tmp_path / str(version), **{**FAMILY, **DEEP.get(family, {})}, seed=version, family=family, initializer_range=0.12)
    samples: list[Sample] = host.run(_updated, tmp_path / "0", 1, partial(_saved, tmp_path))
    models = {version: transformers_model(tmp_path / str(version)).eval() for version in (1, 2)}
    gaps, others, mixed = list[np.ndarray](), list[np.ndarray](), 0
    for sample in samples:
        said = {n: logp(model, sample.tokens.tolist(), sample.prompt_length, 0.9).numpy() for n, model in models.items()}
        ends = [*(span.start for span in sample.weight_versions[1:]), sample.response_length]
        for span, end in zip(sample.weight_versions, ends, strict=True):
            gaps.append(np.abs(sample.rollout_logp - said[span.version])[span.start : end])
            others.append(np.abs(sample.rollout_logp - said[3 - span.version])[span.start : end])
        mixed += len(sample.weight_versions) == 2 and sample.weight_versions[1].start >= 8
    assert np.concatenate(gaps).mean() <= 1e-5 and np.concatenate(gaps).max() <= 1e-3
    assert mixed >= 4 and min(np.median(one) for one in others) > 1e-2

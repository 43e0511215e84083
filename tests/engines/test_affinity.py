"""Conversations on an engine of two data-parallel ranks that keeps its prefix cache: exact, before and after an update of the weights."""

from pathlib import Path

import numpy as np
import pytest

from megarl.engines.engine import Setup
from megarl.engines.episodes import Played, Start
from tests.engines.engine_host import Host
from tests.engines.gathered import GatheredEngine
from tests.engines.transformers_reference import Trainer, checkpoint, logp, other_weights
from tools.bench_prefix_cache import BOUND, CLOSE, TURNS, Trace, episodes, gap, long_model, settings, trace

FEW = 6  # turns
STARTS = [Start(number, [], seed=100 + number) for number in range(3)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("long")
    long_model(path)
    return path


async def _before_and_after(model: Path) -> tuple[list[Played], list[Played]]:
    engine = GatheredEngine("engine 0")
    await engine.start(Setup(model, "float32", settings(FEW, 2), 1, gpu=False, report_experts=True, affinity=True))
    trainer = Trainer(engine, "shm", 2)
    try:
        before = await episodes(engine, model, STARTS, FEW)
        await trainer.update(checkpoint(other_weights(model, 5)))
        after = await episodes(engine, model, STARTS, FEW)
    finally:
        trainer.close()
        await engine.close()
    return [one for group in before for one in group], [one for group in after for one in group]


@pytest.mark.long
def test_what_is_read_from_the_cache_is_what_transformers_computes_from_the_weights_of_the_time(host: Host, model: Path) -> None:
    """The prompts after the update are those before it, so that what the old weights have left would be found."""
    import torch
    from transformers import AutoModelForCausalLM

    old = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    before, after = host.run(_before_and_after, model)
    for weights, played in ((old, before), (other_weights(model, 5), after)):
        for one in played:
            sample = one.sample
            assert (one.turns, one.error, len(sample.starts)) == (FEW, None, 0) and sample.loss_mask is not None
            expected = logp(weights, sample.tokens.tolist(), sample.prompt_length, 1.0).numpy()
            assert np.abs(sample.rollout_logp - expected)[sample.loss_mask].max() < CLOSE
        trace = Trace(played, 0.0)
        assert trace.hits > 0.5, "the conversations are short, and only whole blocks of 32 tokens are cached"
        assert trace.recomputed < 32, "of what an earlier turn has computed, less than a block"


@pytest.mark.long
def test_conversations_of_twenty_turns_are_read_from_the_cache(host: Host, model: Path) -> None:
    uncached = host.run(_traces, model, False)
    found = host.run(_traces, model, True)
    assert uncached.hits == 0 and all(one.turns == TURNS for one in found.played)
    assert found.hits >= BOUND and gap(found, uncached) <= CLOSE


async def _traces(model: Path, cached: bool) -> Trace:
    return await trace(model, 4, engines=2, dp=1, affinity=cached, cached=cached)

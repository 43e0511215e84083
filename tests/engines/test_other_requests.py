"""On a CPU and in float32, what an engine answers to a request does not depend on its other requests, to the bit. So runs repeat."""

from pathlib import Path

import numpy as np
import pytest

from megarl.engines.generate import Generated, Sampling, TokenPrompt
from tests.engines.engine_host import Host
from tests.engines.test_families import DEEP, SIZES, restore_configurations
from tests.engines.test_updates import _start
from tests.engines.transformers_reference import generate, logp
from tests.rows import rows
from tools.check_logits import transformers_model
from tools.make_tiny_model import build

# Routers of every kind, shared experts with and without a gate, experts without one, recurrent layers, sinks, windows.
FAMILIES = [
    *("qwen3", "qwen3_moe", "qwen2_moe", "olmoe", "mixtral", "glm4_moe", "minimax_m2", "ernie4_5_moe", "gpt_oss", "ministral"),
    *("granitemoe", "qwen3_next", "qwen3_5", "qwen3_5_moe", "nemotron_h"),
]
LENGTHS = (1, 2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31)
Answer = tuple[list[int], list[float]]  # all tokens, and the log-probs of the response's


async def _answers(path: Path, family: str) -> tuple[list[Answer], list[Answer]]:
    """Responses sampled with others in the batch, and the same responses, of which each has the engine for itself."""
    restore_configurations()
    build(path, **{**SIZES, **DEEP.get(family, {})}, seed=1, family=family)
    rng = np.random.default_rng(0)
    asked = [TokenPrompt(length, rng.integers(10, 128, length).tolist()) for length in LENGTHS]
    sampling = Sampling(n=1, temperature=1.0, max_tokens=10, seed=3)
    engine = await _start(path)
    try:
        together = await generate(engine, asked, sampling)
        alone = [one for prompt in asked for one in await generate(engine, [prompt], sampling)]
    finally:
        await engine.close()
    return [_answer(one) for one in together], [_answer(one) for one in alone]


def _answer(generated: Generated) -> Answer:
    [sample] = generated.samples
    return sample.tokens.tolist(), sample.rollout_logp.tolist()


@pytest.mark.parametrize("family", rows(FAMILIES, ["qwen3_5_moe"]))
def test_an_answer_does_not_depend_on_other_requests(host: Host, tmp_path: Path, family: str) -> None:
    """Not one to a prompt of a single token either, which finds what others have left in the states of recurrent layers."""
    together, alone = host.run(_answers, tmp_path / "model", family)
    assert together == alone
    model = transformers_model(tmp_path / "model").eval()
    for tokens, answered in together:
        assert logp(model, tokens, len(tokens) - len(answered), 1.0).tolist() == pytest.approx(answered, abs=1e-4)

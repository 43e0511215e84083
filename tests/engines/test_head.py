"""`rollout.fp32_head`: the logits of a bfloat16 engine are those of a float32 head."""

import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl.config import RolloutSettings
from megarl.engines.engine import Setup
from megarl.engines.generate import Generated, Sampling
from megarl.engines.vllm.engine import VllmEngine
from tests.engines.engine_host import Host
from tests.engines.transformers_reference import PROMPTS, TIMEOUT_S, generate

SETTINGS = RolloutSettings(max_prompt_tokens=32, max_response_tokens=32, timeout_s=TIMEOUT_S, kv_cache_mb=64, fp32_head=True)
TEMPERATURE = 0.7


def exact_body(tiny: Path, path: Path) -> tuple[Tensor, Tensor]:
    """A model whose layers add nothing to embeddings of +-1, so that the head's input has no rounding of its own.

    Returns:
        The head's input [V, H] after each token, and its weight [V, H], both in bfloat16.
    """
    shutil.copytree(tiny, path)
    tensors, generator = load_file(path / "model.safetensors"), torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    embedding, head, norm = (tensors[name] for name in ("model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"))
    embedding.copy_(torch.randint(2, embedding.shape, generator=generator) * 2.0 - 1.0)
    for tensor in (head, norm):
        tensor.copy_((0.3 * torch.randn(tensor.shape, generator=generator)).bfloat16())
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return (embedding * norm).bfloat16(), head.bfloat16()


async def answers(path: Path) -> list[Generated]:
    engine = VllmEngine("engine 0")
    await engine.start(Setup(path, "bfloat16", SETTINGS, 1, gpu=False))
    try:
        return await generate(engine, PROMPTS, Sampling(n=4, temperature=TEMPERATURE, max_tokens=24, seed=1))
    finally:
        await engine.close()


def test_log_probs_are_those_of_a_float32_head(host: Host, tiny: Path, tmp_path: Path) -> None:
    """To 1e-5; a head that rounds its output to bfloat16 would be a thousand times as far off."""
    hidden, head = exact_body(tiny, tmp_path / "model")
    exact, rounded = ((logits.float() / TEMPERATURE).log_softmax(-1) for logits in (hidden.float() @ head.float().T, hidden @ head.T))
    gaps: list[list[float]] = [[], []]
    for answer in host.run(answers, tmp_path / "model"):
        for sample in answer.samples:
            fed, said = torch.from_numpy(sample.tokens.astype(np.int64))[sample.prompt_length - 1 :].unfold(0, 2, 1).unbind(1)
            for gap, logp in zip(gaps, (exact, rounded), strict=True):
                gap += (torch.from_numpy(sample.rollout_logp) - logp[fed, said]).abs().tolist()
    assert len(gaps[0]) > 100 and max(gaps[0]) < 1e-5 and max(gaps[1]) > 1e-2

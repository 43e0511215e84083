"""The gradient of every family is transformers', in float64, where inputs are degenerate too.

Degenerate are a token whose embedding is 0, one token over and over, a sequence of one token, one beyond a recurrent layer's chunk.

Axes: T predicted tokens, R rows of local logits, V vocabulary.
"""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl.batch import Batch, Sample, pack
from megarl.config import Layout, ModelSettings
from megarl.models.description import ModelDescription
from megarl.parallel import schedule
from megarl.parallel.backend import choose
from megarl.parallel.build import build_chunks, transformer_config
from megarl.parallel.grid import Grid
from megarl.parallel.logprobs import logprob_entropy
from megarl.parallel.weights import load_hf
from tests.distributed.exported import tensors_of
from tests.distributed.test_export import stored
from tests.distributed.test_family_training import EVERY_EXPERT, MODELS
from tests.distributed.tiny_families import Make
from tests.float64 import in_float64
from tests.rank_pool import Pool
from tests.rows import rows
from tools.check_logits import transformers_model

BOUND = 1e-7  # of an element, in the largest of its tensor
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **MODELS,
    # Every expert takes every token, and every token sees all before it: where inputs are equal, nothing else decides.
    **{name: (name, {**EVERY_EXPERT, "index_topk": 512}) for name in ("deepseek_v32", "glm_moe_dsa")},
    "qwen3_moe": ("qwen3_moe", {"num_experts_per_tok": 8}),
    "mixtral": ("mixtral", {"num_experts_per_tok": 8}),
    "qwen3_5": ("qwen3_5", {}),
    "phi3": ("phi3", {}),
}
ZERO = 0  # the token whose embedding is 0


def degenerate() -> Batch:
    """Sequences with a weight for every token but the first."""
    rng = np.random.default_rng(3)
    tokens = [
        [5, 9],
        [ZERO, 7],
        [ZERO] * 20,
        [11] * 40,
        [5] * 70 + [6] * 70,
        np.where(rng.random(30) < 0.3, ZERO, rng.integers(1, 128, 30)).tolist(),
    ]
    batch = pack([Sample(np.array(row, np.int32), 1, np.zeros(len(row) - 1, np.float32), "stop") for row in tokens])
    return batch.with_extra(weight=torch.from_numpy(rng.normal(size=len(batch))) / len(batch))


def gradients(grid: Grid, path: Path, batch: Batch) -> dict[str, Tensor]:
    """Of the weighted sum of the log-probs, by Hugging Face's name: exported as weights are."""
    with in_float64():
        model, settings = ModelDescription.read(path), ModelSettings(path=path, dtype="float32")
        config = transformer_config(model, settings, grid.layout, choose())
        config.params_dtype = config.pipeline_dtype = torch.get_default_dtype()
        chunks = build_chunks(config, model, choose(), grad=True)
        load_hf(chunks, model, grid)

        def loss_fn(logits_RV: Tensor, row_T: Tensor, batch: Batch) -> tuple[Tensor, None]:
            logp_T, _ = logprob_entropy(logits_RV, row_T, batch.target_T, 1.0, grid.groups.tp, model.vocab)
            return (batch.extra_T["weight"] * logp_T).sum(), None

        schedule.run(chunks, [batch], loss_fn, grid, forward_only=False)
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.data.copy_(torch.zeros(()) if parameter.grad is None else parameter.grad)
        return tensors_of(chunks, model, grid, torch.float64)


def theirs(path: Path, batch: Batch, saved: Path) -> dict[str, Tensor]:
    """transformers', of which an embedding for padding has a gradient as well, as transformers saves weights."""
    with in_float64():
        model = transformers_model(path, "float64", experts_implementation="eager").eval()
        model.get_input_embeddings().padding_idx = None
        for n in range(len(batch.length_N)):
            own = batch.seq_T == n
            logp_TV = model(batch.input_T[None, own], use_cache=False).logits[0].log_softmax(-1)
            (batch.extra_T["weight"][own] * logp_TV.gather(1, batch.target_T[own, None])[:, 0]).sum().backward()
        for parameter in model.parameters():
            parameter.data.copy_(torch.zeros(()) if parameter.grad is None else parameter.grad)
        model.save_pretrained(saved)
    return {name: gradient for name, gradient in stored(saved).items() if not name.endswith("correction_bias")}


@pytest.mark.parametrize("name", rows(CASES, ["qwen3_5_moe"]))
def test_gradients_of_degenerate_inputs_are_those_of_transformers(pool: Pool, make: Make, tmp_path: Path, name: str) -> None:
    variant, changes = CASES[name]
    path = shutil.copytree(make(variant, vocab_size=128, **changes), tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    [embedding] = [key for key in tensors if key.endswith(("embed_tokens.weight", "embeddings.weight"))]
    tensors[embedding][ZERO] = 0
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    batch = degenerate()
    [ours], expected = pool.run(gradients, Layout(), path, batch), theirs(path, batch, tmp_path / "saved")
    gaps = {}
    for key, gradient in expected.items():
        largest = float(gradient.abs().max())
        assert ours[key].dtype == gradient.dtype == torch.float64
        if ".indexer." in key:  # chooses: no gradient passes it
            assert largest == float(ours[key].abs().max()) == 0
            continue
        assert largest > 0, key
        gaps[key] = float((ours[key] - gradient).abs().max()) / largest
    assert {key: gap for key, gap in gaps.items() if gap > BOUND} == {}

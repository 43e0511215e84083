"""Part 5: two layers of Qwen3-30B-A3B in the shapes of a rank (expert parallel 8, half the vocabulary), in training, against the plan."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

from megarl.config import Layout, ModelSettings
from megarl.plan.ranks import PlannedModel, Work, plan_group
from tests.gpu.process import Run

SHARD: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 75_968,
    "hidden_size": 2_048,
    "intermediate_size": 6_144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 16,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 40_960,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "rope_parameters": {"rope_theta": 1_000_000.0, "rope_type": "default"},
}
SMALL = {
    "vocab_size": 256,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
TOKENS = 16_384
STATES, PEAK = 0.05, (0.95, 1.3)  # error of what stays; the peak over the plan, whose working set is that of Transformer Engine's layers


def train(grid: Any, hf: dict[str, Any], settings: ModelSettings, tokens: int) -> dict[str, Any]:
    """Two updates on one sequence of so many tokens: bytes that stay, of a GPU the peak of the second, and its seconds."""
    import numpy as np
    import torch

    from megarl.batch import Sample, pack
    from megarl.config import OptimizerSettings
    from megarl.parallel import schedule
    from megarl.parallel.backend import choose
    from megarl.parallel.build import build_chunks, transformer_config
    from megarl.parallel.logprobs import logprob_entropy
    from megarl.parallel.optimizer import make_trainable

    backend = choose()
    gpu = backend.device.type == "cuda"
    gc.collect()  # of another run's model
    before = torch.cuda.memory_allocated() if gpu else 0
    chunks = build_chunks(transformer_config(hf, settings, grid.layout, backend), hf, backend, grad=True)
    for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
        parameter.data.normal_(std=0.02)
    policy = make_trainable(chunks, OptimizerSettings(lr=1e-4), total_steps=10)
    numbers = np.random.default_rng(1).integers(0, hf["vocab_size"], tokens + 1).astype(np.int32)
    batch = pack([Sample(numbers, 1, np.zeros(tokens, np.float32), "stop")])

    def loss_fn(logits_RV: Any, row_T: Any, batch: Any) -> tuple[Any, float]:
        lp_T, _ = logprob_entropy(logits_RV, row_T, batch.target_T, 1.0, None, hf["vocab_size"], overwrite=True)
        return -lp_T.mean(), float(lp_T.detach().mean())

    losses, seconds = [], 0.0
    for _ in range(2):
        if gpu:
            torch.cuda.reset_peak_memory_stats()
        begun = time.perf_counter()
        policy.zero_grad()
        losses += schedule.run(policy.chunks, [batch], loss_fn, grid, forward_only=False)
        assert not policy.step().skipped
        backend.synchronize()
        seconds = time.perf_counter() - begun
    tensors = [*(tensor for chunk in chunks for tensor in (*chunk.parameters(), *chunk.buffers())), *policy.gradients(), *policy.state()]
    storages = {storage._cdata: storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)}
    peak = torch.cuda.max_memory_allocated() - before if gpu else None
    return {"states": sum(storages.values()), "peak": peak, "seconds": seconds, "log-prob": losses, "fused": backend.fused}


def check(there: Run, *, small: bool = False) -> dict[str, Any]:
    """Trains on the device. Returns figures; AssertionError where they are not what is planned, or nothing is learned."""
    hf, tokens = {**SHARD, **(SMALL if small else {})}, 64 if small else TOKENS
    figures = {}
    for recompute in ("none", "full"):
        settings = ModelSettings(path=Path("shard"), dtype="bfloat16", recompute=recompute)
        found = there(train, hf, settings, tokens)
        role = PlannedModel("policy", hf, trained=True, value=False, micro_batch_tokens=tokens)
        [stage] = plan_group([role], Layout(), settings, Work(tokens, 1, 0, gpu=found["fused"])).stages
        parts = {name: size for name, size in stage.parts.items() if name != "context"}
        states = sum(parts[name] for name in ("weights", "gradients", "optimizer"))
        assert abs(found["states"] / states - 1) < STATES, (found, parts)
        assert found["log-prob"][1] > found["log-prob"][0], "two steps on one sequence"
        told = {"planned GB": sum(parts.values()) / 1e9, "seconds": found["seconds"]}
        if found["peak"] is not None:
            assert PEAK[0] < found["peak"] / sum(parts.values()) < PEAK[1], (found, parts)
            told["peak GB"] = found["peak"] / 1e9
        figures[f"recompute {recompute}"] = told
    return figures

"""Part shards: two layers of Qwen3-30B-A3B train in the shapes of a rank (expert parallel 8, half the vocabulary); against the plan."""

import gc
import time
from pathlib import Path
from typing import Any

from megarl.config import Layout, ModelSettings, OptimizerSettings
from megarl.models.description import ModelDescription
from megarl.models.registry import completed
from megarl.plan.facts import facts
from megarl.plan.forward import forward_flops
from megarl.plan.parameters import model_elements
from megarl.plan.ranks import PlannedModel, Work, plan_group
from tests.gpu.process import Run
from tests.gpu.report import Report

SHARD: dict[str, Any] = completed(
    {
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
)
SMALL = {
    "vocab_size": 256,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
TOKENS = 16_384
STATES, PEAK = 0.05, (0.95, 1.05)  # error of what stays; the peak over the plan: workspaces of CUDA's libraries come on top


def train(grid: Any, model: ModelDescription, settings: ModelSettings, tokens: int) -> dict[str, Any]:
    """Two updates on one sequence of so many tokens: bytes that stay, of a GPU the peak of the second, and its seconds."""
    import numpy as np
    import torch

    from megarl.batch import Sample, pack
    from megarl.parallel import schedule
    from megarl.parallel.backend import choose
    from megarl.parallel.build import build_chunks, transformer_config
    from megarl.parallel.logprobs import logprob_entropy
    from megarl.parallel.optimizer import make_trainable

    backend = choose()
    gpu = backend.device.type == "cuda"
    gc.collect()  # of another run's model
    before = torch.cuda.memory_allocated() if gpu else 0
    chunks = build_chunks(transformer_config(model, settings, grid.layout, backend), model, backend, grad=True)
    for parameter in (parameter for chunk in chunks for parameter in chunk.parameters()):
        parameter.data.normal_(std=0.02)
    policy = make_trainable(chunks, OptimizerSettings(lr=1e-4), total_steps=10)
    numbers = np.random.default_rng(1).integers(0, model.vocab, tokens + 1).astype(np.int32)
    batch = pack([Sample(numbers, 1, np.zeros(tokens, np.float32), "stop")])

    def loss_fn(logits_RV: Any, row_T: Any, batch: Any) -> tuple[Any, float]:
        lp_T, _ = logprob_entropy(logits_RV, row_T, batch.target_T, 1.0, None, model.vocab, overwrite=True)
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
    return {"states": sum(storages.values()), "peak": peak, "seconds": seconds, "log-prob": losses, "gpu": gpu, "fused": backend.fused}


def check(there: Run, report: Report, *, small: bool = False) -> None:
    """Trains on the device: memory must match the plan, and the loss must fall. The rate is that of the planned FLOPs of a step."""
    model, tokens = ModelDescription.of({**SHARD, **(SMALL if small else {})}), 64 if small else TOKENS
    planned_flops = tokens * 3 * forward_flops(facts(model), model_elements(model), tokens)
    for recompute in ("none", "full"):
        settings = ModelSettings(path=Path("shard"), dtype="bfloat16", recompute=recompute)
        name = f"recompute {recompute}"
        with report.section(name):
            measured = there(train, model, settings, tokens)
            role = PlannedModel("policy", model, OptimizerSettings(), value=False, micro_batch_tokens=tokens)
            [stage] = plan_group([role], Layout(), settings, Work(tokens, 1, 0, gpu=measured["gpu"], fused=measured["fused"])).stages
            parts = {part: size for part, size in stage.parts.items() if part != "context"}
            states, planned = sum(parts[part] for part in ("weights", "gradients", "optimizer")), sum(parts.values())
            figures: dict[str, Any] = {
                "states GB": {"planned": states / 1e9, "measured": measured["states"] / 1e9},
                "seconds": measured["seconds"],
                "TFLOP/s": planned_flops / measured["seconds"] / 1e12,
            }
            report.figures[name] = figures
            report.check(abs(measured["states"] / states - 1) < STATES, f"{name}: states of {measured['states']} bytes, planned {parts}")
            report.check(measured["log-prob"][1] > measured["log-prob"][0], f"{name}: two steps on one sequence teach nothing")
            if measured["peak"] is not None and not small:  # a simulated GPU does not count its memory
                figures["peak GB"] = {"planned": planned / 1e9, "measured": measured["peak"] / 1e9}
                report.check(PEAK[0] < measured["peak"] / planned < PEAK[1], f"{name}: a peak of {measured['peak']} bytes, planned {parts}")

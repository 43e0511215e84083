"""The built model is transformers' model; configurations that cannot be are refused in one line."""

import importlib.metadata
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.config import ConfigError, Layout, ModelSettings, OptimizerSettings
from megarl.models.description import ModelDescription
from megarl.parallel import backend, schedule
from megarl.parallel.backend import choose
from megarl.parallel.build import build_chunks, transformer_config
from megarl.parallel.grid import Grid
from megarl.parallel.optimizer import make_trainable
from megarl.parallel.weights import load_hf
from tests.distributed.tiny_training import TINY, Job, build, global_batch, make_checkpoint, shares
from tests.rank_pool import Pool


def logits(grid: Grid, job: Job) -> Tensor:
    """Logits of the whole batch, sequence after sequence."""
    policy, batch = build(grid, job), global_batch(job.sequences)

    def loss_fn(logits_RV: Tensor, row_T: Tensor, batch: Any) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return torch.zeros(()), (logits_RV[row_T], batch.extra_T["entry"])

    parts = shares(batch.with_extra(entry=torch.arange(len(batch))), job.micro_batches)
    results = schedule.run(policy.chunks, parts, loss_fn, grid, forward_only=True)
    whole_TV = torch.empty(len(batch), TINY["vocab_size"])
    for logits_TV, entry_T in results:
        whole_TV[entry_T] = logits_TV
    return whole_TV


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_logits_equal_those_of_transformers(pool: Pool, tmp_path: Path, norm_topk_prob: bool) -> None:
    from transformers import AutoModelForCausalLM

    path = make_checkpoint(tmp_path / "model", num_experts_per_tok=2, norm_topk_prob=norm_topk_prob)
    [ours_TV] = pool.run(logits, Layout(), Job(path))
    batch = global_batch(Job.sequences)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        theirs_TV = torch.cat([model(batch.input_T[None, batch.seq_T == n]).logits[0] for n in range(Job.sequences)])
    assert theirs_TV.std() > 0.1
    torch.testing.assert_close(ours_TV, theirs_TV, rtol=0, atol=1e-5)


def refusal(grid: Grid, changes: dict[str, Any], megatron: dict[str, Any]) -> str:
    settings = ModelSettings(path=Path("model"), megatron=megatron)
    try:
        transformer_config(ModelDescription.of({**TINY, **changes}), settings, grid.layout, choose())
    except ConfigError as error:
        return str(error)
    return "accepted"


def test_overrides_are_checked_by_name(pool: Pool) -> None:
    def said(changes: dict[str, Any], **megatron: Any) -> str:
        return pool.run(refusal, Layout(), changes, megatron)[0]

    assert said({}, moe_aux_loss_coeff=0.01) == "accepted"
    assert said({}, moe_aux_los_coeff=0.01) == (
        "model.megatron.moe_aux_los_coeff: no such field of Megatron's TransformerConfig (did you mean 'moe_aux_loss_coeff'?)"
    )
    assert said({}, num_layers=3).startswith("model.megatron.num_layers: set by model.path, model.dtype, layout or megarl itself (to 4)")
    assert said({}, gradient_accumulation_fusion=True).startswith("model.megatron.gradient_accumulation_fusion=True: only Transformer")
    assert said({}, moe_token_dispatcher_type="allgather").startswith("model.megatron: refused by Megatron: Token dispatcher type")


def test_a_rope_that_depends_on_the_length_is_refused(pool: Pool, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", rope_parameters={"rope_theta": 1e6, "rope_type": "dynamic", "factor": 4.0})
    with pytest.raises(AssertionError, match="model.path: config.json asks for RoPE of type 'dynamic'; supported: 'default'"):
        pool.run(build, Layout(), Job(path))


def test_another_megatron_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_chosen", None)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.19.0")
    with pytest.raises(ConfigError, match="megatron-core: megarl runs on 0.19.2, and 0.19.0 is installed"):
        choose()


def heads(grid: Grid, job: Job, fp32_head: bool) -> tuple[Tensor, Tensor]:
    """The output layer's logits of a bfloat16 model, and those of its own input and weight cast to float32; whole on one rank."""
    model, settings = ModelDescription.read(job.path), ModelSettings(path=job.path, dtype=job.dtype, fp32_head=fp32_head)
    config = transformer_config(model, settings, grid.layout, choose())
    chunks = build_chunks(config, model, choose(), grad=True, fp32_head=fp32_head)
    load_hf(chunks, model, grid)
    policy = make_trainable(chunks, OptimizerSettings(lr=1e-3), total_steps=1)
    layer, seen = chunks[-1].output_layer, list[Tensor]()
    weight = chunks[-1].embedding.word_embeddings.weight if layer.weight is None else layer.weight  # as it is where it is tied
    layer.register_forward_hook(lambda _, inputs, output: seen.extend((inputs[0], output[0])))

    def loss_fn(logits_RV: Tensor, row_T: Tensor, batch: Any) -> tuple[Tensor, None]:
        return logits_RV[row_T].float().square().sum(), None

    policy.zero_grad()
    schedule.run(policy.chunks, [global_batch(3)], loss_fn, grid, forward_only=False)
    hidden, logits = (tensor.detach() for tensor in seen)
    assert weight.main_grad.abs().sum() > 0
    assert hidden.dtype == logits.dtype == (torch.float32 if fp32_head else torch.bfloat16)
    return logits, hidden.float() @ weight.detach().float().T


@pytest.mark.parametrize("tied", [False, True])
def test_logits_in_float32(pool: Pool, tmp_path: Path, tied: bool) -> None:
    path = make_checkpoint(tmp_path / "model", tie_word_embeddings=tied)
    [[logits, exact]] = pool.run(heads, Layout(), Job(path, dtype="bfloat16"), True)
    torch.testing.assert_close(logits, exact, rtol=1e-6, atol=1e-6)
    [[rounded, exact]] = pool.run(heads, Layout(), Job(path, dtype="bfloat16"), False)
    assert (rounded.float() - exact).abs().max() > 1e-4

"""Pipeline stages of different size and kind: layers of their own number, none with experts; saved and continued on other layouts."""

from pathlib import Path

import pytest
import torch

from megarl.config import Layout, ModelSettings
from megarl.models.families import check_checkpoint, check_layout
from megarl.models.hf import read_config
from tests.distributed.checkpoint_work import plain_tensors, train_and_save
from tests.distributed.test_checkpoint import STEPS, Saved, assert_continues
from tests.distributed.tiny_families import Make, saved
from tests.distributed.tiny_training import Job
from tests.rank_pool import Pool
from tests.rows import rows
from tools.check_logits import joined, megatron_part, sequences, transformers_logits

EP2, PP2 = Layout(ranks=2, ep=2), Layout(ranks=2, pp=2)
FIRST, LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"


@pytest.mark.parametrize(
    ("family", "layers", "layout", "megatron"),
    [
        ("deepseek_v3", 5, Layout(ranks=2, pp=2), {LAST: 2}),
        ("deepseek_v3", 5, Layout(ranks=3, pp=3), {FIRST: 1}),
        ("qwen3_next", 3, Layout(ranks=2, pp=2), {FIRST: 1}),
        ("llama", 7, Layout(ranks=4, pp=4), {FIRST: 2, LAST: 1}),
        ("llama", 6, Layout(ranks=2, pp=2, vpp=2), {FIRST: 2}),
    ],
)
def test_stages_may_have_different_numbers_of_layers(
    pool: Pool, make: Make, family: str, layers: int, layout: Layout, megatron: dict[str, int]
) -> None:
    path = make(family, layers=layers)
    model = check_checkpoint(path)
    check_layout(model, layout, megatron)
    batch = sequences(4, 40, model.vocab, seed=3)
    parts = pool.run(megatron_part, layout, ModelSettings(path=path, dtype="float32", megatron=megatron), batch)
    theirs_TV = transformers_logits(path, batch, "float32")
    torch.testing.assert_close(joined(parts, batch, model.vocab), theirs_TV, rtol=0, atol=2e-5)


MIXED = [
    (family, dense, after)
    for family, dense in (("deepseek_v3", 1), ("glm4_moe", 2), ("glm4_moe_lite", 1), ("deepseek_v2", 1), ("minimax_m2", 0))
    for after in (EP2, PP2)
]


@pytest.mark.parametrize(("family", "dense", "after"), rows(MIXED, [("deepseek_v3", 1, PP2)]))
def test_checkpoint_of_mixed_layers_continues_on_another_layout(
    pool: Pool, make: Make, tmp_path: Path, family: str, dense: int, after: Layout
) -> None:
    """Dense layers, latents and expert biases are in it, whatever stages without experts lack. Every expert takes every token, so that no
    near-tie goes another way."""
    path = make(family, vocab_size=128, num_experts_per_tok=8, n_group=1, topk_group=1, first_k_dense_replace=dense)
    megatron = {} if family == "deepseek_v2" else {"moe_router_bias_update_rate": 0.01}
    job = Job(path, steps=STEPS, micro_batches=2, megatron=megatron)
    then = pool.run(train_and_save, Layout(ranks=4, tp=2, pp=2), job, tmp_path)
    step = tmp_path / f"step_{STEPS:06d}"
    run = Saved(job, step, pool.run(plain_tensors, Layout(), step / "policy")[0], then)
    biases = [tensor for key, tensor in run.tensors.items() if key.endswith("mlp.router.expert_bias")]
    layers = sum(tensor.ndim == 2 and len(tensor) or 1 for tensor in biases)  # stacked, if all layers are alike
    assert layers == (0 if family == "deepseek_v2" else 4 - dense)
    assert_continues(pool, run, after, tmp_path / "again", rel=1e-5)


def test_saved_directory_says_that_multi_token_prediction_was_left_out(pool: Pool, make: Make, tmp_path: Path) -> None:
    path = make("glm4_moe", layers=2, num_mtp_layers=1)
    assert read_config(path)["num_nextn_predict_layers"] == 1
    pool.run(saved, Layout(), path, "float32", "lm", tmp_path / "out")
    assert check_checkpoint(tmp_path / "out").config == {**read_config(path), "num_nextn_predict_layers": 0}

"""A critic is the same function on every layout, starts from a language model or a classifier, and is transformers' classifier when saved.

Axes: T predicted tokens, R rows of local values, N sequences.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megarl.algorithms.value import value_loss, value_weights
from megarl.batch import Batch
from megarl.config import Layout, ModelSettings, OptimizerSettings
from megarl.models.description import ModelDescription
from megarl.models.families import check_checkpoint
from megarl.models.family import HeadKind
from megarl.parallel import schedule
from megarl.parallel.backend import choose
from megarl.parallel.build import build_chunks, transformer_config
from megarl.parallel.export import save_hf
from megarl.parallel.grid import Grid
from megarl.parallel.optimizer import make_trainable
from megarl.parallel.weights import load_hf, unwrap
from tests.distributed.exported import tensors_of
from tests.distributed.test_export import stored
from tests.distributed.tiny_training import global_batch, make_checkpoint, shares
from tests.rank_pool import Pool, RankError
from tests.rows import rows

SEQUENCES = 12
PAD = 128  # the last token of the vocabulary, which no sequence holds and two ranks do not divide
CLASSIFIER: dict[str, Any] = {"architectures": ["Qwen3MoeForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
LAYOUTS = {
    "tp2": Layout(ranks=2, tp=2),
    "pp2": Layout(ranks=2, pp=2),
    "pp2_vpp2": Layout(ranks=2, pp=2, vpp=2),
    "ep2": Layout(ranks=2, ep=2),
    "cp2": Layout(ranks=2, cp=2),
    "dp2": Layout(ranks=2),
    "tp2_pp2": Layout(ranks=4, tp=2, pp=2),
    "tp2_etp2_ep2": Layout(ranks=4, tp=2, etp=2, ep=2),
    "cp2_tp2": Layout(ranks=4, cp=2, tp=2),
}


@dataclass(frozen=True)
class Report:
    """What one rank saw of two optimizer steps."""

    loss: list[float]  # this rank's share; 0 where it does not report
    grad_norm: list[float]
    value: dict[tuple[int, int], float]  # (sequence, position) -> value before the first step, on every rank of the last stage


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "policy", vocab_size=PAD + 1)


@pytest.fixture(scope="module")
def critic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "critic", vocab_size=PAD + 1, **CLASSIFIER)


def build(grid: Grid, path: Path, dtype: str = "float32", head: HeadKind = "value") -> tuple[list[Any], ModelDescription]:
    """This rank's chunks. All but a fresh head was NaN before the weights came."""
    model, settings = ModelDescription.read(path), ModelSettings(path=path, dtype=dtype)  # type: ignore[arg-type]
    chunks = build_chunks(transformer_config(model, settings, grid.layout, choose()), model, choose(), grad=True, head=head)
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if not name.startswith("output_layer."):
                parameter.data.fill_(torch.nan)
    load_hf(chunks, model, grid)
    return chunks, model


def returns() -> Batch:
    """The global batch with a return and an old value for each token, weighted as the critic's loss is."""
    batch, rng = global_batch(SEQUENCES), np.random.default_rng(5)
    goal_T, old_T = torch.from_numpy(rng.normal(size=(2, len(batch))).astype(np.float32))
    return batch.with_extra(**{"return": goal_T, "value": 0.3 * old_T, "weight": batch.spread(value_weights(batch.count_N)).float()})


def train(grid: Grid, path: Path, micro_batches: int) -> Report:
    """Two steps of the clipped value loss on this rank's share of the global batch."""
    critic = make_trainable(build(grid, path)[0], OptimizerSettings(lr=1e-3), total_steps=10)
    report = Report([], [], {})

    def loss_fn(value_R1: Tensor, row_T: Tensor, batch: Batch) -> tuple[Tensor, float]:
        assert value_R1.dtype == torch.float32 and value_R1.shape[1] == 1
        value_T = value_R1[row_T, 0]
        total = (value_loss(value_T, batch, clip=0.2, coef=0.5).loss_T * batch.extra_T["weight"]).sum()
        if not report.grad_norm:  # Adam's first step makes signs of gradients, those that rounding alone decides, too
            report.value.update(zip(zip(batch.seq_T.tolist(), batch.position_T.tolist(), strict=True), value_T.tolist(), strict=True))
        return total, float(total.detach())

    mine = shares(returns(), micro_batches)[grid.dp_rank :: grid.dp_size]
    for _ in range(2):
        critic.zero_grad()
        losses = schedule.run(critic.chunks, mine, loss_fn, grid, forward_only=False)
        report.loss.append(sum(losses) if grid.tp_rank == 0 else 0.0)
        report.grad_norm.append(critic.step().grad_norm)
    return report


@pytest.fixture(scope="module")
def one_rank(pool: Pool, critic: Path) -> Report:
    return pool.run(train, Layout(), critic, 4)[0]


def assert_equal(many: list[Report], one: Report) -> None:
    values = [(place, value) for report in many for place, value in report.value.items()]
    assert {place for place, _ in values} == one.value.keys() and np.std(list(one.value.values())) > 0.1
    assert max(abs(value - one.value[place]) for place, value in values) < 1e-5, "on every rank of a tensor-parallel group"
    assert np.sum([report.loss for report in many], axis=0) == pytest.approx(one.loss, rel=1e-5)
    for report in many:
        assert report.grad_norm == pytest.approx(one.grad_norm, rel=1e-5)


@pytest.mark.parametrize("name", rows(LAYOUTS, ["pp2_vpp2", "cp2_tp2"]))
def test_values_loss_and_gradient_are_independent_of_the_layout(pool: Pool, critic: Path, one_rank: Report, name: str) -> None:
    layout = LAYOUTS[name]
    assert_equal(pool.run(train, layout, critic, 4 if layout.dp > 1 else 2), one_rank)


@pytest.mark.parametrize("micro_batches", rows([1, SEQUENCES], [SEQUENCES]))
def test_packing_changes_nothing(pool: Pool, critic: Path, one_rank: Report, micro_batches: int) -> None:
    assert_equal(pool.run(train, Layout(), critic, micro_batches), one_rank)


def exported(grid: Grid, path: Path, dtype: str) -> dict[str, Tensor]:
    chunks, model = build(grid, path, dtype)
    return tensors_of(chunks, model, grid, getattr(torch, dtype))


def test_critic_from_a_language_model_has_its_backbone_and_one_fresh_head_on_every_layout(pool: Pool, policy: Path) -> None:
    expected = stored(policy)
    del expected["lm_head.weight"]
    heads = []
    for layout in (Layout(), *LAYOUTS.values()):
        first, *others = pool.run(exported, layout, policy, "float32")
        heads.append(first.pop("score.weight"))
        assert first.keys() == expected.keys() and all(torch.equal(first[name], tensor) for name, tensor in expected.items())
        assert not any(others)
    assert heads[0].shape == (1, 128) and 0.8 / 129 < heads[0].std() < 1.2 / 129
    assert all(torch.equal(head, heads[0]) for head in heads)
    assert torch.equal(pool.run(exported, Layout(), policy, "bfloat16")[0]["score.weight"], heads[0].bfloat16())


def test_tied_embeddings_are_the_critic_s_embeddings_alone(pool: Pool, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", tie_word_embeddings=True, num_hidden_layers=2)
    for layout in (Layout(), LAYOUTS["pp2"]):
        first = pool.run(exported, layout, path, "float32")[0]
        assert first.keys() - stored(path).keys() == {"score.weight"}
        assert all(torch.equal(first[name], tensor) for name, tensor in stored(path).items())
    one, two = (pool.run(train, layout, path, 4) for layout in (Layout(), LAYOUTS["pp2"]))
    assert two[0].grad_norm == pytest.approx(one[0].grad_norm, rel=1e-5)


def saved(grid: Grid, path: Path, target: Path) -> None:
    chunks, model = build(grid, path)
    save_hf(chunks, model, grid, target)


@pytest.mark.parametrize("layout", [Layout(), Layout(ranks=2, tp=2, ep=2), LAYOUTS["pp2"]], ids=["one", "tp2_ep2", "pp2"])
def test_saved_critic_holds_the_bytes_it_was_loaded_from(pool: Pool, critic: Path, tmp_path: Path, layout: Layout) -> None:
    pool.run(saved, layout, critic, tmp_path / "out")
    ours, theirs = stored(tmp_path / "out"), stored(critic)
    assert ours.keys() == theirs.keys() and "score.weight" in ours
    assert all(torch.equal(ours[name].view(torch.uint8), tensor.view(torch.uint8)) for name, tensor in theirs.items())
    check_checkpoint(tmp_path / "out", "value")


def scores(grid: Grid, path: Path) -> Tensor:
    """The value at the last entry of each sequence."""

    def loss_fn(value_R1: Tensor, row_T: Tensor, batch: Batch) -> tuple[Tensor, dict[int, float]]:
        last_T = batch.position_T == batch.length_N[batch.seq_T] - 1
        return torch.zeros(()), dict(zip(batch.seq_T[last_T].tolist(), value_R1[row_T[last_T], 0].tolist(), strict=True))

    results = schedule.run(build(grid, path)[0], shares(global_batch(SEQUENCES), 2), loss_fn, grid, forward_only=True)
    score = {n: value for result in results for n, value in result.items()}
    return torch.tensor([score[n] for n in range(SEQUENCES)])


@pytest.mark.parametrize("source", ["critic", "policy"])
def test_transformers_gives_a_saved_critic_s_scores(pool: Pool, tmp_path: Path, request: pytest.FixtureRequest, source: str) -> None:
    """At the last token that is no padding, right-padded in one batch or each sequence alone."""
    from transformers import AutoModelForSequenceClassification

    path = tmp_path / "out"
    pool.run(saved, Layout(ranks=4, tp=2, pp=2, ep=2), request.getfixturevalue(source), path)
    [ours_N] = pool.run(scores, Layout(), path)
    model, loading = AutoModelForSequenceClassification.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    assert not any(loading.values()), "no tensor is missing, unexpected or of another shape"
    assert model.config.num_labels == 1
    batch = global_batch(SEQUENCES)
    rows = [batch.input_T[batch.seq_T == n] for n in range(SEQUENCES)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)
    with torch.no_grad():
        alone_N = torch.cat([model(row[None]).logits[:, 0] for row in rows])
        model.config.pad_token_id = PAD
        together_N = model(ids, attention_mask=(torch.arange(ids.shape[1]) < batch.length_N[:, None]).long()).logits[:, 0]
    assert ours_N.std() > (0.1 if source == "critic" else 0.01)
    torch.testing.assert_close(ours_N, alone_N, rtol=0, atol=1e-5)
    torch.testing.assert_close(ours_N, together_N, rtol=0, atol=1e-5)


def test_a_critic_that_was_a_policy_says_so_in_its_config(pool: Pool, policy: Path, tmp_path: Path) -> None:
    pool.run(saved, Layout(), policy, tmp_path / "out")
    changes = {**CLASSIFIER, "num_labels": 1, "label2id": {"LABEL_0": 0}, "dtype": "float32"}
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {**json.loads((policy / "config.json").read_text()), **changes}


def test_bfloat16_critic_values_are_float32(pool: Pool, critic: Path) -> None:
    [(dtype, finer)] = pool.run(rounded, Layout(), critic)
    assert dtype == torch.float32 and finer > 0


def rounded(grid: Grid, path: Path) -> tuple[torch.dtype, int]:
    """(dtype of a bfloat16 critic's values, how many of them no bfloat16 can hold)."""
    found: list[Tensor] = []

    def loss_fn(value_R1: Tensor, row_T: Tensor, batch: Batch) -> tuple[Tensor, None]:
        found.append(value_R1)
        return torch.zeros(()), None

    schedule.run(build(grid, path, "bfloat16")[0], shares(global_batch(4), 1), loss_fn, grid, forward_only=True)
    return found[0].dtype, int((found[0] != found[0].bfloat16().float()).sum())


def keys(grid: Grid, path: Path) -> set[str]:
    chunks, _ = build(grid, path)
    sharded = unwrap(chunks[-1]).sharded_state_dict()
    return {tensor.key for tensor in sharded.values() if hasattr(tensor, "key")}


def test_distributed_checkpoint_does_not_call_the_head_an_output_layer(pool: Pool, critic: Path) -> None:
    """Upstream lets an output layer differ in shape: a language model's would be loaded into a critic's head."""
    first, last = pool.run(keys, LAYOUTS["pp2"], critic)
    assert "score.weight" in last and "score.weight" not in first
    assert not any(key.startswith("output_layer.") for key in last)


def test_language_model_cannot_be_loaded_from_a_critic(pool: Pool, critic: Path) -> None:
    with pytest.raises(RankError, match="is a Qwen3MoeForSequenceClassification, from which no Qwen3MoeForCausalLM can be loaded"):
        pool.run(build, Layout(), critic, "float32", "lm")

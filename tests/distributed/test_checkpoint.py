"""A checkpoint of any layout continues on any other: weights and optimizer bit for bit, and the losses that follow."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from megarl.config import Layout
from tests.distributed.checkpoint_work import Resumed, beside_extra_states, plain_tensors, resume, resume_from_memory, train_and_save
from tests.distributed.test_layouts import LAYOUTS
from tests.distributed.tiny_families import Make
from tests.distributed.tiny_training import Job, make_checkpoint
from tests.rank_pool import Pool, RankError
from tests.rows import rows

STEPS = 2  # before the save, and after it
SAME = ["tp2_ep2", "pp2_vpp2", "ep4"]
ONE = Layout()


@dataclass(frozen=True)
class Saved:
    """A run that was saved after STEPS steps and went on."""

    job: Job
    step: Path
    tensors: dict[str, Tensor]  # whole
    then: list[Resumed]  # of each rank: the uninterrupted run


def job(path: Path, *layouts: Layout) -> Job:
    """Training with one micro-batch for each data-parallel rank, and two at least."""
    return Job(path, steps=STEPS, micro_batches=max(2, *(layout.dp for layout in layouts)))


def test_states_of_fused_layers_are_left_out_of_a_checkpoint(pool: Pool, tmp_path: Path) -> None:
    [(plain, fused)] = pool.run(beside_extra_states, ONE, job(make_checkpoint(tmp_path / "model"), ONE))
    assert plain == fused > 0


Save = Callable[[Job, Layout], Saved]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def save(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Save:
    """A saved run of a job on a layout; made once."""
    known: dict[str, Saved] = {}

    def saved(job: Job, layout: Layout) -> Saved:
        name = repr((job, layout))
        if name not in known:
            root = tmp_path_factory.mktemp("saved")
            then = pool.run(train_and_save, layout, job, root)
            step = root / f"step_{STEPS:06d}"
            known[name] = Saved(job, step, pool.run(plain_tensors, ONE, step / "policy")[0], then)
        return known[name]

    return saved


def losses(ranks: list[Resumed]) -> list[float]:
    return [sum(rank.report.loss[step] for rank in ranks) for step in range(STEPS)]


def assert_continues(pool: Pool, saved: Saved, layout: Layout, root: Path, rel: float) -> None:
    """Loaded on a layout, what is saved again is the same, and so are the next steps."""
    resumed = pool.run(resume, layout, saved.job, saved.step, root)
    again = pool.run(plain_tensors, ONE, root / saved.step.name / "policy")[0]
    assert again.keys() == saved.tensors.keys()
    assert [key for key, tensor in saved.tensors.items() if not torch.equal(again[key], tensor)] == []
    assert not resumed[0].exact
    assert losses(resumed) == pytest.approx(losses(saved.then), rel=rel)
    assert resumed[0].report.grad_norm == pytest.approx(saved.then[0].report.grad_norm, rel=10 * rel)


@pytest.mark.parametrize("name", rows(SAME, ["pp2_vpp2"]))
def test_resume_on_the_same_layout_is_exact(pool: Pool, save: Save, path: Path, name: str) -> None:
    """Bit for bit: losses, gradient norms, log-probs, and what the random states draw next."""
    saved = save(job(path, LAYOUTS[name]), LAYOUTS[name])
    assert pool.run(resume, LAYOUTS[name], saved.job, saved.step) == saved.then


@pytest.mark.parametrize("name", rows(SAME, ["pp2_vpp2"]))
def test_a_copy_in_memory_is_exact(pool: Pool, save: Save, path: Path, name: str) -> None:
    saved = save(job(path, LAYOUTS[name]), LAYOUTS[name])
    assert pool.run(resume_from_memory, LAYOUTS[name], saved.job, saved.step) == saved.then


CHAIN = ["tp2_ep2", "pp2_ep2", "pp2_vpp2", "tp2_etp2_ep2", "cp2", "ep4", "one"]
PAIRS = list(zip(CHAIN, CHAIN[1:] + CHAIN[:1], strict=True))


@pytest.mark.parametrize(("before", "after"), rows(PAIRS, PAIRS[4:5]))
def test_a_checkpoint_continues_on_another_layout(pool: Pool, save: Save, path: Path, tmp_path: Path, before: str, after: str) -> None:
    layouts = {**LAYOUTS, "one": ONE}
    saved = save(job(path, layouts[before], layouts[after]), layouts[before])
    assert_continues(pool, saved, layouts[after], tmp_path, rel=1e-6)


GPT_OSS = [("tp2_ep2", "pp2_ep2"), ("pp2_ep2", "ep4"), ("ep4", "tp2_ep2")]


@pytest.mark.parametrize(("before", "after"), rows(GPT_OSS, []))
def test_sinks_and_biases_continue_on_another_layout(pool: Pool, save: Save, make: Make, tmp_path: Path, before: str, after: str) -> None:
    """Those of gpt-oss: sinks are split over the heads' ranks, and biases of experts are with them."""
    path = make("gpt_oss", vocab_size=128, num_experts_per_tok=8)
    saved = save(job(path, LAYOUTS[before], LAYOUTS[after]), LAYOUTS[before])
    assert any("softmax_offset" in key for key in saved.tensors)
    assert_continues(pool, saved, LAYOUTS[after], tmp_path, rel=1e-6)


def with_muon(job: Job, dtype: Literal["float32", "bfloat16"] = "float32") -> Job:
    return replace(job, dtype=dtype, optimizer={"eps": 1e-3, "weight_decay": 0.1, "muon": {"lr": 0.01}})


MUON = [("tp2_etp2_ep2", "float32"), ("pp2_vpp2", "float32"), ("ep4", "bfloat16"), ("dp2", "float32")]


@pytest.mark.parametrize(("name", "dtype"), rows(MUON, MUON[-1:]))
def test_muon_resumes_exactly(pool: Pool, save: Save, path: Path, name: str, dtype: Literal["float32", "bfloat16"]) -> None:
    """Bit for bit, from files and from memory; of a matrix there is one moment."""
    saved = save(with_muon(job(path, LAYOUTS[name]), dtype), LAYOUTS[name])
    keys, prefix = set(saved.tensors), "optimizer.state."
    weights = {key.removeprefix(prefix + "param.") for key in keys if key.startswith(prefix + "param.")}
    matrices = {key for key in weights if "linear_" in key and key.endswith(".weight")}
    assert weights == {key for key in keys if not key.startswith(prefix)} and matrices
    assert {key for key in weights if f"{prefix}exp_avg_sq.{key}" not in keys} == matrices
    assert all(bool(saved.tensors[f"{prefix}exp_avg.{key}"].any()) for key in weights)
    assert pool.run(resume, LAYOUTS[name], saved.job, saved.step) == saved.then
    assert pool.run(resume_from_memory, LAYOUTS[name], saved.job, saved.step) == saved.then


@pytest.mark.parametrize(("before", "after"), rows([*PAIRS, ("dp2", "tp2_ep2")], []))
def test_muon_continues_on_another_layout(pool: Pool, save: Save, path: Path, tmp_path: Path, before: str, after: str) -> None:
    layouts = {**LAYOUTS, "one": ONE}
    saved = save(with_muon(job(path, layouts[before], layouts[after])), layouts[before])
    assert_continues(pool, saved, layouts[after], tmp_path, rel=1e-5)


def test_a_checkpoint_of_muon_is_not_one_of_adamw(pool: Pool, save: Save, path: Path) -> None:
    plain = job(path, LAYOUTS["dp2"])
    saved = save(with_muon(plain), LAYOUTS["dp2"])
    with pytest.raises(RankError, match=r"was trained with Muon, and the model is without \(optimizer\.muon\)"):
        pool.run(resume, LAYOUTS["dp2"], plain, saved.step)


def test_bfloat16_keeps_its_float32_main_weights(pool: Pool, save: Save, tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model", num_hidden_layers=2)
    dp4 = Layout(ranks=4)  # parameters lie across the borders of the ranks' slices
    saved = save(Job(path, steps=STEPS, dtype="bfloat16"), dp4)
    weight = "decoder.layers.self_attention.linear_qkv.weight"
    main = saved.tensors[f"optimizer.state.param.{weight}"]
    assert main.dtype == torch.float32 and saved.tensors[weight].dtype == torch.bfloat16
    assert torch.equal(main.bfloat16(), saved.tensors[weight]) and not torch.equal(main, saved.tensors[weight].float())
    assert pool.run(resume, dp4, saved.job, saved.step) == saved.then
    assert_continues(pool, saved, LAYOUTS["tp2_ep2"], tmp_path, rel=3e-3)


def test_tied_embeddings_and_a_padded_vocabulary(pool: Pool, save: Save, tmp_path: Path) -> None:
    """Tied weights lie in two stages, in buckets of their own; 129 rows are 130 with tp=2, and 129 again."""
    path = make_checkpoint(tmp_path / "model", num_hidden_layers=2, tie_word_embeddings=True, vocab_size=129)
    saved = save(job(path, Layout(ranks=4, pp=2)), Layout(ranks=4, pp=2))
    assert saved.tensors["embedding.word_embeddings.weight"].shape[0] == 129
    resumed = pool.run(resume, Layout(ranks=2, tp=2), saved.job, saved.step, tmp_path / "padded")
    assert losses(resumed) == pytest.approx(losses(saved.then), rel=1e-6)
    padded = replace(saved, step=tmp_path / "padded" / saved.step.name)
    assert pool.run(plain_tensors, ONE, padded.step / "policy")[0]["embedding.word_embeddings.weight"].shape[0] == 130
    assert_continues(pool, padded, Layout(ranks=4, pp=2), tmp_path / "again", rel=1e-6)

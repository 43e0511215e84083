"""A trained layer of multi-token prediction: the model beside it is trained bit for bit as without it; its loss and gradient are those of
transformers' layers in float64, sequence by sequence, on every layout."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl.config import Layout, OptimizerSettings
from megarl.convert.main import main as convert
from megarl.models.description import ModelDescription
from megarl.observe.metrics import merge, scalars
from megarl.parallel.export import save_hf
from megarl.parallel.grid import Grid
from megarl.parallel.predictor import with_second_targets
from megarl.ranks.supervised_worker import TrainSpec
from tests.distributed.checkpoint_work import resume, train_and_save
from tests.distributed.loop_ranks import supervised_rank
from tests.distributed.predictor_models import FAMILIES, with_predictor
from tests.distributed.test_export import stored
from tests.distributed.test_supervised_worker import OBJECTIVES, plan
from tests.distributed.tiny_families import Make
from tests.distributed.tiny_training import BY_GRADIENTS, Job, Report, build, exported, global_batch, gradients, learn, train
from tests.rank_pool import Pool
from tests.rows import rows

ERROR = 1e-5  # of an element of a gradient, of the largest of its tensor
ONE = Layout()
LAYOUTS = {
    "tp2_ep2": Layout(ranks=2, tp=2, ep=2),
    "pp2": Layout(ranks=2, pp=2),
    "cp2": Layout(ranks=2, cp=2),
    "dp2": Layout(ranks=2),
    "pp2_vpp2": Layout(ranks=2, pp=2, vpp=2),
    "tp2_pp2": Layout(ranks=4, tp=2, pp=2, ep=2),
    "tp2_etp2_ep2": Layout(ranks=4, tp=2, etp=2, ep=2),
    "cp2_tp2": Layout(ranks=4, cp=2, tp=2),
}
Directories = Callable[[str], Path]


@pytest.fixture(scope="module")
def directory(make: Make, tmp_path_factory: pytest.TempPathFactory) -> Directories:
    """The tiny model of a family with such a layer, made once."""
    known: dict[str, Path] = {}

    def path(family: str) -> Path:
        if family not in known:
            known[family] = with_predictor(make, tmp_path_factory.mktemp("predictors") / family, family)
        return known[family]

    return path


def within(name: str, path: Path) -> bool:
    """Whether a tensor is the layer's."""
    model = ModelDescription.read(path, mtp="train")
    return name.startswith(model.family.predictors(model.config))


def job(path: Path, **changes: object) -> Job:
    return Job(path, mtp="train", micro_batches=2, **changes)  # type: ignore[arg-type]


def own_gradients(pool: Pool, layout: Layout, work: Job) -> dict[str, Tensor]:
    """A thousand times the gradients of the layer's weights, without its router's bias, which has none."""
    found = pool.run(gradients, layout, replace(work, optimizer=BY_GRADIENTS))[0]
    return {name: one for name, one in found.items() if within(name, work.path) and not name.endswith("e_score_correction_bias")}


def assert_equal(many: dict[str, Tensor], one: dict[str, Tensor]) -> None:
    assert many.keys() == one.keys() and one
    for name, gradient in one.items():
        largest = gradient.abs().max()
        assert largest > 0, name
        assert (many[name] - gradient).abs().max() <= ERROR * largest, name


CASES = [(family, name) for family in FAMILIES for name in LAYOUTS if family != "qwen3_5" or LAYOUTS[name].ep == 1]
SUITE = [("deepseek_v3", "tp2_pp2"), ("glm4_moe", "cp2")]


@pytest.fixture(scope="module")
def alone(pool: Pool, directory: Directories) -> Callable[[str], dict[str, Tensor]]:
    """The gradients of a family on one rank, each once."""
    known: dict[str, dict[str, Tensor]] = {}

    def found(family: str) -> dict[str, Tensor]:
        if family not in known:
            known[family] = own_gradients(pool, ONE, job(directory(family)))
        return known[family]

    return found


@pytest.mark.parametrize(("family", "name"), rows(CASES, SUITE))
def test_the_gradient_is_independent_of_the_layout(
    pool: Pool, directory: Directories, alone: Callable[[str], dict[str, Tensor]], family: str, name: str
) -> None:
    assert_equal(own_gradients(pool, LAYOUTS[name], job(directory(family))), alone(family))


@pytest.mark.parametrize("recompute", rows(["selective", "full"], ["full"]))
def test_a_recomputed_layer_has_the_same_gradient(
    pool: Pool, directory: Directories, alone: Callable[[str], dict[str, Tensor]], recompute: Literal["selective", "full"]
) -> None:
    assert_equal(own_gradients(pool, ONE, job(directory("glm4_moe"), recompute=recompute)), alone("glm4_moe"))


def stepped(grid: Grid, work: Job) -> tuple[Report, dict[str, Tensor]]:
    """The report of some steps, and the weights after them."""
    policy = build(grid, work)
    return learn(grid, policy, work), exported(grid, policy, work)


TRUNK = [("deepseek_v3", "one"), ("glm4_moe", "tp2_pp2"), ("qwen3_next", "pp2"), ("qwen3_next", "tp2_ep2"), ("qwen3_5", "one")]


@pytest.mark.parametrize(("family", "name"), rows(TRUNK, TRUNK[1:2]))
def test_the_model_is_trained_bit_for_bit_as_without_the_layer(pool: Pool, directory: Directories, family: str, name: str) -> None:
    """Losses, norms, log-probs and weights, with gradients that are clipped: the layer's has a norm of its own."""
    work = job(directory(family), steps=3, optimizer={"clip_grad": 0.01})
    layout = {**LAYOUTS, "one": ONE}[name]
    trained, kept = pool.run(stepped, layout, work), pool.run(stepped, layout, replace(work, mtp="keep"))
    for (ours, _), (theirs, _) in zip(trained, kept, strict=True):
        assert (ours.loss, ours.grad_norm, ours.logp) == (theirs.loss, theirs.grad_norm, theirs.logp)
        assert min(ours.grad_norm) > 0.01 and all(norm is not None and norm > 0.01 for norm in ours.predictor_norm)
    ours, theirs = trained[0][1], kept[0][1]
    assert {name for name in ours if not within(name, work.path)} == theirs.keys()
    assert [name for name, tensor in theirs.items() if not torch.equal(ours[name], tensor)] == []
    before = stored(work.path)
    stays = [name for name in ours.keys() - theirs.keys() if torch.equal(ours[name], before[name])]
    assert all(name.endswith("e_score_correction_bias") for name in stays)


@pytest.mark.parametrize("name", rows(["dp2", "cp2"], ["dp2"]))
def test_the_models_gradients_are_those_without_the_layer(pool: Pool, directory: Directories, name: str) -> None:
    """Bit for bit, also where the parameters' buffers are cut otherwise with the layer than without."""
    work = job(directory("glm4_moe"), optimizer=BY_GRADIENTS)
    ours, theirs = (pool.run(gradients, LAYOUTS[name], one)[0] for one in (work, replace(work, mtp="keep")))
    assert theirs and [name for name, one in theirs.items() if not torch.equal(ours[name], one)] == []


def of_transformers(path: Path, tmp_path: Path) -> tuple[float, int, int, dict[str, Tensor]]:
    """The layer by transformers' modules in float64, one sequence at a time.

    Returns:
        Its weighted loss, its targets, those that are its likeliest tokens, and the gradients of its weights, without those of experts.
    """
    from transformers import AutoModelForCausalLM

    model = ModelDescription.read(path, mtp="train")
    names, tensors = model.family.predictor(model.config), load_file(path / "model.safetensors")
    assert names is not None
    own = {name: tensors.pop(name) for name in [*tensors] if within(name, path)}
    attends = [layer for layer in range(model.sizes.layers) if f"model.layers.{layer}.self_attn.o_proj.weight" in tensors]
    other = f"model.layers.{attends[-1]}."
    layer_of = {name.removeprefix(names.layer): one for name, one in own.items() if name.startswith(names.layer)}
    replaced = {name: layer_of[name.removeprefix(other)] if name.startswith(other) else one for name, one in tensors.items()}
    loaded, eager = [], {"attn_implementation": "eager", "experts_implementation": "eager"}  # others do not compute in float64
    for place, held in (("trunk", tensors), ("layer", replaced)):
        shutil.copytree(path, tmp_path / place)
        save_file(held, tmp_path / place / "model.safetensors", metadata={"format": "pt"})
        loaded.append(AutoModelForCausalLM.from_pretrained(tmp_path / place, dtype=torch.float64, **eager))
    trunk, layer = loaded[0], loaded[1].model.layers[attends[-1]]
    parts = {name: own[name].double().requires_grad_() for name in (names.embedding_norm, names.state_norm, names.projection, names.norm)}

    def normed(x: Tensor, name: str) -> Tensor:
        scale = parts[name] + bool(model.fields.get("layernorm_zero_centered_gamma"))
        return x * (x.square().mean(-1, keepdim=True) + model.config["rms_norm_eps"]).rsqrt() * scale

    batch, loss, count, hits = global_batch(Job(path).sequences), torch.zeros((), dtype=torch.float64), 0, 0
    for n in range(len(batch.length_N)):
        one = batch.take(batch.seq_T == n)
        with torch.no_grad():
            state_1TH = trunk.model(one.input_T[None]).last_hidden_state
            embedded_1TH = trunk.model.embed_tokens(one.target_T[None])
        rope = trunk.model.rotary_emb(state_1TH, torch.arange(len(one))[None])
        mask = torch.full((len(one), len(one)), -torch.inf, dtype=torch.float64).triu(1)[None, None]
        x = torch.cat([normed(embedded_1TH, names.embedding_norm), normed(state_1TH, names.state_norm)], -1) @ parts[names.projection].T
        x = layer(x, attention_mask=mask, position_embeddings=rope)
        x = normed(x[0] if isinstance(x, tuple) else x, names.norm)
        logp_TV = (x[0] @ trunk.lm_head.weight.detach().T).log_softmax(-1)
        scored_T = one.mask_T[1:]  # the target of the next entry is a loss token
        target_T = one.target_T[1:]
        logp_T = logp_TV[:-1].gather(-1, target_T[:, None])[:, 0]
        loss = loss - (logp_T * one.extra_T["weight"][1:] * scored_T).sum()
        count += int(scored_T.sum())
        hits += int(((logp_TV[:-1].argmax(-1) == target_T) & scored_T).sum())
    loss.backward()
    found = {name: one.grad for name, one in parts.items()}
    found |= {names.layer + name: one.grad for name, one in layer.named_parameters() if names.layer + name in own}
    return float(loss.detach()), count, hits, {name: one for name, one in found.items() if one is not None}


@pytest.mark.parametrize("family", rows(FAMILIES, ["deepseek_v3"]))
def test_loss_and_gradient_are_those_of_transformers_layers(
    pool: Pool, directory: Directories, alone: Callable[[str], dict[str, Tensor]], tmp_path: Path, family: str
) -> None:
    work = job(directory(family), mtp_loss_weight=0.3)
    loss, count, hits, theirs = of_transformers(work.path, tmp_path)
    [report] = pool.run(train, ONE, work)
    found = scalars(report.predicted)
    assert found["mtp/accuracy"] == pytest.approx(hits / count, abs=1e-9) and count > 100
    ours = alone(family)
    assert theirs.keys() <= ours.keys() and len(theirs) > 9
    for name, gradient in theirs.items():
        expected = 1000 * work.mtp_loss_weight * gradient
        assert (ours[name].double() - expected).abs().max() <= 1e-4 * expected.abs().max(), name
    assert abs(loss) > 0


def test_targets_do_not_cross_the_ends_of_sequences() -> None:
    batch = global_batch(5)
    shuffled = batch.take(torch.randperm(len(batch), generator=torch.Generator().manual_seed(1)))
    for given in (batch, shuffled):
        filled = with_second_targets(given)
        for n in range(5):
            own = filled.take((filled.seq_T == n).nonzero().squeeze(1))
            own = own.take(torch.argsort(own.position_T))
            assert torch.equal(own.extra_T["mtp_target"][:-1], own.target_T[1:])
            assert torch.equal(own.extra_T["mtp_weight"][:-1], torch.where(own.mask_T, own.extra_T["weight"], 0.0)[1:])
            assert own.extra_T["mtp_weight"][-1] == 0


def saved(grid: Grid, work: Job, target: Path) -> None:
    policy = build(grid, work)
    save_hf(policy.chunks, work.description, grid, target)


@pytest.mark.parametrize("family", rows(FAMILIES, ["qwen3_5_moe"]))
def test_a_saved_directory_holds_the_layer(pool: Pool, directory: Directories, tmp_path: Path, family: str) -> None:
    """Every tensor as it was read, without the copies of embedding and output layer; config.json has the number of such layers."""
    work = job(directory(family))
    pool.run(saved, LAYOUTS["tp2_pp2" if family != "qwen3_5" else "pp2"], work, tmp_path / "out")
    before, after = stored(work.path), stored(tmp_path / "out")
    assert after.keys() == before.keys() - work.description.copies.keys()
    assert all(torch.equal(after[name], before[name]) for name in after)
    key = FAMILIES[family][0]
    assert json.loads((tmp_path / "out" / "config.json").read_text())[key] == 1
    [again] = pool.run(train, ONE, replace(work, path=tmp_path / "out"))
    [first] = pool.run(train, ONE, work)
    assert again == first


def test_experts_of_the_layer_in_stacks_are_read(pool: Pool, directory: Directories, tmp_path: Path) -> None:
    """As published: all experts of a layer in two tensors; kept, they are saved as they were."""
    work, tensors = job(directory("qwen3_5_moe")), load_file(directory("qwen3_5_moe") / "model.safetensors")
    shutil.copytree(work.path, tmp_path / "stacked")
    for stack, leaves in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        parts = [[tensors.pop(f"mtp.layers.0.mlp.experts.{n}.{leaf}.weight") for leaf in leaves] for n in range(8)]
        tensors[f"mtp.layers.0.mlp.experts.{stack}"] = torch.stack([torch.cat(own) for own in parts])
    save_file(tensors, tmp_path / "stacked" / "model.safetensors", metadata={"format": "pt"})
    assert pool.run(train, ONE, replace(work, path=tmp_path / "stacked")) == pool.run(train, ONE, work)
    pool.run(saved, ONE, replace(work, path=tmp_path / "stacked", mtp="keep"), tmp_path / "kept")
    assert stored(tmp_path / "kept").keys() == stored(tmp_path / "stacked").keys()


@pytest.mark.parametrize("name", rows(["tp2_pp2", "tp2_etp2_ep2"], ["tp2_pp2"]))
def test_a_checkpoint_has_the_layer_and_continues_on_another_layout(pool: Pool, directory: Directories, tmp_path: Path, name: str) -> None:
    """Bit for bit on its own layout, with the layer's optimizer; converted it is the model that the run would export."""
    work = job(directory("deepseek_v3"), steps=2)
    then = pool.run(train_and_save, LAYOUTS[name], work, tmp_path / "saved")
    step = tmp_path / "saved" / "step_000002"
    assert pool.run(resume, LAYOUTS[name], work, step) == then
    other = pool.run(resume, LAYOUTS["pp2"], work, step)
    assert sum(rank.report.loss[-1] for rank in other) == pytest.approx(sum(rank.report.loss[-1] for rank in then), rel=1e-5)
    ours, theirs = (scalars(merge([rank.report.predicted for rank in ranks if rank.report.predicted])) for ranks in (other, then))
    assert ours["mtp/loss"] == pytest.approx(theirs["mtp/loss"], rel=1e-5)
    assert convert(["megatron-to-hf", str(tmp_path / "saved"), str(tmp_path / "whole"), "--like", str(work.path)]) == 0
    assert convert(["megatron-to-hf", str(tmp_path / "saved"), str(tmp_path / "trunk"), "--like", str(work.path), "--drop-mtp"]) == 0
    whole, trunk = stored(tmp_path / "whole"), stored(tmp_path / "trunk")
    assert whole.keys() == stored(work.path).keys() - work.description.copies.keys()
    assert trunk.keys() == {name for name in whole if not within(name, work.path)}
    assert all(torch.equal(whole[name], one) for name, one in trunk.items())


def practise(grid: Grid, path: Path, steps: int) -> list[dict[str, float]]:
    """The metrics of some steps of supervised training on the same texts, then those of a look at them without training."""
    rank = supervised_rank(grid, path, TrainSpec(OBJECTIVES["sft"], OptimizerSettings(lr=3e-3), steps), mtp="train")
    texts = plan(OBJECTIVES["sft"], grid.dp_size)
    return [*(scalars(rank.train(texts)) for _ in range(steps)), scalars(rank.measure(texts))]


def test_the_layer_learns_in_supervised_training(pool: Pool, make: Make, tmp_path: Path) -> None:
    path = with_predictor(make, tmp_path / "model", "glm4_moe")
    [found] = pool.run(practise, ONE, path, 12)
    losses = [one["mtp/loss"] for one in found]
    assert losses[-1] < losses[0] - 1 and found[-1]["mtp/accuracy"] > found[0]["mtp/accuracy"] + 0.1
    assert all(one["mtp/grad_norm"] > 0 for one in found[:-1]) and "mtp/grad_norm" not in found[-1]

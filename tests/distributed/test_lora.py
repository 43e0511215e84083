"""Low-rank adapters: their gradients on every layout are those of one rank and of the merged weights; merged, unmerged and off agree."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megarl.config import Layout, LoraSettings
from megarl.models.adapters import PEFT, PEFT_FOLDER, PEFT_WEIGHTS, PROVEN
from megarl.models.description import ModelDescription
from megarl.observe.metrics import merge, scalars
from tests.distributed.checkpoint_work import plain_tensors, resume, resume_from_memory, train_and_save
from tests.distributed.lora_work import beside_fused_layers, dropped, factor_gradients, memorised, read_back, saved, scores, supervised
from tests.distributed.test_supervised_worker import counted
from tests.distributed.tiny_families import Make, layouts
from tests.distributed.tiny_training import BY_GRADIENTS, Job, Report, assert_same_gradients, gradients, make_checkpoint
from tests.rank_pool import Pool, RankError
from tests.rows import rows

LORA = LoraSettings(rank=4, alpha=6.0)
ROUTERS = LoraSettings(rank=4, alpha=6.0, targets=["router", "q_proj", "experts"])
DROPPING = LoraSettings(rank=4, alpha=6.0, dropout=0.25)
LAYOUTS = {
    "tp2": Layout(ranks=2, tp=2),
    "ep2": Layout(ranks=2, ep=2),
    "cp2": Layout(ranks=2, cp=2),
    "pp2_vpp2": Layout(ranks=2, pp=2, vpp=2),
    "tp2_ep2": Layout(ranks=2, tp=2, ep=2),
    "tp2_etp2": Layout(ranks=2, tp=2, etp=2),
    "tp2_etp2_ep2": Layout(ranks=4, tp=2, etp=2, ep=2),
    "cp2_tp2": Layout(ranks=4, cp=2, tp=2),
    "pp2_tp2": Layout(ranks=4, pp=2, tp=2),
}
DENSE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_experts": None,
    "num_experts_per_tok": None,
    "moe_intermediate_size": None,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("lora") / "model")


def on(layout: Layout, job: Job) -> Job:
    return replace(job, micro_batches=4 if layout.dp > 1 else 2)


def merged_gradients(factors: dict[str, Tensor], of_merged: dict[str, Tensor], lora: LoraSettings) -> dict[str, Tensor]:
    """The gradients of A and B by the chain rule: W' = W + alpha / rank B A, so that dB = s dW' A^T and dA = s B^T dW'."""
    scale, found = lora.alpha / lora.rank, {}
    for name in (name for name in factors if name.endswith(".lora_A.weight")):
        other, matrix = name.replace("lora_A", "lora_B"), name.removeprefix(PEFT).replace(".lora_A", "")
        found[name] = scale * factors[other].T @ _of_matrix(of_merged, matrix)
        found[other] = scale * _of_matrix(of_merged, matrix) @ factors[name].T
    return found


def _of_matrix(gradients: dict[str, Tensor], name: str) -> Tensor:
    """The gradient of a matrix as [out, in]: some experts are stored as [in, out], under names that do not end with weight."""
    return gradients[name] if name in gradients else gradients[name.removesuffix(".weight")].T


def largest_gap(one: Report, other: Report) -> float:
    assert one.logp.keys() == other.logp.keys() and one.logp
    return max(abs(value - other.logp[token]) for token, value in one.logp.items())


EVERY = [*((name, LORA) for name in LAYOUTS), *((name, ROUTERS) for name in ("tp2_ep2", "tp2_etp2", "pp2_vpp2", "cp2_tp2"))]


@pytest.mark.parametrize(("name", "lora"), rows(EVERY, [("tp2_ep2", LORA), ("pp2_vpp2", LORA)]))
def test_each_element_of_the_gradient_is_independent_of_the_layout(pool: Pool, path: Path, name: str, lora: LoraSettings) -> None:
    job = Job(path, optimizer=BY_GRADIENTS, lora=lora)
    [one] = pool.run(factor_gradients, Layout(), job)
    assert_same_gradients(pool.run(factor_gradients, LAYOUTS[name], on(LAYOUTS[name], job))[0], one)


@pytest.mark.parametrize(
    ("changes", "lora", "recompute"),
    [
        ({}, LORA, "full"),
        pytest.param(DENSE, LORA, "selective", marks=pytest.mark.long),
        pytest.param({}, LoraSettings(rank=8, alpha=8.0, targets=["q_proj", "v_proj", "up_proj"]), "full", marks=pytest.mark.long),
        pytest.param({}, ROUTERS, "full", marks=pytest.mark.long),
    ],
    ids=["moe", "dense", "some_of_fused", "routers"],
)
def test_gradients_and_logprobs_are_those_of_the_merged_weights(
    pool: Pool, tmp_path: Path, changes: dict, lora: LoraSettings, recompute: str
) -> None:
    """The merged weights, as exported, are trained in whole by one rank: plain code without adapters, whose gradient the chain rule
    turns into that of the factors. The log-probs agree to 1e-5, float32's rounding over all layers; the weights themselves exactly."""
    base = make_checkpoint(tmp_path / "base", num_hidden_layers=2, **changes)
    job = Job(base, optimizer=BY_GRADIENTS, lora=lora, recompute=recompute)  # type: ignore[arg-type]
    [factors] = pool.run(saved, Layout(), job, tmp_path / "merged")
    before, after = load_file(base / "model.safetensors"), load_file(tmp_path / "merged" / "model.safetensors")
    for name, weight in before.items():
        pair = [factors.get(f"{PEFT}{name.removesuffix('.weight')}.lora_{part}.weight") for part in "AB"]
        expected = weight if pair[0] is None or pair[1] is None else weight + lora.alpha / lora.rank * pair[1] @ pair[0]
        assert (after[name] - expected).abs().max() <= 1e-6, name
    [of_merged] = pool.run(gradients, Layout(), Job(tmp_path / "merged", optimizer=BY_GRADIENTS))
    assert_same_gradients(pool.run(factor_gradients, Layout(), job)[0], merged_gradients(factors, of_merged, lora))
    [(adapted, off, _)], [(merged, *_)], [(plain, *_)] = (
        pool.run(scores, Layout(), one) for one in (job, Job(tmp_path / "merged"), Job(base))
    )
    assert largest_gap(adapted, merged) <= 1e-5 < largest_gap(adapted, plain)
    assert off.logp == plain.logp  # bit for bit: without its adapters it is the base


FAMILIES = [
    "llama",
    "qwen2",
    "mistral",
    "ministral",
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "ernie4_5_moe",
    "minimax_m2",
    "glm4_moe",
    "granite",
    "granitemoe",
    "qwen3",
    "qwen3_moe",
    "qwen3_vl",
]
MLA = ["deepseek_v3", "moonlight", "kimi_k2", "deepseek_v2", "deepseek_v2_lite", "glm4_moe_lite"]
SPARSE = ["deepseek_v32", "glm_moe_dsa"]  # whose indexers are frozen
OTHERS = {
    "phi3": LORA,
    "gpt_oss": LORA,  # its experts are stored as [in, out]
    "qwen3_next": LORA,
    "qwen3_5_moe": LORA,
    "qwen3_5": LORA,
    "qwen3_5_moe_vl": LORA,
    "qwen3_5_vl": LORA,
    "qwen3_vl_moe": LORA,
}


@pytest.mark.parametrize("family", rows([*FAMILIES, *MLA, *SPARSE, *OTHERS], ["deepseek_v3", "qwen3_5_moe"]))
def test_the_gradients_of_every_family_are_those_of_the_merged_weights(pool: Pool, make: Make, tmp_path: Path, family: str) -> None:
    """On one rank, and with tensor and expert parallelism."""
    base = make(family, layers=3, vocab_size=128)
    assert ModelDescription.read(base).config["model_type"] in PROVEN
    lora = OTHERS.get(family, LORA)
    job, layout = Job(base, optimizer=BY_GRADIENTS, lora=lora), layouts(family)["tp2"]
    [factors] = pool.run(saved, Layout(), job, tmp_path / "merged")
    [of_merged] = pool.run(gradients, Layout(), Job(tmp_path / "merged", optimizer=BY_GRADIENTS))
    expected = merged_gradients(factors, of_merged, lora)
    unused = {name for name, gradient in expected.items() if not gradient.any()}  # of experts that no token was sent to
    assert len(unused) < len(expected) / 4
    for many in (pool.run(factor_gradients, Layout(), job)[0], pool.run(factor_gradients, layout, on(layout, job))[0]):
        assert many.keys() == expected.keys() and not any(many[name].any() for name in unused)
        assert_same_gradients(*({name: one[name] for name in expected.keys() - unused} for one in (many, expected)))


@pytest.mark.parametrize("family", rows(["qwen3_moe", "deepseek_v3", "glm4_moe", "qwen3_5_moe"], ["deepseek_v3"]))
def test_adapters_see_the_inputs_of_fused_layers_and_the_tokens_of_grouped_experts(pool: Pool, make: Make, family: str) -> None:
    """Transformer Engine's layers have the norms before them inside, and one layer for all experts of a rank: stand-ins, in Megatron's own
    spec and its own module of grouped experts. The gradients are those beside local layers, and so is the model without its adapters."""
    base = make(family, layers=3, vocab_size=128)
    job = Job(base, optimizer=BY_GRADIENTS, lora=LORA)
    [expected], [(adapted, off, _)] = pool.run(factor_gradients, Layout(), job), pool.run(scores, Layout(), job)
    used = {name for name, gradient in expected.items() if gradient.any()}  # the others are of experts that no token was sent to
    assert len(used) > 3 * len(expected) / 4
    recomputed = {Layout(): "selective", Layout(ranks=2, tp=2, ep=2): "full", Layout(ranks=2, tp=2, etp=2): "none"}
    for layout, recompute in recomputed.items():
        again = replace(on(layout, job), recompute=recompute)  # type: ignore[arg-type]
        many, mine, plain = pool.run(beside_fused_layers, layout, again)[0]
        assert many.keys() == expected.keys()
        assert_same_gradients(*({name: one[name] for name in used} for one in (many, expected)))
        if layout.ranks == 1:
            assert largest_gap(mine, adapted) <= 1e-5 and largest_gap(plain, off) <= 1e-5 < largest_gap(mine, plain)


def test_a_peft_directory_holds_the_adapters_and_gives_them_back(pool: Pool, path: Path, tmp_path: Path) -> None:
    layout, job = LAYOUTS["tp2_ep2"], Job(path, lora=LORA)
    factors = pool.run(saved, layout, job, tmp_path / "merged")[0]
    stored = load_file(tmp_path / "merged" / PEFT_FOLDER / PEFT_WEIGHTS)
    assert stored.keys() == factors.keys() and all(torch.equal(stored[name], factor) for name, factor in factors.items())
    again = replace(job, lora=LORA.model_copy(update={"init": tmp_path / "merged" / PEFT_FOLDER}))
    [read] = pool.run(read_back, Layout(), again)
    assert all(torch.equal(read[name], factor) for name, factor in factors.items())
    other = LORA.model_copy(update={"init": tmp_path / "merged" / PEFT_FOLDER, "targets": ["attention"]})
    with pytest.raises(RankError, match="is none of model.lora's targets, and is in"):
        pool.run(read_back, Layout(), replace(job, lora=other))


def test_a_checkpoint_of_adapters_continues_on_the_same_and_on_another_layout(pool: Pool, path: Path, tmp_path: Path) -> None:
    """Bit for bit on the same layout, and from a copy in memory; on another the same tensors, and losses as near as layouts are."""
    layout, job = LAYOUTS["tp2_ep2"], Job(path, steps=2, micro_batches=2, lora=LORA)
    then = pool.run(train_and_save, layout, job, tmp_path / "a")
    step = next(iter((tmp_path / "a").glob("step*")))
    stored = pool.run(plain_tensors, Layout(), step / "policy")[0]
    assert {key.rpartition(".")[2] for key in stored} == {"lora_A", "lora_B"}
    for work in (resume, resume_from_memory):
        for mine, theirs in zip(pool.run(work, layout, job, step), then, strict=True):
            assert (mine.report, mine.random) == (theirs.report, theirs.random)
    [moved] = pool.run(resume, Layout(), job, step, tmp_path / "b")
    again = pool.run(plain_tensors, Layout(), next(iter((tmp_path / "b").glob("step*"))) / "policy")[0]
    assert again.keys() == stored.keys() and all(torch.equal(again[key], tensor) for key, tensor in stored.items())
    assert moved.report.loss == pytest.approx([sum(losses) for losses in zip(*(one.report.loss for one in then), strict=True)], rel=1e-4)
    other = make_checkpoint(tmp_path / "other", rms_norm_eps=1e-5)
    tensors = load_file(other / "model.safetensors")
    name = "model.layers.3.mlp.experts.3.down_proj.weight"
    tensors[name][0, 0] += 1e-3
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RankError, match="adapters of another base: its fingerprint is"):
        pool.run(resume, Layout(), replace(job, path=other), step)
    with pytest.raises(RankError, match="holds adapters alone, and the model saves all weights"):
        pool.run(resume, Layout(), replace(job, lora=None), step)


def test_dropout_is_the_same_where_the_input_is(pool: Pool, path: Path) -> None:
    """On the shards of an expert in front of its column-parallel layer, and nowhere else; a quarter is zero, and the mean is kept."""
    ranks = pool.run(dropped, LAYOUTS["tp2_etp2_ep2"], Job(path, lora=DROPPING))
    for one, other in ((0, 1), (2, 3)):
        alike = {name for name in ranks[one] if torch.equal(ranks[one][name], ranks[other][name])}
        assert alike == {name for name in ranks[one] if ".local_experts." in name and ".linear_fc1." in name} and alike
    assert not any(torch.equal(one, other) for one, other in zip(ranks[0].values(), ranks[2].values(), strict=True))
    kept = torch.stack([mask for rank in ranks for mask in rank.values()])
    assert kept.unique().tolist() == pytest.approx([0, 4 / 3]) and float(kept.mean()) == pytest.approx(1, abs=0.01)


@pytest.mark.long
def test_dropout_is_drawn_again_by_recomputation_and_a_resume_and_acts_in_updates_alone(pool: Pool, path: Path, tmp_path: Path) -> None:
    layout, job = LAYOUTS["tp2_etp2"], Job(path, optimizer=BY_GRADIENTS, lora=DROPPING)
    [without, *_], [plain, *_] = (pool.run(scores, layout, replace(job, lora=lora)) for lora in (DROPPING, LORA))
    assert without[0].logp == plain[0].logp
    stored, again = (pool.run(factor_gradients, layout, replace(job, recompute=one))[0] for one in ("none", "full"))
    assert_same_gradients(again, stored)
    exact = pool.run(factor_gradients, layout, replace(job, lora=LORA))[0]
    assert any((stored[name] - exact[name]).abs().max() > 0.1 * exact[name].abs().max() for name in exact)
    training = Job(path, steps=2, micro_batches=2, lora=DROPPING)
    then = pool.run(train_and_save, layout, training, tmp_path)
    step = next(iter(tmp_path.glob("step*")))
    for mine, theirs in zip(pool.run(resume, layout, training, step), then, strict=True):
        assert (mine.report, mine.random) == (theirs.report, theirs.random)


def test_the_fingerprint_of_the_base_is_the_same_on_every_layout(pool: Pool, path: Path) -> None:
    prints = {print for layout in (Layout(), LAYOUTS["tp2_ep2"]) for *_, print in pool.run(scores, layout, Job(path, lora=LORA))}
    assert len(prints) == 1


@pytest.mark.parametrize("name", rows(["dpo", "rm", "sft"], ["dpo"]))
def test_the_supervised_stages_train_adapters(pool: Pool, path: Path, name: str) -> None:
    """The same metrics on one rank and on several; DPO's reference is the model without its adapters: nothing has moved at first."""
    [one] = pool.run(supervised, Layout(), path, name, LORA)
    ranks = pool.run(supervised, LAYOUTS["tp2_ep2"], path, name, LORA)
    many = [merge(rank[step] for rank in ranks) for step in range(3)]
    for index, metrics in enumerate(one):
        rel, distance = (1e-5, 1e-6) if index < 2 else (1e-3, 1e-4)  # as in test_supervised_worker
        wanted = pytest.approx(counted(metrics), rel=rel, abs=distance)
        assert counted(many[index]) == wanted
    before, update, after = map(scalars, one)
    role = "rm" if name == "rm" else "actor"
    assert update[f"{role}/grad_norm"] > 1e-3 and after[f"{name}/loss"] != before[f"{name}/loss"]
    if name == "dpo":
        assert before["dpo/margin"] == before["dpo/chosen_shift"] == 0.0 != after["dpo/chosen_shift"]


@pytest.mark.long
def test_adapters_of_the_full_rank_learn_what_the_weights_themselves_learn(pool: Pool, path: Path) -> None:
    """Of the matrices that a rank of 64 exhausts: after 60 steps on the same texts, at least 0.9 of what training all weights gains."""
    lora = LoraSettings(rank=64, alpha=64.0, targets=["k_proj", "v_proj", "experts"])
    [adapters], [weights] = (pool.run(memorised, Layout(), path, one, 60) for one in (lora, None))
    assert adapters[0] == pytest.approx(weights[0], abs=1e-6) and weights[-1] < 0.5 * weights[0]
    assert adapters[0] - adapters[-1] >= 0.9 * (weights[0] - weights[-1])


def test_peft_computes_what_the_merged_model_does(pool: Pool, path: Path, tmp_path: Path) -> None:
    """The library itself, where it is installed: it reads the directory onto the base, as transformers does the merged model."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    pool.run(saved, LAYOUTS["tp2_ep2"], Job(path, lora=LORA), tmp_path / "merged")
    tokens = torch.arange(24)[None]
    base, merged = (transformers.AutoModelForCausalLM.from_pretrained(one, dtype=torch.float32) for one in (path, tmp_path / "merged"))
    with torch.no_grad():
        plain, wanted = base(tokens).logits, merged(tokens).logits
        found = peft.PeftModel.from_pretrained(base, tmp_path / "merged" / PEFT_FOLDER)(tokens).logits
    assert (found - wanted).abs().max() <= 1e-4 < (plain - wanted).abs().max()

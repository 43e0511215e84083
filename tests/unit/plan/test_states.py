"""What `megarl plan` says that ranks and engines hold, against formulas, published sizes and a measured GPU."""

import json
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest

from megarl.config import Layout, ModelSettings, MuonSettings, OptimizerSettings, TrainConfig, load
from megarl.models.description import ModelDescription
from megarl.models.hf import stack_of
from megarl.plan.activations import MicroBatchShape, layer_bytes
from megarl.plan.devices import DEVICES, FLOAT32, LAYER_LATENCY, TRAIN_MFU
from megarl.plan.engines import cache_bytes, engine_weights
from megarl.plan.facts import facts
from megarl.plan.forward import forward_flops, predictor_flops, stage_seconds
from megarl.plan.parameters import ChunkParameters, count, model_elements, replicas, shards
from megarl.plan.ranks import PlannedModel, Work, plan_group
from megarl.plan.states import states
from megarl.plan.whole import Plan
from tests.published_models import MODELS, QWEN3_VL_30B_A3B, config_of, description_of
from tests.unit.examples.test_configurations import EXAMPLES
from tests.unit.plan.planning import ADAM, GSPO, planned


@pytest.mark.parametrize(
    ("layers", "whole", "fused", "recompute", "measured"),
    [
        (2, False, True, "none", 16_011_111_936),
        (2, False, True, "full", 12_635_018_752),
        (2, False, False, "none", 17_579_247_104),
        (2, False, False, "full", 13_524_523_008),
        (4, True, True, "none", 69_991_907_328),  # of an RL run; the formulas were made from the others
    ],
)
def test_a_rank_on_a_gpu_peaks_where_an_h200_did(layers: int, whole: bool, fused: bool, recompute: str, measured: int) -> None:
    """Layers of Qwen3-30B-A3B, 16,384 tokens, on 2026-11-26; CUDA's libraries had 0.3 GB of their own."""
    config = config_of(MODELS["Qwen3-30B-A3B"]) | {"num_hidden_layers": layers}
    config |= {} if whole else {"num_experts": 16, "vocab_size": 75_968}
    role = PlannedModel("policy", ModelDescription.of(config), ADAM, value=False, micro_batch_tokens=16_384)
    settings = ModelSettings(path=Path("model"), dtype="bfloat16", recompute=recompute)  # type: ignore[arg-type]
    [stage] = plan_group([role], Layout(), settings, Work(16_384, 1, 0, fused=fused)).stages
    peak = stage.total - stage.parts["context"]
    assert peak <= measured and peak == pytest.approx(measured, rel=0.02)


def offloaded(share: float) -> OptimizerSettings:
    return OptimizerSettings(megatron={"optimizer_cpu_offload": True, "optimizer_offload_fraction": share})


@pytest.mark.parametrize("name", MODELS)
def test_ranks_of_a_large_layout_hold_the_model_once_for_each_replica(name: str) -> None:
    """Weights in bfloat16, gradients and Adam: 2 + 4 + 12 / replicas bytes a parameter, but for padding; 2 of an indexer's."""
    published, model = MODELS[name], description_of(MODELS[name])
    layout, fields = published.layout, {} if published.first is None else {"num_layers_in_first_pipeline_stage": published.first}
    stages = shards(model, "lm", layout, fields)
    experts = sum(count(chunk.experts) for stage in stages for chunk in stage) * layout.ep * layout.etp
    tensors = model.expected()
    routed = {key: prod(shape) for key, shape in tensors.items() if ".experts." in key or stack_of(model.family, key)[1] >= 0}
    assert experts == sum(routed.values())
    assert model_elements(model) == published.parameters - sum(
        prod(s) for key, s in tensors.items() if key.endswith("e_score_correction_bias")
    )
    for stage in stages:
        dense = sum(count(chunk.dense) for chunk in stage)
        inside = sum(count(chunk.experts) for chunk in stage)
        copies = replicas(layout)
        expected = (2 + 4) * (dense + inside) + 12 * (dense / copies[0] + inside / copies[1])
        expected += 2 * sum(chunk.frozen for chunk in stage)
        held, half = (states(stage, layout, "bfloat16", optimizer) for optimizer in (ADAM, offloaded(0.5)))
        assert held.total == pytest.approx(expected, rel=1e-4) and held.host == 0
        assert held.optimizer - half.optimizer == pytest.approx(held.optimizer / 3, rel=1e-4), "half of the two moments of three float32"
        moments = held.optimizer / 3
        assert moments < half.host - moments < 2 * moments, "beside them copies of main weights and gradients, in blocks of pinned memory"


def test_a_predictor_costs_parameters_flops_and_time_where_it_is_trained(published: Path) -> None:
    """By hand, of DeepSeek-V3: attention, an expert for all tokens and 8 of 256, the projection of two states to one; norms."""
    given = (EXAMPLES / "deepseek_v3" / "gspo.yaml", [f"model.path={published / 'DeepSeek-V3'}"])
    with_it, without = (planned(load(given[0], [*given[1], f"model.mtp={mtp}"], TrainConfig), 128) for mtp in ("train", "drop"))
    width, heads, vocab, expert = 7168, 128, 129_280, 3 * 7168 * 2048
    latents = width * 1536 + 1536 * heads * 192 + width * (512 + 64) + 512 * heads * 256
    dense = latents + heads * 128 * width + expert + 256 * width + 2 * width * width + 5 * width + 1536 + 512
    assert with_it.parameters - without.parameters == dense + 256 * expert
    model = replace(description_of(MODELS["DeepSeek-V3"]), mtp="train")
    flops = predictor_flops(facts(model), 4096)
    assert flops == pytest.approx(2 * (dense + 8 * expert) + 4 * heads * 160 * 2048 + 2 * vocab * width * 2 / 3)
    assert predictor_flops(facts(model.trunk), 4096) == 0
    layout, elements = Layout(ranks=4, pp=4), model_elements(model)
    ends = {"num_layers_in_first_pipeline_stage": 13}
    longer, stages = (
        stage_seconds(facts(one), elements, layout, ends, DEVICES["H100"], 8192, 4096, training=False) for one in (model, model.trunk)
    )
    assert longer[:-1] == stages[:-1]
    assert longer[-1] - stages[-1] >= 8192 * flops / (DEVICES["H100"].flops * TRAIN_MFU) + LAYER_LATENCY
    trained, dropped = with_it.times, without.times
    assert trained is not None and dropped is not None
    phases = [(times.generate, times.score, times.sync) for times in (trained, dropped)]
    assert phases[0] == phases[1] and trained.update > 1.01 * dropped.update


@pytest.mark.parametrize("name", ["DeepSeek-V3.2", "GLM-5"])
def test_an_indexer_costs_weights_masks_and_time_and_no_optimizer(name: str) -> None:
    n = MODELS[name].config
    sparse, dense = (facts(ModelDescription.of({**config_of(MODELS[name]), "index_topk": topk})) for topk in (2048, 8192))
    shape = MicroBatchShape(rows=16384, longest=8192, layout=Layout(), dtype="bfloat16", spec="te")
    kept = [layer_bytes(model, shape, experts=True, linear=False)["attention"] for model in (sparse, dense)]
    assert kept[0] - kept[1] == 2 * 16384 * 8192, "a mask for each of the two sequences, in bfloat16"
    flops = [forward_flops(model, 0, 8192) for model in (sparse, dense)]
    heads = n["num_attention_heads"] * (n["qk_nope_head_dim"] + n["qk_rope_head_dim"] + n["v_head_dim"])
    own = n["index_n_heads"] * n["index_head_dim"]
    assert flops[0] - flops[1] == n["num_hidden_layers"] * 8192 * (heads + 2 * FLOAT32 * own)
    [[chunk]] = shards(description_of(MODELS[name]), "lm", Layout(), {})
    whole, other = (states([one], Layout(), "bfloat16", ADAM) for one in (chunk, replace(chunk, frozen=0)))
    assert (whole.weights - other.weights, whole.gradients, whole.optimizer) == (2 * chunk.frozen, other.gradients, other.optimizer)
    assert chunk.frozen == sum(prod(shape) for key, shape in description_of(MODELS[name]).expected().items() if ".indexer." in key)


def test_muon_keeps_one_moment_of_matrices() -> None:
    """Of a rank whose slice is all embedding there are two of everything."""
    chunk = ChunkParameters(dense=((1 << 20, 3), (1 << 10, 2)), experts=((1 << 21, 8),), dense_matrices=2 << 20, expert_matrices=8 << 21)
    muon = OptimizerSettings(muon=MuonSettings())
    one, two = (states([chunk], Layout(ranks=ranks), "bfloat16", muon) for ranks in (1, 4))
    elements, others = (3 << 20) + (2 << 10) + (8 << 21), (1 << 20) + (2 << 10)
    assert one.optimizer == 8 * elements + 4 * others
    assert two.optimizer == 8 * elements // 4 + 4 * ((3 << 20) + (2 << 10)) // 4, "the slice of dense parameters, and no expert's"
    model = description_of(MODELS["Qwen3-30B-A3B"])
    [[whole]] = shards(model, "lm", Layout(), {})
    parts = {name: prod(shape) for name, shape in model.expected().items()}
    matrices = sum(size for name, size in parts.items() if name.endswith("_proj.weight"))
    assert whole.dense_matrices + whole.expert_matrices == matrices > 0.9 * sum(parts.values())


def test_pinned_copies_of_an_offloaded_optimizer_take_powers_of_two() -> None:
    chunk = ChunkParameters(dense=((1 << 20, 2),), experts=((3 << 20, 4),))  # 4 and 12 MiB in float32, for which torch takes 4 and 16
    host = states([chunk], Layout(), "bfloat16", offloaded(1.0)).host
    assert host == 14 * (8 << 20) + 2 * (2 * (4 << 20) + 4 * (16 << 20)), "moments, and copies of main weights and gradients"


def test_an_optimizer_in_host_memory_takes_its_time(published: Path) -> None:
    one_node = load(EXAMPLES / "qwen3_30b_a3b/one_node_80gb.yaml", [f"model.path={published / 'Qwen3-30B-A3B'}"], TrainConfig)
    assert one_node.optimizers["optimizer"].offloaded == 1
    on_gpus = one_node.model_copy(update={"optimizer": one_node.optimizer.model_copy(update={"megatron": {}})})
    (away, there), updates = (
        (planned(config, 8).times for config in (one_node, on_gpus)),
        one_node.train.mini_batches * one_node.train.epochs,
    )
    assert away is not None and there is not None and away.generate == there.generate
    elements = 30.5e9 / 8  # of Adam on a rank, each 28 bytes of host memory at 40 GB/s and 8 on the way at 25
    assert (away.update - there.update) / updates == pytest.approx(elements * (28 / 40e9 + 8 / 25e9), rel=0.4), "blocks are counted too"


def test_each_sender_keeps_the_buckets_of_the_weights_between_updates(published: Path) -> None:
    def stages(transport: str) -> tuple[Plan, dict[str, float], dict[str, float]]:
        given = [f"model.path={published / 'Qwen3-30B-A3B'}", f"sync.transport={transport}", "layout.pp=2"]
        plan = planned(load(GSPO, given, TrainConfig))
        first, last = plan.groups[0].stages
        return plan, first.parts, last.parts

    table = 151936 * 2048 * 2  # bytes of the embedding, for which a bucket of 512 MiB grows
    (_, first, last), (_, shared, _) = stages("nccl"), stages("gloo")
    assert first["sync buckets"] == last["sync buckets"] == 2 * table and "sync buckets" not in shared
    one_node = load(EXAMPLES / "qwen3_30b_a3b/one_node.yaml", [f"model.path={published / 'Qwen3-30B-A3B'}"], TrainConfig)
    assert planned(one_node, 8).kept == 2 * table
    full = planned(one_node.model_copy(update={"rollout": one_node.rollout.model_copy(update={"gpu_memory_fraction": 0.98})}), 8)
    assert any(fault.startswith("rollout.gpu_memory_fraction=0.98: ") and "3.2 GB of a rank that waits" in fault for fault in full.faults)


@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "Llama-3-70B", "GLM-4.5-Air"])
def test_the_gpus_of_an_engine_hold_the_model_once(name: str) -> None:
    """What is copied to each (norms, routers; keys and values where there are fewer heads than GPUs) is small."""
    model = description_of(MODELS[name])
    whole = 2 * sum(prod(shape) for shape in model.expected().values())
    assert engine_weights(model, 1, "bfloat16") == pytest.approx(whole, rel=1e-4)
    assert whole < 8 * engine_weights(model, 8, "bfloat16") < 1.02 * whole
    its = facts(model)
    assert cache_bytes(its, 1, "bfloat16") == 4 * its.n.layers * its.n.groups * its.n.head_dim
    assert 8 * cache_bytes(its, 8, "bfloat16") == max(8 / its.n.groups, 1) * cache_bytes(its, 1, "bfloat16")


def test_what_is_cut_further_takes_less_and_recomputation_spares(published: Path) -> None:
    config = load(GSPO, [f"model.path={published / 'Qwen3-30B-A3B'}"], TrainConfig)

    def bytes_of(**changes: Any) -> float:
        changed = config.model_copy(
            update={
                "layout": config.layout.model_copy(update={key: value for key, value in changes.items() if key in Layout.model_fields}),
                "model": config.model.model_copy(update={key: value for key, value in changes.items() if key == "recompute"}),
            }
        )
        return planned(changed).groups[0].worst.total

    assert bytes_of(tp=4) < bytes_of() < bytes_of(tp=1)
    assert bytes_of(ep=16) < bytes_of() < bytes_of(ep=4)
    assert bytes_of(pp=2) < bytes_of() and bytes_of(cp=2) < bytes_of()
    assert bytes_of() < bytes_of(recompute="selective") <= bytes_of(recompute="none")


def test_a_model_that_sees_images_is_planned_with_its_tower(tmp_path: Path) -> None:
    """In bfloat16 without gradients, on the ranks of the first stage."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_VL_30B_A3B))
    model, text = ModelDescription.read(tmp_path), description_of(MODELS["Qwen3-30B-A3B"])
    for layout in (Layout(ranks=8, tp=2, ep=4), Layout(ranks=16, pp=2, vpp=2, ep=8)):
        [first, *rest], [one, *others] = (shards(which, "lm", layout, {}) for which in (model, text))
        assert first[0] == replace(one[0], frozen=538_631_408) and first[1:] == one[1:] and rest == others
        trained = shards(model, "lm", layout, {}, tower=True)[0][0]
        assert trained.frozen == 0 and trained.elements == first[0].elements

"""`megarl plan`: the command, its examples, its laws, and what a check refuses with it."""

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table

from megarl.checks.memory import check_fits, warnings
from megarl.cli import main
from megarl.config import ConfigError, Layout, ModelSettings, MuonSettings, OptimizerSettings, SftConfig, TrainConfig, load
from megarl.models.description import ModelDescription
from megarl.models.hf import stack_of
from megarl.plan.activations import MicroBatchShape, layer_bytes
from megarl.plan.devices import DEVICES, FLOAT32, GB, LAYER_LATENCY, TRAIN_MFU, device_named, device_of, in_nodes
from megarl.plan.engines import cache_bytes, engine_weights
from megarl.plan.facts import facts
from megarl.plan.forward import forward_flops, predictor_flops, stage_seconds
from megarl.plan.host import NodeMemory, contexts
from megarl.plan.parameters import ChunkParameters, count, model_elements, replicas, shards
from megarl.plan.ranks import CONTEXT, PlannedModel, Work, plan_group
from megarl.plan.search import search
from megarl.plan.show import tables
from megarl.plan.states import states
from megarl.plan.times import StepTimes
from megarl.plan.whole import Plan, build, models_of
from tests.e2e.test_environments import REWRITES
from tests.published_models import MODELS, QWEN3_5_35B_A3B, QWEN3_VL_30B_A3B, config_of, description_of

EXAMPLES = Path(__file__).parents[3] / "examples"
GSPO = EXAMPLES / "qwen3_30b_a3b" / "gspo.yaml"
ADAM = OptimizerSettings()
# Example -> its model, and the GPUs that there are, where these are fewer than ranks and engines apart ask for.
PLANNED: dict[str, tuple[str, int | None]] = {
    "qwen3_30b_a3b/gspo.yaml": ("Qwen3-30B-A3B", None),
    "qwen3_30b_a3b/one_node.yaml": ("Qwen3-30B-A3B", 8),
    "qwen3_30b_a3b/one_node_80gb.yaml": ("Qwen3-30B-A3B", 8),
    "qwen3_235b_a22b/gspo.yaml": ("Qwen3-235B-A22B", None),
    "qwen3_5_35b_a3b/gspo.yaml": ("Qwen3.5-35B-A3B", None),
    "deepseek_v3/gspo.yaml": ("DeepSeek-V3", 128),
    "deepseek_v3/gspo_fp8.yaml": ("DeepSeek-V3", 128),
    "gpt_oss_120b/gspo.yaml": ("gpt-oss-120b", None),
    "kimi_k2/gspo.yaml": ("Kimi-K2-Instruct", 256),
    **{f"recipes/large/{path.name}": ("Qwen3-30B-A3B", None) for path in (EXAMPLES / "recipes" / "large").glob("*.yaml")},
}
del PLANNED["recipes/large/sft.yaml"]  # of another verb


def planned(config: TrainConfig, gpus: int | None = None, memory_gb: float | None = None) -> Plan:
    memory = memory_gb or config.cluster.gpu_memory_gb or 80
    return build(config, models_of(config), device_of(memory, config.cluster.gpus_per_node), memory, gpus)


@pytest.mark.parametrize("example", PLANNED)
def test_the_large_examples_fit(published: Path, example: str) -> None:
    model, gpus = PLANNED[example]
    config = load(EXAMPLES / example, [f"model.path={published / model}"], TrainConfig)
    plan = planned(config, gpus)
    assert config.cluster.gpu_memory_gb is not None and plan.faults == []
    assert plan.host is not None and plan.host.payload.warning is None
    assert plan.notes == [], "no example assumes what no run has"
    assert plan.engine is not None and plan.engine.tp <= 8


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


@pytest.mark.parametrize(
    ("example", "gpus", "override", "gb"),
    [
        ("recipes/large/vapo.yaml", 32, "placement.offload=false", 80),  # both models on the device at once
        ("qwen3_30b_a3b/one_node.yaml", 8, "placement.engines=apart", 80),  # on too few GPUs for that
    ],
)
def test_layouts_that_are_named_fit_and_are_what_their_overrides_make(
    published: Path, example: str, gpus: int, override: str, gb: float
) -> None:
    """What does not fit is told with both numbers, and each layout that is named instead is planned anew, from its overrides."""
    given = [f"model.path={published / 'Qwen3-30B-A3B'}", f"cluster.gpu_memory_gb={gb}", override]
    path = EXAMPLES / example
    config = load(path, given, TrainConfig)
    plan = planned(config, gpus)
    assert plan.faults[0].startswith("layout: rank 0 ") and "and a GPU has 80 GB; it would need " in plan.faults[0]
    found = search(config, models_of(config), DEVICES["H100"], gb, gpus, most=4)
    assert len({one.changes for one in found}) == len(found) == 4
    for one in found:
        anew = planned(load(path, [*given, *one.changes], TrainConfig), gpus)
        assert not anew.faults and anew.groups[0].layout == one.layout and anew.times is not None
        assert anew.times.step == pytest.approx(one.seconds) and max(group.worst.total for group in anew.groups) == one.bytes


def test_a_rank_and_an_engine_on_one_gpu_are_both_there_in_a_weight_update(published: Path) -> None:
    """The rank's weights alone, beside the engine's: gradients and optimizer have left. Apart they need two GPUs, and each less of it."""
    path = published / "Qwen3-30B-A3B"
    one = ["layout={}", "rollout.replicas=1", "rollout.tp=1", "sync.transport=cuda_ipc", f"model.path={path}"]
    turns, apart = (planned(load(GSPO, [*one, f"placement.engines={how}"], TrainConfig), memory_gb=625) for how in ("shared", "apart"))
    assert (turns.gpus, turns.shared, apart.gpus, apart.shared) == (1, True, 2, False)
    assert turns.beside == pytest.approx(2 * turns.parameters + CONTEXT, rel=0.01) and apart.beside == 0
    assert apart.faults == turns.faults == turns.notes == []
    tight = planned(load(GSPO, [*one, "placement.engines=shared"], TrainConfig), memory_gb=130)
    assert tight.engine is not None
    [fault] = [fault for fault in tight.faults if "in a weight update" in fault]
    parts = [tight.engine.weights, tight.engine.overhead, tight.beside, tight.receiver]
    assert re.findall(r"\d+\.\d", fault) == [f"{size / GB:.1f}" for size in (*parts, sum(parts))]
    assert fault.startswith("rollout.tp=1: in a weight update") and "gpu_memory_fraction" not in fault
    assert turns.host is not None and turns.host.waiting == pytest.approx(14 * turns.parameters, rel=0.01)


@pytest.mark.parametrize(("generate", "sync", "ahead"), [(10.0, 19.0, 11.0), (3.0, 12.0, 9.0)], ids=["engines slower", "ranks slower"])
def test_a_step_of_engines_that_are_ahead_takes_as_long_as_the_slower_side(generate: float, sync: float, ahead: float) -> None:
    times = StepTimes(generate, score=2.0, update=5.0, sync=1.0, park=1.0, ahead=False)
    assert (times.step, replace(times, ahead=True).step) == (sync, ahead)


def test_engines_are_ahead_where_the_mode_says_so_and_they_have_gpus_of_their_own(published: Path) -> None:
    given = [f"model.path={published / 'Qwen3-30B-A3B'}", "algorithm.correction={type: tis}"]
    modes = [[], ["rollout.mode=ahead"], ["rollout.mode=budget", "rollout.budget_tokens=1024"], ["rollout.mode=free", "rollout.max_lag=2"]]
    configs = [load(GSPO, [*given, *mode], TrainConfig) for mode in modes]
    sync, *others = [planned(config) for config in configs]
    assert sync.times is not None and not sync.times.ahead
    ahead, budget, free = (other.times for other in others)
    assert ahead == budget == replace(sync.times, ahead=True)
    assert free is not None and replace(free, generate=sync.times.generate) == ahead and free.generate < sync.times.generate, "no tail"
    payloads = [plan.host.payload for plan in (sync, *others) if plan.host is not None]
    assert [payload.batches for payload in payloads] == [1, 2, 3, 4] and len({payload.step for payload in payloads}) == 1
    store = payloads[0].step / payloads[0].nodes * 2.5
    assert [replace(payload, store=store).warning is not None for payload in payloads] == [False, False, True, True]
    titles = [[part.title for part in tables(plan, []) if isinstance(part, Table)] for plan in (sync, others[0])]
    assert [any("longer of generate and of score + update" in str(title) for title in each) for each in titles] == [False, True]
    few = [search(config, models_of(config), DEVICES["H100"], 80, 16) for config in configs[:2]]
    assert [{"placement.engines=shared" in one.changes for one in each} for each in few] == [{True}, {False}], "they cannot take turns"


def test_an_episode_of_a_template_that_rewrites_turns_reads_its_context_in_every_turn(
    published: Path, tiny_model: Path, tmp_path: Path
) -> None:
    """A template that only appends reads it once; of one that is not there the most is planned."""
    tiny = {name: tmp_path / name for name in ("appends", "rewrites")}
    for path in tiny.values():
        shutil.copytree(tiny_model, path)
    (tiny["rewrites"] / "chat_template.jinja").write_text(REWRITES)
    game = ["environment={source: {type: textarena, id: x}, max_turns: 5}", "data.train={type: episodes, seed: 1, items: 64}"]
    models = {**tiny, "absent": published / "Qwen3-30B-A3B"}
    configs = {name: load(GSPO, [f"model.path={path}", "routing.replay=r3"], TrainConfig) for name, path in models.items()}
    assert [contexts(config) for config in configs.values()] == [1, 1, 1], "without an environment"
    played = {name: load(GSPO, [f"model.path={path}", "routing.replay=r3", *game], TrainConfig) for name, path in models.items()}
    assert {name: contexts(config) for name, config in played.items()} == {"appends": 1, "rewrites": 5, "absent": 5}
    hosts = [planned(config).host for config in (configs["absent"], played["absent"])]
    one, several = (host for host in hosts if host is not None)
    assert several.routes == 5 * one.routes > 0 and several.payload.step == pytest.approx(5 * one.payload.step)


def test_a_check_refuses_what_does_not_fit_where_it_knows_the_memory(published: Path) -> None:
    path = f"model.path={published / 'Qwen3-30B-A3B'}"
    check_fits(load(GSPO, [path], TrainConfig))
    check_fits(load(GSPO, [path, "cluster.gpu_memory_gb=null", "layout.ep=1"], TrainConfig))
    check_fits(load(GSPO, [path, "cluster.gpus=false", "layout.ep=1"], TrainConfig))
    with pytest.raises(ConfigError, match=r"^layout: rank 0 \(pipeline stage 0\) of policy needs \d+\.\d GB .* a GPU has 80 GB"):
        check_fits(load(GSPO, [path, "layout.ep=1"], TrainConfig))
    with pytest.raises(ConfigError, match=r"^rollout\.tp=1: weights 61\.1 GB .* one sequence of 10240 tokens takes"):
        check_fits(load(GSPO, [path, "rollout.tp=1", "rollout.gpu_memory_fraction=0.8"], TrainConfig))
    host = planned(load(GSPO, [path, "routing.replay=r3"], TrainConfig)).host
    assert host is not None
    needed = [path, "routing.replay=r3", f"cluster.host_memory_gb={host.total / GB + 1}"]
    check_fits(load(GSPO, needed, TrainConfig))
    with pytest.raises(
        ConfigError, match=r"^cluster\.host_memory_gb=[\d.]+: a node needs \d+ GB: .* the experts of a step's tokens \d+\.\d"
    ):
        check_fits(load(GSPO, [*needed, "rollout.samples_per_prompt=64"], TrainConfig))


def test_a_store_that_is_too_small_is_warned_of_with_the_size_that_holds(published: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Experts of all tokens exceed the default of 200 MB; `megarl plan` says so, and so does a check (tests/unit/test_cli.py)."""
    given = [f"model.path={published / 'Qwen3-30B-A3B'}", "routing.replay=r3", "cluster.object_store_mb=200"]
    [warning] = warnings(load(GSPO, given, TrainConfig))
    assert (
        match := re.fullmatch(r"cluster\.object_store_mb=200: .* take 4\.1 GB, more than 2 x 0\.2: .*; (\d+) holds them", warning)
    ) is not None
    enough, too_small = int(match[1]), int(match[1]) - 1
    for size, line in ((enough, None), (too_small, f"warning: cluster.object_store_mb={too_small}: ")):
        assert main(["plan", str(GSPO), *given, f"cluster.object_store_mb={size}"]) == 0
        said = capsys.readouterr().out
        assert line in said if line else "warning: " not in said


def test_the_command_prints_tables_and_json_without_megatron(published: Path) -> None:
    code = (
        "import sys; from megarl.cli import main; main(sys.argv[1:]); print('JSON'); main([*sys.argv[1:], '--json']);"
        "assert not {'megatron', 'ray', 'vllm'} & set(sys.modules)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, "plan", str(GSPO), f"model.path={published / 'Qwen3-30B-A3B'}"], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    tables, plain = run.stdout.split("JSON\n")
    assert "worst" in tables and tables.rstrip().endswith("fits")
    told = json.loads(plain)
    [group] = told["groups"]
    assert told["faults"] == [] and told["layouts"] and f"{group['stages'][0]['total'] / GB:.1f}" in tables


@pytest.mark.parametrize(
    ("more", "line"),
    [
        (["layout.tp=3", "layout.ranks=24"], "layout.tp=3: model has 32 attention heads"),
        (["model.megatron.hidden_sise=1"], "model.megatron.hidden_sise: no such field"),
        (["rollout.tp=5"], "rollout.tp=5: does not divide"),
        (["--gpus", "0"], "plan: --gpus 0: must be above 0"),
        (["--gpu-gb", "nan"], "plan: --gpu-gb nan: must be above 0"),
        (["model.path=nowhere"], "model.path: no such directory: "),
        (["cluster.gpu_memory_gb=-1"], "cluster.gpu_memory_gb: Input should be greater than 0"),
    ],
)
def test_bad_input_is_refused_in_one_line(published: Path, capsys: pytest.CaptureFixture[str], more: list[str], line: str) -> None:
    assert main(["plan", str(GSPO), f"model.path={published / 'Qwen3-30B-A3B'}", *more]) == 2
    [said] = capsys.readouterr().err.splitlines()
    assert said.startswith(f"megarl: error: {line}")


def test_devices_are_found_by_memory() -> None:
    assert [device_of(memory).name for memory in (40, 80, 96, 141, 180, 186, 268, 400)] == [
        *("H100", "H100", "H20", "H200", "B200", "GB200", "B300", "B300")
    ]
    assert replace(DEVICES["H100"], name="H200", memory_gb=141, bandwidth=4.8e12) == DEVICES["H200"]


def test_devices_are_found_by_cudas_names() -> None:
    names = ("NVIDIA H200", "NVIDIA H20", "NVIDIA GB200", "NVIDIA B200", "NVIDIA H100 80GB HBM3", "NVIDIA L4", None)
    devices = [device_named(name) for name in names]
    assert [one and one.name for one in devices] == ["H200", "H20", "GB200", "B200", "H100", None, None]


def test_nodes_of_four_gpus_hold_half_the_ranks_and_end_the_links_earlier(published: Path) -> None:
    path = f"model.path={published / 'Qwen3-30B-A3B'}"

    def plan(*changes: str) -> Plan:
        return planned(load(GSPO, [path, *changes], TrainConfig), 32)

    def node(one: Plan) -> NodeMemory:
        assert one.host is not None
        return one.host

    eight, four = plan(), plan("cluster.gpus_per_node=4")
    assert node(four).ranks == node(eight).ranks / 2 and node(four).routes == node(eight).routes / 2
    assert eight.times is not None and four.times is not None
    assert four.times.update > eight.times.update, "ep8 crosses nodes of four"
    config = load(GSPO, [path], TrainConfig)
    layouts = search(config, models_of(config), device_of(80, 4), 80, 32)
    assert layouts and all(one.layout.tp <= 4 and one.layout.cp <= 4 and one.engine_tp <= 4 for one in layouts)


def test_a_rack_of_gb200_is_linked_across_its_nodes() -> None:
    gb200 = DEVICES["GB200"]
    assert (gb200.node, gb200.linked) == (4, 72) and in_nodes(gb200, 2).linked == 72
    assert in_nodes(DEVICES["H100"], 4) == replace(DEVICES["H100"], node=4, linked=4) and in_nodes(gb200, None) is gb200


def test_a_teacher_takes_ranks_and_time(published: Path) -> None:
    """On ranks of its own it scores beside the policy, on the policy's ranks after it."""
    given = [f"model.path={published / 'Qwen3-8B'}", f"distillation.teacher={published / 'Qwen3-30B-A3B'}"]

    def plan(*changes: str) -> Plan:
        config = load(EXAMPLES / "qwen3_30b_a3b" / "distill_8b.yaml", [*given, *changes], TrainConfig)
        return planned(config, 16, memory_gb=141)

    apart, shared, alone = (
        plan(),
        plan("placement.teacher=null", "layout={ranks: 8, tp: 2}"),
        plan("layout={ranks: 8, tp: 2}", "distillation=null", "placement={}"),
    )
    assert max(group.worst.total for group in apart.groups) < 80 * GB
    assert [group.name for group in apart.groups] == ["policy", "teacher"] and apart.faults == [] and apart.gpus == 16
    assert [group.name for group in shared.groups] == ["policy+teacher"]
    assert apart.times is not None and shared.times is not None and alone.times is not None
    assert shared.times.score > 1.5 * alone.times.score and shared.times.update == alone.times.update


def test_several_teachers_share_ranks_and_tokens(published: Path, tmp_path: Path) -> None:
    """Each takes its memory; a model of two sources is there once, and every token is scored once."""
    large, other, small = published / "Qwen3-30B-A3B", tmp_path / "other", published / "Qwen3-8B"
    shutil.copytree(large, other)

    def plan(teachers: str) -> Plan:
        given = [f"model.path={small}", "distillation.teacher=null", f"distillation.teachers={teachers}"]
        return planned(load(EXAMPLES / "qwen3_30b_a3b" / "distill_8b.yaml", given, TrainConfig), 16, memory_gb=141)

    one, twice, two = plan(f"{{a: {large}}}"), plan(f"{{a: {large}, b: {large}}}"), plan(f"{{a: {large}, b: {other}}}")
    assert [one.groups[1].name, two.groups[1].name] == ["teachers.a", "teachers.a+teachers.b"]
    assert one.groups[1].worst.total == twice.groups[1].worst.total < two.groups[1].worst.total
    assert one.times is not None and two.times is not None and two.times.score == pytest.approx(one.times.score)


def test_a_teachers_engines_take_gpus_memory_and_time(published: Path) -> None:
    """They score beside the policy; each of several teachers has as many; a server takes no GPU."""
    given = [f"model.path={published / 'Qwen3-8B'}", f"distillation.teacher={published / 'Qwen3-30B-A3B'}", "placement.teacher=null"]

    def plan(*changes: str, memory: int = 80) -> Plan:
        config = load(EXAMPLES / "qwen3_30b_a3b" / "distill_8b.yaml", [*given, "layout={ranks: 4, tp: 2}", *changes], TrainConfig)
        return planned(config, 16, memory_gb=memory)

    two = plan("placement.teacher_engines={replicas: 2, tp: 2}")
    assert [group.name for group in two.groups] == ["policy"] and two.faults == [] and two.teaching == 4
    assert list(two.teachers) == ["teacher"] and 30 * GB < two.teachers["teacher"].weights < 31 * GB
    four = plan("placement.teacher_engines={replicas: 4, tp: 2}")
    assert four.faults == ["layout: ranks and engines need 20 GPUs, but there are 16"]
    small = plan("placement.teacher_engines={tp: 1}", memory=60)
    assert small.faults[-1].startswith("distillation.teacher: on placement.teacher_engines.tp=1, weights 61.1 GB and buffers ")
    served = plan("distillation={server: {url: 'http://h/v1', model: m}}")
    assert (served.teaching, served.teachers) == (0, {}) and served.notes == [
        "distillation.server: a server scores beside the policy, in no more time"
    ]
    assert two.times is not None and four.times is not None and served.times is not None
    assert two.times.score >= four.times.score >= served.times.score


def test_a_model_that_sees_images_is_planned_with_its_tower(tmp_path: Path) -> None:
    """In bfloat16 without gradients, on the ranks of the first stage."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_VL_30B_A3B))
    model, text = ModelDescription.read(tmp_path), description_of(MODELS["Qwen3-30B-A3B"])
    for layout in (Layout(ranks=8, tp=2, ep=4), Layout(ranks=16, pp=2, vpp=2, ep=8)):
        [first, *rest], [one, *others] = (shards(which, "lm", layout, {}) for which in (model, text))
        assert first[0] == replace(one[0], frozen=538_631_408) and first[1:] == one[1:] and rest == others
        trained = shards(model, "lm", layout, {}, tower=True)[0][0]
        assert trained.frozen == 0 and trained.elements == first[0].elements


@pytest.mark.parametrize(
    ("example", "kind", "model"),
    [
        ("qwen3_vl_30b_a3b/sft", SftConfig, QWEN3_VL_30B_A3B),
        ("qwen3_vl_30b_a3b/gspo", TrainConfig, QWEN3_VL_30B_A3B),
        ("qwen3_5_35b_a3b/gspo_images", TrainConfig, QWEN3_5_35B_A3B),
    ],
)
def test_the_examples_with_images_fit(tmp_path: Path, example: str, kind: Any, model: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model))
    config = load(EXAMPLES / f"{example}.yaml", [f"model.path={tmp_path}"], kind)
    plan = build(config, models_of(config), device_of(80, config.cluster.gpus_per_node), 80, None)
    assert plan.faults == []

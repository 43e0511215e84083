"""Engines of one node and of several: what a GPU holds, by hand, and what is named where an engine does not fit."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from megarl.config import ConfigError, Layout, RolloutSettings, SyncSettings, TrainConfig, load
from megarl.engines.registry import check_engine
from megarl.engines.vllm.launch import vllm_names
from megarl.models.description import ModelDescription
from megarl.models.families import FAMILIES
from megarl.models.weight_map import FP8
from megarl.plan import forward, generation, times
from megarl.plan.devices import DEVICES, GB
from megarl.plan.engines import OVERHEAD, EngineMemory, engine_weights, plan_engine, splits_tokens, weight_parts
from megarl.plan.facts import facts
from megarl.plan.search import nearest, search
from megarl.plan.sync import QUANTIZED, receiver_bytes, sender_bytes, sent_bytes
from megarl.plan.whole import Plan, build, models_of
from tests.published_models import MODELS, config_of, description_of
from tests.rows import rows
from tests.unit.examples.test_configurations import EXAMPLES

H200 = DEVICES["H200"]
SMALL_CONFIG = {
    **config_of(MODELS["Qwen3-30B-A3B"]),
    **{"num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
    **{"vocab_size": 1024, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
}
SMALL = ModelDescription.of(SMALL_CONFIG)
# Elements on a rank of SMALL with tp 2: two query heads and a pair of key-value heads, the output projection; norms, router; tables.
MATRICES = (2 + 2) * 64 * 256 + 256 * 2 * 64
REST, TABLES = 2 * 256 + 2 * 64 + 6 * 256, 256 + 2 * 1024 // 2 * 256
EXPERT = 3 * 256 * 128


@pytest.mark.parametrize(
    ("dp", "apart", "experts"),
    [
        (1, False, 6 * EXPERT // 2),  # a slice of each
        (1, True, 3 * EXPERT),
        (2, False, 6 * EXPERT // 4),
        (2, True, 2 * EXPERT),  # six on four ranks: the first two have two, and are the fullest
    ],
)
def test_a_rank_holds_what_is_counted_by_hand(dp: int, apart: bool, experts: int) -> None:
    held, routed = weight_parts(SMALL, 2, "bfloat16", dp, expert_parallel=apart)
    assert held == 2 * (2 * (MATRICES + REST) + TABLES), "however many data-parallel ranks there are"
    assert routed == 2 * 2 * experts and engine_weights(SMALL, 2, "bfloat16", dp, expert_parallel=apart) == held + routed
    held, routed = weight_parts(SMALL, 2, "bfloat16", dp, expert_parallel=apart, fp8=True)
    scaled = 1 + 4 / 128**2  # a float32 scale to each block
    assert held == pytest.approx(2 * (scaled * MATRICES + 2 * REST) + 2 * TABLES, abs=1)
    assert routed == pytest.approx(2 * scaled * experts, abs=1)


def test_shared_experts_are_whole_where_ranks_split_the_tokens_and_latents_stay_unquantised() -> None:
    deepseek, glm = (description_of(MODELS[name]) for name in ("DeepSeek-V3", "GLM-4.5-Air"))
    for model, whole in ((deepseek, True), (glm, False)):
        n = facts(model).n
        sliced, apart = (weight_parts(model, 4, "bfloat16", 2, expert_parallel=apart)[0] for apart in (False, True))
        assert apart - sliced == whole * 2 * (n.layers - n.dense) * 3 * n.hidden * n.shared_ffn * 3 // 4
        assert weight_parts(model, 4, "bfloat16", 1, expert_parallel=True)[0] == sliced, "of one data-parallel rank they never are"
    its = facts(deepseek)
    assert its.latents is not None
    twice = its.n.layers * its.n.heads // 8 * (its.latents.plain + its.latents.value) * its.latents.key_value * 2
    table = 2 * 2 * its.n.vocab * its.n.hidden // 8
    assert weight_parts(deepseek, 8, "bfloat16", fp8=True)[0] > twice + table


def test_layers_with_a_window_keep_its_tokens_alone() -> None:
    """Half of gpt-oss-20b's 24 layers: 8 heads of 64 for keys and for values, in bfloat16, split over two GPUs."""
    settings = RolloutSettings(tp=2, max_prompt_tokens=1024, max_response_tokens=7168)
    engine = plan_engine(description_of(MODELS["gpt-oss-20b"]), settings, "bfloat16", 80 * GB)
    layer = 2 * 8 * 64 * 2 // 2
    assert engine.sequence(8192) == 12 * layer * (8192 + 128) and engine.sequence(100) == 24 * layer * 100
    assert engine.live == pytest.approx(engine.cache / engine.sequence(8192))


def test_each_data_parallel_rank_has_sequences_of_its_own() -> None:
    given: dict[str, Any] = {"tp": 2, "max_prompt_tokens": 100, "max_response_tokens": 156, "max_num_seqs": 8}
    one, two = (plan_engine(SMALL, RolloutSettings(**given, dp=dp), "bfloat16", 80 * GB) for dp in (1, 2))
    assert one.token == two.token == 2 * 2 * 64 * 2, "one of two key-value heads, in two layers"
    assert one.live == pytest.approx((0.6 * 80 * GB - one.weights - OVERHEAD - 8 * 1024 * 12) / (one.token * 256))
    gathered = 8_192 * (2 * 2 * 256 + 2 * 256) * 2  # workspaces for two experts of each token, and its hidden states twice
    assert two.overhead == one.overhead + gathered and one.cache - two.cache == gathered + two.weights - one.weights
    assert two.live == pytest.approx(2 * one.live, rel=0.01) and two.devices == 4
    fewer = RolloutSettings.model_validate({**given, "dp": 2, "engine": {"type": "vllm", "args": {"max_num_batched_tokens": 2048}}})
    assert plan_engine(SMALL, fewer, "bfloat16", 80 * GB).overhead == one.overhead + gathered // 4


def test_the_prompt_tokens_of_all_ranks_in_a_step_do_not_grow_with_their_number() -> None:
    of_ranks = [RolloutSettings(dp=dp, max_num_seqs=seqs).step_tokens for dp, seqs in ((1, 256), (4, 256), (8, 256), (64, 256), (64, 4096))]
    assert of_ranks == [16_384, 4_096, 2_048, 2_048, 4_096], (
        "but not so few that prompts take many steps, or a step has no room for a token each"
    )


def test_a_weight_update_is_sent_by_the_first_rank_of_every_stage(published: Path) -> None:
    def seconds(*changes: str) -> float:
        config = load(EXAMPLES / "qwen3_235b_a22b" / "gspo.yaml", [f"model.path={published / 'Qwen3-235B-A22B'}", *changes], TrainConfig)
        planned = build(config, models_of(config), H200, 141, 128).times
        assert isinstance(planned, times.StepTimes)
        return planned.sync

    alone = seconds("model.megatron={}", "layout={ranks: 64, tp: 4, pp: 1, ep: 8, etp: 1}")
    assert seconds() == pytest.approx(alone / 8) and alone == pytest.approx(12, rel=0.05)
    model, sync = description_of(MODELS["Qwen3-235B-A22B"]), SyncSettings()
    one, two, eight = (receiver_bytes(model, sync, "bfloat16", RolloutSettings(), senders) for senders in (1, 2, 8))
    table = 151936 * 4096 * 2  # bytes of the embedding, and of the output layer, for each of which a bucket grows
    assert two - one == table and eight - two == 6 * (256 << 20)


@pytest.mark.parametrize(
    ("layout", "transport", "sharing", "senders"),
    [
        (Layout(ranks=32, ep=8), "nccl", 0, 8),
        (Layout(ranks=32, pp=2, ep=8), "nccl", 0, 16),
        (Layout(ranks=64, pp=4, ep=8), "nccl", 0, 4),  # 32 would be more than MOST_SENDERS
        (Layout(ranks=32, tp=2, ep=8), "nccl", 0, 1),
        (Layout(ranks=32, tp=2, pp=2, ep=8), "gloo", 0, 2),
        (Layout(ranks=16, pp=2, ep=4), "cuda_ipc", 12, 8),  # the last sender is rank 11
        (Layout(ranks=16, pp=2, ep=4), "cuda_ipc", 11, 2),
        (Layout(ranks=16, pp=2, ep=4), "cuda_ipc", 8, 1),
        (Layout(ranks=16, pp=2, ep=4), "shm", 0, 1),
    ],
)
def test_experts_are_sent_by_the_ranks_that_have_them(layout: Layout, transport: Any, sharing: int, senders: int) -> None:
    assert SyncSettings(transport=transport).senders(layout, sharing) == senders


def test_a_weight_update_takes_what_an_engine_unpacks_and_half_the_bytes_in_float8() -> None:
    model = description_of(MODELS["Qwen3-30B-A3B"])
    n, sync = model.sizes, SyncSettings()

    def unpacked(**changes: Any) -> int:
        settings = RolloutSettings(**changes)
        return receiver_bytes(model, sync, "bfloat16", settings) - receiver_bytes(model, sync, "bfloat16", RolloutSettings(tp=1 << 40))

    expert = 3 * n.hidden * n.expert_ffn
    assert unpacked(tp=4) == unpacked(tp=2, dp=2) == unpacked(tp=2, dp=2, expert_parallel=True) == 2 * n.experts * expert // 4
    assert unpacked(tp=3, dp=1, expert_parallel=True) == 2 * 43 * expert
    assert unpacked(tp=4, quantization="fp8") == pytest.approx(n.experts * expert / 4, rel=0.001)
    sent, half = (sent_bytes(model, RolloutSettings(quantization=kind), "bfloat16") for kind in (None, "fp8"))
    assert half == pytest.approx(sent / 2 + n.vocab * n.hidden * 2, rel=0.01), "the two tables stay in bfloat16"
    more = sender_bytes(model, sync, "bfloat16", fp8=True) - sender_bytes(model, sync, "bfloat16")
    assert more == pytest.approx(QUANTIZED + (128 << 20), rel=1e-3), "256 MiB of gathered experts are 128 in float8"


def test_tokens_meet_at_the_experts_over_the_network_of_the_gpus_that_gather_them() -> None:
    """In a node over its links; between nodes over one GPU's network, or over all of a node's where its GPUs split the tokens."""
    its = facts(SMALL)

    def seconds(tp: int, dp: int, apart: bool) -> float:
        engine = plan_engine(SMALL, RolloutSettings(tp=tp, dp=dp, expert_parallel=apart), "bfloat16", 80 * GB)
        return generation._met(its, engine, H200)

    moved = 2 * 2 * 256 * 2  # a token's hidden states in bfloat16, there and back, in two layers
    assert seconds(2, 1, False) == seconds(2, 1, True) == 0
    assert seconds(2, 2, True) == seconds(2, 2, False) == pytest.approx(moved / 2 / (450e9 * 0.8))
    assert seconds(8, 2, False) == pytest.approx(moved / 2 / (50e9 * 0.8))
    assert seconds(8, 2, True) == pytest.approx(moved / 2 / (400e9 * 0.8))
    assert seconds(2, 8, False) == pytest.approx(moved * 7 / 8 / (200e9 * 0.8))


def planned(example: str, model: Path, *changes: str, memory_gb: float = 141) -> tuple[TrainConfig, Plan]:
    config = load(EXAMPLES / example, [f"model.path={model}", *changes], TrainConfig)
    return config, build(config, models_of(config), H200, memory_gb)


def engine_of(plan: Plan) -> EngineMemory:
    assert plan.engine is not None
    return plan.engine


def test_the_engines_of_235_b_hold_a_step_of_responses(published: Path) -> None:
    """Which those of one node do not: there the weights take half of a GPU, and four key-value heads are on eight GPUs."""
    model, example = published / "Qwen3-235B-A22B", "qwen3_235b_a22b/gspo.yaml"
    config, spread = planned(example, model)
    asked = config.train.prompts_per_step * config.rollout.samples_per_prompt
    near = ["rollout.replicas=8", "rollout.dp=1", "rollout.tp=8", "rollout.expert_parallel=false"]
    _, alone = planned(example, model, *near)
    assert config.rollout.replicas * engine_of(spread).live > asked > 2 * 8 * engine_of(alone).live
    assert (spread.gpus, spread.engines) == (alone.gpus, alone.engines) == (128, 64)
    assert "655 in each" in (EXAMPLES / example).read_text() and round(engine_of(spread).live) == 655


def test_of_an_engine_that_does_not_fit_a_larger_one_and_a_smaller_dtype_are_named(published: Path) -> None:
    """And with what is named it fits."""
    model, example = published / "DeepSeek-V3", "deepseek_v3/gspo.yaml"
    alone = ["rollout.replicas=16", "rollout.dp=1", "rollout.expert_parallel=false", "rollout.engine.args={}"]
    _, plan = planned(example, model, *alone)
    fault, *_ = plan.faults
    assert (
        fault.startswith("rollout.tp=8: weights 169.8 GB ") and " leave 0.0 of rollout.gpu_memory_fraction=0.8 of a GPU's 141 GB" in fault
    )
    [named] = re.findall(r"it would fit with (.*)$", fault)
    assert "rollout.dp=2" in named and "rollout.expert_parallel=true" in named
    [larger, half] = named.split(", or with ")
    assert half == "rollout.quantization=fp8"
    for changes in (larger.split(), [half]):
        assert planned(example, model, *alone, *changes)[1].faults == []
    _, small = planned(example, model, *alone, memory_gb=100)
    [named] = re.findall(r"it would fit with (.*)$", small.faults[0])
    assert "rollout.dp=" in named and "fp8" not in named, "not even that fits one node"
    assert planned(example, model, *alone, *named.split(), memory_gb=100)[1].faults == []
    _, wide = planned(example, model, "rollout.dp=1", "rollout.tp=32", "rollout.replicas=4")
    assert wide.notes[0].startswith("rollout.tp=32: nodes of more than 8 GPUs")


SPREAD = [
    ("DeepSeek-V3", "deepseek_v3", 128, 141, True),  # no node holds it
    ("Qwen3-235B-A22B", "qwen3_235b_a22b", 128, 80, True),  # fills a node of these GPUs
    ("Qwen3-30B-A3B", "qwen3_30b_a3b", 32, 80, False),
]


@pytest.mark.parametrize(
    ("name", "example", "gpus", "memory_gb", "far"),
    rows(SPREAD, SPREAD[2:]),
)
def test_engines_are_spread_over_nodes_where_those_of_one_node_are_full(
    published: Path, name: str, example: str, gpus: int, memory_gb: float, far: bool
) -> None:
    near = ["rollout.dp=1", "rollout.expert_parallel=false"]
    path, given = EXAMPLES / example / "gspo.yaml", [f"model.path={published / name}", *near]
    config = load(path, given, TrainConfig)
    found = search(config, models_of(config), H200, memory_gb, gpus, most=4)
    assert len(found) == 4
    for one in found:
        anew = load(path, [*given, *one.changes], TrainConfig)
        assert build(anew, models_of(anew), H200, memory_gb, gpus).faults == []
        assert (anew.rollout.dp > 1) == anew.rollout.expert_parallel == far and anew.rollout.quantization is None
        assert (one.engine_tp, one.engine_dp) == (anew.rollout.tp, anew.rollout.dp)


@pytest.mark.long
def test_float8_is_named_where_it_alone_fits_and_never_chosen(published: Path) -> None:
    """It changes what engines sample: the user decides."""
    config = load(EXAMPLES / "deepseek_v3" / "gspo.yaml", [f"model.path={published / 'DeepSeek-V3'}"], TrainConfig)
    models, few = models_of(config), {"gpus": 128, "memory_gb": 70}
    assert search(config, models, H200, few["memory_gb"], few["gpus"], most=1) == []
    said = nearest(config, models, H200, few["memory_gb"], few["gpus"])
    assert said is not None and said.endswith("; with rollout.quantization=fp8 there are layouts that fit")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("Llama-3-70B", {"dp": 2}, r"rollout\.dp=2: the model has no experts; rollout\.replicas makes more engines"),
        ("Llama-3-70B", {"expert_parallel": True}, r"rollout\.expert_parallel=true: the model has no experts"),
        ("Mixtral-8x7B", {"dp": 2, "tp": 8, "expert_parallel": True}, r".*: 8 experts for rollout\.dp\*rollout\.tp=2\*8=16 GPUs"),
        (
            "Mixtral-8x7B",
            {"dp": 3},
            r"rollout\.dp\*rollout\.tp=3\*1=3: does not divide the model's intermediate_size=14336; .* whole experts",
        ),
        ("Mixtral-8x7B", {"dp": 3, "expert_parallel": True}, None),  # the first two GPUs have three
        ("Qwen3-30B-A3B", {"expert_parallel": True}, None),  # one GPU has all of them, and nothing is wrong with that
        ("DeepSeek-V3", {"dp": 16, "tp": 8, "expert_parallel": True}, None),
    ],
)
def test_what_the_gpus_of_an_engine_cannot_share_is_refused(name: str, changes: dict[str, Any], message: str | None) -> None:
    model, settings = description_of(MODELS[name]), RolloutSettings(**changes)
    if message is None:
        check_engine(model, "bfloat16", settings, gpu=True)
        return
    with pytest.raises(ConfigError, match=f"^{message}$"):
        check_engine(model, "bfloat16", settings, gpu=True)


def test_the_models_that_split_tokens_are_those_of_vllm() -> None:
    """In whose source the experts are told of `use_sequence_parallel_moe`."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    models = Path(spec.origin).parent / "model_executor" / "models"
    registry, found = (models / "registry.py").read_text(), {}
    for architecture in sorted(family.heads["lm"].architecture for family in FAMILIES.values() if not family.nested):
        [name] = vllm_names([architecture])
        [module] = set(re.findall(rf'"{name}": \(\s*"([\w.]+)"', registry))
        if module == "vllm.models.deepseek_v32":  # which takes its classes from there on CPUs, where alone we run it
            module = "deepseek_v2"
        source = (models / f"{module}.py").read_text()
        if re.search(r"FusedMoE\w*\(", source):
            found[architecture] = "parallel_config.use_sequence_parallel_moe" in source and "is_sequence_parallel=" in source
    ours = {name: splits_tokens(ModelDescription.of({"architectures": [name]}), 2, 2, expert_parallel=True) for name in found}
    assert found == ours and set(found.values()) == {True, False}
    assert not any(
        splits_tokens(ModelDescription.of({"architectures": ["Qwen3MoeForCausalLM"]}), *sizes, expert_parallel=apart)
        for *sizes, apart in ((1, 2, True), (2, 1, True), (2, 2, False))
    )


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_what_is_sent_is_what_an_update_is_made_of(quantization: Any) -> None:
    """DeepSeek-V3's engines hold the up-projection of the latents twice, but receive it once."""
    model = ModelDescription.of({**config_of(MODELS["DeepSeek-V3"]), "n_routed_experts": 16, "n_group": 4})
    item = {FP8: 1, "bfloat16": 2, "float32": 4}
    exactly = 0
    for shape, dtype in model.update("bfloat16", quantization).values():
        size = item[dtype]
        for length in shape:
            size *= length
        exactly += size
    rollout = RolloutSettings(quantization=quantization)
    assert sent_bytes(model, rollout, "bfloat16") == pytest.approx(exactly, rel=1e-6)
    assert facts(model).latents is not None


def test_engines_of_a_model_without_experts_are_told_of_float8_alone(published: Path) -> None:
    given = ["layout={ranks: 64, tp: 8, pp: 8}", "model.megatron={}", "routing={}", "rollout={replicas: 8, tp: 2}"]
    model, example = published / "Llama-3-70B", "qwen3_30b_a3b/gspo.yaml"
    [fault] = planned(example, model, *given, memory_gb=80)[1].faults
    assert fault.startswith("rollout.tp=2: weights 7") and fault.endswith("; it would fit with rollout.quantization=fp8")
    assert planned(example, model, *given, "rollout.quantization=fp8", memory_gb=80)[1].faults == []


def test_a_gated_delta_net_keeps_a_state_and_no_keys() -> None:
    model = description_of(MODELS["Qwen3-Next-80B-A3B"])
    given: dict[str, Any] = {"max_prompt_tokens": 1024, "max_response_tokens": 31 * 1024}
    one, four = (plan_engine(model, RolloutSettings(**given, tp=tp), "bfloat16", 141 * GB) for tp in (1, 4))
    assert one.token == 2 * 12 * 2 * 256 * 2, "keys and values of two heads in a quarter of 48 layers"
    assert one.state == 4 * four.state == 36 * (32 * 128 * 128 + 3 * (2 * 16 + 32) * 128) * 2, "matrices of 32 heads, and three tokens"
    wider = plan_engine(description_of(MODELS["Qwen3.5-35B-A3B"]), RolloutSettings(**given, tp=1), "bfloat16", 141 * GB)
    assert wider.state == 30 * (32 * 128 * 128 * 4 + 3 * (2 * 16 + 32) * 128 * 2), "its config.json asks for matrices in float32"
    assert four.live == pytest.approx(four.cache / (2 * 12 * 256 * 2 * 32 * 1024 + four.state))


def test_linear_attention_costs_no_more_in_longer_sequences() -> None:
    its, elements = facts(description_of(MODELS["Qwen3.5-35B-A3B"])), 34_660_610_688
    longer = forward.forward_flops(its, elements, 65536) - forward.forward_flops(its, elements, 1)
    assert longer == 2 * 10 * 16 * 256 * 65535, "ten layers of forty have attention, of 16 heads"
    assert 2.4e9 < forward.active_parameters(its, elements) - 248_320 * 2048 < 3e9, "3B with the output layer"

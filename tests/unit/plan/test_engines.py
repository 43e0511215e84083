"""Engines with data-parallel attention, whole experts on a GPU, and float8: what a GPU of one holds, by hand and as vLLM's source says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from megarl.config import RolloutSettings, SyncSettings, TrainConfig, load
from megarl.models.families import FAMILIES, family_of
from megarl.models.weight_map import FP8
from megarl.plan.devices import GB, device_of
from megarl.plan.engines import plan_engine, splits_tokens, weight_parts
from megarl.plan.facts import facts
from megarl.plan.search import ENGINES, _engines
from megarl.plan.sync import receiver_bytes, sender_bytes, sent_bytes
from megarl.plan.whole import Plan, build, models_of
from tests.published_models import MODELS, config_of

EXAMPLES = Path(__file__).parents[3] / "examples"
LARGE = EXAMPLES / "qwen3_235b_a22b" / "gspo.yaml"
FP8_BYTES = 1 + 4 / 16384  # a float32 scale for each 128 x 128 elements
SMALL = {
    **config_of(MODELS["Qwen3-30B-A3B"]),
    **{"num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64},
    **{"moe_intermediate_size": 128, "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 1000},
}
ATTENTION = 4 * 64 * 256, 2 * 2 * 64 * 256, 256 * 4 * 64  # queries, keys and values, output
COPIED = 2 * 64 + 2 * 256 + 8 * 256  # norms of heads and layers, and the router, on every GPU
TABLES = 2 * 1024 * 256  # embedding and output layer, of 1000 rows padded to 1024
EXPERT = 3 * 128 * 256


def others(attention: float, tables: float, item: float = 2) -> float:
    """Bytes of all but the experts in both layers; `item` for each element of a linear layer."""
    return 2 * (item * attention + 2 * COPIED) + 2 * (tables + 256)


@pytest.mark.parametrize(
    ("tp", "dp", "apart", "held", "routed"),
    [
        (1, 1, False, others(sum(ATTENTION), TABLES), 2 * 2 * 8 * EXPERT),
        (2, 1, False, others(sum(ATTENTION) / 2, TABLES / 2), 2 * 2 * 8 * EXPERT / 2),
        (4, 1, False, others((ATTENTION[0] + ATTENTION[2]) / 4 + ATTENTION[1] / 2, TABLES / 4), 2 * 2 * 8 * EXPERT / 4),
        (1, 2, False, others(sum(ATTENTION), TABLES), 2 * 2 * 8 * EXPERT / 2),
        (2, 2, False, others(sum(ATTENTION) / 2, TABLES / 2), 2 * 2 * 8 * EXPERT / 4),
        (2, 2, True, others(sum(ATTENTION) / 2, TABLES / 2), 2 * 2 * 2 * EXPERT),
        (1, 3, True, others(sum(ATTENTION), TABLES), 2 * 2 * 3 * EXPERT),
        (1, 1, True, others(sum(ATTENTION), TABLES), 2 * 2 * 8 * EXPERT),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "",
)
def test_attention_is_copied_and_experts_are_shared_by_all_gpus(tp: int, dp: int, apart: bool, held: float, routed: float) -> None:
    """A key-value head has no half, so that 4 GPUs hold the 2 twice; of 8 experts on 3 GPUs the fullest holds 3."""
    assert weight_parts(SMALL, tp, "bfloat16", dp, expert_parallel=apart) == (held, routed)


@pytest.mark.parametrize(("tp", "dp", "apart", "share"), [(1, 1, False, 8), (2, 2, False, 2), (1, 3, True, 3)])
def test_float8_is_of_linear_layers_and_experts_alone(tp: int, dp: int, apart: bool, share: int) -> None:
    held, routed = weight_parts(SMALL, tp, "bfloat16", dp, expert_parallel=apart, fp8=True)
    assert held == round(others(sum(ATTENTION) / tp, TABLES / tp, FP8_BYTES))
    assert routed == round(2 * FP8_BYTES * share * EXPERT)


@pytest.mark.parametrize("name", ["DeepSeek-V3", "GLM-4.5-Air"])
def test_shared_experts_are_whole_where_tokens_are_split(name: str) -> None:
    hf = config_of(MODELS[name])
    apart, alone = (weight_parts(hf, 8, "bfloat16", dp, expert_parallel=True)[0] for dp in (2, 1))
    shared = 58 * 3 * 7168 * 2048 * 2 if name == "DeepSeek-V3" else 0
    assert apart - alone == shared * 7 / 8


def test_the_models_that_split_tokens_are_those_of_vllm() -> None:
    """In whose source the experts are told of `use_sequence_parallel_moe`."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    models = Path(spec.origin).parent / "model_executor" / "models"
    registry, found = (models / "registry.py").read_text(), {}
    for architecture in sorted(family.heads["lm"].architecture for family in FAMILIES.values()):
        [module] = set(re.findall(rf'"{architecture}": \(\s*"(\w+)"', registry))
        source = (models / f"{module}.py").read_text()
        if re.search(r"FusedMoE\w*\(", source):
            found[architecture] = "parallel_config.use_sequence_parallel_moe" in source and "is_sequence_parallel=" in source
    ours = {name: splits_tokens({"architectures": [name]}, 2, 2, expert_parallel=True) for name in found}
    assert found == ours and set(found.values()) == {True, False}
    assert not any(
        splits_tokens({"architectures": ["Qwen3MoeForCausalLM"]}, *sizes, expert_parallel=apart)
        for *sizes, apart in ((1, 2, True), (2, 1, True), (2, 2, False))
    )


def test_every_data_parallel_rank_has_sequences_of_its_own() -> None:
    its = RolloutSettings(tp=4, dp=4, expert_parallel=True, max_prompt_tokens=2048, max_response_tokens=8192, gpu_memory_fraction=0.85)
    engine = plan_engine(config_of(MODELS["Qwen3-235B-A22B"]), its, "bfloat16", 141 * GB)
    sequence = 10240 * 2 * 94 * 1 * 128 * 2  # each of 4 GPUs holds one of 4 heads of keys, and of values
    assert engine.devices == 16 and engine.token * engine.longest == sequence
    assert engine.experts == 94 * 128 / 16 * 3 * 4096 * 1536 * 2
    assert engine.cache == pytest.approx(0.85 * 141 * GB - engine.weights - engine.overhead)
    assert engine.live == pytest.approx(4 * engine.cache / sequence)
    alone = plan_engine(config_of(MODELS["Qwen3-235B-A22B"]), its.model_copy(update={"dp": 1}), "bfloat16", 141 * GB)
    assert alone.experts == 4 * engine.experts and alone.overhead < engine.overhead and alone.live < engine.live / 4


def test_prompt_tokens_of_all_data_parallel_ranks_take_buffers_on_every_gpu() -> None:
    def overhead(dp: int, **args: int) -> float:
        settings = RolloutSettings.model_validate({"dp": dp, "tp": 2, "expert_parallel": True, "engine": {"args": args}})
        return plan_engine(SMALL, settings, "bfloat16", 80 * GB).overhead

    tokens = 2 * (2 * 2 * 256 + 2 * 256)  # bytes of one: two workspaces with a row for each of its 2 experts, hidden states in and out
    assert overhead(4, max_num_batched_tokens=1000) - overhead(1) == 3 * 1000 * tokens
    assert overhead(2) - overhead(1) == 16384 * tokens


def test_a_weight_update_in_float8_takes_less_of_an_engine_and_more_of_rank_0() -> None:
    """On an engine's GPU, the experts of a layer as they are unpacked; on rank 0, what is quantised and how."""
    sync = SyncSettings(transport="nccl", verify=True)

    def receiver(**settings: Any) -> int:
        return receiver_bytes(SMALL, sync, "bfloat16", RolloutSettings(**settings))

    assert receiver() - receiver(quantization="fp8") == pytest.approx(8 * EXPERT * (2 - FP8_BYTES), abs=1)
    assert receiver() - receiver(dp=2, tp=2) == 2 * 6 * EXPERT
    assert receiver() - receiver(dp=3, expert_parallel=True) == 2 * 5 * EXPERT, "the fullest holds 3 of the 8"
    plain, quantized = (sender_bytes(SMALL, sync, "bfloat16", fp8=fp8) for fp8 in (False, True))
    assert quantized - plain == 12 * 2**24 + round(2**27 * FP8_BYTES), "2^24 elements at a time, beside 2^27 that were gathered"
    unverified = SyncSettings(transport="nccl", verify=False)
    both = [receiver_bytes(SMALL, unverified, "bfloat16", RolloutSettings(quantization=how)) for how in (None, "fp8")]
    assert both[0] == both[1], "a bucket has room for the embedding, which is not quantised"


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_what_is_sent_is_what_an_update_is_made_of(quantization: Any) -> None:
    """DeepSeek-V3's engines hold the up-projection of the latents twice, but receive it once."""
    hf = {**config_of(MODELS["DeepSeek-V3"]), "n_routed_experts": 16, "n_group": 4}
    item = {FP8: 1, "bfloat16": 2, "float32": 4}
    exactly = 0
    for shape, dtype in family_of(hf).update(hf, "bfloat16", quantization).values():
        size = item[dtype]
        for length in shape:
            size *= length
        exactly += size
    rollout = RolloutSettings(quantization=quantization)
    assert sent_bytes(hf, rollout, "bfloat16") == pytest.approx(exactly, rel=1e-6)
    assert facts(hf).latents is not None


def planned(name: str, published: Path, *overrides: str) -> tuple[TrainConfig, Plan]:
    config = load(LARGE, [f"model.path={published / name}", *overrides], TrainConfig)
    memory = config.cluster.gpu_memory_gb
    assert memory is not None
    return config, build(config, models_of(config), device_of(memory), memory)


ONE_NODE = ["cluster.gpu_memory_gb=80", "rollout.engine.args={}", "rollout.dp=1", "rollout.expert_parallel=false"]


def test_an_engine_that_does_not_fit_is_told_of_more_gpus_and_of_float8(published: Path) -> None:
    """Of 80 GB each, 8 GPUs hold the weights, 4 do not; 8 in two data-parallel ranks do, and so do 4 in float8."""
    given = [*ONE_NODE, "rollout.tp=4", "rollout.replicas=16"]
    _, plan = planned("Qwen3-235B-A22B", published, *given)
    [fault] = plan.faults
    matched = re.fullmatch(r"rollout\.tp=4: weights 11\d\.\d GB and .*; it would fit with (rollout\..*), or with (rollout\..*)", fault)
    assert matched is not None
    larger, quantized = (each.split() for each in matched.groups())
    assert "rollout.expert_parallel=true" in larger and "rollout.replicas=8" in larger and "rollout.dp=2" in larger
    assert quantized == ["rollout.quantization=fp8"]
    for remedy in (larger, quantized):
        assert planned("Qwen3-235B-A22B", published, *given, *remedy)[1].faults == []
    _, tiny = planned("Qwen3-235B-A22B", published, *ONE_NODE, "rollout.tp=2", "rollout.replicas=32")
    assert "rollout.dp=8" in tiny.faults[0] and "quantization" not in tiny.faults[0], "in float8, 2 GPUs do not hold the weights either"


def test_engines_of_a_model_without_experts_are_told_of_float8_alone(published: Path) -> None:
    given = ["layout={ranks: 64, tp: 8, pp: 8}", "model.megatron={}", "routing={}", *ONE_NODE, "rollout.tp=2", "rollout.replicas=8"]
    [fault] = planned("Llama-3-70B", published, *given)[1].faults
    assert fault.startswith("rollout.tp=2: weights 7") and fault.endswith("; it would fit with rollout.quantization=fp8")
    assert planned("Llama-3-70B", published, *given, "rollout.quantization=fp8")[1].faults == []


def test_engines_of_several_nodes_are_tried_first_where_weights_take_most_of_one(published: Path) -> None:
    config, _ = planned("Qwen3-235B-A22B", published, *ONE_NODE, "rollout.tp=8")
    hf = config_of(MODELS["Qwen3-235B-A22B"])
    [crowded] = _engines(config, hf, 80)
    assert (8, 1, False) in crowded and (4, 4, True) in crowded and (2, 1, False) not in crowded, "2 GPUs do not hold the weights"
    assert all(dp == 1 or dp * tp > 8 for tp, dp, _ in crowded)
    small = load(EXAMPLES / "qwen3_30b_a3b/gspo.yaml", [f"model.path={published / 'Qwen3-30B-A3B'}"], TrainConfig)
    near, far = _engines(small, config_of(MODELS["Qwen3-30B-A3B"]), 141)
    assert near == [(tp, 1, False) for tp in ENGINES] and far and all(dp > 1 and apart for _, dp, apart in far)
    kept = small.model_copy(update={"rollout": small.rollout.model_copy(update={"dp": 2})})
    assert all(dp == 2 for shapes in _engines(kept, config_of(MODELS["Qwen3-30B-A3B"]), 141) for _, dp, _ in shapes)


def test_engines_in_float8_receive_half_as_much_and_have_half_the_gpus(published: Path) -> None:
    path = f"model.path={published / 'DeepSeek-V3'}"
    plans = []
    for name in ("gspo.yaml", "gspo_fp8.yaml"):
        config = load(EXAMPLES / "deepseek_v3" / name, [path], TrainConfig)
        plans.append(build(config, models_of(config), device_of(141), 141, 128))
    plain, quantized = plans
    assert plain.engine is not None and quantized.engine is not None and plain.times is not None and quantized.times is not None
    assert (plain.engine.devices, quantized.engine.devices) == (64, 32) and plain.engines == quantized.engines == 128
    assert quantized.times.sync == pytest.approx(plain.times.sync / 2, rel=0.01)
    assert quantized.engine.experts == pytest.approx(plain.engine.experts, rel=1e-3), "8 experts of a byte, not 4 of two"
    assert quantized.engine.live / 32 > plain.engine.live / 64

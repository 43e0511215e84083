"""`megarl plan` against real ranks: bytes of weights, gradients, optimizer and activations of the local spec, in float32 and bfloat16."""

from dataclasses import replace
from math import prod
from typing import Any, Literal

import pytest

from megarl.config import Layout
from megarl.models.description import ModelDescription
from megarl.plan.parameters import model_elements
from megarl.plan.ranks import PlannedModel, Work, plan_group
from tests.distributed.plan_work import LENGTH, SEQUENCES, Case, measure
from tests.rank_pool import Pool
from tests.rows import rows

ERROR = 0.05
BASE: dict[str, Any] = {
    "vocab_size": 161,  # two ranks do not divide it
    "hidden_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 224,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "num_hidden_layers": 4,
    "tie_word_embeddings": False,
    # Every expert takes every token, so that no rank's experts have more than others.
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 112,
}
SIGMOID = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
}
LATENTS = {"kv_lora_rank": 72, "q_lora_rank": 88, "qk_rope_head_dim": 16, "v_head_dim": 24, "qk_nope_head_dim": 32}
DELTA_NETS = {
    "shared_expert_intermediate_size": 48,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
}
MAMBA = {
    "layers_block_type": ["mamba", "moe", "attention", "mlp"],
    **{key: value for key, value in SIGMOID.items() if key != "first_k_dense_replace"},
    "moe_shared_expert_intermediate_size": 96,
    "mamba_num_heads": 8,
    "mamba_head_dim": 24,
    "ssm_state_size": 16,
    "n_groups": 4,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "norm_topk_prob": True, "head_dim": 32},
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "tie_word_embeddings": True},
    "mixtral": {"architectures": ["MixtralForCausalLM"], "num_experts": 4, "num_local_experts": 4},
    "glm4_moe": {"architectures": ["Glm4MoeForCausalLM"], **SIGMOID, "attention_bias": True, "head_dim": 32},
    "deepseek_v3": {"architectures": ["DeepseekV3ForCausalLM"], **SIGMOID, **LATENTS, "num_key_value_heads": 8},
    "qwen3_next": {"architectures": ["Qwen3NextForCausalLM"], "num_experts": 4, "head_dim": 32, **DELTA_NETS},
    "nemotron_h": {"architectures": ["NemotronHForCausalLM"], "head_dim": 32, **MAMBA},
    "deepseek_v32": {
        **{"architectures": ["DeepseekV32ForCausalLM"], **SIGMOID, **LATENTS, "num_key_value_heads": 8},
        **{"index_topk": 16, "index_n_heads": 4, "index_head_dim": 32},
    },
}
DESCRIPTIONS = {name: ModelDescription.of({**BASE, **own}) for name, own in MODELS.items()}
HALF: Literal["bfloat16"] = "bfloat16"
# With each layout the models that are measured on it: the suite takes the first, `--long` all.
LAYOUTS: dict[str, tuple[Layout, list[Case]]] = {
    "one": (
        Layout(),
        [
            Case("deepseek_v3", recompute="selective"),
            Case("qwen3_moe", HALF, "full"),
            Case("glm4_moe", HALF),
            Case("glm4_moe", mtp="train"),
            *(Case("glm4_moe", muon=True), Case("qwen3_next", HALF, mtp="train", muon=True)),
            Case("nemotron_h"),
            Case("deepseek_v32"),
            Case("deepseek_v32", HALF, "selective"),
        ],
    ),
    "dp2": (Layout(ranks=2), [Case("qwen3_moe"), Case("llama", HALF), Case("qwen2")]),
    "ep2": (Layout(ranks=2, ep=2), [Case("mixtral", HALF, "selective"), Case("glm4_moe")]),
    "tp2": (Layout(ranks=2, tp=2), [Case("llama", recompute="full"), Case("qwen2", HALF)]),
    "tp2_ep2": (
        Layout(ranks=2, tp=2, ep=2),
        [
            *(Case("qwen3_moe", HALF), Case("deepseek_v3"), Case("qwen3_next", HALF), Case("nemotron_h", HALF)),
            Case("qwen3_next", mtp="train"),
            Case("nemotron_h", HALF, muon=True),
        ],
    ),
    "tp2_etp2": (Layout(ranks=2, tp=2, etp=2), [Case("glm4_moe", HALF), Case("mixtral")]),
    "cp2": (Layout(ranks=2, cp=2), [Case("qwen3_moe"), Case("deepseek_v3", HALF), Case("llama", HALF), Case("qwen3_next")]),
    "pp2": (
        Layout(ranks=2, pp=2),
        [
            *(Case("qwen2", micro_batches=3), Case("deepseek_v3", HALF, "full", 3), Case("qwen3_next", micro_batches=3)),
            Case("deepseek_v3", HALF, "full", 3, "train"),
        ],
    ),
    "pp2_vpp2": (Layout(ranks=2, pp=2, vpp=2), [Case("glm4_moe", HALF, "full", 4), Case("qwen3_moe", micro_batches=4)]),
    "pp4": (Layout(ranks=4, pp=4), [Case("mixtral", HALF, micro_batches=5)]),
    "tp2_pp2": (Layout(ranks=4, tp=2, pp=2, ep=2), [Case("deepseek_v3", HALF, micro_batches=3), Case("qwen3_moe", recompute="full")]),
    "tp2_ep4": (Layout(ranks=4, tp=2, ep=4), [Case("qwen3_moe", HALF)]),
}


@pytest.mark.parametrize("name", rows(LAYOUTS, ["one", "ep2", "tp2_ep2", "cp2", "pp2_vpp2", "tp2_pp2"]))
def test_planned_bytes_are_those_of_real_ranks(pool: Pool, name: str, long: bool) -> None:
    layout, cases = LAYOUTS[name]
    cases = cases if long else cases[:1]
    measured = pool.run(measure, layout, DESCRIPTIONS, cases)
    for index, case in enumerate(cases):
        model = replace(DESCRIPTIONS[case.family], mtp=case.mtp)
        role = PlannedModel("policy", model, case.optimizer, value=False, micro_batch_tokens=LENGTH * SEQUENCES)
        planned = plan_group([role], layout, case.settings, Work(LENGTH, case.micro_batches, 0, gpu=False))
        held = [rank[index] for rank in measured]
        for rank, real in enumerate(held):
            parts = planned.stages[rank * layout.pp // layout.ranks].parts
            ours = {**parts, "activations": parts["activations"] + parts["logits"]}
            for part, size in real.items():
                assert ours[part] == pytest.approx(size, rel=ERROR), f"{case}, rank {rank}: {part}"
        totals = [sum(real.values()) for real in held]
        assert planned.worst.total == pytest.approx(max(totals), rel=ERROR)
        assert totals[planned.worst.rank] >= (1 - ERROR) * max(totals), f"{case}: the rank that is named is not the worst"


def test_every_parameter_of_a_model_is_counted() -> None:
    for model in DESCRIPTIONS.values():
        tensors = {name: prod(shape) for name, shape in model.expected().items()}
        biases = sum(size for name, size in tensors.items() if name.endswith("e_score_correction_bias"))  # buffers
        assert model_elements(model) == sum(tensors.values()) - biases

"""Models that are refused, as data (see `configurations`)."""

from __future__ import annotations

import json
from pathlib import Path

from tests.unit.bad_input.cases import (
    Case,
    config_json,
    given,
    header,
    model,
    pipe,
    template,
    wrote,
)
from tests.unit.bad_input.configurations import DEEP, LONG
from tools.make_tiny_model import build


def says(key: str, value: str, more: str = "") -> str:
    """The line of a value of config.json."""
    return rf"^model\.path: (.*: )?config\.json's {key}={value}.*{more}"


def dense(copy: Path) -> None:
    build(copy, layers=1, hidden=128, experts=2, expert_hidden=32, seed=1, family="qwen3")


def few_experts(copy: Path) -> None:
    build(copy, layers=1, hidden=128, experts=2, expert_hidden=32, seed=1)


def deep_tokenizer(copy: Path) -> None:
    (copy / "tokenizer.json").write_bytes(DEEP)


COUNTS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
ROUTERS = "model.megatron.moe_"
TABLE = [
    # --- what is handed on to Megatron and vLLM
    Case(
        "a field of Megatron's optimizer that megarl sets",
        "train",
        given("optimizer.megatron={adam_beta1: 0.8}"),
        r"^optimizer\.megatron\.adam_beta1: set by optimizer\.betas$",
    ),
    Case(
        "bfloat16 moments",
        "train",
        given("optimizer.megatron={exp_avg_dtype: bfloat16}"),
        r"^optimizer\.megatron\.exp_avg_dtype: checkpoints store main weights and moments in float32 only$",
    ),
    Case(
        "an optimizer that is offloaded from the CPU to the CPU",
        "train",
        given("optimizer.megatron={optimizer_cpu_offload: true, optimizer_offload_fraction: 1.0}"),
        r"^optimizer\.megatron\.optimizer_cpu_offload=True: needs cluster\.gpus=true and model\.dtype=bfloat16$",
    ),
    Case(
        "gradients added up by layers that cannot",
        "train",
        given("model.megatron.gradient_accumulation_fusion=true"),
        r"^model\.megatron\.gradient_accumulation_fusion=True: needs cluster\.gpus=true and model\.dtype=bfloat16$",
    ),
    Case(
        "adapters of layers that Megatron goes around",
        "train",
        given("model.lora.rank=4", "model.megatron.moe_shared_expert_overlap=true"),
        r"^model\.megatron\.moe_shared_expert_overlap=True: not with model\.lora: adapters of shared experts are proven on layers that",
    ),
    Case(
        "a gradient that needs an extension that nobody installs",
        "train",
        given("model.megatron.defer_embedding_wgrad_compute=true"),
        r"^model\.megatron\.defer_embedding_wgrad_compute: set by .* megarl itself \(to False\)",
    ),
    Case(
        "an optimizer of which nothing is offloaded",
        "train",
        given("optimizer.megatron={optimizer_cpu_offload: true}"),
        r"^optimizer\.megatron\.optimizer_cpu_offload=True: optimizer_offload_fraction=0, Megatron's default, offloads nothing; 1\.0 all$",
    ),
    Case(
        "layers in eight bits",
        "train",
        given("model.megatron={fp8: hybrid}"),
        r"^model\.megatron\.fp8: set by model\.path, model\.dtype, layout or megarl itself \(to None\)$",
    ),
    Case(
        "a kernel of attention that there is not",
        "train",
        given("model.megatron={attention_backend: flash3}"),
        r"^model\.megatron\.attention_backend: 'flash3' is none of auto, flash, fused, unfused$",
    ),
    Case(
        "a field that Megatron has not",
        "sft",
        given("optimizer.ddp={overlap_grad_reduction: true}"),
        r"^optimizer\.ddp\.overlap_grad_reduction: no such field of .* \(did you mean 'overlap_grad_reduce'\?\)$",
    ),
    Case(
        "a field of another type",
        "train",
        given("optimizer.ddp={bucket_size: many}"),
        r"^optimizer\.ddp\.bucket_size: Input should be a valid integer.* \(got 'many'\)$",
    ),
    Case(
        "recomputation beside model.recompute",
        "train",
        given("model.megatron={recompute_granularity: full}"),
        r"^model\.megatron\.recompute_granularity: set by model\.recompute$",
    ),
    Case(
        "an argument of vLLM's that megarl sets",
        "train",
        given("rollout.engine.args={max_model_len: 8}"),
        r"^rollout\.engine\.args\.max_model_len: set by rollout\.max_prompt_tokens and max_response_tokens$",
    ),
    Case(
        "an argument of vLLM's that loads code",
        "train",
        given("rollout.engine.args={logits_processors: [mine.Processor]}"),
        r"^rollout\.engine\.args\.logits_processors: it would load code that the configuration names$",
    ),
    Case(
        "an argument that vLLM has not",
        "train",
        given("rollout.engine.args={max_num_batched_token: 8}"),
        r"^rollout\.engine\.args\.max_num_batched_token: no such field of .* \(did you mean 'max_num_batched_tokens'\?\)$",
    ),
    Case(
        "an argument of vLLM's that is no CPU's",
        "train",
        given("rollout.engine.args={enable_chunked_prefill: true}"),
        r"^rollout\.engine\.args\.enable_chunked_prefill: a CPU engine computes prompts whole, and compiles nothing$",
    ),
    # --- experts that cannot be replayed
    *(
        Case(f"{name} ({verb})", verb, model(change, *overrides), line)
        for verb in ("train", "eval", "pairs")
        for name, change, overrides, line in (
            (
                "data-parallel attention of a dense model",
                dense,
                ("rollout.dp=2",),
                r"^rollout\.dp=2: the model has no experts; rollout\.replicas makes more engines$",
            ),
            (
                "whole experts of a dense model",
                dense,
                ("rollout.expert_parallel=true",),
                r"^rollout\.expert_parallel=true: the model has no experts$",
            ),
            (
                "fewer experts than GPUs",
                few_experts,
                ("rollout.dp=3", "rollout.expert_parallel=true"),
                r"^rollout\.expert_parallel=true: 2 experts for rollout\.dp\*rollout\.tp=3\*1=3 GPUs$",
            ),
            (
                "experts that data-parallel ranks cannot slice",
                few_experts,
                ("rollout.dp=3",),
                r"^rollout\.dp\*rollout\.tp=3\*1=3: does not divide the model's moe_intermediate_size=32; rollout\.expert_parallel=true ",
            ),
        )
    ),
    Case(
        "replay in a dense model",
        "train",
        model(dense, "routing.replay=r3"),
        r"^routing\.replay=r3: model\.path=.* is a qwen3, which has no",
    ),
    Case(
        "replay past fused routers",
        "train",
        given("routing.replay=r2", f"{ROUTERS}router_fusion=true"),
        r"^routing\.replay=r2: model\.megatron\.moe_router_fusion=True: experts are then chosen, or dropped, where replay has no control$",
    ),
    Case(
        "replay and dropped tokens",
        "train",
        given("routing.replay=r2", f"{ROUTERS}expert_capacity_factor=1.0"),
        r"^routing\.replay=r2: model\.megatron\.moe_expert_capacity_factor=1\.0: ",
    ),
    Case(
        "replay of a choice for the batch",
        "train",
        given("routing.replay=r3", f"{ROUTERS}router_load_balancing_type=sinkhorn"),
        r"^routing\.replay=r3: model\.megatron\.moe_router_load_balancing_type=sinkhorn ",
    ),
    Case(
        "a sample of the experts of fused routers",
        "train",
        given(f"{ROUTERS}router_fusion=true"),
        r"^routing\.sample=0\.01: model\.megatron\.moe_router_fusion=True: no experts can be compared; give 0$",
    ),
    Case(
        "a sample of a choice for the batch",
        "train",
        given(f"{ROUTERS}router_load_balancing_type=sinkhorn"),
        r"^routing\.sample=0\.01: model\.megatron\.moe_router_load_balancing_type='sinkhorn': ",
    ),
    Case(
        "the engine's experts for a reference, without them",
        "train",
        given("routing={replay: r2, reference: true}", "algorithm.kl_coef=0.1"),
        r"^.*routing\.reference=true with routing\.replay=r2: only r3 has experts for the reference$",
    ),
    Case(
        "replay for no reference",
        "train",
        given("routing={replay: r3, reference: true}"),
        r"^.*routing\.reference=true: .*kl_coef=0 keeps no",
    ),
    Case("replay for no critic", "train", given("routing={critic: true}"), r"^.*routing\.critic=true: algorithm\.type=\w+ has no critic$"),
    Case("another replay", "train", given("routing.replay=r4"), r"^routing\.replay: .*'off', 'r2' or 'r3' \(got 'r4'\)$"),
    Case("a share above all", "train", given("routing.sample=1.5"), r"^routing\.sample: .*less than or equal to 1 \(got 1\.5\)$"),
    # --- config.json
    Case(
        "a text for Megatron's number",
        "train",
        given("model.megatron={moe_aux_loss_coeff: abc}"),
        r"^model\.megatron\.moe_aux_loss_coeff: .*\(got 'abc'\)$",
    ),
    Case(
        "true for Megatron's number",
        "train",
        given("model.megatron={moe_z_loss_coeff: true}"),
        r"^model\.megatron\.moe_z_loss_coeff: .*\(got True\)$",
    ),
    Case(
        "a number for Megatron's boolean",
        "train",
        given("model.megatron={moe_grouped_gemm: 3}"),
        r"^model\.megatron\.moe_grouped_gemm: .*\(got 3\)$",
    ),
    Case(
        "Megatron's unknown choice",
        "train",
        given("model.megatron={moe_token_dispatcher_type: carrier}"),
        r"^model\.megatron\.moe_token_dispatcher_type: .*'alltoall'",
    ),
    Case("99 of 8 experts", "train", config_json({"num_experts_per_tok": 99}), says("num_experts_per_tok", "99", "its 8 experts")),
    Case("no expert", "train", config_json({"num_experts_per_tok": 0}), says("num_experts_per_tok", "0")),
    Case("experts as a text", "train", config_json({"num_experts_per_tok": "2"}), says("num_experts_per_tok", "'2'")),
    Case("experts as a list", "sft", config_json({"num_experts": [8]}), says("num_experts", r"\[8\]", "not a positive integer")),
    Case("epsilon as a text", "train", config_json({"rms_norm_eps": "tiny"}), says("rms_norm_eps", "'tiny'", "valid number")),
    Case("epsilon as NaN", "train", config_json({"rms_norm_eps": float("nan")}), says("rms_norm_eps", "nan", "finite|greater")),
    Case("epsilon below 0", "train", config_json({"rms_norm_eps": -1e-6}), says("rms_norm_eps", "-1e-06", "greater than 0")),
    Case("an end token as a text", "train", config_json({"eos_token_id": "<|end|>"}), says("eos_token_id", ".*end", "valid integer")),
    Case(
        "an end token as a text in a list",
        "train",
        config_json({"eos_token_id": [1, "2"]}),
        says(r"eos_token_id\.1", "'2'", "valid integer"),
    ),
    Case(
        "an end token beyond the vocabulary", "train", config_json({"eos_token_id": 4096}), says("eos_token_id", "4096", "vocab_size=128")
    ),
    Case("another family's model_type", "train", config_json({"model_type": "llama"}), says("model_type", "'llama'", "'qwen3_moe'")),
    Case("no model_type", "pairs", config_json({}, "model_type"), says("model_type", "None", "'qwen3_moe'")),
    Case(
        "a model_type that is a list",
        "train",
        config_json({"model_type": ["qwen3_moe"]}),
        says("model_type", r"\['qwen3_moe'\]", "valid string"),
    ),
    Case(
        "no longest sequence",
        "train",
        config_json({"max_position_embeddings": None}),
        r"^model\.path: config\.json's max_position_embeddings is null, which says nothing: without the key it is 32768$",
    ),
    Case(
        "two different RoPEs",
        "sft",
        config_json({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}}),
        r"^model\.path: config\.json has rope_scaling and rope_parameters, which differ: rope_type is 'yarn' and 'default'; ",
    ),
    Case(
        "weights of 4 bits",
        "train",
        config_json({"quantization_config": {"quant_method": "gptq", "bits": 4}}),
        r"^model\.path: config\.json's quantization_config is not supported: \{'quant_method': 'gptq'.*; fp8, fbgemm_fp8 and",
    ),
    Case(
        "quantised in no way that is known",
        "dpo",
        config_json({"quantization_config": 8}),
        r"^model\.path: config\.json's quantization_config is not supported: 8; fp8",
    ),
    Case(
        "longest sequence as a text",
        "serve",
        config_json({"max_position_embeddings": "512"}),
        says("max_position_embeddings", "'512'", "valid integer"),
    ),
    Case(
        "longest sequence as true",
        "train",
        config_json({"max_position_embeddings": True}),
        says("max_position_embeddings", "True", "valid integer"),
    ),
    Case(
        "architectures as a text",
        "train",
        config_json({"architectures": "Qwen3MoeForCausalLM"}),
        says("architectures", "'Qwen3MoeForCausalLM'"),
    ),
    Case("architectures of lists", "train", config_json({"architectures": [["x"]]}), says(r"architectures\.0", r"\['x'\]")),
    Case("tied as a text", "train", config_json({"tie_word_embeddings": "false"}), says("tie_word_embeddings", "'false'", "valid boolean")),
    Case("layer types as a number", "train", config_json({"layer_types": 5}), says("layer_types", "5", "valid list")),
    Case("RoPE of a number", "train", config_json({"rope_parameters": 3}), says("rope_parameters", "3")),
    Case(
        "RoPE of a type that is a list",
        "train",
        config_json({"rope_parameters": {"rope_type": ["yarn"]}}),
        says(r"rope_parameters\.rope_type", r"\['yarn'\]"),
    ),
    Case(
        "RoPE's base as a text",
        "train",
        config_json({"rope_parameters": {"rope_theta": "1e6"}}),
        says(r"rope_parameters\.rope_theta", "'1e6'"),
    ),
    Case(
        "RoPE's factor as NaN",
        "train",
        config_json({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": float("nan")}}),
        says(r"rope_parameters\.factor", "nan"),
    ),
    Case(
        "a billion layers",
        "train",
        config_json({"num_hidden_layers": 10**9}),
        r"^model\.path: config\.json has 1000000000 layers of 8 experts, more than 262144",
    ),
    Case(
        "a billion experts",
        "train",
        config_json({"num_experts": 10**9}),
        r"^model\.path: config\.json has 2 layers of 1000000000 experts, more than 262144",
    ),
    Case("10^30 hidden units", "train", config_json({"hidden_size": 10**30}), says("hidden_size", r"1\d+ is", "2147483647")),
    Case(
        "10^400 positions",
        "train",
        config_json({"max_position_embeddings": 10**400}),
        says("max_position_embeddings", r"1\d+ is", "2147483647"),
    ),
    Case("config.json of lists", "train", wrote("config.json", DEEP), r"^model\.path: .*config\.json is not JSON: nested too deeply$"),
    Case(
        "config.json of mappings",
        "train",
        wrote("config.json", b'{"a": ' * 50_000),
        r"^model\.path: .*config\.json is not JSON: nested too deeply$",
    ),
    Case(
        "config.json in Latin-1",
        "train",
        wrote("config.json", b'{"a": "\xe9"}'),
        r"^model\.path: .*config\.json is not JSON: 'utf-8' codec",
    ),
    Case(
        "config.json with a key twice",
        "train",
        wrote("config.json", b'{"a": 1, "a": 2}'),
        r"^model\.path: .*config\.json is not JSON: 'a' is there twice$",
    ),
    Case(
        "config.json with half a surrogate pair",
        "train",
        config_json({"note": "\ud800"}),
        r"^model\.path: .*config\.json is not JSON: .*surrogates not allowed$",
    ),
    Case("config.json is a pipe", "train", pipe("config.json"), r"^model\.path: .* has no config\.json$"),
    Case("weights are a pipe", "train", pipe("model.safetensors"), r"^model\.path: .* has neither model\.safetensors nor "),
    Case("a tokenizer of lists", "train", model(deep_tokenizer), r"^model\.path: no usable tokenizer in "),
    Case("a tokenizer of nothing", "train", wrote("tokenizer.json", b"{}"), r"^model\.path: no usable tokenizer in "),
    Case("a header of lists", "train", header(DEEP), r"^model\.path: .*its header is not a JSON object: nested too deeply$"),
    Case(
        "a header of mappings", "train", header(b'{"a": ' * 50_000), r"^model\.path: .*its header is not a JSON object: nested too deeply$"
    ),
    Case(
        "a header with a name twice",
        "train",
        header(b'{"a": 1, "a": 2}'),
        r"^model\.path: .*its header is not a JSON object: 'a' is there twice$",
    ),
    Case(
        "an index of lists",
        "train",
        wrote("model.safetensors.index.json", DEEP),
        r"^model\.path: .*index\.json is not JSON: nested too deeply$",
    ),
    Case(
        "an index of long names",
        "train",
        wrote("model.safetensors.index.json", json.dumps({"weight_map": {"a": LONG}}).encode()),
        r"index\.json names 'x{100}.*, which is not a file in the directory$",
    ),
    Case("a dtype that is a number", "train", config_json({"torch_dtype": 16}), says("torch_dtype", "16", "valid string")),
    Case(
        "generation defaults of lists",
        "train",
        wrote("generation_config.json", DEEP),
        r"generation_config\.json is not JSON: nested too deeply$",
    ),
    Case(
        "generation defaults that end with a text",
        "eval",
        wrote("generation_config.json", b'{"eos_token_id": "x"}'),
        r"^model\.path: generation_config\.json's eos_token_id='x': .*valid integer",
    ),
    Case(
        "a tokenizer without an end token",
        "train",
        wrote("tokenizer_config.json", b"{}"),
        r"^model\.path: the tokenizer in .* has no eos_token",
    ),
    Case("a tokenizer's settings of lists", "train", wrote("tokenizer_config.json", DEEP), r"^model\.path: no usable tokenizer in "),
    Case(
        "a tokenizer's end token that is a number",
        "train",
        wrote("tokenizer_config.json", b'{"eos_token": 3}'),
        r"^model\.path: no usable tokenizer in ",
    ),
    # --- chat templates
    Case(
        "a template without the prompt",
        "train",
        template("hello"),
        r"^data\.chat: the model's chat template leaves the prompt out: .*'hello'$",
    ),
    Case(
        "a template of the system's words",
        "train",
        template("{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}"),
        r"^data\.chat: .*leaves the prompt out",
    ),
    Case(
        "a template that counts",
        "train",
        template(COUNTS),
        r"^data\.chat: the model's chat template: not done within 2\.005 s of CPU time$",
    ),
    Case(
        "a template that counts for some prompts",
        "train",
        template("{{ messages[0].content }}{% if 'f7' not in messages[0].content %}" + COUNTS + "{% endif %}"),
        r"^data\.train: item 0: the model's chat template refuses one of 64 prompts from here on: not done within",
    ),
    Case(
        "a template that swells",
        "train",
        template("{{ 'x' * 100000000000 }}"),
        r"^data\.chat: the model's chat template: MemoryError",
    ),
    Case(
        "a template that doubles",
        "sft",
        template("{% set ns = namespace(x='x') %}{% for a in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}"),
        r"^data\.chat: the model's chat template: MemoryError",
    ),
    Case(
        "a template of a power",
        "train",
        template("{{ 10 ** 10 ** 9 }}"),
        r"^data\.chat: the model's chat template raises to a power \(\*\*\), which can take forever$",
    ),
    Case(
        "a template of roles", "sft", template("{% for m in messages %}{{ m.role }}{% endfor %}"), r"^data\.chat: .*leaves the prompt out"
    ),
]

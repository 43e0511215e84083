"""What a GPU of an engine (vLLM) holds: weights, buffers and the KV cache."""

from dataclasses import dataclass
from math import prod

from megarl.config import RolloutSettings
from megarl.models.description import ModelDescription
from megarl.models.weight_map import OUTPUT
from megarl.models.weight_ops import QKV, Fused, Op
from megarl.plan.devices import GB
from megarl.plan.facts import Facts, facts
from megarl.plan.states import ITEM

OVERHEAD = 4 * GB  # CUDA's context, NCCL, graphs, activations of one rank's prompt tokens in a step: an estimate
VOCABULARY = 64  # vLLM pads the vocabulary to a multiple of this many rows (vocab_parallel_embedding.py)
FP8_BYTES = 1 + 4 / 128**2  # of a weight: float8, and a float32 scale for each block of 128 x 128
# Models whose ranks split the tokens before they send them to the experts of other ranks, and therefore all hold the whole shared experts
# (vllm/config/parallel.py:715, use_sequence_parallel_moe; its users are model_executor/models/deepseek_v2.py:369 and qwen3_moe.py:211).
_SPLIT_TOKENS = (
    *("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", "GptOssForCausalLM"),
    *(
        "Qwen3MoeForCausalLM",
        "Qwen3NextForCausalLM",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
        "GraniteMoeForCausalLM",
        "NemotronHForCausalLM",
    ),
)


@dataclass(frozen=True)
class EngineMemory:
    """One GPU of an engine, in bytes."""

    tp: int
    dp: int
    share: float  # of the GPU, for the engine
    weights: float
    experts: float  # part of the weights
    split: bool  # whether the tokens of a data-parallel rank are split among its GPUs on their way to the experts
    overhead: float
    token: float  # KV cache of one token in all layers
    windowed: float  # part of it in layers with a sliding window, which keep the tokens of the window
    window: int
    state: float  # what a sequence keeps beside that, however long it is: states of gated delta nets
    cache: float  # what is left for the KV cache; below 0: nothing fits
    longest: int  # tokens of the longest sequence

    @property
    def devices(self) -> int:
        """The GPUs of the engine."""
        return self.dp * self.tp

    @property
    def size(self) -> str:
        """The settings that give the engine its size, as text for a message."""
        return f"rollout.tp={self.tp}" + f" rollout.dp={self.dp}" * (self.dp > 1)

    @property
    def room(self) -> bool:
        """Whether the KV cache has room for one sequence of the greatest length."""
        return self.cache >= self.sequence(self.longest)

    @property
    def live(self) -> float:
        """How many sequences of the greatest length the engine holds at once: each data-parallel rank has sequences of its own."""
        return self.dp * max(0.0, self.cache) / self.sequence(self.longest)

    def sequence(self, tokens: float) -> float:
        """Bytes of the cache of one sequence of as many tokens."""
        return self.token * tokens - self.windowed * max(0.0, tokens - self.window) + self.state


def engine_weights(model: ModelDescription, tp: int, dtype: str, dp: int = 1, *, expert_parallel: bool = False, fp8: bool = False) -> int:
    """Bytes of weights on the fullest rank of an engine, as `weight_parts` counts them."""
    return sum(weight_parts(model, tp, dtype, dp, expert_parallel=expert_parallel, fp8=fp8))


def weight_parts(
    model: ModelDescription, tp: int, dtype: str, dp: int = 1, *, expert_parallel: bool = False, fp8: bool = False
) -> tuple[int, int]:
    """Bytes of all other weights, and of routed experts, on the fullest rank of an engine.

    All but the routed experts are sharded over `tp` ranks and replicated over `dp`; norms, routers and down-projections to latents are
    replicated on every rank. Of the experts, each of the dp * tp ranks holds a slice of every one, or whole ones.

    Args:
        model: the model.
        tp: tensor parallel size of the engine.
        dtype: the dtype of the weights that are not quantised.
        dp: data parallel size of its attention.
        expert_parallel: whether each rank holds whole experts.
        fp8: whether linear layers and experts are quantised.
    """
    description = facts(model)
    ranks, split_bytes, expert_bytes = dp * tp, 0.0, 0.0
    for one in model.trunk.mappings("lm"):
        if one.alias and one.megatron == OUTPUT:
            continue  # embedding and output share one table
        layers = 1 if "{layer}" not in one.megatron else description.n.layers if one.layers is None else len(one.layers)
        item = 4 if one.float32 else FP8_BYTES if fp8 and one.linear else ITEM[dtype]
        if "{expert}" not in one.megatron:
            shared = ".shared_experts." in one.megatron and splits_tokens(model, tp, dp, expert_parallel=expert_parallel)
            split_bytes += _elements(one.op, 1 if shared else tp) * layers * item
        elif expert_parallel:  # the first ranks have one more, if they do not divide (fused_moe/expert_map_manager.py:67)
            expert_bytes += _elements(one.op, 1) * -(-description.n.experts // ranks) * layers * item
        else:
            expert_bytes += _elements(one.op, ranks) * description.n.experts * layers * item
    return round(split_bytes) + absorbed_bytes(description, tp, dtype), round(expert_bytes)


def absorbed_bytes(description: Facts, tp: int, dtype: str) -> int:
    """Bytes of the up-projection of the latents once more, transposed (mla_attention.py: W_UV, W_UK_T); 0 without latents.

    Args:
        description: the model.
        tp: tensor parallel size of the engine.
        dtype: the dtype of these copies, which are never quantised.
    """
    if description.latents is None:
        return 0
    return (
        description.n.heads
        // tp
        * (description.latents.plain + description.latents.value)
        * description.latents.key_value
        * description.n.layers
        * ITEM[dtype]
    )


def splits_tokens(model: ModelDescription, tp: int, dp: int, *, expert_parallel: bool) -> bool:
    """Whether the ranks of an engine split the tokens of a data-parallel rank among them before these go to the experts.

    Args:
        model: the model.
        tp: tensor parallel size of the engine.
        dp: data parallel size of its attention.
        expert_parallel: whether each rank holds whole experts.
    """
    return expert_parallel and tp > 1 and dp > 1 and model.architecture in _SPLIT_TOKENS


def _elements(op: Op, tp: int) -> int:
    inner = op.parts if isinstance(op, Fused) else op
    if isinstance(inner, QKV):
        own = inner.heads // tp * (2 if inner.gated else 1) + 2 * max(1, inner.groups // tp)
        return own * inner.head_dim * prod(inner.rest)
    if op.axis is None:
        return prod(op.packed_shape)
    if op.pads:
        return -(-op.packed_shape[0] // VOCABULARY) * VOCABULARY // tp * prod(op.packed_shape[1:])
    return prod(op.packed_shape) // tp


def cache_bytes(description: Facts, tp: int, dtype: str) -> int:
    """Bytes of the KV cache for one token on one rank. Latents are replicated on every rank.

    Args:
        description: the model.
        tp: the number of ranks of the engine.
        dtype: the dtype of keys and values.
    """
    if description.latents is not None:
        indexed = description.n.indexer.head_dim if description.n.indexer is not None else 0
        return description.n.layers * (description.latents.key_value + description.latents.rotary + indexed) * ITEM[dtype]
    return 2 * description.attention_layers * max(1, description.n.groups // tp) * description.n.head_dim * ITEM[dtype]


def state_bytes(description: Facts, tp: int, dtype: str) -> float:
    """Bytes that a sequence keeps on one rank however long it is: the states of gated delta nets.

    Args:
        description: the model.
        tp: the number of ranks of the engine.
        dtype: the dtype of the cache.
    """
    if description.delta_nets is None:
        return 0.0
    return description.linear_layers * description.delta_nets.state_bytes(ITEM[dtype]) / tp


def plan_engine(model: ModelDescription, settings: RolloutSettings, dtype: str, memory: float) -> EngineMemory:
    """Plan the memory of one GPU of an engine.

    Args:
        model: the model.
        settings: the section `rollout`.
        dtype: the dtype of the engine.
        memory: the GPU's memory in bytes.
    """
    description, tp, dp = facts(model), settings.tp, settings.dp
    apart, fp8 = settings.expert_parallel, settings.quantization == "fp8"
    split_bytes, expert_bytes = weight_parts(model, tp, dtype, dp, expert_parallel=apart, fp8=fp8)
    scores = settings.max_num_seqs * description.n.vocab * 4 * 3  # logits in float32, sorted and normalised
    overhead = OVERHEAD + scores + (dp - 1) * _gathered(description, settings, dtype)
    cache = memory * settings.gpu_memory_fraction - split_bytes - expert_bytes - overhead
    longest = settings.max_prompt_tokens + settings.max_response_tokens
    return EngineMemory(
        tp=tp,
        dp=dp,
        share=settings.gpu_memory_fraction,
        weights=split_bytes + expert_bytes,
        experts=expert_bytes,
        split=splits_tokens(model, tp, dp, expert_parallel=apart),
        overhead=overhead,
        token=cache_bytes(description, tp, dtype),
        windowed=cache_bytes(description, tp, dtype) * description.windowed,
        window=description.window or 0,
        state=state_bytes(description, tp, dtype),
        cache=cache,
        longest=longest,
    )


def _gathered(description: Facts, settings: RolloutSettings, dtype: str) -> int:
    """Bytes that the prompt tokens of one more data-parallel rank take on every rank.

    The tokens of all ranks meet at the experts: hidden states, and two workspaces with a row for each expert of each token (vLLM's
    fused_moe/experts/triton_moe.py: workspace_shapes; modular_kernel.py: _allocate_buffers no longer cuts them into chunks).
    """
    inner = description.n.expert_ffn if settings.expert_parallel else description.n.expert_ffn // settings.devices
    return settings.step_tokens * (2 * description.topk * max(description.n.hidden, 2 * inner) + 2 * description.n.hidden) * ITEM[dtype]

"""The engines: how they sample, and how new weights reach them."""

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from megarl.config.model import Layout
from megarl.config.section import BatchSize, Megabytes, Seconds, Section


@dataclass(frozen=True)
class Truncation:
    """What a token must meet to be sampled, in the order in which vLLM applies it (v1/sample/sampler.py:276-292)."""

    min_p: float = 0.0
    """The least probability, as a share of the likeliest token's."""
    top_k: int = 0
    """Keep those for which fewer than this many tokens are likelier; 0: all."""
    top_p: float = 1.0
    """Keep those for which the likelier tokens together have less than this probability, among the tokens left by the others."""


class VllmSettings(Section):
    """vLLM's AsyncLLM."""

    type: Literal["vllm"] = "vllm"
    args: dict[str, Any] = {}
    """Any fields of vLLM's AsyncEngineArgs that megarl does not set itself; names and types are checked."""


class RolloutSettings(Section):
    """The engines and how they sample."""

    engine: VllmSettings = VllmSettings()
    """The engine that samples."""
    replicas: Annotated[int, Field(gt=0, le=65_536)] = 1
    """Number of engines; the prompts are distributed over them."""
    tp: PositiveInt = 1
    """Tensor parallel size of one engine, or of each data parallel rank; these devices share a node."""
    dp: Annotated[int, Field(gt=0, le=65_536)] = 1
    """Data parallel size of one engine's attention: it has dp times tp devices, on one or several nodes, and spreads its experts over all
    of them; each data parallel rank keeps whole sequences with a KV cache of its own."""
    expert_parallel: bool = False
    """Spread whole experts over the devices of an engine, instead of a slice of every expert."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Data type of the engine's weights and activations; null: model.dtype."""
    fp32_head: bool = False
    """Compute the engine's logits in float32, as model.fp32_head does in the trainer."""
    quantization: Literal["fp8"] | None = None
    """fp8: the engine's linear layers and experts (not embeddings, routers and the output layer) hold float8 e4m3 values in blocks of
    128 x 128 with a float32 scale each, which the trainer computes at each sync, and quantise their inputs as well; null: weights in
    rollout.dtype. In training, fp8 is best corrected for by algorithm.correction."""
    samples_per_prompt: Annotated[int, Field(gt=0, le=65_536)] = 8
    """Responses to each prompt (the group size)."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature; log-probs are those at this temperature."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the most likely tokens that together have this probability; in training, below 1 only with train.logp_over=kept or
    algorithm.correction."""
    top_k: NonNegativeInt = 0
    """Sample from this many of the most likely tokens; 0: from all. In training, above 0 only with train.logp_over=kept or
    algorithm.correction."""
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Sample from tokens at least this share as likely as the most likely one; in training, above 0 only with train.logp_over=kept
    or algorithm.correction."""
    stop_token_ids: list[NonNegativeInt] = []
    """Tokens that end a response, besides the model's end token; they are part of its tokens, but not of its text."""
    stop: list[Annotated[str, Field(min_length=1)]] = []
    """Strings that end a response; they are part of its tokens and of its text."""
    max_prompt_tokens: PositiveInt = 1024
    """Maximum length of a prompt, in tokens; `data.overlong` says what happens to a longer one."""
    max_response_tokens: PositiveInt = 1024
    """Maximum length of a response, in tokens, including its end token."""
    max_num_seqs: BatchSize = 256
    """Maximum number of sequences that an engine decodes together, on each of its data parallel ranks."""
    kv_cache_mb: Megabytes | None = None
    """Size of the KV cache; required by CPU engines, refused by GPU engines (they use gpu_memory_fraction)."""
    gpu_memory_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.6
    """Share of a GPU's memory for the engine."""
    request_routing: Literal["deterministic", "affinity"] | None = None
    """affinity: an engine keeps its prefix cache until its weights change, and each episode stays at the data parallel rank that has its
    prefix, unless that rank has more unfinished requests than the least busy one by over a quarter of max_num_seqs. deterministic: each
    request goes to the least busy rank, and an idle engine begins with an empty cache, so that the same requests run in the same batches.
    null: affinity for agents without cluster.deterministic, else deterministic."""
    timeout_s: Seconds = 1800.0
    """Time limit for an engine to return the responses to a prompt."""

    @property
    def devices(self) -> int:
        """The number of devices of one engine, each with a process that holds a part of the weights."""
        return self.dp * self.tp

    @property
    def step_tokens(self) -> int:
        """The most prompt tokens that a data-parallel rank of an engine on GPUs computes in a step.

        vLLM takes 16,384 on GPUs of 70 GiB and more (vllm/engine/arg_utils.py:2743, LLM_CLASS). Since those of all ranks meet at the
        experts, in buffers that grow with their sum, each of several ranks takes fewer, but not so few that prompts take many steps.
        """
        given = self.engine.args.get("max_num_batched_tokens") if isinstance(self.engine, VllmSettings) else None
        return int(given or max(16_384 // self.dp, 2_048, self.max_num_seqs))

    @property
    def truncation(self) -> Truncation:
        """The rules that say from which tokens the engines sample."""
        return Truncation(self.min_p, self.top_k, self.top_p)

    @property
    def cut(self) -> str | None:
        """The first setting that excludes tokens from sampling, as text for a message; None if every token may be sampled."""
        wide = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
        return next((f"rollout.{name}={getattr(self, name):g}" for name, all_ in wide.items() if getattr(self, name) != all_), None)


class TrainRolloutSettings(RolloutSettings):
    """The engines of a run that trains, which can run ahead of the ranks."""

    mode: Literal["sync", "ahead", "budget", "free"] = "sync"
    """sync: the engines generate, then the ranks learn. ahead: the engines generate the next step while the ranks learn, with the weights
    that the ranks started from, so that every batch but the first is one update old. budget: the same, but responses not finished after
    budget_tokens continue with the next weights. free: the engines never wait, and unfinished responses continue with new weights as they
    arrive; no two runs are the same. All but sync need algorithm.correction for the older weights, or train.old_logp=rollout."""
    budget_tokens: PositiveInt | None = None
    """budget: maximum number of tokens that a response gains in one round. No token is older than
    ceil(max_response_tokens / budget_tokens) + 1 updates."""
    speculative: Annotated[int, Field(gt=0, le=8)] | None = None
    """Tokens that an engine drafts at a time with the model's multi-token prediction layer (model.mtp=train) and then checks, so that
    samples and log-probs are those without it; null: none."""
    max_lag: Annotated[int, Field(gt=0, le=1024)] | None = None
    """free: maximum number of updates by which a token may lag behind the weights that train on it."""

    @property
    def largest_lag(self) -> int:
        """The maximum number of updates by which a token can be older than the weights that train on it, in the chosen mode."""
        if self.mode == "budget":
            assert self.budget_tokens is not None
            return math.ceil(self.max_response_tokens / self.budget_tokens) + 1
        return {"sync": 0, "ahead": 1, "free": self.max_lag or 0}[self.mode]


MOST_SENDERS = 16  # each has a group of its own, and a bucket in every worker of an engine


class SyncSettings(Section):
    """How new weights reach the engines."""

    transport: Literal["gloo", "shm", "nccl", "cuda_ipc"] = "nccl"
    """nccl and gloo send over a process group; shm uses the shared memory of one machine, cuda_ipc the memory of one GPU."""
    bucket_mb: Megabytes | None = None
    """Maximum size of the buckets in which tensors are sent (a larger tensor has one of its own). The engines load a bucket while the next
    one is filled. null: 256, and 64 with shm, where both take about as long."""
    adapters: bool = False
    """With model.lora: send the adapters alone, with which engines compute beside the weights of model.path, instead of merged weights."""
    verify: bool = True
    """Verify the fingerprint of every tensor in the engines after each sync."""
    delta: Annotated[int, Field(ge=2)] | None = None
    """Send only the elements whose bits changed since the sync before; but everything after each step that this number divides, at the
    first sync, and after a failure. null: always everything. The engines hold the same bits either way. Each sender keeps what it sent in
    host memory, and each worker of an engine what it was sent, of experts its own. Over a network (gloo, nccl), for engines in bfloat16
    or fp8."""
    overlap: bool = False
    """Receive new weights into the engines' host memory while they generate, and pause generation only to load them. Each worker needs room
    there for what it is sent. With rollout.mode=free, over a network (gloo, nccl)."""
    logprob_gap: Annotated[float, Field(gt=0)] | None = None
    """Maximum mean |log-prob| gap between engine and trainer at step 1, in nats per token; null: what rounding explains. That is 1e-4 if
    both are float32, or vocabulary x 2^-27 where that is more (1.1e-3 with 151,936 tokens), else 0.5 (a warning above 0.05, with
    rollout.quantization above 0.1)."""
    timeout_s: Seconds = 600.0
    """Time limit of one sync."""

    def senders(self, layout: Layout, sharing: int) -> int:
        """The number of ranks that send to the engines.

        Without tensor parallelism the first rank of each part of a stage's experts sends that part, and the stage's first rank also what
        are not experts. With it (the ranks that gather a tensor would wait for those that wait to send), or if they are more than
        MOST_SENDERS, the first rank of each stage sends all of it. Each must reach the engines; else rank 0 sends all.

        Args:
            layout: the layout of the policy's ranks.
            sharing: how many of these ranks, from the first on, share their device with a worker of an engine, which then relays.
        """
        last = layout.ranks // layout.pp * (layout.pp - 1)  # the first rank of the last stage
        last_experts = last + (layout.ep - 1) * (layout.etp)
        reached = layout.ranks if self.transport in ("nccl", "gloo") else sharing
        if layout.tp == 1 and layout.pp * layout.ep <= MOST_SENDERS and last_experts < reached:
            return layout.pp * layout.ep
        return layout.pp if last < reached else 1

    @property
    def most_bucket_mb(self) -> int:
        """The maximum size of a bucket."""
        return self.bucket_mb or (64 if self.transport == "shm" else 256)

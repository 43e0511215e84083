"""The models of a run: weights, parallel layout, optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from string import Formatter
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PositiveFloat, PositiveInt, model_validator

from megarl.algorithms.distillation import Distillation
from megarl.algorithms.ops import Averaging
from megarl.config.section import (
    BatchSize,
    Beta,
    EnvironmentVariable,
    Fraction,
    Megabytes,
    Passes,
    Place,
    Seconds,
    Section,
    StepsOrNone,
    web_address,
)
from megarl.errors import ConfigError

Mtp = Literal["drop", "keep", "train"]


class LoraSettings(Section):
    """Low-rank adapters: they are trained, and the model's own weights are not. The reference is the model without them."""

    rank: PositiveInt = 16
    """Rank of each adapter: W + alpha / rank B A, with A [rank, in] and B [out, rank]."""
    alpha: PositiveFloat = 32.0
    """Scale of the adapters."""
    targets: list[str] | None = None
    """Adapted matrices: attention, mlp, experts, router, or names as q_proj, down_proj; null: all linear layers but the router."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability of a zero in what an adapter is given, the others being scaled by 1 / (1 - dropout). In updates alone: log-probs for
    ratios, KL and metrics, values and exported weights are those without it."""
    init: Place | None = None
    """A PEFT directory to begin from; null: a random A, and B zero."""


class ModelSettings(Section):
    """A model's weights and their precision."""

    path: Place
    """A Hugging Face directory: config.json, safetensors, tokenizer."""
    weights: Place | None = None
    """A step directory of `megarl convert` or of a run; its policy's weights are used instead of those in `path`."""
    base: Place | None = None
    """Weights that `megarl train` also evaluates, for comparison; same shapes, same tokenizer and end tokens."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision of weights and activations; the optimizer keeps float32 main weights. Routers score in float32."""
    fp32_head: bool = False
    """Compute a bfloat16 model's logits in float32: the output layer's input and weight are cast first."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation."""
    megatron: dict[str, Any] = {}
    """Any fields of megatron.core's TransformerConfig that megarl does not set itself; names and types are checked."""
    lora: LoraSettings | None = None
    """Train low-rank adapters instead of the weights; null: train the weights."""
    mtp: Mtp | None = None
    """A checkpoint's multi-token prediction layers: keep them in what is saved, unchanged; drop them; or train one with the model, which it
    reads and does not change (`megarl train`, `megarl sft`). null: such a checkpoint is refused."""
    mtp_loss_weight: PositiveFloat = 0.1
    """mtp=train: the weight of the layer's loss, the mean cross-entropy of the tokens after the next ones. Only its own weights have it."""
    drop_images: bool = False
    """Of Qwen3.5, take the language model alone: what sees images is left out of the run and of what it saves, a model of text."""
    vision: Literal["frozen", "train"] = "frozen"
    """Whether the vision tower of a model that sees images is trained with its language model."""
    min_pixels: PositiveInt | None = None
    """Least pixels of an image, in model ranks and engines: smaller ones are enlarged; null: those of the model's own image processor."""
    max_pixels: PositiveInt | None = None
    """Most pixels of an image: larger ones are reduced; null: those of the model's own image processor."""

    @model_validator(mode="before")
    @classmethod
    def _of_earlier_runs(cls, given: Any) -> Any:
        """Read drop_mtp, a boolean in the place of which there is mtp now."""
        if not isinstance(given, dict) or type(given.get("drop_mtp")) is not bool or "mtp" in given:
            return given
        return {**{key: value for key, value in given.items() if key != "drop_mtp"}, "mtp": "drop" if given["drop_mtp"] else None}

    @model_validator(mode="after")
    def _weighs_what_is_trained(self) -> ModelSettings:
        if self.mtp != "train" and self.mtp_loss_weight != type(self).model_fields["mtp_loss_weight"].default:
            raise ValueError(f"model.mtp_loss_weight={self.mtp_loss_weight:g}: nothing reads it without model.mtp=train")
        return self


class Layout(Section):
    """How ranks divide one model among them. The data-parallel size follows: ranks / (tp * pp * cp)."""

    ranks: Annotated[int, Field(gt=0, le=1 << 20)] = 1
    """GPUs that train the model, with one process on each (on a CPU: processes); dp = ranks / (tp * pp * cp)."""
    tp: PositiveInt = 1
    """Tensor parallel size, with sequence parallelism if tp > 1."""
    pp: PositiveInt = 1
    """Pipeline parallel size: the number of stages."""
    vpp: Annotated[int, Field(ge=2)] | None = None
    """Model chunks per pipeline stage (interleaved schedule)."""
    cp: PositiveInt = 1
    """Context parallel size."""
    ep: PositiveInt = 1
    """Expert parallel size."""
    etp: PositiveInt = 1
    """Tensor parallel size within an expert."""

    @property
    def dp(self) -> int:
        """The data parallel size of the dense layers."""
        return self.ranks // (self.tp * self.pp * self.cp)

    def dp_rank(self, rank: int) -> int:
        """Return the index of the part of a batch, of `dp` parts, that a rank works on."""
        return rank // (self.tp * self.cp) % self.dp

    @model_validator(mode="after")
    def _divides(self) -> Layout:
        dense, expert = self.tp * self.pp * self.cp, self.etp * self.ep * self.pp
        if self.ranks % dense:
            raise ValueError(f"layout.ranks={self.ranks} is not divisible by tp*pp*cp={self.tp}*{self.pp}*{self.cp}={dense}")
        if self.ranks % expert:
            raise ValueError(f"layout.ranks={self.ranks} is not divisible by etp*ep*pp={self.etp}*{self.ep}*{self.pp}={expert}")
        if self.vpp is not None and self.pp == 1:
            raise ValueError(f"layout.vpp={self.vpp} needs layout.pp > 1, and it is 1")
        return self


class MuonSettings(Section):
    """Muon for the matrices of linear layers and experts; AdamW has embeddings, output layer, head, norms, biases and a vision tower."""

    lr: Annotated[float, Field(gt=0)] | None = None
    """Peak learning rate of the matrices, with the schedule of `optimizer.lr`; null: `optimizer.lr`."""
    momentum: Beta = 0.95
    """Decay rate of the matrices' only moment."""
    nesterov: bool = True
    """Orthogonalise the mean of gradient and moment, weighted by momentum, instead of the moment."""
    ns_steps: Annotated[int, Field(gt=0, le=100)] = 5
    """Newton-Schulz steps, each a polynomial of degree 5 (arithmetic in model.dtype)."""
    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Factor on the orthogonal update of a matrix [out, in]. match_rms_adamw: 0.2 sqrt(max(out, in)), so that AdamW's learning rate and
    weight decay suit it (Moonlight, arXiv:2502.16982). original: sqrt(max(1, out / in)), which needs a much larger `lr`."""
    routers: bool = False
    """Routers' matrices, too; otherwise they are AdamW's."""


class OptimizerSettings(Section):
    """AdamW through Megatron's distributed optimizer, alone or with Muon."""

    lr: Annotated[float, Field(gt=0)] = 1e-6
    """Peak learning rate, reached at the end of the warm-up."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """Decay rates of Adam's first and second moments."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the square root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay."""
    clip_grad: Annotated[float, Field(gt=0)] = 1.0
    """Maximum global gradient norm; a gradient with a larger norm is scaled down to it."""
    warmup_steps: StepsOrNone = 0
    """Optimizer steps over which the learning rate rises linearly to `lr`; the first step uses lr / warmup_steps."""
    decay: Literal["constant", "linear", "cosine", "wsd", "inverse_sqrt"] = "constant"
    """Schedule of the learning rate after the warm-up, over all steps; wsd (warm-up, stable, decay) decays only over the last ones."""
    min_lr_fraction: Fraction = 0.1
    """Final learning rate, as a share of `lr`."""
    anneal_fraction: Annotated[float, Field(gt=0, le=1)] = 0.2
    """wsd: the share of all steps over which the learning rate decays."""
    anneal: Literal["linear", "cosine", "exponential", "minus_sqrt"] = "linear"
    """wsd: the shape of the decay."""
    muon: MuonSettings | None = None
    """Update matrices by Muon; null: AdamW updates everything."""
    megatron: dict[str, Any] = {}
    """Any fields of megatron.core's OptimizerConfig; names and types are checked. `{optimizer_cpu_offload: true,
    optimizer_offload_fraction: 1.0}` keeps the moments in host memory."""
    ddp: dict[str, Any] = {}
    """Any fields of megatron.core's DistributedDataParallelConfig, such as `{overlap_grad_reduce: true}`; names and types are checked."""

    @property
    def offloaded(self) -> float:
        """The share of the parameters that are updated in host memory."""
        return float(self.megatron.get("optimizer_offload_fraction", 0.0)) if self.megatron.get("optimizer_cpu_offload") else 0.0


class CriticOptimizer(OptimizerSettings):
    """Optimizer of the critic."""

    lr: Annotated[float, Field(gt=0)] = 2e-6
    """Peak learning rate, reached at the end of the warm-up."""


class RewardModelOptimizer(OptimizerSettings):
    """Optimizer of a reward model."""

    lr: Annotated[float, Field(gt=0)] = 1e-5
    """Peak learning rate, reached at the end of the warm-up."""


class CriticSettings(Section):
    """The value model of the value-based algorithms: the policy's architecture with a scalar head."""

    path: Place | None = None
    """The backbone, and the head too if this is a reward model or an earlier critic. null: `model.path` with a fresh head."""
    optimizer: CriticOptimizer = CriticOptimizer()
    """The critic's own optimizer."""
    aggregation: Averaging = "token-mean"
    loss_coef: PositiveFloat = 0.5
    """Factor on the squared error of the value loss."""
    epochs: Passes = 1
    """Passes of the critic over a step's mini-batches."""
    micro_batch_tokens: PositiveInt | None = None
    """Maximum number of tokens in one of the critic's micro-batches; null: `train.micro_batch_tokens`.

    It may be larger than the policy's, since a critic produces no logits. If both share ranks, the critic combines several of the
    policy's micro-batches into one.
    """
    pretrain_steps: StepsOrNone = 0
    """Value pretraining (VC-PPO, VAPO): maximum number of steps in which only the critic is trained, on Monte Carlo returns."""
    pretrain_tolerance: Annotated[float, Field(ge=0)] = 0.01
    """Value pretraining ends early once 10 steps have lowered the value loss by less than this share."""


class TeacherServer(Section):
    """A server of a teacher that speaks OpenAI's protocol and returns prompt_logprobs with token ids, as vLLM's does."""

    url: Annotated[str, AfterValidator(web_address)]
    """Its address, such as http://127.0.0.1:8000/v1."""
    model: str
    """The model's name there, one of those that <url>/models lists."""
    token_env: EnvironmentVariable | None = None
    """The environment variable that holds a bearer token."""
    connections: Annotated[int, Field(gt=0, le=1024)] = 16
    """Maximum number of requests in flight; each has one context, a prompt with the response to it."""
    timeout_s: Seconds = 600.0
    """Time limit of one request, including its answer."""
    attempts: Annotated[int, Field(gt=0, le=1_000_000)] = 5
    """Maximum number of attempts per request."""
    backoff_s: Annotated[float, Field(ge=0, le=86_400)] = 1.0
    """Pause before the second attempt; doubles before each further one, up to 30 s."""
    deadline_s: Seconds = 1800.0
    """Time limit for scoring all responses of a step, including retries."""


OF_ROLLOUTS = ("solution", "feedback")  # what a teacher's prompt may show of a step's responses


class DistillationSettings(Section, Distillation):
    """On-policy distillation: on the policy's own tokens, it is drawn towards the probabilities of a teacher."""

    teacher: Place | None = None
    """A Hugging Face directory of a language model with the policy's tokenizer, of any size and family. It scores on model ranks, or on
    engines (placement.teacher_engines)."""
    teachers: Annotated[dict[str, Place], Field(max_length=64)] = {}
    """Instead of one teacher, one for each source: {SOURCE: directory}. A prompt's source is its row's column data_source,
    or the name of its reasoning-gym data set."""
    server: TeacherServer | None = None
    """Instead of a directory, a server that scores for the teacher."""
    servers: Annotated[dict[str, TeacherServer], Field(max_length=64)] = {}
    """Instead of one server, one for each source, as `teachers`."""
    prompt: str | None = None
    """What a teacher on ranks reads in the place of the prompt, or of a chat's last message: a template with {prompt}, and with {answer},
    {COLUMN} of the row, {solution}, another response to the prompt that is right, or {feedback}, what the verifier says about the response.
    If no teacher is given, the policy is its own, with the weights that a step begins with. null: the prompt."""
    success: float = 0.5
    """With {solution}: the reward from which on a response is right."""

    @model_validator(mode="after")
    def _has_teachers(self) -> DistillationSettings:
        given = [name for name in ("teacher", "teachers", "server", "servers") if getattr(self, name)]
        if len(given) != 1 and not self.by_itself:
            raise ValueError(
                "distillation.teacher: give one teacher, or teachers, one for each data source, or one server, or servers in their place "
                f"(given: {', '.join(given) or 'none'})"
            )
        return self

    @model_validator(mode="after")
    def _shows_the_prompt(self) -> DistillationSettings:
        if self.prompt is None:
            if "success" in self.model_fields_set:
                raise ValueError(f"success={self.success:g}: says which response is the {{solution}} of distillation.prompt, which is null")
            return self
        try:
            fields = [(name, spec, conversion) for _, name, spec, conversion in Formatter().parse(self.prompt) if name is not None]
        except ValueError as error:
            raise ValueError(f"prompt: {self.prompt!r:.80}: {error} (a brace of the text is written twice)") from None
        names = [name for name, _, _ in fields]
        if odd := [name for name, spec, conversion in fields if not name or spec or conversion]:
            raise ValueError(f"prompt: {{{odd[0]}...}}: between braces is one name and nothing else (a brace of the text is written twice)")
        if "prompt" not in names:
            raise ValueError(f"prompt: {self.prompt!r:.80} has no {{prompt}} in it")
        if self.by_itself and set(names) == {"prompt"}:
            raise ValueError("prompt: shows the policy, which is its own teacher here, nothing that it has not seen; name {answer}, say")
        if self.server is not None or self.servers:
            raise ValueError("prompt: a server scores after the policy's own prompt; give a teacher, which is on ranks, or none")
        if "success" in self.model_fields_set and not self.shows("solution"):
            raise ValueError(f"success={self.success:g}: distillation.prompt has no {{solution}} in it")
        return self

    @property
    def by_itself(self) -> bool:
        """Whether the policy is its own teacher."""
        return self.prompt is not None and not (self.teacher or self.teachers or self.server or self.servers)

    def shows(self, name: str) -> bool:
        """Whether the template names this."""
        return self.prompt is not None and any(one == name for _, one, _, _ in Formatter().parse(self.prompt))

    @property
    def shows_rollouts(self) -> bool:
        """Whether what the teacher reads depends on the responses."""
        return any(map(self.shows, OF_ROLLOUTS))

    @property
    def models(self) -> dict[str, Path]:
        """The directory of each teacher, by the setting that names it; those of several sources that share one have it once."""
        return {name: one for name, one in self.scorers.items() if isinstance(one, Path)}

    @property
    def scorers(self) -> dict[str, Path | TeacherServer]:
        """The directory or the server of each teacher, by the setting that names it; what several sources share is there once."""
        if (one := self.teacher or self.server) is not None:
            return {"teacher" if self.teacher is not None else "server": one}
        section = "teachers" if self.teachers else "servers"
        named = dict[Path | TeacherServer, str]()
        for source, one in (self.teachers or self.servers).items():
            named.setdefault(one, f"{section}.{source}")
        return {name: one for one, name in named.items()}

    def taught_by(self, meta: Mapping[str, Any], place: str) -> int:
        """Which of `scorers` scores the responses to a prompt.

        Args:
            meta: the other columns of the prompt's row.
            place: the row's name in messages.

        Raises:
            ConfigError: its source has no teacher.
        """
        if not self.by_source:
            return 0
        section, among = ("teachers", self.teachers) if self.teachers else ("servers", self.servers)
        source = meta.get("data_source", meta.get("source_dataset"))
        if not isinstance(source, str) or source not in among:
            column = "has no data_source" if source is None else f"has data_source={source!r}"
            raise ConfigError(f"distillation.{section}: {place} {column}; there are teachers for {', '.join(map(repr, among))}")
        return list(self.scorers.values()).index(among[source])

    @property
    def by_source(self) -> bool:
        """Whether a prompt's source says which teacher scores the responses to it."""
        return bool(self.teachers or self.servers)


class TeacherEngines(Section):
    """Frozen vLLM engines that score for a teacher."""

    replicas: Annotated[int, Field(gt=0, le=65_536)] = 1
    """Number of engines of each teacher; the responses are distributed over them."""
    tp: PositiveInt = 1
    """Tensor parallel size of one engine; these devices share a node."""
    expert_parallel: bool = False
    """Spread whole experts over the devices of an engine, instead of a slice of every expert."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Data type of weights and activations; null: model.dtype."""
    fp32_head: bool = False
    """Compute the logits in float32."""
    max_num_seqs: BatchSize = 256
    """Maximum number of responses that an engine scores together."""
    kv_cache_mb: Megabytes | None = None
    """Size of the KV cache; required by CPU engines, refused by GPU engines (they use gpu_memory_fraction)."""
    gpu_memory_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.8
    """Share of a GPU's memory for the engine; the logits of the tokens that are scored together come on top."""


class Placement(Section):
    """Layouts of the models that have ranks of their own; the others share the policy's ranks (`layout`).

    Policy and critic are trained at the same time if they share no ranks.
    """

    critic: Layout | None = None
    """Layout of the critic on its own ranks."""
    reference: Layout | None = None
    """Layout of the reference model on its own ranks."""
    teacher: Layout | None = None
    """Layout of the teacher on its own ranks."""
    teacher_engines: TeacherEngines | None = None
    """Engines that score for the teacher, on GPUs of their own; null: model ranks do."""
    reward: Layout | None = None
    """Layout of the reward model on its own ranks."""
    engines: Literal["apart", "shared"] = "apart"
    """apart: engines have GPUs of their own; shared: they take turns with the policy's ranks on the same GPUs (rollout.dp * rollout.tp
    consecutive ranks per engine), and sleep in between."""
    offload: bool = False
    """Let models that share ranks take turns on the device; idle ones are kept in host memory (on a CPU: in files)."""

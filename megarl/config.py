"""The one typed configuration tree: every default of megarl lives here and nowhere else.

`load` reads a YAML file, applies `a.b=c` overrides, validates the result and returns a frozen tree. Every refusal is one line that
starts with the dotted key.
"""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from megarl.algorithms import Algorithm
from megarl.algorithms.dpo import Dpo
from megarl.errors import ConfigError


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
Seed = Annotated[int, Field(ge=0, lt=1 << 32)]


class ModelSettings(Section):
    """Which weights, in which precision."""

    path: Path  # a Hugging Face directory: config.json, safetensors, tokenizer
    weights: Path | None = None  # a step directory of `megarl convert` or of a run: its policy's weights are trained instead of path's
    base: Path | None = None  # `megarl train` also evaluates these weights (of the same shape), for comparison
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    recompute: Literal["none", "selective", "full"] = "none"  # activation recomputation
    trust_remote_code: Literal[False] = False  # not offered: a model directory never runs code here
    megatron: dict[str, Any] = {}  # any field of megatron.core's TransformerConfig, checked against its fields
    drop_mtp: bool = False  # leave out a checkpoint's layers of multi-token prediction, which are not trained; else they are refused


class Layout(Section):
    """How the model ranks share one model. Data parallel size is what is left: ranks / (tp * pp * cp)."""

    ranks: Positive = 1
    tp: Positive = 1  # tensor parallel; sequence parallel goes with it whenever tp > 1
    pp: Positive = 1  # pipeline stages
    vpp: Annotated[int, Field(ge=2)] | None = None  # model chunks per pipeline stage (interleaved schedule)
    cp: Positive = 1  # context parallel
    ep: Positive = 1  # expert parallel
    etp: Positive = 1  # tensor parallel inside an expert

    @property
    def dp(self) -> int:
        """Data parallel size of the dense layers."""
        return self.ranks // (self.tp * self.pp * self.cp)

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


class OptimizerSettings(Section):
    """AdamW through Megatron's distributed optimizer."""

    lr: Annotated[float, Field(gt=0)] = 1e-6
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    clip_grad: Annotated[float, Field(gt=0)] = 1.0
    warmup_steps: NonNegative = 0  # linear, in optimizer steps
    decay: Literal["constant", "cosine"] = "constant"
    min_lr_fraction: Fraction = 0.1  # where the cosine ends


class CriticSettings(Section):
    """The value model of the value-based algorithms: the policy's family with a scalar head, on the same ranks."""

    path: Path | None = None  # backbone (and head, from a reward model or an earlier critic); None: model.path with a fresh head
    optimizer: OptimizerSettings = OptimizerSettings(lr=2e-6)
    epochs: Positive = 1  # passes of the critic over a step's mini-batches
    # Most tokens of one of its micro-batches; None: train.micro_batch_tokens. A value is no vocabulary of logits, so it may well be more.
    micro_batch_tokens: Positive | None = None  # where critic and policy share ranks, the critic takes several of the policy's as one
    pretrain_steps: NonNegative = 0  # value pretraining (VC-PPO, VAPO): at most so many steps of the critic alone, on Monte Carlo returns
    pretrain_tolerance: Annotated[float, Field(ge=0)] = 0.01  # ended early: 10 steps have lowered the value loss by less than this share


class Placement(Section):
    """Which models have ranks of their own, laid out as said; the others share the policy's (`layout`).

    Policy and critic are trained at the same time where they share no ranks.
    """

    critic: Layout | None = None
    reference: Layout | None = None
    reward: Layout | None = None  # the reward model
    offload: bool = False  # models that share ranks take turns on the device; those that wait lie in host memory (on a CPU: in files)


class ReasoningGymSource(Section):
    """Procedural prompts of reasoning-gym: `items` entries of `dataset` drawn with `seed`."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    dataset: str
    params: dict[str, Any] = {}
    seed: NonNegative
    items: Positive
    exclude: ReasoningGymSource | None = None  # questions of this other source are left out (by text)


class FileSource(Section):
    """A .jsonl or .parquet file in the column layout of DAPO and verl: `prompt` (text or chat messages), `reward_model.ground_truth`."""

    type: Literal["file"] = "file"
    path: Path
    prompt_key: str = "prompt"
    answer_key: str = "reward_model.ground_truth"  # dotted: looks inside dictionaries


PromptSource = Annotated[ReasoningGymSource | FileSource, Field(discriminator="type")]


class DataSettings(Section):
    train: PromptSource
    eval: PromptSource
    chat: bool = True  # wrap each prompt in the tokenizer's chat template; false feeds `template` instead
    template: str = "{prompt}"  # used when chat is false
    shuffle: bool = True


class ReasoningGymReward(Section):
    """reasoning-gym's own scorer; partial credit below `threshold` counts 0, from it on 1."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    threshold: Fraction = 1.0
    extract: str | None = None  # regular expression: its last match (its first group) is the answer; None: the whole response, stripped


class MathReward(Section):
    """math-verify: 1 where the answer in the response equals the ground truth symbolically."""

    type: Literal["math_verify"] = "math_verify"


class FunctionReward(Section):
    """A user's function `module:name`, called as f(prompt=, response=, answer=, meta=) -> float or dict with key `score`."""

    type: Literal["function"] = "function"
    path: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]


class HttpReward(Section):
    """A server that scores batches of responses; what it is sent and answers: megarl.rewards.http."""

    type: Literal["http"] = "http"
    url: str  # http://127.0.0.1:8000/score
    token_env: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")] | None = None  # the environment variable that holds a bearer token
    batch_size: Positive = 64  # most responses in one request
    timeout_s: Annotated[float, Field(gt=0)] = 30.0  # one request with its answer
    attempts: Positive = 5  # of one request
    backoff_s: Annotated[float, Field(ge=0)] = 1.0  # before the second attempt; twice as long before each further one, 30 s at most
    deadline_s: Annotated[float, Field(gt=0)] = 300.0  # all responses of a step, further attempts included

    @field_validator("url")
    @classmethod
    def _address(cls, url: str) -> str:
        place = urlsplit(url)  # ValueError for a malformed one, and below for a port that is none
        if place.scheme not in ("http", "https") or not place.hostname or place.port == 0 or any(letter.isspace() for letter in url):
            raise ValueError(f"{url!r} is no http:// or https:// address")
        if place.username is not None or place.password is not None:
            raise ValueError("holds a user or a password; a token comes from the environment variable that token_env names")
        return url


class ModelReward(Section):
    """A reward model on Megatron ranks (`megarl rm` trains one): its score of the response's last token."""

    type: Literal["reward_model"] = "reward_model"
    path: Path  # a Hugging Face directory in the layout of sequence classification, with the policy's tokenizer
    unfinished: float | None = None  # what a response cut by the length limit scores; None: what the model says of it


TextReward = Annotated[ReasoningGymReward | MathReward | FunctionReward | HttpReward, Field(discriminator="type")]
RewardSource = Annotated[ReasoningGymReward | MathReward | FunctionReward | HttpReward | ModelReward, Field(discriminator="type")]


class OverlongSettings(Section):
    """DAPO's soft punishment of answers that run into the length limit (see megarl.rewards.shaping)."""

    buffer_tokens: Positive  # the punishment grows from 0 to `scale` over the last so many tokens before rollout.max_response_tokens
    scale: Annotated[float, Field(gt=0)] = 1.0


class NormaliseSettings(Section):
    """Rewards relative to those of the policy that the run starts from (see megarl.rewards.scale).

    All that comes after them is on this scale: overlong.scale, and thresholds of an algorithm (RAFT's, VAPO's positive_above).
    """

    prompts: Annotated[int, Field(ge=2)] = 256  # drawn from data.train, with one response each: their rewards give mean and deviation
    clip: Annotated[float, Field(gt=0)] | None = None  # standard deviations beyond which a reward counts no more


class RewardSettings(Section):
    source: RewardSource
    normalise: NormaliseSettings | None = None
    eval: TextReward | None = None  # what evaluations count instead of `source`: pass rates, where a reward model trains
    overlong: OverlongSettings | None = None
    require_finished: bool = True  # a response cut by the length limit scores 0
    timeout_s: Annotated[float, Field(gt=0)] = 10.0  # per sample; a late sample scores 0 (a server has source.timeout_s instead)
    workers: Positive = 1  # scoring processes, or connections to a server


class RolloutSettings(Section):
    """vLLM engines and how they sample."""

    replicas: Positive = 1
    tp: Positive = 1  # tensor parallel inside one engine
    samples_per_prompt: Positive = 8
    temperature: Annotated[float, Field(gt=0)] = 1.0
    max_prompt_tokens: Positive = 1024
    max_response_tokens: Positive = 1024
    max_num_seqs: Positive = 256  # sequences that an engine decodes together
    kv_cache_mb: Positive | None = None  # CPU engines need it; GPU engines use gpu_memory_fraction
    gpu_memory_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.6
    return_routes: bool = True  # routed experts of every token, for replay and for the routing metrics
    timeout_s: Annotated[float, Field(gt=0)] = 1800.0  # one generate call


class SyncSettings(Section):
    """How new weights reach the engines."""

    transport: Literal["gloo", "shm", "nccl", "cuda_ipc"] = "nccl"
    bucket_mb: Positive = 256  # tensors are sent in buckets of at most this size (or one tensor)
    verify: bool = True  # fingerprint every tensor that the engines hold after each sync
    logprob_gap: Annotated[float, Field(gt=0)] | None = None  # largest mean |log-prob| gap at step 1; None: 1e-4 fp32, 5e-2 bf16
    timeout_s: Annotated[float, Field(gt=0)] = 600.0


class StepSettings(Section):
    """One RL step and how often what happens."""

    steps: Positive
    prompts_per_step: Positive
    mini_batches: Positive = 1  # parts of a rollout, with an optimizer step on each
    epochs: Positive = 1  # passes of the policy over them
    micro_batch_tokens: Positive = 16384  # most tokens of one micro-batch on one context-parallel group
    dynamic_sampling_rounds: Positive | None = None  # drop groups of equal rewards; draw prompts at most so many times to fill the step
    drop_truncated: bool = False  # overlong filter: a response cut by the length limit gets no loss
    eval_every: NonNegative = 0  # 0: only before the first and after the last step
    eval_at_start: bool = True
    on_alarm: Literal["continue", "stop"] = "continue"  # stop: with a checkpoint, at the first alarm


class CheckpointSettings(Section):
    """Distributed checkpoints (`megarl.checkpoints`), from which a run resumes exactly."""

    every: NonNegative = 0  # steps between two saves; 0: none
    keep_last: Positive = 2  # the newest so many stay
    keep_every: NonNegative = 0  # and those of every so many steps; 0: no others
    asynchronous: bool = True  # written behind the next steps' back
    staging_mb: Positive = 8192  # host memory of a rank for tensors on their way to the disk; what exceeds it is waited for
    on_failure: Literal["stop", "continue"] = "stop"  # when a save fails: end the run, or raise an alarm and go on
    resume: bool = True  # go on from the run's newest whole checkpoint; false: what is there is moved aside, and the run begins anew


class ClusterSettings(Section):
    """Ray and the sockets. `interface: null` keeps every listening socket on loopback (one machine)."""

    address: str | None = None  # an existing Ray cluster; None starts one on this machine
    interface: str | None = None
    gpus: bool = True  # one for every model rank and every engine rank; false runs all of it on the CPU
    object_store_mb: Annotated[int, Field(ge=80)] = 200  # Ray needs 75 MB
    start_timeout_s: Annotated[float, Field(gt=0)] = 300.0
    phase_timeout_s: Annotated[float, Field(gt=0)] = 3600.0  # longest that any phase may take

    @model_validator(mode="after")
    def _reachable(self) -> ClusterSettings:
        if self.address is not None and self.interface is None:
            raise ValueError(f"cluster.interface: required with cluster.address={self.address}, whose machines must reach each other")
        return self


class LogSettings(Section):
    tensorboard: bool = True
    wandb: bool = False


class RunSettings(Section):
    """What every stage has: a name, a place, a seed, a model on ranks."""

    leaves: ClassVar[tuple[str, ...]] = ()  # files of its own in the run's directory

    name: Annotated[str, Field(pattern=r"^\w[\w.\-]*(/\w[\w.\-]*)*$")]  # a path below run_dir
    run_dir: Path = Path("runs")
    seed: Seed = 1
    model: ModelSettings
    layout: Layout = Layout()
    cluster: ClusterSettings = ClusterSettings()
    log: LogSettings = LogSettings()

    @property
    def directory(self) -> Path:
        return self.run_dir / self.name


class TrainingSettings(RunSettings):
    """What every stage that trains has besides."""

    save: CheckpointSettings = CheckpointSettings()


class TrainConfig(TrainingSettings):
    """`megarl train`: the RL loop."""

    optimizer: OptimizerSettings = OptimizerSettings()
    algorithm: Algorithm
    critic: CriticSettings | None = None  # with algorithms that need one
    placement: Placement = Placement()
    data: DataSettings
    reward: RewardSettings
    rollout: RolloutSettings = RolloutSettings()
    sync: SyncSettings = SyncSettings()
    train: StepSettings

    @model_validator(mode="after")
    def _batch_divides(self) -> TrainConfig:
        sequences = self.train.prompts_per_step * self.rollout.samples_per_prompt
        if sequences % self.train.mini_batches:
            raise ValueError(
                f"train.mini_batches={self.train.mini_batches} does not divide "
                f"prompts_per_step*samples_per_prompt={self.train.prompts_per_step}*{self.rollout.samples_per_prompt}={sequences}"
            )
        if sequences // self.train.mini_batches < self.layout.dp:
            raise ValueError(
                f"train.mini_batches={self.train.mini_batches} leaves {sequences // self.train.mini_batches} sequences "
                f"a mini-batch for {self.layout.dp} data-parallel ranks"
            )
        if self.algorithm.needs_critic and self.critic is None:
            raise ValueError(f"critic: algorithm.type={self.algorithm.type} needs a critic; give this section")
        if self.critic is not None and not self.algorithm.needs_critic:
            raise ValueError(f"critic: algorithm.type={self.algorithm.type} has no critic; leave this section out")
        self._check_placement(sequences // self.train.mini_batches)
        if self.rollout.samples_per_prompt < self.algorithm.min_group:
            raise ValueError(
                f"rollout.samples_per_prompt={self.rollout.samples_per_prompt}: algorithm.type={self.algorithm.type} compares the answers "
                f"to one prompt and needs at least {self.algorithm.min_group}"
            )
        if self.reward.overlong is not None and self.reward.overlong.buffer_tokens > self.rollout.max_response_tokens:
            raise ValueError(
                f"reward.overlong.buffer_tokens={self.reward.overlong.buffer_tokens} is more than "
                f"rollout.max_response_tokens={self.rollout.max_response_tokens}"
            )
        longest = self.rollout.max_prompt_tokens + self.rollout.max_response_tokens
        self._check_critic_tokens(longest)
        if longest > self.train.micro_batch_tokens:
            raise ValueError(
                f"train.micro_batch_tokens={self.train.micro_batch_tokens} is below rollout.max_prompt_tokens+max_response_tokens={longest}"
            )
        return self

    def _check_placement(self, sequences: int) -> None:
        """ValueError where a model that the run has not is given ranks, or more data-parallel ranks than a mini-batch has sequences."""
        there = {
            "critic": (self.critic is not None, f"algorithm.type={self.algorithm.type} has no critic"),
            "reference": (self.algorithm.needs_reference, f"algorithm.kl_coef={self.algorithm.kl_coef:g} keeps no reference"),
            "reward": (isinstance(self.reward.source, ModelReward), f"reward.source.type={self.reward.source.type} is no reward model"),
        }
        for role, (present, why) in there.items():
            layout: Layout | None = getattr(self.placement, role)
            if layout is not None and not present:
                raise ValueError(f"placement.{role}: {why}; leave this out")
            if layout is not None and sequences < layout.dp:
                raise ValueError(
                    f"placement.{role}.ranks={layout.ranks}: {layout.dp} data-parallel ranks for {sequences} sequences a mini-batch"
                )

    def _check_critic_tokens(self, longest: int) -> None:
        """ValueError where the critic's micro-batches are too small for a response, or for one of the policy's where they share ranks."""
        given = None if self.critic is None else self.critic.micro_batch_tokens
        if given is None:
            return
        if self.placement.critic is not None and given < longest:
            raise ValueError(f"critic.micro_batch_tokens={given} is below rollout.max_prompt_tokens+max_response_tokens={longest}")
        if self.placement.critic is None and given < self.train.micro_batch_tokens:
            raise ValueError(
                f"critic.micro_batch_tokens={given} is below train.micro_batch_tokens={self.train.micro_batch_tokens}, "
                "and critic and policy share ranks"
            )


class SftData(Section):
    """Demonstrations: prompt sources with their reference answers as responses."""

    train: PromptSource
    eval: PromptSource | None = None  # loss and token accuracy on right demonstrations of it
    chat: bool = True
    template: str = "{prompt}"
    demonstration: Literal["answer", "chain_sum_steps"] = "answer"  # the reference answer, or worked steps: "4-1=3;3-7=-4"
    corrupt_copy: Fraction = 0.0  # this share of the demonstrations of the last steps copies the question's word instead of answering ...
    corrupt_last: Fraction = 0.0  # ... over this last share of the steps: an open stand-in for a weak base model


class LearnSettings(Section):
    """The steps of a supervised stage, and how often it looks at its held-out source."""

    steps: NonNegative  # 0: the held-out numbers of model.path alone
    batch_size: Positive = 64  # responses, or pairs of them
    micro_batch_tokens: Positive = 16384
    max_tokens: Positive = 2048  # longest prompt + response
    eval_every: NonNegative = 0  # 0: only before the first and after the last step
    patience: NonNegative = 0  # so many evaluations in a row without a better one end the stage, with the best one's model; 0: all steps


class LearnConfig(TrainingSettings):
    """What the supervised stages have in common."""

    section: ClassVar[str]  # key of the stage's LearnSettings

    @property
    def learn(self) -> LearnSettings:
        """The stage's own section."""
        return getattr(self, self.section)

    @model_validator(mode="after")
    def _patience_has_evaluations(self) -> LearnConfig:
        if self.learn.patience and not self.learn.eval_every:
            raise ValueError(f"{self.section}.patience={self.learn.patience}: {self.section}.eval_every=0 evaluates nothing on the way")
        return self


class SftConfig(LearnConfig):
    """`megarl sft`: supervised training on response tokens."""

    section: ClassVar[str] = "sft"
    optimizer: OptimizerSettings = OptimizerSettings()
    data: SftData
    sft: LearnSettings

    @model_validator(mode="after")
    def _patience_has_data(self) -> SftConfig:
        if self.sft.patience and self.data.eval is None:
            raise ValueError(f"sft.patience={self.sft.patience}: there is no data.eval to measure on")
        return self


class GymPreferenceSource(ReasoningGymSource):
    """Pairs made from reasoning-gym's items: the right answer is chosen, a corrupted one (see megarl.data.corruption) rejected."""

    demonstration: Literal["answer", "chain_sum_steps"] = "answer"


class PreferenceFileSource(Section):
    """A .jsonl or .parquet file of pairs: `prompt`, `chosen` and `rejected`, each a text or chat messages.

    `chosen` and `rejected` may be whole conversations that end with the assistant's message; the prompt is then what comes before it.
    """

    type: Literal["file"] = "file"
    path: Path
    prompt_key: str = "prompt"  # dotted: looks inside dictionaries
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    margin_key: str = "margin"  # reward model: by how much the chosen one is better; a row without it has 0


PreferenceSource = Annotated[GymPreferenceSource | PreferenceFileSource, Field(discriminator="type")]


class PreferenceData(Section):
    train: PreferenceSource
    eval: PreferenceSource
    chat: bool = True
    template: str = "{prompt}"


class RmConfig(LearnConfig):
    """`megarl rm`: a reward model from pairs, started from a language model (with a fresh head) or from a reward model."""

    section: ClassVar[str] = "rm"
    optimizer: OptimizerSettings = OptimizerSettings(lr=1e-5)
    data: PreferenceData
    rm: LearnSettings


class DpoConfig(LearnConfig):
    """`megarl dpo`: a policy from pairs, against itself as it was (`model.path`) as the reference."""

    section: ClassVar[str] = "dpo"
    optimizer: OptimizerSettings = OptimizerSettings()
    algorithm: Dpo = Dpo()
    data: PreferenceData
    dpo: LearnSettings


class EvalData(Section):
    eval: PromptSource
    chat: bool = True
    template: str = "{prompt}"


class EvalConfig(RunSettings):
    """`megarl eval`: held-out pass rates of a Hugging Face directory through vLLM."""

    data: EvalData
    reward: RewardSettings
    rollout: RolloutSettings = RolloutSettings()


class PairsData(EvalData):
    train: PromptSource


class PairsSettings(Section):
    """What becomes of the responses to one prompt."""

    per_prompt: Positive = 1  # most pairs of a prompt
    answers: bool = False  # the prompt's answer, as the data has it, is scored and paired like a response
    prompts_per_call: Positive = 256  # are sampled and scored together


class PairsConfig(RunSettings):
    """`megarl pairs`: pairs of a policy's own responses, the better scored one first, for `megarl rm` and `megarl dpo`."""

    leaves: ClassVar[tuple[str, ...]] = ("train.jsonl", "eval.jsonl")
    data: PairsData
    reward: RewardSettings
    rollout: RolloutSettings = RolloutSettings()
    pairs: PairsSettings = PairsSettings()

    @model_validator(mode="after")
    def _responses_can_differ(self) -> PairsConfig:
        if not self.pairs.answers and self.rollout.samples_per_prompt < 2:
            raise ValueError("rollout.samples_per_prompt=1: a pair needs two responses (or pairs.answers=true)")
        return self


class ServeSettings(Section):
    """Where a reward model listens, and for what; the protocol is that of megarl.rewards.http."""

    port: Annotated[int, Field(ge=0, lt=1 << 16)] = 8000  # on loopback, or on cluster.interface; 0: any free one
    path: Annotated[str, Field(pattern=r"^/\S*$")] = "/score"
    token_env: Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")] | None = None  # the environment variable that holds the token to ask for
    max_tokens: Positive = 2048  # longest prompt + response
    micro_batch_tokens: Positive = 16384


class ServeData(Section):
    chat: bool = True
    template: str = "{prompt}"


class ServeConfig(RunSettings):
    """`megarl serve`: a reward model (`model.path`) on its ranks behind HTTP."""

    data: ServeData = ServeData()
    serve: ServeSettings = ServeSettings()


Root = TypeVar("Root", bound=RunSettings)


def load(path: Path, overrides: list[str], root: type[Root]) -> Root:
    """The validated tree of `path` with `a.b=c` overrides (values are YAML).

    A file may name another one, relative to itself, in the key `base`: the file is then laid over that one, key by key; a mapping that
    says its `type` takes the place of the base's as a whole. Raises ConfigError with one line per fault: the dotted key, what was given,
    what was expected.
    """
    tree = _read(path)
    for override in overrides:
        _apply(tree, override)
    try:
        return root.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_line(fault, root) for fault in error.errors())) from None


def dump(config: RunSettings) -> str:
    """The resolved tree as YAML, defaults included."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def _read(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    """The tree of a file laid over that of its `base`. `above`: the files that led here."""
    if not path.is_file():
        raise ConfigError(f"base: no such file: {path} (named in {above[-1]})" if above else f"config: no such file: {path}")
    if path.resolve() in [file.resolve() for file in above]:
        raise ConfigError(f"base: {path} leads back to itself")
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)
    except UnicodeDecodeError as error:
        raise ConfigError(f"config: {path} is not UTF-8: byte {error.start}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"config: {path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"config: {path} must hold a mapping, not {type(tree).__name__}")
    base = tree.pop("base", None)
    return tree if base is None else _laid_over(_read(path.parent / str(base), (*above, path)), tree)


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that is given twice, of which YAML keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"the key {key.value!r} is given twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _laid_over(base: Any, tree: Any) -> Any:
    if not isinstance(base, dict) or not isinstance(tree, dict) or "type" in tree:
        return tree
    return base | {key: _laid_over(base.get(key), value) for key, value in tree.items()}


def _apply(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {override!r}: expected key.subkey=value")
    *parents, last = key.split(".")
    node = tree
    for parent in parents:
        child = node.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(f"{key}: {parent} is a value ({child!r}), not a section")
        node = child
    try:
        node[last] = yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"{key}: {text!r} is not a YAML value") from None


def _line(fault: Any, root: type[BaseModel]) -> str:
    # Discriminated unions put the variant's tag into the location; it is no key of the file.
    location = [str(part) for part in fault["loc"]]
    key = ".".join(part for part in location if part not in _tags(root))
    if fault["type"] == "extra_forbidden":
        guess = difflib.get_close_matches(location[-1], sorted(_keys(root) - {location[-1]}), n=1)
        return f"{key}: unknown key" + (f" (did you mean {guess[0]!r}?)" if guess else "")
    if fault["type"] == "missing":
        return f"{key}: required, and missing"
    if fault["type"] in ("union_tag_not_found", "union_tag_invalid"):
        given = fault["input"].get("type") if isinstance(fault["input"], dict) else None
        known = fault.get("ctx", {}).get("expected_tags") or ", ".join(sorted(repr(tag) for tag in _tags(root)))
        return f"{key}.type: {'required, and missing' if given is None else f'unknown: {given!r}'} (one of {known})"
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "value_error":
        return message if message.startswith(f"{key}.") or not key else f"{key}: {message}"  # a section's own check names its keys
    return f"{key}: {message} (got {fault['input']!r})"


def _sections(annotation: Any) -> list[type[BaseModel]]:
    """Every BaseModel class inside an annotation (unions, Annotated, containers)."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for part in get_args(annotation) for section in _sections(part)]


def _walk(root: type[BaseModel]) -> set[type[BaseModel]]:
    seen: set[type[BaseModel]] = set()
    queue = [root]
    while queue:
        section = queue.pop()
        if section not in seen:
            seen.add(section)
            queue += [inner for field in section.model_fields.values() for inner in _sections(field.annotation)]
    return seen


def _keys(root: type[BaseModel]) -> set[str]:
    return {name for section in _walk(root) for name in section.model_fields}


def _tags(root: type[BaseModel]) -> set[str]:
    fields = [section.model_fields["type"] for section in _walk(root) if "type" in section.model_fields]
    return {str(tag) for field in fields for tag in get_args(field.annotation)}

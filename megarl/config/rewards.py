"""Where rewards come from, and how they are transformed."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PositiveInt, field_validator, model_validator

from megarl.config.sandbox import SandboxSettings
from megarl.config.section import EnvironmentVariable, Fraction, Place, Seconds, Section, web_address


class ReasoningGymReward(Section):
    """reasoning-gym's own scorer; a score of at least `threshold` counts as 1, a lower one as 0."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    threshold: Fraction = 1.0
    """A score of at least this counts as 1, a lower one as 0."""
    extract: str | None = None
    """Regular expression; the first group of its last match after the reasoning is the answer. null: all after the reasoning, stripped."""


class MathReward(Section):
    """math-verify: 1 if the response's answer is symbolically equal to the ground truth, which is a number, expression or worked solution.

    The answer of a worked solution is the contents of its \\boxed{}, as in MATH, or what follows ####, as in GSM8K.
    Of a list, any is right. Answers are parsed before the start; one that cannot be read as it is written is a bad row (data.on_bad_row).
    """

    type: Literal["math_verify"] = "math_verify"


class FunctionReward(Section):
    """A user's function, called as f(prompt=, response=, answer=, meta=) -> float or dict with key `score`."""

    type: Literal["function"] = "function"
    path: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]
    """module:name; called as f(prompt=, response=, answer=, meta=) -> float or dict with key `score`."""


class HttpReward(Section):
    """A server that scores batches of responses; for the protocol see megarl.rewards.http."""

    type: Literal["http"] = "http"
    url: Annotated[str, AfterValidator(web_address)] | None = None
    """Its address, such as http://127.0.0.1:8000/score."""
    url_file: Place | None = None
    """A file that holds the address when the run starts, instead of `url`; for a server that is itself a job."""
    token_env: EnvironmentVariable | None = None
    """The environment variable that holds a bearer token."""
    batch_size: PositiveInt = 64
    """Maximum number of responses in one request."""
    images: bool = False
    """Send a prompt that has images as chat messages with these, as data URLs. Otherwise the text has <image> in their places."""
    timeout_s: Seconds = 30.0
    """Time limit of one request, including its answer."""
    attempts: Annotated[int, Field(gt=0, le=1_000_000)] = 5
    """Maximum number of attempts per request."""
    backoff_s: Annotated[float, Field(ge=0, le=86_400)] = 1.0
    """Pause before the second attempt; doubles before each further one, up to 30 s."""
    deadline_s: Seconds = 300.0
    """Time limit for scoring all responses of a step, including retries."""

    @model_validator(mode="after")
    def _is_somewhere(self) -> HttpReward:
        if (self.url is None) == (self.url_file is None):
            raise ValueError("either url or url_file says where the server is")
        return self


class EnvironmentReward(Section):
    """The sum of the environment's rewards over all turns of an episode, however it ended."""

    type: Literal["environment"] = "environment"


class ModelReward(Section):
    """A reward model on Megatron ranks (`megarl rm` trains one); the reward is its score at the response's last token."""

    type: Literal["reward_model"] = "reward_model"
    path: Place
    """A Hugging Face directory of a sequence classifier, with the policy's tokenizer."""
    unfinished: float | None = None
    """Score of a response cut off by the length limit; null: the model's score."""


class RewardPart(Section):
    """One reward of a sum."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z]\w{0,31}$")]
    """Name in the metrics: this part's own value is reported as reward/<name>/mean."""
    source: Annotated[
        ReasoningGymReward | MathReward | FunctionReward | HttpReward | EnvironmentReward | ModelReward, Field(discriminator="type")
    ]
    """What computes this reward."""
    weight: Annotated[float, Field(ge=-1000, le=1000)] = 1.0
    """Factor of this reward in the sum."""


class SumReward(Section):
    """The weighted sum of several rewards. If one of them fails on a response, or abstains, that response has no score."""

    type: Literal["sum"] = "sum"
    parts: Annotated[list[RewardPart], Field(min_length=1, max_length=16)]
    """The rewards and their weights."""

    @field_validator("parts")
    @classmethod
    def _named(cls, parts: list[RewardPart]) -> list[RewardPart]:
        names = [part.name for part in parts]
        if len(set(names)) < len(names):
            raise ValueError(f"two parts have the same name ({', '.join(names)})")
        models = [part.name for part in parts if isinstance(part.source, ModelReward)]
        if len(models) > 1:
            raise ValueError(f"{' and '.join(models)} are reward models, and the ranks hold one (`megarl serve` another: type http)")
        return parts


def alone(source: Section, key: str = "reward.source") -> dict[str, Section]:
    """Return a source's rewards by their dotted keys: the source itself, or the parts of a sum. `key`: the source's own key."""
    if isinstance(source, SumReward):
        return {f"{key}.parts.{number}.source": part.source for number, part in enumerate(source.parts)}
    return {key: source}


def model_of(source: Section) -> tuple[str, ModelReward] | None:
    """Return the reward model of `reward.source` and its dotted key; None if it has none."""
    return next(((key, one) for key, one in alone(source).items() if isinstance(one, ModelReward)), None)


TextReward = Annotated[
    ReasoningGymReward | MathReward | FunctionReward | HttpReward | EnvironmentReward | SumReward, Field(discriminator="type")
]
RewardSource = Annotated[
    ReasoningGymReward | MathReward | FunctionReward | HttpReward | EnvironmentReward | SumReward | ModelReward, Field(discriminator="type")
]


class OverlongSettings(Section):
    """DAPO's soft penalty for responses that come close to the length limit (see megarl.rewards.shaping)."""

    buffer_tokens: PositiveInt
    """The penalty grows from 0 to `scale` over this many tokens before rollout.max_response_tokens."""
    scale: Annotated[float, Field(gt=0)] = 1.0
    """The largest penalty."""


class NormaliseSettings(Section):
    """Normalise rewards by those of the policy that the run starts from (see megarl.rewards.scale).

    Everything downstream is on the normalised scale: overlong.scale, and an algorithm's thresholds (RAFT's, VAPO's positive_above).
    """

    prompts: Annotated[int, Field(ge=2)] = 256
    """Number of prompts from data.train, with one response each, whose rewards determine the mean and the standard deviation."""
    clip: Annotated[float, Field(gt=0)] | None = None
    """Clip normalised rewards to this many standard deviations on both sides; null: no clipping."""


class RewardSettings(Section):
    """How responses are scored."""

    source: RewardSource
    """What scores the responses that are trained on."""
    normalise: NormaliseSettings | None = None
    """Normalise rewards relative to the initial policy's."""
    eval: TextReward | None = None
    """What evaluations use instead of `source`, for example to report pass rates where the training reward is a reward model's."""
    overlong: OverlongSettings | None = None
    """Soft penalty for overlong answers."""
    require_finished: bool = True
    """Score a response cut off by the length limit 0; an episode keeps the environment's rewards (source.type=environment)."""
    timeout_s: Seconds = 10.0
    """Time limit for scoring one response; one that exceeds it has no score (a server has source.timeout_s instead)."""
    workers: Annotated[int, Field(gt=0, le=4096)] = 1
    """Scoring processes, or connections to a server."""
    sandbox: SandboxSettings = SandboxSettings()
    """What a scoring process may do."""

    @field_validator("eval")
    @classmethod
    def _without_ranks(cls, source: Section | None) -> Section | None:
        if source is not None and model_of(source) is not None:
            raise ValueError("a part of it is a reward model, and evaluations count what needs none")
        return source

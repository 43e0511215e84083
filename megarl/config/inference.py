"""The configuration tree of each verb that trains nothing."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field, PositiveInt, model_validator

from megarl.config.data import EvalData, EvalSet, PairsData, ServeData, check_sets
from megarl.config.environment import EnvironmentSettings
from megarl.config.rewards import RewardSettings
from megarl.config.rollout import RolloutSettings
from megarl.config.run import RunSettings
from megarl.config.section import EnvironmentVariable, Section


class EvalConfig(RunSettings):
    """`megarl eval`: held-out pass rates of a model in a Hugging Face directory, sampled by the engines."""

    data: EvalData = EvalData()
    """How prompts are rendered, and the prompts of the set `heldout`."""
    eval: list[EvalSet] = []
    """More sets of prompts."""
    environment: EnvironmentSettings | None = None
    """What answers the policy's turns; null: each prompt has one response."""
    reward: RewardSettings
    """How responses are scored."""
    rollout: RolloutSettings = RolloutSettings()
    """Engines and sampling."""

    @model_validator(mode="after")
    def _has_prompts(self) -> EvalConfig:
        check_sets(self.data, self.eval)
        return self


class PairsSettings(Section):
    """How the responses to one prompt become pairs."""

    per_prompt: PositiveInt = 1
    """Maximum number of pairs per prompt."""
    answers: bool = False
    """Also score and pair the prompt's reference answer from the data, as if it were a response."""
    prompts_per_call: PositiveInt = 256
    """Number of prompts that are sampled and scored together."""


class PairsConfig(RunSettings):
    """`megarl pairs`: pairs of a policy's own responses, with the better one first, for `megarl rm` and `megarl dpo`."""

    leaves: ClassVar[tuple[str, ...]] = ("train.jsonl", "eval.jsonl")
    data: PairsData
    """Prompts."""
    reward: RewardSettings
    """How responses are scored."""
    rollout: RolloutSettings = RolloutSettings()
    """Engines and sampling."""
    pairs: PairsSettings = PairsSettings()
    """How the responses become pairs."""

    @model_validator(mode="after")
    def _responses_can_differ(self) -> PairsConfig:
        if not self.pairs.answers and self.rollout.samples_per_prompt < 2:
            raise ValueError("rollout.samples_per_prompt=1: a pair needs two responses (or pairs.answers=true)")
        return self


class ServeSettings(Section):
    """Where a reward model listens, and which requests it accepts; for the protocol see megarl.rewards.http."""

    port: Annotated[int, Field(ge=0, lt=1 << 16)] = 8000
    """TCP port on loopback, or on cluster.interface; 0: any free one."""
    path: Annotated[str, Field(pattern=r"^/\S*$")] = "/score"
    """The URL's path."""
    token_env: EnvironmentVariable | None = None
    """The environment variable with the token that clients must send; required if other machines can reach the port (cluster.interface)."""
    max_tokens: PositiveInt = 2048
    """Maximum length of prompt + response, in tokens."""
    micro_batch_tokens: PositiveInt = 16384
    """Maximum number of tokens in one micro-batch on one context-parallel group."""


class ServeConfig(RunSettings):
    """`megarl serve`: a reward model (`model.path`) on its ranks, served over HTTP."""

    data: ServeData = ServeData()
    """How prompts are rendered."""
    serve: ServeSettings = ServeSettings()
    """Where it listens, and which requests it accepts."""

    @model_validator(mode="after")
    def _asks_for_a_token(self) -> ServeConfig:
        interface = self.cluster.interface
        if interface not in (None, "lo") and self.serve.token_env is None:
            raise ValueError(f"serve.token_env: required with cluster.interface={interface}, where other machines reach the port")
        return self

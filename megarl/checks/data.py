"""The prompts of a run and of its evaluations, read and checked before any process starts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from megarl.config import (
    ConfigError,
    EnvironmentSettings,
    EvalConfig,
    EvalSet,
    HttpReward,
    MixtureSource,
    ModelSettings,
    PairsConfig,
    PromptSource,
    ReasoningGymReward,
    ReasoningGymSource,
    RewardSettings,
    RolloutSettings,
    SourceFormat,
    TrainConfig,
    alone,
)
from megarl.data.images import ImageReader, reader_of
from megarl.data.prompts import Prompt
from megarl.data.sources import load_prompts
from megarl.data.tokenizer import load_tokenizer
from megarl.data.turns import TurnTokens
from megarl.environments.checks import check_environment, check_episodes, tool_schemas
from megarl.host.unchecked import where_present
from megarl.rewards.gold_checks import answer_faults
from megarl.rewards.verifiers import EVALUATING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LOOKED = 10_000  # prompts that are looked at before the start
HELD_OUT = "heldout"  # the set of data.eval


def looked_at(prompts: Sequence[Prompt]) -> Sequence[Prompt]:
    """The prompts that are looked at before the start, evenly spaced."""
    return prompts[:: max(1, -(-len(prompts) // LOOKED))]


@dataclass(frozen=True)
class HeldOut:
    """A set of prompts to evaluate on."""

    name: str
    prompts: Sequence[Prompt]
    n: int  # sampled responses per prompt
    temperature: float  # of the sampled responses
    greedy: bool  # whether to also take the greedy response
    number: int = 0  # among the sets; with the run's seed it determines the random draws


@dataclass(frozen=True)
class Data:
    """Prompts that passed every check."""

    train: Sequence[Prompt]
    sets: list[HeldOut]

    @property
    def eval(self) -> Sequence[Prompt]:
        """The prompts of data.eval."""
        return next((held_out.prompts for held_out in self.sets if held_out.name == HELD_OUT), [])


@dataclass(frozen=True)
class PromptReader:
    """Reads and checks the prompts of a run's sources.

    Args:
        model: the section `model`: whose tokenizer and image processor are used.
        data: how a prompt becomes tokens, and what happens to rows that are too long or otherwise bad.
        rollout: the section `rollout`, which limits a prompt's length.
        reward: how responses are scored.
        environment: the environment whose episodes the prompts start, if any.
    """

    model: ModelSettings
    data: SourceFormat
    rollout: RolloutSettings
    reward: RewardSettings
    environment: EnvironmentSettings | None

    @classmethod
    def of(cls, config: TrainConfig | EvalConfig | PairsConfig) -> PromptReader:
        """The reader for a run's configuration."""
        environment = None if isinstance(config, PairsConfig) else config.environment
        return cls(config.model, config.data, config.rollout, config.reward, environment)

    def read(self, source: PromptSource, key: str) -> Sequence[Prompt]:
        """Read every prompt of a source, tokenised; those of a large file are tokenised on demand.

        Args:
            source: where the prompts come from.
            key: the source's dotted key, say "data.train".

        Raises:
            ConfigError: a prompt is malformed or too long (the first one is named), its verifier cannot score by its answer, scoring
                responses to it would run them as code, or the environment does not play an episode of it.
            Absent: there is no file, or no tokenizer; where this machine need not have them, none is read and `unchecked` says so.
        """
        self._refuse_evaluating(source, key)
        with where_present(key):
            tokenizer = load_tokenizer(self.model.path)
            prompts = self.prompts(source, key, tokenizer)
            most = self.rollout.max_prompt_tokens
            turns = TurnTokens(tokenizer, self.data, reader=self._images())
            check_episodes(self.environment, prompts, key, turns, most)
            return prompts
        return []

    def prompts(self, source: PromptSource, key: str, tokenizer: PreTrainedTokenizerBase) -> Sequence[Prompt]:
        """`read` without playing an episode. `tokenizer`: that of the model."""
        tools, faults = tool_schemas(self.environment), partial(answer_faults, self._scoring(key))
        most, limit = self.rollout.max_prompt_tokens, "rollout.max_prompt_tokens"
        reader = self._images()
        prompts = load_prompts(source, tokenizer, self.data, most, key, limit, tools, faults, reader)
        self._check_judges(prompts, key, sees=reader is not None)
        return prompts

    def _check_judges(self, prompts: Sequence[Prompt], key: str, *, sees: bool) -> None:
        """Say so on stderr if a server is sent prompts without their images; raise ConfigError if it is to get images that are not read."""
        scoring = self._scoring(key)
        for place, source in alone(scoring.source, "reward.source" if scoring is self.reward else "reward.eval").items():
            if not isinstance(source, HttpReward):
                continue
            if source.images and not sees:
                raise ConfigError(f"{place}.images=true: the model sees no images, and prompts have none")
            if sees and not source.images and any(prompt.images for prompt in looked_at(prompts)):
                print(
                    f"megarl: {key}: {place} is sent texts, with <image> in the place of images ({place}.images=true sends these)",
                    file=sys.stderr,
                )

    def _images(self) -> ImageReader | None:
        return reader_of(self.model, self.rollout.max_prompt_tokens, "rollout.max_prompt_tokens")

    def sets(self, held_out: PromptSource | None, others: Sequence[EvalSet]) -> list[HeldOut]:
        """Read all sets to evaluate on.

        Args:
            held_out: `data.eval`.
            others: `eval`.
        """
        temperature, sets = self.rollout.temperature, list[HeldOut]()
        if held_out is not None:
            sets.append(HeldOut(HELD_OUT, self.read(held_out, "data.eval"), 1, temperature, True))
        for index, one in enumerate(others):
            own = temperature if one.temperature is None else one.temperature
            sets.append(HeldOut(one.name, self.read(one.source, f"eval.{index}.source"), one.n, own, one.greedy, index + 1))
        return sets

    def _scoring(self, key: str) -> RewardSettings:
        """Return the section `reward` with the source that scores responses to the prompts of this key."""
        other = None if key.startswith("data.train") else self.reward.eval
        return self.reward if other is None else self.reward.model_copy(update={"source": other})

    def _refuse_evaluating(self, source: PromptSource, key: str) -> None:
        parts = {f"{key}.parts.{n}.source": part.source for n, part in enumerate(source.parts)} if isinstance(source, MixtureSource) else {}
        for where, one in {key: source, **parts}.items():
            if isinstance(one, ReasoningGymSource) and one.dataset in EVALUATING and _scored_by_gym(self.reward):
                raise ConfigError(
                    f"{where}.dataset: {one.dataset}: reasoning-gym's scorer evaluates the response as Python, and what a model writes "
                    "never runs; give another reward (reward.source.type=function)"
                )


def check_data(reader: PromptReader, train: PromptSource, held_out: PromptSource | None, others: Sequence[EvalSet]) -> Data:
    """Check the environment, then read the prompts to train and to evaluate on.

    Args:
        reader: reads each source.
        train: `data.train`.
        held_out: `data.eval`.
        others: `eval`.
    """
    check_environment(reader.environment, reader.data, reader.reward, reader.model.path)
    return Data(reader.read(train, "data.train"), reader.sets(held_out, others))


def _scored_by_gym(reward: RewardSettings) -> bool:
    sources = [reward.source, *([] if reward.eval is None else [reward.eval])]
    return any(isinstance(one, ReasoningGymReward) for source in sources for one in alone(source).values())

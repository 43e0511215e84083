"""The prompts of a run and of its evaluations, read and checked before a process starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megarl.config import (
    ConfigError,
    EvalConfig,
    MixtureSource,
    PairsConfig,
    PromptFormat,
    PromptSource,
    ReasoningGymReward,
    ReasoningGymSource,
    RewardSettings,
    RolloutSettings,
    TrainConfig,
    alone,
)
from megarl.data.prompts import Prompt
from megarl.data.sources import load_prompts
from megarl.data.tokenizer import load_tokenizer
from megarl.environments.checks import check_environment, check_episodes, tool_schemas
from megarl.rewards.verifiers import EVALUATING

HELD_OUT = "heldout"  # the set of data.eval


@dataclass(frozen=True)
class HeldOut:
    """A set of prompts that evaluations ask."""

    name: str
    prompts: Sequence[Prompt]
    n: int  # sampled responses to each
    temperature: float  # of those
    greedy: bool  # the greedy response too
    number: int = 0  # among the sets; with the run's seed it decides the random draws


@dataclass(frozen=True)
class Data:
    """Prompts that passed every check."""

    train: Sequence[Prompt]
    sets: list[HeldOut]

    @property
    def eval(self) -> Sequence[Prompt]:
        """Those of data.eval."""
        return next((held_out.prompts for held_out in self.sets if held_out.name == HELD_OUT), [])


def check_prompts(
    config: TrainConfig | EvalConfig | PairsConfig, data: PromptFormat, rollout: RolloutSettings, source: PromptSource, key: str
) -> Sequence[Prompt]:
    """Every prompt of a source, tokenised; those of a large file when they are asked for.

    Args:
        config: says which model's tokenizer, and how responses are scored.
        data: says with `chat` and `template` how a prompt becomes tokens.
        rollout: has the limit of its length.
        source: where the prompts come from.
        key: the source's dotted key, say "data.train".

    Raises:
        ConfigError: for the first that is malformed or too long, and where scoring it would run code.
    """
    parts = {f"{key}.parts.{n}.source": part.source for n, part in enumerate(source.parts)} if isinstance(source, MixtureSource) else {}
    for where, one in {key: source, **parts}.items():
        if isinstance(one, ReasoningGymSource) and one.dataset in EVALUATING and _scored_by_gym(config.reward):
            raise ConfigError(
                f"{where}.dataset: {one.dataset}: reasoning-gym's scorer evaluates the response as Python, and what a model writes "
                "never runs; give another reward (reward.source.type=function)"
            )
    tools = None if isinstance(config, PairsConfig) else tool_schemas(config.environment)
    tokenizer = load_tokenizer(config.model.path)
    prompts = load_prompts(source, tokenizer, data.chat, data.template, rollout.max_prompt_tokens, key, system=data.system, tools=tools)
    check_episodes(config, prompts, key)
    return prompts


def check_sets(config: TrainConfig | EvalConfig) -> list[HeldOut]:
    """`check_prompts` of everything that is evaluated."""
    temperature = config.rollout.temperature
    sets = []
    if config.data.eval is not None:
        prompts = check_prompts(config, config.data, config.rollout, config.data.eval, "data.eval")
        sets.append(HeldOut(HELD_OUT, prompts, 1, temperature, True))
    for index, one in enumerate(config.eval):
        prompts = check_prompts(config, config.data, config.rollout, one.source, f"eval.{index}.source")
        own = temperature if one.temperature is None else one.temperature
        sets.append(HeldOut(one.name, prompts, one.n, own, one.greedy, index + 1))
    return sets


def check_data(config: TrainConfig) -> Data:
    """`check_prompts` of what is trained on and what is evaluated."""
    train = check_prompts(config, config.data, config.rollout, config.data.train, "data.train")
    return Data(train, check_sets(config))


def check_turns_and_data(config: TrainConfig) -> Data:
    """`check_data`, once the environment is one that the prompts can begin with."""
    check_environment(config)
    return check_data(config)


def _scored_by_gym(reward: RewardSettings) -> bool:
    sources = [reward.source, *([] if reward.eval is None else [reward.eval])]
    return any(isinstance(one, ReasoningGymReward) for source in sources for one in alone(source))

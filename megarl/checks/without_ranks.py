"""The checks of the verbs whose engines work without ranks: eval, pairs."""

from collections.abc import Sequence
from dataclasses import dataclass

from megarl.checks.data import HeldOut, PromptReader
from megarl.checks.model import check_length, check_model, check_stops
from megarl.config import ConfigError, EvalConfig, PairsConfig, model_of
from megarl.data.answers import response_of
from megarl.data.prompts import Prompt
from megarl.data.tokenizer import encode, load_tokenizer
from megarl.engines.registry import check_engine
from megarl.environments.checks import check_environment
from megarl.rewards.sources import check as check_reward


@dataclass(frozen=True)
class PairPrompts:
    """The prompts from which the pairs of both files are made."""

    train: Sequence[Prompt]
    eval: Sequence[Prompt]


def check_eval(config: EvalConfig) -> list[HeldOut]:
    """Make all checks of `megarl eval`; return its sets of prompts."""
    check_engines_alone(config, "eval")
    if (scorer := model_of(config.reward.source)) is not None and config.reward.eval is None:
        raise ConfigError(f"{scorer[0]}.type=reward_model: `megarl eval` has no ranks to run it on; set what it counts in reward.eval")
    check_reward(config.reward)
    check_environment(config.environment, config.data, config.reward, config.model.path)
    return PromptReader.of(config).sets(config.data.eval, config.eval)


def check_pairs(config: PairsConfig) -> PairPrompts:
    """Make all checks of `megarl pairs`; return the prompts of both files."""
    check_engines_alone(config, "pairs")
    if (scorer := model_of(config.reward.source)) is not None:
        raise ConfigError(f"{scorer[0]}.type=reward_model: `megarl pairs` has no ranks to run it on; `megarl serve` it (type: http)")
    for key in ("normalise", "overlong", "eval"):
        if getattr(config.reward, key) is not None:
            raise ConfigError(f"reward.{key}: `megarl pairs` compares what reward.source says")
    check_reward(config.reward)
    reader = PromptReader.of(config)
    data = PairPrompts(train=reader.read(config.data.train, "data.train"), eval=reader.read(config.data.eval, "data.eval"))
    if config.pairs.answers:
        tokenizer, most = load_tokenizer(config.model.path), config.rollout.max_response_tokens
        for key, prompts in (("data.train", data.train), ("data.eval", data.eval)):
            for number, tokens in enumerate(encode(tokenizer, [response_of(prompt.answer) for prompt in prompts], special=False)):
                if len(tokens) > most:
                    raise ConfigError(
                        f"pairs.answers: the answer of {key}, prompt {number}, has {len(tokens)} tokens, more than "
                        f"rollout.max_response_tokens={most}"
                    )
    return data


def check_engines_alone(config: EvalConfig | PairsConfig, verb: str) -> None:
    """ConfigError if engines could not run the model without ranks."""
    model = check_model(config)
    if config.model.weights is not None:
        raise ConfigError(
            f"model.weights: `megarl {verb}` has only engines, which read model.path; `megarl convert megatron-to-hf` makes one"
        )
    check_length(model, config.rollout)
    check_stops(model, config.rollout)
    check_engine(model, config.rollout.dtype or config.model.dtype, config.rollout, gpu=config.cluster.gpus)

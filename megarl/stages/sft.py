"""`megarl sft`: supervised training on what the assistant says, on the same ranks and layouts as the RL loop."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megarl.algorithms.sft import Sft
from megarl.config import ConfigError, ConversationSource, SftConfig, SftMixture, SftSource
from megarl.data.conversations import Conversation, answered, load_conversations
from megarl.data.mixture import mixed
from megarl.data.prompts import load_prompts
from megarl.stages.learning import check_held_out, check_learn, learn, sample
from megarl.stages.saving import check_resume
from megarl.workers.learner import MiniBatch, mini_batch


@dataclass(frozen=True)
class Conversations:
    """Conversations that passed every check."""

    train: list[Conversation]
    held_out: list[Conversation]


def check_sft(config: SftConfig) -> Conversations:
    """All checks of `megarl sft`; its conversations."""
    tokenizer, data, limit = check_learn(config, "lm", sides=1), config.data, config.sft.max_tokens

    def conversations(source: SftSource, key: str) -> list[Conversation]:
        if isinstance(source, SftMixture):
            parts = [(conversations(part.source, f"{key}.parts.{n}.source"), part.weight) for n, part in enumerate(source.parts)]
            return mixed(parts, source.seed)
        if isinstance(source, ConversationSource):
            if not data.chat:
                raise ConfigError(f"data.chat=false: {key}.type=conversations goes through the tokenizer's chat template")
            return load_conversations(source, tokenizer, limit, key, data.system)
        prompts = load_prompts(source, tokenizer, data.chat, data.template, limit, key, "sft.max_tokens", data.system)
        return answered(prompts, tokenizer, limit, key)

    held_out = [] if data.eval is None else conversations(data.eval, "data.eval")
    if data.eval is not None:
        check_held_out(config, len(held_out))
    elif not config.sft.steps:
        raise ConfigError("sft.steps=0: nothing to learn, and no data.eval to measure")
    train = conversations(data.train, "data.train") if config.sft.steps else []
    if train:
        check_resume(config, config.section, len(train))
    return Conversations(train, held_out)


def sft(config: SftConfig) -> None:
    """Trains on the conversations; leaves the model in runs/<name>/model."""
    data, objective, settings = check_sft(config), Sft(config.sft.aggregation), config.sft

    def plan(chosen: Sequence[Conversation]) -> MiniBatch:
        return mini_batch(objective, [sample(one) for one in chosen], [0.0] * len(chosen), config.layout.dp, settings.micro_batch_tokens)

    def draw(indices: list[int]) -> MiniBatch:
        return plan([data.train[index] for index in indices])

    held_out = plan(data.held_out) if data.held_out else None
    learn(config, objective, len(data.train), draw, held_out, shuffle=config.data.shuffle)

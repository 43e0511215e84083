"""The checks of the verbs whose ranks work without engines: sft, rm, dpo, serve."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megarl.checks.memory import check_fits
from megarl.checks.model import check_model
from megarl.checks.other_models import check_trained_head
from megarl.config import ConfigError, DpoConfig, PairSource, RmConfig, ServeConfig, SftConfig, SupervisedConfig
from megarl.data.conversations import Conversation
from megarl.data.images import reader_of
from megarl.data.preferences import Preference, load_preferences
from megarl.data.prompts import Renderer
from megarl.data.supervised import LIMIT_KEY, load_demonstrations
from megarl.data.template import ChatTemplate
from megarl.data.tokenizer import load_tokenizer
from megarl.host.http_client import token_of
from megarl.host.unchecked import where_present
from megarl.models.families import check_room
from megarl.models.family import HeadKind
from megarl.models.hf import GENERATION, end_tokens
from megarl.resume.point import check_resume

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKEN_KEY = "serve.token_env"


@dataclass(frozen=True)
class Conversations:
    """Conversations that passed every check."""

    train: list[Conversation]
    held_out: list[Conversation]


@dataclass(frozen=True)
class Pairs:
    """Pairs that passed every check."""

    train: list[Preference]  # empty if the model is only measured
    held_out: list[Preference]


def check_sft(config: SftConfig) -> Conversations:
    """Make all checks of `megarl sft`; return its conversations."""
    tokenizer, data, limit = check_supervised(config, "lm", sides=1), config.data, config.sft.max_tokens
    reader = reader_of(config.model, limit, LIMIT_KEY)
    held_out, train = list[Conversation](), list[Conversation]()
    if data.eval is not None:
        with where_present("data.eval"):
            held_out = load_demonstrations(data.eval, tokenizer, data, limit, "data.eval", reader)
            check_held_out(len(held_out), config.layout.dp)
    elif not config.sft.steps:
        raise ConfigError("sft.steps=0: nothing to learn, and no data.eval to measure")
    if config.sft.steps:
        with where_present("data.train"):
            train = load_demonstrations(data.train, tokenizer, data, limit, "data.train", reader)
    tell_end(config, tokenizer)
    if train:
        check_resume(config, config.section, len(train))
    return Conversations(train, held_out)


def check_rm(config: RmConfig) -> Pairs:
    """Make all checks of `megarl rm`; return its pairs."""
    return check_preferences(config, "value")


def check_dpo(config: DpoConfig) -> Pairs:
    """Make all checks of `megarl dpo`; return its pairs."""
    return check_preferences(config, "lm")


def check_preferences(config: RmConfig | DpoConfig, head: HeadKind) -> Pairs:
    """Make all checks of a stage that learns from pairs; return the pairs."""
    tokenizer, data, limit_key = check_supervised(config, head, sides=2), config.data, f"{config.section}.max_tokens"
    reader = reader_of(config.model, config.supervised.max_tokens, limit_key)

    def pairs(source: PairSource, key: str) -> list[Preference]:
        return load_preferences(source, tokenizer, data, config.supervised.max_tokens, key, limit_key, isinstance(config, RmConfig), reader)

    held_out, train = list[Preference](), list[Preference]()
    with where_present("data.eval"):
        held_out = pairs(data.eval, "data.eval")
        check_held_out(len(held_out), config.layout.dp)
    if config.supervised.steps:
        with where_present("data.train"):
            train = pairs(data.train, "data.train")
    if head == "lm":
        tell_end(config, tokenizer)
    if train:
        check_resume(config, config.section, len(train))
    return Pairs(train, held_out)


def tell_end(config: SftConfig | DpoConfig | RmConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Say so on stderr if the model learns to end its turns with a token at which no engine would stop."""
    if not config.data.chat:
        return
    end, path = ChatTemplate(tokenizer, config.data).end, config.model.path
    number = tokenizer.convert_tokens_to_ids(end)
    if number not in end_tokens(path) | {tokenizer.eos_token_id}:
        print(
            f"megarl: data.chat: the chat template ends the assistant's turns with {end!r}, at which no engine stops: add {number} to "
            f"eos_token_id in {path / GENERATION}",
            file=sys.stderr,
        )


def check_supervised(config: SupervisedConfig, head: HeadKind, sides: int) -> PreTrainedTokenizerBase:
    """Make the checks that supervised stages share.

    Args:
        config: the stage's configuration.
        head: the head of the model that is trained.
        sides: number of responses that must share a micro-batch.

    Returns:
        The model's tokenizer.

    Raises:
        ConfigError: naming the dotted key.
    """
    model, section, settings = check_model(config, head), config.section, config.supervised
    if sides * settings.max_tokens > settings.micro_batch_tokens:
        raise ConfigError(
            f"{section}.micro_batch_tokens={settings.micro_batch_tokens} is below {'two times ' if sides == 2 else ''}"
            f"{section}.max_tokens={settings.max_tokens}"
        )
    check_room(model, settings.max_tokens, f"{section}.max_tokens")
    if settings.batch_size < config.layout.dp:
        raise ConfigError(f"{section}.batch_size={settings.batch_size} is less than one for each of {config.layout.dp} data-parallel ranks")
    check_fits(config)
    tokenizer = load_tokenizer(config.model.path)
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"model.path: the tokenizer of {config.model.path} has no eos_token; every response must end with one")
    return tokenizer


def check_held_out(count: int, ranks: int) -> None:
    """ConfigError if the held-out source has too few items for the data-parallel ranks."""
    if count < ranks:
        raise ConfigError(f"data.eval: {count} in total, less than one for each of {ranks} data-parallel ranks")


def check_serve(config: ServeConfig) -> Renderer:
    """Make all checks of `megarl serve`; return the renderer of the samples' prompts."""
    model = check_model(config, "value")
    check_trained_head(config.model.path, "model.path")
    with where_present("the server's token"):
        token_of(config.serve.token_env, TOKEN_KEY)
    tokenizer, data, limit = load_tokenizer(config.model.path), config.data, config.serve.max_tokens
    renderer = Renderer(tokenizer, data, limit, "serve.max_tokens", reader=reader_of(config.model, limit, "serve.max_tokens"))
    if limit > config.serve.micro_batch_tokens:
        raise ConfigError(f"serve.micro_batch_tokens={config.serve.micro_batch_tokens} is below serve.max_tokens={limit}")
    check_room(model, limit, "serve.max_tokens")
    return renderer

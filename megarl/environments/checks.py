"""Checks of an environment before any process of the run starts; one of them plays the beginning of an episode."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.config import (
    AgentEnvironment,
    ConfigError,
    EnvironmentReward,
    EnvironmentSettings,
    HttpEnvironment,
    PromptFormat,
    RewardSettings,
    SoftwareEnvironment,
    ToolsEnvironment,
    alone,
)
from megarl.data.images import shown_task
from megarl.data.prompts import Prompt
from megarl.data.template import render_chats
from megarl.data.tokenizer import load_tokenizer
from megarl.data.turns import TurnTokens, check_turns
from megarl.environments.hosts import agent_host, check_containers, check_reach, in_tokens, open_host
from megarl.environments.protocol import EnvironmentFailed
from megarl.host.http_client import unanswered
from megarl.host.unchecked import where_present
from megarl.sandbox import process

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEY = "environment.source"


def tool_schemas(settings: EnvironmentSettings | None) -> list[dict[str, Any]] | None:
    """Return the tools' schemas for the chat template; None without tools. Raises ConfigError if a function is not a valid tool."""
    if settings is not None and isinstance(settings.source, SoftwareEnvironment):
        from megarl.environments.software.host import SCHEMAS as CONTAINER_SCHEMAS

        return [CONTAINER_SCHEMAS[tool] for tool in settings.source.tools]
    if settings is None or not isinstance(settings.source, ToolsEnvironment):
        return None
    from megarl.environments.own_tools import schemas
    from megarl.environments.tools import SCHEMAS

    source, schemas_by_name = settings.source, dict[str, dict[str, Any]](SCHEMAS)
    if source.own:
        schemas_by_name |= zip(source.own, schemas(source.own, settings.step_s, settings.sandbox.model_dump_json()), strict=True)
    return [schemas_by_name[tool] for tool in source.tools]


def check_environment(settings: EnvironmentSettings | None, data: PromptFormat, reward: RewardSettings, model: Path) -> None:
    """Refuse contradictory settings, a chat template that leaves out turns, and tools that the template does not mention.

    Args:
        settings: the `environment` section, or None.
        data: the format of the prompts.
        reward: the `reward` section.
        model: the Hugging Face directory of the tokenizer.

    Raises:
        ConfigError: something is refused.
    """
    if settings is None:
        sources = alone(reward.source) | ({} if reward.eval is None else alone(reward.eval, "reward.eval"))
        for key, source in sources.items():
            if isinstance(source, EnvironmentReward):
                raise ConfigError(f"{key}.type=environment: there is no environment")
        return
    if isinstance(settings.source, AgentEnvironment) and not settings.source.rewards:
        for key, source in alone(reward.source).items():
            if isinstance(source, EnvironmentReward):
                raise ConfigError(f"{key}.type=environment: the agent gives no reward ({KEY}.rewards=false)")
    if not data.chat:
        raise ConfigError("data.chat=false: the turns of an environment go through the tokenizer's chat template")
    with where_present("the environment's processes"):
        if isinstance(settings.source, HttpEnvironment):
            from megarl.environments import http

            http.check(settings.source)
        elif isinstance(settings.source, SoftwareEnvironment):
            check_containers(settings)
        else:
            process.check(settings.sandbox, "environment.sandbox")
        if isinstance(settings.source, AgentEnvironment):
            check_reach(settings.sandbox)
    with where_present("the environment's turns"):
        _check_template(settings, data, load_tokenizer(model))


def _check_template(settings: EnvironmentSettings, data: PromptFormat, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ConfigError for a chat template that leaves out turns, or tools that it does not mention."""
    if not tokenizer.chat_template:
        raise ConfigError(f"{KEY}: the tokenizer has no chat template, and conversations need one")
    check_turns(tokenizer, [answering_role(settings)], "environment", data)
    schemas = tool_schemas(settings) or []
    for schema in schemas:
        name = schema["function"]["name"]
        question, arguments = [{"role": "user", "content": "Q"}], data.template_args
        text, text_without = (render_chats(tokenizer, [question], tools, arguments)[0] for tools in ([schema], None))
        if text == text_without or name not in text:
            raise ConfigError(f"{KEY}.tools: the model's chat template does not mention {name!r}: the model would never call it")
    if schemas and TurnTokens(tokenizer, data).template.calls is None:
        raise ConfigError(f"{KEY}.tools: the model's chat template writes calls of tools in a form that is not read")


def answering_role(settings: EnvironmentSettings) -> str:
    """The role that usually speaks after the policy."""
    return "tool" if isinstance(settings.source, ToolsEnvironment | SoftwareEnvironment) else "user"


def rewriting(settings: EnvironmentSettings, data: PromptFormat, model: Path) -> str | None:
    """Describe for the console what becomes of turns that the chat template rewrites later; None if it writes all as they were sampled.

    Args:
        settings: the `environment` section.
        data: the format of the prompts.
        model: the Hugging Face directory of the tokenizer.
    """
    if not check_turns(load_tokenizer(model), [answering_role(settings)], "environment", data):
        return None
    return (
        "the chat template rewrites some turns later (reasoning, white space): there the policy reads the conversation as it is then "
        "rendered, and a new sample of the same episode begins"
    )


def check_episodes(settings: EnvironmentSettings | None, prompts: Sequence[Prompt], key: str, turns: TurnTokens, most: int) -> None:
    """Play the first turn of an episode for a data source's first prompt, where the run would play it (in a new process, or on the server).

    Args:
        settings: the `environment` section, or None.
        prompts: the prompts of the data source, at least one.
        key: the dotted key of the data source, such as "data.train".
        turns: converts messages to tokens, with the run's tokenizer.
        most: the maximum length of a prompt, in tokens.

    Raises:
        ConfigError: the environment cannot be imported, violates the protocol, fails, or its opening is longer than a prompt may be; or
            the data source is of type `episodes`, and the run has no environment that writes openings.
    """
    writes_opening = prompts[0].episode is not None  # the environment has to write the opening
    if settings is None or isinstance(settings.source, ToolsEnvironment):
        if writes_opening:
            raise ConfigError(f"{key}.type=episodes: {'there is no environment' if settings is None else 'tools begin none: give prompts'}")
        return
    if writes_opening and isinstance(settings.source, SoftwareEnvironment):
        raise ConfigError(f"{key}.type=episodes: software tasks begin none: give prompts")
    first = prompts[0]

    async def imported() -> None:
        host = agent_host(settings.model_copy(update={"workers": 1}))
        try:
            await host.try_()
        except EnvironmentFailed as failure:
            raise ConfigError(f"{KEY}: {failure}") from None
        finally:
            host.close()

    async def trial() -> None:
        host = open_host(settings.model_copy(update={"workers": 1}))
        called = f"reset(seed={first.seed})"
        try:
            episode = host.open()
            opening = await episode.reset(first.seed, shown_task(first.task))
            if opening.messages is None and writes_opening:
                raise EnvironmentFailed("bad return: reset returned nothing, and the data has no prompt")
            if opening.messages is None:
                conversation = in_tokens(turns.prompted, first.task, first.images)
            else:
                conversation = in_tokens(turns.opened, opening.messages)
                if (length := len(in_tokens(conversation.opening))) > most:
                    raise ConfigError(f"{KEY}: {called}: an opening of {length} tokens is longer than rollout.max_prompt_tokens={most}")
            called = f"reset(seed={first.seed}), then step of an empty text"
            answer = await episode.step("", [], True)
            if answer.messages is not None:
                in_tokens(conversation.after, [], "", answer.messages)
            if isinstance(settings.source, SoftwareEnvironment) and answer.reward:
                raise EnvironmentFailed(f"bad task: {first.name}: its tests pass before anything is changed")
            await episode.close()
        except EnvironmentFailed as failure:
            if not isinstance(settings.source, HttpEnvironment):
                raise ConfigError(f"{KEY}: {called}: {failure}") from None
            unanswered(f"{KEY}: {called}: {failure}")
        finally:
            host.close()

    with where_present(f"{key}: its first episode"):
        asyncio.run(imported() if isinstance(settings.source, AgentEnvironment) else trial())

"""Environments: what answers the policy's turns."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PositiveInt, model_validator

from megarl.config.sandbox import SandboxSettings
from megarl.config.section import EnvironmentVariable, Fraction, Seconds, Section, web_address


class FunctionEnvironment(Section):
    """A class of your own with reset, step and close (see megarl/environments/README.md)."""

    type: Literal["function"] = "function"
    path: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]
    """module:Class; each episode has its own instance."""
    params: dict[str, Any] = {}
    """Keyword arguments of the class."""


class GymnasiumEnvironment(Section):
    """A gymnasium-style environment whose observations and actions are texts (such as GEM's)."""

    type: Literal["gymnasium"] = "gymnasium"
    path: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]
    """module:name of a class, or of a function that creates one, such as gem:make."""
    params: dict[str, Any] = {}
    """Its keyword arguments."""


class GymEnvironment(Section):
    """A data set of reasoning-gym, each question an episode of one turn."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    dataset: str
    """Name of the reasoning-gym data set."""
    params: dict[str, Any] = {}
    """Parameters of that data set."""
    threshold: Fraction = 1.0
    """A response with at least this score earns 1, else 0."""


class TextArenaEnvironment(Section):
    """A single-player TextArena game (install it with `pip install --no-deps textarena`)."""

    type: Literal["textarena"] = "textarena"
    id: str
    """Name of the game, such as GuessTheNumber-v0."""


class HttpEnvironment(Section):
    """A server that plays episodes; protocol: megarl.environments.http."""

    type: Literal["http"] = "http"
    url: Annotated[str, AfterValidator(web_address)]
    """Its address, such as http://127.0.0.1:8000; /reset, /step and /close are added."""
    token_env: EnvironmentVariable | None = None
    """The environment variable that holds a bearer token."""
    connections: PositiveInt = 64
    """Most requests of one engine at a time."""


def _tool(given: str) -> str:
    if given not in ("calculator", "python") and not re.fullmatch(r"[\w.]+:\w+", given):
        raise ValueError(f"{given!r:.80} is neither calculator nor python nor a function of yours, as module:function")
    return given


class ToolsEnvironment(Section):
    """Tools that the model may call before it answers a prompt; `reward` scores the last turn."""

    type: Literal["tools"] = "tools"
    tools: Annotated[list[Annotated[str, AfterValidator(_tool)]], Field(min_length=1)]
    """Which ones: `calculator`, `python` (in a new sandbox for each call), your own functions as module:function."""
    output_chars: PositiveInt = 2000
    """Most characters of a call's output; the rest is cut off."""

    @property
    def own(self) -> tuple[str, ...]:
        """The functions among the tools."""
        return tuple(tool for tool in self.tools if ":" in tool)


EnvironmentSource = Annotated[
    FunctionEnvironment | GymnasiumEnvironment | GymEnvironment | TextArenaEnvironment | HttpEnvironment | ToolsEnvironment,
    Field(discriminator="type"),
]


class EnvironmentSettings(Section):
    """Episodes of several turns instead of single responses."""

    source: EnvironmentSource
    """What answers."""
    max_turns: PositiveInt = 8
    """Most turns of the policy in one episode; it is cut off after that."""
    max_turn_tokens: PositiveInt | None = None
    """Longest turn of the policy; null: what is left of rollout.max_response_tokens, which covers all turns and answers."""
    step_s: Seconds = 30.0
    """Longest time for an answer or a tool call; a late environment ends its episode, a late tool gives the model an error."""
    max_concurrent: PositiveInt | None = None
    """Most episodes per engine at a time, from reset to close; null: no limit."""
    workers: Annotated[int, Field(gt=0, le=4096)] = 2
    """Processes per engine for environments or tools; each computes one answer at a time."""
    sandbox: SandboxSettings = SandboxSettings()
    """What such a process may do."""

    @model_validator(mode="after")
    def _tools_once(self) -> EnvironmentSettings:
        names = [tool.rpartition(":")[2] for tool in self.source.tools] if isinstance(self.source, ToolsEnvironment) else []
        if isinstance(self.source, ToolsEnvironment) and len(set(names)) < len(names):
            raise ValueError(f"environment.source.tools: {', '.join(self.source.tools)}: one of them is listed twice")
        return self

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
    """module:Class; each episode has an object of it."""
    params: dict[str, Any] = {}
    """Keyword arguments of the class."""


class GymnasiumEnvironment(Section):
    """An environment of gymnasium's kind whose observations and actions are texts (GEM's, for one)."""

    type: Literal["gymnasium"] = "gymnasium"
    path: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]
    """module:name of what makes one: a class, or a function such as gem:make."""
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
    """From this score on a response earns 1, below it 0."""


class TextArenaEnvironment(Section):
    """A game of TextArena for one player (install it with `pip install --no-deps textarena`)."""

    type: Literal["textarena"] = "textarena"
    id: str
    """Name of the game, such as GuessTheNumber-v0."""


class HttpEnvironment(Section):
    """A server that plays episodes; what it is sent and answers: megarl.environments.http."""

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
    """Which: `calculator`, `python` (in a sandbox of its own for each call), functions of yours as module:function."""
    output_chars: PositiveInt = 2000
    """Most characters of what a call answers; the rest is cut off."""

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
    """Most turns of the policy in one episode; it is cut after them."""
    max_turn_tokens: PositiveInt | None = None
    """Longest turn of the policy; null: what is left of rollout.max_response_tokens, which holds all turns and the answers to them."""
    step_s: Seconds = 30.0
    """Longest time of one answer, and of one tool's call; a late environment ends its episode, a late tool is told to the model."""
    max_concurrent: PositiveInt | None = None
    """Most episodes of each engine at a time, from reset to close; null: as many as are asked of it."""
    workers: Annotated[int, Field(gt=0, le=4096)] = 2
    """Processes of each engine in which environments or tools run; each works on one answer at a time."""
    sandbox: SandboxSettings = SandboxSettings()
    """What such a process may do."""

    @model_validator(mode="after")
    def _tools_once(self) -> EnvironmentSettings:
        names = [tool.rpartition(":")[2] for tool in self.source.tools] if isinstance(self.source, ToolsEnvironment) else []
        if isinstance(self.source, ToolsEnvironment) and len(set(names)) < len(names):
            raise ValueError(f"environment.source.tools: {', '.join(self.source.tools)}: one of them is named twice")
        return self

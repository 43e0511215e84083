"""Environments, which answer the policy's turns."""

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
    """A gymnasium-style environment whose observations and actions are text (such as GEM's)."""

    type: Literal["gymnasium"] = "gymnasium"
    path: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")]
    """module:name of a class, or of a function that creates one, such as gem:make."""
    params: dict[str, Any] = {}
    """Its keyword arguments."""


class GymEnvironment(Section):
    """A reasoning-gym data set; each question is an episode of one turn."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    dataset: str
    """Name of the reasoning-gym data set."""
    params: dict[str, Any] = {}
    """Parameters of that data set."""
    threshold: Fraction = 1.0
    """A response earns 1 if its score is at least this, else 0."""


class TextArenaEnvironment(Section):
    """A single-player TextArena game (install it with `pip install --no-deps textarena`)."""

    type: Literal["textarena"] = "textarena"
    id: str
    """Name of the game, such as GuessTheNumber-v0."""


class HttpEnvironment(Section):
    """A server that runs episodes; for the protocol see megarl.environments.http."""

    type: Literal["http"] = "http"
    url: Annotated[str, AfterValidator(web_address)]
    """Its address, such as http://127.0.0.1:8000; /reset, /step and /close are added."""
    token_env: EnvironmentVariable | None = None
    """The environment variable that holds a bearer token."""
    connections: PositiveInt = 64
    """Maximum number of concurrent requests of one engine."""


class AgentEnvironment(Section):
    """A program of your own that asks the policy through an OpenAI or Anthropic client (see megarl/environments/agents.md)."""

    type: Literal["agent"] = "agent"
    function: Annotated[str, Field(pattern=r"^[\w.]+:\w+$")] | None = None
    """module:function; called with the task, it returns the reward. Give this or `command`."""
    command: Annotated[list[str], Field(min_length=1)] | None = None
    """A program and its arguments. It reads the task from its standard input, and prints the reward on its last line."""
    model: str = "policy"
    """The model's name that the agent asks for. Requests for another one are refused."""
    rewards: bool = True
    """Whether the agent gives the reward; false: only `reward.source` scores, by the policy's last answer."""
    processes: PositiveInt = 64
    """Maximum number of concurrent agents per engine, each of which is a process; further episodes wait."""

    @model_validator(mode="after")
    def _one_program(self) -> AgentEnvironment:
        if (self.function is None) == (self.command is None):
            raise ValueError("give either function or command")
        return self


def _tool(given: str) -> str:
    if given not in ("calculator", "python") and not re.fullmatch(r"[\w.]+:\w+", given):
        raise ValueError(f"{given!r:.80} is neither calculator nor python nor a function of yours, as module:function")
    return given


class ToolsEnvironment(Section):
    """Tools that the model may call before it answers a prompt; `reward` scores the last turn."""

    type: Literal["tools"] = "tools"
    tools: Annotated[list[Annotated[str, AfterValidator(_tool)]], Field(min_length=1)]
    """The tools: `calculator`, `python` (in a new sandbox for each call), your own functions as module:function."""
    output_chars: PositiveInt = 2000
    """Maximum length of a call's output, in characters; the rest is cut off."""

    @property
    def own(self) -> tuple[str, ...]:
        """The user's own functions among the tools."""
        return tuple(tool for tool in self.tools if ":" in tool)


class LocalContainers(Section):
    """A sandbox of megarl for each container; tasks are folders or files, and images cannot be used."""

    type: Literal["local"] = "local"


class CommandContainers(Section):
    """A container engine on the machines of the engines."""

    type: Literal["podman", "apptainer"]
    program: str | None = None
    """Its program; null: the one of that name on the path."""
    options: list[str] = []
    """Further options of `podman run` or `apptainer instance start`, such as [--cpus, "2"]."""


class ModalContainers(Section):
    """Sandboxes of Modal's service (`pip install megarl[modal]`), whose tokens are in MODAL_TOKEN_ID and MODAL_TOKEN_SECRET."""

    type: Literal["modal"] = "modal"
    app: str = "megarl"
    """The app to which they belong there."""


ContainerSource = Annotated[LocalContainers | CommandContainers | ModalContainers, Field(discriminator="type")]
MAX_OUTPUT = 40_000  # bytes of output that one message from a sandbox has room for


class SoftwareEnvironment(Section):
    """Software tasks: the model works in a container, and tests in another one score its files (see megarl/environments/containers.md)."""

    type: Literal["software"] = "software"
    containers: ContainerSource = LocalContainers()
    """What runs the containers."""
    rows: Literal["own", "swe_gym", "swe_bench", "swe_smith"] = "own"
    """The columns of the data: those of megarl, or as these datasets publish them."""
    tools: Annotated[list[Literal["bash", "edit"]], Field(min_length=1)] = ["bash", "edit"]
    """The tools that the model may call."""
    setup_s: Seconds = 600.0
    """Time limit of a container's start and of a task's setup, each."""
    test_s: Seconds = 600.0
    """Time limit of the tests. Tests that exceed it have failed."""
    output_bytes: Annotated[int, Field(gt=0, le=MAX_OUTPUT)] = 8000
    """Most bytes of a command's output that the model reads: its beginning and its end."""
    processes: Annotated[int, Field(gt=0, le=1 << 16)] = 256
    """Most processes in a container; a command that starts more is ended."""


EnvironmentSource = Annotated[
    FunctionEnvironment
    | GymnasiumEnvironment
    | GymEnvironment
    | TextArenaEnvironment
    | HttpEnvironment
    | ToolsEnvironment
    | AgentEnvironment
    | SoftwareEnvironment,
    Field(discriminator="type"),
]


class EnvironmentSettings(Section):
    """Episodes of several turns instead of single responses."""

    source: EnvironmentSource
    """What answers the policy's turns."""
    max_turns: PositiveInt = 8
    """Maximum number of the policy's turns in one episode, which is cut off after that."""
    max_turn_tokens: PositiveInt | None = None
    """Maximum length of one turn of the policy, in tokens; null: what is left of rollout.max_response_tokens, which covers all turns and
    answers."""
    step_s: Seconds = 30.0
    """Time limit of an answer or a tool call, and of what an agent does between two calls. An environment that exceeds it ends its episode;
    a tool that does returns an error to the model."""
    max_concurrent: PositiveInt | None = None
    """Maximum number of concurrent episodes per engine, from reset to close; null: no limit. Agents have source.processes."""
    workers: Annotated[int, Field(gt=0, le=4096)] = 2
    """Processes per engine for environments or tools; each computes one answer at a time."""
    sandbox: SandboxSettings = SandboxSettings()
    """What these processes may do."""

    @property
    def concurrent(self) -> int | None:
        """Maximum number of concurrent episodes per engine; None: no limit."""
        return self.source.processes if isinstance(self.source, AgentEnvironment) else self.max_concurrent

    @model_validator(mode="after")
    def _consistent(self) -> EnvironmentSettings:
        names = [tool.rpartition(":")[2] for tool in self.source.tools] if isinstance(self.source, ToolsEnvironment) else []
        if isinstance(self.source, ToolsEnvironment) and len(set(names)) < len(names):
            raise ValueError(f"environment.source.tools: {', '.join(self.source.tools)}: one of them is listed twice")
        if isinstance(self.source, AgentEnvironment) and self.max_concurrent is not None:
            raise ValueError(f"environment.max_concurrent={self.max_concurrent}: the limit of agents is environment.source.processes")
        if isinstance(self.source, SoftwareEnvironment) and not isinstance(self.source.containers, LocalContainers):
            kind, sandbox = self.source.containers.type, self.sandbox
            given = {"require": sandbox.require != "limits", "readable": bool(sandbox.readable), "env": bool(sandbox.env)}
            for key, used in given.items():
                if used:
                    raise ValueError(f"environment.sandbox.{key}: containers of type {kind} have their own isolation, files and variables")
            if kind == "modal" and "processes" in self.source.model_fields_set:
                raise ValueError(f"environment.source.processes={self.source.processes}: containers of type modal have no such limit")
        return self

"""What an agent asks the policy and what it is answered, whatever the client's format is."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from megarl.data.messages import Message


@dataclass(frozen=True)
class ChatRequest:
    """One request for a completion."""

    messages: Sequence[Message] = ()  # a conversation that the chat template renders; contents are texts, or parts (`content_of`)
    prompt: str | Sequence[int] | None = None  # a text or tokens that are read as they are; None: `messages`
    tools: Sequence[dict[str, Any]] | None = None  # schemas of the tools that may be called
    calls: bool = True  # whether calls in the answer are told apart from its text
    max_tokens: int | None = None  # the client's own limit
    stop: Sequence[str] = ()  # further texts that end the answer; none of them is part of it
    stream: bool = False
    unused: Mapping[str, Any] = field(default_factory=dict)  # what else the client asked for


@dataclass(frozen=True)
class Call:
    """A call of a tool."""

    id: str
    name: str
    arguments: str  # JSON


@dataclass(frozen=True)
class Answer:
    """The policy's answer."""

    number: int  # of the episode's calls, from 0
    content: str
    reasoning: str | None
    calls: Sequence[Call]
    finished: bool  # it ended by itself, not by a limit
    prompt_tokens: int
    tokens: int

    @property
    def message(self) -> Message:
        """The message that a client adds to its conversation."""
        said: Message = {"role": "assistant", "content": self.content}
        if self.calls:
            calls = [{"type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in self.calls]
            said["tool_calls"] = calls
        return said


class Refusal(Exception):
    """A request that gets no answer.

    Args:
        status: the HTTP status. Clients repeat what is refused with 408, 409, 429 or 5xx.
        code: the kind of error, one word.
        reason: what the agent is told.
    """

    def __init__(self, status: int, code: str, reason: str) -> None:
        super().__init__(reason)
        self.status, self.code = status, code


class Policy(Protocol):
    """The policy in one episode."""

    async def answer(self, question: ChatRequest) -> Answer:
        """Answer a question; several may be open. Raises Refusal."""
        ...


def heard(message: Message) -> Any:
    """Return what a message says, to compare what a client sends back with what it was answered: without reasoning, ids, JSON's spacing."""
    if message["role"] != "assistant":
        content = message.get("content")
        return {**message, "content": list(map(_identity, content))} if isinstance(content, list) else message
    calls = [call.get("function", call) for call in message.get("tool_calls", ())]
    return "assistant", (message.get("content") or "").strip(), [(call["name"], _value(call.get("arguments"))) for call in calls]


def _identity(part: Message) -> Any:
    """Return a part of a content, an image by its SHA-256."""
    return hashlib.sha256(part["image"]).digest() if part["type"] == "image" else part


def _value(arguments: Any) -> Any:
    try:
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments

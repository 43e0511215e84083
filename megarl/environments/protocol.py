"""The protocol of environments, and the checks of their answers. A user's class needs these methods, and nothing from megarl.

This module is imported in the sandbox, so it imports neither torch nor the configuration.
"""

import asyncio
import base64
import inspect
import io
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol

# A chat message: role and content, which is a text or a list of parts, {"type": "text", "text": ...} or {"type": "image", "image": ...}; in
# a `Turn` an image is a data URL.
Message = dict[str, Any]
MAX_INFO, MAX_NAME, LARGEST = 64, 100, 1e9
PNG_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")  # of Pillow
FINITE = sys.float_info.max


class Environment(Protocol):
    """One episode. Each method may be a coroutine function or an ordinary one; any exception ends the episode."""

    def reset(self, seed: int) -> Any:
        """Begin an episode. After the same seed, the same steps must get the same answers.

        A method with a parameter `task` also receives the data's prompt, {"prompt", "answer", "meta"}, or None.

        Returns:
            The opening, which the policy reads first: a text or chat messages; None keeps the data's prompt as it is.
        """

    def step(self, text: str, tokens: Sequence[int], finished: bool) -> Any:
        """Answer a turn of the policy.

        Args:
            text: the text of the turn, without its end token.
            tokens: its tokens as they were sampled.
            finished: whether the turn ended by itself, not by the length limit.

        Returns:
            (observation, reward, done) or (observation, reward, done, info): a text or chat messages (None or "" is allowed if the episode
            is done), a number, a boolean, and a dictionary of numbers; those of the last turn become metrics. A message's content is a
            text, or a list of parts: {"type": "text", "text": ...}, and for a model that sees images {"type": "image", "image": ...}, which
            is the bytes of a file, a data URL, or an image of Pillow.
        """

    def close(self) -> Any:
        """Release resources: the episode is over, for whatever reason."""


class ProtocolFault(ValueError):
    """An environment returned a value that violates the protocol."""


class EnvironmentFailed(Exception):
    """An episode cannot continue.

    The message begins with the kind of failure: "timeout", "worker died: ...", "bad return: ...", "not repeatable: ...", "no answer: ...",
    "status ..." or "<type of an exception>: ...".
    """


@dataclass(frozen=True)
class Turn:
    """An environment's answer."""

    messages: Sequence[Message] | None  # None: nothing to read
    reward: float = 0.0
    done: bool = False
    info: Mapping[str, float] = field(default_factory=dict)


def begin(environment: Any, seed: int, task: Any) -> Turn:
    """Call an environment's `reset` and return the opening.

    Args:
        environment: the environment of this episode.
        seed: the seed of the episode.
        task: the data's prompt; passed if `reset` has a parameter `task`.

    Raises:
        ProtocolFault: the return value is not a valid opening.
        Exception: whatever `reset` raises.
    """
    takes_task = "task" in inspect.signature(environment.reset).parameters
    return read_reset(waited(environment.reset(seed, **({"task": task} if takes_task else {}))))


def end(environment: Any) -> None:
    """Call an environment's `close`, if it has one. Raises whatever that raises."""
    waited(getattr(environment, "close", lambda: None)())


def waited(returned: Any) -> Any:
    """Return what a method returned, or the result if that is an awaitable."""
    if not inspect.isawaitable(returned):
        return returned

    async def wait() -> Any:
        return await returned

    return asyncio.run(wait())


def read_reset(returned: Any) -> Turn:
    """Check and convert the return value of `reset`. Raises ProtocolFault if it is not a valid opening."""
    messages = None if returned is None else read_messages(returned, "reset")
    return Turn(messages)


def read_step(returned: Any) -> Turn:
    """Check and convert the return value of `step`. Raises ProtocolFault if it is not a valid answer."""
    if not isinstance(returned, tuple | list) or len(returned) not in (3, 4):
        size = f" of {len(returned)}" if isinstance(returned, tuple | list) else ""
        raise ProtocolFault(f"step returned a {type(returned).__name__}{size}, not (observation, reward, done)")
    observation, reward, done, info = (*returned, {})[:4]
    if not isinstance(done, bool) and type(done).__name__ not in ("bool_", "bool"):  # NumPy's boolean, whose name depends on the version
        raise ProtocolFault(f"step returned done={done!r:.80} ({type(done).__name__}), not a boolean")
    reward, numbers = read_numbers(reward, info)
    messages = None if done and (observation is None or observation == "") else read_messages(observation, "step")
    return Turn(messages, reward, bool(done), numbers)


def read_numbers(reward: Any, info: Any) -> tuple[float, dict[str, float]]:
    """Return a reward, and the numbers in an `info` without its other entries. Raises ProtocolFault if either is invalid."""
    if not _is_number(reward, LARGEST):
        raise ProtocolFault(f"step returned reward={reward!r:.80} ({type(reward).__name__}), not a finite number")
    if not isinstance(info, Mapping):
        raise ProtocolFault(f"step returned info={info!r:.80} ({type(info).__name__}), not a dictionary")
    numbers = {str(name)[:MAX_NAME]: float(value) for name, value in info.items() if _is_number(value, FINITE)}
    if len(numbers) > MAX_INFO:
        raise ProtocolFault(f"step returned info of {len(numbers)} numbers, more than {MAX_INFO}")
    return float(reward), numbers


def _is_number(value: Any, largest: float) -> bool:
    """Return whether `value` is a real number of at most this size, without a conversion: an integer may be too large for a float."""
    size: Any = abs(value) if isinstance(value, Real) else None
    return size is not None and bool(size <= largest)


def read_messages(observation: Any, method: str) -> list[Message]:
    """Return an observation as chat messages; a text becomes a message of the user. Raises ProtocolFault for anything else, or no text."""
    if isinstance(observation, str):
        observation = [{"role": "user", "content": observation}]
    if not isinstance(observation, list) or not observation:
        raise ProtocolFault(f"{method} returned {observation!r:.80} ({type(observation).__name__}), not a text or a list of chat messages")
    for message in observation:
        content = message.get("content") if isinstance(message, dict) else None
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not isinstance(content, str | list):
            raise ProtocolFault(f"{method} returned {message!r:.80}, and a message has a text 'role' and a text 'content'")
        if message["role"] == "assistant":
            raise ProtocolFault(f"{method} returned a message of the assistant, whom the policy plays")
    messages = [{"role": message["role"], "content": _content(message["content"], method)} for message in observation]
    if not any(has_images([message]) or _text_of(message).strip() for message in messages):
        raise ProtocolFault(f"{method} returned no text")
    return messages


def has_images(messages: Sequence[Message]) -> bool:
    """Whether a message of a `Turn` has an image."""
    return any(part["type"] == "image" for message in messages if isinstance(message["content"], list) for part in message["content"])


def text_size(messages: Sequence[Message]) -> int:
    """The number of characters of the messages' texts."""
    return sum(map(len, map(_text_of, messages)))


def _text_of(message: Message) -> str:
    content = message["content"]
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


def _content(content: str | list[Any], method: str) -> str | list[dict[str, str]]:
    return content if isinstance(content, str) else [_part(part, method) for part in content]


def _part(part: Any, method: str) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part["text"] if part.keys() == {"type", "text"} else None, str):
        return {"type": "text", "text": part["text"]}
    value: Any = part["image"] if kind == "image" and part.keys() == {"type", "image"} else None
    if hasattr(value, "save") and hasattr(value, "convert"):  # Pillow's, in the sandbox
        file = io.BytesIO()
        (value if value.mode in PNG_MODES else value.convert("RGB")).save(file, "PNG")
        value = file.getvalue()
    if isinstance(value, bytes):
        value = f"data:image/*;base64,{base64.b64encode(value).decode()}"
    if not isinstance(value, str) or not value.startswith("data:"):
        raise ProtocolFault(f"{method} returned the part {part!r:.80}, which is neither a text nor an image as bytes or data URL")
    return {"type": "image", "image": value}

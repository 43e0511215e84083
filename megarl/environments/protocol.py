"""What an environment is, and what its answers mean. A class of yours needs nothing of megarl: the methods are all.

Imported in the sandbox: it imports neither torch nor the configuration.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol

Message = dict[str, str]  # of a chat: role and content
MOST_INFO, LONGEST_NAME, LARGEST = 64, 100, 1e9
FINITE = sys.float_info.max


class Environment(Protocol):
    """One episode. Each method may be a coroutine function or an ordinary one; whatever it raises ends the episode."""

    def reset(self, seed: int) -> Any:
        """Begins an episode; the same seed begins the same one, and the same steps after it get the same answers.

        With a second parameter `task` it is also given the prompt that the data has, {"prompt", "answer", "meta"}, or None.

        Returns:
            What the policy reads first: a text, or chat messages; None leaves the data's prompt as it is.
        """

    def step(self, text: str, tokens: Sequence[int], finished: bool) -> Any:
        """Answers a turn of the policy.

        Args:
            text: of the turn, without its end token.
            tokens: the same as they were sampled.
            finished: it ended by itself, not by the length limit.

        Returns:
            (observation, reward, done) or (observation, reward, done, info): a text or chat messages (None or "" where the episode is
            done), a number, a boolean, and a dictionary of numbers, of which the last turn's become metrics.
        """

    def close(self) -> Any:
        """The episode is over, for whatever reason."""


class ProtocolFault(ValueError):
    """An environment returned something else than it should."""


class EnvironmentFailed(Exception):
    """An episode cannot go on: "timeout", "worker died: ...", "bad return: ..." or "<exception's type>: ..."."""


@dataclass(frozen=True)
class Turn:
    """An environment's answer."""

    messages: Sequence[Message] | None  # None: nothing to read
    reward: float = 0.0
    done: bool = False
    info: Mapping[str, float] = field(default_factory=dict)


def begin(environment: Any, seed: int, task: Any) -> Turn:
    """Calls `reset`.

    Args:
        environment: of this episode.
        seed: of the episode.
        task: of the prompt; given where `reset` takes one.

    Raises:
        ProtocolFault: it returns no opening.
        Exception: whatever it raises.
    """
    takes_task = "task" in inspect.signature(environment.reset).parameters
    return read_reset(waited(environment.reset(seed, **({"task": task} if takes_task else {}))))


def end(environment: Any) -> None:
    """Calls `close`, where there is one. Raises whatever it raises."""
    waited(getattr(environment, "close", lambda: None)())


def waited(returned: Any) -> Any:
    """What a method returned, after the wait that a coroutine asks for."""
    if not inspect.isawaitable(returned):
        return returned

    async def wait() -> Any:
        return await returned

    return asyncio.run(wait())


def read_reset(returned: Any) -> Turn:
    """What `reset` returned. ProtocolFault where it is no opening."""
    messages = None if returned is None else read_messages(returned, "reset")
    return Turn(messages)


def read_step(returned: Any) -> Turn:
    """What `step` returned. ProtocolFault where that is no answer."""
    if not isinstance(returned, tuple | list) or len(returned) not in (3, 4):
        size = f" of {len(returned)}" if isinstance(returned, tuple | list) else ""
        raise ProtocolFault(f"step returned a {type(returned).__name__}{size}, not (observation, reward, done)")
    said, reward, done, info = (*returned, {})[:4]
    if not isinstance(done, bool) and type(done).__name__ not in ("bool_", "bool"):  # numpy's
        raise ProtocolFault(f"step returned done={done!r:.80} ({type(done).__name__}), not a boolean")
    reward, numbers = read_numbers(reward, info)
    messages = None if done and (said is None or said == "") else read_messages(said, "step")
    return Turn(messages, reward, bool(done), numbers)


def read_numbers(reward: Any, info: Any) -> tuple[float, dict[str, float]]:
    """A reward, and the numbers of an `info`; its other entries are left out. ProtocolFault where they are none."""
    if not _is_number(reward, LARGEST):
        raise ProtocolFault(f"step returned reward={reward!r:.80} ({type(reward).__name__}), not a finite number")
    if not isinstance(info, Mapping):
        raise ProtocolFault(f"step returned info={info!r:.80} ({type(info).__name__}), not a dictionary")
    numbers = {str(name)[:LONGEST_NAME]: float(value) for name, value in info.items() if _is_number(value, FINITE)}
    if len(numbers) > MOST_INFO:
        raise ProtocolFault(f"step returned info of {len(numbers)} numbers, more than {MOST_INFO}")
    return float(reward), numbers


def _is_number(value: Any, largest: float) -> bool:
    """Whether it is a real number no larger than this; compared as it is, since an integer may be beyond every float."""
    size: Any = abs(value) if isinstance(value, Real) else None
    return size is not None and bool(size <= largest)


def read_messages(said: Any, method: str) -> list[Message]:
    """A text as the user's message, or chat messages as they are. ProtocolFault for anything else, and for what says nothing."""
    if isinstance(said, str):
        said = [{"role": "user", "content": said}]
    if not isinstance(said, list) or not said:
        raise ProtocolFault(f"{method} returned {said!r:.80} ({type(said).__name__}), not a text or a list of chat messages")
    for message in said:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise ProtocolFault(f"{method} returned {message!r:.80}, and a message has a text 'role' and a text 'content'")
        if message["role"] == "assistant":
            raise ProtocolFault(f"{method} returned a message of the assistant, whom the policy plays")
    if not any(message["content"].strip() for message in said):
        raise ProtocolFault(f"{method} returned no text")
    return [{"role": message["role"], "content": message["content"]} for message in said]

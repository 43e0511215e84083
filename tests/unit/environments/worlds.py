"""Environments of the tests: sound ones, and some that do what none should. Imported in the sandbox."""

import asyncio
import os
import random
import time
from collections.abc import Sequence
from typing import Any

from tests.unit.sandbox.hostile import HOSTILE


class Counting:
    """Answers each turn with its number, a draw of the seed's, and the text; "stop" ends it. Coroutines, to show that they may be."""

    def __init__(self, word: str = "turn") -> None:
        self.word = word

    async def reset(self, seed: int) -> str:
        self.draw, self.turn = random.Random(seed), 0
        return f"begin {self.draw.randrange(1000)}"

    async def step(self, text: str, tokens: Sequence[int], finished: bool) -> tuple[str, float, bool, dict[str, float]]:
        await asyncio.sleep(0)
        self.turn += 1
        if text in HOSTILE:
            HOSTILE[text]({"secret": "s", "driver": 1, "touched": "/tmp/touched"})
        if text == "sleep":
            time.sleep(600)
        done = text == "stop"
        return ("" if done else f"{self.word} {self.turn} {self.draw.randrange(1000)} {text}"), 0.25, done, {"turn": self.turn}

    async def close(self) -> None:
        raise ValueError("nobody minds")


class Forgetful(Counting):
    """Does not repeat itself in another process."""

    async def reset(self, seed: int) -> str:
        await super().reset(seed)
        return f"process {os.getpid()} {time.monotonic_ns()}"


class Careless(Counting):
    """Draws from the common random numbers."""

    async def reset(self, seed: int) -> str:
        await super().reset(seed)
        self.draw = random  # type: ignore[assignment]
        import numpy as np

        return f"begin {random.random()} {np.random.random()}"

    async def step(self, text: str, tokens: Sequence[int], finished: bool) -> tuple[str, float, bool, dict[str, float]]:
        import numpy as np

        said, *others = await super().step(text, tokens, finished)
        return f"{said} {np.random.random()}", *others  # type: ignore[return-value]


class TaskTold:
    """Is told the task, and wants a turn of text."""

    def reset(self, seed: int, task: dict[str, Any] | None) -> None:
        self.task = task

    def step(self, text: str, tokens: Sequence[int], finished: bool) -> tuple[None, float, bool]:
        return None, float(self.task is not None and text == self.task["answer"]), True

    def close(self) -> None:
        pass


class Says:
    """Returns what it is made with."""

    def __init__(self, reset: Any = "begin", step: Any = ("go on", 0.0, False), nothing: bool = False) -> None:
        self._reset, self._step = None if nothing else reset, tuple(step) if isinstance(step, list) else step

    def reset(self, seed: int) -> Any:
        return self._reset

    def step(self, text: str, tokens: Sequence[int], finished: bool) -> Any:
        return self._step


class NoStep:
    def reset(self, seed: int) -> str:
        return "begin"


class Gym:
    """The five-tuple on texts."""

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self._left = 2
        return f"seed {seed}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._left -= 1
        return f"left {self._left}", float(action == "x"), self._left == 0, False, {"left": self._left, "text": "no number"}


class Painter:
    """Shows a picture in each turn, in the form that the policy asks for."""

    def reset(self, seed: int) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [{"type": "text", "text": "a picture: "}, self._picture("bytes", seed)]}]

    def step(self, text: str, tokens: Sequence[int], finished: bool) -> tuple[Any, float, bool]:
        return [{"role": "user", "content": [self._picture(text, len(text))]}], 1.0, False

    def _picture(self, form: str, seed: int) -> dict[str, Any]:
        import base64
        import io

        import numpy as np
        from PIL import Image

        side = 1000 if form == "large" else 40
        picture = Image.fromarray(np.random.default_rng(seed).integers(0, 256, (side, side, 3)).astype(np.uint8))
        file = io.BytesIO()
        picture.save(file, "PNG")
        data = file.getvalue()
        forms: dict[str, Any] = {
            "pillow": picture,
            "url": f"data:image/png;base64,{base64.b64encode(data).decode()}",
            "path": "/etc/hostname",
            "address": "https://example.com/a.png",
        }
        return {"type": "image", "image": forms.get(form, data)}

"""Games that random weights earn something in, in every degree."""

import random
import subprocess
from collections.abc import Sequence
from typing import Any, ClassVar

WORDS = ("sun", "moon", "stars")


class Letters:
    """Each turn earns the share of ASCII letters in it, and is answered by a word; a turn that begins with a digit breaks the game."""

    def reset(self, seed: int) -> str:
        self.turn = 0
        return WORDS[seed % 3]

    def step(self, text: str, tokens: Sequence[int], finished: bool) -> tuple[str, float, bool, dict[str, float]]:
        if text[:1].isdigit():
            raise ValueError("a digit")
        self.turn += 1
        share = sum(letter.isascii() and letter.isalpha() for letter in text) / max(1, len(text))
        word = WORDS[len(text) % 3]
        return word, share, text.endswith(("a", "b", "c", "d", "e")), {"word": float(len(word))}

    def close(self) -> None:
        pass


class Closed(Letters):
    """A game that begins only when it is checked, with the first seeds of the data."""

    def reset(self, seed: int) -> str:
        if seed not in (7, 1001):
            raise ValueError("closed")
        return super().reset(seed)


class Half(Letters):
    """A game of which every other one does not begin."""

    def reset(self, seed: int) -> str:
        if seed % 2 == 0:
            raise ValueError("closed")
        return super().reset(seed)


class Stoppers(Letters):
    """The first turn in each process leaves a process behind that has stopped itself, below one that waits for it."""

    left: ClassVar[list[subprocess.Popen[bytes]]] = []

    def step(self, text: str, tokens: Sequence[int], finished: bool) -> tuple[str, float, bool, dict[str, float]]:
        if not self.left:
            self.left.append(subprocess.Popen(["bash", "-c", "bash -c 'kill -STOP $$'; true"]))
        return super().step(text, tokens, finished)


class Pictures:
    """Two pictures, one after the other; the reward of a turn is the share of its letters that name the picture's colour."""

    def reset(self, seed: int) -> list[dict[str, Any]]:
        self._draw, self._turn = random.Random(seed), 0
        return self._shown("which?")

    def step(self, text: str, tokens: Sequence[int], finished: bool) -> tuple[Any, float, bool]:
        self._turn += 1
        reward = text.count("rgb"[self._colour]) / max(1, len(text))
        return self._shown("and?"), reward, self._turn == 2

    def _shown(self, question: str) -> list[dict[str, Any]]:
        from PIL import Image

        self._colour = self._draw.randrange(3)
        pixels = tuple(255 * (colour == self._colour) for colour in range(3))
        picture = Image.new("RGB", (self._draw.randrange(20, 50), self._draw.randrange(20, 50)), pixels)
        return [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": question}]}]

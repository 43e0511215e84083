"""Games that random weights earn something in, in every degree."""

import subprocess
from collections.abc import Sequence
from typing import ClassVar

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


class Stoppers(Letters):
    """The first turn in each process leaves a process behind that has stopped itself, below one that waits for it."""

    left: ClassVar[list[subprocess.Popen[bytes]]] = []

    def step(self, text: str, tokens: Sequence[int], finished: bool) -> tuple[str, float, bool, dict[str, float]]:
        if not self.left:
            self.left.append(subprocess.Popen(["bash", "-c", "bash -c 'kill -STOP $$'; true"]))
        return super().step(text, tokens, finished)

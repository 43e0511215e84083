"""Wrong answers made on purpose from right ones: what the rejected side of a synthetic preference looks like.

They are the faults of a weak model on the tiny tasks: it copies instead of solving, and gets, loses, doubles or swaps a letter.
"""

from __future__ import annotations

import random
import string
from collections.abc import Callable

TRIES = 100  # draws; "dad" copied, or two equal neighbours swapped, is still right


def corrupted(right: str, copied: str, draw: random.Random) -> str:
    """One of `copied` and the right answer with one fault, each as likely; never the right answer, whatever its case.

    ValueError where the answer is empty, or nothing can be changed in it.
    """
    faults: list[Callable[[str, random.Random], str]] = [lambda *_: copied, _replaced, _dropped, _doubled, _swapped, _cut]
    for _ in range(TRIES if right.strip() else 0):
        wrong = draw.choice(faults)(right, draw)
        if wrong.strip() and wrong.strip().lower() != right.strip().lower():
            return wrong
    raise ValueError(f"the answer {right!r} cannot be corrupted")


def _replaced(text: str, draw: random.Random) -> str:
    """Another letter for a letter, another digit for a digit."""
    place = draw.randrange(len(text))
    letters = string.digits if text[place].isdigit() else string.ascii_lowercase if text[place].isalpha() else text[place]
    return text[:place] + draw.choice(letters) + text[place + 1 :]


def _dropped(text: str, draw: random.Random) -> str:
    place = draw.randrange(len(text))
    return text[:place] + text[place + 1 :]


def _doubled(text: str, draw: random.Random) -> str:
    place = draw.randrange(len(text))
    return text[: place + 1] + text[place:]


def _swapped(text: str, draw: random.Random) -> str:
    if len(text) < 2:
        return text
    place = draw.randrange(len(text) - 1)
    return text[:place] + text[place + 1] + text[place] + text[place + 2 :]


def _cut(text: str, draw: random.Random) -> str:
    """The beginning alone: at least one letter."""
    return text[: draw.randrange(1, max(2, len(text)))]

"""The image as data, engines and ranks share it: a reference to a file's bytes by content hash, and where its tokens stand in a sequence.

No bytes travel: whoever computes with an image reads its file, and cuts it into patches with the model's own processor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from megarl.image_source import ImageSource

MARK = "\ufdd0"  # stands for an image in a text: Unicode guarantees that it is no character


def marked(value: Any) -> bool:
    """Whether a value as JSON has it contains `MARK` at any depth."""
    if isinstance(value, str):
        return MARK in value
    if isinstance(value, Mapping):
        return any(marked(inner) for pair in value.items() for inner in pair)
    return isinstance(value, list | tuple) and any(map(marked, value))


@dataclass(frozen=True)
class Image:
    """One image. Two of the same digest and grid are the same."""

    digest: str  # SHA-256 of the file's bytes, in hexadecimal
    size: tuple[int, int] = field(compare=False)  # width and height as it lies upright
    grid: tuple[int, int, int]  # patches: frames, rows, columns
    merge: int  # patches of the side of a square that becomes one token
    source: ImageSource = field(repr=False, compare=False)

    def read(self) -> bytes:
        """Return the file: PNG, JPEG, ... Raise ImageGone if it is not there any more, or has changed since it was drawn."""
        return self.source.read(self.digest)

    @property
    def tokens(self) -> int:
        """The number of its tokens."""
        frames, rows, columns = self.grid
        return frames * rows * columns // self.merge**2

    @property
    def extent(self) -> int:
        """By how much the positions of the text after it are further than those of the text before it."""
        return max(self.grid[1:]) // self.merge

    def positions(self) -> np.ndarray:
        """The place of each token by frame, row and column, int64 [3, tokens]."""
        frames, rows, columns = self.grid
        return np.indices((frames, rows // self.merge, columns // self.merge)).reshape(3, -1)


@dataclass(frozen=True)
class PlacedImage:
    """An image in a sequence: its tokens are those from `start` on."""

    start: int
    image: Image

    @property
    def end(self) -> int:
        """The place of the first token after it."""
        return self.start + self.image.tokens

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> PlacedImage:
        """Return the one that `dataclasses.asdict` has written."""
        image = plain["image"]
        size, grid, source = tuple(image["size"]), tuple(image["grid"]), ImageSource(**image["source"])
        return cls(plain["start"], Image(image["digest"], size, grid, image["merge"], source))


def within(images: Sequence[PlacedImage], start: int, end: int) -> list[PlacedImage]:
    """Return the images whose tokens are among those from `start` to `end`, placed as in these alone."""
    return [replace(one, start=one.start - start) for one in images if start <= one.start < end]


def axes_of(length: int, images: Sequence[PlacedImage]) -> np.ndarray:
    """Return the positions of a sequence's tokens on the three axes of multimodal RoPE.

    A token of text has the same position on all axes, one further than all tokens before it. An image's tokens count frames, rows and
    columns from there.

    Args:
        length: the number of tokens.
        images: the images, in order.

    Returns:
        int64 [3, length].
    """
    parts, place, position = list[np.ndarray](), 0, 0
    for one in images:
        parts.append(np.broadcast_to(np.arange(position, position + one.start - place), (3, one.start - place)))
        position += one.start - place
        parts.append(one.image.positions() + position)
        place, position = one.end, position + one.image.extent
    rest = max(0, length - place)
    parts.append(np.broadcast_to(np.arange(position, position + rest), (3, rest)))
    return np.concatenate(parts, axis=1)[:, :length]

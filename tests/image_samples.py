"""Generated pictures, and samples that hold them."""

import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megarl.batch import Sample
from megarl.image_source import kept_file
from megarl.images import Image, PlacedImage
from megarl.models.image_processor import ImageProcessor
from tools.make_tiny_model import VISION

START, END, PAD = range(6, 9)  # of the tiny tokenizer
assert VISION[:3] == ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")


def picture(rng: np.random.Generator, form: str = "PNG") -> bytes:
    """A file of noise, 10 to 60 pixels a side."""
    from PIL import Image

    height, width = rng.integers(10, 60, 2)
    file = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (height, width, 3)).astype(np.uint8)).save(file, form)
    return file.getvalue()


def image_of(processor: ImageProcessor, data: bytes, folder: Path) -> Image:
    """The reference to a picture that is written into a folder."""
    return processor.read(data, kept_file(data, folder))


def inverted(data: bytes) -> bytes:
    """The negative of a picture."""
    from PIL import Image, ImageOps

    file = io.BytesIO()
    ImageOps.invert(Image.open(io.BytesIO(data))).save(file, "PNG")
    return file.getvalue()


def samples(path: Path, counts: Sequence[int] = (2, 0, 1, 3), seed: int = 3) -> list[Sample]:
    """Samples of so many images each, with random text before, between and after them."""
    processor, rng = ImageProcessor(path), np.random.default_rng(seed)

    def text(most: int) -> list[int]:
        return rng.integers(10, 128, rng.integers(1, most)).tolist()

    made = []
    for count in counts:
        tokens, placed = text(6), list[PlacedImage]()
        for _ in range(count):
            image = image_of(processor, picture(rng), path.parent / "pictures")
            placed.append(PlacedImage(len(tokens) + 1, image))
            tokens += [START, *[PAD] * image.tokens, END, *text(6)]
        prompt = len(tokens)
        tokens += text(12) + text(2)
        made.append(Sample(np.array(tokens, np.int32), prompt, np.zeros(len(tokens) - prompt, np.float32), "stop", images=placed))
    return made

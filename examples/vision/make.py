"""Questions about generated pictures: how many squares have a colour, which colour they have, and where the only square is.

    python examples/vision/make.py [--seed 1] [--out runs/vision-seed1]

A picture has four places, A and B above C and D, of which some have a square in one of four colours (r, g, b, y) on grey noise. "#r" asks
how many squares are red, "?" for the colour of all squares, "@" for the place of the only one. Three Parquet files hold pictures and
questions: demonstrations for a warm start, in the order in which it learns from them, of which a share of the last ones is wrong on
purpose, so that reinforcement learning has something to do; questions for it; and held-out questions.
"""

import argparse
import io
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from PIL import Image
from pyarrow import parquet

COLOURS = {"r": (255, 0, 0), "g": (0, 255, 0), "b": (0, 0, 255), "y": (255, 255, 0)}
SIDE, CELL = 2, 8  # places of a side, and pixels of a place's side
PLACES = list("ABCD")
TRAIN, HELD_OUT = 3000, 240  # questions
RIGHT, LAST, WRONG = 4800, 1920, 0.4  # demonstrations that are all right, those after them, and the share of these that is wrong


def picture(draw: random.Random, colours: list[str | None]) -> bytes:
    """Return a PNG with a square of each place's colour."""
    pixels = np.random.default_rng(draw.getrandbits(32)).normal(128, 4, (SIDE * CELL, SIDE * CELL, 3)).clip(0, 255).astype(np.uint8)
    for place, colour in enumerate(colours):
        if colour is not None:
            top, left = (CELL * index for index in divmod(place, SIDE))
            pixels[top : top + CELL, left : left + CELL] = COLOURS[colour]
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def question(draw: random.Random) -> tuple[bytes, str, str, list[str]]:
    """Return a picture, a question about it, its answer, and the other answers of the same kind."""
    kind, colour, place = draw.choice(("count", "colour", "place")), draw.choice(list(COLOURS)), draw.randrange(len(PLACES))
    if kind == "count":
        colours: list[str | None] = [draw.choice(list(COLOURS)) if draw.random() < 0.8 else None for _ in PLACES]
        text, answer, answers = f"#{colour}", str(colours.count(colour)), [str(number) for number in range(5)]
    elif kind == "colour":
        colours = [colour if index == place or draw.random() < 0.3 else None for index in range(len(PLACES))]
        text, answer, answers = "?", colour, list(COLOURS)
    else:
        colours = [colour if index == place else None for index in range(len(PLACES))]
        text, answer, answers = "@", PLACES[place], PLACES
    return picture(draw, colours), text, answer, [one for one in answers if one != answer]


def asked(text: str) -> dict[str, str]:
    """Return a question as a message."""
    return {"role": "user", "content": f"<image>{text}"}


def questions(draw: random.Random, count: int) -> Iterator[dict[str, Any]]:
    """Yield questions with their answers."""
    for _ in range(count):
        data, text, answer, _ = question(draw)
        yield {"prompt": [asked(text)], "images": [{"bytes": data}], "answer": answer}


def demonstrations(draw: random.Random) -> Iterator[dict[str, Any]]:
    """Yield conversations, some of the last of which give a wrong answer."""
    for number in range(RIGHT + LAST):
        data, text, answer, others = question(draw)
        said = draw.choice(others) if number >= RIGHT and draw.random() < WRONG else answer
        yield {"messages": [asked(text), {"role": "assistant", "content": said}], "images": [{"bytes": data}]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    out = given.out or Path(f"runs/vision-seed{given.seed}")
    out.mkdir(parents=True, exist_ok=True)
    tables = {
        "demonstrations": list(demonstrations(random.Random(f"demonstrations {given.seed}"))),
        "train": list(questions(random.Random(f"train {given.seed}"), TRAIN)),
        "heldout": list(questions(random.Random("heldout"), HELD_OUT)),
    }
    for name, table in tables.items():
        parquet.write_table(pyarrow.Table.from_pylist(table), out / f"{name}.parquet")
        print(f"{out / name}.parquet: {len(table)} rows")


if __name__ == "__main__":
    main()

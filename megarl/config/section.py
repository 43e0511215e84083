"""What every section of a configuration is, and the kinds of numbers in it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from megarl.algorithms.settings import Settings
from megarl.paths import nameable


class Section(Settings):
    """A frozen part of the tree. Unknown keys are refused; the text below a field is its description in `megarl config` (describe.py)."""


def web_address(url: str) -> str:
    """The address as it stands. ValueError where it is none of http or https, or holds a user or a password."""
    place = urlsplit(url)  # ValueError for a malformed one, and below for a port that is none
    if place.scheme not in ("http", "https") or not place.hostname or place.port == 0 or any(letter.isspace() for letter in url):
        raise ValueError(f"{url!r} is not an http:// or https:// address")
    place.hostname.encode("idna")  # ValueError for one that no name server has
    if place.username is not None or place.password is not None:
        raise ValueError("contains a user or a password; put a token into the environment variable that token_env names")
    return url


Place = Annotated[Path, AfterValidator(nameable)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
Megabytes = Annotated[int, Field(gt=0, le=1 << 30)]
Steps = Annotated[int, Field(gt=0, le=1_000_000_000)]
StepsOrNone = Annotated[int, Field(ge=0, le=1_000_000_000)]
Passes = Annotated[int, Field(gt=0, le=1000)]  # within a step: only at its end is anything saved
BatchSize = Annotated[int, Field(gt=0, le=1 << 16)]
Seed = Annotated[int, Field(ge=0, lt=1 << 32)]
Seconds = Annotated[float, Field(gt=0, le=31_536_000)]  # a year at most: the clock's own functions refuse 1e300
EnvironmentVariable = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]

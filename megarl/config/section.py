"""The base class of every section of a configuration, and the types of its values."""

from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field

from megarl.algorithms.settings import Settings
from megarl.text.paths import nameable


class Section(Settings):
    """A frozen part of the tree. Unknown keys are refused; the string below a field is its description in `megarl config`."""


def web_address(url: str) -> str:
    """Return the address unchanged. Raise ValueError if it is not an http or https address, or contains a user or a password."""
    place = urlsplit(url)  # raises ValueError for a malformed address; so does `place.port` below for an invalid port
    if place.scheme not in ("http", "https") or not place.hostname or place.port == 0 or any(letter.isspace() for letter in url):
        raise ValueError(f"{url!r} is not an http:// or https:// address")
    place.hostname.encode("idna")  # raises ValueError for a name that cannot exist in DNS
    if place.username is not None or place.password is not None:
        raise ValueError("contains a user or a password; put a token into the environment variable that token_env names")
    return url


Place = Annotated[Path, AfterValidator(nameable)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
Megabytes = Annotated[int, Field(gt=0, le=1 << 30)]
Steps = Annotated[int, Field(gt=0, le=1_000_000_000)]
StepsOrNone = Annotated[int, Field(ge=0, le=1_000_000_000)]
Passes = Annotated[int, Field(gt=0, le=1000)]  # bounded, since passes are within a step, and a run is saved only between steps
BatchSize = Annotated[int, Field(gt=0, le=1 << 16)]
Seed = Annotated[int, Field(ge=0, lt=1 << 32)]
Seconds = Annotated[float, Field(gt=0, le=31_536_000)]  # at most a year: timeout functions refuse values such as 1e300
EnvironmentVariable = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")]

"""What a user asks of Slurm for a run."""

import re
from dataclasses import dataclass
from pathlib import Path

from megarl.errors import ConfigError

CLOCK = re.compile(
    r"(?:(?P<d>N)-(?P<dh>N)(?::(?P<dm>N)(?::(?P<ds>N))?)?|(?:(?P<h>N):(?=N:))?(?P<m>N)(?::(?P<s>N))?)".replace("N", "[0-9]{1,9}")
)


def seconds(limit: str) -> int | None:
    """A time limit as Slurm writes and reads it; None for no limit. Raises ValueError if Slurm would not understand it."""
    if limit in ("0", "UNLIMITED", "INFINITE"):
        return None
    match = CLOCK.fullmatch(limit)
    if match is None:
        raise ValueError(f"{limit!r} is not a time limit (minutes, H:MM:SS or D-HH:MM:SS)")
    part = {name: int(value or 0) for name, value in match.groupdict().items()}
    minutes = 60 * (24 * part["d"] + part["dh"] + part["h"]) + part["dm"] + part["m"]
    return 60 * minutes + part["ds"] + part["s"]


@dataclass(frozen=True)
class Job:
    """The options of `megarl slurm`, and the run that they are for."""

    name: str
    directory: Path  # of the run
    here: Path  # where the run starts, and from where it imports the user's modules
    reads: tuple[Path, ...]
    verb: str
    nodes: int
    gpus_per_node: int
    counts_gpus: bool  # whether Slurm knows about the nodes' GPUs, and so must be asked for them
    spare: int
    partition: str | None
    account: str | None
    qos: str | None
    time: str | None
    grace: int
    exclude: str | None
    max_restarts: int
    chain: int
    sbatch: list[str]
    container: str | None
    runtime: str
    mount: list[str]
    python: str

    @property
    def counted_gpus(self) -> int:
        """The number of GPUs per node that Slurm is asked for."""
        return self.gpus_per_node if self.counts_gpus else 0

    @property
    def size(self) -> str:
        """The size of the job in words."""
        gpus = f" of {self.gpus_per_node} GPUs" if self.gpus_per_node else ""
        spare = f", {self.spare} more to spare" if self.spare else ""
        return f"{self.nodes} node{'s' if self.nodes > 1 else ''}{gpus}{spare}"

    @property
    def seconds(self) -> int | None:
        """The time limit; None without one. Raises ConfigError if Slurm would not understand it."""
        try:
            return None if self.time is None else seconds(self.time)
        except ValueError as error:
            raise ConfigError(f"slurm: --time {error}") from None

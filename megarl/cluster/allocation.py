"""The nodes that Slurm has given to a job, and the directory that they share: who is the head, how the others find it, when it is to stop.

nodes.json   what the job script knows: the nodes, the head first; how many the run needs; the GPUs of each
head.json    the driver's, readable by its owner alone: where its Ray session is, and the token that it asks for
stop         the job script's, once Slurm has signalled it: the run is to be saved and to end
bad-NODE     the driver's, and of a node that cannot join its own: why it is of no use
lost         the driver's at its end: what died under it, so that the run is to start again: nodes, or Ray's own servers
"""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from megarl.errors import ConfigError

NODES, HEAD, STOP, LOST, BAD = "nodes.json", "head.json", "stop", "lost", "bad-"
POLL_S = 0.5
# Of a launcher, for which Ray's processes and the ranks would take themselves to be its tasks.
FOREIGN = ("SLURM", "PMI", "PMIX", "MPI", "OMPI_")


@dataclass(frozen=True)
class HeadNode:
    """What a node must know to join the driver's session."""

    address: str
    token: str
    interface: str | None
    object_store_mb: int
    start_timeout_s: float
    gpus: bool


@dataclass(frozen=True)
class Allocation:
    """The nodes of a job. `needed` of them are enough; what is there besides is spare."""

    directory: Path
    nodes: Sequence[str]
    needed: int
    gpus: int  # of each node

    @classmethod
    def read(cls, directory: Path) -> Allocation:
        """ConfigError where the job script has left nothing there that can be read."""
        path = directory / NODES
        try:
            said = json.loads(path.read_text())
            return cls(directory, tuple(map(str, said["nodes"])), int(said["needed"]), int(said["gpus"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"cluster.allocation: {path}, which the job script writes, cannot be read ({error})") from None

    @property
    def here(self) -> str:
        """Slurm's name of this node."""
        return os.environ.get("SLURMD_NODENAME") or self.nodes[0]

    def announce(self, head: HeadNode) -> None:
        """Tells the other nodes of the driver's session."""
        new = self.directory / (HEAD + ".new")
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(asdict(head), file)
        new.rename(self.directory / HEAD)

    def head(self) -> HeadNode | None:
        """What the driver has announced; None before it has, and once it has withdrawn."""
        try:
            return HeadNode(**json.loads((self.directory / HEAD).read_text()))
        except FileNotFoundError:
            return None

    def withdraw(self) -> None:
        """The session is over: nodes that have joined leave."""
        (self.directory / HEAD).unlink(missing_ok=True)

    def exclude(self, node: str, why: str) -> None:
        """A node is of no use; where it has joined, it leaves."""
        (self.directory / f"{BAD}{node}").write_text(why + "\n")

    def excluded(self, node: str) -> str | None:
        """Why a node is to leave; None where it is not."""
        try:
            return (self.directory / f"{BAD}{node}").read_text().strip()
        except FileNotFoundError:
            return None

    def all_excluded(self) -> dict[str, str]:
        """The nodes of no use, as far as one sees now, and why."""
        with suppress(OSError):  # a shared disk may fail for a moment
            said = {path.name.removeprefix(BAD): path.read_text().strip() for path in self.directory.glob(f"{BAD}*")}
            return {node: why for node, why in said.items() if why}  # else it is being written
        return {}

    def lose(self, nodes: Mapping[str, str]) -> None:
        """Tells the job script for want of which nodes the run has failed.

        Args:
            nodes: their names, with what became of them; of those that are excluded already one knows better.
        """
        known = self.all_excluded()
        lost = {node: known.get(node, why) for node, why in nodes.items()}
        for node, why in lost.items():
            self.exclude(node, why)
        if lost:
            self.fail("".join(f"{node}: {why}\n" for node, why in lost.items()))

    def fail(self, why: str) -> None:
        """Tells the job script that the run has failed by no fault of its own."""
        (self.directory / LOST).write_text(why)

    @contextmanager
    def stopped_from_outside(self) -> Iterator[None]:
        """Inside, this process gets SIGUSR1 once the job script leaves STOP.

        A file and no signal: it comes through every container, to this process alone, as often as Slurm likes, and is not lost on a process
        that does not listen yet.
        """
        over = threading.Event()

        def look() -> None:
            while not over.wait(POLL_S):
                with suppress(OSError):  # a shared disk may fail for a moment
                    if (self.directory / STOP).exists():
                        os.kill(os.getpid(), signal.SIGUSR1)
                        return

        thread = threading.Thread(target=look, name="stop", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def cpus_here() -> int:
    """How many CPUs of this node the job has."""
    return int(os.environ.get("SLURM_CPUS_ON_NODE") or len(os.sched_getaffinity(0)))


def forget_launcher() -> None:
    """Removes what the launcher has put into the environment, from this process and those that it starts."""
    for name in [name for name in os.environ if name.startswith(FOREIGN)]:
        del os.environ[name]

"""The nodes of a Slurm job, and the directory they share, in which the others find the head, and the run is told when to stop.

nodes.json   written by the job script: the nodes, the head first; how many the run needs; the GPUs of each node
head.json    written by the driver, readable by its owner only: the address of its Ray session, and the token that the session asks for
stop         written by the job script once Slurm has signalled it: the run must save and end
over         written by the job script once Slurm is ending the job: all processes must end at once
bad-NODE     written by the driver, or by a node that cannot join: why that node cannot be used
lost         written by the driver when it ends, if the run should start again: what died, nodes or Ray's own servers
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

NODES, HEAD, STOP, OVER, LOST, BAD = "nodes.json", "head.json", "stop", "over", "lost", "bad-"
POLL_S, END_S = 0.5, 5.0
# Prefixes of a launcher's variables, because of which Ray's processes and the ranks would take themselves to be the launcher's tasks.
FOREIGN = ("SLURM", "PMI", "PMIX", "MPI", "OMPI_")


@dataclass(frozen=True)
class HeadNode:
    """What a node needs to know to join the driver's session."""

    address: str
    token: str
    interface: str | None
    object_store_mb: int
    start_timeout_s: float
    gpus: bool


@dataclass(frozen=True)
class Allocation:
    """The nodes of a job. The run needs `needed` of them; any others are spare."""

    directory: Path
    nodes: Sequence[str]
    needed: int
    gpus: int  # of each node

    @classmethod
    def read(cls, directory: Path) -> Allocation:
        """Read what the job script has written. Raises ConfigError where it is missing or cannot be read."""
        path = directory / NODES
        try:
            content = json.loads(path.read_text())
            return cls(directory, tuple(map(str, content["nodes"])), int(content["needed"]), int(content["gpus"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"cluster.allocation: {path}, which the job script writes, cannot be read ({error})") from None

    @property
    def here(self) -> str:
        """Slurm's name of this node."""
        return os.environ.get("SLURMD_NODENAME") or self.nodes[0]

    def announce(self, head: HeadNode) -> None:
        """Announce the driver's session to the other nodes."""
        new = self.directory / (HEAD + ".new")
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(asdict(head), file)
        new.rename(self.directory / HEAD)

    def head(self) -> HeadNode | None:
        """Return what the driver has announced; None before that, and once it has withdrawn it."""
        try:
            return HeadNode(**json.loads((self.directory / HEAD).read_text()))
        except FileNotFoundError:
            return None

    def withdraw(self) -> None:
        """Declare the session over: the nodes that have joined leave."""
        (self.directory / HEAD).unlink(missing_ok=True)

    def exclude(self, node: str, why: str) -> None:
        """Mark a node as unusable; if it has joined, it leaves."""
        (self.directory / f"{BAD}{node}").write_text(why + "\n")

    def excluded(self, node: str) -> str | None:
        """Return why a node must leave; None if it need not."""
        try:
            return (self.directory / f"{BAD}{node}").read_text().strip()
        except FileNotFoundError:
            return None

    def all_excluded(self) -> dict[str, str]:
        """Return the nodes known so far to be unusable, and why."""
        with suppress(OSError):  # a shared disk may fail for a moment
            reasons = {path.name.removeprefix(BAD): path.read_text().strip() for path in self.directory.glob(f"{BAD}*")}
            return {node: why for node, why in reasons.items() if why}  # an empty file is still being written
        return {}

    def lose(self, nodes: Mapping[str, str]) -> None:
        """Tell the job script which lost nodes made the run fail.

        Args:
            nodes: their names, with what happened to each; a node that is already excluded keeps the reason recorded then.
        """
        excluded = self.all_excluded()
        reasons = {node: excluded.get(node, why) for node, why in nodes.items()}
        for node, why in reasons.items():
            self.exclude(node, why)
        if reasons:
            self.fail("".join(f"{node}: {why}\n" for node, why in reasons.items()))

    def fail(self, why: str) -> None:
        """Tell the job script that the run has failed through no fault of its own."""
        (self.directory / LOST).write_text(why)

    def is_over(self) -> bool:
        """Return whether Slurm is ending the job: a SIGTERM then leaves no time, unlike that of a preemption."""
        return (self.directory / OVER).exists()

    @contextmanager
    def stopped_from_outside(self) -> Iterator[None]:
        """Send this process SIGUSR1 once the job script creates STOP while the block runs, and SIGTERM once it creates OVER.

        The job script leaves a file instead of sending a signal: a file gets through every container, reaches this process alone however
        often Slurm signals, and is not lost on a process that does not listen yet.
        """
        over = threading.Event()

        def look() -> None:
            stopped = False
            while not over.wait(POLL_S):
                with suppress(OSError):  # a shared disk may fail for a moment
                    if self.is_over():
                        os.kill(os.getpid(), signal.SIGTERM)
                    elif not stopped and (self.directory / STOP).exists():
                        os.kill(os.getpid(), signal.SIGUSR1)
                        stopped = True

        thread = threading.Thread(target=look, name="stop", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(END_S)  # a look at a shared disk may never return


def cpus_here() -> int:
    """The number of this node's CPUs that the job has."""
    return int(os.environ.get("SLURM_CPUS_ON_NODE") or len(os.sched_getaffinity(0)))


def forget_launcher() -> None:
    """Remove the launcher's variables from the environment of this process and of those that it starts."""
    for name in [name for name in os.environ if name.startswith(FOREIGN)]:
        del os.environ[name]

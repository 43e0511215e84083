"""Read what child processes have written to stdout and stderr: a dying engine reports its error only there, not to its parent."""

import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager

MAX_BYTES = 1 << 20
# The prefix of vLLM's lines: "(EngineCore pid=12) ERROR 11-22 20:39:50 [core.py:1100] ".
_PREFIX = re.compile(r"^(?:\([\w ]+pid=\d+\) ?)?(?:[A-Z]+ \d\d-\d\d \d\d:\d\d:\d\d \[[^\]]*\] ?)?")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_FRAME = re.compile(r'\s+File "([^"]+)", line (\d+), in (\S+)')
_ERROR = re.compile(r"[A-Za-z_][\w.]*(?:: .*)?")


@contextmanager
def overheard() -> Iterator[Callable[[], str | None]]:
    """Yield a function that returns the error of the first traceback written since the block was entered, or None if there is none.

    Sees only output that goes into files, as that of Ray's workers does.
    """
    begun = {number: os.fstat(number).st_size for number in (1, 2) if stat.S_ISREG(os.fstat(number).st_mode)}

    def said() -> str | None:
        for number, size in begun.items():
            with open(f"/proc/self/fd/{number}", "rb") as file:
                file.seek(size)
                fault = first_fault(file.read(MAX_BYTES).decode(errors="replace"))
            if fault is not None:
                return fault
        return None

    yield said


def first_fault(text: str) -> str | None:
    """Return the error of a log's first traceback, and where it was raised: "ValueError: no kernel (attention.py:12, in select)"."""
    place, inside = "", False
    for line in map(_plain, text.splitlines()):
        frame = _FRAME.match(line)
        if line.startswith("Traceback (most recent call last)"):
            place, inside = "", True
        elif inside and frame is not None:
            place = f" ({os.path.basename(frame[1])}:{frame[2]}, in {frame[3]})"
        elif inside and _ERROR.fullmatch(line):
            return f"{line}{place}"
    return None


def _plain(line: str) -> str:
    return _PREFIX.sub("", _COLOURS.sub("", line))

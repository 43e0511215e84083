"""The most memory that this process has held since a moment, as Linux counts it."""

import re
from pathlib import Path

_PROCESS = Path("/proc/self")


class PeakMemory:
    """Begins to measure when it is made."""

    def __init__(self) -> None:
        (_PROCESS / "clear_refs").write_text("5")  # proc_pid_clear_refs(5): the peak becomes what is held now
        self._before = _bytes("VmRSS")

    def extra(self) -> int:
        """The peak since then, in bytes on top of what was held then."""
        return _bytes("VmHWM") - self._before


def _bytes(field: str) -> int:
    line = re.search(rf"^{field}:\s*(\d+) kB$", (_PROCESS / "status").read_text(), re.MULTILINE)
    assert line is not None, f"/proc/self/status has no {field}"
    return int(line[1]) << 10

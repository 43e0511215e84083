"""Whether nodes are fit for a run: every GPU computes, and what the run reads is there. Asked before it begins, and where it has failed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from megarl.cluster.machine import gpus_here
from megarl.cluster.membership import tell
from megarl.cluster.reach import SHOWN, answers
from megarl.cluster.shared_files import content, differences
from megarl.text import one_line

TOUCH = "import sys; from megarl.parallel.backend import touch_gpus; sys.exit(touch_gpus(int(sys.argv[1])))"
GPU = "GPU "  # begins what is wrong with one
ANSWER_S = 60.0  # for a node to answer at all


def unfit(nodes: Mapping[str, str], read: Mapping[str, Path], gpus: bool, timeout_s: float) -> dict[str, str]:
    """What is wrong with each node, as far as there is anything.

    Args:
        nodes: Ray's ids by name, this one first.
        read: files and directories by their dotted key; each node must see the same.
        gpus: the run is one on GPUs.
        timeout_s: for the GPUs of a node.

    Returns:
        Nothing where all nodes fail in the same way, unless it is by a GPU of the only one: it is the fault of none, and is told.
    """
    wanted = {f"{key}={path}": (path, content(path)) for key, path in read.items()}
    lost = [what for what, (_, known) in wanted.items() if not known]
    if not nodes:
        return {}
    if lost:
        return {next(iter(nodes)): f"does not see {', '.join(lost)}"}
    said = answers(nodes, fitness, wanted, gpus, timeout_s, within_s=timeout_s + ANSWER_S)
    found = {name: why for name, why in said.items() if why is not None}
    if len(found) == len(nodes) and (len(nodes) > 1 or not any(why.startswith(GPU) for why in found.values())):
        tell(f"no node is to blame for what all of them lack: {next(iter(found.values()))}")
        return {}
    return found


def fitness(wanted: Mapping[str, tuple[Path, str]], gpus: bool, timeout_s: float) -> str | None:
    """What is wrong with this node; None where nothing is. `wanted`: see `shared_files.differences`."""
    unseen = differences(wanted)
    if unseen:
        return f"does not see {', '.join(unseen)} as the driver does"
    return sick_gpus(gpus_here(), timeout_s) if gpus else None


def sick_gpus(count: int, timeout_s: float, program: str = TOUCH) -> str | None:
    """What is wrong with this machine's GPUs; None where each computes. In a process of its own, for it may never end, nor be killed.

    Args:
        count: of the GPUs.
        timeout_s: for all of them.
        program: in Python, which is given the count, and ends with status 0, or with what is wrong as its last line.
    """
    with tempfile.TemporaryFile() as said:
        command, paths = [sys.executable, "-c", program, str(count)], os.pathsep.join(sys.path)
        process = subprocess.Popen(
            command, env={**os.environ, "PYTHONPATH": paths}, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT
        )
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()  # and is not waited for
            return f"{GPU}test: no answer within {timeout_s:g} s"
        said.seek(0)
        lines = said.read().decode(errors="replace").strip().splitlines()
    if status == 0:
        return None
    return one_line(lines[-1], SHOWN) if lines and status == 1 else f"{GPU}test: ended with status {status}"

"""Test whether nodes are fit for a run, before it begins and after it has failed: every GPU computes, and what the run reads is there."""

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
from megarl.text.display import one_line

TOUCH = "import sys; from megarl.parallel.backend import touch_gpus; sys.exit(touch_gpus(int(sys.argv[1])))"
GPU = "GPU "  # prefix of a message about a faulty GPU
ANSWER_S = 60.0  # for a node to answer at all


def unfit(nodes: Mapping[str, str], paths: Mapping[str, Path], gpus: bool, timeout_s: float) -> dict[str, str]:
    """Find the nodes that are unfit for a run, and why.

    Args:
        nodes: Ray's ids by name, this node first.
        paths: files and directories by their dotted key; each node must see the same.
        gpus: whether the run uses GPUs.
        timeout_s: for the GPUs of a node.

    Returns:
        What is wrong with each unfit node, by name. Empty where all nodes fail in the same way: then none of them is to blame, and a
        message says so. The exception is a faulty GPU of the only node, which is returned.
    """
    contents = {f"{key}={path}": (path, content(path)) for key, path in paths.items()}
    missing_files = [what for what, (_, summary) in contents.items() if not summary]
    if not nodes:
        return {}
    if missing_files:
        return {next(iter(nodes)): f"does not see {', '.join(missing_files)}"}
    replies = answers(nodes, fitness, contents, gpus, timeout_s, within_s=timeout_s + ANSWER_S)
    reasons = {name: why for name, why in replies.items() if why is not None}
    faults = {GPU if why.startswith(GPU) else why for why in reasons.values()}
    if len(reasons) == len(nodes) and len(faults) == 1 and (len(nodes) > 1 or GPU not in faults):
        tell(f"no node is to blame for what all of them lack: {next(iter(reasons.values()))}")
        return {}
    return reasons


def fitness(contents: Mapping[str, tuple[Path, str]], gpus: bool, timeout_s: float) -> str | None:
    """Return what is wrong with this node; None if nothing is.

    Args:
        contents: see `shared_files.differences`.
        gpus: whether the run uses GPUs.
        timeout_s: for the GPUs.
    """
    unseen = differences(contents)
    if unseen:
        return f"does not see {', '.join(unseen)} as the driver does"
    return sick_gpus(gpus_here(), timeout_s) if gpus else None


def sick_gpus(count: int, timeout_s: float, program: str = TOUCH) -> str | None:
    """Return what is wrong with this machine's GPUs; None if each one computes.

    The test runs in a process of its own, because it may hang and may not even be killable.

    Args:
        count: the number of GPUs.
        timeout_s: for all of them.
        program: Python code that gets the count as its argument. It exits with status 0, or with 1 and what is wrong as its last line.
    """
    with tempfile.TemporaryFile() as output:
        command, paths = [sys.executable, "-c", program, str(count)], os.pathsep.join(sys.path)
        process = subprocess.Popen(
            command, env={**os.environ, "PYTHONPATH": paths}, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()  # without waiting: it may not be killable
            return f"{GPU}test: no answer within {timeout_s:g} s"
        output.seek(0)
        lines = output.read().decode(errors="replace").strip().splitlines()
    if status == 0:
        return None
    return one_line(lines[-1], SHOWN) if lines and status == 1 else f"{GPU}test: ended with status {status}"

"""Call Slurm's commands, in an environment that decides nothing for them."""

import os
import re
import subprocess

from megarl.errors import ConfigError, Stopped
from megarl.text.display import one_line

ANSWER_S = 60.0
# Variables that are options of Slurm's commands, or that tell of the job in which this process runs (salloc, a notebook): its limits would
# be those of the steps of a job that is submitted from there.
OPTIONS = re.compile(r"(SLURMD?|SBATCH|SRUN|SALLOC|SQUEUE|SINFO|SCONTROL|SCANCEL|SACCTMGR)_")
CLUSTER = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_CLUSTERS", "SLURM_JWT")  # where Slurm is, and who asks
DEFAULTS = {"partition": "SBATCH_PARTITION", "account": "SBATCH_ACCOUNT", "qos": "SBATCH_QOS", "time": "SBATCH_TIMELIMIT"}


class NoAnswer(ConfigError):
    """A command does not exist, or has failed."""


def default(option: str) -> str | None:
    """The default of an option of `megarl slurm`, from the variable that sbatch would take it from; None if it is not set."""
    return os.environ.get(DEFAULTS[option]) or None


def ignored() -> list[str]:
    """The variables of sbatch that are set and have no effect."""
    used = (*DEFAULTS.values(), "SBATCH_CLUSTERS")
    return sorted(name for name in os.environ if name.startswith("SBATCH_") and name not in used)


def environment() -> dict[str, str]:
    """The environment of Slurm's commands, and so of a job that is submitted."""
    variables = {name: value for name, value in os.environ.items() if name in CLUSTER or not OPTIONS.match(name)}
    if cluster := os.environ.get("SBATCH_CLUSTERS"):  # sbatch alone would follow it
        variables.setdefault("SLURM_CLUSTERS", cluster)
    return variables


def call(*command: str) -> str:
    """Run a command and return what it prints. Raises NoAnswer with the command's message if it fails, Stopped if it cannot be started."""
    try:
        process = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, env=environment())
    except FileNotFoundError:
        raise NoAnswer(f"slurm: no {command[0]} on this machine: submit from one that has Slurm (--dry-run prints the script)") from None
    except OSError as error:  # not of a file that the user named
        raise Stopped(f"slurm: {command[0]}: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"slurm: {command[0]} has not answered within {ANSWER_S:g} s") from None
    if process.returncode:
        raise NoAnswer(f"slurm: {command[0]}: {one_line(process.stderr or process.stdout)}")
    return process.stdout.strip()

"""The options of sbatch: those that a job is made of, and the user's own (`--sbatch`), which must not change them."""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from megarl.errors import ConfigError
from megarl.slurm.job import Job

OWN = "an option of megarl slurm: give it there"
NODES, SIZE = "the job takes whole nodes", "--nodes and --gpus-per-node say how large the job is"
LOG, RESTARTS = "the job's log is slurm/JOB.out in the run's directory", "--max-restarts or --chain says how a run goes on"
CALL, IMAGE = "it changes how sbatch is called, not the job", "--container runs the steps in an image; the job's script runs outside it"
# Options that a run relies on, and why the user's own are refused.
REFUSED = {
    **dict.fromkeys(("account", "partition", "qos", "time", "exclude", "nodes", "gpus-per-node"), OWN),
    **dict.fromkeys(("exclusive", "oversubscribe", "share", "overcommit"), NODES),
    **dict.fromkeys(("ntasks", "ntasks-per-core", "ntasks-per-gpu", "ntasks-per-node", "ntasks-per-socket", "ntasks-per-tres"), SIZE),
    **dict.fromkeys(("gpus", "gpus-per-task", "gpus-per-socket", "use-min-nodes"), SIZE),
    **dict.fromkeys(("output", "error", "open-mode"), LOG),
    **dict.fromkeys(("requeue", "no-requeue"), RESTARTS),
    **dict.fromkeys(("wait", "parsable", "quiet", "verbose", "help", "usage", "version", "wrap"), CALL),
    **dict.fromkeys(("container", "container-id", "container-image", "container-mounts", "container-name", "container-workdir"), IMAGE),
    "array": "the tasks of an array would share the run's directory",
    "chdir": "the job starts in the directory in which megarl slurm is called",
    "clusters": "SLURM_CLUSTERS names the cluster, for what is checked as well",
    "job-name": "the job is named after the run (name=...)",
    "no-kill": "a lost node must not end the job",
    "propagate": "the limits of this machine must not apply to the nodes",
    "signal": "--grace says when Slurm warns the run",
    "test-only": "use --dry-run",
}
DEPENDENCY, TIME_MIN, GRES = "dependency", "time-min", "gres"
REPLACED = {"export": "export", "export-file": "export", "mem": "mem", "mem-per-cpu": "mem", "mem-per-gpu": "mem"}  # the user's own goes
# Options that an abbreviation could mean: sbatch takes the beginning of a name for the name.
NAMES = (*REFUSED, *REPLACED, DEPENDENCY, TIME_MIN, GRES, "gres-flags", "mem-bind", "wait-all-nodes")
SHORT = {
    **{"A": "account", "a": "array", "D": "chdir", "d": "dependency", "e": "error", "G": "gpus", "h": "help", "J": "job-name"},
    **{"k": "no-kill", "M": "clusters", "N": "nodes", "n": "ntasks", "O": "overcommit", "o": "output", "p": "partition", "Q": "quiet"},
    **{"q": "qos", "s": "oversubscribe", "t": "time", "V": "version", "v": "verbose", "W": "wait", "x": "exclude"},
}
FLAGS = "hHIkOQvVW"  # short options without a value, after which another may follow


@dataclass(frozen=True)
class Option:
    """One of the user's own options of sbatch."""

    name: str  # the long one
    value: str
    word: str  # as sbatch gets it


def options(job: Job) -> list[str]:
    """The options of sbatch, a word for each. Raises ConfigError for one of the user's own that the run relies on."""
    own = given(job)
    replaced = {REPLACED[option.name] for option in own if option.name in REPLACED}
    values = {
        "job-name": job.name,
        "chdir": job.here,
        "output": job.directory / "slurm" / "%j.out",
        "open-mode": "append",
        "nodes": f"{job.nodes}-{job.nodes + job.spare}" if job.spare else job.nodes,
        "gpus-per-node": job.counted_gpus or None,
        "mem": 0,  # all of each node
        "export": "ALL",
        "partition": job.partition,
        "account": job.account,
        "qos": job.qos,
        "time": job.time,
        "exclude": job.exclude,
        "signal": f"B:USR1@{job.grace}",
        "dependency": _dependency(job, own),
    }
    words = [f"--{name}={value}" for name, value in values.items() if value is not None and name not in replaced]
    # --no-kill: one lost node does not end the job. No number of tasks: Slurm would allocate as few nodes as hold them, and no spare ones.
    # --propagate: the limits of the submitting machine (files, locked memory) must not apply to the nodes.
    words += ["--exclusive", "--no-kill", "--propagate=NONE", "--no-requeue" if job.chain > 1 else "--requeue"]
    return [*words, *(option.word for option in own if option.name != DEPENDENCY)]


def given(job: Job) -> list[Option]:
    """The user's own options. Raises ConfigError for one that the run relies on, or that sbatch would not read as an option."""
    own = list[Option]()
    for text in job.sbatch:
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise ConfigError(f"slurm: --sbatch {text!r}: {error}") from None
        if not words or not words[0].startswith("-"):
            raise ConfigError(f"slurm: --sbatch {text!r} is not an sbatch option, such as --sbatch=--reservation=x")
        own += [option for word in _joined(words) for option in _options(word)]
    for option in own:
        reason = SIZE if option.name == GRES and "gpu" in option.value else REFUSED.get(option.name)
        if reason is not None:
            raise ConfigError(f"slurm: --sbatch {option.word!r}: {reason}")
    return own


def _joined(words: list[str]) -> list[str]:
    """Join values to the options before them: a word of its own could become the name of the script."""
    joined = list[str]()
    for word in words:
        if word.startswith("-"):
            joined.append(word)
        else:
            joined[-1] += f"={word}" if joined[-1].startswith("--") else word
    return joined


def _options(word: str) -> Iterator[Option]:
    """The options in a word: one long one, or short ones of which the last may have a value."""
    if word.startswith("--"):
        name, _, value = word[2:].partition("=")
        full = name if name in NAMES else next((candidate for candidate in NAMES if candidate.startswith(name)), name)
        yield Option(full, value, word)
        return
    for place, letter in enumerate(word[1:], 1):
        value = "" if letter in FLAGS else word[place + 1 :]
        yield Option(SHORT.get(letter, letter), value, f"-{letter}{value}")
        if letter not in FLAGS:
            return


def _dependency(job: Job, own: list[Option]) -> str | None:
    """The job's dependency: the user's own, and in a chain the end of the job before."""
    dependencies = [option.value for option in own if option.name == DEPENDENCY] + ["singleton"] * (job.chain > 1)
    if len(dependencies) > 1 and any("?" in one for one in dependencies):
        raise ConfigError(
            f"slurm: --sbatch --dependency={dependencies[0]}: alternatives (?) cannot be joined with {dependencies[-1]} (--chain)"
        )
    return ",".join(dict.fromkeys(dependencies)) or None

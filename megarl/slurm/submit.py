"""Submit a run to Slurm."""

import shutil
from pathlib import Path

from megarl.config import ConfigError, RunSettings, dump
from megarl.slurm.commands import NoAnswer, call
from megarl.slurm.job import Job
from megarl.slurm.options import options
from megarl.slurm.script import NODE_SCRIPTS, TEMPLATE, render, templates
from megarl.slurm.status import queued


def submit(job: Job, config: RunSettings) -> list[str]:
    """Write the script and the configuration into the run's directory, and submit `job.chain` jobs.

    The job runs the configuration as it is now, even if the file that it was read from changes later.

    Returns:
        The numbers of the jobs.

    Raises:
        ConfigError: a job of this run is already in the queue, and this one would share its directory; or Slurm refuses the script. If it
            has already accepted other jobs of the chain, the message names their numbers.
    """
    for number, state, *_ in queued(config.directory):
        if state != "COMPLETING":
            raise ConfigError(f"slurm: job {number} of {config.directory} is {state.lower()} (scancel {number} ends it)")
    scripts = _new(config.directory / "slurm")
    try:
        (scripts / "config.yaml").write_text(dump(config))
        for name in NODE_SCRIPTS:
            shutil.copy(templates() / name, scripts)
        script = scripts / TEMPLATE
        script.write_text(render(job, scripts))
        call("sbatch", "--test-only", *options(job), str(script))
    except BaseException:
        shutil.rmtree(scripts)
        raise
    numbers = list[str]()
    for _ in range(job.chain):
        try:
            numbers.append(call("sbatch", "--parsable", *options(job), str(script)).partition(";")[0])
        except NoAnswer as error:
            if not numbers:
                raise
            job_numbers = " ".join(numbers)
            raise NoAnswer(
                f"{error}; {len(numbers)} of --chain {job.chain} are submitted: {job_numbers} (scancel {job_numbers} takes them back)"
            ) from None
    return numbers


def _new(logs: Path) -> Path:
    """Create a directory for one submission."""
    try:
        logs.mkdir(parents=True, exist_ok=True)
        number = 1 + max((int(path.name.partition("-")[2]) for path in logs.glob("submitted-[0-9]*")), default=0)
        (scripts := logs / f"submitted-{number}").mkdir()
    except OSError as error:
        raise ConfigError(f"slurm: cannot write to {logs}: {error.strerror}") from None
    return scripts

"""`megarl slurm CONFIG.yaml ...` and `megarl slurm status RUN`: the command line."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megarl.config import ConfigError, RunSettings, load
from megarl.imports import find
from megarl.slurm.checks import check
from megarl.slurm.commands import default, ignored
from megarl.slurm.job import Job
from megarl.slurm.script import render
from megarl.slurm.status import show
from megarl.slurm.submit import submit
from megarl.text.stdout import say
from megarl.verbs import VERBS


def parser() -> argparse.ArgumentParser:
    """The argument parser of a submission."""
    top = argparse.ArgumentParser(
        prog="megarl slurm",
        description="Submits a run as a Slurm job: checks it against the cluster, writes the script and its configuration into the run's "
        "directory, and hands it to sbatch. When Slurm warns of its end, the job saves, requeues itself and resumes on its own.",
        epilog="megarl slurm status RUN shows the state of a run and its jobs; RUN is its directory, such as runs/NAME.",
    )
    top.add_argument("config", type=Path, metavar="CONFIG.yaml")
    top.add_argument("overrides", nargs="*", metavar="a.b=c", help="overrides a configuration value, as YAML")
    top.add_argument("--verb", choices=VERBS, default="train", metavar="VERB", help="the verb to run (default: train)")
    top.add_argument("--nodes", type=int, required=True, metavar="N", help="number of nodes, each used as a whole")
    top.add_argument("--gpus-per-node", type=int, default=0, metavar="N", help="GPUs per node (default: 0, for cluster.gpus=false)")
    top.add_argument("--spare", type=int, default=0, metavar="N", help="spare nodes, to replace bad ones (default: 0)")
    top.add_argument("--partition", default=default("partition"), metavar="NAME", help="(default: SBATCH_PARTITION, or Slurm's)")
    top.add_argument("--account", default=default("account"), metavar="NAME", help="(default: SBATCH_ACCOUNT)")
    top.add_argument("--qos", default=default("qos"), metavar="NAME", help="(default: SBATCH_QOS)")
    limit = "time limit of each start of the job, in sbatch's format: 4:00:00, 2-0 (default: SBATCH_TIMELIMIT, or the partition's)"
    top.add_argument("--time", default=default("time"), metavar="LIMIT", help=limit)
    top.add_argument(
        "--grace", type=int, default=600, metavar="S", help="seconds before the time limit at which the run is saved (default: 600)"
    )
    top.add_argument("--exclude", metavar="NODES", help="nodes that the job must not use")
    top.add_argument("--max-restarts", type=int, default=20, metavar="N", help="how often a job may be requeued (default: 20)")
    top.add_argument("--chain", type=int, default=1, metavar="N", help="submit N jobs, one after the other, instead of one that requeues")
    top.add_argument(
        "--sbatch", action="append", default=[], metavar="OPTION", help="another sbatch option, such as --sbatch=--reservation=x"
    )
    top.add_argument("--container", metavar="IMAGE", help="an image file, or a name that the runtime knows")
    top.add_argument("--runtime", choices=("pyxis", "apptainer"), default="pyxis", help="container runtime (default: pyxis)")
    top.add_argument("--mount", action="append", default=[], metavar="FROM[:TO]", help="another directory to mount in the container")
    top.add_argument("--python", metavar="PATH", help="Python on the nodes (default: this one), or in the container (default: python)")
    dry = "check, print the script and submit nothing; where there is no Slurm, the model's config.json is enough for it"
    top.add_argument("--dry-run", action="store_true", help=dry)
    return top


def main(arguments: Sequence[str]) -> int:
    """Submit a run, or show the state of one."""
    if arguments and arguments[0] == "status":
        return _status(arguments[1:])
    args = parser().parse_intermixed_args(list(arguments))
    root: Any = find(VERBS[args.verb].config)
    config: RunSettings = load(args.config, args.overrides, root)
    if config.cluster.address == "auto":  # whatever cluster is there, which in a job is its own
        config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"address": None})})
    options = {name: value for name, value in vars(args).items() if name not in ("config", "overrides", "dry_run", "container")}
    image = args.container
    if image is not None and Path(image).exists():
        image = str(Path(image).absolute())
    job = Job(
        name=config.name.replace("/", "-"),
        directory=config.directory,
        here=Path.cwd(),
        counts_gpus=True,
        container=image,
        python=options.pop("python") or (sys.executable if image is None else "python"),
        reads=_reads(config),
        **options,
    )
    if names := ignored():
        print(f"megarl: {', '.join(names)}: not used, the options of megarl slurm decide (--sbatch adds others)", file=sys.stderr)
    job = check(job, config, dry_run=args.dry_run)
    if args.dry_run:
        say(render(job, config.directory / "slurm" / "submitted"))
        return 0
    numbers = submit(job, config)
    jobs = f"job {numbers[0]}" if len(numbers) == 1 else f"jobs {', '.join(numbers)}, one after the other"
    say(f"megarl: submitted {jobs}: {job.size}; megarl slurm status {config.directory}")
    return 0


def _reads(config: RunSettings) -> tuple[Path, ...]:
    """The paths that the run's processes read and write, to be mounted in a container."""
    from megarl.cluster.process_kinds import files

    inputs, _ = files(config)
    return tuple(dict.fromkeys((config.run_dir, *inputs.values())))


def _status(arguments: Sequence[str]) -> int:
    top = argparse.ArgumentParser(prog="megarl slurm status", description="Shows the state of a run and its Slurm jobs.")
    top.add_argument("run", type=Path, metavar="RUN", help="its directory, such as runs/NAME")
    args = top.parse_args(arguments)
    if not args.run.is_dir():
        raise ConfigError(f"slurm: no such directory: {args.run}")
    try:
        say(*show(args.run))
    except ValueError as error:
        raise ConfigError(f"slurm: {args.run}: {error}") from None
    return 0

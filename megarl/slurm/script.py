"""Render the script of a job from the template in `slurm/`."""

import shlex
import sysconfig
from pathlib import Path

from megarl.slurm.job import Job
from megarl.slurm.options import options

TEMPLATE, NODE_SCRIPTS = "job.sbatch", ("head.sh", "worker.sh", "guard.sh")
OPTIONS, SETTINGS, END = "# options:", "# settings:", "# end of settings"


def templates() -> Path:
    """The folder of the scripts: beside the package's folder, or where an installation without the repository has put it."""
    folder = Path(__file__).parents[2] / "slurm"
    return folder if (folder / TEMPLATE).is_file() else Path(sysconfig.get_path("data")) / "share" / "megarl" / "slurm"


def render(job: Job, scripts: Path) -> str:
    """Render the script, which will lie in the folder `scripts` together with the scripts that it starts."""
    lines, skipping = list[str](), False
    for line in (templates() / TEMPLATE).read_text().splitlines():
        if line.startswith(OPTIONS):
            lines += [f"#SBATCH {shlex.quote(word)}" for word in options(job)]
        elif line.startswith(SETTINGS):
            lines += settings(job, scripts)
            skipping = True
        elif line == END:
            skipping = False
        elif not skipping:
            lines.append(line)
    return "\n".join(lines) + "\n"


def settings(job: Job, scripts: Path) -> list[str]:
    """The lines that set the variables of the script."""
    values = {
        "scripts": scripts,
        "logs": job.directory / "slurm",
        "verb": job.verb,
        "python": job.python,
        "needed": job.nodes,
        "gpus": job.gpus_per_node,
        "most_restarts": job.max_restarts,
        "chained": int(job.chain > 1),
    }
    step, inside = container(job)
    lists = {"step_options": step, "inside": inside}
    return [
        *(f"{name}={shlex.quote(str(value))}" for name, value in values.items()),
        *(f"{name}=({' '.join(map(_quoted, words))})" for name, words in lists.items()),
    ]


def _quoted(word: str) -> str:
    return "'" + word.replace("'", "'\"'\"'") + "'"


def container(job: Job) -> tuple[list[str], list[str]]:
    """The options of srun, and the words before a command, that run it inside the job's container; both empty without one."""
    if job.container is None:
        return [], []
    mounts = [mount if ":" in mount else f"{mount}:{mount}" for mount in (*map(str, dict.fromkeys((job.here, *job.reads))), *job.mount)]
    if job.runtime == "pyxis":
        image, mounted = f"--container-image={job.container}", f"--container-mounts={','.join(mounts)}"
        return [image, mounted, f"--container-workdir={job.here}", "--no-container-mount-home"], []
    binds = [word for mount in mounts for word in ("--bind", mount)]
    return [], ["apptainer", "exec", *(["--nv"] if job.gpus_per_node else []), *binds, "--pwd", str(job.here), job.container]

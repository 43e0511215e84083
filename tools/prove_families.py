"""Run every model family through the whole stack, and print a table of what was measured: `--write` puts it into megarl/models/figures.md.

    python -m tools.prove_families [FAMILY ...] [--write]

For each family of tools/make_tiny_model.py: the logits against transformers' on one rank and on three layouts, a conversion there and back,
and RL of two steps with a real engine, whose weights are verified after each update and whose experts are replayed. About two minutes a
family on two cores. With names of families, `--write` replaces their rows alone.
"""

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from safetensors import safe_open

from tests.e2e.job import Job
from tools.bench_routing import commit, put
from tools.make_tiny_model import FAMILIES, SEEING, build, has_experts

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "megarl" / "models" / "figures.md"
BEGIN, END = "<!-- written by tools/prove_families.py -->", "<!-- end of the table -->"
COLUMNS = ("family", "logits", "layouts", "convert", "engine", "experts", "sync", "replay", "RL step", "commit")
ROW = re.compile(r"^\| `(\w+)` (\|.*)$", re.MULTILINE)
DIFFERENCE = re.compile(r"difference\| is ([\d.e+-]+) standard deviations")
SIZES = {"layers": 4, "hidden": 128, "experts": 8, "expert_hidden": 64}
STEPS = 2
RL = (f"train.steps={STEPS}", "routing={replay: r3, sample: 1.0}")
TIMEOUT_S = 1800.0


@dataclass(frozen=True)
class Proof:
    """What one family's row shows: a cell for each column after the first."""

    cells: tuple[str, ...]
    passed: bool


def layouts(family: str) -> tuple[tuple[str, ...], ...]:
    """Return check_logits' arguments of the layouts: tensor (and expert) parallel, pipeline, context parallel."""
    return ("--tp=2", *(("--ep=2",) if has_experts(family) else ())), ("--pp=2",), ("--cp=2",)


def prove(family: str, scratch: Path) -> Proof:
    """Run one family through the stack. A step that fails is named in its cell, and does not keep the others from being run."""
    model = scratch / "model"
    build(model, **SIZES, seed=1, family=family)
    one, good = _logits(model, [()])
    many, equal = _logits(model, layouts(family))
    converted = _converted(model, scratch)
    rl, trained = _trained(model, scratch, family)
    cells = (one, many, "byte for byte" if converted else "**FAILED**", *rl, commit())
    return Proof(cells, good and equal and converted and trained)


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def _logits(model: Path, each: Sequence[tuple[str, ...]]) -> tuple[str, bool]:
    """Return the largest difference of the logits on some layouts, and whether it is within check_logits' bound on all of them."""
    runs = [_run("tools/check_logits.py", str(model), *arguments) for arguments in each]
    differences = [float(match[1]) for run in runs if (match := DIFFERENCE.search(run.stdout))]
    good = len(differences) == len(runs) and not any(run.returncode for run in runs)
    if not good:
        print(*(run.stdout + run.stderr for run in runs if run.returncode), sep="\n")
    return (f"{max(differences):.0e}" if good else "**FAILED**"), good


def _converted(model: Path, scratch: Path) -> bool:
    """Whether a conversion there and back gives the same tensors, bit for bit."""
    steps, back = str(scratch / "steps"), str(scratch / "back")
    for command in (("hf-to-megatron", str(model), steps), ("megatron-to-hf", steps, back)):
        run = _run("-m", "megarl.cli", "convert", *command)
        if run.returncode:
            print(run.stdout + run.stderr)
            return False
    return dict(_digests(model)) == dict(_digests(Path(back)))


def _digests(path: Path) -> Iterator[tuple[str, tuple[str, str]]]:
    import torch

    for file in sorted(path.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                tensor = tensors.get_tensor(name)
                content = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
                yield name, (f"{tensor.dtype}{list(tensor.shape)}", hashlib.sha256(content).hexdigest())


def _trained(model: Path, scratch: Path, family: str) -> tuple[tuple[str, ...], bool]:
    """Return the cells of engine, experts, sync, replay and RL step."""
    job = Job(scratch / "rl", model, RL if has_experts(family) else RL[:1], foreign={})
    status = job.start().finish(TIMEOUT_S)
    rows = job.steps()
    if status or len(rows) != STEPS:
        lines = [line for line in job.text().splitlines() if line.startswith("megarl: ")]
        reason = lines[-1] if lines else f"status {status}"
        print(job.text()[-2000:])
        return ("**FAILED**", "", "", "", reason.replace("|", "\\|")[:200]), False
    gap = max(row["training/logprob_gap_max"] for row in rows)
    experts, replay = "no experts", "no experts"
    good = gap <= 1e-3
    if has_experts(family):
        changed = max(row["routing/rollout_changed_frac"] for row in rows)
        hits = min(row["routing/replay_hit_rate"] for row in rows)
        experts, replay, good = f"{changed:.2%} differ", f"{hits:.0%}", good and hits == 1.0 and changed <= 1e-3
    tensors = rows[-1]["sync/tensors"]
    gradient = rows[-1]["actor/grad_norm"]
    return (f"{gap:.0e}", experts, f"{tensors:.0f} tensors", replay, f"gradient {gradient:.3g}"), good and 0 < gradient < float("inf")


def lines(proofs: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the lines of the table, a row for each proven family, in the order of FAMILIES."""
    rows = [f"| `{family}` | {' | '.join(proofs[family])} |" for family in FAMILIES if family in proofs]
    return [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|", *rows]


def written(page: str) -> dict[str, list[str]]:
    """Return the rows of the table in a page: family -> cells."""
    table = page.partition(BEGIN)[2].partition(END)[0]
    return {family: [cell.strip() for cell in cells.strip("|").split(" | ")] for family, cells in ROW.findall(table)}


def main() -> int:
    """Prove the families, and return 1 if one has failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    played = [family for family in FAMILIES if family not in SEEING]  # those that engines run
    parser.add_argument("families", nargs="*", metavar="FAMILY", choices=[*played, []], help="default: all")
    parser.add_argument("--write", action="store_true", help="write the table into megarl/models/figures.md")
    given = parser.parse_args()
    failed = []
    for family in given.families or played:
        with tempfile.TemporaryDirectory(prefix="family-") as scratch:
            proof = prove(family, Path(scratch))
        print(f"{family}: {' | '.join(proof.cells)}", flush=True)
        if not proof.passed:
            failed.append(family)
        if given.write:
            proven = written(PAGE.read_text()) | {family: list(proof.cells)}
            put(BEGIN, [f"Tiny models in float32 on two cores, {date.today()}:", "", *lines(proven)], PAGE)
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

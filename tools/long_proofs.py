"""Run the long proofs: the tests that `--long` alone runs in full, and chaos.

    python -m tools.long_proofs --landing                    # the part that is due: CI, after the suite
    python -m tools.long_proofs --turn                       # before handing in: the next part is due
    python -m tools.long_proofs --all --write                # all of them: hours
    python -m tools.long_proofs tests/e2e/test_kills.py chaos
    python -m tools.long_proofs --part 3

They run one after the other. One that fails, or takes more than twice its time and two minutes, is a fault to mend, never one to retry; the
others run all the same, and the exit status is 1. With --write, the table of tests/proofs.md gets the rows of those that ran.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from tools import faulty_disk

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "tests" / "proofs.md"
BEGIN, END = "<!-- long proofs: written by tools/long_proofs.py -->", "<!-- end of the long proofs -->"
DUE = "The next landing runs part"
ROW = re.compile(r"^\| \d+ \| `([^`]+)` \| (.*) \|$", re.MULTILINE)
MINUTES = 25  # of a part, at most
SLACK_S = 120  # beyond twice its time, after which a proof hangs
END_S = 60  # in which a proof that is interrupted must end
COMMITS = 50  # of two landings, about


@dataclass(frozen=True)
class Proof:
    """A long proof and the seconds that it takes on two cores."""

    name: str
    seconds: int
    tests: tuple[str, ...] = ()  # files, folders or tests; all but chaos have some
    words: str = ""  # which of them, as pytest's -k has it

    def command(self, scratch: Path) -> list[str]:
        """Return the command line; what it writes goes into `scratch`."""
        if not self.tests:
            return [sys.executable, "-m", "tools.chaos", "--faults", "24", "--out", str(scratch / "chaos")]
        words = ["-k", self.words] if self.words else []
        return [sys.executable, "-m", "pytest", *self.tests, "--long", "-m", "long", *words, f"--basetemp={scratch / 'pytest'}"]

    def missing(self) -> str | None:
        """Return why it cannot run here; None if it can. Tests say so themselves."""
        return None if self.tests else faulty_disk.missing()


def _tests(seconds: int, *tests: str, name: str = "", words: str = "") -> Proof:
    return Proof(name or tests[0], seconds, tests, words)


def _distributed(seconds: int, name: str) -> Proof:
    return _tests(seconds, f"tests/distributed/test_{name}.py")


FAULTS, SLURM = "tests/e2e/test_faults.py", "tests/e2e/test_slurm_jobs.py"
NODES, RAY = "test_a_lost or test_a_killed or test_an_engine or cut_off", "gcs_server or raylet"
# The seconds are those of tests/proofs.md, measured beside other work, so that an idle machine takes fewer; those of faults and of Slurm's
# jobs are 50 s for a test, and 90 to 160.
PARTS: tuple[tuple[Proof, ...], ...] = (
    (
        Proof("chaos", 900),
        _distributed(100, "predictor"),
        _distributed(55, "split_episodes"),
        _distributed(35, "routing"),
        _distributed(20, "export"),
        _distributed(20, "fused_logprobs"),
        _distributed(25, "value_model"),
        _distributed(20, "lifetime"),
        _distributed(35, "shown_prompts"),
        _tests(35, "tests/e2e/test_pairs.py"),
        _tests(80, "tests/e2e/test_old_logp.py"),
    ),
    (
        _tests(900, FAULTS, name="faults-two-ranks", words="any_process[tp2- or shares or two_ranks"),
        _tests(480, "tests/e2e/test_members.py"),
    ),
    (
        _tests(660, "tests/e2e/test_ahead.py"),
        _tests(60, "tests/e2e/test_watch.py"),
        _tests(120, "tests/e2e/test_steps.py"),
        _distributed(140, "family_training"),
        _distributed(60, "family_stages"),
        _distributed(60, "convert"),
        _distributed(50, "layouts"),
        _tests(45, "tests/e2e/test_sync.py"),
        _distributed(60, "families"),
        _distributed(60, "algorithm_layouts"),
        _tests(45, "tests/e2e/test_kept.py"),
    ),
    (
        _tests(900, SLURM, name="slurm-signals", words=f"not ({NODES} or {RAY})"),
        _tests(100, "tests/e2e/test_engines.py"),
        _distributed(75, "checkpoint"),
        _distributed(60, "muon"),
        _tests(65, "tests/e2e/test_clock.py"),
        _distributed(55, "supervised_worker"),
        _distributed(45, "kept_steps"),
    ),
    (
        _tests(950, FAULTS, name="faults-killed", words="(any_process[one- and not SIGSTOP) or helper"),
        _tests(400, "tests/engines"),
    ),
    (
        _tests(1100, SLURM, name="slurm-nodes", words=NODES),
        _tests(140, "tests/e2e/test_routing.py"),
        _distributed(45, "plan"),
        _distributed(75, "family_gradients"),
        _distributed(40, "teachers"),
    ),
    (
        _tests(550, FAULTS, name="faults-stopped", words="any_process[one- and SIGSTOP"),
        _tests(550, FAULTS, name="faults-joined", words="cluster_of_others"),
        _distributed(100, "family_weights"),
        _distributed(40, "saving"),
        _tests(60, "tests/e2e/test_stored_logprobs.py"),
        _tests(100, "tests/e2e/test_image_modes.py"),
    ),
    (
        _tests(470, "tests/e2e/test_kills.py"),
        _tests(130, "tests/e2e/test_resume.py"),
        _tests(110, "tests/e2e/test_hanging_disk.py"),
        _distributed(110, "images"),
        _distributed(210, "image_steps"),
        _tests(120, "tests/e2e/test_image_episodes.py", "tests/e2e/test_images.py"),
        _distributed(85, "replayed_steps"),
        _tests(70, "tests/e2e/test_rlhf.py"),
    ),
    (
        _tests(570, "tests/unit"),
        _tests(140, "tests/e2e/test_environments.py"),
        _tests(260, "tests/slurm"),
        _distributed(250, "lora"),
        _tests(190, "tests/e2e/test_distillation.py"),
    ),
    (
        _tests(800, SLURM, name="slurm-ray", words=RAY),
        _tests(230, "tests/e2e/test_own_task.py"),
        _distributed(270, "megatron_checkpoints"),
        _tests(60, "tests/e2e/test_served_images.py"),
    ),
    (
        _tests(1000, FAULTS, name="faults-modes", words="any_process[ahead- or any_process[free-"),
        _tests(330, "tests/examples"),
    ),
    (
        _tests(900, FAULTS, name="faults-recovery", words="start_again"),
        _tests(460, "tests/e2e/test_soak.py"),
    ),
)
PROOFS = {proof.name: proof for part in PARTS for proof in part}


@dataclass(frozen=True)
class Result:
    """The verdict on a proof: passed, failed, killed, or skipped; and the last line that it printed."""

    verdict: str
    seconds: float
    line: str


def run(proof: Proof, limit_s: float, scratch: Path) -> Result:
    """Run a proof for `limit_s` seconds at most; if it does not pass, print the end of its output, indented."""
    if why := proof.missing():
        return Result("skipped", 0, why)
    log, begun = scratch / "log", time.monotonic()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with log.open("wb") as file:
        process = subprocess.Popen(
            proof.command(scratch),
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            process.wait(limit_s)
            verdict = "failed" if process.returncode else "passed"
        except subprocess.TimeoutExpired:
            verdict = "killed"
        finally:
            _end(process)
    lines = log.read_text(errors="replace").splitlines() or [""]
    if verdict in ("failed", "killed"):
        print(*(f"    {line}" for line in lines[-80:]), sep="\n", flush=True)
    elif proof.tests and " passed" not in lines[-1]:
        verdict = "skipped"
    return Result(verdict, time.monotonic() - begun, lines[-1])


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a proof, as a person would, so that its fixtures end what they began; then kill what is left of it."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run_all(proofs: Sequence[Proof], minutes: float | None) -> dict[str, Result]:
    """Run proofs, and print the verdict on each; those that `minutes` leave no time for are skipped."""
    results, begun = dict[str, Result](), time.monotonic()
    for proof in proofs:
        left = float("inf") if minutes is None else 60 * minutes - END_S - (time.monotonic() - begun)
        print(f"{proof.name}: about {proof.seconds} s ...", flush=True)
        scratch = Path(tempfile.mkdtemp(prefix="proof-"))
        result = Result("skipped", 0, f"{max(0.0, left):.0f} s are left")
        if left >= proof.seconds:
            result = run(proof, min(2 * proof.seconds + SLACK_S, left), scratch)
        if result.verdict in ("passed", "skipped"):
            shutil.rmtree(scratch, ignore_errors=True)
        results[proof.name] = result
        where = "" if result.verdict in ("passed", "skipped") else f"; all of its output: {scratch}"
        print(f"{proof.name}: {result.verdict} after {result.seconds:.0f} s: {result.line}{where}", flush=True)
    return results


def turn(page: str) -> int:
    """Return the number of the part that the page says is due."""
    [number] = re.findall(rf"^{DUE} (\d+)", page, re.MULTILINE)
    return int(number)


def due(page: str) -> int:
    """Return the number of the part that is due: the page's, or a later one if nobody turned to it: every COMMITS commits do."""
    turned = _git("log", "-1", "--format=%H", "-G", DUE, "--", str(PAGE))
    since = _git("rev-list", "--count", f"{turned}..HEAD") if turned else ""
    return (turn(page) - 1 + int(since or 0) // COMMITS) % len(PARTS) + 1


def _git(*command: str) -> str:
    """Return what git prints; nothing where it fails, as in a folder that is no repository."""
    return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def _commit() -> str:
    changes = _git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{PAGE.relative_to(ROOT)}")
    return _git("rev-parse", "--short=8", "HEAD") + (" and changes" if changes else "")


def written(page: str, number: int, results: Mapping[str, Result]) -> str:
    """Return the page with part `number` due and with the results; what did not run keeps its row."""
    before, _, rest = page.partition(BEGIN)
    old, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n" + "\n".join(_lines(dict(ROW.findall(old)), number, results)) + f"\n{END}{after}"


def _lines(rows: dict[str, str], number: int, results: Mapping[str, Result]) -> Iterator[str]:
    commit = _commit()
    for name, result in results.items():
        if result.verdict != "skipped":
            rows[name] = f"{result.verdict} | {result.seconds:.0f} | {commit} | {date.today()}"
    yield f"{DUE} {number} of {len(PARTS)}."
    yield ""
    yield "| part | proof | verdict | seconds | commit | date |"
    yield "|---|---|---|---|---|---|"
    for place, part in enumerate(PARTS, 1):
        for proof in part:
            yield f"| {place} | `{proof.name}` | {rows.get(proof.name, '- | - | - | -')} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; the last line says how many passed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="PROOF", help="as the table of tests/proofs.md names it")
    parser.add_argument("--all", action="store_true", help="all of them")
    parser.add_argument("--part", type=int, choices=range(1, len(PARTS) + 1))
    parser.add_argument("--landing", action="store_true", help="the part that is due")
    parser.add_argument("--turn", action="store_true", help="none; from now on the next part is due")
    parser.add_argument("--minutes", type=float, help=f"for all of them together; with --landing {MINUTES}, otherwise without limit")
    parser.add_argument("--write", action="store_true", help="put the results into tests/proofs.md")
    given = parser.parse_args(arguments)
    if (bool(given.names), given.all, given.part is not None, given.landing, given.turn).count(True) != 1:
        parser.error("one of PROOF, --all, --part, --landing and --turn is needed")
    if unknown := set(given.names) - PROOFS.keys():
        parser.error(f"no such proof: {', '.join(unknown)}; there are {', '.join(PROOFS)}")
    number = due(PAGE.read_text())
    if given.turn:
        after = number % len(PARTS) + 1
        PAGE.write_text(written(PAGE.read_text(), after, {}))
        print(f"{DUE} {after} of {len(PARTS)}, not {number}")
        return 0
    part = given.part or number
    proofs = [PROOFS[name] for name in given.names or (PROOFS if given.all else [proof.name for proof in PARTS[part - 1]])]
    which = f"part {part} of {len(PARTS)}: " if given.part or given.landing else ""
    print(f"long proofs: {which}{len(proofs)}, about {sum(proof.seconds for proof in proofs) / 60:.0f} min; commit {_commit()}", flush=True)
    results = run_all(proofs, MINUTES if given.landing and given.minutes is None else given.minutes)
    if given.write:
        page = PAGE.read_text()
        PAGE.write_text(written(page, turn(page), results))
    passed, skipped = (sum(result.verdict == verdict for result in results.values()) for verdict in ("passed", "skipped"))
    failed = len(results) - passed - skipped
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return int(failed > 0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())

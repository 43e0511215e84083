"""Every long test is in one of the long proofs, which take turns; whatever becomes of a proof, the others run and it is told."""

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from _pytest.mark import KeywordMatcher
from _pytest.mark.expression import Expression

from tests.unit.test_docs import ROOT
from tools import long_proofs
from tools.long_proofs import PAGE, PARTS, PROOFS, Proof, run_all


def chooses(proof: Proof, item: pytest.Item) -> bool:
    """Whether a proof runs a long test."""
    within = any(item.nodeid == test or item.nodeid.startswith((f"{test}/", f"{test}::", f"{test}[")) for test in proof.tests)
    return within and (not proof.words or Expression.compile(proof.words).evaluate(KeywordMatcher.from_item(item)))


def test_every_long_test_is_in_one_proof_and_every_proof_has_some(request: pytest.FixtureRequest) -> None:
    """Of the tests of this session; in the suite these are all that there are."""
    items = request.session.items
    proofs = {
        item.nodeid: [proof.name for proof in PROOFS.values() if chooses(proof, item)]
        for item in items
        if item.get_closest_marker("long") or "long" in getattr(item, "fixturenames", ())
    }
    assert {item: names for item, names in proofs.items() if len(names) != 1} == {}
    if {item.path for item in items} >= set((ROOT / "tests").rglob("test_*.py")):
        assert {name for names in proofs.values() for name in names} == {proof.name for proof in PROOFS.values() if proof.tests}


def test_a_part_takes_25_minutes_at_most_and_a_dozen_landings_run_them_all() -> None:
    assert len(PARTS) <= 12 and len(PROOFS) == sum(len(part) for part in PARTS)
    assert all(0 < sum(proof.seconds for proof in part) + long_proofs.END_S <= 60 * long_proofs.MINUTES for part in PARTS)


def test_the_table_has_the_proofs_that_there_are() -> None:
    page = PAGE.read_text()
    assert long_proofs.written(page, long_proofs.turn(page), {}) == page, "python -m tools.long_proofs --write"


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One whose page says that part 1 is due, and that its proofs never ran."""
    page = tmp_path / "tests" / "proofs.md"
    page.parent.mkdir()
    monkeypatch.setattr(long_proofs, "ROOT", tmp_path)
    monkeypatch.setattr(long_proofs, "PAGE", page)
    page.write_text(long_proofs.written(f"# Proofs\n{long_proofs.BEGIN}{long_proofs.END}\nThe end.\n", 1, {}))
    git(tmp_path, "init", "--quiet")
    commit(tmp_path)
    return page


def git(place: Path, *command: str) -> None:
    subprocess.run(["git", "-c", "user.name=n", "-c", "user.email=e", *command], cwd=place, check=True)


def commit(place: Path, times: int = 1) -> None:
    git(place, "add", ".")
    for _ in range(times):
        git(place, "commit", "--quiet", "--allow-empty", "--message", "m")


def test_a_dozen_landings_that_turn_run_every_part(repository: Path) -> None:
    chosen = list[int]()
    for _ in range(12):
        commit(repository.parents[1], 2)
        chosen.append(long_proofs.due(repository.read_text()))
        assert long_proofs.main(["--turn"]) == 0
        commit(repository.parents[1])
    assert set(chosen) == set(range(1, len(PARTS) + 1)) and repository.read_text().endswith("The end.\n")


def test_a_page_that_nobody_turns_is_turned_by_the_commits(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_proofs, "COMMITS", 3)
    chosen = list[int]()
    for _ in range(9):
        chosen.append(long_proofs.due(repository.read_text()))
        commit(repository.parents[1])
    assert chosen == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    (repository.parents[1] / ".git").rename(repository.parents[1] / "no_git")
    assert long_proofs.due(repository.read_text()) == 1


@dataclass(frozen=True)
class Script(Proof):
    """A proof that is a few lines of Python."""

    code: str = ""

    def command(self, scratch: Path) -> list[str]:
        return [sys.executable, "-c", self.code]


PASSES = Script("passes", 0, ("a test",), code="print('7 passed in 1 s')")
FAILS = Script("fails", 0, ("a test",), code="print('1 failed, 6 passed in 1 s'); raise SystemExit(1)")
SKIPS = Script("skips", 0, ("a test",), code="print('7 skipped in 1 s')")
HANGS = Script("hangs", 0, ("a test",), code="import time; print('...', flush=True); time.sleep(600)")
DEAF = Script("deaf", 0, ("a test",), code=f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); {HANGS.code}")


@pytest.fixture(autouse=True)
def own_scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a proof that fails leaves goes with the test's own folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def verdicts(proofs: Sequence[Proof], minutes: float | None = None) -> dict[str, str]:
    return {name: result.verdict for name, result in run_all(proofs, minutes).items()}


def test_a_proof_that_fails_is_told_and_the_others_run(capfd: pytest.CaptureFixture[str]) -> None:
    assert verdicts([FAILS, SKIPS, PASSES]) == {"fails": "failed", "skips": "skipped", "passes": "passed"}
    out = capfd.readouterr().out
    assert "\n    1 failed, 6 passed in 1 s\n" in out and re.search(r"^passes: passed after \d+ s: 7 passed in 1 s$", out, re.MULTILINE)


def test_a_proof_that_hangs_is_interrupted_and_if_it_goes_on_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_proofs, "END_S", 1)
    monkeypatch.setattr(long_proofs, "SLACK_S", 1)
    assert verdicts([HANGS, DEAF]) == {"hangs": "killed", "deaf": "killed"}


def test_a_proof_is_begun_where_the_time_left_holds_it_and_killed_where_it_takes_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_proofs, "END_S", 1)
    assert verdicts([PASSES, replace(PASSES, name="a minute", seconds=60)], minutes=1) == {"passes": "passed", "a minute": "skipped"}
    assert verdicts([HANGS], minutes=2 / 60) == {"hangs": "killed"}


@pytest.mark.parametrize("proof", [PASSES, FAILS])
def test_the_last_line_counts_and_a_row_is_written(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], proof: Proof
) -> None:
    monkeypatch.setattr(long_proofs, "PARTS", ((PASSES, FAILS), (SKIPS,)))
    monkeypatch.setattr(long_proofs, "PROOFS", {one.name: one for one in (PASSES, FAILS, SKIPS)})
    status, verdict, counts = (0, "passed", "1 passed, 0 failed") if proof == PASSES else (1, "failed", "0 passed, 1 failed")
    assert long_proofs.main([proof.name, "skips", "--write"]) == status
    assert capsys.readouterr().out.endswith(f"\n{counts}, 1 skipped\n")
    rows = set(long_proofs.ROW.findall(repository.read_text()))
    [row] = [row for name, row in rows if name == proof.name]
    assert re.match(rf"{verdict} \| \d+ \| ", row) and {row for name, row in rows if name != proof.name} == {"- | - | - | -"}
    assert long_proofs.main(["--landing"]) == 1 and set(long_proofs.ROW.findall(repository.read_text())) == rows


@pytest.mark.parametrize("arguments", [[], ["--all", "--part", "1"], ["nonsense"], ["--part", "0"], ["--landing", "chaos"]])
def test_what_is_asked_for_is_one_thing_that_there_is(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        long_proofs.main(arguments)
    assert ended.value.code == 2 and "long_proofs" not in capsys.readouterr().out

"""Where a run and whoever cleans up after it are killed together, the next start ends and removes what they left, and nothing else."""

import os
import resource
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from megarl.errors import ConfigError
from megarl.host import reaper, scratch
from megarl.host.reaper import QUIET_S, end, members
from megarl.host.scratch import OWNER, PREFIX, Scratch, sweep

ROOT = Path(__file__).resolve().parents[2]

# Owns a directory, and starts: an agent, which writes a log there; one who only reads the log; with "keeper", one who holds the lock too.
OWNS = """
    import subprocess, sys
    from megarl.host.scratch import Scratch

    def start(program, **more):
        return subprocess.Popen([sys.executable, "-I", "-S", "-c", program], **more).pid

    scratch = Scratch(sys.argv[1])
    wait = "import time; time.sleep(600)"
    (scratch.path / "r").mkdir()
    with open(scratch.path / "r" / "log", "w") as log:
        agent = start(wait, stderr=log)
    with open(scratch.path / "r" / "log") as log:
        reader = start(wait, stdin=log)
    keeper = start(wait, pass_fds=[scratch.lock]) if sys.argv[2] == "keeper" else 0
    print(scratch.path, agent, reader, keeper, flush=True)
    sys.stdin.read()
"""


@dataclass(frozen=True)
class Owner:
    process: subprocess.Popen[str]
    path: Path
    agent: int
    reader: int
    keeper: int

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The temporary directory of this process and of what it starts."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(scratch, "SHORT", str(tmp_path))  # where others may have left something
    return tmp_path


Start = Callable[..., Owner]


@pytest.fixture
def start(place: Path) -> Iterator[Start]:
    with ExitStack() as ending:

        def started(kind: str = "", keeper: str = "", below: Path = place) -> Owner:
            process = subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(OWNS), kind, keeper],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env={**os.environ, "TMPDIR": str(below), "PYTHONPATH": str(ROOT)},
            )
            ending.callback(process.communicate)
            ending.callback(process.kill)
            assert process.stdout is not None
            path, *pids = process.stdout.readline().split()
            for pid in filter(None, map(int, pids)):
                ending.callback(lambda pid: os.kill(pid, signal.SIGKILL) if alive(pid) else None, pid)
            return Owner(process, Path(path), *map(int, pids))

        yield started


@pytest.mark.parametrize("kind", ["", "sandbox-"])
def test_what_a_killed_run_left_is_ended_and_removed(start: Start, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    owner = start(kind)
    sweep()
    assert alive(owner.agent) and (owner.path / "r" / "log").exists(), "a living run's"
    owner.kill()
    assert alive(owner.agent) and owner.path.exists()
    sweep()
    assert not alive(owner.agent) and not owner.path.exists()
    assert alive(owner.reader), "who looks at a log is no process of the run"
    assert capsys.readouterr().err == f"megarl: cleaned up after a killed run: removed {owner.path}, ended 1 processes\n"
    sweep()
    assert capsys.readouterr().err == ""


def test_a_reaper_that_is_at_work_is_left_to_it(start: Start) -> None:
    owner = start(keeper="keeper")
    owner.kill()
    sweep()
    assert alive(owner.agent) and owner.path.exists()
    os.kill(owner.keeper, signal.SIGKILL)
    wait_for(lambda: not alive(owner.keeper))
    sweep()
    assert not alive(owner.agent) and not owner.path.exists()


def test_a_closed_session_is_waited_for_only_if_something_of_it_is_left(start: Start) -> None:
    owner = start()

    def seconds(over: bool) -> float:
        begun = time.monotonic()
        end(set(), str(owner.path), over=over)
        return time.monotonic() - begun

    spared = {owner.process.pid}  # holds the lock
    assert end(spared, str(owner.path), over=True) == 1 and not alive(owner.agent)
    owner.kill()
    assert seconds(over=True) < QUIET_S <= seconds(over=False)


def test_a_living_run_inside_a_killed_one_is_not_touched(start: Start) -> None:
    outer = start()
    inner = start(below=outer.path)
    outer.kill()
    sweep()
    assert alive(inner.agent) and alive(outer.agent) and inner.path.exists()
    inner.kill()
    sweep()
    assert not alive(inner.agent) and not alive(outer.agent) and not outer.path.exists()


def nested(path: Path) -> None:
    """Directories in one another, more than Python's own walks get to."""
    here = os.open(path, os.O_RDONLY)
    for _ in range(1_500):
        os.mkdir("d", dir_fd=here)
        inner = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)


def test_directories_nested_by_the_thousand_are_removed(place: Path, start: Start) -> None:
    nested((scratch := Scratch("sandbox-")).path)
    scratch.remove()
    assert not list(place.iterdir())
    (owner := start()).kill()
    nested(owner.path / "r")
    sweep()
    assert not alive(owner.agent) and not owner.path.exists()
    (session := place / "session").mkdir()
    nested(session)
    subprocess.run([sys.executable, "-I", "-S", reaper.__file__, str(session)], input=reaper.OVER, check=True)
    assert not session.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="another user is needed, who cannot read everything")
def test_directories_that_a_program_has_closed_are_removed() -> None:
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o777)
        session = Path(place, "session")
        subprocess.run(["sh", "-c", 'mkdir -p "$1/a/b" && chmod 0 "$1/a"', "sh", session], user=65534, check=True)
        script = Path(place, "reaper.py")  # where that user can read it
        script.write_bytes(Path(reaper.__file__).read_bytes())
        subprocess.run(["python3", "-I", "-S", script, session], input=reaper.OVER, user=65534, check=True)
        assert not session.exists()


def another_boot(path: Path) -> None:
    (path / OWNER).write_text("another machine's")


def by_a_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def owner_by_a_link(path: Path) -> None:
    (path / OWNER).rename(path / "real")
    (path / OWNER).symlink_to(path / "real")


def owner_is_a_pipe(path: Path) -> None:
    (path / OWNER).unlink()
    os.mkfifo(path / OWNER)


def another_user(path: Path) -> None:
    if os.geteuid():
        pytest.skip("only root can give a directory away")
    os.chown(path, 65534, 65534)


UNKNOWN: dict[str, Callable[[Path], object]] = {
    "no owner": lambda path: (path / OWNER).unlink(),
    "another name": lambda path: path.rename(path.with_name("somebody-elses")),
    "another machine or boot": another_boot,
    "a link": by_a_link,
    "an owner that is a link": owner_by_a_link,
    "an owner that is a pipe": owner_is_a_pipe,
    "another user": another_user,
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_belongs_to_nobody_knows_whom_is_not_touched(place: Path, start: Start, name: str) -> None:
    owner = start()
    owner.kill()
    UNKNOWN[name](owner.path)
    sweep()
    [left] = {path.resolve() for path in place.iterdir()}
    assert alive(owner.agent) and (left / "r" / "log").exists()


def test_a_directory_is_private_and_goes_with_its_owner(place: Path) -> None:
    scratch = Scratch()
    assert scratch.path.parent == place and scratch.path.name.startswith(PREFIX) and scratch.path.stat().st_mode & 0o777 == 0o700
    assert members(str(place)) == [], "this process is not its own"
    scratch.remove()
    scratch.remove()
    assert list(place.iterdir()) == []


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_temporary_directory_that_cannot_be_used_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python would take another one silently."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "missing"))
    for use in (Scratch, sweep):
        with pytest.raises(ConfigError, match=rf"^TMPDIR: cannot \w+( to)? {tmp_path}/missing: No such file or directory$"):
            use()
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # writes fail, as on a full disk
    try:
        with pytest.raises(ConfigError) as refused:
            Scratch()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(refused.value) == f"TMPDIR: cannot write to {tmp_path}: File too large"
    assert list(tmp_path.iterdir()) == []

"""What the processes of a run print is kept in its directory: whoever writes it, however they end, and no more than fits."""

import subprocess
import sys
from pathlib import Path

from megarl.observe.output import LOGS

ROOT = Path(__file__).parents[3]
HEAD = """
import ctypes, os, resource, subprocess, sys, time, warnings
from pathlib import Path
from megarl.observe import output
run = Path(sys.argv[1])
"""


def printed(run: Path, code: str, status: int = 0) -> tuple[str, str]:
    """What a process that runs the code leaves on its own stdout and stderr."""
    done = subprocess.run([sys.executable, "-c", HEAD + code, str(run)], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == status, done.stderr
    return done.stdout, done.stderr


CRASHES = """
print("before")
output.keep_output(run, "rank 0")
print("printed")
os.write(2, b"of a library\\n")
subprocess.run(["echo", "of a child"])
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of a fork beside threads
if not os.fork():
    print("of a fork", file=sys.stderr)
    os._exit(0)
os.wait()
1 / 0
"""


def test_all_that_a_process_and_its_children_write_is_kept_however_it_ends(tmp_path: Path) -> None:
    (tmp_path / LOGS).mkdir()
    assert printed(tmp_path, CRASHES, status=1) == ("before\n", "")
    lines = (tmp_path / LOGS / "rank-0.log").read_text().splitlines()
    assert lines[0].startswith("rank 0: process ") and lines[1:5] == ["printed", "of a library", "of a child", "of a fork"]
    assert lines[5] == "Traceback (most recent call last):" and lines[-1] == "ZeroDivisionError: division by zero"

    assert printed(tmp_path, 'output.keep_output(run, "rank 0"); ctypes.string_at(0)', status=-11) == ("", "")
    assert sorted(path.name for path in (tmp_path / LOGS).iterdir()) == ["rank-0.2.log", "rank-0.log"], "the one in its place"


def test_a_process_without_a_log_file_prints_to_the_console(tmp_path: Path) -> None:
    assert printed(tmp_path / "nowhere", 'output.keep_output(run, "rank 0"); print("here")') == ("here\n", "")
    assert list(tmp_path.iterdir()) == []


FULL = """
output.keep_output(run, "engine 0")
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))  # writes fail, as on a full disk
print("x" * 2000)
print("y" * 2000, file=sys.stderr, flush=True)
Path(sys.argv[1], "alive").touch()
"""


def test_a_full_disk_loses_only_log_output(tmp_path: Path) -> None:
    (tmp_path / LOGS).mkdir()
    assert printed(tmp_path, FULL) == ("", "")
    assert (tmp_path / "alive").exists()
    assert (tmp_path / LOGS / "engine-0.log").stat().st_size == 1000


LONG = """
output.MAX_BYTES, output.LOOK_S = 1000, 0.01
output.keep_output(run, "engine 0")
with subprocess.Popen([sys.executable, "-uc", "while input(): print('c' * 99)"], stdin=subprocess.PIPE) as child:
    kept, old = run / "logs/engine-0.log", run / "logs/engine-0.old"
    while not (old.exists() and old.stat().st_size > 1000 and kept.stat().st_size < 1000):
        child.stdin.write(b"more\\n"); child.stdin.flush()
        time.sleep(0.005)
    child.stdin.write(b"\\n"); child.stdin.flush()
"""


def test_a_log_is_bounded_whoever_writes_it(tmp_path: Path) -> None:
    (tmp_path / LOGS).mkdir()
    assert printed(tmp_path, LONG) == ("", "")
    kept, old = ((tmp_path / LOGS / f"engine-0.{end}").read_text().splitlines() for end in ("log", "old"))
    assert set(kept) <= {"c" * 99}, "it begins anew, without a hole"
    assert set(old[1:]) == {"c" * 99}

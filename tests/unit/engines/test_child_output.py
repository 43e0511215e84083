"""The fault of a child process is heard by its parent, through what vLLM puts around it."""

import subprocess
import sys
from pathlib import Path

from megarl.engines.child_output import first_fault

LOG = """\
(EngineCore pid=41) \x1b[1;36mINFO 11-22 20:39:49 [core.py:97] Initializing
(EngineCore pid=41) ERROR 11-22 20:39:50 [core.py:1100] EngineCore failed to start.
(EngineCore pid=41) ERROR 11-22 20:39:50 [core.py:1100] Traceback (most recent call last):
(EngineCore pid=41) ERROR 11-22 20:39:50 [core.py:1100]   File "/site/vllm/v1/engine/core.py", line 1090, in run_engine_core
(EngineCore pid=41) ERROR 11-22 20:39:50 [core.py:1100]     engine = EngineCoreProc()
(EngineCore pid=41) ERROR 11-22 20:39:50 [core.py:1100]              ^^^^^^^^^^^^^^^^
(EngineCore pid=41) ERROR 11-22 20:39:50 [core.py:1100]   File "/site/vllm/attention/cpu.py", line 7, in select
(EngineCore pid=41) ERROR 11-22 20:39:50 [core.py:1100]     raise ValueError("head_dim 16")
(EngineCore pid=41) ERROR 11-22 20:39:50 [core.py:1100] ValueError: head_dim 16 is not supported
(EngineCore pid=41) Traceback (most recent call last):
(EngineCore pid=41)   File "/site/later.py", line 1, in later
(EngineCore pid=41) RuntimeError: Engine core initialization failed. See root cause above.
"""
PARENT = """
import subprocess, sys
from megarl.engines.child_output import overheard
print("Traceback (most recent call last):\\nKeyError: before", file=sys.stderr, flush=True)
with overheard() as said:
    assert said() is None
    subprocess.run([sys.executable, "-c", "def f():\\n    raise OSError('no room')\\nf()"])
    print(said(), flush=True)
"""


def test_the_first_fault_of_a_log_is_the_cause() -> None:
    assert first_fault(LOG) == "ValueError: head_dim 16 is not supported (cpu.py:7, in select)"
    assert first_fault("all is well\nValueError: in a sentence\n") is None
    assert first_fault("Traceback (most recent call last):\nKeyboardInterrupt\n") == "KeyboardInterrupt"


def test_a_parent_hears_its_child_where_both_write_into_files(tmp_path: Path) -> None:
    out, err = tmp_path / "out", tmp_path / "err"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        subprocess.run([sys.executable, "-c", PARENT], stdout=stdout, stderr=stderr, check=True, cwd=Path(__file__).parents[3])
    assert out.read_text() == "OSError: no room (<string>:2, in f)\n"
    piped = subprocess.run([sys.executable, "-c", PARENT], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3])
    assert piped.stdout == "None\n"

"""A run on a machine whose wall clock jumps by hours and days, in every process, is the run on one whose clock does not.

What of it can be shown in no time: tests/unit/test_clock.py.
"""

import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from tests.e2e.comparing import assert_same
from tests.e2e.job import EVERYTHING, Job

HOURS = {0: 6, 2: -12, 4: 72, 6: 0}  # from which step on the clock is off by how many
HOUR_S = 3600


@pytest.mark.long
def test_a_clock_that_jumps_changes_nothing(tmp_path: Path, tiny_model: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    source, library, offset = Path(__file__).with_name("jumping_clock.c"), tmp_path / "jumping_clock.so", tmp_path / "offset"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    offset.write_bytes(struct.pack("q", 0))
    settings = (*EVERYTHING, "cluster.stall_timeout_s=60", "cluster.restarts=0")
    job = Job(tmp_path / "jumping", tiny_model, settings, environment={"LD_PRELOAD": str(library), "JUMP_FILE": str(offset)}).start()
    try:
        for step, hours in HOURS.items():
            job.wait_for(f"step {step}", lambda: len(job.updates()) >= step and "model ranks" in job.text())  # noqa: B023
            with offset.open("r+b") as file:
                file.write(struct.pack("q", hours * HOUR_S))
        assert job.finish() == 0 and job.gone(), job.text()[-3000:]
    finally:
        job.kill()
    assert all(0 < row["perf/time_per_step"] < HOUR_S for row in job.rows() if "perf/time_per_step" in row)
    assert_same(job, Job(tmp_path / "straight", tiny_model, settings).run(), "model", "critic")

"""A run whose checkpoints are on a disk that hangs, where not even SIGKILL ends a write, goes on or ends, as `save.on_failure` says."""

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.job import SFT, Job
from tools.faulty_disk import FaultyDisk, missing, mount_for_this_process_alone

LIMIT_S = 10  # of a save
SETTINGS = ("sft.steps=1000", "sft.eval_every=0", "save.every=20", f"save.timeout_s={LIMIT_S}", "cluster.restarts=0")

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@contextmanager
def saving_to_a_disk_of_its_own(job: Job) -> Iterator[FaultyDisk]:
    """From its second checkpoint on, a running job saves to a disk that nothing else is on."""
    mount_for_this_process_alone()
    disk = FaultyDisk(job.runs / "disk")
    try:
        job.start()
        job.wait_for("checkpoint", lambda: (job.saves / "latest").exists(), 0.05)
        job.wait_for("steps after it", lambda: job.rows()[-1]["step"] >= 30, 0.05)  # by which older checkpoints have been removed
        job.saves.rename(job.saves.with_name("before"))  # between two saves
        job.saves.symlink_to(job.runs / "disk")
        job.wait_for("checkpoint on the disk", lambda: (job.saves / "latest").exists())
        yield disk
    finally:
        disk.thaw()
        job.kill()
        disk.close()


@pytest.mark.long
def test_a_run_goes_on_without_checkpoints_while_the_disk_hangs_and_saves_again_when_it_does_not(tmp_path: Path, tiny_model: Path) -> None:
    job = Job(tmp_path, tiny_model, (*SETTINGS, "save.on_failure=continue"), verb="sft", template=SFT)
    with saving_to_a_disk_of_its_own(job) as disk:
        disk.freeze()
        job.wait_for("failed saves", lambda: sum("events/save_failed" in row for row in job.rows()) >= 2)
        saved = (job.saves / "latest").read_text()
        late, again = [line for line in job.text().splitlines() if "warning: checkpoint: step " in line][:2]
        assert late.endswith(f"not written within save.timeout_s={LIMIT_S}") and "/step_" in late
        assert again.endswith("the write of an earlier save has not returned yet")
        disk.thaw()
        job.wait_for("another checkpoint", lambda: (job.saves / "latest").read_text() != saved)
        os.kill(job.process.pid, signal.SIGTERM)
        assert job.finish(120) == 143 and re.search(r"stopped by SIGTERM: saved at step \d+", job.text()) and job.gone()


@pytest.mark.long
def test_a_run_that_is_to_stop_does_so_in_time_though_the_disk_hangs(tmp_path: Path, tiny_model: Path) -> None:
    job = Job(tmp_path, tiny_model, (*SETTINGS, "save.on_failure=stop"), verb="sft", template=SFT)
    with saving_to_a_disk_of_its_own(job) as disk:
        disk.freeze()
        begun = time.monotonic()
        assert job.finish(120) == 1 and time.monotonic() - begun < 60
        told = rf"^megarl: failed: SaveError: checkpoint: step \d+ was not saved: .*not written within save\.timeout_s={LIMIT_S}$"
        assert re.search(told, job.text(), re.MULTILINE), job.text()[-3000:]
        disk.thaw()
        assert job.gone()

"""A conversion that dies, or has no room, goes on where it was; several processes share one."""

import errno
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import combinations
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from megarl.cli import main
from megarl.convert import conversion_directory, engine, plan, to_megatron
from megarl.convert.conversion_directory import ConversionDirectory
from megarl.convert.step_source import StepSource
from megarl.convert.to_hf import ToHF
from megarl.errors import ConfigError
from tests.unit.convert.converting import WEIGHTS, convert, refused, stored


def begun(before: Callable[[], None], direction: str, source: Path, out: Path) -> BaseProcess:
    """A conversion in many small units, in a process of its own; `before` runs there first."""

    def work() -> None:
        plan._MIN = plan._MAX = 1 << 19
        before()
        os._exit(main(["convert", direction, str(source), str(out), "--workers", "1"]))

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    return process


def dying() -> None:
    """Dies by SIGKILL at its thirtieth parameter, with some units done."""
    take, taken = engine.Control.parameter, list[Any]()

    def parameter(self: Any, item: plan.PlannedParameter) -> Any:
        taken.append(item)
        if len(taken) == 30:
            os.kill(os.getpid(), signal.SIGKILL)
        return take(self, item)

    engine.Control.parameter = parameter  # type: ignore[method-assign]


def slow(meeting: Path) -> None:
    """Begins when two of its kind are there, takes its time, and says which parameters it took."""
    take, deadline = engine.Control.parameter, time.monotonic() + 90
    (meeting / f"{os.getpid()}.ready").touch()
    while len(list(meeting.glob("*.ready"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)

    def parameter(self: Any, item: plan.PlannedParameter) -> Any:
        time.sleep(0.03)
        with (meeting / f"{os.getpid()}.took").open("a") as file:
            print(item.weight.name, file=file)
        return take(self, item)

    engine.Control.parameter = parameter  # type: ignore[method-assign]


def test_as_many_files_of_other_sizes_are_another_conversion(models: dict[str, Path], tmp_path: Path) -> None:
    convert("hf-to-megatron", models["qwen3_moe"], tmp_path / "steps")
    found: dict[int, list[tuple[dict[str, bytes], dict[str, Any]]]] = {}
    for kilobytes in range(64, 1024, 32):
        step = tmp_path / "steps" / "step_000000"
        one = ToHF(StepSource(step, None, None), tmp_path / "out", dtype=None, shard_bytes=kilobytes << 10)
        found.setdefault(len(one._headers), []).append((one._headers, one.plan()))
    pairs = [pair for same in found.values() for pair in combinations(same, 2)]
    assert any(one != two for (one, _), (two, _) in pairs), "some sizes give as many files, with other borders"
    for (headers, mine), (others, other) in pairs:
        assert (headers == others) == (mine == other)


@pytest.mark.parametrize("direction", ["hf-to-megatron", "megatron-to-hf"])
def test_a_killed_conversion_goes_on_where_it_was(
    models: dict[str, Path], direction: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = models["qwen3_moe"], tmp_path / "out"
    if direction == "megatron-to-hf":
        convert("hf-to-megatron", source, tmp_path / "steps")
        source = tmp_path / "steps"
    killed = begun(dying, direction, source, out)
    killed.join(600)
    assert killed.exitcode == -signal.SIGKILL
    journal = next(path for path in [tmp_path / ".out.journal", out / ".step_000000.journal"] if path.exists())
    done = sorted(path.stem for path in journal.glob("0*.json"))
    assert done and not (out / "step_000000").exists()
    monkeypatch.setattr(plan, "_MIN", 1 << 19)
    monkeypatch.setattr(plan, "_MAX", 1 << 19)
    assert 'started with other settings (options.dtype: null then, "bfloat16" now)' in refused(
        capsys, direction, source, out, "--dtype", "bfloat16"
    )
    damaged = (
        tmp_path / ".out.partial" / WEIGHTS if direction == "megatron-to-hf" else out / "step_000000.partial" / "policy" / "__0_0.distcp"
    )
    with damaged.open("r+b") as file:  # a unit that was done
        file.seek(damaged.stat().st_size // 3)
        file.write(b"?")
    from megarl.convert.to_hf import ToHF
    from megarl.convert.to_megatron import ToMegatron

    redone: list[int] = []
    kind: Any = ToHF if direction == "megatron-to-hf" else ToMegatron
    work = kind.convert

    def watched(self: Any, unit: plan.Unit, control: Any) -> Any:
        redone.append(unit.index)
        return work(self, unit, control)

    monkeypatch.setattr(kind, "convert", watched)
    convert(direction, source, out)
    assert len({int(name) for name in done} & set(redone)) == 1, "of what was done, the damaged unit alone"
    if direction == "hf-to-megatron":
        monkeypatch.undo()
        convert("megatron-to-hf", out, tmp_path / "back")
    assert stored(tmp_path / "back" if direction == "hf-to-megatron" else out) == stored(models["qwen3_moe"])


def test_a_conversion_that_fails_at_its_last_file_goes_on(
    models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it has written after the last unit is written again."""

    def full(_: object) -> bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(to_megatron, "encode", full)
        assert "No space left on device" in refused(capsys, "hf-to-megatron", models["qwen3_moe"], tmp_path / "steps")
    convert("hf-to-megatron", models["qwen3_moe"], tmp_path / "steps")


def test_processes_share_one_conversion(models: dict[str, Path], tmp_path: Path) -> None:
    children = [begun(partial(slow, tmp_path), "hf-to-megatron", models["qwen3_moe"], tmp_path / "out") for _ in range(2)]
    for child in children:
        child.join(600)
    assert sorted([child.exitcode for child in children], key=str) in ([0, 0], [0, 1])
    shares = [file.read_text().splitlines() for file in tmp_path.glob("*.took")]
    items, _ = plan.planned(models["qwen3_moe"], None, None, 1, 1)
    assert len(shares) == 2 and sorted(shares[0] + shares[1]) == sorted(item.weight.name for item in items)
    convert("megatron-to-hf", tmp_path / "out", tmp_path / "back")
    assert stored(tmp_path / "back") == stored(models["qwen3_moe"])


def test_a_process_that_begins_as_another_one_finishes_begins_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, link = ConversionDirectory(tmp_path / "out", tmp_path / "out.partial", tmp_path / "out.journal"), os.link

    def finished(one: Path, other: Path) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "weights").touch()
        link(one, other)

    monkeypatch.setattr(os, "link", finished)
    with pytest.raises(ConfigError, match="out already exists: not overwritten$"):
        directory.begin({"source": "x"})
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_process_that_never_finishes_the_directory_is_not_waited_for_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = ConversionDirectory(tmp_path / "out", tmp_path / "out.partial", tmp_path / "out.journal")
    directory.begin({"source": "x"})
    holds = "import fcntl, sys, time; file = open(sys.argv[1], 'w'); fcntl.flock(file, fcntl.LOCK_EX); print(flush=True); time.sleep(60)"
    other = subprocess.Popen([sys.executable, "-c", holds, str(tmp_path / "out.journal" / "commit")], stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None and other.stdout.readline() == b"\n"
        monkeypatch.setattr(conversion_directory, "COMMIT_S", 0.5)
        with pytest.raises(ConfigError, match=r"/commit: another process has been completing .*/out for 0\.5 s$"):
            directory.finish(lambda: None)
    finally:
        other.kill()
        other.wait(20)


@pytest.mark.parametrize("direction", ["hf-to-megatron", "megatron-to-hf"])
def test_a_full_disk_is_one_line_and_the_same_command_goes_on(
    models: dict[str, Path], direction: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "_MIN", 1 << 19)
    source = models["qwen3_moe"]
    if direction == "megatron-to-hf":
        convert("hf-to-megatron", source, tmp_path / "steps")
        source = tmp_path / "steps"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))  # writes beyond it fail, as on a full disk
    try:
        line = refused(capsys, direction, source, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "File too large; the same command continues from here" in line
    convert(direction, source, tmp_path / "out")

"""Every input of the table: one line with the key and the numbers, status 2, nothing started, soon and in little memory."""

import json
import os
import re
import resource
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from megarl.cli import command as cli
from megarl.data import gym
from megarl.errors import ConfigError
from megarl.host.termination import SIGNALS
from megarl.observe.console import Screen
from megarl.observe.writers import read_json_lines
from tests.unit.bad_input import bases, configurations, data, directories, environments, models, runs
from tests.unit.bad_input.cases import VERBS, Case, Make, Room, given, refusals

TABLE = refusals(Path(__file__).with_name("refusals.txt"))
TABLE += [case for table in (configurations, models, bases, data, directories, environments, runs) for case in table.TABLE]
ALARM_S, CPU_S, MEMORY_MB = 120, 10.0, 512
ITEM_S = gym.ITEM_S


@pytest.fixture(autouse=True)
def bounded(monkeypatch: pytest.MonkeyPatch, long: bool) -> Iterator[None]:
    """Gives the signals back their meaning, and ends what hangs. Without --long an item of a data set has less time than users give it."""
    if not long:
        monkeypatch.setattr(gym, "ITEM_S", 1.5)
    before = {number: signal.getsignal(number) for number in (*SIGNALS, signal.SIGALRM)}

    def late(number: int, frame: object) -> None:
        raise AssertionError(f"not done after {ALARM_S} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(ALARM_S)
    yield
    signal.alarm(0)
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("case", TABLE, ids=lambda case: case.name)
def test_is_refused(case: Case, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    room = Room(tmp_path, tiny_model, case.verb)
    arguments = case.make(room)
    before, peak = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    status = cli.main([case.verb, *arguments, *(["--check"] if case.verb in VERBS else [])])
    seconds, grown = time.process_time() - before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    shown = capsys.readouterr().err
    assert status == 2, shown
    lines = [line.removeprefix("megarl: error: ") for line in shown.splitlines()]
    assert "Traceback" not in shown and all(len(line) < 2000 for line in lines)
    assert re.search(case.line, lines[-1]), shown
    assert len(lines) == 1 or "further errors" in lines[-1], shown
    assert seconds < CPU_S and grown < MEMORY_MB << 10, f"{seconds:.1f} s, {grown >> 10} MB"


def test_what_is_drawn_from_a_data_set_is_ended_within_the_bound() -> None:
    assert ITEM_S < CPU_S


def test_the_names_differ() -> None:
    names = [case.name for case in TABLE]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("verb", ["train", "value", "sft", "pairs", "eval"])
def test_what_the_table_starts_from_passes(verb: str, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["algorithm.type=vapo", "critic={pretrain_steps: 1}"] if verb == "value" else []
    assert cli.main([verb, str(Room(tmp_path, tiny_model, verb).config()), *more, "--check"]) == 0, capsys.readouterr().err


def test_a_base_that_says_the_same_otherwise_passes(tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the words of transformers before 5, and without generation defaults."""

    def older(copy: Path) -> None:
        said = json.loads((copy / "config.json").read_text())
        rope = said.pop("rope_parameters")
        (copy / "config.json").write_text(json.dumps({**said, "rope_theta": rope["rope_theta"], "rope_scaling": None}))
        (copy / "generation_config.json").unlink()

    assert cli.main(["train", *bases.base(older)(Room(tmp_path, tiny_model, "train")), "--check"]) == 0, capsys.readouterr().err


def test_a_closed_stdout_is_no_failure(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`megarl ... | head`: the status says all. A run whose screen is gone goes on."""
    arguments = ["train", str(Room(tmp_path, tiny_model, "train").config()), "--check"]
    checked, listed = partial(cli.main, arguments), partial(cli.main, ["config", "train"])
    for call, status in ((checked, 0), (listed, 0), (lambda: Screen(file=sys.stdout).print("step 1"), None)):
        read, write = os.pipe()
        os.close(read)
        with os.fdopen(write, "w") as closed, monkeypatch.context() as here:
            here.setattr(sys, "stdout", closed)
            assert call() == status
    assert capsys.readouterr().err == ""


def test_a_full_disk_behind_stdout_is_one_line(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (["config", "train"], ["plan", str(Room(tmp_path, tiny_model, "train").config()), "rollout.kv_cache_mb=null"]):
        with open("/dev/full", "w") as full, monkeypatch.context() as here:
            here.setattr(sys, "stdout", full)
            assert cli.main(arguments) == 1
        assert capsys.readouterr().err == "megarl: failed: Stopped: stdout: No space left on device\n"


@pytest.mark.parametrize(
    ("verb", "name", "make"),
    [
        ("init", "rows.jsonl", runs.own("--cpu")),
        ("generate", "rows.jsonl", runs.asked),
        ("samples", "step_1.jsonl", runs.of(runs.run("none"))),
        ("compare", "metrics.jsonl", runs.of(runs.run("none"))),
        ("plan", "config.json", given()),
        ("train", "config.json", given()),
        ("train", "config.json", given("--check")),
    ],
)
def test_what_may_not_be_read_is_one_line(
    verb: str,
    name: str,
    make: Make,
    tmp_path: Path,
    tiny_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As it is for a user who is not root, who reads all."""
    arguments = make(Room(tmp_path, tiny_model, "train"))
    opened, looked = Path.open, Path.stat

    def allowed(path: Path) -> Path:
        if path.name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return path

    monkeypatch.setattr(Path, "open", lambda path, *how, **more: opened(allowed(path), *how, **more))
    if name == "config.json":  # in a directory that may not be looked into
        monkeypatch.setattr(Path, "stat", lambda path, **more: looked(allowed(path), **more))
    assert cli.main([verb, *arguments]) == 2
    assert re.fullmatch(rf"megarl: error: .*{name}: Permission denied\n", capsys.readouterr().err)


def test_few_files_are_refused(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """ulimit -n 64"""
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (64, 64))
    assert cli.main(["train", str(Room(tmp_path, tiny_model, "train").config()), "--check"]) == 2
    line = "megarl: error: cluster: the open-file limit is 64 (ulimit -n); Ray and the engines need at least 1024\n"
    assert capsys.readouterr().err == line


def test_a_full_dev_shm_is_refused(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = shutil.disk_usage("/dev/shm")._replace(free=1 << 20)
    monkeypatch.setattr(shutil, "disk_usage", {"/dev/shm": usage}.__getitem__)
    assert cli.main(["train", str(Room(tmp_path, tiny_model, "train").config()), "--check"]) == 2
    assert capsys.readouterr().err == "megarl: error: cluster: /dev/shm has 1 MB free; Ray and the engines need at least 32\n"


@pytest.mark.parametrize("line", [b"[" * 100_000, b"3", b'{"step": [1]}', b'{"step": 1, "step": 2}', b"\xff"])
def test_a_row_of_metrics_that_nobody_wrote(line: bytes, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + line + b"\n")
    with pytest.raises(ConfigError, match=r"^/.*metrics\.jsonl:2: not a row of metrics: "):
        read_json_lines(tmp_path / "metrics.jsonl")

"""The command line as a user meets it."""

import resource
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from megarl.cli import command as cli
from megarl.errors import SaveError
from megarl.verbs import TOOLS, VERBS

EXAMPLE = """
name: cli
model: {path: nowhere/at/all}
algorithm: {type: gspo}
data:
  train: {type: reasoning_gym, dataset: spell_backward, seed: 1, items: 8}
  eval: {type: reasoning_gym, dataset: spell_backward, seed: 2, items: 8}
reward: {source: {type: reasoning_gym}}
train: {steps: 1, prompts_per_step: 8}
"""


def megarl(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    command = [sys.executable, "-m", "megarl.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def test_help_comes_at_once() -> None:
    seconds = []  # of CPU time: a busy machine makes it no more
    for _ in range(3):
        begun = resource.getrusage(resource.RUSAGE_CHILDREN)
        shown = megarl("--help")
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(ended.ru_utime + ended.ru_stime - begun.ru_utime - begun.ru_stime)
    assert shown.returncode == 0
    assert all(verb in shown.stdout for verb in ("train", "sft", "eval"))
    assert min(seconds) < 0.5


def test_the_installed_command_finds_a_reward_function_in_the_folder_where_it_is_started(tmp_path: Path, tiny_model: Path) -> None:
    (tmp_path / "words.txt").write_text("right")
    (tmp_path / "my_rewards.py").write_text("WORD = open('words.txt').read()\ndef score(response):\n    return float(response == WORD)\n")
    job = EXAMPLE.replace("nowhere/at/all", str(tiny_model)).replace("type: reasoning_gym}}", "type: function, path: 'my_rewards:score'}}")
    (tmp_path / "job.yaml").write_text(job)
    places = (
        "cluster.gpus=false",
        "sync.transport=gloo",
        "rollout.max_prompt_tokens=64",
        "rollout.max_response_tokens=64",
        "rollout.kv_cache_mb=32",
    )
    command = [str(Path(sys.executable).with_name("megarl")), "train", "job.yaml", "--check", *places]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=tmp_path)
    assert shown.returncode == 0 and shown.stdout == "megarl: job.yaml passes every check\n", shown.stderr


def test_a_check_warns_of_an_object_store_that_is_too_small(tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job.yaml").write_text(EXAMPLE.replace("nowhere/at/all", str(tiny_model)))
    lengths = (
        "rollout.max_prompt_tokens=256",
        "rollout.max_response_tokens=256",
        "rollout.kv_cache_mb=32",
        "rollout.samples_per_prompt=16384",
    )
    command = ["train", str(tmp_path / "job.yaml"), "--check", "cluster.gpus=false", "sync.transport=gloo", "routing.replay=r3", *lengths]
    assert cli.main(command) == 0
    warning, passed = capsys.readouterr().out.splitlines()
    assert warning.startswith("megarl: warning: cluster.object_store_mb=200: ") and "passes every check" in passed
    assert cli.main([*command, "cluster.object_store_mb=8000"]) == 0
    assert "warning" not in capsys.readouterr().out


@pytest.mark.parametrize("verb", [*VERBS, *TOOLS])
def test_every_verb_has_its_own_help(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([verb, "--help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0 and shown.startswith(f"usage: megarl {verb}")
    if verb in VERBS:
        assert "runs/<name>/" in shown and f"megarl config {verb}" in shown
        with pytest.raises(SystemExit) as ended:
            cli.main([verb])
        assert ended.value.code == 2
        assert capsys.readouterr().err.splitlines() == [
            f"usage: megarl {verb} CONFIG.yaml [a.b=c ...] [--check]",
            f"megarl {verb}: error: the following arguments are required: CONFIG.yaml",
        ]


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert (ended.value.code, capsys.readouterr().out) == (0, f"megarl {version('megarl')}\n")


def test_an_unknown_verb_is_refused() -> None:
    refused = megarl("trian", "x.yaml")
    assert refused.returncode == 2
    assert "megarl: error: argument VERB: invalid choice: 'trian'" in refused.stderr


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("train.stesp=3", "megarl: error: train.stesp: unknown key (did you mean 'steps'?)"),
        ("train.steps=0", "megarl: error: train.steps: Input should be greater than 0 (got 0)"),
        ("layout.ranks=3 layout.tp=2", "megarl: error: layout.ranks=3 is not divisible by tp*pp*cp=2*1*1=2"),
        ("name", "megarl: error: override 'name': expected key.subkey=value"),
    ],
)
def test_bad_input_is_refused_in_one_line(tmp_path: Path, override: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text(EXAMPLE)
    assert cli.main(["train", str(tmp_path / "config.yaml"), *override.split(), f"run_dir={tmp_path}"]) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err.splitlines()) == ("", [line])
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]  # nothing was begun


def test_every_fault_gets_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text(EXAMPLE)
    assert cli.main(["train", str(tmp_path / "config.yaml"), "train.stesp=3", "seed=-1"]) == 2
    assert [line.split(":")[2].strip() for line in capsys.readouterr().err.splitlines()] == ["seed", "train.stesp"]


@pytest.mark.parametrize("flags", [[], ["--check"]])
def test_a_missing_model_is_refused_before_anything_starts(
    tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(EXAMPLE)
    assert cli.main(["train", "config.yaml", *flags]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("megarl: error: model.path: ") and len(shown.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.parametrize(("fault", "traced"), [(SaveError("step 3: No space\nleft"), False), (KeyError("a bug"), True)])
def test_what_stops_a_run_is_one_line_and_only_an_unforeseen_fault_has_a_traceback(
    tmp_path: Path, fault: Exception, traced: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stage(_: object) -> None:
        raise fault

    (tmp_path / "config.yaml").write_text(EXAMPLE)
    monkeypatch.setattr("megarl.loops.train.train", stage)
    assert cli.main(["train", str(tmp_path / "config.yaml")]) == 1
    shown = capsys.readouterr().err
    assert shown.splitlines()[-1] == f"megarl: failed: {type(fault).__name__}: {' '.join(str(fault).split())}"
    assert ("Traceback" in shown) == traced and (traced or len(shown.splitlines()) == 1)

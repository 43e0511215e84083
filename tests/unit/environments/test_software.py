"""Software tasks: tests that the model cannot reach score its files, and whatever it does to its container costs its own episode."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from megarl.config import EnvironmentSettings
from megarl.environments.containers.container import ContainerGone
from megarl.environments.containers.local import LocalContainer
from megarl.environments.hosts import open_host
from megarl.environments.protocol import EnvironmentFailed, Turn
from megarl.environments.software.host import SoftwareHost
from megarl.environments.software.rows import BadTask, own, swe_gym, swe_smith
from tests.unit.environments.test_containers import stand_in
from tests.unit.environments.test_tools import call, said

ROW = {
    "files": {"sums.py": "def add(a, b):\n    return a - b\n", "test_sums.py": "assert True\n", "notes/secret.txt": "42"},
    "test": "python test_sums.py && python notes/more.py",
    "tests": {
        "test_sums.py": "from sums import add\nassert add(2, 3) == 5\n",
        "notes/more.py": "assert open('kept.txt').read() == 'kept\\n'\n",
    },
    "setup": "echo kept > kept.txt",
    "hidden": ["notes"],
    "kept": ["kept.txt"],
}
REPAIR = call("edit", path="sums.py", old="-", new="+")


def settings(**more: Any) -> EnvironmentSettings:
    source = {"type": "software", "test_s": 5, "setup_s": 60, **more}
    return EnvironmentSettings.model_validate({"source": source, "step_s": 5, "sandbox": {"memory_gb": 1}})


def played(turns: Sequence[str], row: dict[str, Any] = ROW, given: EnvironmentSettings | None = None, finished: bool = True) -> list[Turn]:
    async def body() -> list[Turn]:
        host = open_host(given or settings())
        assert isinstance(host, SoftwareHost)
        episode = host.open()
        try:
            answer = row.get("test", row.get("instance_id"))
            meta = {name: value for name, value in row.items() if name not in ("test", "instance_id")}
            assert await episode.reset(1, {"prompt": "", "answer": answer, "meta": meta}) == Turn(None)
            return [await episode.step(text, [], finished) for text in turns]
        finally:
            await episode.close()
            assert not host.containers
            host.close()

    return asyncio.run(body())


def bash(command: str) -> str:
    return call("bash", command=command)


def test_tests_score_the_files_and_the_tools_say_what_they_did() -> None:
    turns = played([bash("ls; cat notes/secret.txt"), "text " + bash("python test_sums.py") + REPAIR, bash("cat sums.py"), "done"])
    listed = "kept.txt\nsums.py\ntest_sums.py\ncat: notes/secret.txt: No such file or directory\n\nexit status 1"
    assert [said(turn) for turn in turns[:3]] == [[listed], ["(nothing was printed)", "replaced"], ["def add(a, b):\n    return a + b\n"]]
    assert turns[3] == Turn(None, 1.0, True, {"tool_calls": 4.0, "tool_errors": 1.0, "solved": 1.0})
    assert played(["done"])[0].reward == 0.0
    assert played([REPAIR, "done"], finished=False)[0] == Turn(None, 0.0, True, {"tool_calls": 0.0, "tool_errors": 0.0, "solved": 0.0})


def test_what_a_tool_refuses_is_said() -> None:
    refused = {
        call("edit", path="sums.py", old="a", new=""): "error: the old text occurs 3 times in sums.py, not once",
        call("edit", path="sums.py", old="", new="x"): "error: sums.py exists: give the text to replace",
        call("edit", path="none.py", old="x", new="y"): "error: none.py: No such file or directory",
        call("edit", path="new/file.py", old="", new="x"): "made",
        call("edit", path="sums.py", old="x"): "error: edit takes the texts path, old, new",
        call("bash", command=["ls"]): "error: bash takes the texts command",
        call("bash", command="\ud800"): "error: 'utf-8' codec can't encode",
        call("bash", command="echo \0"): "error: bash takes no text with a null character",
        call("bash", command="x" * 100_001): "error: bash takes no text with a null character, or of more than 100000 bytes",
        call("python", code="1"): "error: there is no tool 'python' (there are: bash, edit)",
        bash("sleep 60"): "error: not done after 5 s",
        bash("ls") * 9: "kept.txt",
    }
    turns = played(list(refused))
    for turn, (text, expected) in zip(turns, refused.items(), strict=True):
        assert said(turn)[0].startswith(expected), text
    assert said(turns[-1])[8] == "error: 9 calls in one turn, more than 8"
    [only] = played([REPAIR], given=settings(tools=["bash"]))
    assert said(only)[0].startswith("error: there is no tool 'edit'")


SITE = f".local/lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"  # of a user, which Python reads
# What a model may try instead of the repair. None of it passes the tests, and none of it fails the episode.
CHEATS = (
    "echo 'import sys; sys.exit()' > test_sums.py",
    "mkdir notes; echo 'pass' > notes/more.py; rm test_sums.py; mkdir test_sums.py",
    "rm -rf notes; ln -s /tmp notes; ln -sf /dev/null test_sums.py",
    "rm test_sums.py; mkfifo test_sums.py",
    "mkdir -p ~/bin; printf '#!/bin/sh\\n' > ~/bin/python; chmod +x ~/bin/python; echo 'export PATH=~/bin:$PATH' > ~/.profile",
    f"mkdir -p ~/{SITE}; echo 'import os; os._exit(0)' > ~/{SITE}/usercustomize.py",
    "(setsid sh -c 'while :; do echo > ~/task/test_sums.py; done' &)",
    "cd ..; rm -rf task",
    "rm -rf .git sums.py; chmod 000 .",
    "head -c 100000000 /dev/urandom > big",
    "touch \"$(printf 'a\\nb')\" -- '-rf' ' x'; ln -s / root; ln -s .. up",
)


@pytest.mark.parametrize("command", CHEATS)
def test_no_change_but_a_repair_passes_the_tests(command: str) -> None:
    turns = played([bash(command), "done"])
    assert turns[-1].done and turns[-1].reward == 0.0


def test_a_repair_counts_whatever_is_done_around_it() -> None:
    around = "echo other > kept.txt; mkdir notes; echo pass > notes/more.py; rm test_sums.py; mv sums.py s.py; mv s.py sums.py; ln -s / r"
    assert played([REPAIR, bash(around), "done"])[-1].reward == 1.0


def test_other_versions_of_the_files_are_not_in_the_history() -> None:
    git = "git -c user.name=a -c user.email=a"
    setup = (
        f"git init -q . && echo solution > s.txt && git add -A && {git} commit -qm one && rm s.txt && git add -A && {git} commit -qm two"
    )
    [turn] = played([bash("git log --all --format=%s; git reflog | wc -l; git fsck --lost-found 2>/dev/null")], {**ROW, "setup": setup})
    assert said(turn) == ["task\n1\n"]


def test_a_container_that_dies_ends_its_own_episode_and_no_other() -> None:
    async def body() -> tuple[list[str], list[float]]:
        host = open_host(settings())
        deaths, rewards = [], []
        try:
            for text in (bash("kill -9 $PPID; sleep 30"), REPAIR):
                episode = host.open()
                await episode.reset(1, {"answer": None, "meta": ROW})
                try:
                    await episode.step(text, [], True)
                    rewards.append((await episode.step("done", [], True)).reward)
                except EnvironmentFailed as failure:
                    deaths.append(str(failure))
                await episode.close()
        finally:
            host.close()
        return deaths, rewards

    deaths, rewards = asyncio.run(body())
    assert len(deaths) == 1 and deaths[0].startswith("container died: ") and rewards == [1.0]


def test_episodes_at_once_do_not_meet_and_a_closed_host_ends_what_runs() -> None:
    async def body() -> tuple[list[float], float]:
        host = open_host(settings().model_copy(update={"workers": 2}))

        async def one(repairs: bool) -> float:
            episode = host.open()
            await episode.reset(1, {"answer": None, "meta": ROW})
            if repairs:
                await episode.step(REPAIR, [], True)
            reward = (await episode.step("done", [], True)).reward
            await episode.close()
            return reward

        rewards = await asyncio.gather(*[one(number % 2 == 0) for number in range(4)])
        slow = host.open()
        await slow.reset(1, {"answer": None, "meta": ROW})
        begun = time.monotonic()
        asking = asyncio.create_task(slow.step(bash("sleep 60"), [], True))
        await asyncio.sleep(0.5)
        host.close()
        with pytest.raises(EnvironmentFailed, match="container died"):
            await asking
        return rewards, time.monotonic() - begun

    rewards, took_s = asyncio.run(body())
    assert rewards == [1.0, 0.0, 1.0, 0.0] and took_s < 4.5


def test_a_task_may_be_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "task"
    (folder / "pkg").mkdir(parents=True)
    (folder / "pkg" / "one.py").write_text("ONE = 2\n")
    (folder / "run.sh").write_text("#!/bin/sh\npython -c 'from pkg.one import ONE; assert ONE == 1'\n")
    (folder / "run.sh").chmod(0o755)
    (folder / "link").symlink_to("/etc/passwd")
    row = {"folder": str(folder), "test": "./run.sh", "kept": ["run.sh"]}
    turns = played([bash("ls; cat link"), call("edit", path="pkg/one.py", old="2", new="1"), "done"], row)
    assert said(turns[0])[0].startswith("link\npkg\nrun.sh\n") and "root:" not in said(turns[0])[0] and turns[-1].reward == 1.0
    assert (folder / "pkg" / "one.py").read_text() == "ONE = 2\n", "the container has a copy"


BAD: dict[str, dict[str, Any]] = {
    "test: the row has no command": {"test": None},
    "folder: /none: No such file": {"folder": "/none"},
    "hidden: '../x' is not a path inside": {"hidden": ["a/../../x"]},
    "files: '/etc/x' is not a path inside": {"files": {"/etc/x": ""}},
    "tests: 5 is not a dictionary": {"tests": 5},
    "directory: 'here' does not begin with a slash": {"directory": "here"},
    "setup: exit status 3: no luck": {"setup": "echo no luck; exit 3"},
    "image: 'an/image' needs containers of another type than local": {"image": "an/image"},
}


@pytest.mark.parametrize("message", BAD)
def test_a_bad_row_says_what_is_wrong_with_it(message: str) -> None:
    with pytest.raises(EnvironmentFailed, match=f"^bad task: {message}"):
        played(["done"], {**ROW, **BAD[message]})


PATCH = "--- a/{0}\n+++ b/{0}\n@@ -1,{4} +1,{4} @@\n-{1}\n+{2}\n{3}"
OLD_TEST, NEW_TEST = "def test_new(): pass", "def test_new(): assert __import__('value').VALUE == 2"


def git_task(folder: Path) -> None:
    """A repository as the images of SWE-bench have it, but for conda."""
    (folder / "tests").mkdir(parents=True)
    (folder / "value.py").write_text("VALUE = 1\n")
    (folder / "tests" / "test_value.py").write_text(f"{OLD_TEST}\ndef test_old(): pass\n")
    for words in (["init", "-q"], ["add", "-A"], ["-c", "user.name=a", "-c", "user.email=a", "commit", "-qm", "base"]):
        subprocess.run(["git", *words], cwd=folder, check=True)


@pytest.mark.parametrize("kind", ["swe_gym", "swe_smith"])
def test_published_columns_name_a_task_that_is_played_in_its_image(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in for podman, which makes the image's folder; the columns are those of the published data sets."""
    root = tmp_path / "root"
    program = Path(stand_in(root))
    text = program.read_text().replace(
        '    os.makedirs(root + "/testbed")', f'    shutil.copytree({str(tmp_path / "image")!r}, root + "/testbed")'
    )
    program.write_text(text)
    git_task(tmp_path / "image")
    row: dict[str, Any] = {"problem_statement": "VALUE must be 2", "repo": "a/b", "instance_id": "a__b-1"}
    names = ["tests/test_value.py::test_new"], ["tests/test_value.py::test_old"]
    if kind == "swe_gym":
        patch = PATCH.format("tests/test_value.py", OLD_TEST, NEW_TEST, " def test_old(): pass\n", 2)
        row |= {"test_patch": patch, "FAIL_TO_PASS": json.dumps(names[0]), "PASS_TO_PASS": json.dumps(names[1]), "base_commit": "0"}
    else:
        (tmp_path / "image" / "tests" / "test_value.py").write_text(f"{NEW_TEST}\ndef test_old(): pass\n")
        (tmp_path / "image" / "value.py").write_text("VALUE = 2\n")
        row |= {
            "patch": PATCH.format("value.py", "VALUE = 2", "VALUE = 1", "", 1),
            "image_name": "x/y.z",
            "FAIL_TO_PASS": names[0],
            "PASS_TO_PASS": names[1],
        }
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr("megarl.environments.software.rows.CONDA", "export PYTHONDONTWRITEBYTECODE=1 PYTHONPATH=.")
    given = settings(containers={"type": "podman", "program": str(program)}, rows=kind, test_s=60)
    look = bash("ls tests; git log --all --format=%s; ls -a | grep megarl; cat value.py")
    turns = played([look, call("edit", path="value.py", old="1", new="2"), "done"], row, given)
    shown = ["test_value.py\n" if kind == "swe_gym" else "", "task\nVALUE = 1\n"]
    assert said(turns[0]) == ["".join(shown)] and turns[-1].reward == 1.0
    assert played(["done"], row, given)[0].reward == 0.0
    image = json.loads((root.parent / "root.log").read_text().splitlines()[0])[-2]
    assert image == ("docker.io/xingyaoww/sweb.eval.x86_64.a_s_b-1:latest" if kind == "swe_gym" else "x/y.z")


def test_rows_without_what_they_need_are_refused() -> None:
    good = {"instance_id": "a__b-1", "test_patch": "x", "FAIL_TO_PASS": ["t"], "PASS_TO_PASS": []}
    for read, row, message in (
        (swe_gym, {**good, "instance_id": None}, "instance_id: the row has no text"),
        (swe_gym, {**good, "FAIL_TO_PASS": "[]"}, "FAIL_TO_PASS: the row names no test"),
        (swe_gym, {**good, "FAIL_TO_PASS": ["--co"]}, "FAIL_TO_PASS: a test's name begins with a hyphen"),
        (swe_gym, {**good, "PASS_TO_PASS": [1]}, r"PASS_TO_PASS: \[1\] is not a list of texts"),
        (swe_gym, {**good, "test_patch": "+++ b/../../x"}, "a patch: '../../x' is not a path inside"),
        (swe_smith, {**good, "patch": "x"}, "image_name: the row has no text"),
    ):
        with pytest.raises(BadTask, match=f"^{message}"):
            read(row)
    assert own({"test": "t", "files": {"a": "1", "b": None}}).files == {"a": "1"}, "Arrow fills rows with nulls"


def test_an_image_is_no_option_of_an_engines_program() -> None:
    host = SoftwareHost(settings(containers={"type": "podman"}))
    with pytest.raises(BadTask, match="^image: '--privileged' begins with a hyphen"):
        host.container("--privileged")
    host.close()


def test_a_container_that_is_added_to_a_closed_host_does_not_start() -> None:
    host = SoftwareHost(settings())
    host.close()
    with pytest.raises(ContainerGone, match="the run has ended"):
        host.open()._started(None)
    assert not host.containers


def test_containers_of_other_types_refuse_settings_that_they_ignore() -> None:
    for sandbox, key in (({"readable": ["/"]}, "readable"), ({"env": ["HOME"]}, "env"), ({"require": "landlock"}, "require")):
        with pytest.raises(ValueError, match=f"environment.sandbox.{key}: containers of type podman have their own"):
            EnvironmentSettings.model_validate({"source": {"type": "software", "containers": {"type": "podman"}}, "sandbox": sandbox})
    with pytest.raises(ValueError, match="environment.source.processes=9: containers of type modal have no such limit"):
        EnvironmentSettings.model_validate({"source": {"type": "software", "containers": {"type": "modal"}, "processes": 9}})
    assert LocalContainer(settings().sandbox, 9, 1.0).home == ""

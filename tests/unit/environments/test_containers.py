"""Containers: whatever a command does is bounded and reaches nothing outside; what it leaves is gone before the next one."""

import inspect
import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import psutil
import pytest

from megarl.config import CommandContainers, ConfigError, SandboxSettings
from megarl.environments.containers import commands, hosted
from megarl.environments.containers.commands import CommandContainer
from megarl.environments.containers.container import Container, ContainerGone, Kept
from megarl.environments.containers.local import DISK_BYTES, LocalContainer
from megarl.sandbox.level import Level, level
from megarl.sandbox.process import descendants
from tests.unit.sandbox.levels import grant

SETTINGS = SandboxSettings(memory_gb=1)


@contextmanager
def started(container: Container) -> Iterator[Container]:
    with closing(_Stopping(container)):
        container.start()
        container.upload(f"{container.home}/task/a.txt", b"first")
        yield container


class _Stopping:
    def __init__(self, container: Container) -> None:
        self.close = container.stop


@pytest.fixture(params=[Level.NAMESPACES, Level.LANDLOCK], ids=str)
def granted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, long: bool) -> Level:
    """The isolation of local containers: the machine's, and with --long the lower one too."""
    if request.param < level() and not long:
        pytest.skip("a long proof: --long")
    return grant(request.param, monkeypatch)


def local(processes: int = 64) -> LocalContainer:
    return LocalContainer(SETTINGS, processes, 60.0)


def sleepers(mark: str) -> list[int]:
    return [one.pid for one in psutil.process_iter(["cmdline"]) if mark in (one.info["cmdline"] or [])]


def test_a_container_keeps_files_between_commands_and_nothing_else(granted: Level, tmp_path: Path) -> None:
    mark = f"61{os.getpid()}"
    with started(local()) as container:
        task = f"{container.home}/task"
        ran = container.exec("cat a.txt; echo; echo more > b.txt; pwd; echo $HOME; exit 3", task, 30, 1000)
        assert (ran.code, ran.output, ran.ended) == (3, b"first\n~/task\n~\n", None), "the sandbox's random name is not in it"
        assert container.exec("cat b.txt >&2", task, 30, 1000).output == b"more\n"
        container.exec(f"sleep {mark} & (setsid sleep {mark} &); sleep 0.2", task, 30, 100)
        assert sleepers(mark) == []
        container.upload(f"{task}/new/c.bin", data := os.urandom(100_000))
        assert container.download(f"{task}/new/c.bin", 100_000) == data
        for path in (f"{task}/none", f"{task}/new", f"{task}/new/c.bin"):
            with pytest.raises(OSError, match="No such file|directory|more than 99999"):
                container.download(path, 99_999)
        with pytest.raises(OSError, match="No such device|directory|Is a"):
            container.upload(task, b"")
        assert container.exec("mkfifo p", task, 30, 100).code == 0
        for use in (lambda: container.download(f"{task}/p", 100), lambda: container.upload(f"{task}/p", b"x")):
            with pytest.raises(OSError, match="not a file|No such device"):  # and nothing waits for its other end
                use()
    assert not Path(container.home).exists() or container.home == "/tmp"


BOMB = "import os, time\nfor _ in range(300):\n    if os.fork() == 0:\n        {0}time.sleep(600)\ntime.sleep(600)"
# What each command does, what of it is said to have been exceeded, and within which seconds.
FLOODS = {
    "sleep 600": ("not done after 2 s", 2.0),
    "yes": ("not done after 2 s", 2.0),
    f"python -c '{BOMB.format('')}'": ("more than 64 processes", 20.0),
    f"python -c '{BOMB.format('os.setsid(); ')}'": ("more than 64 processes", 20.0),
    "for i in 1 2 3 4 5; do python -c 'x = b\"x\" * 400_000_000; import time; time.sleep(60)' & done; wait": (
        "more than 1 GB of memory",
        20.0,
    ),
}


def test_floods_end_the_command_and_the_container_goes_on(granted: Level) -> None:
    with started(local()) as container:
        for command, (why, within_s) in FLOODS.items():
            ran = container.exec(command, f"{container.home}/task", within_s, 100)
            assert ran.ended == why and len(ran.output) < 200, command
            after = container.exec("echo well", f"{container.home}/task", 30, 100)
            assert (after.code, after.output, after.ended) == (0, b"well\n", None), command


OUTSIDE = {
    "cat {secret}": b"",
    "ln -s {secret} link; cat link": b"",
    "ln -s {folder} folder; ls folder/; echo x > folder/made": b"",
    "echo x > {folder}/made; rm -rf {folder}": b"",
    "kill -9 {pid}": b"",
    "cat /proc/{pid}/environ": b"",
    "echo ${{MEGARL_SECRET}}": b"\n",
    "python -c 'import socket; socket.create_connection((\"127.0.0.1\", {port}), 1)'": b"",
}


def test_a_container_reaches_nothing_outside(granted: Level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    (folder := tmp_path / "folder").mkdir()
    (secret := folder / "secret").write_text("the secret")
    monkeypatch.setenv("MEGARL_SECRET", "the secret")
    with socket.create_server(("127.0.0.1", 0)) as server, started(local()) as container:
        reached = {"secret": secret, "folder": folder, "pid": os.getpid(), "port": server.getsockname()[1]}
        for command, output in OUTSIDE.items():
            ran = container.exec(f"({command.format(**reached)}) 2>/dev/null", f"{container.home}/task", 30, 1000)
            assert ran.output == output, command
        for name in ("link", "folder/secret"):
            with pytest.raises(OSError, match="denied|No such file"):
                container.download(f"{container.home}/task/{name}", 100)
        server.settimeout(0.01)
        with pytest.raises(TimeoutError):
            server.accept()
    assert [one.name for one in folder.iterdir()] == ["secret"]


# What kills a container: its own end, silence, and on a disk that is not private also too long a path; and the command's time limit.
NESTED = 'python -c \'import os\nfor _ in range(2100): os.mkdir("dd"); os.chdir("dd")\'; sleep 1'
DEATHS = {
    "kill -9 $PPID; sleep 60": ("SIGKILL|exit status|closed", 3),
    "kill -STOP $PPID; sleep 60": ("timeout", 3),
    NESTED: ("longer paths", 60),
}


@pytest.mark.parametrize("command", DEATHS)
def test_a_container_that_dies_says_how_and_leaves_nothing(granted: Level, command: str) -> None:
    with started(local()) as container:
        begun, (message, seconds) = time.monotonic(), DEATHS[command]
        home = Path(container.home)
        if command == NESTED and granted == Level.NAMESPACES:
            assert container.exec(command, f"{home}/task", seconds, 100).code == 0, "whose files go with the namespace"
        else:
            with pytest.raises(ContainerGone, match=message):
                container.exec(command, f"{home}/task", seconds, 100)
        assert time.monotonic() - begun < seconds + 30
        container.stop()
        assert home == Path("/tmp") or not home.parent.exists(), "also what is nested deeper than Python's rmtree follows"
        with pytest.raises(ContainerGone):
            container.exec("true", container.home, 10, 100)


def test_too_much_on_the_disk_ends_the_container(granted: Level) -> None:
    with started(local()) as container:
        if granted == Level.NAMESPACES:
            pytest.skip("its /tmp is private, and the kernel bounds it")
        command = f"for i in 1 2 3; do head -c {DISK_BYTES // 2} /dev/zero > big$i; done; sleep 60"
        with pytest.raises(ContainerGone, match="more than 1 GB on disk"):
            container.exec(command, f"{container.home}/task", 60, 100)


def test_an_output_keeps_its_beginning_and_its_end() -> None:
    for size in (0, 5, 10, 11, 1000):
        kept = Kept(10)
        text = bytes(index % 251 for index in range(size))
        for begin in range(0, size, 3):
            kept.write(text[begin : begin + 3])
        expected = text if size <= 10 else text[:5] + b"\n... (%d bytes left out)\n" % (size - 10) + text[-5:]
        assert kept.value() == expected


# Stands in for podman and apptainer, neither of which is here: it notes its arguments, and plays the container in a folder.
STAND_IN = """#!{python}
import json, os, shutil, subprocess, sys, time
root, words = {root!r}, sys.argv[1:]
with open(root + ".log", "a") as log:
    log.write(json.dumps(words) + "\\n")
if "run" in words or "start" in words:
    if "missing" in words[-1] + words[-2]:
        sys.exit("Error: no such image")
    if "slow" in words[-1] + words[-2]:
        open(root + ".starts", "w").close()
        time.sleep(1)
    os.makedirs(root + "/tmp")
    os.makedirs(root + "/testbed")
elif "rm" in words or "stop" in words:
    shutil.rmtree(root)
elif not os.path.isdir(root):
    print("Error: no such container")
    sys.exit(125)
else:
    if os.path.exists(root + ".warns"):
        print("a warning of the engine's own", file=sys.stderr)
    begin = words.index("timeout") if "timeout" in words else words.index("true")
    place = [words[at + 1] for at, word in enumerate(words) if word in ("--workdir", "--pwd")] or ["/"]
    inside = [word.replace("/tmp", root + "/tmp").replace("/testbed", root + "/testbed") for word in words[begin:]]
    status = subprocess.run(inside, cwd=root + place[0]).returncode
    sys.exit(status if status >= 0 else 128 - status)
"""


def stand_in(root: Path) -> str:
    program = root.with_suffix(".py")
    program.write_text(STAND_IN.format(python=sys.executable, root=str(root)))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return str(program)


STARTS = {
    "podman": [
        *("run", "--detach", "--rm", "--init", "--name", "NAME", "--network", "none", "--http-proxy=false", "--memory", "1024m"),
        *("--memory-swap", "1024m", "--pids-limit", "64", "--cap-drop", "all", "--security-opt", "no-new-privileges"),
        *("--timeout", "21600", "--cpus", "2", "--entrypoint", "sleep", "docker.io/a/b:c", "infinity"),
    ],
    "apptainer": [
        *("instance", "start", "--containall", "--cleanenv", "--no-privs", "--writable-tmpfs", "--net", "--network", "none"),
        *("--memory", "1024M", "--pids-limit", "64", "--cpus", "2", "docker://docker.io/a/b:c", "NAME"),
    ],
}
EXECS = {
    "podman": ["exec", "--interactive", "--workdir", "/testbed", "NAME", "timeout", "--signal=KILL", "5", "sh", "-c", "cat a; exit 4"],
    "apptainer": [
        "exec",
        "--cleanenv",
        "--pwd",
        "/testbed",
        "instance://NAME",
        "timeout",
        "--signal=KILL",
        "5",
        "sh",
        "-c",
        "cat a; exit 4",
    ],
}
STOPS = {"podman": ["rm", "--force", "--time", "0", "NAME"], "apptainer": ["instance", "stop", "--force", "NAME"]}


@pytest.mark.parametrize("engine", STARTS)
def test_an_engines_program_gets_the_documented_arguments(engine: str, tmp_path: Path) -> None:
    """With a stand-in for the program: the options are those of its documentation, which no test here can try."""
    source = CommandContainers(type=engine, program=stand_in(tmp_path / "root"), options=["--cpus", "2"])  # type: ignore[arg-type]
    container = CommandContainer(source, "docker.io/a/b:c", SETTINGS, 64, 30)
    container.start()
    container.upload("/testbed/a", b"text")
    ran = container.exec("cat a; exit 4", "/testbed", 5, 100)
    assert (ran.code, ran.output, ran.ended) == (4, b"text", None)
    assert container.download("/testbed/a", 4) == b"text"
    for path, most in (("/testbed/a", 3), ("/testbed/none", 9)):
        with pytest.raises(OSError, match="more than 3|No such file"):
            container.download(path, most)
    assert container.exec("sleep 30", "/testbed", 1, 100).ended == "not done after 1 s"
    assert container.exec("exit 125", "/testbed", 5, 100).code == 125, "the command's own status"
    container.stop()
    container.stop()
    with pytest.raises(ContainerGone, match="no such container"):
        container.exec("true", "/testbed", 5, 100)
    words = [json.loads(line) for line in (tmp_path / "root.log").read_text().splitlines()]
    name = next(word for word in words[0] if word.startswith("megarl-"))
    plain = [[word.replace(name, "NAME") for word in line] for line in words]
    assert plain[0] == STARTS[engine] and EXECS[engine] in plain and plain.count(STOPS[engine]) == 1
    with pytest.raises(ContainerGone, match="it does not start: Error: no such image"):
        CommandContainer(source, "missing", SETTINGS, 64, 30).start()


def test_an_engines_warnings_are_no_part_of_a_file(tmp_path: Path) -> None:
    source = CommandContainers(type="podman", program=stand_in(tmp_path / "root"))
    container = CommandContainer(source, "image", SETTINGS, 64, 30)
    container.start()
    (tmp_path / "root.warns").touch()
    container.upload("/testbed/a", data := os.urandom(1000))
    assert container.download("/testbed/a", 1000) == data
    with pytest.raises(OSError, match="No such file"):
        container.download("/testbed/none", 9)
    container.stop()
    with pytest.raises(ContainerGone, match="it does not answer: Error: no such container"):
        container.download("/testbed/a", 1000)


def test_a_container_that_is_stopped_while_it_starts_is_removed(tmp_path: Path) -> None:
    source = CommandContainers(type="podman", program=stand_in(tmp_path / "root"))
    container = CommandContainer(source, "slow", SETTINGS, 64, 30)
    with ThreadPoolExecutor(1) as threads:
        starting = threads.submit(container.start)
        while not (tmp_path / "root.starts").exists():
            assert not starting.done()
            time.sleep(0.01)
        container.stop()
        with pytest.raises(ContainerGone, match="it was stopped"):
            starting.result(30)
    assert not (tmp_path / "root").exists()


def test_processes_that_are_a_chain_are_all_found() -> None:
    """Of more links than Python nests calls: each starts the next one, and waits."""
    depth, mark = 60, f"chain{os.getpid()}"
    link = '[ $1 = 0 ] && echo done && exec sleep 60; sh -c "$2" $0 $(($1 - 1)) "$2"; :'
    limit, head = sys.getrecursionlimit(), subprocess.Popen(["sh", "-c", link, mark, str(depth), link], stdout=subprocess.PIPE)
    try:
        assert head.stdout is not None and head.stdout.readline() == b"done\n"
        sys.setrecursionlimit(len(inspect.stack()) + depth // 2)
        try:
            found = list(descendants(head.pid))
        finally:
            sys.setrecursionlimit(limit)
        assert len(found) == len(set(found)) == depth
    finally:
        for pid in [*psutil.Process(head.pid).children(recursive=True), psutil.Process(head.pid)]:
            pid.kill()
        head.communicate()


def test_a_network_is_given_only_where_it_is_asked_for() -> None:
    for words in commands.ENGINES.values():
        closed, open_ = (words("n", "i", SandboxSettings(network=network), 9, ()) for network in (False, True))
        assert "none" in closed.start and "none" not in open_.start and "--network" not in open_.start


def test_what_is_missing_is_named_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"^environment.source.containers: no-such-engine: no such program on this machine$"):
        commands.program(CommandContainers(type="podman", program="no-such-engine"))
    monkeypatch.setitem(sys.modules, "modal", None)
    with pytest.raises(ConfigError, match=r"^environment.source.containers.type=modal: .*modal.* \(pip install megarl\[modal\]\)$"):
        hosted.check()
    monkeypatch.setitem(sys.modules, "modal", sys)
    monkeypatch.delenv("MODAL_TOKEN_ID", raising=False)
    with pytest.raises(ConfigError, match=r"^environment.source.containers.type=modal: MODAL_TOKEN_ID is not set$"):
        hosted.check()

"""Whatever a response makes a reward function do costs that one sample, reaches nothing of the run and leaves nothing behind."""

import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from megarl.config import ConfigError, FunctionReward, RewardSettings, SandboxSettings
from megarl.host.reaper import members
from megarl.rewards.processes import ProcessScorer
from megarl.rewards.score import Score, ScoreRequest
from megarl.rewards.sources import check
from megarl.sandbox import level as level_module
from megarl.sandbox import process
from megarl.sandbox.calls import filtered
from megarl.sandbox.level import Level, bubblewrap, level, meaning, readable
from megarl.sandbox.signals import kept_inside
from tests.unit.sandbox.hostile import HOSTILE
from tests.unit.sandbox.levels import grant

SECRET = "a-secret-of-the-run"
TIMEOUT_S = 2.5  # forty children take most of one on a busy machine

# What each response scores (None: nothing), and how its error begins, or may begin; (0, None): the function says that it got nothing.
Beginnings = str | tuple[str, ...] | None
NOTHING: tuple[float | None, Beginnings] = (0.0, None)
DIED = "worker died: "
BROKE = "worker died: it wrote an invalid answer"
NO_THREAD = "RuntimeError: can't start new thread"
SECRETS = [
    *("environment", "environment_of_the_run", "environment_of_everybody", "memory_of_the_run", "trace_the_run", "home_directory"),
    *("home_directory_by_a_link", "home_directory_through_root", "home_directory_through_a_shell", "write_beside_the_run"),
    *("write_where_the_code_is", "remove_the_code", "mount_something", "become_root_again", "run_a_setuid_program", "tcp_to_this_machine"),
    *("tcp_listen", "udp_to_this_machine", "a_socket_in_the_file_tree", "an_abstract_socket", "a_datagram_into_the_file_tree"),
    *("a_socket_to_the_hypervisor", "a_socket_by_another_call", "shared_memory_of_the_run", "kill_the_run"),
]
NEIGHBOURS = [
    *("trace_a_process", "read_anothers_memory", "write_anothers_memory", "hold_a_process", "take_anothers_descriptor", "limit_a_process"),
    *("have_the_kernel_signal_a_process", "memory_shared_by_a_number", "keys_of_the_user", "signal_the_run", "end_the_keeper"),
]
SOCKETS = [name for name in SECRETS if any(part in name for part in ("tcp", "udp", "socket", "datagram"))]
EXPECTED: dict[str, tuple[float | None, Beginnings]] = {
    **dict.fromkeys([*SECRETS, *NEIGHBOURS], NOTHING),
    "a_child_that_is_killed": (0.25, None),
    "end_at_once": (None, DIED + "exit status 3"),
    "leave": (None, "SystemExit: "),
    "interrupt": (None, "KeyboardInterrupt: "),
    "stop_iterating": (None, "GeneratorExit: "),
    "crash": (None, DIED + "SIGSEGV"),
    "abort": (None, DIED + "SIGABRT"),
    "recurse": (None, "RecursionError: "),
    "recurse_in_c": (None, "RecursionError: "),
    "stop_itself": (None, "timeout"),
    "deaf_loop": (None, "timeout"),
    "no_alarm": (None, "timeout"),
    "exit_from_a_thread": (None, (DIED + "exit status 5", NO_THREAD)),  # the threads of the other worker may be all that there may be
    "ten_gigabytes": (None, "MemoryError: "),
    "memory_piece_by_piece": (None, "MemoryError: "),
    "a_large_number": (None, "timeout"),
    "a_large_file": NOTHING,
    "many_files": (None, "OSError: "),
    "a_deep_folder": (None, "timeout"),
    "many_threads": (None, NO_THREAD),
    "fork_and_return_twice": (0.25, None),
    "a_child_that_stays": (0.25, None),
    "a_daemon": (0.25, None),
    "forty_children": (0.25, None),
    "a_child_that_dies_later": (0.25, None),
    "garbage_on_every_descriptor": (None, BROKE),
    "a_pickle_on_every_descriptor": (None, BROKE),
    "an_endless_message": (None, BROKE),
    "half_a_message": (None, (DIED, "timeout")),  # late, or it swallowed the next answers
    "deep_json": (None, BROKE),
    "a_score_of_another_sample": (None, BROKE),
    "a_score_that_is_nan": (None, BROKE),
    "a_score_that_is_text": (None, BROKE),
    "a_part_that_is_text": (None, BROKE),
    "a_long_integer": (None, BROKE),
    "an_integer_beyond_every_float": (None, BROKE),
    "ready_again": (None, BROKE),
    "refused_late": (None, BROKE),
    "close_every_descriptor": (None, DIED),
    "an_evil_number": (None, "SystemError: no"),
    "an_exception_that_raises": (None, DIED + "exit status 1"),
    "a_long_exception": (None, "ValueError: xxx"),
    "an_exception_that_clears_the_screen": (None, "{0}[2J{0}{0}megarl: done: ".format("\N{REPLACEMENT CHARACTER}")),
    "prints_that_clear_the_screen": (1, None),
    "prints_without_end": (1, None),
    "ten_thousand_parts": (None, "bad return: 10000 parts, more than 64"),
    "a_part_with_a_long_name": (1, None),
    "a_number_too_large": (None, "bad return: "),
    "a_number_whose_square_overflows": (None, "bad return: the reward function returned 1e+308, beyond the limit of 1e+09"),
    "a_decimal": (1, None),
    "a_fraction": (0.5, None),
    "a_complex_number": (None, "bad return: "),
    "a_fork_bomb": (None, "BlockingIOError: "),
}


@contextmanager
def host(directory: Path) -> Iterator[dict[str, Any]]:
    """What there is to take on this machine, as a response's function is told; nothing may have come to the sockets at the end."""
    with ExitStack() as stack:
        home = directory / "home"
        home.mkdir()
        (home / "secret").write_text(SECRET)
        shared = Path("/dev/shm") / f"megarl-test-{os.getpid()}"
        shared.write_text(SECRET)
        stack.callback(shared.unlink)
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        udp = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
        udp.bind(("127.0.0.1", 0))
        udp.setblocking(False)
        places = {"unix_path": str(directory / "socket"), "abstract": f"megarl-test-{os.getpid()}"}
        places["datagram_path"] = str(directory / "datagrams")
        stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)).bind(places["datagram_path"])
        for address in (places["unix_path"], "\0" + places["abstract"]):
            server = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            server.bind(address)
            server.listen()
        with socket.create_server(("127.0.0.1", 0)) as free:
            free_port = free.getsockname()[1]
        ports = {"tcp_port": tcp.getsockname()[1], "udp_port": udp.getsockname()[1], "free_port": free_port}
        paths = {"secret_file": str(home / "secret"), "shared_memory": str(shared), "touched": str(directory / "touched")}
        yield {"secret": SECRET, "driver": os.getpid(), **ports, **paths, **places}
        with pytest.raises(BlockingIOError):
            udp.recv(1)


def leftovers(mark: str) -> list[int]:
    """The processes whose environment has the mark."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if mark.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(int(pid))
        except OSError:
            continue
    return found


MACHINE = level()


@pytest.fixture(params=[Level.NAMESPACES, Level.LANDLOCK], ids=str)
def granted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Level:
    """What the machine is said to grant, where it does."""
    return grant(request.param, monkeypatch)


# Processes are counted by namespace or user; the keeper that a namespace has is the first of its own processes, and ends them with it.
OPEN = {Level.LANDLOCK: {"a_fork_bomb"}, Level.NAMESPACES: {"end_the_keeper"}}


def test_a_hostile_response_costs_its_own_sample_and_nothing_else(
    granted: Level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], long: bool
) -> None:
    if granted < MACHINE and not long:
        pytest.skip("a long proof: --long")
    monkeypatch.setenv("RAY_AUTH_TOKEN", SECRET)
    monkeypatch.setenv("MEGARL_HOSTILE", mark := f"hostile-{os.getpid()}-{granted}")
    assert set(EXPECTED) == set(HOSTILE) and len(HOSTILE) >= 60
    names = [name for name in EXPECTED if name not in OPEN[granted]]
    responses = [response for name in names for response in (name, "right")]  # sound ones of the same chunk between them
    sandbox = SandboxSettings(memory_gb=1, env=["MEGARL_HOSTILE"])
    source = FunctionReward(path="tests.unit.sandbox.hostile:score")
    settings = RewardSettings(source=source, timeout_s=TIMEOUT_S, workers=2, require_finished=False, sandbox=sandbox)
    with host(tmp_path) as meta, ProcessScorer(settings) as scorer:
        scores = scorer.score([ScoreRequest("", response, "", meta, True) for response in responses])
        again = scorer.score([ScoreRequest("", "right", "", meta, True)] * 8)
    assert scores[1::2] == [Score(1.0)] * len(names) and again == [Score(1.0)] * 8
    for name, given in zip(names, scores[::2], strict=True):
        value, error = EXPECTED[name]
        assert given.value == value, (name, given)
        if value or given.error != "timeout":  # which any of them may be on a busy machine
            assert (given.error is None) == (error is None) and (given.error or "").startswith(error or ""), (name, given)
    assert not (tmp_path / "touched").exists()
    deadline = time.monotonic() + 30
    while leftovers(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert leftovers(mark) == [] and members(str(tmp_path)) == []
    out, err = capfd.readouterr()
    assert "\x1b" not in err, ascii(err[max(0, err.find("\x1b") - 300) :][:600])
    assert out == "" and "[31mred" in err and "the rest is not shown" in err and len(err) < 2 << 20


def test_a_user_function_gets_its_readable_files_and_variables(granted: Level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file to read, a variable, a directory to write, a loop of asyncio's, which has a pair of sockets."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "words.txt").write_text("right")
    code = tmp_path / "code"
    code.mkdir()
    (code / "needs_helper.py").write_text("WORD = 'x'\n")
    (code / "needs.py").write_text(
        "import asyncio, os, tempfile, needs_helper\n"
        f"def f(response):\n    word = open({str(tmp_path / 'data' / 'words.txt')!r}).read()\n"
        "    with tempfile.TemporaryFile() as file:\n        file.write(b'x')\n"
        "    asyncio.run(asyncio.sleep(0))\n"
        "    return float(response == word and os.environ['MEGARL_KEY'] == 'k' and 'MEGARL_OTHER' not in os.environ)\n"
    )
    monkeypatch.syspath_prepend(code)
    monkeypatch.setenv("MEGARL_KEY", "k")
    monkeypatch.setenv("MEGARL_OTHER", "o")
    given = SandboxSettings(readable=[tmp_path / "data"], env=["MEGARL_KEY"])
    ask = [ScoreRequest("", "right", "", {}, True)]
    for sandbox, error in ((given, None), (SandboxSettings(env=["MEGARL_KEY"]), "FileNotFoundError|PermissionError")):
        with ProcessScorer(RewardSettings(source=FunctionReward(path="needs:f"), sandbox=sandbox)) as scorer:
            [score] = scorer.score(ask)
        assert score.value == (1.0 if error is None else None) and (score.error or "None").partition(":")[0] in (error or "None").split("|")


def test_the_level_says_if_roots_processes_are_unlimited(tmp_path: Path) -> None:
    program = bubblewrap()
    if program is None or not program.drops:
        pytest.skip("no namespaces here, or no root who can become another user")
    closed = f"; as root, and with no bound on the number of its processes: {tmp_path} is closed to other users"
    for mode, said in ((0o755, ""), (0o700, closed)):
        tmp_path.chmod(mode)
        sandbox = SandboxSettings(readable=[tmp_path])
        with ProcessScorer(RewardSettings(source=FunctionReward(path="tests.unit.sandbox.hostile:score"), sandbox=sandbox)) as scorer:
            assert scorer.guarantee == meaning(level(), network=False) + said


def test_a_function_behind_symbolic_links_is_importable(granted: Level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a project whose .venv is a link: one link lies in what is visible, the next one does not, and a place is named through both."""
    (tmp_path / "elsewhere" / "inner").mkdir(parents=True)
    (tmp_path / "code").mkdir()
    (tmp_path / "elsewhere" / "inner" / "scores.py").write_text("def f(response):\n    return 0.5\n")
    (tmp_path / "code" / "linked").symlink_to(tmp_path / "other")
    (tmp_path / "other").symlink_to("elsewhere")
    monkeypatch.syspath_prepend(tmp_path / "code")
    settings = SandboxSettings(readable=[tmp_path / "code" / "linked" / "inner"])
    with ProcessScorer(RewardSettings(source=FunctionReward(path="linked.inner.scores:f"), sandbox=settings)) as scorer:
        assert scorer.score([ScoreRequest("", "x", "", {}, True)]) == [Score(0.5)]


def test_why_there_are_no_namespaces_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for program, why in (("/bin/false", "exit status 1 of /bin/false"), ("/nothing/here", "FileNotFoundError of /nothing/here")):
        monkeypatch.setattr("shutil.which", lambda name, program=program: program)
        assert level_module._bubblewrap.__wrapped__() == (None, why)
    monkeypatch.setattr(level_module, "_bubblewrap", lambda: (None, "bwrap: not permitted"))
    assert meaning(Level.LANDLOCK, network=False).endswith("; no namespaces here: bwrap: not permitted)")


@pytest.mark.parametrize("asked", [Level.LIMITS, Level.LANDLOCK], ids=str)
def test_without_namespaces_no_socket_is_made_and_no_other_process_reached(
    asked: Level, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the kernel grants else: a process has no network and no processes of its own there. Its own children it may end."""
    if asked > level() or not filtered() or not kept_inside():
        pytest.skip("this kernel grants no such level, or no filter")
    monkeypatch.setattr(process, "level", lambda: asked)
    monkeypatch.setenv("RAY_AUTH_TOKEN", SECRET)
    names = [*SOCKETS, *NEIGHBOURS, "trace_the_run", "kill_the_run", "become_root_again", "mount_something"]
    if os.geteuid() == 0:  # whose privileges it has given up; of another user's processes Linux shows the files in /proc
        names += ["environment_of_the_run", "environment_of_everybody", "memory_of_the_run"]
    assert len(SOCKETS) >= 8 and len(NEIGHBOURS) >= 11
    settings = RewardSettings(source=FunctionReward(path="tests.unit.sandbox.hostile:score"), workers=1)
    with host(tmp_path) as meta, ProcessScorer(settings) as scorer:
        assert "no sockets" in scorer.guarantee and "signals" not in scorer.guarantee
        scores = scorer.score([ScoreRequest("", name, "", meta, True) for name in [*names, "a_child_that_is_killed"]])
    assert dict(zip(names, scores[:-1], strict=True)) == dict.fromkeys(names, Score(0.0)) and scores[-1] == Score(0.25)


def test_network_true_gives_a_sandbox_the_network(granted: Level, tmp_path: Path) -> None:
    settings = RewardSettings(source=FunctionReward(path="tests.unit.sandbox.hostile:score"), sandbox=SandboxSettings(network=True))
    with host(tmp_path) as meta, ProcessScorer(settings) as scorer:
        scores = scorer.score([ScoreRequest("", name, "", meta, True) for name in ("tcp_to_this_machine", "a_socket_to_the_hypervisor")])
        said = scorer.guarantee
    assert scores == [Score(1.0), Score(0.0)] and "no network" not in said and "no sockets" not in said


def test_a_required_level_that_the_machine_lacks_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(process, "level", lambda: Level.LIMITS)
    with pytest.raises(ConfigError, match=r"^reward\.sandbox\.require: namespaces, and this machine allows only limits"):
        check(RewardSettings(source=FunctionReward(path="tests.unit.sandbox.hostile:score"), sandbox=SandboxSettings(require="namespaces")))
    with pytest.raises(ConfigError, match=r"^reward\.sandbox\.readable: .*: there is no such file or directory$"):
        check(RewardSettings(source=FunctionReward(path="m:f"), sandbox=SandboxSettings(readable=[tmp_path / "nothing"])))
    with pytest.raises(ConfigError, match=r"^reward\.sandbox\.env: MEGARL_NOT_SET is not set$"):
        check(RewardSettings(source=FunctionReward(path="m:f"), sandbox=SandboxSettings(env=["MEGARL_NOT_SET"])))


def test_a_home_directory_on_pythons_path_stays_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home" / "project").mkdir(parents=True)
    (tmp_path / "home" / "my_scores.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path / "home" / "project")
    monkeypatch.syspath_prepend(tmp_path / "home")
    shown = readable(["my_scores"], [])
    assert tmp_path / "home" / "my_scores.py" in shown and tmp_path / "home" / "project" in shown
    assert not any((tmp_path / "home").is_relative_to(place) for place in shown)


def test_a_process_killed_while_starting_leaves_nothing(granted: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGARL_STARTING", mark := f"starting-{os.getpid()}-{granted}")
    for number in range(20):
        started = process.SandboxedProcess("megarl.rewards.worker", SandboxSettings(env=["MEGARL_STARTING"]))
        time.sleep(number / 2000)  # up to the moment at which bubblewrap has two processes, and a little beyond
        started.kill()
    assert leftovers(mark) == []

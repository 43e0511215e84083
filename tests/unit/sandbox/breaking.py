"""Its own process: what it does to itself costs this one sample."""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.unit.sandbox.attacks import HOSTILE, hostile


def raises(error: type[BaseException]) -> Callable[[dict[str, Any]], Any]:
    def attack(meta: dict[str, Any]) -> None:
        raise error

    return attack


HOSTILE.update(
    end_at_once=lambda meta: os._exit(3),
    leave=lambda meta: sys.exit(),
    interrupt=raises(KeyboardInterrupt),
    stop_iterating=raises(GeneratorExit),
    crash=lambda meta: ctypes.string_at(0),
    abort=lambda meta: os.abort(),
    ten_gigabytes=lambda meta: len(bytearray(10 << 30)),
    memory_piece_by_piece=lambda meta: len([bytearray(1 << 28) for _ in range(40)]),
    a_large_number=lambda meta: len(str(10 ** (10**8))),
)


@hostile
def recurse(meta: dict[str, Any]) -> int:
    return recurse(meta) + 1


@hostile
def recurse_in_c(meta: dict[str, Any]) -> int:
    nested: Any = []
    for _ in range(10**5):
        nested = [nested]
    return len(repr(nested))


@hostile
def stop_itself(meta: dict[str, Any]) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(60)


@hostile
def deaf_loop(meta: dict[str, Any]) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    while True:
        pass


@hostile
def no_alarm(meta: dict[str, Any]) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0)
    time.sleep(60)


@hostile
def exit_from_a_thread(meta: dict[str, Any]) -> float:
    thread = threading.Thread(target=os._exit, args=(5,))
    thread.start()
    thread.join()
    return 1.0


@hostile
def a_large_file(meta: dict[str, Any]) -> int:
    path = Path(os.environ["HOME"]) / "large"
    try:
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 1 << 31)
    except OSError:
        return 0
    finally:
        path.unlink(missing_ok=True)
    return 1


@hostile
def many_files(meta: dict[str, Any]) -> int:
    return len([open("/dev/null") for _ in range(10_000)])


@hostile
def a_deep_folder(meta: dict[str, Any]) -> int:
    os.chdir(os.environ["HOME"])
    with suppress(OSError):  # where there is a limit
        while True:
            os.mkdir("d")
            os.chdir("d")
    time.sleep(600)
    return 1


@hostile
def many_threads(meta: dict[str, Any]) -> int:
    for _ in range(2_000):
        threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
    return 0

"""Its own process: what it does to itself costs this one sample."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from tests.unit.sandbox.attacks import hostile


@hostile
def end_at_once(meta: dict[str, Any]) -> None:
    os._exit(3)


@hostile
def leave(meta: dict[str, Any]) -> None:
    sys.exit()


@hostile
def interrupt(meta: dict[str, Any]) -> None:
    raise KeyboardInterrupt


@hostile
def stop_iterating(meta: dict[str, Any]) -> None:
    raise GeneratorExit


@hostile
def crash(meta: dict[str, Any]) -> None:
    ctypes.string_at(0)


@hostile
def abort(meta: dict[str, Any]) -> None:
    os.abort()


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
def ten_gigabytes(meta: dict[str, Any]) -> int:
    return len(bytearray(10 << 30))


@hostile
def memory_piece_by_piece(meta: dict[str, Any]) -> int:
    return len([bytearray(1 << 28) for _ in range(40)])


@hostile
def a_large_number(meta: dict[str, Any]) -> int:
    return len(str(10 ** (10**8)))


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
def many_threads(meta: dict[str, Any]) -> int:
    for _ in range(2_000):
        threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
    return 0

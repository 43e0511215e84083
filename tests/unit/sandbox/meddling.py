"""Its children and its channel."""

import contextlib
import json
import os
import signal
import struct
import time
from typing import Any

from tests.unit.sandbox.attacks import HOSTILE, hostile


@hostile
def fork_and_return_twice(meta: dict[str, Any]) -> float:
    os.fork()
    return 0.25


HOSTILE.update(
    a_child_that_stays=lambda meta: _children(1),
    forty_children=lambda meta: _children(40),
    a_fork_bomb=lambda meta: _children(1000),
    a_child_that_dies_later=lambda meta: _children(1, seconds=0.05, status=9),
    garbage_on_every_descriptor=lambda meta: _send(b"\x00\x00\x00\x05hello"),
    an_endless_message=lambda meta: _send(b"\xff\xff\xff\xff" + b"x" * 100_000),
    deep_json=lambda meta: _say(b"[" * 60_000),
    a_score_of_another_sample=lambda meta: _say(b"[999, 1.0, {}, null]"),
    a_long_integer=lambda meta: _say(b"[" + b"9" * 50_000 + b"]"),
    ready_again=lambda meta: _say(b'["ready"]'),
    refused_late=lambda meta: _say(b'["refused", "path: this run must end"]'),
)


@hostile
def a_daemon(meta: dict[str, Any]) -> float:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP})
            time.sleep(600)
        os._exit(0)
    os.wait()
    return 0.25


@hostile
def a_pickle_on_every_descriptor(meta: dict[str, Any]) -> float:
    payload = f"cposix\nsystem\n(S'touch {meta['touched']}'\ntR.".encode()
    return _send(struct.pack("!i", len(payload)) + payload)


@hostile
def half_a_message(meta: dict[str, Any]) -> None:
    _send(b"\x00\x00\x10\x00")
    time.sleep(60)


@hostile
def a_score_that_is_nan(meta: dict[str, Any]) -> float:
    json.dumps = lambda *_, **__: "[0, NaN, {}, null]"
    return 1.0


@hostile
def a_score_that_is_text(meta: dict[str, Any]) -> float:
    json.dumps = lambda *_, **__: '[0, "1", {}, null]'
    return 1.0


@hostile
def a_part_that_is_text(meta: dict[str, Any]) -> float:
    json.dumps = lambda *_, **__: '[0, 1.0, {"length": "1"}, null]'
    return 1.0


@hostile
def an_integer_beyond_every_float(meta: dict[str, Any]) -> float:
    json.dumps = lambda *_, **__: f"[0, {10**400}, {{}}, null]"
    return 1.0


@hostile
def close_every_descriptor(meta: dict[str, Any]) -> float:
    os.closerange(0, 256)
    return 1.0


def _children(count: int, seconds: float = 600, status: int = 0) -> float:
    """Children that sleep, and then end with this status."""
    for _ in range(count):
        if os.fork() == 0:
            time.sleep(seconds)
            os._exit(status)
    return 0.25


def _send(data: bytes) -> float:
    """On every descriptor, before the score."""
    for descriptor in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(descriptor, data)
    return 1.0


def _say(message: bytes) -> float:
    """A message in the run's own form."""
    return _send(struct.pack("!I", len(message)) + message)

"""Containers of a hosted service, Modal, through its client (`pip install megarl[modal]`; written for modal 1.6.4).

An image needs `sh` and `timeout`.
"""

import importlib
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from megarl.config import ModalContainers, SandboxSettings
from megarl.environments.containers.container import ContainerGone, Kept, Ran
from megarl.errors import Absent
from megarl.text.display import one_line

LONGEST_S = 6 * 3600  # after which the service ends a container whose run was killed
KILLED, GRACE_S = 137, 15
MERGED = 'exec 2>&1; exec "$@"'  # the service has two streams, and a program's output is one
TOKENS = ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET")


def client() -> Any:
    """Import and return the service's client. Raises Absent if it is not installed."""
    try:
        return importlib.import_module("modal")
    except ImportError as error:
        raise Absent(f"environment.source.containers.type=modal: {error} (pip install megarl[modal])") from None


def check() -> None:
    """Raise Absent if the client or the service's tokens are missing here."""
    client()
    for name in TOKENS:
        if name not in os.environ:
            raise Absent(f"environment.source.containers.type=modal: {name} is not set")


class ModalContainer:
    """A sandbox of Modal.

    Args:
        source: the service's settings.
        image: the image, from a registry.
        sandbox: memory and network.
        start_s: time limit of its start, which may have to fetch the image.
    """

    home = "/tmp"

    def __init__(self, source: ModalContainers, image: str, sandbox: SandboxSettings, start_s: float) -> None:
        self._modal, self._source, self._image, self._settings, self._start_s = client(), source, image, sandbox, start_s
        self._lock, self._stopped = threading.Lock(), False
        self._sandbox: Any = None

    def start(self) -> None:
        """Start it. Raises ContainerGone with what the service says if that fails."""
        modal = self._modal
        with self._service_errors():
            self._sandbox = modal.Sandbox.create(
                *("sleep", "infinity"),
                app=modal.App.lookup(self._source.app, create_if_missing=True),
                image=modal.Image.from_registry(self._image),
                timeout=LONGEST_S,
                memory=(256, int(self._settings.memory_gb * 1024)),  # what is reserved, and the limit, in MiB
                block_network=not self._settings.network,
            )
        if self._stopped:  # meanwhile
            self._terminate()
            raise ContainerGone("it was stopped")
        self._inside(["true"], self._start_s, 0)

    def exec(self, command: str, directory: str, within_s: float, most: int) -> Ran:
        """Run a shell command. What it leaves in the background goes on until the container is stopped. Raises ContainerGone."""
        return self._inside(["sh", "-c", command], within_s, most, directory)

    def upload(self, path: str, data: bytes) -> None:
        """Write a file. Raises OSError and ContainerGone."""
        with self._service_errors():
            self._sandbox.filesystem.write_bytes(data, path)

    def download(self, path: str, most: int) -> bytes:
        """Return a file. Raises OSError and ContainerGone."""
        with self._service_errors():
            data: bytes = self._sandbox.filesystem.read_bytes(path)
        if len(data) > most:
            raise OSError(f"{len(data)} bytes, more than {most}")
        return data

    def stop(self) -> None:
        """Remove it. Can be called twice, and from another thread."""
        with self._lock:
            if not self._stopped:
                self._stopped = True
                self._terminate()

    def _terminate(self) -> None:
        if self._sandbox is not None:
            with suppress(self._modal.exception.Error):  # it has ended by itself
                self._sandbox.terminate()

    def _inside(self, words: list[str], within_s: float, most: int, directory: str | None = None) -> Ran:
        limited = ["timeout", "--signal=KILL", f"{within_s:g}", *words]
        kept, begun = Kept(most), time.monotonic()
        with self._service_errors():
            process = self._sandbox.exec("sh", "-c", MERGED, "sh", *limited, workdir=directory, timeout=int(within_s) + GRACE_S, text=False)
            for part in process.stdout:
                kept.write(part)
            code = int(process.wait())
        if code == KILLED and time.monotonic() - begun >= within_s:
            return Ran(code, kept.value(), f"not done after {within_s:g} s")
        if code < 0:  # the service has ended it
            raise ContainerGone("timeout")
        return Ran(code, kept.value())

    @contextmanager
    def _service_errors(self) -> Iterator[None]:
        """Raise what the service says of a file as OSError, and anything else as ContainerGone."""
        errors = self._modal.exception
        try:
            yield
        except errors.SandboxFilesystemError as error:
            raise OSError(one_line(str(error), 300)) from None
        except errors.Error as error:
            raise ContainerGone(one_line(f"{type(error).__name__}: {error}", 300)) from None

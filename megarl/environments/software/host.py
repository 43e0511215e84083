"""Software tasks: the model works in a container by calls of tools, until a turn has none. Then tests in another container score its files.

Whatever it did to the first container but to the task's files, outside of `.git`, has no influence on the second one.
"""

from __future__ import annotations

import asyncio
import posixpath
import shlex
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from megarl.config import CommandContainers, EnvironmentSettings, LocalContainers, SoftwareEnvironment
from megarl.data.calls import JSON, Calls
from megarl.environments.containers.container import Container, ContainerGone, Ran
from megarl.environments.protocol import EnvironmentFailed, Turn
from megarl.environments.software.rows import ANSWERS, ROWS, BadTask, Task
from megarl.environments.tools import AnsweredCalls, read_call
from megarl.text.display import one_line

Done = TypeVar("Done")
SCHEMAS: dict[str, dict[str, Any]] = {
    "bash": {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Runs a shell command in the task's directory and returns what it prints. Files stay, processes do not.",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string", "description": "the command"}},
                "required": ["command"],
            },
        },
    },
    "edit": {
        "type": "function",
        "function": {
            "name": "edit",
            "description": "Replaces a text that occurs exactly once in a file. With an empty old text it makes a new file.",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string", "description": "the file, from the task's directory"},
                    "old": {"type": "string", "description": "the text to replace"},
                    "new": {"type": "string", "description": "the text in its place"},
                },
                "required": ["path", "old", "new"],
            },
        },
    },
}
ARGUMENT_BYTES = 100_000  # Linux takes words of 131,072
FILE_BYTES = 4 << 20  # of a file that is edited
CHANGED_BYTES = 64 << 20  # of all the files that the model has changed
LISTED = r"find . -name .git -prune -o \( -type f -o -type l \)"
# A new history, so that no version but the one of the task is in it. Only if there is one: git may be missing.
HISTORY = (
    "if [ -e .git ]; then rm -rf .git && git init -q . && git add -A"
    " && git -c user.name=task -c user.email=task@localhost commit -q --no-verify --no-gpg-sign -m task; fi"
)


class SoftwareHost:
    """Plays software tasks; at most `settings.workers` of them use their containers at a time."""

    def __init__(self, settings: EnvironmentSettings, calls: Calls = JSON) -> None:
        assert isinstance(settings.source, SoftwareEnvironment)
        self.source, self.settings, self.calls = settings.source, settings, calls
        self.containers = set[Container]()
        self.closed = False
        # A pool as long-lived as the host: a sandboxed process dies with the thread that started it.
        self._threads = ThreadPoolExecutor(settings.workers, thread_name_prefix="containers")

    def open(self) -> SoftwareEpisode:
        """Return a new episode."""
        return SoftwareEpisode(self)

    def container(self, image: str | None) -> Container:
        """Return a new container, not started yet. Raises BadTask if there can be none of this image."""
        kind, settings, start_s = self.source.containers, self.settings, self.source.setup_s
        if isinstance(kind, LocalContainers):
            from megarl.environments.containers.local import LocalContainer

            if image is not None:
                raise BadTask(f"image: {image!r:.200} needs containers of another type than local")
            return LocalContainer(settings.sandbox, self.source.processes, start_s)
        if image is None:
            raise BadTask(f"image: the row has none, and containers of type {kind.type} need one")
        if image.startswith("-"):
            raise BadTask(f"image: {image!r:.200} begins with a hyphen, as options do")
        if isinstance(kind, CommandContainers):
            from megarl.environments.containers.commands import CommandContainer

            return CommandContainer(kind, image, settings.sandbox, self.source.processes, start_s)
        from megarl.environments.containers.hosted import ModalContainer

        return ModalContainer(kind, image, settings.sandbox, start_s)

    async def apart(self, work: Callable[[], Done]) -> Done:
        """Return `work()`, called in a thread of the pool. Raises EnvironmentFailed if a container has died."""
        doing = asyncio.get_running_loop().run_in_executor(self._threads, work)
        try:
            return await asyncio.shield(doing)
        except asyncio.CancelledError:
            await asyncio.wait([doing])  # a thread cannot be cancelled
            raise
        except ContainerGone as gone:
            raise EnvironmentFailed(one_line(f"container died: {gone}")) from None
        except BadTask as fault:
            raise EnvironmentFailed(f"bad task: {fault}") from None

    def close(self) -> None:
        """Stop every container. Can be called twice."""
        self.closed = True
        for container in tuple(self.containers):
            container.stop()
        self.containers.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)


class SoftwareEpisode:
    """One episode; see `hosts.Episode`."""

    def __init__(self, host: SoftwareHost) -> None:
        self._host, self._source = host, host.source
        self._calls = AnsweredCalls(host.calls.format, lambda call: self._host.apart(partial(self._call, call)))
        self._task: Task
        self._container: Container
        self._directory: str

    async def reset(self, seed: int, task: dict[str, Any] | None) -> Turn:
        """Start the container and lay the task into it. The data's prompt is kept as it is."""
        row = {} if task is None else {ANSWERS[self._source.rows]: task["answer"], **task["meta"]}
        await self._host.apart(partial(self._begin, row))
        return Turn(None)

    async def step(self, text: str, tokens: Sequence[int], finished: bool) -> Turn:
        """Answer the calls of a turn. A turn without any ends the episode: the tests run, unless a limit has cut it off."""
        if answers := await self._calls.answer(text, finished):
            return Turn(answers, 0.0, False, self._calls.info)
        solved = finished and await self._host.apart(self._solved)
        return Turn(None, float(solved), True, {**self._calls.info, "solved": float(solved)})

    async def close(self) -> None:
        """Stop the container."""
        if hasattr(self, "_container"):
            await self._host.apart(partial(self._ended, self._container))

    def _started(self, image: str | None) -> Container:
        container = self._host.container(image)
        self._host.containers.add(container)
        try:
            if self._host.closed:  # by now
                raise ContainerGone("the run has ended")
            container.start()
        except BaseException:
            self._ended(container)
            raise
        return container

    def _ended(self, container: Container) -> None:
        container.stop()
        self._host.containers.discard(container)

    def _begin(self, row: dict[str, Any]) -> None:
        self._task = ROWS[self._source.rows](row)
        self._container = self._started(self._task.image)
        self._directory = self._laid(self._container)
        hidden = " ".join(map(shlex.quote, self._task.hidden))
        before = f"{LISTED} -print0 | sort -z > {self._file('before')} && touch {self._file('begun')}"
        self._do(self._container, f"{f'rm -rf -- {hidden} && ' if hidden else ''}{HISTORY} && {before}")

    def _file(self, name: str) -> str:
        return f"{self._container.home}/.megarl-{name}"

    def _laid(self, container: Container) -> str:
        """Lay the task into a container, and set it up. Return its directory."""
        task = self._task
        directory = task.directory or f"{container.home}/task"
        if task.folder is not None or task.files:
            packed = f"{container.home}/.megarl-task"
            self._write(container, packed, task.archive())
            place = shlex.quote(directory)
            self._do(container, f"mkdir -p {place} && tar --no-same-owner -xf {packed} -C {place} && rm {packed}", container.home)
        if task.setup:
            self._do(container, f"{task.shell}\n{task.setup}", directory)
        return directory

    def _do(self, container: Container, command: str, directory: str | None = None) -> None:
        """Run a command of the set-up. Raises BadTask if it fails."""
        ran = container.exec(command, directory or self._directory, self._source.setup_s, 2000)
        if ran.ended or ran.code:
            lines = ran.output.decode(errors="replace").strip().splitlines()
            raise BadTask(one_line(f"setup: {ran.ended or f'exit status {ran.code}'}: {lines[-1] if lines else command}", 500))

    def _write(self, container: Container, path: str, data: bytes) -> None:
        try:
            container.upload(path, data)
        except OSError as error:
            raise BadTask(f"setup: {posixpath.basename(path)} cannot be written: {error}") from None

    def _call(self, call: str) -> tuple[str, bool]:
        """Run a call. Return the answer, and whether the call succeeded."""
        try:
            name, arguments = read_call(self._host.calls, call, self._source.tools)
            expected = list(SCHEMAS[name]["function"]["parameters"]["properties"])
            if sorted(arguments) != sorted(expected) or not all(isinstance(value, str) for value in arguments.values()):
                raise ValueError(f"{name} takes the texts {', '.join(expected)}")
            if any("\0" in value or len(value.encode()) > ARGUMENT_BYTES for value in arguments.values()):
                raise ValueError(f"{name} takes no text with a null character, or of more than {ARGUMENT_BYTES} bytes")
        except ValueError as fault:
            return f"error: {fault}", False
        if name == "bash":
            return self._bash(arguments["command"])
        return self._edit(arguments["path"], arguments["old"], arguments["new"])

    def _bash(self, command: str) -> tuple[str, bool]:
        ran = self._container.exec(f"{self._task.shell}\n{command}", self._directory, self._host.settings.step_s, self._source.output_bytes)
        return _command_report(ran), ran.ended is None and ran.code == 0

    def _edit(self, path: str, old: str, new: str) -> tuple[str, bool]:
        place = posixpath.join(self._directory, path)
        try:
            if not old:
                with suppress(OSError):
                    self._container.download(place, FILE_BYTES)
                    return f"error: {path:.200} exists: give the text to replace", False
                self._container.upload(place, new.encode())
                return "made", True
            text = self._container.download(place, FILE_BYTES).decode()
            if (times := text.count(old)) != 1:
                return f"error: the old text occurs {times} times in {path:.200}, not once", False
            self._container.upload(place, text.replace(old, new).encode())
        except (OSError, UnicodeError) as error:
            return f"error: {path:.200}: {error}"[:500], False
        return "replaced", True

    def _solved(self) -> bool:
        """Lay the model's files into a new container, and return whether the tests pass."""
        if (changed := self._changed()) is None:
            return False
        self._ended(self._container)  # before the next one is started
        files, gone = changed
        container = self._started(self._task.image)
        try:
            directory, home = self._laid(container), container.home
            kept, put, lost = (f"{home}/.megarl-{name}" for name in ("kept", "changed", "lost"))
            own = " ".join(map(shlex.quote, dict.fromkeys([*self._task.hidden, *self._task.kept])))
            self._write(container, put, files)
            self._write(container, lost, gone)
            changes = f"xargs -0 rm -f -- < {lost}; tar --no-same-owner -xf {put}"
            if own:
                changes = f"tar --ignore-failed-read -cf {kept} -- {own} 2>&1; {changes}; rm -rf -- {own}; tar --no-same-owner -xf {kept}"
            if self._task.tests:
                changes += f"; rm -rf -- {' '.join(map(shlex.quote, self._task.tests))}"
            # What cannot be laid there, such as a link at the place of a folder, is not: then the tests find what they find.
            container.exec(changes, directory, self._source.setup_s, 2000)
            for path, text in self._task.tests.items():
                try:
                    container.upload(posixpath.join(directory, path), text.encode())
                except OSError:  # the model has put something else at the place of a folder
                    return False
            ran = container.exec(f"{self._task.shell}\n{self._task.test}", directory, self._source.test_s, 2000)
            return ran.ended is None and ran.code == 0
        finally:
            self._ended(container)

    def _changed(self) -> tuple[bytes, bytes] | None:
        """Return what the model has changed: a tar file, and the paths of what is gone, each ending in a null; None if that is too much."""
        after, changed, lost = (self._file(name) for name in ("after", "changed", "lost"))
        ran = self._container.exec(
            f"{LISTED} -print0 | sort -z > {after} && comm -z -23 {self._file('before')} {after} > {lost}"
            f" && {LISTED} -cnewer {self._file('begun')} -print0 | tar --null --no-recursion -T - -cf {changed}",
            self._directory,
            self._source.setup_s,
            2000,
        )
        if ran.ended or ran.code:
            return None
        try:
            return self._container.download(changed, CHANGED_BYTES), self._container.download(lost, CHANGED_BYTES)
        except OSError:
            return None


def _command_report(ran: Ran) -> str:
    """What the model reads of a command."""
    output = ran.output.decode(errors="replace")
    if ran.ended:
        return f"{output}\nerror: {ran.ended}".lstrip("\n")
    return f"{output}\nexit status {ran.code}".lstrip("\n") if ran.code else output

"""Errors that are not bugs of megarl. A module of its own, so that code without a configuration need not import one."""

from __future__ import annotations

import difflib
import errno
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

# System errors caused by a path that the user gave, or by what lies there.
_OF_PATHS = {
    errno.EACCES,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.ENXIO,
    errno.EPERM,
    errno.EROFS,
}


class ConfigError(ValueError):
    """Bad input from the user: one line that names the dotted key and the numbers."""


class DamagedFile(ConfigError):
    """A file of a checkpoint cannot be read, or has changed since it was written. `file`: its path."""

    def __init__(self, file: str, what: str) -> None:
        self.file, self.what = file, what
        super().__init__(f"checkpoint: {file}: {what}")

    def __reduce__(self) -> tuple[type[DamagedFile], tuple[str, str]]:
        return type(self), (self.file, self.what)


class Unfit(ConfigError):
    """A machine lacks something that no setting names: bad input from whoever starts a run there, or in a Slurm job the machine's fault."""


class Absent(ConfigError):
    """Something that a run needs is not on this machine, and may well be on the machines of the run (`unchecked.where_present`)."""


class Stopped(RuntimeError):
    """Stopped by an external failure, or on purpose; the message says everything, and no traceback is shown."""


class SaveError(Stopped):
    """A step was not saved; the message is one line. What was saved before is untouched."""


class ContentLost(SaveError):
    """What was to be saved was lost with its machine: a run continues from what was saved before."""


class Alarmed(Stopped):
    """The run was stopped by an alarm, as `train.on_alarm=stop` asks; the message is the alarm's."""


@contextmanager
def naming_files(verb: str) -> Iterator[None]:
    """Mark a block that only reads and writes files which the user named. Raises ConfigError for a path that cannot be read or written."""
    try:
        yield
    except OSError as error:
        if error.errno not in _OF_PATHS or error.filename is None:
            raise
        raise ConfigError(f"{verb}: {os.fsdecode(error.filename)}: {error.strerror}") from None


def refuse_all(*checks: Callable[[], object]) -> None:
    """Run every check. Raises ConfigError with the lines of all that refuse, each line once."""
    lines = list[str]()
    for check in checks:
        try:
            check()
        except ValueError as error:
            if not isinstance(error, ConfigError) and type(error) is not ValueError:
                raise
            lines += str(error).splitlines()
    if lines:
        raise ConfigError("\n".join(dict.fromkeys(lines)))


def hint(name: str, known: Iterable[str]) -> str:
    """Text to append to the refusal of an unknown name: the most similar known name, or nothing."""
    like = difflib.get_close_matches(name, sorted(known), n=1)
    return f" (did you mean {like[0]!r}?)" if like else ""

"""Errors that are not bugs of megarl. A module of its own, so that code without a configuration need not import one."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable


class ConfigError(ValueError):
    """Bad input from the user: one line that names the dotted key and the numbers."""


class Unfit(ConfigError):
    """What a machine lacks, and no configuration names. Bad input of whoever starts a run there; in a Slurm job the machine's fault."""


class Stopped(RuntimeError):
    """Stopped by an external failure, or on purpose; the message says all, and no traceback is shown."""


class SaveError(Stopped):
    """A step was not saved: one line. What was saved before is untouched."""


class ContentLost(SaveError):
    """What was to be saved was lost with its machine: a run goes on from what was saved before."""


class Alarmed(Stopped):
    """`train.on_alarm=stop`, and there was an alarm: its message."""


def refuse_all(*checks: Callable[[], object]) -> None:
    """Makes every check. ConfigError with the lines of all that refuse, each once."""
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
    """What follows the refusal of an unknown name: the known one that is most like it, or nothing."""
    like = difflib.get_close_matches(name, sorted(known), n=1)
    return f" (did you mean {like[0]!r}?)" if like else ""

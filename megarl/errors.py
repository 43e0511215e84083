"""The errors that are more than a fault of ours. A module of its own, so that what needs no configuration imports none."""

from __future__ import annotations


class ConfigError(ValueError):
    """Bad input from the user: one line that names the dotted key and the numbers."""


class Stopped(RuntimeError):
    """The world outside has ended the run, and one line says all of it: no traceback is shown."""


class SaveError(Stopped):
    """A step was not saved: one line. What was saved before is untouched."""


class Alarmed(Stopped):
    """A run was to stop at the first alarm: its message."""

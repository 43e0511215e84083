"""The errors that are more than a fault of ours. A module of its own, so that what needs no configuration imports none."""

from __future__ import annotations


class ConfigError(ValueError):
    """Bad input from the user: one line that names the dotted key and the numbers."""


class SaveError(RuntimeError):
    """A step was not saved: one line. What was saved before is untouched."""

"""The error that a user can mend. A module of its own, so that what needs no configuration imports none."""

from __future__ import annotations


class ConfigError(ValueError):
    """Bad input from the user: one line that names the dotted key and the numbers."""

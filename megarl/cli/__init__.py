"""The command line: its verbs' arguments, `config` and `init`."""

from megarl.cli.command import main

__all__ = ["main"]

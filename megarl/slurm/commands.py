"""Call Slurm's commands."""

from __future__ import annotations

import subprocess

from megarl.errors import ConfigError, Stopped
from megarl.text import one_line

ANSWER_S = 60.0


class NoAnswer(ConfigError):
    """A command does not exist, or has failed."""


def call(*command: str) -> str:
    """Run a command and return what it prints. Raises NoAnswer with the command's message if it fails, Stopped if it cannot be started."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S)
    except FileNotFoundError:
        raise NoAnswer(f"slurm: no {command[0]} on this machine: submit from one that has Slurm (--dry-run prints the script)") from None
    except OSError as error:  # not of a file that the user named
        raise Stopped(f"slurm: {command[0]}: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"slurm: {command[0]} has not answered within {ANSWER_S:g} s") from None
    if done.returncode:
        raise NoAnswer(f"slurm: {command[0]}: {one_line(done.stderr or done.stdout)}")
    return done.stdout.strip()

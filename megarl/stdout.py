"""What a verb was asked to print."""

from __future__ import annotations

import os
import sys

from megarl.errors import Stopped


def say(*lines: str) -> None:
    """Prints what was asked for. Who has closed the pipe wants no more of it (`| head`): the exit status stays what it is.

    Raises Stopped where it cannot be written.
    """
    try:
        for line in lines:
            print(line.encode("utf-8", "backslashreplace").decode())
        print(end="", flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what the interpreter would still write there
        if not isinstance(error, BrokenPipeError):
            raise Stopped(f"stdout: {error.strerror}") from None

"""Print the output of a verb."""

import os
import sys

from megarl.errors import Stopped


def say(*lines: str) -> None:
    """Print lines to stdout. If the reader has closed the pipe (`| head`), drop the rest and leave the exit status as it is.

    Raises Stopped if they cannot be written.
    """
    try:
        for line in lines:
            print(line.encode("utf-8", "backslashreplace").decode())
        print(end="", flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # takes what the interpreter would still flush there
        if not isinstance(error, BrokenPipeError):
            raise Stopped(f"stdout: {error.strerror}") from None

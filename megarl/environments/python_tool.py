"""Run one Python program in the sandbox: `python -m megarl.environments.python_tool CHANNEL`, started only by tools.py.

The process runs a single program, so a program that tampers with it affects no other. Messages sent, in JSON: ["ready"], [output of the
program].
"""

import ast
import io
import os
import pickle
import resource
import sys
import traceback

from megarl.sandbox.bounded import Answer, serve
from megarl.sandbox.channel import Channel


class _Bounded(io.TextIOBase):
    """A text stream that keeps the first `most` + 1 characters written, so that the reader can tell whether there were more."""

    def __init__(self, most: int) -> None:
        self.text, self._most = "", most

    def write(self, text: str) -> int:
        if len(self.text) <= self._most:
            self.text += str(text)[: self._most + 1 - len(self.text)]
        return len(text)


def work(channel: Channel, answer: Answer) -> None:
    """Receive a program, run it, and send its output, which includes the value of its last statement if that is an expression."""
    program, seconds, most = pickle.loads(channel.receive())
    answer("ready")
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 2))
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):  # output that bypasses sys.stdout is discarded
        os.dup2(nowhere, descriptor)
    sys.stdout = sys.stderr = printed = _Bounded(most)
    space = {"__name__": "__main__"}
    try:
        tree = ast.parse(program)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "<tool>", "exec"), space)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "<tool>", "eval"), space)
            if value is not None:
                print(repr(value), file=printed)
    except BaseException as error:  # including SystemExit
        printed.write("".join(traceback.format_exception_only(error)))
    answer(printed.text)


if __name__ == "__main__":
    serve(work)

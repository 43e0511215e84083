"""Tools: what they answer, and that no call reaches anything but its own sandbox, or lasts."""

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from megarl.config import EnvironmentSettings, SandboxSettings, ToolsEnvironment
from megarl.data.calls import JSON, Calls
from megarl.data.turns import TurnTokens
from megarl.environments.calculator import calculate
from megarl.environments.protocol import Turn
from megarl.environments.tools import SCHEMAS, ToolsHost
from megarl.sandbox.level import Level, level
from tests.unit.sandbox.test_hostile import SECRET, host, leftovers

SETTINGS = EnvironmentSettings(
    source=ToolsEnvironment(tools=["calculator", "python"], output_chars=100), step_s=1.0, workers=2, sandbox=SandboxSettings(memory_gb=1)
)


def answered(turns: list[str], settings: EnvironmentSettings = SETTINGS, finished: bool = True, calls: Calls = JSON) -> list[Turn]:
    async def body() -> list[Turn]:
        tools = ToolsHost(settings, calls)
        one = tools.open()
        assert await one.reset(1, None) == Turn(None)
        try:
            return [await one.step(text, [], finished) for text in turns]
        finally:
            tools.close()

    return asyncio.run(body())


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def said(turn: Turn) -> list[str]:
    assert turn.messages is not None and all(message["role"] == "tool" for message in turn.messages)
    return [message["content"] for message in turn.messages]


def test_the_calculator_calculates_and_says_what_it_cannot() -> None:
    sound = ("1+2*3", "(4 - 1) ** 5 // 7 % 11", "-2**2 + 1.5", "10 / 4", "2 ** -3", "7 // 2 * 1e20", "10 ** -101", "(-0.5) ** 401")
    for expression in sound:
        assert float(calculate(expression)) == eval(expression)
    bad = ("1/0", "9**9**9", "x + 1", "__import__('os')", "1 +", "", "2**0.5j", "(-8)**0.5", "1e400", "'a'*9", "(" * 250, "10.0**101")
    for expression in bad:
        with pytest.raises(ValueError, match=r"."):
            calculate(expression)
    assert calculate("-" * 200 + "1") == "1"
    with pytest.raises(ValueError, match="257 characters, more than 256"):
        calculate("1" * 257)


def test_calls_in_another_form_are_answered(published: dict[str, PreTrainedTokenizerBase]) -> None:
    """Each published template's own way to write a call; arguments are texts, whatever they look like."""
    for name in ("qwen3.5", "glm-4.5", "deepseek-r1", "llama-3.1"):
        turns = TurnTokens(published[name], tools=[SCHEMAS["calculator"]])
        form = turns.template.calls
        assert form is not None
        message = {"role": "assistant", "content": None, "tool_calls": [function("calculator", expression="6*7")]}
        [text] = turns.template.texts([turns.template.chat([{"role": "user", "content": "Q!"}, message], "the chat")], generation=False)
        mark = form.marks[0] or '{"name"'
        turn = mark + str(text).rpartition(mark)[2].partition(turns.template.end)[0]
        worse = turn.replace("calculator", "cal culator").replace('"expression":', '"expression"')
        first, second = answered([turn, worse], calls=Calls(form, [SCHEMAS["calculator"]]))
        assert said(first) == ["42"]
        assert second.done if name == "llama-3.1" else said(second)[0].startswith("error: a call is ")


def function(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def test_malformed_tool_calls_get_an_error_as_answer() -> None:
    both = call("calculator", expression="6*7") + "text between" + call("python", code="x = 5\nprint('sum', x)\nx * 2")
    malformed = {
        "<tool_call>{oops</tool_call>": "error: a call is JSON",
        "<tool_call>[1]</tool_call>": 'error: a call has a text "name"',
        call("search", q="x"): "error: there is no tool 'search' (there are: calculator, python)",
        call("calculator", formula="1"): "error: calculator takes one argument, the text 'expression'",
        call("calculator", expression="1/0"): "error: division by zero",
        "<tool_call>": "error: a call is JSON",
    }
    turns = answered([both, *malformed, call("calculator", expression="1") * 10, "The answer is 42."])
    assert said(turns[0]) == ["42", "sum 5\n10\n"] and turns[0].info == {"tool_calls": 2, "tool_errors": 0}
    for turn, expected in zip(turns[1:-2], malformed.values(), strict=True):
        assert said(turn)[0].startswith(expected) and not turn.done
    assert said(turns[-2]) == ["1"] * 8 + ["error: 10 calls in one turn, more than 8"]
    assert turns[-1].done and turns[-1].messages is None and turns[-1].info == {"tool_calls": 17, "tool_errors": 7}
    assert answered([both], finished=False)[0].done  # a call that was cut is none


HERE = "import json, os, socket, sys, time\nmeta = json.loads({meta!r})\n"
OUT = "(shut out)"  # an exception tells the program so, where the machine grants that
# What each program does, and how the answer begins.
ATTACKS = {
    "for _ in range(1000):\n    if os.fork() == 0:\n        time.sleep(600)\n": "",
    "while True: pass": "error: ",
    "while True:\n    try: time.sleep(99)\n    except BaseException: pass": "error: not done",
    "x = [bytearray(1 << 28) for _ in range(40)]": "MemoryError",
    "f = open(os.environ['HOME'] + '/f', 'wb')\nfor _ in range(4096): f.write(bytes(1 << 20))": "OSError",
    "while True: print('x' * 10**6)": "error: ",
    "for _ in range(3000): print('x' * 10**6)": "xxx",
    "for _ in range(300): os.write(1, b'x' * 10**7); os.write(2, b'x' * 10**7)\nprint('done')": "done",
    "socket.create_connection(('127.0.0.1', meta['tcp_port']), 1)": OUT,
    "s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); socket.create_connection(('8.8.8.8', 53), 1)": OUT,
    "print(open(meta['secret_file']).read())": OUT,
    "print(dict(os.environ))": "",
    "open(meta['touched'], 'w')": OUT,
    "os.kill(meta['driver'], 9)": OUT,
    "import ctypes; ctypes.string_at(0)": "error: the program ended the interpreter (SIGSEGV)",
    "os._exit(0)": "error: the program ended the interpreter (exit status 0)",
    "import struct\nfor fd in range(3, 64):\n    try: os.write(fd, struct.pack('!I', 5) + b'[1,2]')\n    except OSError: pass": "error: ",
    "import struct\nfor fd in range(3, 64):\n    try: os.write(fd, struct.pack('!I', 1) + b'5')\n    except OSError: pass": "error: ",
    "class Bad(Exception):\n    def __str__(self): raise ValueError\nraise Bad": "",
    "def f(): return f()\nf()": "RecursionError",
    "sys.stdout = None\nprint('x')": "",
}


def test_a_program_is_limited_in_time_and_leaves_nothing_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", SECRET)
    monkeypatch.setenv("MEGARL_TOOL", mark := f"tool-{os.getpid()}")
    # Long enough for a sound program on a busy machine.
    settings = SETTINGS.model_copy(update={"step_s": 3.0, "sandbox": SandboxSettings(memory_gb=1, env=["MEGARL_TOOL"])})
    with host(tmp_path) as meta:
        programs = [HERE.format(meta=json.dumps(meta)) + body for body in ATTACKS]
        turns = answered(
            [text for program in programs for text in (call("python", code=program), call("python", code="print(6 * 7)"))], settings
        )
    answers = [said(turn)[0] for turn in turns]
    assert answers[1::2] == ["42\n"] * len(ATTACKS)
    for (body, begin), answer in zip(ATTACKS.items(), answers[::2], strict=True):
        if begin == OUT:
            begin = ""
            assert level() < Level.NAMESPACES or "Error: " in answer or answer.startswith("error: not done"), (body, answer)
        assert answer.startswith((begin, "error: not done after 3 s")) and len(answer) < 150 and SECRET not in answer, (body, answer)
    assert not (tmp_path / "touched").exists()
    deadline = time.monotonic() + 30
    while leftovers(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert leftovers(mark) == []
    out, err = capfd.readouterr()
    assert out == "" and len(err) < 1 << 16

"""Functions of a user's own as tools: told of by signature and docstring, called in a real sandboxed process."""

from pathlib import Path
from typing import Any

import pytest

from megarl.config import ConfigError, EnvironmentSettings, SandboxSettings, ToolsEnvironment
from megarl.environments.checks import tool_schemas
from megarl.environments.own_tools import OwnTools
from tests.unit.environments.test_tools import answered, call, said

FUNCTIONS = '''
import os, random, time
from typing import Literal

CALLS = []

def search(query: str, most: int = 3, exact: bool = False, kinds: list[str] | None = None, order: Literal["new", "old"] = "new") -> list:
    """Searches
    the handbook.

    Args:
        query: a few words,
            as they come.
        most (int): how many passages.

    Returns:
        The passages.
    """
    return [query] * most

async def roll(sides: int):
    """Rolls a die."""
    return f"{random.randrange(sides)} of {sides}"

def fails(how: str):
    """Goes wrong."""
    if how == "sleeps":
        time.sleep(60)
    if how == "deaf":
        import signal
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGALRM})
        time.sleep(60)
    if how == "ends":
        os._exit(3)
    if how == "reads":
        return open(os.path.expanduser("~root/.bashrc")).read()
    raise KeyError(how)

def long(letter: str):
    """Says much."""
    return letter * 100_000

def silent(x: str):
    return x

def starred(*x: str):
    """Takes anything."""
'''


@pytest.fixture(autouse=True)
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_tools.py").write_text(FUNCTIONS)
    (tmp_path / "ends.py").write_text("import os; os._exit(4)\n")
    monkeypatch.syspath_prepend(tmp_path)


def settings(*tools: str, **more: Any) -> EnvironmentSettings:
    source = ToolsEnvironment(tools=list(tools), **more)
    return EnvironmentSettings(source=source, step_s=1.0, workers=2, sandbox=SandboxSettings(memory_gb=2))


def test_a_tools_schema_comes_from_its_types_and_docstring() -> None:
    found = tool_schemas(settings("calculator", "my_tools:search", "my_tools:roll"))
    assert found is not None and [one["function"]["name"] for one in found] == ["calculator", "search", "roll"]
    assert found[1] == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Searches the handbook.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "a few words, as they come."},
                    "most": {"type": "integer", "description": "how many passages."},
                    "exact": {"type": "boolean"},
                    "kinds": {"type": "array", "items": {"type": "string"}},
                    "order": {"type": "string", "enum": ["new", "old"]},
                },
                "required": ["query"],
            },
        },
    }


def test_own_tools_answer_calls_and_report_their_errors_to_the_model() -> None:
    turns = answered(
        [
            call("search", query="a", most=2) + call("calculator", expression="6*7"),
            call("search", words="a"),
            call("fails", how="raises"),
            call("fails", how="sleeps"),
            call("fails", how="deaf"),
            call("fails", how="ends"),
            call("roll", sides=1000) * 2,
            call("long", letter="\N{GRINNING FACE}"),
            call("starred"),
        ],
        settings("calculator", "my_tools:search", "my_tools:fails", "my_tools:roll", "my_tools:long", output_chars=90_000),
    )
    assert said(turns[0]) == ['["a", "a"]', "42"] and turns[0].info == {"tool_calls": 2, "tool_errors": 0}
    assert said(turns[1]) == ["error: search: missing a required argument: 'query'"]
    assert said(turns[2]) == ["error: KeyError: 'raises'"]
    assert said(turns[3]) == said(turns[4]) == ["error: not done after 1 s"]
    assert said(turns[5])[0].startswith("error: worker died: ")
    first, second = said(turns[6])
    assert first == second and first.endswith(" of 1000"), "the same call draws the same numbers, in whatever process"
    assert said(turns[7])[0].startswith("\N{GRINNING FACE}" * 5000) and said(turns[7])[0].endswith("... (cut off)")
    assert said(turns[8])[0].startswith("error: there is no tool 'starred' (there are: calculator, search, fails, roll, long)")
    assert turns[-1].info["tool_errors"] == 6


def test_a_tool_process_survives_calls_that_fail() -> None:
    tools = OwnTools(
        ("my_tools:search", "my_tools:fails"), settings("my_tools:search", "my_tools:fails").model_copy(update={"workers": 1}), 10
    )
    try:
        assert tools.call("search", {"query": "abc", "most": 1}) == ('["abc"]', True)
        process = tools._idle.get()
        tools._idle.put(process)
        assert tools.call("search", {"query": "abcdefghi"}) == ('["abcdefgh... (cut off)', True)
        deep: Any = []
        for _ in range(100_000):
            deep = [deep]
        assert tools.call("search", {"query": deep}) == ("error: search: the arguments are nested too deeply", False)
        assert process is not None and tools._idle.get() is process
        tools._idle.put(process)
        assert tools.call("fails", {"how": "ends"})[1] is False and tools.call("search", {"query": "a"})[1] is True
    finally:
        tools.close()


@pytest.mark.parametrize(
    ("tool", "line"),
    [
        ("my_tools:nothing", r"tools: my_tools:nothing: module 'my_tools' has no attribute 'nothing'"),
        ("my_tools:CALLS", r"tools: my_tools:CALLS: module 'my_tools' has no class or function 'CALLS'"),
        ("no_such:f", r"tools: no_such:f: cannot import module 'no_such': ModuleNotFoundError"),
        ("my_tools:silent", r"tools: my_tools:silent: has no docstring, which would tell the model what it does"),
        ("my_tools:starred", r"tools: my_tools:starred: a call cannot name its parameter 'x'"),
        ("ends:f", r"tools: importing ends:f ended the process \(.*exit status 4"),
    ],
)
def test_functions_that_are_no_tools_are_refused_before_the_run(tool: str, line: str) -> None:
    with pytest.raises(ConfigError, match=rf"^environment\.source\.{line}"):
        tool_schemas(settings(tool))


def test_wrong_tool_names_are_refused_when_the_configuration_loads() -> None:
    with pytest.raises(ValueError, match="'search' is neither calculator nor python nor a function of yours, as module:function"):
        settings("search")
    with pytest.raises(ValueError, match="one of them is listed twice"):
        settings("python", "mine:python")

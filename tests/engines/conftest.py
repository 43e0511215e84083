"""Fixtures of the rollout tests: a tiny model, and the process that hosts the engines."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.engine_host import Host
from tools.make_tiny_model import build


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory: 2 layers, 8 experts."""
    path = tmp_path_factory.mktemp("tiny-moe")
    build(path, layers=2, hidden=128, experts=8, expert_hidden=64, seed=1)
    return path


@pytest.fixture(scope="session")
def host() -> Iterator[Host]:
    host = Host()
    yield host
    host.close()

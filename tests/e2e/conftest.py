"""Fixtures of the tests from end to end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.lab import Lab, open_lab


@pytest.fixture(scope="package")
def lab(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Lab]:
    """A Ray session and an engine for the runs of these files."""
    with open_lab(tmp_path_factory.mktemp("lab"), tiny_model) as opened:
        yield opened

"""Fixtures of the whole suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """The ranks of the distributed tests, started by the first test that asks."""
    pool = Pool()
    yield pool
    pool.close()

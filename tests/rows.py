"""Which rows of a test the suite runs: a choice that meets every law and every layout. `--long` runs all."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def rows(every: Iterable[Any], suite: Collection[Any]) -> list[Any]:
    """The values of a test's parameters, tuples where it has several; those that are not in `suite` are marked long."""
    every = list(every)
    assert all(row in every for row in suite)
    marks = {True: (), False: (pytest.mark.long,)}
    return [pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=marks[row in suite]) for row in every]

"""Fixtures of the tests from end to end."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.job import EVERYTHING, STEPS, Job
from tests.e2e.lab import Lab, open_lab
from tests.slurm.conftest import slurm as slurm


@pytest.fixture(scope="package")
def lab(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Lab]:
    """A Ray session and an engine for the runs of these files."""
    with open_lab(tmp_path_factory.mktemp("lab"), tiny_model) as opened:
        yield opened


@pytest.fixture(scope="package")
def one_rank(lab: Lab, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Job:
    """One step on one rank."""
    return lab.run(Job(tmp_path_factory.mktemp("one"), tiny_model, ("train.steps=1",)))


@pytest.fixture(scope="package")
def steps(long: bool) -> int:
    """Of the straight run, one of which pretrains the critic; with --long there are more at which it could be killed."""
    return STEPS if long else STEPS - 4


@pytest.fixture(scope="package")
def straight(lab: Lab, steps: int, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Job:
    """A run that nothing happens to."""
    return lab.run(Job(tmp_path_factory.mktemp("straight"), tiny_model, (*EVERYTHING, f"train.steps={steps - 1}")))

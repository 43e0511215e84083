"""A Slurm cluster for the tests of this folder, where one can be had."""

from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Cluster, cluster, missing


@pytest.fixture(scope="package")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three nodes."""
    why = missing()
    if why is not None:
        pytest.skip(f"no Slurm: {why}")
    with cluster(tmp_path_factory.mktemp("slurm") / "cluster", tmp_path_factory.getbasetemp(), nodes=3) as started:
        yield started

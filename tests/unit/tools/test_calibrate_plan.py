"""The published layouts that the plan is compared with."""

from pathlib import Path

import pytest
import yaml

from tools.calibrate_plan import LAYOUTS, SPEEDS, memory, planned

ROWS = yaml.safe_load(LAYOUTS.read_text())


@pytest.mark.parametrize("row", ROWS, ids=[f"{row['model']}-{row['source']}" for row in ROWS])
def test_a_published_layout_is_a_configuration_of_its_number_of_gpus(row: dict[str, object], tmp_path: Path) -> None:
    config, _, device = planned(row, tmp_path)
    shared = "engines" not in row
    engines = config.rollout.replicas * config.rollout.devices
    assert (config.layout.ranks, engines) == (row["gpus"], row["gpus" if shared else "engines"])
    assert memory(row) <= device.memory_gb


def test_a_published_speed_has_a_layout() -> None:
    for speed in yaml.safe_load(SPEEDS.read_text())["steps"]:
        assert len([row for row in ROWS if row["source"].endswith(speed["row"])]) == 1

"""The published models of the plans."""

import json
from pathlib import Path

import pytest

from tests.published_models import MODELS, config_of


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories of the published models that hold a config.json and nothing else."""
    root = tmp_path_factory.mktemp("published")
    for name, model in MODELS.items():
        (root / name).mkdir()
        (root / name / "config.json").write_text(json.dumps(config_of(model)))
    return root

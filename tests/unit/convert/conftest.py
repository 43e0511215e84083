"""The models that are converted."""

import shutil
from pathlib import Path

import pytest

from tools.make_tiny_model import build


class Models(dict[str, Path]):
    """A tiny model of each family, made when it is asked for."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._root = root

    def __missing__(self, family: str) -> Path:
        path = self[family] = self._root / family
        build(path, layers=2, hidden=128, experts=8, expert_hidden=32, seed=1, family=family, vocab_size=129)
        return path


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A model of every family."""
    return Models(tmp_path_factory.mktemp("families"))


@pytest.fixture
def source(models: dict[str, Path], tmp_path: Path) -> Path:
    """A Qwen3-MoE to be damaged."""
    return shutil.copytree(models["qwen3_moe"], tmp_path / "source")

"""megarl from a script or a notebook."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import megarl
from megarl import trainer
from megarl.config import ConfigError, TrainConfig, load
from tests.unit.examples.test_configurations import EXAMPLES

DAPO = EXAMPLES / "recipes" / "dapo.yaml"


def test_a_configuration_is_loaded_as_by_the_command_line() -> None:
    assert megarl.load_config(DAPO, "train.steps=5", "seed=3") == load(DAPO, ["train.steps=5", "seed=3"], TrainConfig)
    assert megarl.load_config(str(DAPO)).train.steps == 20
    with pytest.raises(ConfigError, match=r"^train\.step: unknown key \(did you mean 'steps'\?\)$"):
        megarl.load_config(DAPO, "train.step=5")


def test_train_is_the_verb(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[TrainConfig] = []
    monkeypatch.setattr(trainer, "train", seen.append)
    config = megarl.load_config(DAPO)
    megarl.train(config)
    assert seen == [config]


def test_importing_megarl_imports_nothing_heavy() -> None:
    code = "import sys, megarl; print(sorted({'torch', 'ray', 'pydantic', 'megarl.config'} & set(sys.modules)))"
    told = subprocess.run([sys.executable, "-c", code], cwd=Path(megarl.__file__).parents[1], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


def test_a_folder_on_the_path_that_is_not_installed_knows_its_version() -> None:
    code = """
        import importlib.metadata as metadata
        from_name = metadata.Distribution.from_name

        def without(name):
            if name == "megarl":
                raise metadata.PackageNotFoundError(name)
            return from_name(name)

        metadata.Distribution.from_name = without
        from megarl.checkpoints import steps
        from megarl.observe import summary
        print(steps.versions()["megarl"], summary.versions()["megarl"])
        from megarl.cli import main
        main(["--version"])
    """
    root, program = Path(megarl.__file__).parents[1], textwrap.dedent(code)
    told = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True)
    number = megarl.__version__
    assert told.stdout.splitlines() == [f"{number} {number}", f"megarl {number}"], told.stderr

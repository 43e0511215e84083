"""megarl: reinforcement learning of large mixture-of-experts language models on Megatron-core, vLLM, Ray and Slurm.

From a script or a notebook:

    from megarl import load_config, train
    train(load_config("examples/recipes/dapo.yaml", "train.steps=5"))
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megarl.config import TrainConfig

__version__ = "0.1.0"
__all__ = ["load_config", "train"]


def load_config(path: str | os.PathLike[str], *overrides: str) -> TrainConfig:
    """Return the validated configuration of `megarl train`.

    Args:
        path: a YAML file.
        overrides: settings that replace those of the file, such as "train.steps=5".

    Raises:
        ConfigError: the configuration is invalid; the message has one line per fault.
    """
    from megarl.config import TrainConfig, load  # imported here so that importing megarl itself costs nothing

    return load(Path(path), list(overrides), TrainConfig)


def train(config: TrainConfig) -> None:
    """Run `megarl train`: train the model and write it, the metrics and the summary to `config.directory`."""
    from megarl.trainer import train

    train(config)

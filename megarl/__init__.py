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
    """The validated configuration of `megarl train`.

    Args:
        path: a YAML file.
        overrides: values laid over it, such as "train.steps=5".

    Raises:
        ConfigError: what is wrong with it, a line per fault.
    """
    from megarl.config import TrainConfig, load  # here: importing megarl itself costs nothing

    return load(Path(path), list(overrides), TrainConfig)


def train(config: TrainConfig) -> None:
    """`megarl train`: takes the steps and leaves the trained model, metrics and summary in `config.directory`."""
    from megarl.trainer import train

    train(config)

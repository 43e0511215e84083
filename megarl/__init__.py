"""megarl: reinforcement learning of large mixture-of-experts language models on Megatron-core, vLLM, Ray and Slurm.

From a script or a notebook:

    from megarl import load_config, train
    result = train(load_config("examples/recipes/dapo.yaml", "train.steps=5"))
    result.summary["pass_rate_end"], result.steps[-1]["reward/mean"]
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.errors import ConfigError

if TYPE_CHECKING:
    from megarl.config import DpoConfig, EvalConfig, PairsConfig, RmConfig, RunSettings, ServeConfig, SftConfig, TrainConfig, ValueConfig
    from megarl.observe.run_result import RunResult

__version__ = "0.1.0"
__all__ = ["ConfigError", "dpo", "evaluate", "load_config", "pairs", "rm", "serve", "sft", "train", "value"]


def load_config(path: str | os.PathLike[str], *overrides: str, verb: str = "train") -> Any:
    """Return the validated configuration of a verb.

    Args:
        path: a YAML file.
        overrides: settings that replace those of the file, such as "train.steps=5".
        verb: the verb that is to run it: train, sft, value, rm, dpo, pairs, serve or eval.

    Raises:
        ConfigError: the configuration is invalid; the message has one line per fault.
    """
    from megarl.config import load  # imported here so that importing megarl itself costs nothing
    from megarl.imports import find
    from megarl.verbs import VERBS

    if verb not in VERBS:
        raise ValueError(f"verb: {verb!r} is none of {', '.join(VERBS)}")
    root: Any = find(VERBS[verb].config)
    return load(Path(path), list(overrides), root)


def train(config: TrainConfig) -> RunResult:
    """Run `megarl train`: reinforcement learning."""
    return _run("train", config)


def sft(config: SftConfig) -> RunResult:
    """Run `megarl sft`: supervised training."""
    return _run("sft", config)


def value(config: ValueConfig) -> RunResult:
    """Run `megarl value`: value pretraining."""
    return _run("value", config)


def rm(config: RmConfig) -> RunResult:
    """Run `megarl rm`: a reward model from preferences."""
    return _run("rm", config)


def dpo(config: DpoConfig) -> RunResult:
    """Run `megarl dpo`: a policy from preferences."""
    return _run("dpo", config)


def pairs(config: PairsConfig) -> RunResult:
    """Run `megarl pairs`: preferences from a policy's own responses, in train.jsonl and eval.jsonl of the run's directory."""
    return _run("pairs", config)


def evaluate(config: EvalConfig) -> RunResult:
    """Run `megarl eval`: avg@n and pass@k on held-out sets."""
    return _run("eval", config)


def serve(config: ServeConfig) -> None:
    """Run `megarl serve`: serve a reward model over HTTP until this process is interrupted."""
    _call("serve", config)


def _run(verb: str, config: RunSettings) -> RunResult:
    from megarl.observe.run_result import read

    _call(verb, config)
    return read(config.directory)


def _call(verb: str, config: Any) -> None:
    """Run a verb as the command line does, with the modules of the current folder at hand."""
    from megarl.imports import add_current_folder, find
    from megarl.verbs import VERBS

    expected: Any = find(VERBS[verb].config)
    if not isinstance(config, expected):
        needed = f'{expected.__name__}: load_config(..., verb="{verb}")'
        raise ValueError(f"{verb}: the configuration is a {type(config).__name__}, not a {needed}")
    add_current_folder()
    find(VERBS[verb].run)(config)

"""Whether a run has finished already: a chain of jobs, or another start, then has nothing to do."""

import json
import sys

from megarl.checkpoints.may_differ import compare, completed
from megarl.config import ConfigError, SupervisedConfig, TrainConfig, TrainingSettings, yaml_text
from megarl.observe import run_record


def has_finished(config: TrainingSettings) -> bool:
    """Return whether the run of this configuration has finished, and nothing more is asked of it; if so, a line on stderr says it.

    More is asked by more steps, another patience, or `save.resume=false`. A configuration that a resumed run may not have is another run.
    """
    directory, steps = config.directory, config.total_steps
    record = run_record.read(directory)
    if not (config.save.resume and steps and (directory / "summary.json").is_file()) or record is None or record.verb != config.verb:
        return False
    try:
        tree = yaml_text.read((directory / "config.yaml").read_text())
        saved = type(config).model_validate_json(json.dumps(completed(tree, type(config))))
    except (OSError, ValueError, ConfigError):
        return False
    if compare(saved.model_dump(mode="json"), config.model_dump(mode="json"), record.inputs):
        return False
    if steps > saved.total_steps or _patience(config) != _patience(saved):
        return False
    key = config.steps_key
    lower = f"{key}={steps}, and " if steps < record.step else ""
    larger = "" if key is None else f"a larger {key} goes on, "
    done = f"{lower}this run has finished, after {record.step} steps: nothing to do ({larger}save.resume=false starts over)"
    print(f"{config.name}: {done}", file=sys.stderr, flush=True)
    return True


def _patience(config: TrainingSettings) -> int:
    if isinstance(config, TrainConfig):
        return config.train.patience
    return config.supervised.patience if isinstance(config, SupervisedConfig) else 0

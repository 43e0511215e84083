"""What the Ray actors of engines share: a process that holds one engine, or a member of one, and nothing else."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.imports import find
from megarl.observe.output import keep_output


class EngineActor:
    """Prepares the process and imports the engine's class.

    Args:
        label: the engine's name in errors.
        engine: the engine's class, as "module:Class".
        environment: environment variables that the engine reads when it is imported.
        run: the run's directory, where the output of the engine's processes is kept.
    """

    def __init__(self, label: str, engine: str, environment: Mapping[str, str], run: Path) -> None:
        keep_output(run, label)
        os.environ.update(environment)
        self._label, self._run = label, run
        self._engine_class: Any = find(engine)

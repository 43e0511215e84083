"""Weights & Biases. Without WANDB_API_KEY or WANDB_MODE a run is recorded offline, for `wandb sync` later; nothing prompts."""

import os
from collections.abc import Mapping
from typing import Any, ClassVar

from megarl.observe.trackers.base import TrackedRun


class WeightsAndBiases:
    """The W&B run with the run's id. Steps that a resumed run repeats are there twice, as both starts have measured them."""

    package: ClassVar[str] = "wandb"
    variable: ClassVar[str | None] = None

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        log = run.settings
        mode: Any = os.environ.get("WANDB_MODE") or ("online" if "WANDB_API_KEY" in os.environ else "offline")
        self._run = wandb.init(
            id=run.id,
            resume="allow",
            project=log.project,
            entity=log.entity,
            group=log.group,
            tags=log.tags,
            notes=log.notes,
            name=run.name,
            dir=str(run.directory),
            config=dict(run.config),
            allow_val_change=True,  # a resumed run may have another layout
            mode=mode,
        )
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))

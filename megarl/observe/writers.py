"""Where a run's numbers are written: always JSON lines, and TensorBoard and Weights & Biases if the configuration asks for them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from megarl.config import ConfigError, LogSettings
from megarl.strict_json import lines_of, parse_json


class Writer(Protocol):
    """Writes the scalars of each step, and is closed at the end."""

    def write(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class JsonLines:
    """Writes one JSON object per line, `step` first, flushed at once. As JSON has no nan, non-finite numbers are "nan", "inf" or "-inf".

    `write` raises OSError, with the file's name, if a line does not reach the file.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        row: dict[str, Any] = {"step": step}
        row |= {name: value if math.isfinite(value) else str(value) for name, value in sorted(values.items())}
        try:
            self._file.write(json.dumps(row, allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._file.name) from None

    def close(self) -> None:
        with suppress(OSError):  # for a line that `write` has already raised for
            self._file.close()


def read_json_lines(path: Path, skipped: int = 0) -> list[dict[str, float]]:
    """Read the rows that `JsonLines` wrote after the first `skipped` bytes, including non-finite numbers.

    A last line cut off by a crash is left out. Raises ConfigError, beginning with the file and the line, for a line that `JsonLines` did
    not write.
    """
    rows = []
    for place, line in lines_of(path, str(path), skipped):
        if not line.endswith(b"\n"):
            break
        try:
            rows.append({name: float(value) for name, value in parse_json(line).items()})
            if not math.isfinite(rows[-1]["step"]):
                raise ValueError
        except (ValueError, TypeError, AttributeError, KeyError, OverflowError):
            raise ConfigError(f"{place}: not a row of metrics: {line.rstrip()!r:.80}") from None
    return rows


class TensorBoard:
    """Event files for `tensorboard --logdir runs`."""

    def __init__(self, directory: Path, purge: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(directory), flush_secs=10, purge_step=purge)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A W&B run. Without WANDB_API_KEY (or a mode in WANDB_MODE) it is recorded offline, for `wandb sync` later; it never prompts."""

    def __init__(self, directory: Path, name: str, config: Mapping[str, Any], settings: LogSettings) -> None:
        import wandb

        mode: Any = os.environ.get("WANDB_MODE") or ("online" if "WANDB_API_KEY" in os.environ else "offline")
        place: dict[str, Any] = {"project": settings.wandb_project, "entity": settings.wandb_entity, "dir": str(directory)}
        self._run = wandb.init(**place, name=name, config=dict(config), mode=mode)
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


class Writers:
    """All writers of a run as one."""

    def __init__(self, writers: Sequence[Writer]) -> None:
        self._writers = writers

    def write(self, step: int, values: Mapping[str, float]) -> None:
        for writer in self._writers:
            writer.write(step, values)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


def check(settings: LogSettings) -> None:
    """ConfigError if a writer is asked for whose package is not installed."""
    from importlib.util import find_spec

    if settings.wandb and find_spec("wandb") is None:
        raise ConfigError("log.wandb=true: the package wandb is not installed (install megarl[wandb])")


def open_writers(directory: Path, name: str, config: Mapping[str, Any], settings: LogSettings, purge: int | None = None) -> Writers:
    """Open the writers that `settings` asks for.

    Args:
        directory: the run's directory, below which they write.
        name: the run's name.
        config: the run's configuration, which some writers record.
        settings: which writers to open.
        purge: the first step that will be written again, if any.

    Raises:
        ConfigError: a writer's package is not installed.
    """
    check(settings)
    writers: list[Writer] = [JsonLines(directory / "metrics.jsonl")]
    if settings.tensorboard:
        writers.append(TensorBoard(directory / "tensorboard", purge))
    if settings.wandb:
        writers.append(WeightsAndBiases(directory, name, config, settings))
    return Writers(writers)

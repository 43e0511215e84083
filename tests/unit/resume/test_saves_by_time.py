"""What is saved by time: by default where nothing is saved by steps, and for every verb that saves."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.config import CheckpointSettings, TrainConfig, load
from megarl.observe.run import Run
from megarl.resume import saving
from megarl.resume.saving import Checkpoints
from tests.unit.bad_input.cases import VERBS


class Models:
    """Ranks that save at once."""

    folders: Mapping[str, str] = {"policy": "checkpoints"}

    def __init__(self) -> None:
        self.saved = list[int]()

    def checkpoint(self, directory: Path, step: int, *_: object) -> None:
        self.saved.append(step)

    def wait_for_save(self) -> None:
        pass


def saved(place: Path, monkeypatch: pytest.MonkeyPatch, minutes: float, steps: int, *overrides: str) -> list[int]:
    """The steps that are saved, where each takes so many minutes."""
    now = 1e6
    monkeypatch.setattr(saving, "time", SimpleNamespace(monotonic=lambda: now))
    (place / "job.yaml").write_text(VERBS["train"].format(runs=place / "runs", model="nowhere"))
    config, models = load(place / "job.yaml", list(overrides), TrainConfig), Models()
    with Run(config) as run:
        checkpoints = Checkpoints(config, "train", run, models)  # type: ignore[arg-type]
        for step in range(1, steps + 1):
            now += 60 * minutes
            state: Any = SimpleNamespace(step=step, state=lambda step=step: {"step": step}, files=dict)
            checkpoints.after_step(state)
    return models.saved


@pytest.mark.parametrize(
    ("minutes", "overrides", "steps"),
    [
        (1.0, (), []),  # short runs have no checkpoint, as before
        (7.0, (), [5, 10]),
        (45.0, (), [*range(1, 13)]),
        (7.0, ("save.every=4",), [4, 8, 12]),  # steps, and nothing else
        (7.0, ("save.every=4", "save.every_minutes=14"), [2, 4, 6, 8, 10, 12]),
        (7.0, ("save.every=5", "save.every_minutes=21"), [3, 5, 8, 10]),  # counted from the last save of either kind
        (45.0, ("save.every_minutes=0",), []),
        (0.5, ("save.every_minutes=1.5",), [3, 6, 9, 12]),
    ],
)
def test_a_run_is_saved_by_time_where_it_is_not_by_steps(
    minutes: float, overrides: tuple[str, ...], steps: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert saved(tmp_path, monkeypatch, minutes, 12, *overrides) == steps


def test_the_default_saves_in_the_background_and_keeps_two() -> None:
    settings = CheckpointSettings()
    assert (settings.minutes, settings.asynchronous, settings.keep_last) == (30.0, True, 2)
    assert CheckpointSettings(every=20).minutes == 0

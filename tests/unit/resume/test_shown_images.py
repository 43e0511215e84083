"""Which images of environments a run removes: those that neither it nor one that resumes can refer to."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from megarl.checkpoints.steps import CHECKPOINTS, step_name
from megarl.image_source import IMAGES
from megarl.resume.point import TRAINER
from megarl.resume.shown_images import SHOWN_STEPS, ShownImages


def kept(run: Path) -> list[int]:
    return sorted(int(path.name) for path in (run / IMAGES).iterdir())


def show(run: Path, step: int) -> None:
    (run / IMAGES / str(step)).mkdir(parents=True, exist_ok=True)
    (run / IMAGES / str(step) / "digest").write_bytes(b"image")


def save(run: Path, step: int, **progress: int) -> Path:
    folder = run / CHECKPOINTS / step_name(step)
    folder.mkdir(parents=True)
    (folder / TRAINER).write_text(json.dumps({"progress": {"step": step, **progress}}))
    return folder


def test_the_folder_of_images_is_bounded_and_what_may_be_learned_from_stays(tmp_path: Path) -> None:
    """Steps learn from episodes up to two steps old; a checkpoint each fourth step, of which the last one is kept."""
    images, last = ShownImages(tmp_path), None
    show(tmp_path, 0)
    for step in range(1, 100):
        show(tmp_path, step)
        if step % 4 == 0:
            if last is not None:
                last.rename(tmp_path / last.name)
            last = save(tmp_path, step, oldest=step - 1)
        images.after_step(step, step - 1)
        first = min(step + 1 - SHOWN_STEPS, step - 2)
        assert kept(tmp_path) == [0, *range(max(1, first), step + 1)]


@pytest.mark.parametrize(
    ("oldest", "checkpoints", "first"),
    [
        ((30, 30), {}, 31 - SHOWN_STEPS),
        ((5, 30), {}, 5),  # of the copy in memory before the last
        ((30, 5), {}, 5),
        ((30, 30), {12: 7, 30: 30}, 7),
        ((30, 30), {12: 13, 30: 30}, 13),
    ],
)
def test_images_stay_that_a_state_to_go_on_from_needs(
    tmp_path: Path, oldest: Sequence[int], checkpoints: dict[int, int], first: int
) -> None:
    for step, needed in checkpoints.items():
        save(tmp_path, step, oldest=needed)
    for step in range(31):
        show(tmp_path, step)
    images = ShownImages(tmp_path)
    for step, needed in zip((29, 30), oldest, strict=True):
        images.after_step(step, needed)
    assert kept(tmp_path) == [0, *range(first, 31)]


def test_nothing_goes_that_a_checkpoint_of_an_earlier_version_may_need(tmp_path: Path) -> None:
    save(tmp_path, 3)
    (tmp_path / CHECKPOINTS / f"{step_name(4)}.partial").mkdir()
    for step in range(31):
        show(tmp_path, step)
    images = ShownImages(tmp_path)
    for step in (29, 30):
        images.after_step(step, step)
    assert kept(tmp_path) == list(range(31))
    (tmp_path / CHECKPOINTS / step_name(3) / TRAINER).unlink()
    (tmp_path / CHECKPOINTS / step_name(3)).rmdir()
    images.after_step(30, 30)
    assert kept(tmp_path) == [0, *range(31 - SHOWN_STEPS, 31)]

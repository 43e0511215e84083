"""report.html and `megarl compare`: offline, and safe whatever a model, a name or a configuration holds."""

import base64
import hashlib
import io
import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image as Pillow
from PIL.PngImagePlugin import PngInfo

from megarl.cli import main
from megarl.config import TrainConfig
from megarl.image_source import ImageSource, kept_file
from megarl.observe import page, samples, thumbnails
from megarl.observe.metrics import Mean
from megarl.observe.report import draw
from megarl.observe.run import Run
from megarl.observe.samples import ImageRecord, SampleRecord
from megarl.observe.thumbnails import MAX_BYTES
from tests.image_samples import picture
from tests.unit.data.test_images import bomb
from tests.unit.observe.test_observe import config, run_steps  # noqa: F401

HOSTILE = "</pre><script>alert(1)</script><img src=x onerror=alert(2)>\"'><style>*{}</style>\x1b[2J\u202egnp&lt;"
RECORD = SampleRecord(HOSTILE, HOSTILE, HOSTILE, 0.5, {HOSTILE: 1.0}, HOSTILE, "stop", 3, 0, False, 1, True)


def kept(folder: Path, data: bytes) -> Path:
    return Path(kept_file(data, folder).path)


ALLOWED = {
    *("html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "div", "b", "br", "table", "tr", "th", "td", "img"),
    *("details", "summary", "pre", "span"),
}


class Marks(HTMLParser):
    """Every tag with its attributes, and the text outside of style."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_page_loads_nothing_runs_nothing_and_shows_hostile_words_as_text(config: TrainConfig) -> None:  # noqa: F811
    with Run(config) as run:
        run.log(1, {"reward/mean": Mean(1.0, 2.0)})
        run.keep(1, [RECORD] * 20)
        run.keep(1, [RECORD], "heldout")
        run.event("own", HOSTILE)
    marks = Marks()
    written = (run.directory / "report.html").read_text()
    marks.feed(written)
    assert {tag for tag, _ in marks.tags} <= ALLOWED
    used = {(tag, name) for tag, attributes in marks.tags for name in attributes}
    assert {name for _, name in used} <= {"lang", "charset", "http-equiv", "content", "class", "alt", "src"}
    [(_, picture)] = [found for found in marks.tags if found[0] == "img"]
    assert str(picture["src"]).startswith("data:image/png;base64,")
    assert [attributes["content"] for _, attributes in marks.tags if "http-equiv" in attributes] == [
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    ]
    assert marks.text.count(HOSTILE.replace("\x1b", r"\x1b").replace("\u202e", r"\u202e")) >= 3 * 17 + 1
    assert all(letter.isprintable() or letter in "\n\t" for letter in written)
    assert "20 responses, mean reward 0.500" in marks.text and written.count("<details><summary>reward 0.5") == 17


def test_images_are_small_pictures_that_were_written_anew(config: TrainConfig, tmp_path: Path) -> None:  # noqa: F811
    """Of a large one with words in it; and no picture of one that is gone, a bomb, or beyond the most of a sample or a page."""
    file = io.BytesIO()
    words = PngInfo()
    words.add_text("comment", "never shown")
    Pillow.effect_noise((900, 700), 90).convert("RGB").save(file, "PNG", pnginfo=words)
    (tmp_path / HOSTILE.replace("/", "")).write_bytes(file.getvalue())

    def stored(data: bytes, path: Path) -> ImageRecord:
        return ImageRecord(hashlib.sha256(data).hexdigest(), (900, 700), ImageSource(str(path)))

    good = stored(file.getvalue(), tmp_path / HOSTILE.replace("/", ""))
    gone, bombed = stored(b"gone", tmp_path / "gone"), stored(bomb(9000), kept(tmp_path, bomb(9000)))
    with Run(config) as run:
        run.log(1, {"reward/mean": Mean(1.0, 2.0)})
        run.keep(1, [replace(RECORD, images=(good, gone, bombed, good, *[gone] * 12))])
    written = (run.directory / "report.html").read_text()
    marks = Marks()
    marks.feed(written)
    assert {tag for tag, _ in marks.tags} <= ALLOWED
    assert {name for _, attributes in marks.tags for name in attributes} <= {
        "lang",
        "charset",
        "http-equiv",
        "content",
        "class",
        "alt",
        "src",
    }
    _, *pictures = [attributes for tag, attributes in marks.tags if tag == "img"]
    assert len(pictures) == 2 and pictures[0] == pictures[1] and "never shown" not in written and "(900 x 700)" in str(pictures[0]["alt"])
    kind, _, body = str(pictures[0]["src"]).partition(",")
    data = base64.b64decode(body)
    assert kind == "data:image/jpeg;base64" and len(data) <= MAX_BYTES and Pillow.open(io.BytesIO(data)).size == (96, 75)
    assert all(letter.isprintable() or letter in "\n\t" for letter in written)
    [[record]] = [[*one.records()] for one in samples.files(run.directory)]
    assert record.images[0] == good and len(record.images) == 16
    assert '"images"' not in json.dumps(samples._plain(RECORD))


def test_a_page_has_so_many_thumbnails_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(thumbnails, "MAX_THUMBNAILS", 3)
    rng, found = np.random.default_rng(1), list[bool]()
    page_s = thumbnails.Thumbnails()
    for _ in range(5):
        data = picture(rng)
        found.append(page_s.url(ImageRecord(hashlib.sha256(data).hexdigest(), (1, 1), ImageSource(str(kept(tmp_path, data))))) is not None)
    assert found == [True] * 3 + [False] * 2


def test_summary_values_are_not_read_as_mark_up(tmp_path: Path) -> None:
    word = {HOSTILE: 1.0}
    estimates = {HOSTILE: {"value": 0.5, "low": 0.1, "high": 0.9}}
    evaluation = {"step": 1, "results": [{"set": HOSTILE, "prompts": HOSTILE, "rate": True, "estimates": estimates}]}
    summary = {
        "model": HOSTILE,
        "commit": HOSTILE,
        "rl_steps": HOSTILE,
        "starts": 2,
        "gpu_s": 1.0,
        "wall_s": word,
        "peak_rss_mb": word,
        "alarms": {HOSTILE: HOSTILE},
        "versions": {HOSTILE: HOSTILE},
    }
    (tmp_path / "summary.json").write_text(json.dumps({**summary, "evaluations": {HOSTILE: evaluation}, "results": {HOSTILE: word}}))
    (tmp_path / "config.yaml").write_text(HOSTILE)
    page.write(tmp_path)
    written = (tmp_path / "report.html").read_text()
    (marks := Marks()).feed(written)
    assert {tag for tag, _ in marks.tags} <= ALLOWED - {"img"}
    assert all(letter.isprintable() or letter in "\n\t" for letter in written)


@pytest.mark.parametrize("name", ["eval/heldout/greedy", "eval/aime/avg@16", "eval/aime/pass@4"])
def test_the_picture_shows_the_scores_of_every_set(name: str, tmp_path: Path) -> None:
    row, heights = {"reward/mean": 0.5, "actor/entropy": 1.0, "perf/time_per_step": 1.0, "timing_s/update": 1.0}, []
    for more in ({}, {name: 0.5}):
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": step, **row, **more}) + "\n" for step in (1, 2)))
        draw(tmp_path / "metrics.jsonl", tmp_path / "report.png")
        heights.append(int.from_bytes((tmp_path / "report.png").read_bytes()[20:24]))
    assert heights[1] > heights[0], "a fourth panel: a second row"


def test_runs_are_compared_by_numbers_and_by_what_differs(
    config: TrainConfig,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    one = run_steps(config)
    other = run_steps(config.model_copy(update={"name": "other", "seed": 7}))
    (other / "summary.json").unlink()  # one that still goes on
    capsys.readouterr()
    picture = tmp_path / "both.png"
    assert main(["compare", str(one), str(other), "--picture", str(picture)]) == 0
    shown = {line.split("  ")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert shown["reward/mean (last)"].split()[-2:] == ["0.75", "0.75"]
    assert shown["eval/own/avg@2 (first, last, highest)"].split()[-3:] == ["1,", "1,", "1"]
    assert shown["seed"].split() == ["seed", "1", "7"] and "not finished" in shown["seconds"]
    assert "name" not in shown and "model.path" not in shown
    assert picture.read_bytes().startswith(b"\x89PNG")
    (other / "config.yaml").write_text("name: other\nseed: 7\nsft: {steps: 3}\n")  # of another verb
    assert main(["compare", str(one), str(other), "--picture", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["seed", "1", "7"] for line in lines) and not any(line.startswith(("sft.", "rollout.")) for line in lines)
    assert sum(line.endswith(" keys that only some have)") for line in lines) == 1
    for arguments, message in (
        ([tmp_path / "none"], f"megarl: error: compare: {tmp_path / 'none'} is not a run: it has no metrics.jsonl"),
        ([one, "--picture", tmp_path / "no" / "x.png"], f"megarl: error: compare: --picture: cannot write {tmp_path}/no/x.png: [Errno 2]"),
    ):
        assert main(["compare", *map(str, arguments)]) == 2
        assert capsys.readouterr().err.startswith(message)


def test_page_shows_the_best_and_the_worst_of_an_evaluation(config: TrainConfig) -> None:  # noqa: F811
    with Run(config) as run:
        run.log(1, {"reward/mean": Mean(1.0, 2.0)})
        run.keep(1, [replace(RECORD, reward=float(reward)) for reward in range(512)], "heldout")
    written = (run.directory / "report.html").read_text()
    assert f"<details><summary>reward {511}" in written and "<details><summary>reward 0," in written
    assert f"model {config.model.path}, megarl at commit " in written


def test_a_page_of_many_steps_stays_small(config: TrainConfig) -> None:  # noqa: F811
    with Run(config) as run:
        for step in range(200):
            samples.write(run.directory, step, [SampleRecord("p", "a", "r" * 100_000, 0.0, {}, None, "stop", 3, 0, False, 1, True)] * 20)
    assert (run.directory / "report.html").stat().st_size < 4_000_000

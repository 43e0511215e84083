"""Prompts with images: one token of the prompt for each of an image's tokens, and references to the bytes for engines and ranks."""

import base64
import io
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from PIL import Image as Pillow
from pyarrow import parquet

from megarl.checks.data import PromptReader
from megarl.checks.other_models import check_seen
from megarl.config import ConfigError, FileSource, SourceFormat, TrainConfig
from megarl.config import load as load_config
from megarl.data import large
from megarl.data.images import ImageReader, sent_task, shown_task
from megarl.data.prompts import Prompt
from megarl.data.sources import load_prompts
from megarl.data.tokenizer import load_tokenizer
from megarl.models.description import ModelDescription
from megarl.models.image_processor import ImageProcessor
from tests.image_samples import END, PAD, START
from tools.make_tiny_model import build


def square(side: int, shade: int) -> bytes:
    file = io.BytesIO()
    Pillow.fromarray(np.full((side, side, 3), shade, np.uint8)).save(file, "PNG")
    return file.getvalue()


FILES = [square(32, 10), square(48, 200)]  # of 16 and 36 tokens
ROWS: list[dict[str, Any]] = [
    {"prompt": [{"role": "user", "content": "a<image>b<image>c"}], "images": [{"bytes": file} for file in FILES], "answer": "1"},
    {"prompt": [{"role": "user", "content": "no image"}], "images": None, "answer": "2"},
    {
        "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "d<image>"}],
        "images": [{"bytes": FILES[1]}],
        "answer": "3",
    },
]


def load(path: Path, file: Path, rows: list[dict[str, Any]], most: int = 200, **data: Any) -> list[Prompt]:
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    source = FileSource(type="file", path=file, answer_key="answer")
    vision = ModelDescription.read(path).sizes.vision
    assert vision is not None
    reader = ImageReader(ImageProcessor(path), vision.image_token, most, "rollout.max_prompt_tokens")
    return list(load_prompts(source, load_tokenizer(path), SourceFormat(**data), most, "data.train", reader=reader))


def test_a_prompt_has_each_token_of_its_images_once_and_says_where_they_are(seeing: Path, tmp_path: Path) -> None:
    two, text, one = load(seeing, tmp_path / "rows.parquet", ROWS)
    assert [len(prompt.images) for prompt in (two, text, one)] == [2, 0, 1]
    for prompt in (two, one):
        assert prompt.tokens.count(PAD) == sum(placed.image.tokens for placed in prompt.images)
        for placed in prompt.images:
            assert prompt.tokens[placed.start : placed.end] == [PAD] * placed.image.tokens
            assert (prompt.tokens[placed.start - 1], prompt.tokens[placed.end]) == (START, END)
    assert [placed.image.tokens for placed in two.images] == [16, 36]
    assert [placed.image.read() for placed in two.images] == FILES and one.images[0].image.read() == FILES[1]


def test_verifiers_and_environments_get_texts_and_no_bytes(seeing: Path, tmp_path: Path) -> None:
    two, text, one = load(seeing, tmp_path / "rows.parquet", ROWS)
    assert (two.shown, two.text, two.meta) == ("a<image>b<image>c", "a<image>b<image>c", {})
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "d<image>"}]
    assert one.shown == messages and text.shown == "no image"
    assert shown_task(two.task) == {"prompt": "a<image>b<image>c", "answer": "1", "meta": {}}
    assert shown_task(one.task) == {"prompt": messages, "answer": "3", "meta": {}}


def test_prompts_of_a_large_file_are_those_of_a_small_one(seeing: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = load(seeing, tmp_path / "rows.parquet", ROWS)
    monkeypatch.setattr(large, "LARGE", 1)
    assert load(seeing, tmp_path / "rows.parquet", ROWS) == small


def test_models_that_do_not_get_the_images_are_refused(seeing: Path, tmp_path: Path) -> None:
    prompts, policy = load(seeing, tmp_path / "rows.parquet", ROWS), ModelDescription.read(seeing)
    build(tmp_path / "text", layers=1, hidden=64, experts=4, expert_hidden=32, seed=1)
    example = Path(__file__).parents[3] / "examples" / "vision" / "rl.yaml"
    reward, server = f"reward.source={{type: reward_model, path: {tmp_path / 'text'}}}", "{server: {url: 'http://h/v1', model: m}}"
    engines = "placement={teacher_engines: {kv_cache_mb: 32}}"
    blind = r": \S+text does not see images of the same tokens as the policy"
    for changes, refusal, measured in (
        ([f"model.base={tmp_path / 'text'}"], rf"^model\.base{blind}", False),
        ([f"distillation={{teacher: {tmp_path / 'text'}}}"], rf"^distillation\.teacher{blind}", False),
        ([f"distillation={{teacher: {tmp_path / 'text'}}}", engines], rf"^distillation\.teacher{blind}", False),
        ([f"distillation={server}"], r"^distillation: the images of prompts or an environment reach no server of a teacher", False),
        (["algorithm={type: ppo}", f"critic={{path: {tmp_path / 'text'}}}"], rf"^critic\.path{blind}", True),
        ([reward], rf"^reward\.source\.path{blind}", True),
    ):
        config = load_config(example, [f"model.path={seeing}", *changes], TrainConfig)
        with pytest.raises(ConfigError, match=refusal):
            check_seen(config, policy, prompts)
        check_seen(config, policy, prompts[1:2])  # a text
        with pytest.raises(ConfigError, match=refusal) if measured else nullcontext():
            check_seen(config, policy, prompts[1:2], [prompts[1:2], prompts])
    for changes in ([], [engines]):
        config = load_config(example, [f"model.path={seeing}", f"distillation={{teacher: {seeing}}}", *changes], TrainConfig)
        check_seen(config, policy, prompts)


def test_agents_get_the_prompt_as_messages_with_the_bytes(seeing: Path, tmp_path: Path) -> None:
    parquet.write_table(pyarrow.Table.from_pylist([{**ROWS[0], "prompt": "a<image>b<image>"}]), tmp_path / "rows.parquet")
    example, episodes = (
        Path(__file__).parents[3] / "examples" / "vision" / "rl.yaml",
        "environment={source: {type: agent, function: 'a:b'}}",
    )
    places = [f"model.path={seeing}", f"data.train.path={tmp_path / 'rows.parquet'}", "rollout.max_prompt_tokens=200"]
    config = load_config(example, [*places, episodes], TrainConfig)
    [prompt] = PromptReader.of(config).prompts(config.data.train, "data.train", load_tokenizer(seeing))
    images = [placed.image for placed in prompt.images]
    urls = [f"data:image/png;base64,{base64.b64encode(file).decode()}" for file in FILES]
    parts = [
        part for text, url in zip("ab", urls, strict=True) for part in (text_of(text), {"type": "image_url", "image_url": {"url": url}})
    ]
    assert sent_task(prompt.task, images) == {"prompt": [{"role": "user", "content": parts}], "answer": "1", "meta": {}}
    assert sent_task({"prompt": "no image"}, ()) == {"prompt": "no image"}


def text_of(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


@pytest.mark.parametrize(
    ("changes", "data", "refusal"),
    [
        ({}, {"chat": False}, r":1: images need data\.chat=true$"),
        ({"images": [{"bytes": FILES[0]}] * 3}, {}, r":1: the column 'images' has 1 images that no part stands for$"),
        ({"images": [{"bytes": FILES[0]}]}, {}, r":1: message 0: part 3: names no image, and the column 'images' has no more$"),
        (
            {"prompt": [{"role": role, "content": f"{role}<image>"} for role in ("system", "user")], "images": [{"bytes": FILES[0]}]},
            {},
            r":1: message 1: part 1: names no image, and the column 'images' has no more$",
        ),
        ({"images": [{"bytes": b"GIF89a"}] * 2}, {}, r":1: message 0: part 1: the image is refused: "),
        (
            {"images": [{"bytes": square(64, 0)}] * 2},
            {"most": 100},
            r":1: 2 images have 128 tokens, more than rollout\.max_prompt_tokens=100$",
        ),
        ({"prompt": "<|image_pad|>", "images": None}, {}, r":1: 1 image tokens, and its 0 images have 0$"),
    ],
)
def test_a_bad_prompt_is_refused_by_its_row(
    seeing: Path, tmp_path: Path, changes: dict[str, Any], data: dict[str, Any], refusal: str
) -> None:
    with pytest.raises(ConfigError, match=refusal):
        load(seeing, tmp_path / "rows.parquet", [ROWS[0] | changes], **data)

"""Prompts with images on their way to a reward server and through `megarl serve`: the very bytes, bounded, and refused by name."""

import base64
import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from megarl.batch import Sample
from megarl.checks.data import PromptReader
from megarl.config import ConfigError, FileSource, HttpReward, PromptFormat, RewardSettings, SourceFormat, TrainConfig
from megarl.config import load as load_config
from megarl.data.images import ImageReader, sent
from megarl.data.prompts import Prompt, Renderer
from megarl.data.sources import load_prompts
from megarl.data.tokenizer import encode, load_tokenizer
from megarl.driver.rank_group import RankGroup
from megarl.loops.serve import Service
from megarl.models.image_processor import ImageProcessor
from megarl.models.image_processor import opened as module_opened
from megarl.response import Response
from megarl.rewards import http
from megarl.rewards.server import RewardServer
from megarl.rewards.sources import check
from megarl.step.reward import requests
from tests.image_samples import PAD, picture

MOST = 400
FILES = [picture(np.random.default_rng(number), form) for number, form in enumerate(("PNG", "JPEG", "WEBP"))]


def reader_of(path: Path) -> ImageReader:
    return ImageReader(ImageProcessor(path), PAD, MOST, "limit")


@pytest.fixture(scope="module")
def prompts(seeing: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Prompt]:
    """Of two images in one message, of two messages, and of text alone."""
    folder = tmp_path_factory.mktemp("data")
    for number, data in enumerate(FILES):
        (folder / str(number)).write_bytes(data)
    said = [
        {"role": "user", "content": "<image>first"},
        {"role": "assistant", "content": "an <image>"},
        {"role": "user", "content": "<image>"},
    ]
    rows: list[dict[str, Any]] = [
        {"prompt": "a<image><image>b", "images": ["0", "1"], "answer": "1"},
        {"prompt": [{"role": "system", "content": "s"}, *said], "images": ["2", "2"], "answer": "2"},
        {"prompt": "none", "answer": "3"},
    ]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = FileSource(type="file", path=folder / "rows.jsonl", answer_key="answer")
    return list(load_prompts(source, load_tokenizer(seeing), SourceFormat(), MOST, "data.train", reader=reader_of(seeing)))


class Judge(Service):
    """`megarl serve` without ranks: scores by the first bytes of the images' hashes, and keeps what the ranks would get."""

    def __init__(self, path: Path, *, sees: bool = True) -> None:
        reader = reader_of(path) if sees else None
        super().__init__(
            MOST, Renderer(load_tokenizer(path), PromptFormat(), MOST, "serve.max_tokens", reader=reader), Mock(spec=RankGroup), 60
        )
        self.seen, self.requests = list[Sample](), list[int]()

    def read(self, samples: Sequence[Any]) -> list[Sample]:
        self.requests.append(len(samples))
        return super().read(samples)

    def scores(self, samples: Sequence[Sample]) -> list[float]:
        self.seen += samples
        return [expected([placed.image.digest for placed in sample.images]) for sample in samples]


def expected(digests: Sequence[str]) -> float:
    return float(sum(int(digest[:4], 16) * (number + 1) for number, digest in enumerate(digests)))


@contextmanager
def served(judge: Judge) -> Iterator[HttpReward]:
    with RewardServer(judge, "127.0.0.1", 0, "/score", None) as server:
        yield HttpReward(url=f"http://127.0.0.1:{server.port}/score", images=True, batch_size=2, attempts=1)


def responses(prompts: Sequence[Prompt], *texts: str) -> list[Response]:
    return [Response(index, text, len(prompt.ids), 1, 1, True, None, 0) for index, prompt in enumerate(prompts) for text in texts]


def test_a_server_reads_the_tokens_and_the_bytes_that_the_policy_read(seeing: Path, prompts: list[Prompt]) -> None:
    judge, asked, tokenizer = Judge(seeing), responses(prompts, "x", "yz"), load_tokenizer(seeing)
    with served(judge) as source:
        check(RewardSettings(source=source))
        scores = http.HttpScorer(source, 1, require_finished=False).score(requests(prompts, asked))
    for sample, response in zip(judge.seen, asked, strict=True):
        prompt = prompts[response.prompt]
        assert sample.tokens.tolist() == [*prompt.tokens, *encode(tokenizer, [response.text], special=False)[0], tokenizer.eos_token_id]
        assert [*sample.images] == [*prompt.images]
        for ours, theirs in zip(sample.images, prompt.images, strict=True):
            assert hashlib.sha256(ours.image.read()).hexdigest() == theirs.image.digest and ours.image.read() == theirs.image.read()
    assert [score.value for score in scores] == [expected([placed.image.digest for placed in prompts[one.prompt].images]) for one in asked]
    assert len({score.value for score in scores}) == 3


def test_images_are_parts_with_the_file_s_own_bytes_and_type(prompts: list[Prompt]) -> None:
    two, several, _ = prompts

    def url(number: int, kind: str) -> dict[str, Any]:
        return {"type": "image_url", "image_url": {"url": f"data:image/{kind};base64,{base64.b64encode(FILES[number]).decode()}"}}

    a, b, first = ({"type": "text", "text": text} for text in ("a", "b", "first"))
    assert sent(two.given, [one.image for one in two.images]) == [
        {"role": "user", "content": [a, url(0, "png"), url(1, "jpeg"), b]},
    ]
    assert sent(several.given, [one.image for one in several.images]) == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [url(2, "webp"), first]},
        {"role": "assistant", "content": "an <image>"},
        {"role": "user", "content": [url(2, "webp")]},
    ]


def test_without_the_key_a_server_is_sent_texts(seeing: Path, prompts: list[Prompt]) -> None:
    judge = Judge(seeing)
    with served(judge) as source:
        texts = source.model_copy(update={"images": False})
        http.HttpScorer(texts, 1, require_finished=False).score(requests(prompts, responses(prompts, "x")))
    assert not any(sample.images for sample in judge.seen)
    assert "a<image><image>b" in load_tokenizer(seeing).decode(judge.seen[0].tokens)


def test_the_images_of_a_request_are_bounded(seeing: Path, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch) -> None:
    judge, asked = Judge(seeing), requests(prompts, responses(prompts, "x", "y"))
    monkeypatch.setattr(http, "MOST_IMAGES", http._size(asked[0]))  # of the first prompt, and less than that of the second
    if http._size(asked[2]) <= http.MOST_IMAGES:
        asked = asked[2:4] + asked[:2] + asked[4:]
        monkeypatch.setattr(http, "MOST_IMAGES", http._size(asked[0]))
    with served(judge) as source:
        scores = http.HttpScorer(source, 1, require_finished=False).score(asked)
    assert judge.requests == [1, 2, 1]  # a text may be with the second, which has all the bytes
    assert [score.value is None for score in scores] == [False, False, True, True, False, False]
    assert scores[2].error is not None and scores[2].error.startswith("images too large: ")


def test_a_server_that_sees_no_images_is_named_before_the_start(seeing: Path, prompts: list[Prompt]) -> None:
    with served(Judge(seeing, sees=False)) as source:
        with pytest.raises(
            ConfigError, match=r"^reward\.source\.url: \S+: status 400 Bad Request: .*the model sees no images \(reward\.source\.ima"
        ):
            check(RewardSettings(source=source))
        check(RewardSettings(source=source.model_copy(update={"images": False})))
    with pytest.raises(ConfigError, match=r"^sample 0: message 0: the model sees no images$"):
        Judge(seeing, sees=False).read([{"prompt": sent(prompts[0].given, [one.image for one in prompts[0].images]), "response": "x"}])


PNG = f"data:image/png;base64,{base64.b64encode(FILES[0]).decode()}"
REFUSED: dict[str, tuple[list[Any], str, str]] = {
    "path": ([{"type": "image_url", "image_url": {"url": "/etc/passwd"}}], "user", "an image is read from a data URL or base64 alone"),
    "file": (
        [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}],
        "user",
        "an image is read from a data URL or base64 alone",
    ),
    "address": ([{"type": "image_url", "image_url": "http://169.254.169.254/a.png"}], "user", "and nothing is fetched"),
    "datasets": ([{"type": "image", "image": "0"}], "user", "an image is read from a data URL or base64 alone"),
    "svg": ([{"type": "image_url", "image_url": "data:image/svg+xml;base64,PHN2Zy8+"}], "user", "the image is refused: no image in one of"),
    "not_base64": ([{"type": "image_url", "image_url": "data:image/png;base64,\u00e9"}], "user", "not base64"),
    "damaged": ([{"type": "image_url", "image_url": PNG[:222]}], "user", "the image is refused: damaged"),
    "assistant": ([{"type": "image_url", "image_url": PNG}], "assistant", "images of the assistant are not read"),
    "many": ([{"type": "image_url", "image_url": PNG}] * 500, "user", r"\d+ images have \d+ tokens, more than limit=400"),
    "spelled": (
        [{"type": "image_url", "image_url": PNG}, {"type": "text", "text": "<|image_pad|>"}],
        "user",
        r"\d+ image tokens, and its 1 ima",
    ),
    "mark": ([{"type": "image_url", "image_url": PNG}, {"type": "text", "text": "\ufdd0"}], "user", "which stands for images here"),
    "video": ([{"type": "video_url", "video_url": PNG}, {"type": "image_url", "image_url": PNG}], "user", "only texts are read here"),
    "text": ([{"type": "text", "text": "a"}], "user", "has a content that is no text but a list"),
    "number": (7, "user", "has a content that is no text but a int"),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_client_cannot_have_read_is_refused_in_one_line(seeing: Path, name: str) -> None:
    content, role, message = REFUSED[name]
    chat = [{"role": "user", "content": "a"}, {"role": role, "content": content}]
    chat += [{"role": "user", "content": "b"}] if role == "assistant" else []
    with pytest.raises(Exception, match=rf"^sample 0[^\n]*{message}[^\n]*$"):
        Judge(seeing).read([{"prompt": chat, "response": "x"}])


def test_an_image_that_many_samples_have_is_decoded_once(seeing: Path, prompts: list[Prompt], monkeypatch: pytest.MonkeyPatch) -> None:
    judge, decoded = Judge(seeing), Mock(side_effect=module_opened)
    monkeypatch.setattr("megarl.models.image_processor.opened", decoded)
    chat = sent(prompts[1].given, [one.image for one in prompts[1].images])
    assert len(judge.read([{"prompt": chat, "response": "x"}] * 50)) == 50
    assert decoded.call_count == 1


def test_a_judge_of_texts_is_named_and_one_of_images_needs_a_model_that_sees(
    seeing: Path, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "0").write_bytes(FILES[0])
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "<image>a", "images": ["0"], "reward_model": {"ground_truth": "1"}}))
    example = Path(__file__).parents[3] / "examples" / "vision" / "rl.yaml"

    def read(model: Path, images: bool) -> str:
        source = f"reward.source={{type: http, url: 'http://127.0.0.1:9/score', images: {str(images).lower()}}}"
        places = [f"model.path={model}", f"data.train.path={tmp_path / 'rows.jsonl'}", "rollout.max_prompt_tokens=400"]
        places.append("data.train.answer_key=reward_model.ground_truth")
        config = load_config(example, [*places, source], TrainConfig)
        PromptReader.of(config).prompts(config.data.train, "data.train", load_tokenizer(model))
        return capsys.readouterr().err

    named = "megarl: data.train: reward.source is sent texts, with <image> in the place of images (reward.source.images=true sends these)\n"
    assert read(seeing, images=False) == named and read(seeing, images=True) == ""
    with pytest.raises(ConfigError, match=r"^reward\.source\.images=true: the model sees no images, and prompts have none$"):
        read(tiny_model, images=True)
    assert "reward.source is sent" not in read(tiny_model, images=False)

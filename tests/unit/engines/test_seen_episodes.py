"""Episodes of environments that show images: where these stand in each context, and what becomes of bad ones."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from megarl.batch import Sample, pack
from megarl.config import FileSource, SourceFormat
from megarl.data.images import answer_reader
from megarl.data.sources import load_prompts
from megarl.data.tokenizer import decode, load_tokenizer
from megarl.data.turns import TurnTokens
from megarl.engines.engine import Request
from megarl.engines.episodes import Limits, Played, Start, play
from megarl.engines.generate import Sampling
from megarl.environments.protocol import Turn, read_messages
from megarl.images import MARK
from tests.image_samples import PAD, picture
from tests.unit.data.test_images import bomb
from tests.unit.engines.test_contexts import BRACKETS, Asks, Scripted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SAID = (
    "{%- macro said(c) -%}{%- if c is string -%}{{ c }}{%- else -%}{%- for p in c -%}{%- if p.type == 'image' -%}"
    "<|vision_start|><|image_pad|><|vision_end|>{%- else -%}{{ p.text }}{%- endif -%}{%- endfor -%}{%- endif -%}{%- endmacro -%}"
)
REWRITING = SAID + BRACKETS.replace("'|>' + m.content }}", "'|>' + said(m.content) }}")


class Seeing(Scripted):
    async def __call__(self, request: Request) -> Sample:
        said = await super().__call__(request)
        for placed in request.images:
            assert request.tokens[placed.start : placed.end] == [PAD] * placed.image.tokens
        return Sample(**{**vars(said), "images": request.images})


class Shows(Asks):
    async def reset(self, seed: int, task: dict[str, Any] | None) -> Turn:
        return Turn(self._questions.pop(0)) if seed else Turn(None)  # type: ignore[attr-defined]

    async def step(self, text: str, tokens: Sequence[int], finished: bool) -> Turn:
        answer = await super().step(text, tokens, finished)
        return answer if answer.messages is None else Turn(answer.messages[0], answer.reward, answer.done)  # type: ignore[arg-type]


def shown(*parts: str | bytes) -> list[dict[str, Any]]:
    """A message of the user's, as a host reads it."""
    content = [{"type": "text", "text": one} if isinstance(one, str) else {"type": "image", "image": one} for one in parts]
    return read_messages([{"role": "user", "content": content}], "step")


def played(
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    script: Sequence[str],
    questions: Sequence[Any],
    most: int = 2000,
    start: Start = Start(0, [], 1, step=3),  # noqa: B008
) -> tuple[Played, list[Request]]:
    """An episode that the environment opens, or a prompt."""
    engine, world = Seeing(tokenizer, script), Shows(list(questions))
    turns = TurnTokens(tokenizer, reader=answer_reader(path, (None, None), most, "most", folder))

    def text_of(turn: Sample) -> str:
        return decode(tokenizer, turn.tokens[turn.prompt_length :].tolist(), finished=turn.finish_reason == "stop")

    limits = Limits(prompt_tokens=500, response_tokens=2000, turns=9)
    [[one]] = asyncio.run(play(engine, world, turns, text_of, [start], Sampling(1, 1.0, 100, 0), limits, 60.0))  # type: ignore[arg-type]
    return one, engine.asked


@pytest.mark.parametrize("rewriting", [False, True])
def test_images_stand_where_the_context_has_them(seeing: Path, tmp_path: Path, rewriting: bool) -> None:
    """Of the opening and of two answers; where the template rewrites turns, each context has all images before it."""
    tokenizer, rng = load_tokenizer(seeing), np.random.default_rng(1)
    if rewriting:
        tokenizer.chat_template = REWRITING
    files = [picture(rng) for _ in range(4)]
    questions = [shown("look ", files[0]), shown(files[1], " and ", files[2]), shown("no image"), shown(files[3], "?")]
    one, asked = played(seeing, tokenizer, tmp_path, ["[a] one", "[b] two", "three", "four"], questions)
    assert one.error is None and one.turns == 4 and len(one.sample.starts) == (2 if rewriting else 0)
    assert [len(request.images) for request in asked] == [1, 3, 3, 4]
    for request in asked:
        assert request.tokens.count(PAD) == sum(placed.image.tokens for placed in request.images)
    sample = one.sample
    expected = [files[0], *files[:3], *files[:3], files[3]] if rewriting else files
    assert [placed.image.read() for placed in sample.images] == expected
    for placed in sample.images:
        assert (sample.tokens[placed.start : placed.end] == PAD).all()
    learned = sample.tokens[sample.prompt_length :][sample.loss_mask]
    assert not (learned == PAD).any() and decode(tokenizer, learned.tolist(), finished=False).count("<|end|>") == 4
    batch = pack([sample])
    assert batch.images_N is not None and len(batch.images_N[0]) == len(expected)
    for placed in batch.images_N[0]:
        assert (batch.input_T[placed.start : placed.end] == PAD).all()
    assert sorted(file.read_bytes() for file in (tmp_path / "3").iterdir()) == sorted(files)  # of the step that asked for it


BAD: dict[str, tuple[list[str | bytes], str]] = {
    "bomb": ([bomb()], "the image is refused: more than 67108864 pixels"),
    "damaged": ([picture(np.random.default_rng(1))[:600]], "the image is refused: damaged: "),
    "text": ([b"none"], "the image is refused: no image in one of the formats"),
    "many": ([picture(np.random.default_rng(1))] * 10_000, "images have "),
    "mark": (["a", MARK], "which stands for images here"),
    "token": (["a<|image_pad|>"], "1 image tokens, and its 0 images have 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_image_ends_its_episode(seeing: Path, tmp_path: Path, name: str) -> None:
    parts, message = BAD[name]
    one, _ = played(seeing, load_tokenizer(seeing), tmp_path, ["one", "two"], [shown("a"), shown(*parts)], most=100)
    assert one.error is not None and message in one.error and one.reward == 0.0
    assert len(list(tmp_path.rglob("*"))) <= 2


def test_a_model_of_text_takes_no_images(tiny_model: Path) -> None:
    with pytest.raises(ValueError, match="the model sees none"):
        TurnTokens(load_tokenizer(tiny_model)).opened(shown("a", picture(np.random.default_rng(1))))


@pytest.mark.parametrize("rewriting", [False, True])
def test_a_prompt_may_speak_of_images_beside_one(seeing: Path, tmp_path: Path, rewriting: bool) -> None:
    """What a text has in common with the name of an image for environments stays text, in each context."""
    tokenizer, file = load_tokenizer(seeing), picture(np.random.default_rng(1))
    tokenizer.chat_template = REWRITING if rewriting else tokenizer.chat_template
    url = shown(file)[0]["content"][0]["image"]
    content = [{"type": "text", "text": "the tag <image> of "}, {"type": "image", "image": url}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": [{"role": "user", "content": content}], "answer": ""}))
    source, reader = (
        FileSource(type="file", path=tmp_path / "rows.jsonl", answer_key="answer"),
        answer_reader(seeing, (None, None), 500, "most"),
    )
    [prompt] = load_prompts(source, tokenizer, SourceFormat(), 500, "data.train", reader=reader)
    start = Start(0, prompt.tokens, 0, prompt.task, images=prompt.images)
    one, asked = played(seeing, tokenizer, tmp_path / "kept", ["[a] one", "two"], [shown("more?")], start=start)
    assert one.error is None and one.turns == 2 and len(one.sample.starts) == rewriting
    for request in asked:
        assert [placed.image for placed in request.images] == [prompt.images[0].image]
        text = decode(tokenizer, request.tokens, finished=False)
        assert text.count("the tag <image> of <|vision_start|><|image_pad|>") == 1


@pytest.mark.parametrize("rewriting", [False, True])
def test_what_the_policy_writes_is_no_image(seeing: Path, tmp_path: Path, rewriting: bool) -> None:
    """It samples the token of images: a token like others, and in a context that is rewritten the end of the episode."""
    tokenizer = load_tokenizer(seeing)
    if rewriting:
        tokenizer.chat_template = REWRITING
    file = picture(np.random.default_rng(1))
    one, asked = played(seeing, tokenizer, tmp_path, ["[a]<|image_pad|>", "two"], [shown("a", file), shown("b", file)])
    assert one.error is None and one.unreadable == rewriting
    assert [len(request.images) for request in asked] == ([1] if rewriting else [1, 2])
    assert rewriting or asked[1].tokens.count(PAD) == 1 + sum(placed.image.tokens for placed in asked[1].images)
    url = "data:image/*;base64," + base64.b64encode(file).decode()
    assert shown(file)[0]["content"] == [{"type": "image", "image": url}]

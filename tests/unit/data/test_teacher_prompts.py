"""What a teacher reads in the place of a prompt: the template with the row's values, or another response that is right."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megarl.batch import Sample
from megarl.config import ConfigError, DistillationSettings, FileSource, PromptFormat, SourceFormat
from megarl.data.images import ImageReader
from megarl.data.prompts import Prompt, Renderer
from megarl.data.rows import Row
from megarl.data.sources import load_prompts
from megarl.data.teacher_prompts import Attempt, TeacherPrompts
from megarl.data.tokenizer import load_tokenizer
from megarl.images import MARK
from megarl.models.image_processor import ImageProcessor
from megarl.ranks.assemble import moved
from tests.image_samples import PAD, picture

PLAIN = PromptFormat(chat=False, template="Q: {prompt}\nA: ")


def prompts_of(model: Path, template: str, most: int = 200, data: PromptFormat = PLAIN) -> TeacherPrompts:
    settings = DistillationSettings(prompt=template)
    return TeacherPrompts(settings, load_tokenizer(model), data, most, "LIMIT")


def prompt_of(given: Any = "reverse abc", **meta: Any) -> Prompt:
    text = given if isinstance(given, str) else given[-1]["content"]
    return Prompt(7, text, (), "cba", meta, given, place="row 7")


def text(model: Path, tokens: np.ndarray | None) -> str:
    assert tokens is not None
    return str(load_tokenizer(model).decode(tokens.tolist()))


def test_the_template_has_the_values_of_the_row(tiny_model: Path) -> None:
    made = prompts_of(tiny_model, "{prompt} / {answer} / {hint} / {extra.steps}")
    first, second = made.made(prompt_of(hint="back", extra={"steps": 3}), [Attempt("x", 1.0), Attempt("y", None)])
    assert text(tiny_model, first) == text(tiny_model, second) == "Q: reverse abc / cba / back / 3\nA: "


def test_of_a_chat_the_last_message_is_replaced(tiny_model: Path) -> None:
    """What the teacher reads is the rendering of the chat whose last message is the filled template."""
    data = PromptFormat()
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "abc"}]
    [made] = prompts_of(tiny_model, "{prompt} or {answer}", data=data).made(prompt_of(chat), [Attempt("", 0.0)])
    told = [chat[0], {"role": "user", "content": "abc or cba"}]
    [own] = Renderer(load_tokenizer(tiny_model), data, 200, "LIMIT").prompts([Row("row", told, "", {})], [0])
    assert made is not None and made.tolist() == own.tokens


def test_a_solution_is_the_first_other_response_that_is_right_without_its_reasoning(tiny_model: Path) -> None:
    made = prompts_of(tiny_model, "{prompt} as {solution}")
    attempts = [Attempt("wrong", 0.0), Attempt("so </think> cba", 1.0), Attempt("[THINK]so", 1.0), Attempt("none", None)]
    attempts.append(Attempt("it is cba", 0.5))
    read = [text(tiny_model, one) for one in made.made(prompt_of(), attempts)]
    first, second = (f"Q: reverse abc as {solution}\nA: " for solution in ("cba", "it is cba"))
    assert read == [first, second, first, first, first]
    assert made.made(prompt_of(), [Attempt("wrong", 0.0), Attempt("right", 1.0)])[1] is None


def test_feedback_is_of_the_response_itself(tiny_model: Path) -> None:
    """A response without it has none to show; with a solution in the template, both have to be there."""
    attempts = [Attempt("wrong", 0.0, "not cab"), Attempt("cba", 1.0), Attempt("worse", 0.0, "not {x}"), Attempt("no", 0.0, "no " * 200)]
    first, *rest = prompts_of(tiny_model, "{prompt}: {feedback}").made(prompt_of(feedback="a column"), attempts)
    assert text(tiny_model, first) == "Q: reverse abc: not cab\nA: "
    assert rest[0] is None and text(tiny_model, rest[1]) == "Q: reverse abc: not {x}\nA: " and rest[2] is None  # which is too long
    both = prompts_of(tiny_model, "{prompt}: {feedback}, {solution}").made(prompt_of(), attempts[:3])
    assert text(tiny_model, both[0]) == "Q: reverse abc: not cab, cba\nA: " and both[1] is None


def test_a_solution_that_does_not_fit_is_none(tiny_model: Path) -> None:
    made = prompts_of(tiny_model, "{prompt} as {solution}", most=60)
    assert made.made(prompt_of(), [Attempt("", 0.0), Attempt("abc " * 60, 1.0)]) == [None, None]


@pytest.mark.parametrize(
    ("template", "meta", "line"),
    [
        (
            "{prompt} {hnt}",
            {"hint": "b"},
            r"distillation\.prompt: row 7 has no column 'hnt' \(did you mean 'hint'\?\) \(there are prompt, ",
        ),
        ("{prompt} {a.b}", {"a": {"c": 1}}, r"distillation\.prompt: row 7 has no column 'a\.b'"),
        ("{prompt} {hint}", {"hint": None}, r"distillation\.prompt: row 7 has no column 'hint'"),
        ("{prompt} {hint}", {"hint": "word " * 60}, r"distillation\.prompt: row 7: (the )?prompt.* LIMIT=200"),
    ],
)
def test_what_cannot_be_shown_is_refused_with_the_rows_name(tiny_model: Path, template: str, meta: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=f"^{line}"):
        prompts_of(tiny_model, template).check([prompt_of(**meta)])


def test_the_teacher_sees_the_images_of_the_question_where_its_prompt_has_them(seeing: Path, tmp_path: Path) -> None:
    """What it reads is the prompt of a row that asks so; the images of the sample are moved to their places there."""
    for number in range(2):
        (tmp_path / str(number)).write_bytes(picture(np.random.default_rng(number)))
    told = [{"role": "user", "content": "<image>before"}, {"role": "assistant", "content": "yes"}]
    asked = [*told, {"role": "user", "content": "a<image>b<image>"}]
    shown = [*told, {"role": "user", "content": "hint cba for a<image>b<image>, now"}]
    rows = [{"prompt": chat, "images": ["1", "0", "1"], "answer": "cba"} for chat in (asked, shown)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tokenizer, reader = load_tokenizer(seeing), ImageReader(ImageProcessor(seeing), PAD, 400, "LIMIT")
    source = FileSource(type="file", path=tmp_path / "rows.jsonl", answer_key="answer")
    prompt, expected = load_prompts(source, tokenizer, SourceFormat(), 400, "data.train", reader=reader)

    def teacher(template: str) -> TeacherPrompts:
        return TeacherPrompts(DistillationSettings(prompt=template), tokenizer, PromptFormat(), 400, "LIMIT", reader)

    [made] = teacher("hint {answer} for {prompt}, now").made(prompt, [Attempt("", 0.0)])
    assert made is not None and made.tolist() == expected.tokens
    sample = Sample(np.array([*prompt.tokens, 11, 12], np.int32), len(prompt.tokens), np.zeros(2, np.float32), "stop", images=prompt.images)
    assert moved(sample, made) == [*expected.images] and len(expected.images) == 3
    solved = teacher("{prompt} as {solution}")
    assert solved.made(prompt, [Attempt("", 0.0), Attempt(f"a{MARK}", 1.0), Attempt("", 0.0)])[0] is None
    with pytest.raises(ConfigError, match=r"^distillation\.prompt: [^\n]*:1 has images, and its \{prompt\} stands 2 times here, not once$"):
        teacher("{prompt} {answer} {prompt}").check([prompt])
    text = Sample(np.array([5, 6, 7], np.int32), 2, np.zeros(1, np.float32), "stop")
    assert moved(text, np.array([5, 5, 6], np.int32)) == []

"""Responses kept for reading: samples/step_12.jsonl of a training step, samples/eval_heldout_step_12.jsonl of an evaluation."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, TypeAdapter, ValidationError

from megarl.data.answers import text_of
from megarl.errors import ConfigError
from megarl.image_source import ImageSource
from megarl.text.display import one_line
from megarl.text.strict_json import lines_of, parse_json

if TYPE_CHECKING:
    from megarl.data.prompts import Prompt
    from megarl.response import Response
    from megarl.rewards.score import Score

FOLDER = "samples"
MAX_IMAGES = 16  # of a sample that are recorded
_FILE = re.compile(r"(?:eval_(?P<set>.+)_)?step_(?P<step>\d+)\.jsonl")


def _messages(prompt: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    messages = [] if isinstance(prompt, str) else prompt
    if not all(isinstance(message.get("role"), str) and isinstance(message.get("content", ""), str) for message in messages):
        raise ValueError("a message needs a text 'role' and a text 'content'")
    return prompt


def _message_text(message: dict[str, Any]) -> str:
    """A message's text, and its calls as JSON; one that only calls has no `content`."""
    calls = [json.dumps(message["tool_calls"], ensure_ascii=False)] if message.get("tool_calls") else []
    return " ".join([*filter(None, [message.get("content")]), *calls])


@dataclass(frozen=True)
class ImageRecord:
    """An image that a sample holds."""

    digest: str  # SHA-256 of its bytes
    size: tuple[int, int]  # width and height
    source: ImageSource

    @property
    def name(self) -> str:
        """Where it is, and its size."""
        row = f":{self.source.row}" if self.source.row else ""
        return f"{self.source.path}{row} ({self.size[0]} x {self.size[1]})"


@dataclass(frozen=True)
class SampleRecord:
    """One response with its prompt and its score. Nothing in it is safe to print: see `megarl.text.display.escaped`."""

    prompt: Annotated[str | list[dict[str, Any]], AfterValidator(_messages)]  # in the source's form
    answer: str
    response: str
    reward: float | None  # None: no score
    parts: dict[str, float]
    error: str | None  # why there is no score
    finish_reason: str  # "stop" or "length"
    length: int  # tokens of the response; of an episode, those that the policy wrote
    sample: int  # index among the responses to the prompt
    greedy: bool
    turns: int  # number of the policy's turns in an episode
    scored: bool  # False: cut off, and scored 0 for that (reward.require_finished)
    images: tuple[ImageRecord, ...] = ()  # the first `MAX_IMAGES`, in order

    @property
    def ending(self) -> str:
        """How the response ended, and whether its score reflects only that."""
        ending = "ended by itself" if self.finish_reason == "stop" else "cut by the length limit"
        ending += f" after {self.turns} turns" if self.turns > 1 else ""
        return ending if self.scored else f"{ending} and not scored (reward.require_finished)"

    @property
    def scored_as(self) -> str:
        """The reward in words."""
        return "no reward" if self.reward is None else f"reward {self.reward:g}"

    @property
    def question(self) -> str:
        """The prompt as one text."""
        if isinstance(self.prompt, str):
            return self.prompt
        return "\n".join(f"{message['role']}: {_message_text(message)}" for message in self.prompt)


_KINDS = TypeAdapter(SampleRecord)


@dataclass(frozen=True)
class File:
    """The samples of one step, or of one evaluation."""

    path: Path
    step: int
    set: str | None  # the evaluated set; None for training

    def records(self) -> Iterator[SampleRecord]:
        """Yield the samples. Raises ConfigError for a line that megarl did not write."""
        for place, line in lines_of(self.path, str(self.path)):
            try:
                parse_json(line)  # refuses a duplicate key, which pydantic accepts
                record = _KINDS.validate_json(line, strict=True)
            except ValidationError as error:
                fault = error.errors()[0]
                field_name = one_line(".".join(map(str, fault["loc"])), 200)
                raise ConfigError(f"{place}: no sample: {field_name}: {fault['msg']}") from None
            except ValueError as error:
                raise ConfigError(f"{place}: no sample: {error}") from None
            yield record


def record(prompt: Prompt, response: Response, score: Score, greedy: bool = False) -> SampleRecord:
    """The record of a scored response.

    Args:
        prompt: the prompt that it answers.
        response: the response from the engine.
        score: its reward.
        greedy: whether it is the greedy response.
    """
    played = response.episode
    return SampleRecord(
        prompt=prompt.shown or prompt.text if played is None else played.opening,
        answer=text_of(prompt.answer),
        response=response.text if played is None else played.transcript,
        reward=score.value,
        parts=score.parts,
        error=score.error,
        finish_reason="stop" if response.finished else "length",
        length=response.length if played is None else response.loss_tokens,
        sample=response.index,
        greedy=greedy,
        turns=1 if played is None else played.turns,
        scored=score.scored,
        images=tuple(ImageRecord(one.image.digest, one.image.size, one.image.source) for one in response.images[:MAX_IMAGES]),
    )


def line(record: SampleRecord) -> str:
    """A short form of a response, on one line that is safe to print."""
    exchange = f"{one_line(record.question, 120)} -> {one_line(record.response, 240)}"
    return f"{record.scored_as}, {record.length} tokens, {record.ending}{', greedy' if record.greedy else ''}: {exchange}"


def spread(count: int, most: int) -> list[int]:
    """At most `most` of the indices below `count`, evenly spaced, the first and the last among them."""
    if count <= most or most < 2:
        return list(range(min(count, most)))
    return [index * (count - 1) // (most - 1) for index in range(most)]


def write(run: Path, step: int, records: Sequence[SampleRecord], evaluation: str | None = None) -> None:
    """Write the samples of a step, or of the evaluation of a set, in place of earlier ones; the file is complete or absent.

    The file is ASCII: JSON escapes whatever could move a terminal's cursor.

    Args:
        run: the run's directory.
        step: the step that they belong to.
        records: the samples.
        evaluation: the set that was evaluated; None: they are training samples of the step.
    """
    folder = run / FOLDER
    folder.mkdir(exist_ok=True)
    path = folder / f"{'' if evaluation is None else f'eval_{evaluation}_'}step_{step}.jsonl"
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text("".join(json.dumps(_plain(record)) + "\n" for record in records), encoding="ascii")
    os.replace(partial, path)


def _plain(record: SampleRecord) -> dict[str, Any]:
    """A record as a line has it: without images, if there are none."""
    plain = asdict(record)
    return plain if record.images else {name: value for name, value in plain.items() if name != "images"}


def files(run: Path) -> list[File]:
    """All sample files of a run, newest step first; within a step, evaluations first."""
    matches = [(path, _FILE.fullmatch(path.name)) for path in sorted((run / FOLDER).glob("*.jsonl"))]
    sample_files = [File(path, int(match["step"]), match["set"]) for path, match in matches if match is not None]
    return sorted(sample_files, key=lambda file: (-file.step, file.set is None))


def forget_after(run: Path, step: int) -> None:
    """Remove the files that a run resuming from `step` will write again."""
    for file in files(run):
        if file.step > step:
            file.path.unlink()

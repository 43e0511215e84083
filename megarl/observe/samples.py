"""Responses to read: samples/step_12.jsonl of a training step, samples/eval_heldout_step_12.jsonl of an evaluation."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, TypeAdapter, ValidationError

from megarl.errors import ConfigError
from megarl.strict_json import lines_of, parse_json
from megarl.text import one_line

if TYPE_CHECKING:
    from megarl.data.prompts import Prompt
    from megarl.response import Response
    from megarl.rewards.score import Score

FOLDER = "samples"
_FILE = re.compile(r"(?:eval_(?P<set>.+)_)?step_(?P<step>\d+)\.jsonl")


def _messages(prompt: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    if not isinstance(prompt, str) and not all(isinstance(message.get(name), str) for message in prompt for name in ("role", "content")):
        raise ValueError("a message needs a text 'role' and a text 'content'")
    return prompt


@dataclass(frozen=True)
class SampleRecord:
    """One response with what it was asked and what it scored. Nothing in it is safe to print: see `megarl.text.escaped`."""

    prompt: Annotated[str | list[dict[str, Any]], AfterValidator(_messages)]  # as the source has it
    answer: str
    response: str
    reward: float
    parts: dict[str, float]
    error: str | None  # of the reward function
    finish_reason: str  # "stop" or "length"
    length: int  # tokens of the response
    sample: int  # which of the responses to the prompt
    greedy: bool
    turns: int  # of the policy, in an episode
    scored: bool  # False: cut, and scored 0 for it (reward.require_finished)

    @property
    def ending(self) -> str:
        """How it ended, and whether its score stands for that alone."""
        ended = "ended by itself" if self.finish_reason == "stop" else "cut by the length limit"
        ended += f" after {self.turns} turns" if self.turns > 1 else ""
        return ended if self.scored else f"{ended} and not scored (reward.require_finished)"

    @property
    def question(self) -> str:
        """The prompt as one text."""
        if isinstance(self.prompt, str):
            return self.prompt
        return "\n".join(f"{message['role']}: {message['content']}" for message in self.prompt)


_KINDS = TypeAdapter(SampleRecord)


@dataclass(frozen=True)
class File:
    """The samples of one step, or of one evaluation."""

    path: Path
    step: int
    set: str | None  # the evaluation's

    def records(self) -> Iterator[SampleRecord]:
        """Raises ConfigError for a line that megarl has not written."""
        for place, line in lines_of(self.path, str(self.path)):
            try:
                parse_json(line)  # which refuses what pydantic takes: a key twice
                record = _KINDS.validate_json(line, strict=True)
            except ValidationError as error:
                fault = error.errors()[0]
                named = one_line(".".join(map(str, fault["loc"])), 200)
                raise ConfigError(f"{place}: no sample: {named}: {fault['msg']}") from None
            except ValueError as error:
                raise ConfigError(f"{place}: no sample: {error}") from None
            yield record


def record(prompt: Prompt, response: Response, score: Score, greedy: bool = False) -> SampleRecord:
    """What is kept of a scored response.

    Args:
        prompt: that it answers.
        response: as the engine gave it.
        score: its reward.
        greedy: whether it is the likeliest one.
    """
    played = response.episode
    return SampleRecord(
        prompt=prompt.given or prompt.text if played is None else played.opening,
        answer=prompt.answer,
        response=response.text if played is None else played.transcript,
        reward=score.value,
        parts=score.parts,
        error=score.error,
        finish_reason="stop" if response.finished else "length",
        length=response.length,
        sample=response.index,
        greedy=greedy,
        turns=1 if played is None else played.turns,
        scored=score.scored,
    )


def line(record: SampleRecord) -> str:
    """A response in short, on one line that is safe to print."""
    said = f"{one_line(record.question, 120)} -> {one_line(record.response, 240)}"
    return f"reward {record.reward:g}, {record.length} tokens, {record.ending}{', greedy' if record.greedy else ''}: {said}"


def spread(count: int, most: int) -> list[int]:
    """At most `most` of the indices below `count`, evenly spaced: of as many prompts as possible, whatever the responses score."""
    return sorted({index * count // most for index in range(most)}) if count > most else list(range(count))


def write(run: Path, step: int, records: Sequence[SampleRecord], evaluation: str | None = None) -> None:
    """Writes the samples of a step, or of the evaluation of a set, whole or not at all, in the place of earlier ones.

    The file is ASCII: JSON escapes whatever could move a terminal's cursor.

    Args:
        run: its directory.
        step: that they are of.
        records: the samples.
        evaluation: the set that was evaluated; None: they are of the step itself.
    """
    folder = run / FOLDER
    folder.mkdir(exist_ok=True)
    path = folder / f"{'' if evaluation is None else f'eval_{evaluation}_'}step_{step}.jsonl"
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text("".join(json.dumps(asdict(record)) + "\n" for record in records), encoding="ascii")
    os.replace(partial, path)


def files(run: Path) -> list[File]:
    """All files of a run, the newest step first; of one step, evaluations first."""
    found = [(path, _FILE.fullmatch(path.name)) for path in sorted((run / FOLDER).glob("*.jsonl"))]
    named = [File(path, int(match["step"]), match["set"]) for path, match in found if match is not None]
    return sorted(named, key=lambda file: (-file.step, file.set is None))


def forget_after(run: Path, step: int) -> None:
    """Removes what a run that goes on from `step` will write anew."""
    for file in files(run):
        if file.step > step:
            file.path.unlink()

"""Where prompts, demonstrations and preferences come from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from megarl.config.section import Fraction, NonNegative, Positive, Section


class ReasoningGymSource(Section):
    """Procedural prompts of reasoning-gym."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    dataset: str
    """Name of the reasoning-gym data set."""
    params: dict[str, Any] = {}
    """Parameters of that data set."""
    seed: NonNegative
    """Seed of the items."""
    items: Positive
    """How many items are drawn."""
    exclude: ReasoningGymSource | None = None
    """Questions of this other source, which has the same keys, are left out (by text)."""


class FileSource(Section):
    """A .jsonl or .parquet file in the column layout of DAPO and verl: `prompt` (text or chat messages), `reward_model.ground_truth`."""

    type: Literal["file"] = "file"
    path: Path
    """The file."""
    prompt_key: str = "prompt"
    """Column of the prompt; a dot looks inside dictionaries."""
    answer_key: str = "reward_model.ground_truth"
    """Column of the answer; a dot looks inside dictionaries."""


PromptSource = Annotated[ReasoningGymSource | FileSource, Field(discriminator="type")]


class PromptFormat(Section):
    """How the text of a prompt becomes what the model reads."""

    chat: bool = True
    """Wrap each prompt in the tokenizer's chat template; false feeds `template` instead."""
    template: str = "{prompt}"
    """Used when `chat` is false."""


class DataSettings(PromptFormat):
    """Prompts of a run."""

    train: PromptSource
    """What the policy learns from."""
    eval: PromptSource
    """What it is evaluated on."""
    shuffle: bool = True
    """Draw the prompts of an epoch in random order."""


class SftData(PromptFormat):
    """Demonstrations: prompt sources with their reference answers as responses."""

    train: PromptSource
    """What the model learns from."""
    eval: PromptSource | None = None
    """Loss and token accuracy are measured on right demonstrations of it."""
    demonstration: Literal["answer", "chain_sum_steps"] = "answer"
    """The response: the reference answer, or its worked steps ("4-1=3;3-7=-4")."""
    corrupt_copy: Fraction = 0.0
    """Share of the demonstrations of the last steps that copy the question's word instead of answering ..."""
    corrupt_last: Fraction = 0.0
    """... over this last share of the steps: an open stand-in for a weak base model."""


class GymPreferenceSource(ReasoningGymSource):
    """Pairs made from reasoning-gym's items: the right answer is chosen, a corrupted one (see megarl.data.corruption) rejected."""

    demonstration: Literal["answer", "chain_sum_steps"] = "answer"
    """The responses: answers, or worked steps."""


class PreferenceFileSource(Section):
    """A .jsonl or .parquet file of pairs: `prompt`, `chosen` and `rejected`, each a text or chat messages.

    `chosen` and `rejected` may be whole conversations that end with the assistant's message; the prompt is then what comes before it.
    """

    type: Literal["file"] = "file"
    path: Path
    """The file."""
    prompt_key: str = "prompt"
    """Column of the prompt; a dot looks inside dictionaries."""
    chosen_key: str = "chosen"
    """Column of the better response; a dot looks inside dictionaries."""
    rejected_key: str = "rejected"
    """Column of the worse response; a dot looks inside dictionaries."""
    margin_key: str = "margin"
    """Reward model: column that says by how much the chosen response is better (0 in a row without it); a dot looks inside dictionaries."""


PreferenceSource = Annotated[GymPreferenceSource | PreferenceFileSource, Field(discriminator="type")]


class PreferenceData(PromptFormat):
    """Pairs of responses."""

    train: PreferenceSource
    """What the model learns from."""
    eval: PreferenceSource
    """Held-out pairs."""


class EvalData(PromptFormat):
    """Prompts of an evaluation."""

    eval: PromptSource
    """The held-out prompts."""


class PairsData(EvalData):
    """Prompts whose responses become pairs."""

    train: PromptSource
    """Those of train.jsonl; those of `eval` go to eval.jsonl."""


class ServeData(PromptFormat):
    """The prompts that a client sends."""

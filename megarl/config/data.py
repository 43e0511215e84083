"""Where prompts, demonstrations and preferences come from."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt

from megarl.config.section import Place, Section


class ReasoningGymSource(Section):
    """Procedural prompts of reasoning-gym."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    dataset: str
    """Name of the reasoning-gym data set."""
    params: dict[str, Any] = {}
    """Parameters of that data set."""
    seed: NonNegativeInt
    """Seed of the items."""
    items: Annotated[int, Field(gt=0, le=1_000_000)]
    """How many items are drawn."""
    exclude: ReasoningGymSource | None = None
    """Questions of this other source, which has the same keys, are left out (by text)."""


class FileSource(Section):
    """A .jsonl or .parquet file in the column layout of DAPO and verl: `prompt` (text or chat messages), `reward_model.ground_truth`."""

    type: Literal["file"] = "file"
    path: Place
    """The file."""
    prompt_key: str = "prompt"
    """Column of the prompt; a dot looks inside dictionaries."""
    answer_key: str = "reward_model.ground_truth"
    """Column of the answer, a text or a number; a dot looks inside dictionaries."""


class EpisodeSource(Section):
    """Episodes of the run's environment, which begins each with what it makes of a seed."""

    type: Literal["episodes"] = "episodes"
    seed: NonNegativeInt
    """Seed of the first; each further one has the next seed."""
    items: Annotated[int, Field(gt=0, le=1_000_000_000)]
    """How many there are."""


PromptSource = Annotated[ReasoningGymSource | FileSource | EpisodeSource, Field(discriminator="type")]


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


class ConversationSource(Section):
    """A .jsonl or .parquet file of conversations, lists of chat messages. The assistant's messages are learned, the others only read."""

    type: Literal["conversations"] = "conversations"
    path: Place
    """The file."""
    messages_key: str = "messages"
    """Column of the messages; a dot looks inside dictionaries."""


SftSource = Annotated[ReasoningGymSource | FileSource | ConversationSource, Field(discriminator="type")]


class SftData(PromptFormat):
    """What supervised training learns: conversations, or prompts with their reference answers as responses."""

    train: SftSource
    """What the model learns from."""
    eval: SftSource | None = None
    """Loss and token accuracy are measured on it."""
    shuffle: bool = True
    """Draw the conversations of an epoch in random order; false: in the order of the file."""


class PreferenceSource(Section):
    """A .jsonl or .parquet file of pairs: `prompt`, `chosen` and `rejected`, each a text or chat messages.

    `chosen` and `rejected` may be whole conversations that end with the assistant's message; the prompt is then what comes before it.
    """

    type: Literal["file"] = "file"
    path: Place
    """The file."""
    prompt_key: str = "prompt"
    """Column of the prompt; a dot looks inside dictionaries."""
    chosen_key: str = "chosen"
    """Column of the better response; a dot looks inside dictionaries."""
    rejected_key: str = "rejected"
    """Column of the worse response; a dot looks inside dictionaries."""
    margin_key: str = "margin"
    """Reward model: column that says by how much the chosen response is better (0 in a row without it); a dot looks inside dictionaries."""


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

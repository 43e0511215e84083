"""Where prompts, demonstrations and preferences come from."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt, model_validator

from megarl.config.section import Place, Section
from megarl.config.where import Where


class ReasoningGymSource(Section):
    """Procedurally generated prompts from reasoning-gym."""

    type: Literal["reasoning_gym"] = "reasoning_gym"
    dataset: str
    """Name of the reasoning-gym data set."""
    params: dict[str, Any] = {}
    """Parameters of that data set."""
    seed: NonNegativeInt
    """Seed of the items."""
    items: Annotated[int, Field(gt=0, le=1_000_000)]
    """How many items to draw."""
    exclude: ReasoningGymSource | None = None
    """Another source, with the same keys as this one; questions that it contains (compared by text) are left out."""


class TableSource(Section):
    """The rows of a .jsonl or .parquet file, or of a directory written by `datasets` (save_to_disk)."""

    type: str
    path: Place
    """The file."""
    skip: NonNegativeInt = 0
    """Rows to skip at the beginning, such as those that another source holds out."""
    rows: PositiveInt | None = None
    """Maximum number of rows to read, before `where` selects among them; null: all."""
    where: Where = {}
    image_folder: Place | None = None
    """The folder in which the paths of images start, and in which the files lie that they lead to; null: that of `path`."""


class FileSource(TableSource):
    """A .jsonl or .parquet file, or a directory written by `datasets` (save_to_disk), with the columns that DAPO and verl use.

    These are `prompt` (text or chat messages) and `reward_model.ground_truth`; a column `tools` has the schemas of the tools. With 100,000
    rows or more of Parquet or `datasets`, prompts are tokenised when they are drawn; only those that might be refused are tokenised before
    the start.
    """

    type: Literal["file"] = "file"
    prompt_key: str = "prompt"
    """Column of the prompt; a dot looks inside dictionaries."""
    answer_key: str = "reward_model.ground_truth"
    """Column of the answer: a text, a number, a list of which any is right, or, for your own reward, any other value but null; a dot looks
    inside dictionaries."""


class MixturePart(Section):
    """One source of a mixture."""

    source: Any
    weight: Annotated[float, Field(gt=0, le=1000)] = 1.0
    """How often each item comes up in an epoch: 2 means twice; 0.25 means that a quarter of them, drawn once, come up."""


PartT = TypeVar("PartT")
Parts = Annotated[list[PartT], Field(min_length=1, max_length=1024)]


class SourceMixture(Section):
    """Several sources as one."""

    type: Literal["mixture"] = "mixture"
    parts: Parts[Any]
    """The sources and their weights."""
    seed: NonNegativeInt = 1
    """Seed for drawing the items of a part with a weight below 1."""


class PromptPart(MixturePart):
    """One source of a mixture."""

    source: Annotated[ReasoningGymSource | FileSource, Field(discriminator="type")]
    """Its prompts."""


class MixtureSource(SourceMixture):
    """Several sources as one. With `data.shuffle=false` they follow one another, so parts selected by `where` make a curriculum."""

    parts: Parts[PromptPart]


class EpisodeSource(Section):
    """Episodes of the run's environment, which generates each opening from a seed."""

    type: Literal["episodes"] = "episodes"
    seed: NonNegativeInt
    """Seed of the first episode; each later one has the next seed."""
    items: Annotated[int, Field(gt=0, le=1_000_000_000)]
    """Number of episodes."""


PromptSource = Annotated[ReasoningGymSource | FileSource | MixtureSource | EpisodeSource, Field(discriminator="type")]


PROMPT_ALONE = "{prompt}"


class PromptFormat(Section):
    """How a prompt's text is turned into the model's input."""

    chat: bool = True
    """Wrap each prompt in the tokenizer's chat template; false: fill in `template` instead."""
    template: str = PROMPT_ALONE
    """With `chat` false: the text around each prompt."""
    system: str | None = None
    """With `chat`: a system message for every prompt and conversation that does not begin with one."""
    template_args: dict[str, Any] = {}
    """With `chat`: arguments of the chat template, such as {enable_thinking: false}. A row's column `chat_template_kwargs` (a mapping, or
    one as JSON) overrides them."""

    control_tokens: Literal["allow", "refuse"] = "allow"
    """With `chat`: what to do with texts that contain special tokens, such as a prompt that was rendered before. allow: report how many
    rows have some; refuse: they are refused like any bad row."""

    @model_validator(mode="after")
    def _every_setting_is_used(self) -> PromptFormat:
        if self.template != PROMPT_ALONE and self.chat:
            raise ValueError(f"data.template={self.template!r:.80}: data.chat=true puts the chat template around prompts: give one of them")
        if self.control_tokens == "refuse" and not self.chat:
            raise ValueError("data.control_tokens=refuse: with data.chat=false no text is looked through for control tokens")
        if self.system is not None and not self.chat:
            raise ValueError("data.system: data.chat=false has no system message; put it in data.template")
        if self.template_args and not self.chat:
            raise ValueError("data.template_args: data.chat=false has no chat template that could take arguments")
        return self


class SourceFormat(PromptFormat):
    """The format of prompts that are read from sources."""

    on_bad_row: Literal["refuse", "drop"] = "refuse"
    """What to do with a row that is malformed, or of which the chat template would leave something out. refuse: report where it is and
    what is wrong, and stop; drop: leave it out, and report how many rows were, with the first reasons."""
    overlong: Literal["refuse", "drop"] = "refuse"
    """What to do with an item that exceeds the token limit. refuse: report where it is, and stop; drop: leave it out, and report how many
    items were."""


class DataSettings(SourceFormat):
    """Prompts of a run."""

    train: PromptSource
    """What the policy learns from."""
    eval: PromptSource | None = None
    """The evaluation set `heldout`: one sampled and one greedy response to each prompt. null: only the sets in `eval`."""
    shuffle: bool = True
    """Draw the prompts of an epoch in random order."""


class ConversationSource(TableSource):
    """A .jsonl or .parquet file, or a directory written by `datasets`, of conversations, which are lists of chat messages.

    The model learns the assistant's messages, reasoning and tool calls included, as the chat template writes them; the others are only
    context. A column `tools` has the schemas of the tools.
    """

    type: Literal["conversations"] = "conversations"
    messages_key: str = "messages"
    """Column of the messages; a dot looks inside dictionaries."""


class TaughtSource(TableSource):
    """A .jsonl or .parquet file, or a directory written by `datasets`, of responses with a teacher's likeliest tokens (`sft.distillation`).

    Each row has the token ids of a prompt (`prompt_ids`) and of the response to it (`response_ids`, with the end token), and for each
    token of the response K ids (`top_ids`) and the log-probs of these that the teacher has in its place (`top_logps`), at temperature 1.
    """

    type: Literal["taught"] = "taught"


class SftPart(MixturePart):
    """One source of a mixture."""

    source: Annotated[ReasoningGymSource | FileSource | ConversationSource, Field(discriminator="type")]
    """Its conversations, or prompts with answers."""


class SftMixture(SourceMixture):
    """Several sources as one."""

    parts: Parts[SftPart]


SftSource = Annotated[ReasoningGymSource | FileSource | ConversationSource | TaughtSource | SftMixture, Field(discriminator="type")]


class SftData(SourceFormat):
    """The data of supervised training: conversations, or prompts with their reference answers as responses."""

    train: SftSource
    """What the model learns from."""
    eval: SftSource | None = None
    """Held-out data on which loss and token accuracy are measured."""
    train_on: Literal["all", "last"] = "all"
    """Which of the assistant's messages in a conversation the model learns. A message with `weight: 0` is never learned."""
    shuffle: bool = True
    """Draw the conversations of an epoch in random order; false: in the order of the file."""


class PreferenceSource(TableSource):
    """A .jsonl or .parquet file, or a directory written by `datasets`, of pairs: `prompt`, `chosen`, `rejected` (text or chat messages).

    `chosen` and `rejected` may be whole conversations that end with the assistant's message; the prompt is then what comes before it.
    """

    type: Literal["file"] = "file"
    prompt_key: str = "prompt"
    """Column of the prompt; a dot looks inside dictionaries."""
    chosen_key: str = "chosen"
    """Column of the better response; a dot looks inside dictionaries."""
    rejected_key: str = "rejected"
    """Column of the worse response; a dot looks inside dictionaries."""
    margin_key: str = "margin"
    """Reward model: column with the margin by which the chosen response is better (0 if missing); a dot looks inside dictionaries."""


class PreferencePart(MixturePart):
    """One source of a mixture."""

    source: PreferenceSource
    """Its pairs."""


class PreferenceMixture(SourceMixture):
    """Several sources as one."""

    parts: Parts[PreferencePart]


def _file_unless_said(given: Any) -> Any:
    return {"type": "file", **given} if isinstance(given, dict) else given


PairSource = Annotated[PreferenceSource | PreferenceMixture, Field(discriminator="type"), BeforeValidator(_file_unless_said)]


class PreferenceData(SourceFormat):
    """Pairs of responses."""

    train: PairSource
    """What the model learns from."""
    eval: PairSource
    """Held-out pairs."""


class EvalData(SourceFormat):
    """Prompts of an evaluation."""

    eval: PromptSource | None = None
    """The set `heldout`: one sampled and one greedy response to each prompt. null: only the sets in `eval`."""


class EvalSet(Section):
    """A set of prompts used in every evaluation, rendered as `data` says and scored like the others."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9]\w{0,63}$")]
    """Name in the metrics: eval/<name>/avg@n and so on."""
    source: PromptSource
    """The prompts."""
    n: Annotated[int, Field(gt=0, le=65_536)] = 1
    """Sampled responses to each prompt, for avg@n and, if scores are 0 or 1, the unbiased pass@k for k = 2, 4, 8, ... and n."""
    temperature: Annotated[float, Field(gt=0)] | None = None
    """Temperature of these responses; null: rollout.temperature."""
    greedy: bool = False
    """Also evaluate the greedy response."""


def check_sets(data: DataSettings | EvalData, sets: list[EvalSet]) -> None:
    """Raise ValueError if there is nothing to evaluate on, or if a set's name is taken or reserved (it ends in `_base`)."""
    names = [one.name for one in sets] + (["heldout"] if data.eval is not None else [])
    if not names:
        raise ValueError("data.eval: required, but missing (or list sets in eval)")
    for name in names:
        if names.count(name) > 1 or name.endswith("_base"):
            raise ValueError(f"eval: name={name!r} is {'taken' if names.count(name) > 1 else 'reserved for the results of model.base'}")


class PairsData(SourceFormat):
    """Prompts whose responses become pairs."""

    train: PromptSource
    """Prompts for train.jsonl."""
    eval: PromptSource
    """Prompts for eval.jsonl."""


class ServeData(PromptFormat):
    """The format of the prompts that a client sends."""

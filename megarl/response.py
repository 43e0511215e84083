"""What the driver knows about a response; its tokens and log-probs stay in the object store."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from megarl.batch import VersionSpan
from megarl.images import PlacedImage


@dataclass(frozen=True)
class EpisodeSummary:
    """What the driver knows about a multi-turn episode."""

    reward: float  # the environment's total over all turns
    turns: int
    error: str | None  # how the environment failed; None: it did not
    info: Mapping[str, float]  # the numbers in the environment's last `info`
    opening: str  # the text that the policy read first
    transcript: str  # everything after the opening, once: the policy's turns as sampled, and the environment's answers
    unreadable: bool = False  # it ended since the policy cannot read what it wrote, as template and tokenizer take it
    prompt_tokens: int = 0  # of all turns together
    cached_tokens: int = 0  # of these, those whose keys and values the engine had cached
    recomputed_tokens: int = 0  # of the others, those that the engine had computed for an earlier turn of the same context


@dataclass(frozen=True)
class Response:
    """What the driver knows about one response."""

    prompt: int  # index of the prompt within the call
    text: str  # for an episode, the text of its last turn
    prompt_length: int
    length: int  # response tokens
    loss_tokens: int  # response tokens that are trained on
    finished: bool  # ended by itself, not by the length limit
    payload: Any  # reference to the Sample, without its experts; for one still to be continued, to its last part
    index: int  # index among the responses to the prompt
    experts: Sequence[Sequence[Any]] | None = None  # references to its tokens' experts, by part and then by `ExpertsWanted.stages`
    before: Sequence[Any] = ()  # for one still to be continued, references to the parts before `payload`
    episode: EpisodeSummary | None = None  # set if an environment answered
    weight_versions: Sequence[VersionSpan] = ()  # as in its Sample
    starts: Sequence[int] = ()  # as in its Sample
    images: Sequence[PlacedImage] = ()  # as in its Sample
    sampled: Sequence[int] = ()  # the loss tokens of each span of `weight_versions`; empty: all tokens are

    @property
    def version_tokens(self) -> list[tuple[int, int]]:
        """The number of loss tokens of each span of `weight_versions`, and its version."""
        bounds = pairwise([*(span.start for span in self.weight_versions), self.length])
        tokens = self.sampled or [end - begin for begin, end in bounds]
        return [(count, span.version) for count, span in zip(tokens, self.weight_versions, strict=True)]

    @property
    def entries(self) -> list[int]:
        """The number of entries of each of its contexts (see `megarl.batch`)."""
        return [end - begin - 1 for begin, end in pairwise([0, *self.starts, self.prompt_length + self.length])]

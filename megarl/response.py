"""What the driver knows of a response; its tokens and log-probs stay in the object store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megarl.batch import VersionSpan


@dataclass(frozen=True)
class EpisodeSummary:
    """What the driver knows of an episode of several turns."""

    reward: float  # what the environment gave in all turns
    turns: int
    error: str | None  # how the environment failed
    info: Mapping[str, float]  # what it said of itself last
    opening: str  # what the policy read first
    transcript: str  # all that followed, its own turns and the answers to them


@dataclass(frozen=True)
class Response:
    """What the driver knows of one response."""

    prompt: int  # which of the call's prompts it answers
    text: str  # of an episode the last turn's
    prompt_length: int
    length: int  # response tokens
    loss_tokens: int  # those of them that are learned from
    finished: bool  # ended by itself, not by the length limit
    payload: Any  # reference to the Sample, without its experts; of one that is not done, to its last part
    index: int  # which of the responses to the prompt
    experts: Sequence[Sequence[Any]] | None = None  # references to the experts of its tokens: of each part, of each `ExpertsWanted.stages`
    before: Sequence[Any] = ()  # references to the parts before `payload`, of one that is not done
    episode: EpisodeSummary | None = None  # where an environment answered
    weight_versions: Sequence[VersionSpan] = ()  # as its sample has them

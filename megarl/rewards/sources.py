"""The reward sources of `reward.source`: which scorer each has, and what can be refused of it before work starts."""

from __future__ import annotations

import re
from pathlib import Path

from megarl.config import ConfigError, EnvironmentReward, FunctionReward, HttpReward, ReasoningGymReward, RewardSettings, alone
from megarl.rewards import http, processes
from megarl.rewards.earned import EarnedScorer
from megarl.rewards.score import Scorer
from megarl.sandbox import process


def open_scorer(settings: RewardSettings, log: Path | None = None) -> Scorer:
    """The scorer of a source, to be used in a `with`; what its processes print is added to `log`, or written to stderr."""
    if isinstance(settings.source, HttpReward):
        return http.HttpScorer(settings.source, settings.workers, settings.require_finished)
    if isinstance(settings.source, EnvironmentReward):
        return EarnedScorer()
    return processes.ProcessScorer(settings, log)


def check(settings: RewardSettings) -> None:
    """Refuses a reward that cannot work, before anything else starts: a user's function is imported, a server is asked for no scores.

    Raises ConfigError: `reward.source.path: cannot import module 'x': ...`; of the source of evaluations, `reward.eval.path: ...`.
    """
    _check_source(settings)
    if settings.eval is not None and settings.eval != settings.source:
        try:
            _check_source(settings.model_copy(update={"source": settings.eval}))
        except ConfigError as error:
            raise ConfigError(str(error).replace("reward.source", "reward.eval", 1)) from None


def _check_source(settings: RewardSettings) -> None:
    source = settings.source
    if not isinstance(source, HttpReward | EnvironmentReward):
        process.check(settings.sandbox, "reward.sandbox")
    for number, one in enumerate(alone(source)):
        key = f"reward.source.parts.{number}.source" if one is not source else "reward.source"
        if isinstance(one, ReasoningGymReward) and one.extract is not None:
            try:
                re.compile(one.extract)
            except re.error as error:
                raise ConfigError(f"{key}.extract: {one.extract!r} is not a regular expression: {error}") from None
    if any(isinstance(one, FunctionReward) for one in alone(source)):
        processes.check(settings)
    if isinstance(source, HttpReward):
        http.check(source)

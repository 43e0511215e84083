"""The reward sources of `reward.source`: the scorer of each, and the checks that can be made before work starts."""

import re
from pathlib import Path

from megarl.config import (
    ConfigError,
    EnvironmentReward,
    FunctionReward,
    HttpReward,
    MathReward,
    ModelReward,
    ReasoningGymReward,
    RewardSettings,
    Section,
    SumReward,
    alone,
)
from megarl.host.unchecked import where_present
from megarl.rewards import http, processes
from megarl.rewards.precomputed import EarnedScorer, JudgedScorer
from megarl.rewards.score import Look, Scorer, no_look
from megarl.rewards.weighted import SumScorer
from megarl.sandbox import process


def open_scorer(settings: RewardSettings, log: Path | None = None, key: str = "reward.source", look: Look = no_look) -> Scorer:
    """Return the scorer of `settings.source`, a context manager.

    Args:
        settings: the section `reward`.
        log: the file to which the output of its processes is appended; None: stderr.
        key: the dotted key of the source, for errors.
        look: see `Look`.
    """
    source = settings.source
    if not isinstance(source, SumReward):
        return _without_processes(source, settings, key, look) or processes.ProcessScorer(settings, log, look)
    keys = alone(source, key)
    parts = [(part, _without_processes(part.source, settings, place, look)) for part, place in zip(source.parts, keys, strict=True)]
    others = [(part, scorer) for part, scorer in parts if scorer is not None]
    verifiers = processes.ProcessScorer(settings, log, look) if len(others) < len(parts) else None
    return verifiers if verifiers is not None and not others else SumScorer(verifiers, others)


def _without_processes(source: Section, settings: RewardSettings, key: str, look: Look) -> Scorer | None:
    """Return the scorer of a source that needs no scoring processes; None for a verifier."""
    match source:
        case HttpReward():
            return http.HttpScorer(source, settings.workers, settings.require_finished, key, look)
        case EnvironmentReward():
            return EarnedScorer()
        case ModelReward():
            return JudgedScorer()
    return None


def check(settings: RewardSettings) -> None:
    """Check that a reward can work, before anything else starts: import a user's function, send a server a request without samples.

    Raises ConfigError: `reward.source.path: cannot import module 'x': ...`; for the source of evaluations, `reward.eval.path: ...`.
    """
    with where_present("the reward"):
        _check_source(settings, "reward.source")
    if settings.eval is not None and settings.eval != settings.source:
        try:
            with where_present("the reward of evaluations"):
                _check_source(settings.model_copy(update={"source": settings.eval}), "reward.eval")
        except ConfigError as error:
            raise ConfigError(str(error).replace("reward.source", "reward.eval", 1)) from None


def _check_source(settings: RewardSettings, key: str) -> None:
    parts = alone(settings.source, key)
    if any(isinstance(one, ReasoningGymReward | MathReward | FunctionReward) for one in parts.values()):
        process.check(settings.sandbox, "reward.sandbox")
    for place, one in parts.items():
        if isinstance(one, ReasoningGymReward) and one.extract is not None:
            try:
                re.compile(one.extract)
            except re.error as error:
                raise ConfigError(f"{place}.extract: {one.extract!r} is not a regular expression: {error}") from None
    if any(isinstance(one, FunctionReward) for one in parts.values()):
        processes.check(settings)
    for place, one in parts.items():
        if isinstance(one, HttpReward):
            http.check(one, place)

"""The reference answers of a run, parsed before it starts by the verifiers that will score by them."""

import json
from collections.abc import Sequence

from megarl.config import ConfigError, MathReward, ReasoningGymReward, RewardSettings, alone
from megarl.data.answers import Answer
from megarl.rewards.golds import BadGold, bad, certain
from megarl.rewards.processes import CHUNK, ProcessScorer
from megarl.rewards.score import ScoreRequest

CHECKED = 1024  # distinct answers that are parsed, at some 10 ms each; numbers in digits need no parsing
VERDICT = "BadGold: "  # how a scoring process begins what the verifier says


def answer_faults(settings: RewardSettings, answers: Sequence[Answer]) -> dict[int, str]:
    """Return what is wrong with reference answers, by their index, in order.

    Of more than `CHECKED` distinct answers, as many from all over are parsed; a response to another one that cannot be read has no score.

    Args:
        settings: the section `reward`, with the source that will score by them.
        answers: the answers.
    """
    sources = alone(settings.source).values()
    if not any(isinstance(one, MathReward | ReasoningGymReward) for one in sources):
        return {}  # functions and servers take any answer
    places = dict[str, list[int]]()
    for place, answer in enumerate(answers):
        places.setdefault(json.dumps(answer), []).append(place)
    faults, unclear = dict[int, str](), list[list[int]]()
    for same in places.values():
        try:
            if not certain(answers[same[0]]):
                unclear.append(same)
        except BadGold as error:
            faults.update(dict.fromkeys(same, str(error)))
    if any(isinstance(one, MathReward) for one in sources):
        sample = [unclear[number * len(unclear) // CHECKED] for number in range(CHECKED)] if len(unclear) > CHECKED else unclear
        for same, fault in zip(sample, _parsed(settings, [answers[same[0]] for same in sample]), strict=True):
            faults.update(dict.fromkeys([] if fault is None else same, str(fault)))
    return dict(sorted(faults.items()))


def _parsed(settings: RewardSettings, answers: Sequence[Answer]) -> list[str | None]:
    """Parse answers in scoring processes, and return what is wrong with each, if anything is."""
    if not answers:
        return []
    workers = min(settings.workers, -(-len(answers) // CHUNK))
    try:
        with ProcessScorer(settings.model_copy(update={"workers": workers}), golds=True) as scorer:
            scores = scorer.score([ScoreRequest("", "", answer, {}, finished=True) for answer in answers])
    except RuntimeError as error:  # no process starts
        raise ConfigError(str(error)) from None
    return [
        None if score.error is None else _fault(answer, score.error, settings.timeout_s)
        for answer, score in zip(answers, scores, strict=True)
    ]


def _fault(answer: Answer, error: str, timeout_s: float) -> str:
    if error.startswith(VERDICT):
        return error.removeprefix(VERDICT)
    late = f"is not read within reward.timeout_s={timeout_s:g} s"
    return str(bad(answer, late if error == "timeout" else f"cannot be read: {error}"))

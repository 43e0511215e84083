"""What the responses of a step say about the health of a run, under the community's names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from megarl.observe.metrics import Last, Max, Mean, Metric, Min, Sum
from megarl.rewards.scale import RewardScale
from megarl.rewards.score import Score, errors_by_kind
from megarl.workers.rollout_worker import Response


def rollout_metrics(responses: Sequence[Response], scores: Sequence[Score]) -> dict[str, Metric]:
    """Reward (and its parts), response lengths, truncation, share of prompts without a signal, failures of the reward function."""
    number = float(len(responses))
    lengths = [float(response.length) for response in responses]
    metrics: dict[str, Metric] = {
        "reward/mean": Mean(sum(score.value for score in scores), number),
        "reward/max": Max(max(score.value for score in scores)),
        "reward/min": Min(min(score.value for score in scores)),
        "response_length/mean": Mean(sum(lengths), number),
        "response_length/max": Max(max(lengths)),
        "response_length/min": Min(min(lengths)),
        "response_length/clip_ratio": Mean(sum(not response.finished for response in responses), number),
        "perf/tokens": Sum(sum(lengths) + sum(response.prompt_length for response in responses)),
    }
    parts: dict[str, list[float]] = defaultdict(list)
    groups: dict[int, list[float]] = defaultdict(list)
    for response, score in zip(responses, scores, strict=True):
        groups[response.prompt].append(score.value)
        for name, value in score.parts.items():
            parts[name].append(value)
    for name, values in parts.items():
        metrics[f"reward/{name}/mean"] = Mean(sum(values), float(len(values)))
    compared = [values for values in groups.values() if len(values) > 1]
    metrics["frac_reward_zero_std"] = Mean(sum(len(set(values)) == 1 for values in compared), float(len(compared)))
    return metrics | reward_failures(scores)


def scale_metrics(scale: RewardScale | None) -> dict[str, Metric]:
    """What a run's rewards are relative to."""
    return {} if scale is None else {"reward/reference_mean": Last(scale.mean), "reward/reference_std": Last(scale.std)}


def reward_failures(scores: Sequence[Score]) -> dict[str, Metric]:
    """How many responses the reward function failed on, by the kind of failure: events/reward/<kind>."""
    return {f"events/reward/{kind.replace(' ', '_')}": Sum(float(count)) for kind, count in errors_by_kind(scores).items()}

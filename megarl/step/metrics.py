"""Metrics of a step's responses that show the health of a run, under the names usual in the field."""

from collections import defaultdict
from collections.abc import Sequence

from megarl.observe.metrics import Last, Max, Mean, Metric, Min, Sum
from megarl.ranks.step_plan import Group, StepPlan
from megarl.response import Response
from megarl.rewards.scale import RewardScale
from megarl.rewards.score import Score, errors_by_kind


def rollout_metrics(groups: Sequence[Group]) -> dict[str, Metric]:
    """Reward and its parts, response lengths, truncation, share of prompts without a signal, missing scores and their reasons."""
    responses = [response for group in groups for response in group.responses]
    scores = [score for group in groups for score in group.scores]
    number = float(len(responses))
    value_N = [score.value for score in scores if score.value is not None]
    lengths = [float(response.loss_tokens) for response in responses]  # only tokens that the policy wrote
    metrics: dict[str, Metric] = {
        "reward/mean": Mean(sum(value_N), float(len(value_N))),
        "reward/missing": missing(scores),
        "reward/unscored": Mean(float(sum(not score.scored for score in scores)), number),
        "response_length/mean": Mean(sum(lengths), number),
        "response_length/max": Max(max(lengths)),
        "response_length/min": Min(min(lengths)),
        "response_length/clip_ratio": Mean(sum(not response.finished for response in responses), number),
        "perf/tokens": Sum(float(sum(response.prompt_length + response.length for response in responses))),
    }
    if value_N:
        metrics |= {"reward/max": Max(max(value_N)), "reward/min": Min(min(value_N))}
    parts: dict[str, list[float]] = defaultdict(list)
    for score in scores:
        for name, value in score.parts.items():
            parts[name].append(value)
    for name, values in parts.items():
        metrics[f"reward/{name}/mean"] = Mean(sum(values), float(len(values)))
    values_of = [[score.value for score in group.scores if score.value is not None] for group in groups]
    compared = [values for values in values_of if len(values) > 1]
    metrics["frac_reward_zero_std"] = Mean(sum(len(set(values)) == 1 for values in compared), float(len(compared)))
    return metrics | environment_metrics(responses) | reward_failures(scores)


def lag_metrics(responses: Sequence[Response], learned: int, frozen: int, most: int) -> dict[str, Metric]:
    """How many policy updates lie between the weights that sampled the responses and those trained on them.

    Tokens are the policy's, each counted once. rollout/lag_share_from_n is the share of those with a lag from n to 2n - 1, for n = 1, 2, 4,
    8 and so on up to `most`. Tokens in none of these shares have no lag.

    Args:
        responses: the step's responses.
        learned: number of policy updates before this step.
        frozen: number of earlier steps that did not change the policy; weight versions count them, too.
        most: the largest lag possible in the run's mode.
    """
    lags_N = [  # for each response: (tokens, lag) of each span
        [(tokens, learned - max(0, version - frozen)) for tokens, version in response.version_tokens] for response in responses
    ]
    flat = [pair for lags in lags_N for pair in lags]
    tokens = float(sum(count for count, _ in flat))
    shares: dict[str, Metric] = {
        f"rollout/lag_share_from_{1 << octave}": Mean(float(sum(count for count, lag in flat if lag.bit_length() == octave + 1)), tokens)
        for octave in range(most.bit_length())
    }
    return {
        "rollout/lag_mean": Mean(float(sum(count * lag for count, lag in flat)), tokens),
        "rollout/lag_max": Max(float(max((lag for _, lag in flat), default=0))),
        "rollout/lag_mixed": Mean(float(sum(len(lags) > 1 for lags in lags_N)), float(len(lags_N))),
        **shares,
    }


def environment_metrics(responses: Sequence[Response]) -> dict[str, Metric]:
    """How multi-turn episodes went: turns, contexts, rewards and reported values, episodes that failed or were cut off.

    environment/unreadable counts those that were cut off since the policy cannot read what it wrote (see `megarl.data.turns`). Tokens are
    those that the policy read after the opening; a context that the chat template has rewritten is read anew. recomputed_tokens are those
    that an engine computed in a turn although it had done so in an earlier one.
    """
    episodes = [(response, response.episode) for response in responses if response.episode is not None]
    if not episodes:
        return {}
    number, turns = float(len(episodes)), [float(episode.turns) for _, episode in episodes]
    earned = [episode.reward for _, episode in episodes if episode.error is None]
    failed = len(episodes) - len(earned)
    metrics: dict[str, Metric] = {
        "environment/turns/mean": Mean(sum(turns), number),
        "environment/turns/max": Max(max(turns)),
        "environment/contexts/mean": Mean(float(sum(1 + len(response.starts) for response, _ in episodes)), number),
        "environment/tokens/mean": Mean(float(sum(response.length - response.loss_tokens for response, _ in episodes)), number),
        "environment/reward/mean": Mean(sum(earned), float(len(earned))),
        "environment/failed": Sum(float(failed)),
        "environment/cut": Sum(float(sum(not response.finished for response, _ in episodes) - failed)),
        "environment/unreadable": Sum(float(sum(episode.unreadable for _, episode in episodes))),
        "environment/prefix_cache_hit_rate": Mean(
            float(sum(episode.cached_tokens for _, episode in episodes)), float(sum(episode.prompt_tokens for _, episode in episodes))
        ),
        "environment/recomputed_tokens/mean": Mean(float(sum(episode.recomputed_tokens for _, episode in episodes)), sum(turns)),
    }
    reported: dict[str, list[float]] = defaultdict(list)
    for _, episode in episodes:
        for name, value in episode.info.items():
            reported[name].append(value)
    return metrics | {f"environment/{name}/mean": Mean(sum(values), float(len(values))) for name, values in reported.items()}


def scale_metrics(scale: RewardScale | None) -> dict[str, Metric]:
    """The mean and standard deviation by which a run's rewards are normalised."""
    return {} if scale is None else {"reward/reference_mean": Last(scale.mean), "reward/reference_std": Last(scale.std)}


def missing(scores: Sequence[Score]) -> Mean:
    """The share of responses without a score, which take no part."""
    return Mean(float(sum(score.value is None for score in scores)), float(len(scores)))


def missing_groups(plan: StepPlan) -> dict[str, Metric]:
    """The share of a step's prompts of which no response takes part, or too few for the algorithm."""
    taking_part, prompts = len(set(plan.group_N[plan.part_N])), len(set(plan.group_N))
    return {"reward/missing_groups": Mean(float(prompts - taking_part), float(prompts))}


def reward_failures(scores: Sequence[Score]) -> dict[str, Metric]:
    """The number of responses without a score, by the reason: events/reward/<kind>."""
    return {f"events/reward/{kind.replace(' ', '_')}": Sum(float(count)) for kind, count in errors_by_kind(scores).items()}

"""The plan of one step that every model rank gets: which responses to train on, where they are stored, and how they are split.

Axes: N responses of the step, S samples: the contexts of the responses, of which most have one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from megarl.algorithms import PolicyAlgorithm
from megarl.algorithms.value import value_weights
from megarl.batch import balance, bins_needed
from megarl.config import DistillationSettings, EnvironmentReward, RewardSettings, SumReward, TrainConfig
from megarl.lazy_torch import Tensor, torch

if TYPE_CHECKING:
    from megarl.data.prompts import Prompt
    from megarl.ranks.tower_work import TowerWork
    from megarl.response import Response
    from megarl.rewards.score import Score

Split = list[list[list[list[int]]]]
"""[mini-batch][data-parallel rank][micro-batch] -> samples, as indices into the S axis."""


@dataclass(frozen=True)
class Group:
    """The scored responses to one prompt."""

    place: int  # of the prompt in data.train
    prompt: Prompt
    responses: list[Response]
    scores: list[Score]
    greedy: float | None  # the reward of the greedy response; None: there is no such response, or it has no score
    asked: tuple[int, int] = (0, 0)  # the step it was requested for, and its number within that step

    def informative(self, config: TrainConfig) -> bool:
        """Whether the responses that would take part in a step differ in the task's score.

        DAPO ignores their length here (arXiv:2503.14476, eq. 11).
        """
        return len({score.task for score, part in zip(self.scores, participants(config, [self]), strict=True) if part}) > 1


@dataclass(frozen=True)
class StepPlan:
    """One step as the ranks see it. Payloads stay in the object store until the rank that needs them fetches them."""

    payload_N: Sequence[Any]  # references to Samples
    experts_N: Sequence[Sequence[Sequence[Any]] | None]  # references to the experts of each response's tokens, as in `Response`
    stages: Sequence[Sequence[int]]  # the MoE layers of each pipeline stage of the policy
    split: Split
    reward_N: np.ndarray  # float32; NaN: the response takes no part in the step
    group_N: np.ndarray  # int64: which prompt a response answers
    keep_N: np.ndarray  # bool: which responses are trained on; the others have no loss and do not count
    weight_N: np.ndarray  # float32: weight of a loss token of the response in its mini-batch's loss
    positive_weight_N: np.ndarray | None = None  # float32: the same in a second, imitation term
    value_weight_N: np.ndarray | None = None  # float32: weight of a loss token in the critic's loss
    part_NK: np.ndarray | None = None  # float64: the reward's parts, before their weights; None: the algorithm does not need them
    weight_K: np.ndarray | None = None  # float64: the parts' weights
    turn_weight: float = 0.0  # weight of an environment's turn rewards in the reward; 0: there are none, or they are not known by turn
    count_N: np.ndarray | None = None  # int64: loss tokens of each response, 0 where it is not trained on
    sample_S: Sequence[tuple[int, int]] | None = None  # (response, which of its contexts) of each sample; None: each response has one
    teacher_N: np.ndarray | None = None  # int64: which teacher scores a response, of `DistillationSettings.scorers`; None: the only one
    shown_N: Sequence[np.ndarray | None] | None = None  # what the teacher reads in the place of each prompt; None: the prompt
    seed: int | None = None  # of the lots that tokens draw; None: the algorithm needs none

    def context(self, sample: int) -> tuple[int, int]:
        """The response that a sample belongs to, and which of its contexts it is."""
        return (sample, 0) if self.sample_S is None else self.sample_S[sample]

    def responses(self, samples: Iterable[int]) -> list[int]:
        """The responses that these samples belong to, each once."""
        return list(dict.fromkeys(self.context(sample)[0] for sample in samples))

    @property
    def mini_batches(self) -> list[list[int]]:
        """The responses of each mini-batch."""
        return [self.responses(members(mini_batch)) for mini_batch in self.split]

    @property
    def part_N(self) -> np.ndarray:
        """Which responses take part in the step, bool: those that are compared with others, whether or not they are trained on."""
        return ~np.isnan(self.reward_N)

    @property
    def trained(self) -> list[int]:
        """The indices of the mini-batches that have a response to train on."""
        return [index for index, responses in enumerate(self.mini_batches) if self.keep_N[responses].any()]

    @property
    def divided(self) -> list[bool]:
        """Whether a response of each mini-batch has samples in several micro-batches."""

        def parts(mini_batch: list[list[list[int]]]) -> list[list[int]]:
            return [self.responses(micro_batch) for shard in mini_batch for micro_batch in shard]

        return [sum(map(len, parts(mini_batch))) > len(self.responses(members(mini_batch))) for mini_batch in self.split]

    def part(self, dp_rank: int) -> StepPlan:
        """The plan as one data-parallel rank needs it, with references to its own responses' payloads only.

        Each process that receives a reference to an object reports that to the object's owner, and again when it releases the reference.
        """
        responses = set(
            self.responses(sample for mini_batch in self.split for micro_batch in mini_batch[dp_rank] for sample in micro_batch)
        )
        shown_N = None if self.shown_N is None else _only(responses, self.shown_N)
        return replace(self, payload_N=_only(responses, self.payload_N), experts_N=_only(responses, self.experts_N), shown_N=shown_N)


@dataclass(frozen=True)
class ScoringPlan:
    """The responses that a reward model is to score, and their split over its ranks."""

    payload_N: Sequence[Any]  # references to Samples
    split: list[list[list[int]]]  # [data-parallel rank][micro-batch] -> responses

    def part(self, dp_rank: int) -> ScoringPlan:
        """The plan as one data-parallel rank needs it, as in `StepPlan.part`."""
        return replace(self, payload_N=_only({n for micro_batch in self.split[dp_rank] for n in micro_batch}, self.payload_N))


def _only(chosen: Set[int], values_N: Sequence[Any]) -> list[Any]:
    """The values of the chosen responses, with None in place of the others."""
    return [value if n in chosen else None for n, value in enumerate(values_N)]


def members(mini_batch: list[list[list[int]]]) -> list[int]:
    """All samples of a mini-batch, in order."""
    return sorted(sample for shard in mini_batch for micro_batch in shard for sample in micro_batch)


def participants(config: TrainConfig, groups: Sequence[Group]) -> list[bool]:
    """Which responses take part in a step: in baselines, scales and denominators, and in the loss unless something else masks them.

    A response without a score takes no part, nor does a truncated one if it is dropped and `train.truncated_in_baseline` is false, nor any
    response to a prompt for which fewer than the algorithm's `min_group` are left, or the greedy response has no score.
    """
    train, algorithm = config.train, config.algorithm
    only_finished = train.drop_truncated and not train.truncated_in_baseline
    part_N = list[bool]()
    for group in groups:
        pairs = zip(group.responses, group.scores, strict=True)
        usable = [score.value is not None and (response.finished or not only_finished) for response, score in pairs]
        whole = sum(usable) >= algorithm.min_group and not (algorithm.needs_greedy and group.greedy is None)
        part_N += [whole and own for own in usable]
    return part_N


def plan_step(
    config: TrainConfig,
    groups: Sequence[Group],
    dp: int,
    capacity: int,
    stages: Sequence[Sequence[int]] = (),
    tower: TowerWork | None = None,
    shown_N: Sequence[np.ndarray | None] | None = None,
    *,
    teaches: bool = False,
) -> StepPlan:
    """Plan a step: which responses to train on, their split, and the loss weights of each global mini-batch.

    The mini-batches hold the same responses whatever `dp` and `capacity` are. The samples of a response are on one data-parallel rank, and
    may be in several micro-batches; if the algorithm has a term of whole sequences, only in a step with a response that does not fit into
    one.

    Args:
        config: the run's configuration.
        groups: the groups of scored responses.
        dp: the number of data-parallel ranks.
        capacity: the largest number of tokens in a micro-batch.
        stages: the MoE layers of each pipeline stage of the policy.
        tower: the work of a vision tower, which the ranks share equally, too; None: the responses have no images.
        shown_N: what the teacher reads in the place of each response's prompt, with `distillation.prompt`. A response for which there is
            nothing is not trained on, unless `distillation.task_weight` has it learn from its reward; the teacher then reads the prompt.
        teaches: the plan is for ranks that hold the teacher.

    Raises:
        ValueError: a sample does not fit into a micro-batch, or a mini-batch has fewer responses than there are ranks.
    """
    responses, algorithm = [response for group in groups for response in group.responses], config.algorithm
    part_N = torch.tensor(participants(config, groups))
    values = [score.value for group in groups for score in group.scores]
    reward_N = torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float64)
    reward_N = reward_N.masked_fill(~part_N, math.nan)  # whoever reads it all the same is noticed
    group_N = torch.tensor([number for number, group in enumerate(groups) for _ in group.responses])
    # Responses that are dropped do not take part in the algorithm's choice.
    dropped = config.train.drop_truncated
    keep_N = part_N & torch.tensor([response.loss_tokens > 0 and (response.finished or not dropped) for response in responses])
    if shown_N is not None and config.distillation is not None and not config.distillation.task_weight:
        keep_N &= torch.tensor([shown is not None for shown in shown_N])
    keep_N[keep_N.clone()] = algorithm.keep(reward_N[keep_N], group_N[keep_N])
    count_N = torch.tensor([response.loss_tokens for response in responses]) * keep_N
    length_NC = [response.entries for response in responses]
    if shown_N is not None and teaches:  # its micro-batches are of the same responses
        pairs = zip(length_NC, responses, shown_N, strict=True)
        length_NC = [own if shown is None else [max(*own, len(shown) + response.length - 1)] for own, response, shown in pairs]
    together = algorithm.joins_tokens and max(map(sum, length_NC)) <= capacity
    more_N = None if tower is None else [tower.tokens(response.images) for response in responses]
    split = split_samples(length_NC, config.train.mini_batches, dp, capacity, together=together, more_N=more_N)
    sample_S = [(n, context) for n, length_C in enumerate(length_NC) for context in range(len(length_C))]
    size = len(responses) // config.train.mini_batches
    mini_batches = [list(range(first, first + size)) for first in range(0, len(split) * size, size)]
    weight_N = loss_weights(algorithm, count_N, mini_batches, part_N)
    positive_N = torch.zeros_like(weight_N) if algorithm.positive_weights(count_N, reward_N) is not None else None
    value_N = torch.zeros_like(weight_N) if algorithm.needs_critic else None
    for chosen in mini_batches:
        if count_N[chosen].any():
            positive = algorithm.positive_weights(count_N[chosen], reward_N[chosen])
            if positive_N is not None and positive is not None:
                positive_N[chosen] = positive
            if value_N is not None and config.critic is not None:
                value_N[chosen] = value_weights(count_N[chosen], config.critic.aggregation)
    return StepPlan(
        payload_N=[response.payload for response in responses],
        experts_N=[response.experts for response in responses],
        stages=stages,
        split=split,
        reward_N=reward_N.float().numpy(),
        group_N=group_N.numpy(),
        keep_N=keep_N.numpy(),
        weight_N=weight_N.float().numpy(),
        positive_weight_N=None if positive_N is None else positive_N.float().numpy(),
        value_weight_N=None if value_N is None else value_N.float().numpy(),
        **(reward_parts(config, groups) if algorithm.needs_parts else {}),
        turn_weight=turn_weight(config.reward),
        count_N=count_N.numpy(),
        sample_S=sample_S if len(sample_S) > len(responses) else None,
        teacher_N=None if config.distillation is None else teachers(config.distillation, groups),
        shown_N=shown_N if teaches else None,
        seed=int(np.random.SeedSequence([config.seed, *groups[0].asked]).generate_state(1, np.uint64)[0]) if algorithm.selects else None,
    )


def teachers(distillation: DistillationSettings, groups: Sequence[Group]) -> np.ndarray | None:
    """Which teacher scores each response, int64 [N]; None if there is one. Raises ConfigError if a prompt's source has none."""
    if not distillation.by_source:
        return None
    number_G = [distillation.taught_by(group.prompt.meta, group.prompt.name) for group in groups]
    return np.repeat(number_G, [len(group.responses) for group in groups])


def reward_parts(config: TrainConfig, groups: Sequence[Group]) -> dict[str, np.ndarray]:
    """The parts of a sum of rewards and their weights, with the overlong punishment (of weight 1) where there is one.

    A part that a response cut off by the length limit was not scored for is 0, as it is in the sum. A reward that is no sum has no parts.
    """
    reward, scores = config.reward, [score for group in groups for score in group.scores]
    if not isinstance(reward.source, SumReward):
        return {}
    weight_of = {part.name: part.weight for part in reward.source.parts} | ({} if reward.overlong is None else {"overlong": 1.0})
    return {
        "part_NK": np.array([[score.parts.get(name, 0.0) for name in weight_of] for score in scores]),
        "weight_K": np.array(list(weight_of.values())),
    }


def turn_weight(reward: RewardSettings) -> float:
    """The weight of an environment's turn rewards at the ends of the turns; 0 if they are not in the reward, or on another scale."""
    if reward.normalise is not None:
        return 0.0
    if isinstance(reward.source, SumReward):
        return sum(part.weight for part in reward.source.parts if isinstance(part.source, EnvironmentReward))
    return float(isinstance(reward.source, EnvironmentReward))


def loss_weights(algorithm: PolicyAlgorithm, count_N: Tensor, mini_batches: Sequence[Sequence[int]], part_N: Tensor) -> Tensor:
    """The weight of a loss token of each response in its mini-batch's policy loss, float64 [N]; 0 in a mini-batch without loss tokens.

    Args:
        algorithm: the run's algorithm.
        count_N: int64 [N], the loss tokens of each response of the step.
        mini_batches: the responses of each mini-batch.
        part_N: bool [N], the responses that take part in the step; the others count in no denominator.
    """
    weight_N = torch.zeros(len(count_N), dtype=torch.float64)
    for responses in mini_batches:
        chosen = [n for n in responses if part_N[n]]
        if count_N[chosen].any():
            weight_N[chosen] = algorithm.weights(count_N[chosen])
    return weight_N


def plan_scoring(responses: Sequence[Response], dp: int, capacity: int) -> ScoringPlan:
    """Deal responses to the ranks of a reward model.

    Args:
        responses: the responses to score; at least one.
        dp: the number of data-parallel ranks.
        capacity: the largest number of tokens in a micro-batch.

    Raises:
        ValueError: a response does not fit.
    """
    length_N = [response.entries[-1] + 1 for response in responses]  # of several contexts the last is scored
    return deal_scoring([response.payload for response in responses], length_N, dp, capacity)


def deal_scoring(payload_N: Sequence[Any], length_N: Sequence[int], dp: int, capacity: int) -> ScoringPlan:
    """Deal samples to the ranks of a reward model.

    Args:
        payload_N: references to Samples, at least one.
        length_N: the number of tokens of each sample.
        dp: the number of data-parallel ranks. If there are fewer samples than that, the last sample is scored several times.
        capacity: the largest number of tokens in a micro-batch.

    Raises:
        ValueError: a sample does not fit.
    """
    more = dp - len(payload_N)  # no rank may be without a sample
    [split] = split_step([*length_N, *[length_N[-1]] * more], 1, dp, capacity)
    return ScoringPlan([*payload_N, *[payload_N[-1]] * more], split)


def response_advantages(
    algorithm: PolicyAlgorithm, plan: StepPlan, greedy: Sequence[float | None] | None, kl_N: np.ndarray, kl_coef: float
) -> np.ndarray:
    """Compute one number per response (`PolicyAlgorithm.advantages`) from all rewards of the step, less the KL if `kl_per_sequence`.

    The algorithm sees only the responses that take part in the step; the others, which have no loss token, get 0.

    Args:
        algorithm: the run's algorithm.
        plan: the step's plan.
        greedy: the reward of the greedy response to each prompt; read only if the algorithm needs it.
        kl_N: float64 [N], each response's sum of `old_kl`; read only if the algorithm has `kl_per_sequence`.
        kl_coef: the KL coefficient in this step.

    Returns:
        float32 [N].
    """
    reward_N, group_N = torch.tensor(plan.reward_N, dtype=torch.float64), torch.tensor(plan.group_N)
    if algorithm.kl_per_sequence:
        reward_N = reward_N - kl_coef * torch.from_numpy(kl_N)
    part_N, advantage_N, greedy_N = torch.from_numpy(plan.part_N), torch.zeros(len(group_N)), None
    if not part_N.any():
        return advantage_N.numpy()
    if algorithm.needs_greedy:
        assert greedy is not None, "the greedy response to each prompt was sampled"
        greedy_N = torch.tensor([math.nan if reward is None else reward for reward in greedy], dtype=torch.float64)[group_N][part_N]
    if plan.part_NK is not None and plan.weight_K is not None:
        part_NK, weight_K = torch.from_numpy(plan.part_NK), torch.from_numpy(plan.weight_K)
        advantage_N[part_N] = algorithm.part_advantages(part_NK[part_N], weight_K, group_N[part_N])
    elif algorithm.needs_lengths:
        advantage_N[part_N] = algorithm.length_advantages(reward_N[part_N], group_N[part_N], torch.from_numpy(plan.count_N)[part_N])
    else:
        advantage_N[part_N] = algorithm.advantages(reward_N[part_N], group_N[part_N], greedy_N).float()
    return advantage_N.numpy()


def split_step(length_N: Sequence[int], mini_batches: int, dp: int, capacity: int, more_N: Sequence[int] | None = None) -> Split:
    """`split_samples`, of responses of one sample each; `length_N` is the number of tokens of each."""
    return split_samples([[length] for length in length_N], mini_batches, dp, capacity, more_N=more_N)


def split_samples(
    length_NC: Sequence[Sequence[int]],
    mini_batches: int,
    dp: int,
    capacity: int,
    *,
    together: bool = False,
    more_N: Sequence[int] | None = None,
) -> Split:
    """Split responses into consecutive mini-batches, each of these over ranks, and the samples of a rank over micro-batches.

    Within a mini-batch all ranks get the same number of micro-batches, balanced by tokens; a rank with fewer samples than that gets empty
    ones.

    Args:
        length_NC: the numbers of tokens of each response's samples.
        mini_batches: the number of mini-batches; should divide N, or else the last N % mini_batches responses are in none.
        dp: the number of data-parallel ranks.
        capacity: the largest number of tokens in a micro-batch.
        together: the samples of a response go into the same micro-batch.
        more_N: the tokens that each response's other work is worth, for the balance between ranks; None: there is none.

    Returns:
        The split of the samples, which are numbered response by response.

    Raises:
        ValueError: a sample, or a response if `together`, does not fit into a micro-batch, or a mini-batch has fewer responses than there
            are ranks.
    """
    first_N = np.cumsum([0, *map(len, length_NC)]).tolist()
    samples_N = [list(range(*bounds)) for bounds in pairwise(first_N)]
    length_S = [length for length_C in length_NC for length in length_C]
    work_N = [sum(length_C) + more for length_C, more in zip(length_NC, more_N or [0] * len(length_NC), strict=True)]
    size = len(length_NC) // mini_batches
    split = []
    for first in range(0, size * mini_batches, size):
        mini_batch = samples_N[first : first + size]
        shards = [[mini_batch[n] for n in shard] for shard in balance(work_N[first : first + size], dp)]
        if not together:
            shards = [[[sample] for samples in shard for sample in samples] for shard in shards]
        length_U = [[sum(length_S[sample] for sample in unit) for unit in shard] for shard in shards]
        count = max(bins_needed(lengths, capacity) for lengths in length_U)
        split.append([_micro_batches(shard, lengths, count) for shard, lengths in zip(shards, length_U, strict=True)])
    return split


def _micro_batches(units: list[list[int]], length_U: Sequence[int], count: int) -> list[list[int]]:
    filled = min(count, len(units))
    bins = [[sample for unit in group for sample in units[unit]] for group in balance(length_U, filled)]
    return bins + [[] for _ in range(count - filled)]

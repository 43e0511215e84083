"""What every model rank is told about one step: which responses, where they lie, how they are split.

Axes: N responses of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megarl.batch import balance, bins_needed
from megarl.config import TrainConfig

if TYPE_CHECKING:
    from megarl.rewards.score import Score
    from megarl.workers.rollout_worker import Response

Split = list[list[list[list[int]]]]
"""[mini-batch][data-parallel rank][micro-batch] -> responses, as indices into the N axis."""


@dataclass(frozen=True)
class StepPlan:
    """One step as the ranks see it. Payloads stay in the object store until the rank that needs them fetches them."""

    payloads: Sequence[Any]  # one reference per prompt, to a list of Sample
    place_N: Sequence[tuple[int, int]]  # (payload, index in it) of each response
    split: Split
    advantage_N: np.ndarray  # float32
    weight_N: np.ndarray  # float32: weight of a loss token of the response in its mini-batch's loss


def plan_step(config: TrainConfig, responses: Sequence[Response], scores: Sequence[Score]) -> StepPlan:
    """Advantages from all rewards of the step, then the split, then the loss weights of each global mini-batch."""
    reward_N = torch.tensor([score.value for score in scores], dtype=torch.float64)
    group_N = torch.tensor([response.prompt for response in responses])
    length_N = [response.prompt_length + response.length - 1 for response in responses]
    split = split_step(length_N, config.train.mini_batches, config.layout.dp, config.train.micro_batch_tokens)
    weight_N = torch.zeros(len(responses), dtype=torch.float64)
    for mini_batch in split:
        members = sorted(n for shard in mini_batch for micro_batch in shard for n in micro_batch)
        weight_N[members] = config.algorithm.weights(torch.tensor([responses[n].length for n in members]))
    payloads = list(dict.fromkeys(response.payload for response in responses))
    place = {payload: index for index, payload in enumerate(payloads)}
    return StepPlan(
        payloads=payloads,
        place_N=[(place[response.payload], response.index) for response in responses],
        split=split,
        advantage_N=config.algorithm.advantages(reward_N, group_N).numpy(),
        weight_N=weight_N.float().numpy(),
    )


def split_step(length_N: Sequence[int], mini_batches: int, dp: int, capacity: int) -> Split:
    """Splits N responses into consecutive mini-batches, each over `dp` ranks and micro-batches of at most `capacity` tokens.

    Within a mini-batch all ranks get the same number of micro-batches, balanced by tokens; a rank with fewer responses than that gets
    empty ones. ValueError where a response does not fit.
    """
    size = len(length_N) // mini_batches
    split = []
    for first in range(0, size * mini_batches, size):
        members = list(range(first, first + size))
        shards = [[members[n] for n in shard] for shard in balance([length_N[n] for n in members], dp)]
        count = max(bins_needed([length_N[n] for n in shard], capacity) for shard in shards)
        split.append([_micro_batches(shard, length_N, count) for shard in shards])
    return split


def _micro_batches(shard: list[int], length_N: Sequence[int], count: int) -> list[list[int]]:
    filled = min(count, len(shard))
    bins = [[shard[n] for n in group] for group in balance([length_N[n] for n in shard], filled)]
    return bins + [[] for _ in range(count - filled)]

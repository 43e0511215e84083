"""Batches and algorithms that the tests of the algorithms share.

Axes: T predicted tokens, N sequences.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from queue import Queue
from threading import Barrier, Thread
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import torch
from pydantic import BaseModel, TypeAdapter
from torch import Tensor

from megarl.algorithms import Algorithm, Dpo, PolicyAlgorithm, PreferenceLoss
from megarl.algorithms.groups import GroupRelative
from megarl.algorithms.ops import Aggregation, Block, SumOver
from megarl.algorithms.pairs import PairLoss
from megarl.algorithms.simpo import SimPo
from megarl.batch import Batch, Sample, pack

Result = TypeVar("Result")
LENGTHS = [*range(1, 41), 4000]
KL_AND_BONUS: dict[str, Any] = {"kl_coef": 0.3, "entropy_coef": 0.05}


def members(union: Any) -> dict[str, type[BaseModel]]:
    """The classes of `Algorithm` or `PreferenceLoss` by the `type` that chooses each."""
    return {kind: member for member in get_args(get_args(union)[0]) for kind in get_args(member.model_fields["type"].annotation)}


KINDS = members(Algorithm)
CONFIGS: dict[str, dict[str, Any]] = {
    **{kind: {"type": kind} for kind in KINDS},
    "vapo_by_response": {"type": "vapo", "aggregation": "seq-mean-token-mean", "clip_high": 0.2},
    "vapo_without_imitation": {"type": "vapo", "mu": 0.0},
    "grpo_dual_clip": {"type": "grpo", "dual_clip": 1.1},
    "dr_grpo": {"type": "dr_grpo", "horizon": 64},
    "gspo_wide": {"type": "gspo", "clip_low": 0.05, "clip_high": 0.04},
    "gspo_token": {"type": "gspo_token", "clip_low": 0.05, "clip_high": 0.04},
    "gmpo": {"type": "gmpo", "clip_low": 0.3, "clip_high": 0.2},
    "sapo_sharp": {"type": "sapo", "tau_positive": 3.0, "tau_negative": 8.0, **KL_AND_BONUS},
    "cispo_narrow": {"type": "cispo", "clip_low": 0.3, "clip_high": 0.2},
    "dppo": {"type": "dppo", "delta_low": 0.05, "delta_high": 0.08},
    "dppo_kl": {"type": "dppo", "divergence": "kl", "delta_low": 0.01, "delta_high": 0.02, "ratio_cap": 1.3, **KL_AND_BONUS},
    "deepseek_v32": {"type": "deepseek_v32", "off_policy_delta": 0.05, "kl_coef": 0.3},
    "dapo_masked": {"type": "dapo", "off_policy_delta": 0.0, "dual_clip": 1.2, "correction": {"type": "tis", "cap": 1.05}},
    "luspo_wide": {"type": "luspo", "clip_low": 0.05, "clip_high": 0.04},
    "vespo_bounded": {"type": "vespo", "k_positive": 0.5, "lambda_negative": 0.2, "ratio_bound": 1.0},
    "pass_at_k": {"type": "pass_at_k", "k": 2},
    "topr": {"type": "topr", "baseline": 0.5},
    "spo_wide": {"type": "spo", "eps": 0.5, "ratio_bound": 0.6},
    "clip_cov": {"type": "clip_cov", "cov_ratio": 0.05, "cov_low": 0.1, "cov_high": 2.0, **KL_AND_BONUS},
    "clip_cov_clipped": {"type": "clip_cov", "cov_ratio": 0.3, "cov_low": -1.0, "cov_high": 1.0, "clip_low": 0.2, "dual_clip": 1.1},
    "kl_cov": {"type": "kl_cov", "cov_ratio": 0.1, "cov_kl_coef": 0.3, "ratio_bound": 0.6},
    "m2po": {"type": "m2po", "m2_threshold": 0.06, "correction": {"type": "tis", "cap": 1.05}},
    "reinforce": {"type": "reinforce", "gamma": 0.97},
    "reinforce_pp": {"type": "reinforce_pp", "gamma": 0.99},
    "reinforce_pp_baseline": {"type": "reinforce_pp_baseline", "kl_in": "reward"},
    "k1": {"type": "grpo", "kl_kind": "k1", "kl_straight_through": True, **KL_AND_BONUS},
    "k2": {"type": "gspo", "kl_kind": "k2", **KL_AND_BONUS},
    "k2_straight": {"type": "grpo", "kl_kind": "k2", "kl_straight_through": True, **KL_AND_BONUS},
    "k3": {"type": "vapo", "kl_in": "loss", **KL_AND_BONUS},
    "k3_straight": {"type": "dapo", "kl_straight_through": True, **KL_AND_BONUS},
    "tis": {"type": "dapo", "correction": {"type": "tis", "cap": 1.05}},
    "tis_sequence": {"type": "gspo", "clip_low": 0.05, "correction": {"type": "tis", "cap": 1.1, "level": "sequence", "veto": 0.85}},
    "mis": {"type": "gspo_token", "clip_low": 0.05, "correction": {"type": "mis", "lo": 0.95, "hi": 1.1}, **KL_AND_BONUS},
    "mis_sequence": {"type": "rloo", "correction": {"type": "mis", "lo": 0.7, "hi": 1.5, "level": "sequence"}},
    "icepop": {"type": "cispo", "correction": {"type": "icepop", "lo": 0.95, "hi": 1.05, "veto": 0.85}},
    "aggregation": {"type": "gspo", "clip_low": 0.05, "clip_high": 0.04, "dual_clip": 1.06, "aggregation": "seq-mean-token-sum"},
    "rloo_sequence": {"type": "rloo", "ratio": "sequence", "clip_low": 0.3, "ratio_bound": 3.0},
    "raft_weighted": {"type": "raft", "weight": "reward"},
    "count_all": {"type": "grpo", "sequence_count": "all", **KL_AND_BONUS},
    "count_one": {"type": "dr_grpo", "horizon": 64, "sequence_count": "one"},
    "count_trained": {"type": "dr_grpo", "horizon": 64, "sequence_count": "trained"},
    "sum_of_tokens": {"type": "rloo", "sequence_count": "one"},
    "aggregation_norm": {"type": "rloo", "aggregation": "seq-mean-token-sum-norm", "horizon": 50, "ratio_bound": 0.3},
    "k1_weighted": {"type": "dapo", "kl_kind": "k1", "kl_importance_weighted": True, "kl_clamp": 0.6, "ratio_bound": 0.5, **KL_AND_BONUS},
    "k3_weighted": {"type": "cispo", "kl_importance_weighted": True, "kl_clamp": 0.1, "ratio_bound": 0.5, **KL_AND_BONUS},
    "k3_clamped": {"type": "gmpo", "kl_straight_through": True, "kl_clamp": 0.1, "ratio_bound": 0.05, **KL_AND_BONUS},
    "clip_geometric": {
        "type": "grpo",
        "correction": {"type": "tis", "floor": 0.995, "cap": 1.01, "level": "geometric", "normalise": True, "denominator": "kept"},
    },
    "reject_tokens": {
        "type": "dapo",
        "correction": {
            "type": "tis",
            "cap": 1.1,
            "normalise": True,
            "reject": [{"lo": 0.9}, {"by": "k2", "hi": 0.005}, {"by": "k3", "over": "max", "hi": 0.05}],
            "denominator": "kept",
        },
        **KL_AND_BONUS,
    },
    "reject_sequences": {
        "type": "gspo",
        "clip_low": 0.05,
        "ratio_bound": 0.03,
        "correction": {
            "type": "rejection",
            "reject": [{"over": "sum", "lo": 0.5, "hi": 3.0}, {"over": "mean", "hi": 1.1}, {"by": "k3", "over": "mean", "hi": 0.005}],
            "veto": 0.83,
            "denominator": "kept",
        },
        **KL_AND_BONUS,
    },
}


SECTION = TypeAdapter[PolicyAlgorithm](Algorithm)  # made once: it takes longer than all that a test does


def make(config: dict[str, Any]) -> PolicyAlgorithm:
    """The algorithm of a config's `algorithm` section."""
    return SECTION.validate_python(config)


class SumRatio(GroupRelative):
    """-exp(sum_t d_t) A for a response, evenly over its tokens: a sum over sequences, which no algorithm of the union uses."""

    type: Literal["sum_ratio"] = "sum_ratio"
    aggregation: Aggregation = "seq-mean-token-sum"

    def sequence_term(self, d_T: Tensor, advantage_T: Tensor) -> Tensor:
        return d_T

    def policy_loss(self, block: Block) -> Tensor:
        assert block.mean_T is not None
        sum_T = (block.mean_T * block.count_T).clamp(-self.ratio_bound, self.ratio_bound)
        return -sum_T.exp() * block.advantage_T / block.count_T


ALGORITHMS: dict[str, PolicyAlgorithm] = {
    **{name: make(config) for name, config in CONFIGS.items()},
    "sum_ratio": SumRatio(ratio_bound=3.0),
}
PREFERENCES: dict[str, PairLoss] = {
    kind: TypeAdapter[PairLoss](PreferenceLoss).validate_python({"type": kind}) for kind in members(PreferenceLoss)
}
PAIR_LOSSES: dict[str, PairLoss] = {
    **PREFERENCES,
    "dpo_smoothed": Dpo(beta=0.3, label_smoothing=0.1),
    "dpo_average": Dpo(beta=0.5, label_smoothing=0.1, average=True),
    "simpo_near": SimPo(beta=1.7, gamma=0.4),
}


def same(value: Tensor) -> Tensor:
    """The sum over one rank."""
    return value


def together(run: Callable[[int, SumOver], Result], ranks: int) -> list[Result]:
    """What `run(rank, sum_over)` returns on each of the ranks whose sums are joined as a collective would.

    The ranks take turns: every round hands out the sums of what the round before brought, so each round gets one more of them right.
    """
    joined: list[Tensor] = []
    results: list[Result] = []
    for _ in range(4):
        brought: list[list[Tensor]] = [[] for _ in range(ranks)]
        results = [run(rank, partial(_join, joined, brought[rank])) for rank in range(ranks)]
        joined = [torch.stack(values).sum(0) for values in zip(*brought, strict=True)]
    assert len(joined) < 4
    return results


def on_ranks(ranks: int, run: Callable[[int, SumOver], Result]) -> list[Result]:
    """What `run(rank, sum_over)` returns on threads whose sums are joined; a rank that sums too often or too rarely fails the test."""
    barrier, brought, results = Barrier(ranks, timeout=60), [torch.zeros(())] * ranks, Queue[tuple[int, Result]]()

    def work(rank: int) -> None:
        def sum_over(value: Tensor) -> Tensor:
            brought[rank] = value
            barrier.wait()
            total = torch.stack(brought).sum(0)
            barrier.wait()
            return total

        results.put((rank, run(rank, sum_over)))

    threads = [Thread(target=work, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    found = dict(results.get_nowait() for _ in range(ranks))
    return [found[rank] for rank in range(ranks)]


def _join(joined: list[Tensor], mine: list[Tensor], value: Tensor) -> Tensor:
    mine.append(value)
    return joined[len(mine) - 1] if joined else value


def ragged(seed: int, lengths: list[int], spread: float = 0.4) -> tuple[Batch, Tensor, Tensor]:
    """A float64 batch in shuffled order of entries, its log-probs and entropies; garbage wherever there is no loss token.

    Responses of the given lengths behind prompts of 1 to 4 tokens, with holes (tool output) where they are longer than 2, and one without
    any loss token. `spread`: standard deviation of lp - old and lp - ref.
    """
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    samples = []
    for length in [*lengths, 3]:
        prompt = int(rng.integers(1, 5))
        samples.append(Sample(rng.integers(3, 50, prompt + length).astype(np.int32), prompt, np.zeros(length, np.float32), "stop"))
    batch = pack(samples)
    keep_T = (torch.rand(len(batch), generator=generator) > 0.15) | (batch.spread(batch.count_N) <= 2)
    mask_T = batch.mask_T & keep_T & (batch.seq_T < len(lengths))
    for n in range(len(lengths)):  # never all holes
        mask_T[(batch.mask_T & (batch.seq_T == n)).nonzero()[0]] = True
    batch = replace(batch, mask_T=mask_T, count_N=torch.bincount(batch.seq_T[mask_T], minlength=len(samples)))

    def spoilt(value_T: Tensor) -> Tensor:
        garbage = torch.tensor([torch.nan, torch.inf, -torch.inf, 7.0, -7.0], dtype=torch.float64)
        return torch.where(mask_T, value_T, garbage[torch.randint(5, (len(batch),), generator=generator)])

    def drawn(scale: float, mean: Tensor | float = 0.0) -> Tensor:
        return spoilt(mean + scale * torch.randn(len(batch), generator=generator, dtype=torch.float64))

    def number(values_N: Tensor) -> Tensor:
        return spoilt(batch.spread(values_N))

    logp_T = spoilt(-3 * torch.rand(len(batch), generator=generator, dtype=torch.float64))
    advantage_N = torch.randn(len(samples), generator=generator, dtype=torch.float64)
    advantage_N[0] = 0.0
    old_T = drawn(spread, logp_T)
    batch = batch.with_extra(
        old_logp=old_T,
        ref_logp=drawn(spread, logp_T),
        rollout_logp=drawn(0.08, old_T),
        advantage=number(advantage_N),
        reward=number((torch.rand(len(samples), generator=generator) > 0.5).double()),
        value=drawn(0.5),
        logp=logp_T,
        lot=torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed)),
    )
    batch = batch.with_extra(**{"return": drawn(0.5, batch.extra_T["value"])})
    order_T = torch.randperm(len(batch), generator=generator)
    entropy_T = drawn(1.0).abs()
    return batch.take(order_T), logp_T[order_T], entropy_T[order_T]


def weighted(algorithm: PolicyAlgorithm, batch: Batch) -> Batch:
    """The global batch with the weights of its loss tokens, and those of the correction."""
    reward_N = torch.zeros(len(batch.length_N), dtype=torch.float64)
    reward_N[batch.seq_T[batch.mask_T]] = batch.extra_T["reward"][batch.mask_T]
    weights = {"weight": algorithm.weights(batch.count_N), "positive_weight": algorithm.positive_weights(batch.count_N, reward_N)}
    batch = batch.with_extra(
        **{name: torch.where(batch.mask_T, batch.spread(value), 0.0) for name, value in weights.items() if value is not None}
    )
    return batch.with_extra(**corrected(algorithm, batch, same), **selected(algorithm, batch, same))


def selected(algorithm: PolicyAlgorithm, batch: Batch, sum_over: SumOver) -> dict[str, Tensor]:
    """What the ranks add for an algorithm that selects tokens, as `corrected`."""
    return {"chosen": algorithm.selection(batch.extra_T["logp"], batch, sum_over)} if algorithm.selects else {}


def corrected(algorithm: PolicyAlgorithm, batch: Batch, sum_over: SumOver) -> dict[str, Tensor]:
    """What the ranks add for the correction: to the sequences of which `batch` holds the entries; `sum_over` joins the others'."""
    if algorithm.correction is None:
        return {}
    from megarl.ranks.assemble import corrections  # and with it Ray, which `tests.gpu` does without

    members = list(range(len(batch.length_N)))
    everybody = torch.ones(len(members), dtype=torch.bool)
    return corrections(algorithm, algorithm.correction, batch, members, [members], everybody, sum_over)


def cast(batch: Batch, dtype: torch.dtype) -> Batch:
    """The batch with every floating tensor in the given type."""
    return batch.with_extra(**{name: value.to(dtype) for name, value in batch.extra_T.items() if value.is_floating_point()})


def zigzag(length: int, rank: int, ranks: int) -> list[int]:
    """Positions of a sequence that a context-parallel rank holds: its chunk from the front and its mirror from the back."""
    size = -(-length // (2 * ranks))
    chunks = [range(rank * size, (rank + 1) * size), range((2 * ranks - 1 - rank) * size, (2 * ranks - rank) * size)]
    return [position for chunk in chunks for position in chunk if position < length]


def contiguous(length: int, rank: int, ranks: int) -> list[int]:
    """Positions of a sequence that a rank holds where it is cut into equal pieces."""
    size = -(-length // ranks)
    return list(range(rank * size, min((rank + 1) * size, length)))
